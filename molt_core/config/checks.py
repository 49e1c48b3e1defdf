"""Combinations of options that cannot work, found before anything starts. Needs no files and no processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from molt_core.config.idle import idle_problems
from molt_core.config.kl import KlPlan, kl_problems
from molt_core.config.rl import AdvantageConfig, RLConfig
from molt_core.config.sft import SFTConfig
from molt_core.config.shared import CheckpointConfig, FsdpConfig, TrainedModelConfig
from molt_core.errors import ConfigError


class EstimatorNeeds(Protocol):
    """What the checks read of an estimator's ``Needs``."""

    @property
    def fewest(self) -> int: ...
    @property
    def token_kl(self) -> bool: ...
    @property
    def reference(self) -> bool: ...
    @property
    def values(self) -> bool: ...
    @property
    def max_samples(self) -> int | None: ...
    @property
    def single_step(self) -> bool: ...
    @property
    def reward(self) -> bool: ...


MAX_BINARY_KL = 13.8
"""The most that a token can have, to one decimal: its probabilities are clamped to [1e-6, 1 - 1e-6]."""


def check_rl(config: RLConfig, estimator_needs: EstimatorNeeds, *, single_step_loss: bool = False) -> None:
    """Raise one ConfigError that lists every conflict and what to change, or return.

    ``single_step_loss``: the loss is for one optimizer step per batch.
    """
    _refuse(
        [
            *_estimator(config, estimator_needs),
            *kl_problems(config, estimator_needs),
            *idle_problems(config, estimator_needs),
            *_batches(config),
            *_policy_lag(config, estimator_needs),
            *(_single_step_loss(config) if single_step_loss else ()),
            *_correction(config),
            *_rewards(config),
            *_filtering(config),
            *_sampling(config),
            *_lengths(config),
            *_ranges(config),
            *_evaluation(config),
            *_checkpoints(config.ckpt),
            *_not_yet(config.fsdp),
        ]
    )


def check_sft(config: SFTConfig) -> None:
    """The same for supervised fine-tuning."""
    _refuse([*_checkpoints(config.ckpt), *_not_yet(config.fsdp)])


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError("; ".join(problems))


def _estimator(config: RLConfig, needs: EstimatorNeeds) -> Iterator[str]:
    name, samples = config.algo.advantage.estimator, config.rollout.n_samples_per_prompt
    if samples < needs.fewest:
        yield (
            f"estimator {name} compares rollouts of one prompt and needs at least {needs.fewest}: "
            f"set --rollout.n_samples_per_prompt to {needs.fewest} or more, or choose another "
            "--algo.advantage.estimator"
        )
    if needs.max_samples is not None and samples > needs.max_samples:
        yield (
            f"estimator {name} takes at most {needs.max_samples} rollout per prompt, not {samples}: set "
            f"--rollout.n_samples_per_prompt {needs.max_samples}, or choose another --algo.advantage.estimator"
        )
    if needs.max_samples == 1 and _rows(config) == 1:
        yield (
            f"estimator {name} compares prompts with each other, and a step has a single rollout: set "
            "--rollout.batch_size to 2 or more"
        )
    if needs.single_step and _several_steps(config):
        yield (
            f"estimator {name} takes one optimizer step per batch: leave --train.batch_size out and set "
            "--train.max_epochs 1, or choose another --algo.advantage.estimator"
        )


def _rows(config: RLConfig) -> int:
    """Rollouts per step."""
    return config.rollout.batch_size * config.rollout.n_samples_per_prompt


def _several_steps(config: RLConfig) -> bool:
    """Whether a batch is trained in more than one optimizer step."""
    return (config.train.batch_size or _rows(config)) < _rows(config) or config.train.max_epochs > 1


def _batches(config: RLConfig) -> Iterator[str]:
    rows, window = _rows(config), config.train.batch_size or _rows(config)
    if rows % window:
        divisors = [n for n in range(1, rows + 1) if rows % n == 0]
        near = sorted({max(n for n in divisors if n < window), min((n for n in divisors if n > window), default=rows)})
        yield (
            f"--train.batch_size {window} does not divide the {rows} rollouts of a step (--rollout.batch_size x "
            f"--rollout.n_samples_per_prompt): set it to {' or '.join(map(str, near))}, or leave it out for all"
        )
    in_flight = config.rollout.vllm_generate_batch_size
    if in_flight is not None and in_flight < config.rollout.batch_size:
        yield (
            f"--rollout.vllm_generate_batch_size {in_flight} is less than a step's {config.rollout.batch_size} groups: "
            "set it to --rollout.batch_size or more, or leave it out"
        )


