"""Every estimator learns: a table of logits, sampled and trained as a policy is, gets more reward."""

import pytest
import torch

from molt_core import Batch, LossInputs
from molt_core.algorithms.aggregate import Totals, aggregate
from molt_core.plugins import load_plugins

PLUGINS = load_plugins()
ESTIMATORS = [name for name in PLUGINS.names("estimator") if PLUGINS.resolve("estimator", name).needs.reward]
PROMPTS, TOKENS, VOCAB = 4, 3, 8
STEPS, ROLLOUTS = 60, 32
TARGETS = torch.tensor([[1, 2, 3], [3, 3, 0], [7, 5, 6], [0, 4, 1]])
"""What the reply to each prompt should be; the reward is the share of its tokens that are right."""


class Table:
    """A policy with one distribution per prompt and position, and a critic with one value for each."""

    def __init__(self):
        self.logits = torch.zeros(PROMPTS, TOKENS, VOCAB, requires_grad=True)
        self.values = torch.zeros(PROMPTS, TOKENS, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.logits, self.values], lr=0.1)

    def sample(self, prompts, generator):
        return torch.multinomial(self.logits[prompts].softmax(-1).flatten(0, 1), 1, generator=generator).view(
            -1, TOKENS
        )

    def logprobs(self, prompts, ids):
        return self.logits.log_softmax(-1)[prompts].gather(-1, ids[..., None])[..., 0]


def batch_of(prompts, ids, per_prompt, **more):
    rows = len(ids)
    return Batch(
        rewards=(ids == TARGETS[prompts]).float().mean(-1),
        groups=torch.arange(rows) // per_prompt,
        rollout_of_row=torch.arange(rows),
        action_mask=torch.ones(rows, TOKENS).bool(),
        truncated=torch.zeros(rows).bool(),
        **more,
    )


def train(name):
    """Mean reward of every step."""
    estimator, loss = PLUGINS.create("estimator", name), PLUGINS.create("loss", "ppo")
    table, generator, rewards = Table(), torch.Generator().manual_seed(0), []
    per_prompt = min(8, estimator.needs.max_samples or 8)
    prompts = (torch.arange(ROLLOUTS) // per_prompt) % PROMPTS
    for _ in range(STEPS):
        with torch.no_grad():
            ids = table.sample(prompts, generator)
            old = table.logprobs(prompts, ids)
        if estimator.needs.values:
            batch = batch_of(prompts, ids, per_prompt, values=table.values.detach()[prompts])
            advantages, returns = estimator.advantages_and_returns(batch)
            critic = (table.values[prompts] - returns).square().mean()
        else:
            batch = batch_of(prompts, ids, per_prompt)
            advantages, critic = estimator.advantages(batch), torch.zeros(())
        if advantages.dim() == 1:
            advantages = advantages[batch.rollout_of_row][:, None].expand(-1, TOKENS)
        inputs = LossInputs(table.logprobs(prompts, ids), old, advantages, batch.action_mask)
        token_loss, _ = loss.token_loss(inputs)
        policy = aggregate(token_loss, batch.action_mask, "token-mean", Totals(ids.numel(), len(ids)))
        table.optimizer.zero_grad()
        (policy + critic).backward()
        table.optimizer.step()
        rewards.append(float(batch.rewards.mean()))
    return rewards


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_reward_rises_from_chance_to_nearly_everything(name):
    rewards = train(name)
    assert sum(rewards[:5]) / 5 < 0.35  # chance is 1/8
    assert sum(rewards[-5:]) / 5 > 0.8


def test_distillation_moves_the_policy_to_its_teacher():
    estimator, generator = PLUGINS.create("estimator", "on_policy_distill"), torch.Generator().manual_seed(0)
    teacher, table = Table(), Table()
    teacher.logits = torch.randn(PROMPTS, TOKENS, VOCAB, generator=generator)
    prompts = torch.arange(ROLLOUTS) % PROMPTS

    def reverse_kl():
        p = table.logits.detach().log_softmax(-1)
        return float((p.exp() * (p - teacher.logits.log_softmax(-1))).sum(-1).mean())

    before = reverse_kl()
    for _ in range(STEPS):
        with torch.no_grad():
            ids = table.sample(prompts, generator)
            kl = table.logprobs(prompts, ids) - teacher.logprobs(prompts, ids)
        batch = batch_of(prompts, ids, 8, token_kl=kl, kl_coef=1.0)
        advantages = estimator.advantages(batch)
        table.optimizer.zero_grad()
        (-advantages * table.logprobs(prompts, ids)).mean().backward()
        table.optimizer.step()
    assert reverse_kl() < before / 2
