"""Training ranks as real Ray actors with AutoModel and FSDP2 on gloo: one rank and two give the same numbers."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from molt_core.config.sft import SftTrainConfig
from molt_core.config.shared import AdamConfig, FsdpConfig, ModelConfig
from molt_core.contract import Rollout, RolloutStatus, Segment, StoredRollout, Turn
from molt_core.errors import ConfigError
from molt_core.testing.tiny import make_tiny_checkpoint
from molt_core.training.group import TrainGroup, TrainingError
from molt_core.training.rows import ObjectiveSpec, TrainRow, resolve_segments
from molt_core.training.sft import run_sft

pytestmark = pytest.mark.integration

TEMPERATURE = 0.7
POLICY = ObjectiveSpec(loss="ppo", is_level="token", is_mode="trunc", is_threshold=(0.0, 5.0), entropy_coef=0.01)


@dataclass(frozen=True)
class Groups:
    """Started once for the module. ``initial`` is the state of ``one`` before any update."""

    one: TrainGroup
    two: TrainGroup
    sft: TrainGroup
    checkpoint: Path
    untied: Path
    initial: Path


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    import ray

    tmp = tmp_path_factory.mktemp("training")
    checkpoint = make_tiny_checkpoint(tmp / "tied", layers=2)
    untied = untie(checkpoint, tmp / "untied")
    ray.init(address="local", include_dashboard=False, num_cpus=1, _node_ip_address="127.0.0.1")

    def start(path: Path, ranks: int, objective: ObjectiveSpec, temperature: float) -> TrainGroup:
        # A large eps, because AdamW's first step is lr x g / (|g| + eps): rounding must not count where g is about 0.
        model = ModelConfig(
            model_name_or_path=str(path),
            num_gpus_per_node=ranks,
            adam=AdamConfig(lr=1e-3, eps=1e-4),
            lr_scheduler="linear",
            lr_warmup_ratio=0.0,
        )
        return TrainGroup.start(
            model,
            FsdpConfig(),
            device="cpu",
            num_optimizer_steps=20,
            temperature=temperature,
            objective=objective,
        )

    with ThreadPoolExecutor() as pool:
        one = pool.submit(start, checkpoint, 1, POLICY, TEMPERATURE)
        two = pool.submit(start, checkpoint, 2, POLICY, TEMPERATURE)
        sft = pool.submit(start, untied, 2, ObjectiveSpec(), 1.0)
    (tmp / "initial").mkdir()
    one.result().save(tmp / "initial", {"step": 0})
    yield Groups(one.result(), two.result(), sft.result(), checkpoint, untied, tmp / "initial")
    for group in (one, two, sft):
        group.result().close()
    ray.shutdown()


def untie(checkpoint: Path, target: Path) -> Path:
    """The checkpoint with an output embedding of its own."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, target)
    weights = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    weights["lm_head.weight"] = 0.05 * torch.randn(weights["model.embed_tokens.weight"].shape, generator=generator)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text()) | {"tie_word_embeddings": False}
    (target / "config.json").write_text(json.dumps(config))
    return target


def conversation(rng: np.random.Generator, turns: int) -> Segment:
    def ids(low: int, high: int) -> list[int]:
        return rng.integers(0, 256, rng.integers(low, high)).tolist()

    return Segment.from_turns(
        [
            Turn(ids(2, 6), a, rng.uniform(-6.5, -4.5, len(a)).tolist(), [0] * len(a))
            for a in (ids(1, 9) for _ in range(turns))
        ]
    )