def _policy_lag(config: RLConfig, needs: EstimatorNeeds) -> Iterator[str]:
    """Off-policy data without a correction is refused; so is what contradicts the strictly on-policy mode."""
    train, kl = config.train, config.algo.kl
    if config.algo.advantage.is_correction_level == "off":
        fix = "set --algo.advantage.is_correction_level token"
        if not train.force_sync_mode:
            yield f"asynchronous rollouts are off-policy and need a correction: {fix}, or --train.force_sync_mode"
        if _several_steps(config):
            yield (
                f"several optimizer steps per batch are off-policy and need a correction: {fix}, "
                "or leave --train.batch_size out and set --train.max_epochs 1"
            )
    if not train.force_sync_mode:
        return
    if KlPlan.of(config, needs).use == "loss" and kl.ref == "rollout" and not _several_steps(config):
        yield (
            "with --train.force_sync_mode and one optimizer step per batch the trained policy is the one that sampled, "
            "so a KL to it would have no effect: set --algo.kl.ref reference, or --algo.kl.init_coef 0"
        )
    if train.async_queue_size > 1:
        yield (
            "--train.force_sync_mode never runs ahead: set --train.async_queue_size 1, or --no-train.force_sync_mode"
        )
    if train.max_staleness:
        yield "--train.force_sync_mode has a staleness of 0: leave --train.max_staleness out"
    in_flight = config.rollout.vllm_generate_batch_size
    if in_flight is not None and in_flight > config.rollout.batch_size:
        yield (
            "--train.force_sync_mode keeps nothing in flight across a refit: "
            "set --rollout.vllm_generate_batch_size to --rollout.batch_size, or leave it out"
        )


def _single_step_loss(config: RLConfig) -> Iterator[str]:
    if _several_steps(config):
        yield (
            f"loss {config.actor.loss_mode} does not correct for the optimizer steps of a batch before it: leave "
            "--train.batch_size out and set --train.max_epochs 1, or choose another --actor.loss_mode"
        )


def _correction(config: RLConfig) -> Iterator[str]:
    advantage = config.algo.advantage
    mode, gating, band = (
        advantage.is_correction_mode,
        advantage.is_correction_gating,
        advantage.is_correction_threshold,
    )
    low, high = band
    if advantage.is_correction_level == "off":
        return
    if not low < high:
        yield f"--algo.advantage.is_correction_threshold {low} {high} is an empty band: LOW must be less than HIGH"
    elif gating != "ratio":
        yield from _gate(gating, mode, low, high)
    elif advantage.is_correction_level in ("seq", "geo") and mode != "mask":
        yield (
            f"correction level {advantage.is_correction_level} works on whole sequences, which can only be masked: "
            "set --algo.advantage.is_correction_mode mask"
        )
    elif not low <= 1 <= high:
        yield (
            f"--algo.advantage.is_correction_threshold {low} {high} leaves out 1, the ratio of an unchanged policy: "
            "set LOW to 1 or less and HIGH to 1 or more"
        )
    elif mode == "trunc" and low != 0 and band != AdvantageConfig().is_correction_threshold:
        yield (
            f"mode trunc has no lower bound, so {low} would have no effect: set "
            f"--algo.advantage.is_correction_threshold 0 {high}, or --algo.advantage.is_correction_mode clip"
        )


def _gate(gating: str, mode: str, low: float, high: float) -> Iterator[str]:
    if mode != "mask":
        yield f"the gating {gating} masks whole sequences: set --algo.advantage.is_correction_mode mask, not {mode}"
    if low != 0:
        yield (
            f"the gating {gating} has no lower bound: set --algo.advantage.is_correction_threshold 0 {high}, "
            f"where {high} is the largest divergence"
        )
    most = {"tv": 1, "binary_kl": MAX_BINARY_KL}[gating]
    if high >= most:
        yield f"{gating} is at most {most}, so {high} admits everything: lower --algo.advantage.is_correction_threshold"


