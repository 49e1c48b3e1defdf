"""Policy losses against numbers derived by hand, and what must change nothing."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from molt_losses.losses import Cispo, Gspo, Ppo, Reinforce
from pydantic import ValidationError

from molt_core import LossInputs
from molt_core.algorithms.aggregate import Totals, aggregate
from molt_core.algorithms.masked import masked_mean

NAN, INF = float("nan"), float("inf")


def make(cls, **options):
    return cls(cls.Config(**options))


LOSSES = [make(Ppo), make(Ppo, dual_clip=3.0), make(Gspo), make(Cispo), make(Reinforce)]
each_loss = pytest.mark.parametrize("loss", LOSSES, ids=["ppo", "dual", "gspo", "cispo", "reinforce"])


def inputs(logprobs, old, advantages, mask=None):
    logprobs = torch.tensor(logprobs, dtype=torch.float32, requires_grad=True)
    mask = torch.ones_like(logprobs).bool() if mask is None else torch.tensor(mask).bool()
    return LossInputs(logprobs, torch.tensor(old), torch.tensor(advantages), mask)


def averaged(metrics, mask):
    """Each metric over the mask, or over the rows with an action token."""
    return {k: masked_mean(v, mask if v.dim() == 2 else mask.any(-1)).item() for k, v in metrics.items()}


def from_ratios(ratios, advantages):
    return inputs([[math.log(r) - 2.0 for r in ratios]], [[-2.0] * len(ratios)], [advantages])


def test_ppo_clips_each_side_by_its_own_width():
    # Ratio * A against the clipped one: 1.5 | 1.3, 0.5 | 0.9, -0.5 | -0.9, -1.5 | -1.3
    given_ = from_ratios([1.5, 0.5, 0.5, 1.5], [1.0, 1.0, -1.0, -1.0])
    loss, metrics = make(Ppo, eps_clip_low_high=(0.1, 0.3)).token_loss(given_)
    torch.testing.assert_close(loss, torch.tensor([[-1.3, -0.5, 0.9, 1.5]]))
    assert metrics["policy_clip_ratio"].tolist() == [[1, 0, 1, 0]]
    loss.sum().backward()
    # Only unclipped tokens pull: -ratio * A.
    torch.testing.assert_close(given_.logprobs.grad, torch.tensor([[0.0, -0.5, 0.0, 1.5]]))


def test_dual_clip_bounds_bad_tokens_only():
    given_ = from_ratios([5.0, 2.0, 5.0], [-1.0, -1.0, 1.0])
    loss, metrics = make(Ppo, dual_clip=3.0).token_loss(given_)
    torch.testing.assert_close(loss, torch.tensor([[3.0, 2.0, -1.2]]))
    assert metrics["dual_clip_ratio"].tolist() == [[1, 0, 0]]
    loss.sum().backward()
    torch.testing.assert_close(given_.logprobs.grad, torch.tensor([[0.0, 2.0, 0.0]]))


GSPO_MASK = [[1, 1, 1, 0], [1, 1, 0, 0]]


@pytest.mark.parametrize("masked", [(7.0, -9.0, 3.0), (1e6, -1e6, 1e6), (NAN, NAN, NAN), (INF, -INF, INF)])
def test_gspo_uses_one_ratio_per_sequence_over_its_action_tokens(masked):
    a, b, c = masked
    given_ = inputs([[0.2, 0.4, -0.3, a], [-0.5, 0.1, b, c]], [[0.0] * 4] * 2, [[1.0] * 4, [-1.0] * 4], GSPO_MASK)
    loss, metrics = make(Gspo, eps_clip_low_high=(0.1, 0.1)).token_loss(given_)
    torch.testing.assert_close(metrics["policy_ratio"], torch.tensor([1.105171, 0.818731]))
    assert averaged(metrics, given_.mask)["policy_ratio"] == pytest.approx(0.961951, abs=1e-5)
    value = aggregate(loss, given_.mask, "seq-mean-token-mean", Totals(tokens=5, sequences=2))
    assert value.item() == pytest.approx(-0.1, abs=1e-5)
    value.backward()
    assert given_.logprobs.grad[~given_.mask].tolist() == [0.0] * 3


def test_gspo_gradient_is_the_sequence_ratio_on_every_action_token():
    given_ = inputs([[0.2, 0.4, -0.3, 7.0]], [[0.0] * 4], [[1.0] * 4], GSPO_MASK[:1])
    loss, metrics = make(Gspo, eps_clip_low_high=(0.5, 0.5)).token_loss(given_)
    # 0.4 alone would leave a narrow band, but the sequence as a whole does not.
    assert metrics["policy_clip_ratio"].sum() == 0
    loss.sum().backward()
    torch.testing.assert_close(given_.logprobs.grad, torch.tensor([[-1.105171] * 3 + [0.0]]))


def test_cispo_keeps_every_gradient_and_bounds_its_weight():
    given_ = from_ratios([0.5, 2.0, 9.0], [1.0, -2.0, 1.0])
    loss, metrics = make(Cispo, eps_clip_low_high=(0.0, 3.0)).token_loss(given_)
    logp = [math.log(r) - 2.0 for r in (0.5, 2.0, 9.0)]
    torch.testing.assert_close(loss, torch.tensor([[-0.5 * logp[0], 4.0 * logp[1], -3.0 * logp[2]]]))
    assert metrics["policy_clip_ratio"].tolist() == [[0, 0, 1]]
    loss.sum().backward()
    torch.testing.assert_close(given_.logprobs.grad, torch.tensor([[-0.5, 4.0, -3.0]]))


def test_reinforce_is_minus_advantage_times_log_prob():
    given_ = inputs([[-1.0, -3.0]], [[-9.0, -9.0]], [[2.0, -1.0]])
    loss, _ = make(Reinforce).token_loss(given_)
    assert loss.tolist() == [[2.0, -3.0]]
    loss.sum().backward()
    assert given_.logprobs.grad.tolist() == [[-2.0, 1.0]]


@each_loss
def test_on_policy_every_loss_has_the_policy_gradient(loss):
    given_ = inputs([[-1.0, -2.0, -0.5]], [[-1.0, -2.0, -0.5]], [[1.0, 1.0, 1.0]])
    loss.token_loss(given_)[0].sum().backward()
    torch.testing.assert_close(given_.logprobs.grad, torch.full((1, 3), -1.0))


@each_loss
def test_the_reported_kl_is_old_minus_new(loss):
    _, metrics = loss.token_loss(inputs([[-1.5]], [[-1.2]], [[1.0]]))
    assert metrics["policy_kl"].item() == pytest.approx(0.3)


@each_loss
@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e30, 3.0])
def test_a_masked_token_of_any_value_changes_nothing(loss, value):
    plain = inputs([[-1.0, -2.0], [-0.3, -0.4]], [[-1.1, -1.5], [-0.2, -0.4]], [[1.0, 1.0], [-1.0, -1.0]])
    wide = inputs(
        [[-1.0, -2.0, value], [-0.3, -0.4, value]],
        [[-1.1, -1.5, -value], [-0.2, -0.4, value]],
        [[1.0, 1.0, value], [-1.0, -1.0, value]],
        [[1, 1, 0]] * 2,
    )
    expected, expected_metrics = loss.token_loss(plain)
    got, metrics = loss.token_loss(wide)
    expected.sum().backward()
    got.sum().backward()
    assert got[:, :2].tolist() == expected.tolist()
    assert got[:, 2].tolist() == [0.0, 0.0]
    assert wide.logprobs.grad[:, :2].tolist() == plain.logprobs.grad.tolist()
    assert wide.logprobs.grad[:, 2].tolist() == [0.0, 0.0]
    assert averaged(metrics, wide.mask) == averaged(expected_metrics, plain.mask)


extreme = st.sampled_from([NAN, INF, -INF, 0.0, -1.0, -100.0, -1e30])


@each_loss
@given(
    st.lists(extreme, min_size=3, max_size=3),
    st.lists(extreme, min_size=3, max_size=3),
    st.lists(st.sampled_from([NAN, INF, 0.0, 1.0, -1.0]), min_size=3, max_size=3),
)
def test_loss_gradient_and_metrics_are_finite_for_any_input(loss, logprobs, old, advantages):
    given_ = inputs([logprobs], [old], [advantages])
    got, metrics = loss.token_loss(given_)
    got.sum().backward()
    assert got.isfinite().all()
    assert given_.logprobs.grad.isfinite().all()
    assert all(value.isfinite().all() for value in metrics.values())


@each_loss
def test_a_token_that_is_not_a_number_is_left_out_and_counted(loss):
    given_ = inputs([[NAN, -1.0, -1.0]], [[-1.0, -1.0, -1.0]], [[1.0, NAN, 1.0]])
    got, metrics = loss.token_loss(given_)
    got.sum().backward()
    assert metrics["nonfinite_ratio"].tolist() == [[1, 1, 0]]
    assert got[0, :2].tolist() == [0.0, 0.0]
    assert given_.logprobs.grad.tolist() == [[0.0, 0.0, -1.0]]


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (Ppo, {"dual_clip": 1.0}),
        (Ppo, {"eps_clip_low_high": (0.2, 0.0)}),
        (Gspo, {"dual_clip": 3.0}),
        (Cispo, {"eps_clip_low_high": (0.2, 0.2)}),
    ],
)
def test_options_that_cannot_work_are_refused(cls, options):
    with pytest.raises(ValidationError):
        cls.Config(**options)
