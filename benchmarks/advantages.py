"""Seconds from the summaries of finished rollouts to rows with advantages, for every estimator.

    python benchmarks/advantages.py [--groups 10000] [--samples 10] [--tokens 2000] [--only gae]

It is what the learner does with a batch, masks and the critic's targets included, and without the models: their values
and KLs are there already. Rollouts sample 60-100 % of the tokens, with tool output in the middle. The aim at full size
on two cores is about 2 seconds for estimators that compare groups, and 10 for `gae`.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch

from molt_core.batches import RolloutBatch
from molt_core.config import RLConfig
from molt_core.contract import RolloutStatus
from molt_core.learner import Learner
from molt_core.plugins import load_plugins
from molt_core.rollout.generator import Group
from molt_core.rollout.tasks import RolloutSummary, SegmentInfo

PARTS = {"masks": "for_estimator", "rows": "train_rows"}
"""What the table shows of a batch's methods; the rest is the learner's own."""


class Models:
    """Stands in for the training ranks: numbers that were made before, and updates that do nothing."""

    def __init__(self, lengths: Sequence[int], tokens: int) -> None:
        noise = np.random.default_rng(0).standard_normal(2 * tokens, np.float32)
        self._of_states = [noise[i % tokens :][:length] for i, length in enumerate(lengths)]

    def values(self, rows: Any, **_: Any) -> list[np.ndarray]:
        return self._of_states

    def token_kl(self, rows: Any, estimator: str, **_: Any) -> list[np.ndarray]:
        return [row[:-1] for row in self._of_states]

    def update(self, windows: Any, **_: Any) -> dict[str, float]:
        return {}

    update_critic = update


def make_groups(groups: int, samples: int, tokens: int) -> list[Group]:
    """Finished groups, as runners summarise them."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(int(0.6 * tokens), tokens + 1, (groups, samples)).tolist()
    rewards = rng.integers(0, 2, (groups, samples)).astype(float).tolist()
    tool = (tokens // 3, tokens // 3 + tokens // 10)

    def rollout(g: int, k: int) -> RolloutSummary:
        length = lengths[g][k]
        ranges = ((1, tool[0]), (tool[1], length))
        info = SegmentInfo(length, sum(end - start for start, end in ranges), 0, 0, 0, ranges)
        status = RolloutStatus.TRUNCATED if length == tokens else RolloutStatus.COMPLETED
        data: Any = None
        return RolloutSummary(f"{g}-{k}", str(g), rewards[g][k], status, {}, 1, (info,), data, 0.0)

    return [Group(str(g), tuple(rollout(g, k) for k in range(samples))) for g in range(groups)]


def timed(method: Callable[..., Any], seconds: dict[str, float], part: str) -> Callable[..., Any]:
    @wraps(method)
    def measured(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = method(*args, **kwargs)
        seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - began
        return result

    return measured


def measure(name: str, groups: Sequence[Group], models: Models) -> dict[str, float]:
    """One update of the learner."""
    estimator: Any = load_plugins().create("estimator", name)
    kl = {"init_coef": 0.01, "use_loss": False} if estimator.needs.token_kl else {}
    config = RLConfig.model_validate({"algo": {"advantage": {"estimator": name}, "kl": kl}})
    learner: Any = Learner(config, estimator, models)  # type: ignore[arg-type]
    seconds: dict[str, float] = {}
    for method in ("advantages", "advantages_and_returns"):
        if estimator.needs.values == (method == "advantages_and_returns"):
            setattr(estimator, method, timed(getattr(estimator, method), seconds, "estimator"))
    began = time.perf_counter()
    batch = RolloutBatch.from_groups(groups)
    for part, method in PARTS.items():
        object.__setattr__(batch, method, timed(getattr(batch, method), seconds, part))
    learner.update(batch, 0)
    return {"all": time.perf_counter() - began, **seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=2_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3, help="the table shows medians")
    parser.add_argument("--only", nargs="*", help="names of estimators; default: all that are installed")
    parser.add_argument("--json", type=Path, default=Path("runs/bench/advantages.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    groups = make_groups(args.groups, args.samples, args.tokens)
    models = Models([r.segments[0].length for group in groups for r in group.rollouts], args.tokens)
    gc.freeze()
    results = {}
    for name in args.only or load_plugins().names("estimator"):
        runs = [measure(name, groups, models) for _ in range(args.repeat)]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        results[name] = {part: statistics.median(run[part] for run in runs) for part in runs[0]}
        results[name] |= {"slowest": max(run["all"] for run in runs), "peak_gib_so_far": peak}
    sizes = {key: getattr(args, key) for key in ("groups", "samples", "tokens", "threads", "repeat")}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({**sizes, "seconds": results}, indent=2) + "\n")
    show(sizes, results)


def show(sizes: dict[str, int], results: dict[str, dict[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=", ".join(f"{value:,} {key}" for key, value in sizes.items()))
    table.add_column("estimator")
    columns = ("all", "slowest", "masks", "estimator", "rows", "peak_gib_so_far")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for name, seconds in results.items():
        table.add_row(name, *(f"{seconds[column]:.2f}" for column in columns))
    Console().print(table)


if __name__ == "__main__":
    main()
