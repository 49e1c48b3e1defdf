"""Time and memory of every advantage estimator on one large batch; run it as a program.

    python benchmarks/advantages.py --rollouts 10000 --tokens 2000

Rows are filled to 60-100 % with action tokens, with a gap of tool output in the middle; groups have 8 rollouts.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time

import torch

from molt_core import Batch
from molt_core.plugins.manager import load_plugins


def make_batch(rollouts: int, tokens: int, *, token_kl: bool, values: bool) -> Batch:
    """A batch of one row per rollout; optional (S, L) tensors only where asked for."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(int(0.6 * tokens), tokens + 1, (rollouts,), generator=generator)
    position = torch.arange(tokens, dtype=torch.int32)
    mask = torch.empty(rollouts, tokens, dtype=torch.bool)
    for start in range(0, rollouts, 4096):
        rows = slice(start, start + 4096)
        mask[rows] = position < lengths[rows, None]
    mask[:, tokens // 3 : tokens // 3 + tokens // 10] = False
    shape = (rollouts, tokens)
    return Batch(
        rewards=torch.randint(0, 2, (rollouts,), generator=generator).float(),
        groups=torch.arange(rollouts) // 8,
        rollout_of_row=torch.arange(rollouts),
        action_mask=mask,
        truncated=torch.zeros(rollouts).bool(),
        token_kl=torch.randn(shape, generator=generator) if token_kl else None,
        values=torch.randn(shape, generator=generator) if values else None,
        kl_coef=0.01 if token_kl else 0.0,
    )


def main() -> None:
    """Print one line per installed estimator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=2_000)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="1 on a machine that is busy")
    parser.add_argument("--only", nargs="*", help="names of estimators; default: all that are installed")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    plugins = load_plugins()
    out = sys.stdout.write
    out(f"{args.rollouts} rollouts x {args.tokens} tokens, {torch.get_num_threads()} threads\n\n")
    out(f"| {'estimator':<20} | seconds | CPU seconds | peak GiB so far |\n")
    out(f"|{'-' * 22}|--------:|------------:|----------------:|\n")
    for name in args.only or plugins.names("estimator"):
        estimator = plugins.create("estimator", name)
        batch = make_batch(args.rollouts, args.tokens, token_kl=estimator.needs.token_kl, values=estimator.needs.values)
        start, cpu_start = time.perf_counter(), time.process_time()
        estimator.advantages(batch)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        out(f"| {name:<20} | {seconds:7.2f} | {cpu:11.2f} | {peak:15.1f} |\n")
        del batch


if __name__ == "__main__":
    main()