def _rewards(config: RLConfig) -> Iterator[str]:
    reward = config.reward
    low, high = reward.clip_range
    if not low < high:
        yield f"--reward.clip_range {low} {high} leaves no rewards: LOW must be less than HIGH"
    if (reward.overlong_max is None) != (reward.overlong_buffer is None):
        yield "a penalty on length needs both --reward.overlong_max and --reward.overlong_buffer: give the other too"
    elif reward.overlong_max is not None and reward.overlong_buffer is not None:
        longest = _longest_rollout(config)
        if reward.overlong_max > longest:
            yield (
                f"--reward.overlong_max {reward.overlong_max} is more than the {longest} tokens that a rollout can "
                "sample: lower it, or raise --data.max_len, --rollout.max_new_tokens or --env.max_turns"
            )
        if reward.overlong_buffer > reward.overlong_max:
            yield (
                f"--reward.overlong_buffer {reward.overlong_buffer} is more than --reward.overlong_max "
                f"{reward.overlong_max}: lower it"
            )
        if reward.stop_properly < 1:
            yield (
                "the penalty on length and --reward.stop_properly both punish the same rollouts: "
                "leave --reward.overlong_max and --reward.overlong_buffer out, or set --reward.stop_properly 1"
            )


def _longest_rollout(config: RLConfig) -> int:
    """The most tokens that a rollout can sample: what the context has after one token of a prompt, turn by turn."""
    turns = config.env.max_turns * (config.rollout.max_new_tokens or config.data.max_len)
    return min(config.data.max_len - 1, turns)


def _filtering(config: RLConfig) -> Iterator[str]:
    algo = config.algo
    if algo.dynamic_filtering_enable and config.rollout.n_samples_per_prompt < 2:
        yield (
            "dynamic filtering drops groups that do not vary, and a group of one never does: "
            "set --rollout.n_samples_per_prompt to 2 or more, or --no-algo.dynamic_filtering_enable"
        )
    low, high = algo.dynamic_filtering_range or (0, 1)
    if not low < high:
        yield f"--algo.dynamic_filtering_range {low} {high} keeps no group: LOW must be less than HIGH"


def _sampling(config: RLConfig) -> Iterator[str]:
    """A cut-off distribution has log-probs that the trainer cannot reproduce."""
    if config.rollout.top_p != 1.0:
        yield f"training cannot follow nucleus sampling: set --rollout.top_p 1, not {config.rollout.top_p}"
    if config.rollout.top_k != -1:
        yield f"training cannot follow top-k sampling: set --rollout.top_k -1, not {config.rollout.top_k}"


def _lengths(config: RLConfig) -> Iterator[str]:
    limit = config.data.max_len
    for name, value in {
        "data.max_prompt_len": config.data.max_prompt_len,
        "rollout.max_new_tokens": config.rollout.max_new_tokens,
        "eval.max_new_tokens": config.eval.max_new_tokens,
    }.items():
        if value is not None and value >= limit:
            yield f"--{name} {value} leaves no room in a context of {limit}: lower it, or raise --data.max_len"
    if limit < 2:
        yield "--data.max_len must be at least 2: a prompt token and a sampled one"


def _ranges(config: RLConfig) -> Iterator[str]:
    yield from _betas("actor", config.actor)
    yield from _betas("critic", config.critic)
    short = {"eps_clip_low_high": config.actor.eps_clip_low_high, "dual_clip": config.actor.dual_clip}
    for name, value in short.items():
        if value is not None and name in config.actor.loss_args:
            yield f"--actor.{name} and --actor.loss_args.{name} are the same option: give one of them"


def _betas(section: str, config: TrainedModelConfig) -> Iterator[str]:
    for beta in config.adam.betas:
        if not 0 <= beta < 1:
            yield f"--{section}.adam.betas {beta} is not in [0, 1)"


def _evaluation(config: RLConfig) -> Iterator[str]:
    steps = config.eval.steps
    if steps == 0 or steps < -1:
        yield f"--eval.steps {steps}: give 1 or more, or -1 for never"


def _checkpoints(config: CheckpointConfig) -> Iterator[str]:
    if config.save_steps == 0 or config.save_steps < -1:
        yield f"--ckpt.save_steps {config.save_steps}: give 1 or more, or -1 for never"


def _not_yet(config: FsdpConfig) -> Iterator[str]:
    sizes = {"tensor": config.tp_size, "context": config.cp_size, "expert": config.ep_size}
    for name, size in sizes.items():
        if size > 1:
            yield f"{name} parallelism is not yet available: set --fsdp.{name[0]}p_size 1"
