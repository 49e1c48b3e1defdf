"""Metrics of one step, computed once from what was generated. Names are listed in the README."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from molt_core.contract import RolloutStatus

if TYPE_CHECKING:
    from molt_core.batches import RolloutBatch
    from molt_core.config.rl import RewardConfig
    from molt_core.rollout.tasks import RolloutSummary


def rollout_metrics(batch: RolloutBatch, config: RewardConfig) -> dict[str, float]:
    """Rewards per rollout (raw, before clipping and shaping), lengths, truncation, and the environment's numbers."""
    rewards = np.array([r.reward for r in batch.rollouts])
    by_group: dict[int, list[float]] = defaultdict(list)
    for reward, group in zip(rewards, batch.groups, strict=True):
        by_group[group].append(float(reward))
    low, high = config.clip_range
    return {
        "rollout/reward_mean": float(rewards.mean()),
        "rollout/reward_std": float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
        "rollout/reward_clipped": float(((rewards < low) | (rewards > high)).mean()),
        "rollout/reward_shaping_mean": float(batch.shaped_rewards(config)[1].mean()),
        "rollout/num_rollouts": len(rewards),
        "rollout/num_prompt_groups": len(by_group),
        "rollout/pass1": float(np.mean([np.mean(x) for x in by_group.values()])),
        "rollout/equal_reward_groups": float(np.mean([max(x) - min(x) <= 1e-6 for x in by_group.values()])),
        "rollout/num_segments": sum(len(r.segments) for r in batch.rollouts),
        **length_metrics(batch.rollouts, "rollout"),
        **info_metrics(batch.rollouts, "rollout"),
    }


def length_metrics(rollouts: Sequence[RolloutSummary], prefix: str) -> dict[str, float]:
    """Sampled tokens per rollout and the share that was cut."""
    return {
        f"{prefix}/response_length_mean": float(np.mean([r.num_actions for r in rollouts])),
        f"{prefix}/truncated_rate": float(np.mean([r.status == RolloutStatus.TRUNCATED for r in rollouts])),
        f"{prefix}/num_turns_mean": float(np.mean([r.num_turns for r in rollouts])),
    }


def info_metrics(rollouts: Sequence[RolloutSummary], prefix: str) -> dict[str, float]:
    """Mean of each number in ``Result.info`` over the rollouts that reported it."""
    values: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for key, value in rollout.info.items():
            values[key].append(float(value))
    return {f"{prefix}/info/{key}": float(np.mean(x)) for key, x in sorted(values.items())}


def staleness_metrics(rollouts: Sequence[RolloutSummary], version: int) -> dict[str, float]:
    """How many updates behind ``version`` the sampled tokens were, per token."""
    segments = [s for r in rollouts for s in r.segments if s.num_actions]
    tokens = sum(s.num_actions for s in segments)
    return {
        "staleness/max": version - min(s.oldest_version for s in segments),
        "staleness/mean": version - sum(s.version_sum for s in segments) / tokens,
    }


def excluded_metrics(counts: Mapping[str, int], prefix: str = "rollout") -> dict[str, float]:
    """Excluded rollouts by reason; every reason is present, so that the schema never changes."""
    reasons = [s.value for s in RolloutStatus if not s.is_scored]
    total = sum(counts.get(reason, 0) for reason in reasons)
    return {**{f"{prefix}/excluded/{r}": counts.get(r, 0) for r in reasons}, f"{prefix}/excluded/total": total}
