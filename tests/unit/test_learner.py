"""What the driver asks the trainer for, by the estimator's needs alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from molt_core import Estimator, Needs, RolloutStatus
from molt_core.batches import RolloutBatch, pad_tokens, with_advantages
from molt_core.config import RLConfig
from molt_core.errors import RunError
from molt_core.learner import Learner
from molt_core.rollout.tasks import RolloutSummary, SegmentInfo


class Trainer:
    """Notes what it is asked for; the KL of every action token is 2 in the first row and 5 in the others."""

    def __init__(self):
        self.calls = []
        self.metrics = {}

    def token_kl(self, rows, estimator, *, max_tokens):
        self.calls.append(("token_kl", estimator))
        return [np.full(row.length - 1, 2.0 if i == 0 else 5.0, np.float32) for i, row in enumerate(rows)]

    def values(self, rows, *, max_tokens):
        self.calls.append(("values",))
        return [np.arange(row.length, dtype=np.float32) + 10 * i for i, row in enumerate(rows)]

    def update_critic(self, windows, *, max_tokens, micro_batch_size):
        self.calls.append(("update_critic", len(windows)))
        self.critic_rows = [row for window in windows for row in window]
        return {"critic/value_loss": 0.0}

    def update(self, windows, *, max_tokens, micro_batch_size, recompute_old, kl_coef):
        self.calls.append(("update", kl_coef))
        self.rows = [row for window in windows for row in window]
        return {"train/policy_loss": 0.0, **self.metrics}


class FromKl(Estimator):
    """The KL itself, times its coefficient, as the advantage."""

    needs = Needs(token_kl=True)

    def advantages(self, batch):
        if batch.token_kl is None:
            return batch.rewards
        return torch.where(batch.action_mask, batch.token_kl * batch.kl_coef, 0.0)


class FromValues(Estimator):
    """What it sees of the critic: values as advantages, the bootstrap on every action as returns."""

    needs = Needs(values=True)

    def advantages_and_returns(self, batch):
        mask = batch.action_mask
        return torch.where(mask, batch.values, 0.0), torch.where(mask, batch.bootstrap[:, None], 0.0)


class Broken(Estimator):
    """Not finite."""

    def advantages(self, batch):
        return batch.rewards / 0


def info(length: int, start: int) -> SegmentInfo:
    return SegmentInfo(length, length - start, 0, 0, 0, ((start, length),))


def summary(
    reward: float, *segments: SegmentInfo, status: RolloutStatus = RolloutStatus.COMPLETED, terminated: bool = True
) -> RolloutSummary:
    return RolloutSummary("r", "g", reward, status, {}, 1, segments, None, 0.0, terminated=terminated)


BATCH = RolloutBatch((summary(1.0, info(4, 1)), summary(0.0, info(3, 2))), (0, 0))
"""Two rollouts: 3 actions of 4 tokens, and 1 action of 3."""


def learner(estimator=FromKl, freezing_steps: int = 0, critic_epochs: int = 1, **kl) -> tuple[Learner, Trainer]:
    config = RLConfig.model_validate(
        {
            "algo": {"kl": kl},
            "actor": {"model_name_or_path": "m", "freezing_steps": freezing_steps},
            "critic": {"max_epochs": critic_epochs},
        }
    )
    trainer = Trainer()
    return Learner(config, estimator(), trainer), trainer


def test_without_a_kl_nothing_is_asked_of_a_reference():
    one, trainer = learner()
    metrics = one.update(BATCH, 0)
    assert trainer.calls == [("update", 0.0)]
    assert [row.advantage for row in trainer.rows] == [1.0, 0.0]
    assert "train/kl_coef" not in metrics


def test_a_kl_as_a_reward_reaches_the_estimator_and_the_metrics():
    one, trainer = learner(init_coef=0.5, use_loss=False)
    metrics = one.update(BATCH, 0)
    assert trainer.calls == [("token_kl", "k1"), ("update", 0.5)]
    assert [row.advantage.tolist() for row in trainer.rows] == [[1.0, 1.0, 1.0], [0.0, 2.5]]
    assert metrics["train/kl"] == pytest.approx((3 * 2.0 + 5.0) / 4)
    assert metrics["train/kl_coef"] == 0.5


def test_a_kl_as_a_loss_is_left_to_the_trainer():
    one, trainer = learner(init_coef=0.5)
    trainer.metrics = {"train/kl": 0.25}
    metrics = one.update(BATCH, 0)
    assert trainer.calls == [("update", 0.5)]
    assert metrics["train/kl"] == 0.25


def test_an_adaptive_coefficient_moves_after_each_step_and_is_part_of_the_state():
    # The KL is far above the target: the error is clipped to 0.2, and the 2 rollouts are a tenth of the horizon.
    one, trainer = learner(init_coef=0.5, target=0.01, horizon=20)
    trainer.metrics = {"train/kl": 1.0}
    assert one.update(BATCH, 0)["train/kl_coef"] == 0.5
    assert one.update(BATCH, 0)["train/kl_coef"] == pytest.approx(0.5 * 1.02)
    resumed, trainer = learner(init_coef=0.5, target=0.01, horizon=20)
    resumed.load(json.loads(json.dumps(one.state())))
    trainer.metrics = {"train/kl": 1.0}
    assert resumed.update(BATCH, 0)["train/kl_coef"] == pytest.approx(0.5 * 1.02**2)


def test_an_adaptive_coefficient_starts_as_configured_where_the_run_had_no_kl_before():
    before, _ = learner()
    resumed, _ = learner(init_coef=0.5, target=0.01, horizon=20)
    resumed.load(before.state())
    assert resumed.update(BATCH, 0)["train/kl_coef"] == 0.5


def test_an_adaptive_coefficient_stays_while_the_actor_is_frozen():
    # Then it moves by 0.2 x 2 rollouts / 20.
    one, _ = learner(freezing_steps=2, init_coef=0.5, use_loss=False, target=0.01, horizon=20)
    seen = [one.update(BATCH, step)["train/kl_coef"] for step in range(4)]
    assert seen == pytest.approx([0.5, 0.5, 0.5, 0.5 * 1.02])


def test_a_fixed_coefficient_is_that_of_the_configuration_also_after_a_resume():
    one, _ = learner(init_coef=0.5)
    other, _ = learner(init_coef=0.1)
    other.load(one.state())
    assert other.update(BATCH, 0)["train/kl_coef"] == 0.1


def test_an_estimator_that_needs_values_gets_them_and_the_critic_learns_its_returns():
    one, trainer = learner(FromValues, critic_epochs=3)
    metrics = one.update(BATCH, 0)
    assert trainer.calls == [("values",), ("update_critic", 3), ("update", 0.0)]
    assert [row.advantage.tolist() for row in trainer.rows] == [[0.0, 1.0, 2.0], [0.0, 11.0]]
    assert [row.advantage.tolist() for row in trainer.critic_rows[:2]] == [[0.0, 0.0, 0.0], [0.0, 0.0]]
    assert metrics["critic/value_mean"] == pytest.approx((0 + 1 + 2 + 11) / 4)
    assert metrics["critic/return_mean"] == 0.0


def test_an_episode_goes_on_behind_its_last_row_exactly_where_it_was_cut_and_not_ended():
    cut = RolloutStatus.TRUNCATED
    batch = RolloutBatch(
        (
            summary(1.0, info(4, 1), info(3, 2), status=cut, terminated=False),
            summary(1.0, info(4, 1), status=cut, terminated=True),
            summary(1.0, info(3, 1), terminated=True),
        ),
        (0, 0, 0),
    )
    assert batch.cut_rows().tolist() == [False, True, False, False]
    empty = SegmentInfo(4, 0, 0, 0, 0, ())
    behind = RolloutBatch((summary(1.0, info(4, 1), info(3, 2), empty, status=cut, terminated=False),), (0,))
    assert behind.cut_rows().tolist() == [False, True]
    one, trainer = learner(FromValues)
    one.update(batch, 0)
    # The values of row i are 10 i, 10 i + 1, ...: the last state of row 1 has 12.
    assert [row.advantage.tolist() for row in trainer.critic_rows] == [[0.0] * 3, [0.0, 12.0], [0.0] * 3, [0.0] * 2]


def test_while_the_actor_is_frozen_only_the_critic_trains_and_the_version_stays():
    one, trainer = learner(FromValues, freezing_steps=2)
    for step in range(3):
        one.update(BATCH, step)
    assert [call[0] for call in trainer.calls] == ["values", "update_critic"] * 3 + ["update"]
    assert [one.version(step) for step in range(5)] == [0, 0, 0, 1, 2]


def test_the_variance_that_the_critic_explains():
    class Returns(FromValues):
        def advantages_and_returns(self, batch):
            returns = torch.where(batch.action_mask, torch.tensor([[0.0, 2.0, 4.0], [0.0, 4.0, 0.0]]), 0.0)
            return returns, returns

    # V = 0, 1, 2, 11 and R = 0, 2, 4, 4: R - V = 0, 1, 2, -7 has the variance 12.5, and R has 2.75.
    metrics = learner(Returns)[0].update(BATCH, 0)
    assert metrics["critic/explained_variance"] == pytest.approx(1 - 12.5 / 2.75)


def test_advantages_that_are_not_finite_stop_the_run():
    one, _ = learner(Broken)
    with pytest.raises(RunError, match="Broken returned advantages that are not finite"):
        one.update(BATCH, 0)


def test_advantages_are_cut_to_the_rows_and_values_are_padded_to_the_batch():
    rows = BATCH.train_rows()
    cut = with_advantages(rows, torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    assert [row.advantage.tolist() for row in cut] == [[1.0, 2.0, 3.0], [4.0, 5.0]]
    assert [row.advantage for row in with_advantages(rows, torch.tensor([0.5, -0.5]))] == [0.5, -0.5]
    padded = pad_tokens([np.ones(3), np.ones(2)], torch.zeros(2, 3).bool())
    assert padded.tolist() == [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]


@pytest.mark.parametrize(("mode", "share", "warns"), [("mask", 1.0, True), ("mask", 0.9, False), ("trunc", 1.0, False)])
def test_a_step_that_the_correction_masks_is_warned_of(mode, share, warns, caplog):
    config = RLConfig.model_validate({"algo": {"advantage": {"is_correction_mode": mode}}})
    trainer = Trainer()
    trainer.metrics = {"train/is_filter_ratio": share}
    Learner(config, FromKl(), trainer).update(BATCH, 0)
    assert ("widen --algo.advantage.is_correction_threshold" in caplog.text) == warns