def make_rows(num_rollouts: int = 6) -> list[TrainRow]:
    """Rollouts of one or two segments, two per prompt; rows point into the rollout, or into Ray's store."""
    import ray

    rng = np.random.default_rng(7)
    rows = []
    for r in range(num_rollouts):
        parts = tuple(conversation(rng, 1 + r % 3) for _ in range(1 + r % 2))
        rollout = Rollout(str(r), str(r // 2), {}, parts, 1.0, RolloutStatus.COMPLETED)
        source = StoredRollout(ray.put([rollout]), 0) if r % 2 else rollout
        for s, part in enumerate(parts):
            advantage = float(rng.normal()) if s == 0 else rng.normal(size=len(part.ids) - 1).astype(np.float32)
            rows.append(TrainRow(source, s, len(part.ids), part.num_actions, advantage, r, r // 2))
    return rows


def weights_of(group: TrainGroup) -> dict[str, np.ndarray]:
    import ray

    return {name: np.array(value) for chunk in ray.get(group.weights()) for name, value in chunk}


def assert_same_weights(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], atol=1e-5, rtol=0, err_msg=name)


def transformers_logprobs(path: Path, segment: Segment, temperature: float) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.from_numpy(segment.ids).long()[None]
    with torch.no_grad():
        logp = (model(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1)
    return np.where(segment.action_mask[1:], logp.gather(-1, ids[0, 1:, None])[:, 0].numpy(), 0.0)


def test_ranks_and_micro_batches_do_not_change_loss_gradient_or_weights(groups):
    rows = make_rows()
    cuts = [
        (groups.one, {"max_tokens": 10_000}),
        (groups.one, {"max_tokens": 40}),
        (groups.one, {"micro_batch_size": 1}),
        (groups.two, {"max_tokens": 10_000}),
        (groups.two, {"max_tokens": 40}),
        (groups.two, {"micro_batch_size": 2}),
    ]
    before = weights_of(groups.one)
    results = []
    for group, cut in cuts:
        group.load(groups.initial)
        results.append((group.update([rows], **cut), weights_of(group)))
    metrics, weights = results[0]
    assert max(np.abs(weights[name] - before[name]).max() for name in weights) > 5e-4
    assert metrics["train/grad_norm"] > 0.01
    for other, other_weights in results[1:]:
        assert other.keys() == metrics.keys()
        assert other == pytest.approx(metrics, abs=1e-5, rel=1e-5)
        assert_same_weights(other_weights, weights)


@pytest.mark.parametrize("name", ["one", "two", "sft"])
def test_log_probs_of_sharded_and_padded_rows_are_transformers_own(groups, name):
    group = getattr(groups, name)
    if name != "sft":
        group.load(groups.initial)
    path, temperature = (groups.untied, 1.0) if name == "sft" else (groups.checkpoint, TEMPERATURE)
    rng = np.random.default_rng(3)
    segments = [conversation(rng, n) for n in (1, 3, 2)]
    found = group.logprobs([TrainRow.of_segment(segment) for segment in segments])
    for values, segment in zip(found, segments, strict=True):
        np.testing.assert_allclose(values, transformers_logprobs(path, segment, temperature), atol=1e-5)


def test_fewer_rows_than_ranks_train_like_on_one_rank(groups):
    rows = make_rows()[:1]
    results = []
    for group in (groups.one, groups.two):
        group.load(groups.initial)
        results.append((group.update([rows]), weights_of(group)))
    assert results[1][0] == pytest.approx(results[0][0], abs=1e-5, rel=1e-5)
    assert_same_weights(results[1][1], results[0][1])


def test_old_log_probs_are_those_before_the_first_window(groups):
    rows = make_rows()
    windows = [rows[:3], rows[3:]]
    ratios = []
    for group in (groups.one, groups.two):
        group.load(groups.initial)
        expected = group.logprobs(rows)
        metrics = group.update(windows * 2, recompute_old=True)
        assert metrics["train/optimizer_steps"] == 4
        x = np.concatenate(
            [
                (expected[i] - segment_of(row).logprobs[1:])[segment_of(row).action_mask[1:]]
                for i, row in enumerate(rows)
            ]
        )
        assert metrics["mismatch/abs_max"] == pytest.approx(np.abs(x).max(), abs=1e-5)
        assert metrics["mismatch/ratio_mean"] == pytest.approx(np.exp(x).mean(), rel=1e-5)
        assert metrics["mismatch/k3"] == pytest.approx((np.exp(x) - 1 - x).mean(), rel=1e-4)
        assert abs(metrics["train/policy_kl"]) > 1e-4
        ratios.append(metrics["train/policy_kl"])
    assert ratios[0] == pytest.approx(ratios[1], abs=1e-5)
    groups.one.load(groups.initial)
    assert groups.one.update(windows, recompute_old=False)["train/policy_kl"] == 0


def segment_of(row: TrainRow) -> Segment:
    (segment,) = resolve_segments([row])
    return segment


def test_a_run_goes_on_as_if_it_had_not_stopped_on_any_number_of_ranks(groups, tmp_path):
    rows = make_rows()
    groups.one.load(groups.initial)
    groups.one.update([rows[:4]])
    (tmp_path / "one").mkdir()
    groups.one.save(tmp_path / "one", {"step": 1, "cursor": {"position": 4}})
    expected = groups.one.update([rows[4:]])
    weights = weights_of(groups.one)
    assert expected["train/lr"] == pytest.approx(0.95e-3)  # 1 of 20 steps of a linear schedule is over

    for saved_by in ("one", "two"):
        for group in (groups.two, groups.one):
            assert group.load(tmp_path / saved_by) == {"step": 1, "cursor": {"position": 4}}
            if saved_by == "one" and group is groups.two:
                (tmp_path / "two").mkdir()
                group.save(tmp_path / "two", {"step": 1, "cursor": {"position": 4}})
            assert group.update([rows[4:]]) == pytest.approx(expected, abs=1e-5, rel=1e-5)
            assert_same_weights(weights_of(group), weights)


def test_an_export_is_a_checkpoint_like_the_one_that_training_started_from(groups, tmp_path):
    from transformers import AutoTokenizer, GenerationConfig

    groups.two.load(groups.initial)
    groups.two.update([make_rows()])
    segment = conversation(np.random.default_rng(5), 2)
    expected = groups.two.logprobs([TrainRow.of_segment(segment)])[0]
    for _ in range(2):  # the second one replaces the first
        groups.two.export_hf(tmp_path / "hf")
    np.testing.assert_allclose(transformers_logprobs(tmp_path / "hf", segment, TEMPERATURE), expected, atol=1e-5)
    started_from, exported = (AutoTokenizer.from_pretrained(path) for path in (groups.checkpoint, tmp_path / "hf"))
    messages = [{"role": "user", "content": "Grüße"}]
    assert exported.apply_chat_template(messages) == started_from.apply_chat_template(messages)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["Qwen3ForCausalLM"], "float32")
    eos = [GenerationConfig.from_pretrained(path).eos_token_id for path in (groups.checkpoint, tmp_path / "hf")]
    assert eos[0] == eos[1]
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_loss_that_is_not_finite_skips_the_step_and_leaves_the_weights(groups, name):
    group = getattr(groups, name)
    group.load(groups.initial)
    before = weights_of(group)
    huge = [TrainRow(row.source, row.segment, row.length, row.num_actions, 3e38, row.rollout) for row in make_rows()]
    metrics = group.update([huge])
    assert metrics["train/skipped_steps"] == 1
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["train/optimizer_steps"] == 0
    after = weights_of(group)
    assert all(np.array_equal(before[key], after[key]) for key in before)
    assert group.update([make_rows()])["train/skipped_steps"] == 0


def test_an_error_in_a_rank_is_one_readable_error_and_does_not_hang(groups, tmp_path):
    with pytest.raises(TrainingError, match=r"rank \d failed in load: FileNotFoundError.*training\.json"):
        groups.two.load(tmp_path)


def test_gpus_that_are_not_there_are_refused_at_once(groups):
    with pytest.raises(ConfigError, match=r"1 x 3 GPUs.*cluster has 0"):
        TrainGroup.start(
            ModelConfig(model_name_or_path=str(groups.checkpoint), num_gpus_per_node=3),
            FsdpConfig(),
            device="cuda",
            num_optimizer_steps=1,
            objective=POLICY,
        )


def test_an_unknown_loss_is_a_config_error_before_a_model_is_built(groups):
    with pytest.raises(ConfigError, match="ppoo"):
        TrainGroup.start(
            ModelConfig(model_name_or_path="/absent"),
            FsdpConfig(),
            device="cpu",
            num_optimizer_steps=1,
            objective=ObjectiveSpec(loss="ppoo"),
        )


def test_supervised_training_lowers_the_loss_and_resumes_where_it_was(groups, tmp_path):
    rng = np.random.default_rng(11)
    segments = [conversation(rng, 1) for _ in range(6)]
    config = SftTrainConfig(batch_size=3, max_epochs=4)
    losses: list[float] = []

    def on_step(step: int, metrics: dict[str, float], state: dict) -> None:
        losses.append(metrics["train/loss"])
        if step == 3:
            groups.sft.save(tmp_path, state)

    assert run_sft(segments, groups.sft, config, on_step=on_step) == 8
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.1
    weights = weights_of(groups.sft)
    assert "lm_head.weight" in weights

    resumed: list[float] = []
    state = groups.sft.load(tmp_path)
    run_sft(segments, groups.sft, config, on_step=lambda step, m, s: resumed.append(m["train/loss"]), state=state)
    assert resumed == pytest.approx(losses[3:], abs=1e-6)
    assert_same_weights(weights_of(groups.sft), weights)


def test_a_rank_that_dies_is_an_error_and_not_a_hang(groups):
    """Last, because it ends the group."""
    import ray

    ray.kill(groups.sft._workers[1])
    with pytest.raises(TrainingError, match="rank 1 died in update"):
        groups.sft.update([make_rows()])
    groups.sft.close()
    groups.sft.close()
