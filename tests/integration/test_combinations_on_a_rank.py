"""Every combination of options that a run may have, on a real training rank and recorded rollouts.

The rank is started once, with a small model, a reference and AutoModel's own training step. What is refused at launch
is left out, as the launch itself says.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from molt_core.batches import RolloutBatch, pad_tokens, with_advantages
from molt_core.config import RLConfig
from molt_core.config.checks import check_rl
from molt_core.config.rl import AdvantageConfig, KlConfig, RewardConfig
from molt_core.config.shared import AdamConfig, FsdpConfig, ModelConfig
from molt_core.contract import Rollout, RolloutStatus, Segment, Turn
from molt_core.errors import ConfigError
from molt_core.launch import objective_spec
from molt_core.plugins import load_plugins
from molt_core.rollout.generator import Group
from molt_core.rollout.tasks import RolloutSummary, SegmentInfo
from molt_core.testing.tiny import make_tiny_checkpoint
from molt_core.training.group import merge
from molt_core.training.packing import plan_window
from molt_core.training.rows import ObjectiveSpec, TrainRow, WindowPlan
from molt_core.training.worker import TrainWorker, WorkerSpec

pytestmark = pytest.mark.integration

PLUGINS = load_plugins()
ESTIMATORS = {name: PLUGINS.create("estimator", name) for name in PLUGINS.names("estimator")}
LOSSES = {name: PLUGINS.create("loss", name) for name in PLUGINS.names("loss")}
KL_COEF = 0.1
SMALL = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 64}
# Bands within the noise of the recorded log-probs, so that each of them drops something and keeps something.
BANDS = {
    "mask": (0.8, 1.25),
    "clip": (0.8, 1.25),
    "trunc": (0.0, 1.25),
    "seq": (0.7, 1.4),
    "geo": (0.95, 1.05),
    "binary_kl": (0.0, 3e-5),
    "tv": (0.0, 5e-4),
}


def choices(section: type, field: str) -> tuple[str, ...]:
    """The values that an option may have."""
    return section.model_fields[field].annotation.__args__


AGGREGATIONS = choices(type(RLConfig().actor), "loss_agg_mode")
LEVELS, MODES, GATINGS = (choices(AdvantageConfig, f"is_correction_{x}") for x in ("level", "mode", "gating"))
KL_FORMS = [None, *itertools.product(("k1", "k2", "k3"), choices(KlConfig, "ref"))]
Correction = tuple[str, str, str]


@dataclass(frozen=True)
class Combination:
    """``spec`` is what the launch makes of the options."""

    estimator: str
    correction: Correction
    kl: tuple[str, str] | None
    spec: ObjectiveSpec


def config_of(estimator: str, loss: str, aggregation: str, correction: Correction, kl) -> RLConfig:
    needs = ESTIMATORS[estimator].needs
    level, mode, gating = correction
    advantage = {"estimator": estimator}
    advantage |= {"is_correction_level": level, "is_correction_mode": mode, "is_correction_gating": gating}
    if level != "off":
        advantage["is_correction_threshold"] = next(BANDS[x] for x in (gating, level, mode) if x in BANDS)
    kl_section = {"init_coef": KL_COEF, "use_loss": True, "estimator": kl[0], "ref": kl[1]} if kl else {}
    return RLConfig.model_validate(
        {
            "actor": {"model_name_or_path": "model", "loss_mode": loss, "loss_agg_mode": aggregation},
            "ref": {"model_name_or_path": "teacher" if needs.reference else None},
            "algo": {"advantage": advantage, "kl": kl_section},
            "rollout": {"n_samples_per_prompt": needs.max_samples or 4},
            "train": {"force_sync_mode": level == "off"},
        }
    )


def accepted(loss: str, aggregation: str) -> Iterator[Combination]:
    """What the launch lets pass."""
    for correction in itertools.product(LEVELS, MODES, GATINGS):
        for kl, estimator in itertools.product(KL_FORMS, ESTIMATORS):
            config, needs = config_of(estimator, loss, aggregation, correction, kl), ESTIMATORS[estimator].needs
            try:
                check_rl(config, needs, single_step_loss=LOSSES[loss].single_step)
            except ConfigError:
                continue
            yield Combination(estimator, correction, kl, objective_spec(config, needs))


def recorded_segments() -> list[list[Segment]]:
    """Two prompts of three rollouts, of one or two segments of one to three turns, still without log-probs."""
    rng = np.random.default_rng(7)

    def segment(turns: int) -> Segment:
        sizes = [(int(rng.integers(1, 4)), int(rng.integers(1, 6))) for _ in range(turns)]
        return Segment.from_turns(
            [Turn(rng.integers(0, 256, p), rng.integers(0, 256, n), [0.0] * n, [0] * n) for p, n in sizes]
        )

    return [[segment(1 + (r + s) % 3) for s in range(1 + r % 2)] for r in range(6)]


def recorded(logprobs: Sequence[np.ndarray]) -> RolloutBatch:
    """The engine's log-probs are a little off the trainer's, which are given per segment, (T-1,)."""
    rng, found = np.random.default_rng(8), iter(logprobs)
    rollouts = []
    for r, segments in enumerate(recorded_segments()):
        noisy = []
        for segment in segments:
            values = np.concatenate([[0], next(found) + rng.normal(0, 0.15, len(segment.ids) - 1)])
            noisy.append(replace(segment, logprobs=np.where(segment.action_mask, values, 0).astype(np.float32)))
        reward = float(rng.normal())
        status = RolloutStatus.TRUNCATED if r == 4 else RolloutStatus.COMPLETED
        data = Rollout(str(r), str(r // 3), {}, tuple(noisy), reward, status)
        infos = tuple(map(SegmentInfo.of, noisy))
        rollouts.append(RolloutSummary(str(r), str(r // 3), reward, status, {}, 1, infos, data, 0.0))
    return RolloutBatch.from_groups([Group("0", tuple(rollouts[:3])), Group("1", tuple(rollouts[3:]))])


def planned(batch: RolloutBatch, estimator: str) -> WindowPlan:
    """One window with the estimator's advantages; token KL and values are recorded too."""
    made, seen, rows = ESTIMATORS[estimator], batch.for_estimator(RewardConfig()), batch.train_rows()
    rng = np.random.default_rng(9)
    kl, values = (
        pad_tokens([rng.normal(size=row.length - 1).astype(np.float32) for row in rows], seen.action_mask)
        for _ in range(2)
    )
    if made.needs.token_kl:
        seen = replace(seen, token_kl=kl, kl_coef=KL_COEF)
    if made.needs.values:
        seen = replace(seen, values=values)
    advantages = made.advantages(seen)
    assert advantages.abs().max() > 0
    (plan,) = plan_window(with_advantages(rows, advantages), 1, max_tokens=10_000)
    return plan


