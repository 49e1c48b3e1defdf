"""Every estimator with every loss, aggregation and correction, on recorded rollouts and a small policy in plain torch.

The path is the trainer's own: estimator's batch, advantages, windows, micro-batches, objective. Nothing is started.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from molt_core.algorithms.aggregate import MODES, Totals
from molt_core.batches import RolloutBatch, pad_tokens, with_advantages
from molt_core.config.rl import RewardConfig
from molt_core.contract import Rollout, RolloutStatus, Segment, Turn
from molt_core.plugins import load_plugins
from molt_core.rollout.generator import Group
from molt_core.rollout.tasks import RolloutSummary, SegmentInfo
from molt_core.training.group import merge
from molt_core.training.objective import Known, Objective, Tally, add_mismatch
from molt_core.training.packing import MicroBatch, collate, plan_window
from molt_core.training.rows import ObjectiveSpec, resolve_segments

VOCAB = 16
PLUGINS = load_plugins()
ESTIMATORS = PLUGINS.names("estimator")
LOSSES = PLUGINS.names("loss")
# level, mode, threshold, gating; the bands are such that they drop some of the tokens or rows and keep others.
CORRECTIONS = {
    "off": ("off", "trunc", (0.5, 5.0), "ratio"),
    "token-mask": ("token", "mask", (0.8, 1.25), "ratio"),
    "token-clip": ("token", "clip", (0.8, 1.25), "ratio"),
    "token-trunc": ("token", "trunc", (0.8, 1.25), "ratio"),
    "seq-mask": ("seq", "mask", (0.7, 1.5), "ratio"),
    "geo-mask": ("geo", "mask", (0.95, 1.1), "ratio"),
    "gate-binary-kl": ("token", "mask", (0.0, 0.0005), "binary_kl"),
    "gate-tv": ("token", "mask", (0.0, 0.006), "tv"),
}
KLS = [None, *itertools.product(("k1", "k2", "k3"), ("reference", "rollout"))]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors are tiny here, and threads that wait for each other are slow on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class TinyPolicy(nn.Module):
    """Next-token logits from the mean of the embeddings so far: causal, and each row by itself."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Parameter(torch.randn(VOCAB, 8, generator=generator))
        self.head = nn.Parameter(torch.randn(8, VOCAB, generator=generator))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies on the next-token axis, (B, T-1) each."""
        count = torch.arange(1, ids.shape[1] + 1)[None, :, None]
        hidden = self.embed[ids].cumsum(1) / count
        logp = (hidden @ self.head).log_softmax(-1)[:, :-1]
        return logp.gather(-1, ids[:, 1:, None])[..., 0], -(logp.exp() * logp).sum(-1)


@cache
def policy(name: str) -> TinyPolicy:
    """ "old" is the policy before the update, "current" a little away from it, "reference" a little further."""
    made = TinyPolicy(0)
    with torch.no_grad():
        for parameter in made.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            parameter += {"old": 0.0, "current": 0.02, "reference": 0.1}[name] * noise
    return made


def recorded_segment(rng: np.random.Generator) -> Segment:
    """One to three turns, with tool output between them; the engine's log-probs are a little off the trainer's."""
    turns = []
    for _ in range(rng.integers(1, 4)):
        n = int(rng.integers(1, 6))
        turns.append(Turn(rng.integers(0, VOCAB, rng.integers(1, 4)), rng.integers(0, VOCAB, n), [-1.0] * n, [0] * n))
    segment = Segment.from_turns(turns)
    with torch.no_grad():
        logprobs, _ = policy("old")(torch.from_numpy(segment.ids).long()[None])
    engine = np.zeros(len(segment.ids), np.float32)
    engine[1:] = logprobs[0].numpy() + rng.normal(0, 0.15, len(engine) - 1)
    return replace(segment, logprobs=np.where(segment.action_mask, engine, 0).astype(np.float32))


def recorded_rollout(rng: np.random.Generator, name: str) -> RolloutSummary:
    segments = tuple(recorded_segment(rng) for _ in range(rng.choice([1, 1, 2])))
    status = RolloutStatus(rng.choice(["completed", "completed", "completed", "truncated", "env_error"]))
    reward = float(rng.normal()) if status.is_scored else np.nan
    data = Rollout(name, "", {}, segments, reward, status)
    return RolloutSummary(name, "", reward, status, {}, 1, tuple(map(SegmentInfo.of, segments)), data, 0.0)


@cache
def recorded() -> tuple[Group, ...]:
    """Four prompts; one has a single rollout, and one nothing but equal rewards."""
    rng = np.random.default_rng(7)
    groups = [[recorded_rollout(rng, f"{g}-{k}") for k in range(n)] for g, n in enumerate((4, 3, 1, 3))]
    groups[3] = [replace(r, reward=0.35, status=RolloutStatus.COMPLETED) for r in groups[3]]
    return tuple(Group(str(g), tuple(rollouts)) for g, rollouts in enumerate(groups))


@cache
def loaded_objective(loss: str) -> Objective:
    """Plugins are looked up once per loss, which is most of the time that an objective takes to build."""
    return Objective(ObjectiveSpec(loss=loss), PLUGINS.spec)


@dataclass(frozen=True)
class Way:
    """How a window is cut and laid out, which must not matter."""

    order: int = 0
    micro_batch_size: int | None = None
    ranks: int = 1
    padding: int = 0
    junk: float = 0.0


@dataclass(frozen=True)
class Outcome:
    loss: float
    gradient: Tensor
    metrics: dict[str, float]


def shuffled(groups: Sequence[Group], seed: int) -> list[Group]:
    """The groups and their rollouts in another order; seed 0 leaves them."""
    if not seed:
        return list(groups)
    rng = np.random.default_rng(seed)
    mixed = [groups[i] for i in rng.permutation(len(groups))]
    return [replace(g, rollouts=tuple(g.rollouts[i] for i in rng.permutation(len(g.rollouts)))) for g in mixed]


def laid_out(batch: MicroBatch, way: Way) -> MicroBatch:
    """More columns, and junk wherever the mask is false."""
    extra = (0, way.padding)
    wider = {name: nn.functional.pad(getattr(batch, name), extra) for name in ("ids", "attention", "positions", "mask")}
    mask = wider["mask"]
    for name in ("behaviour", "advantages"):
        wider[name] = torch.where(mask, nn.functional.pad(getattr(batch, name), extra), way.junk)
    return replace(batch, **wider)


def advantages_of(estimator: str, batch: RolloutBatch) -> Tensor:
    """Advantages; what only models know is made up for each segment alone."""
    made = PLUGINS.create("estimator", estimator)
    seen = batch.for_estimator(RewardConfig())

    def per_token(salt: int) -> Tensor:
        segments = [batch.rollouts[r].data.segments[s] for r, s in batch.rows]
        seeds = [int(x.ids.sum()) + 1000 * len(x.ids) + salt for x in segments]
        values = [np.random.default_rng(n).normal(size=len(x.ids) - 1) for n, x in zip(seeds, segments, strict=True)]
        return pad_tokens([x.astype(np.float32) for x in values], seen.action_mask)

    if made.needs.token_kl:
        seen = replace(seen, token_kl=per_token(1), kl_coef=0.1)
    if made.needs.values:
        seen = replace(seen, values=per_token(2))
    return made.advantages(seen)


def trained(spec: ObjectiveSpec, estimator: str, way: Way = Way()) -> Outcome:
    """One window: its loss, its gradient, its metrics over all ranks and micro-batches."""
    batch = RolloutBatch.from_groups(shuffled(recorded(), way.order))
    rows = with_advantages(batch.train_rows(), advantages_of(estimator, batch))
    objective, current = copy(loaded_objective(spec.loss)), policy("current")
    objective.spec = spec
    current.zero_grad()
    total, parts = 0.0, []
    for plan in plan_window(rows, way.ranks, max_tokens=1000, micro_batch_size=way.micro_batch_size):
        tally = Tally()
        for chunk in plan.micro_batches:
            segments = resolve_segments([item.row for item in chunk])
            raw = collate(segments, [item.row.advantage for item in chunk], [item.weight for item in chunk], 0)
            micro = laid_out(raw, way)
            scores = {name: policy(name)(micro.ids) for name in ("current", "old", "reference")}
            logprobs, entropy = (torch.where(micro.mask, x, way.junk) for x in scores["current"])
            old, reference = (torch.where(micro.mask, scores[n][0], way.junk).detach() for n in ("old", "reference"))
            totals = Totals(plan.tokens, plan.sequences, plan.prompts)
            loss = objective.loss(micro, logprobs, entropy, Known(old, reference), totals, tally, kl_coef=0.1)
            add_mismatch(tally, old, micro)
            loss.backward()
            total += loss.item()
        parts.append(tally.result())
    gradient = torch.cat([p.grad.flatten() for p in current.parameters()])
    return Outcome(total, gradient, merge(parts))


def spec_of(loss: str, mode: str, correction: str, kl: tuple[str, str] | None = None) -> ObjectiveSpec:
    level, is_mode, threshold, gating = CORRECTIONS[correction]
    return ObjectiveSpec(
        loss=loss,
        agg_mode=mode,
        agg_norm=12.0,
        entropy_coef=0.01,
        is_level=level,
        is_mode=is_mode,
        is_threshold=threshold,
        is_gating=gating,
        kl=kl[0] if kl else None,
        kl_ref=kl[1] if kl else "reference",
    )


def assert_sound(outcome: Outcome) -> None:
    assert np.isfinite(outcome.loss)
    assert outcome.gradient.isfinite().all()
    assert outcome.gradient.abs().max() > 0
    assert all(np.isfinite(value) for value in outcome.metrics.values())


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_loss_and_aggregation_trains_with_every_estimator_and_correction(estimator, correction):
    for loss, mode in itertools.product(LOSSES, MODES):
        assert_sound(trained(spec_of(loss, mode, correction), estimator))


@pytest.mark.parametrize("kl", KLS[1:])
def test_every_kl_trains_with_every_loss_and_aggregation(kl):
    for loss, mode in itertools.product(LOSSES, MODES):
        outcome = trained(spec_of(loss, mode, "token-trunc", kl), "grpo")
        assert_sound(outcome)
        without = trained(spec_of(loss, mode, "token-trunc"), "grpo")
        assert outcome.loss == pytest.approx(without.loss + 0.1 * outcome.metrics["train/kl"], abs=1e-5)


@pytest.mark.parametrize("correction", sorted(set(CORRECTIONS) - {"off"}))
def test_each_correction_drops_some_and_keeps_some(correction):
    share = trained(spec_of("ppo", "token-mean", correction), "grpo").metrics["train/is_filter_ratio"]
    assert 0 < share < 1


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(ESTIMATORS),
    st.builds(spec_of, *map(st.sampled_from, (LOSSES, MODES, sorted(CORRECTIONS), KLS))),
    st.builds(
        Way,
        order=st.integers(0, 1000),
        micro_batch_size=st.sampled_from([None, 1, 2, 5]),
        ranks=st.integers(1, 3),
        padding=st.sampled_from([0, 7]),
        junk=st.sampled_from([0.0, np.nan, np.inf, -np.inf, -1e30, 50.0]),
    ),
)
def test_order_cut_ranks_padding_and_what_the_mask_hides_change_nothing(estimator, spec, way):
    plain, other = trained(spec, estimator), trained(spec, estimator, way)
    assert other.loss == pytest.approx(plain.loss, rel=1e-5, abs=1e-5)
    torch.testing.assert_close(other.gradient, plain.gradient, rtol=1e-4, atol=1e-5)
    assert other.metrics == pytest.approx(plain.metrics, rel=1e-4, abs=1e-5)


def test_a_rollout_of_several_segments_is_as_many_sequences_and_one_prompt():
    # Losses are -A. The first prompt has a rollout of two segments (A = 1) of one token, and one of one segment (A = 7)
    # of two tokens; the second prompt has one of one token (A = 6).
    def summary(name: str, lengths: Sequence[int], reward: float) -> RolloutSummary:
        segments = tuple(Segment.from_turns([Turn([1], [2] * n, [0.0] * n, [0] * n)]) for n in lengths)
        data = Rollout(name, name, {}, segments, reward, RolloutStatus.COMPLETED)
        infos = tuple(map(SegmentInfo.of, segments))
        return RolloutSummary(name, name, reward, RolloutStatus.COMPLETED, {}, 1, infos, data, 0.0)

    batch = RolloutBatch((summary("a", [1, 1], 1.0), summary("b", [2], 7.0), summary("c", [1], 6.0)), (0, 0, 1))
    rows = with_advantages(batch.train_rows(), batch.for_estimator(RewardConfig()).rewards)
    (plan,) = plan_window(rows, 1, max_tokens=100)
    (chunk,) = plan.micro_batches
    micro = collate(
        resolve_segments([x.row for x in chunk]), [x.row.advantage for x in chunk], [x.weight for x in chunk], 0
    )
    zeros = torch.zeros(micro.mask.shape)
    totals = Totals(plan.tokens, plan.sequences, plan.prompts)
    losses = {
        mode: Objective(ObjectiveSpec(loss="ppo", agg_mode=mode, agg_norm=2.0), PLUGINS.spec)
        .loss(micro, zeros, None, Known(zeros), totals, Tally())
        .item()
        for mode in MODES
    }
    assert losses == pytest.approx(
        {
            "token-mean": -(1 + 1 + 7 + 7 + 6) / 5,
            "seq-mean-token-mean": -(1 + 1 + 7 + 6) / 4,
            "seq-mean-token-sum": -(1 + 1 + 7 + 7 + 6) / 4 / 2.0,
            "prompt-mean-token-mean": -((1 + 1 + 7 + 7) / 4 + 6) / 2,
        }
    )
