"""Scores of the sampling distribution: logits [2, 1, 0] at temperature 0.5 are [4, 2, 0], normalised after division.

log-probs: 4 - ln(e^4 + e^2 + 1) = -0.142932, then 2 and 4 less. Wrong are 2 - ln(e^2 + e + 1) = -0.407606, which has no
temperature, and that divided by 0.5, -0.815212, which is no log-prob of any distribution.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from molt_core.algorithms.correction import correct
from molt_core.contract import Segment, Turn
from molt_core.training.mesh import Rank
from molt_core.training.packing import MicroBatch, collate
from molt_core.training.policy import Policy

LOGPROBS = [-0.142932, -2.142932, -4.142932]
WITHOUT_TEMPERATURE, DIVIDED_AFTERWARDS = -0.407606, -0.815212


class ThreeLogits(nn.Module):
    """Gives the logits [2, 1, 0] at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 3, bias=False)
        self.head.weight.data = torch.tensor([[2.0], [1.0], [0.0]])

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, **_: object) -> Tensor:
        return self.head(torch.ones(*input_ids.shape, 1))


def sampled(ids: list[int], logprobs: list[float]) -> MicroBatch:
    """One row: a prompt of two tokens and an action."""
    turn = Turn(np.array([2, 1]), np.array(ids), logprobs, [0] * len(ids))
    return collate([Segment.from_turns([turn])], [1.0], [1.0], 0)


@pytest.fixture
def policy():
    return Policy(ThreeLogits(), Rank(0, 1, torch.device("cpu"), torch.float32), temperature=0.5)


def test_every_token_has_its_log_prob_after_temperature(policy):
    batch = sampled([0, 1, 2], LOGPROBS)
    scores, entropy = policy.score(batch, entropy=True)
    assert scores[0].tolist() == pytest.approx([0.0, *LOGPROBS], abs=1e-5)
    assert policy.logprobs(batch).tolist() == scores.tolist()
    # -Σ p log p with p = 0.866814, 0.117310, 0.015876
    assert entropy is not None
    assert entropy[0].tolist() == pytest.approx([0.0, *[0.441058] * 3], abs=1e-5)


def test_the_gradient_is_that_of_the_scaled_logits(policy):
    policy.score(sampled([0], LOGPROBS[:1]))[0].sum().backward()
    # (1 - p, -p, -p) / 0.5
    expected = [0.266372, -0.234620, -0.031752]
    assert policy.model.head.weight.grad[:, 0].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("engine", "ratio"), [(LOGPROBS[0], 1.0), (WITHOUT_TEMPERATURE, 1.3030), (DIVIDED_AFTERWARDS, 1.9587)]
)
def test_an_unchanged_policy_has_ratio_one_to_the_sampling_distribution_and_to_nothing_else(policy, engine, ratio):
    batch = sampled([0], [engine])
    trainer = policy.logprobs(batch)
    weights, metrics = correct(trainer, batch.behaviour, batch.mask, "token", "trunc", (0.0, 5.0))
    assert weights[0, -1].item() == pytest.approx(ratio, abs=1e-4)
    assert metrics["vllm_kl"][0, -1].item() == pytest.approx(engine - LOGPROBS[0], abs=1e-5)


@pytest.mark.parametrize("wrong", [WITHOUT_TEMPERATURE, DIVIDED_AFTERWARDS])
def test_the_trainer_does_not_score_with_another_temperature_or_divide_log_probs(policy, wrong):
    score = policy.logprobs(sampled([0], [wrong]))[0, -1].item()
    assert abs(score - wrong) > 0.2
    assert score == pytest.approx(LOGPROBS[0], abs=1e-5)