def train_each(worker: TrainWorker, steps: Sequence[tuple[ObjectiveSpec, str]], plans: dict[str, WindowPlan]):
    """On the rank: one optimizer step per entry; its metrics, and how far it moved the parameters at most."""

    def parameters() -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in worker.policy.net.model.parameters()])

    results, minimised, before = [], None, parameters()
    for spec, estimator in steps:
        if spec != minimised:
            worker.set_objective(spec)
            minimised = spec
        metrics = worker.update([plans[estimator]], [0], False, KL_COEF)
        after = parameters()
        results.append((metrics, float((after - before).abs().max())))
        before = after
    return results


@dataclass(frozen=True)
class Trainer:
    """The rank, and a window of recorded rollouts per estimator."""

    actor: object
    plans: object

    def train(self, combinations: Sequence[Combination]) -> list[tuple[dict[str, float], float]]:
        import ray

        steps = [(c.spec, c.estimator) for c in combinations]
        found = ray.get(self.actor.__ray_call__.remote(train_each, steps, self.plans))
        return [(merge([metrics]), moved) for metrics, moved in found]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    import ray

    tmp = tmp_path_factory.mktemp("combinations")
    checkpoint = make_tiny_checkpoint(tmp / "model", **SMALL)
    reference = make_tiny_checkpoint(tmp / "reference", seed=1, **SMALL)
    # AdamW without momentum moves a parameter by lr x g / (|g| + eps): only by the gradient of the step itself.
    adam = AdamConfig(lr=1e-6, betas=(0.0, 0.0), eps=1e-12)
    model = ModelConfig(model_name_or_path=str(checkpoint), adam=adam, lr_scheduler="constant", lr_warmup_ratio=0.0)
    spec = WorkerSpec(
        *(model, FsdpConfig(), "cpu", 0, 1, 1, 1.0, ObjectiveSpec(loss="ppo"), PLUGINS.spec), reference=str(reference)
    )
    ray.init(address="local", include_dashboard=False, num_cpus=1, _node_ip_address="127.0.0.1")
    actor = ray.remote(TrainWorker).options(num_cpus=0).remote(0, 1, spec)
    ray.get(actor.setup.remote(*ray.get(actor.rendezvous.remote("127.0.0.1"))))
    rows = [TrainRow.of_segment(segment) for segments in recorded_segments() for segment in segments]
    (plan,) = plan_window(rows, 1, max_tokens=10_000)
    (chunk,) = plan.micro_batches
    ((*found,),) = ray.get(actor.logprobs.remote([chunk]))
    by_row = {id(item.row): values for item, values in zip(chunk, found, strict=True)}
    batch = recorded([by_row[id(row)] for row in rows])
    yield Trainer(actor, ray.put({name: planned(batch, name) for name in ESTIMATORS}))
    ray.kill(actor)
    ray.shutdown()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_accepted_combination_trains(trainer, loss, aggregation):
    combinations = sorted(accepted(loss, aggregation), key=lambda c: (c.correction, str(c.kl)))
    corrections = {c.correction for c in combinations}
    assert [set(x) for x in zip(*corrections, strict=True)] == [set(LEVELS), set(MODES), set(GATINGS)]
    assert {(c.estimator, c.correction) for c in combinations} == set(itertools.product(ESTIMATORS, corrections))
    with_loss_kl = {(c.estimator, c.kl) for c in combinations if c.kl is not None}
    others = [name for name, estimator in ESTIMATORS.items() if not estimator.needs.reference]
    assert with_loss_kl == set(itertools.product(others, KL_FORMS[1:]))
    for combination, (metrics, moved) in zip(combinations, trainer.train(combinations), strict=True):
        assert metrics["train/skipped_steps"] == 0, combination
        assert all(np.isfinite(value) for value in metrics.values()), combination
        assert np.isfinite(metrics["train/policy_loss"]), combination
        assert metrics["train/grad_norm"] > 0, combination
        assert moved > 0, combination
        assert ("train/kl" in metrics) == (combination.kl is not None), combination
        if combination.correction[0] != "off":
            assert 0 < metrics["train/is_filter_ratio"] < 1, combination
