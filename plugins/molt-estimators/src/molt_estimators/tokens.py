"""Estimators that give one advantage per token.

The reward of a rollout is put on the last action token of each of its rows; a KL as reward (coefficient β, estimate
kl_t) is taken off token by token. Rows of rollouts without a score get 0 and influence no other.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from molt_core import Batch, Estimator, Needs
from molt_core.algorithms.gae import discounted_sum, gae, token_rewards
from molt_core.algorithms.masked import whiten

_CHUNK_ROWS = 64


def _scored_mask(batch: Batch) -> Tensor:
    """Action tokens of scored rollouts, (S, L) bool."""
    scored = batch.scored[batch.rollout_of_row]
    return batch.action_mask if bool(scored.all()) else batch.action_mask & scored[:, None]


def _token_rewards(batch: Batch, mask: Tensor, rows: slice) -> Tensor:
    """Rewards per token of some rows, (rows, L)."""
    kl = None if batch.token_kl is None else batch.token_kl[rows]
    return token_rewards(batch.rewards[batch.rollout_of_row[rows]], mask[rows], kl, batch.kl_coef)


class Reinforce(Estimator):
    """G_t = r_t + gamma G_{t+1} with r_t = -β kl_t plus the reward at the end, whitened. Source: arXiv 2501.03262.

    The discount runs over all tokens of a row, tool output included. Whitening: (G - μ) / σ with mean and population
    standard deviation over all action tokens; ``no_whiten`` leaves G as it is.
    """

    needs = Needs(token_kl=True, whitens=True)

    class Config(BaseModel, extra="forbid", frozen=True):
        """Options of reinforce."""

        gamma: float = Field(1.0, ge=0, le=1, description="Discount per token.")
        no_whiten: bool = Field(False, description="Leave the returns as they are.")

    def advantages(self, batch: Batch) -> Tensor:
        """One advantage per token, (S, L) float32, 0 off the mask."""
        mask = _scored_mask(batch)
        returns = torch.empty(mask.shape)
        for start in range(0, len(mask), _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            rewards = _token_rewards(batch, mask, rows)
            returns[rows] = torch.where(mask[rows], discounted_sum(rewards, self.config.gamma).float(), 0.0)
        return returns if self.config.no_whiten else whiten(returns, mask)


class Gae(Estimator):
    """Generalised advantage estimation with a critic, whitened. Source: arXiv 1506.02438.

    δ_t = r_t + gamma V_{t+1} - V_t,  A_t = δ_t + gamma lam A_{t+1} over the action tokens of a row; tool output is
    skipped without discount. After the last action V is 0 where the environment ended the episode, and the critic's
    value of the state behind it where the episode was cut off.
    """

    needs = Needs(token_kl=True, values=True, whitens=True)

    class Config(BaseModel, extra="forbid", frozen=True):
        """Options of gae."""

        gamma: float = Field(1.0, ge=0, le=1, description="Discount per action token.")
        lam: float = Field(1.0, ge=0, le=1, description="1: reward-to-go minus value; 0: one-step error.")
        no_whiten: bool = Field(False, description="Leave the advantages as they are.")

    def advantages(self, batch: Batch) -> Tensor:
        """One advantage per token, (S, L) float32, 0 off the mask."""
        return self.advantages_and_returns(batch)[0]

    def advantages_and_returns(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Advantages, and the critic's targets A_t + V_t of the advantages before whitening, (S, L) float32 each."""
        assert batch.values is not None, "gae needs the critic's values"
        mask = _scored_mask(batch)
        advantages, returns = torch.empty(mask.shape), torch.empty(mask.shape)
        for start in range(0, len(mask), _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            advantages[rows], returns[rows] = gae(
                _token_rewards(batch, mask, rows),
                batch.values[rows],
                mask[rows],
                gamma=self.config.gamma,
                lam=self.config.lam,
                bootstrap=None if batch.bootstrap is None else batch.bootstrap[rows],
            )
        return advantages if self.config.no_whiten else whiten(advantages, mask), returns


class OnPolicyDistill(Estimator):
    """A_t = -β kl_t with kl_t = log π - log π_teacher (k1) of the sampled token; the reward is ignored.

    The teacher is the reference model; it must share the tokenizer. Source: arXiv 2306.13649.
    """

    needs = Needs(token_kl=True, reference=True, reward=False)

    def advantages(self, batch: Batch) -> Tensor:
        """One advantage per token, (S, L) float32, 0 off the mask."""
        assert batch.token_kl is not None, "on_policy_distill needs the token KL against the teacher"
        return torch.where(_scored_mask(batch), -batch.kl_coef * batch.token_kl, 0.0)
