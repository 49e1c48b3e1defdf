"""The quickstart in one go: make a tiny model, warm it up with `molt sft`, train it with `molt train`, show the result.

    python recipes/demo.py [--out runs/demo] [--seed 0] [-- more options for molt train]

Every command is printed before it runs, so that it can be repeated by hand.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

from molt_arithmetic.data import make_problems, split_problems, write_jsonl
from rich.console import Console
from rich.table import Table

from molt_core.testing.tiny import make_tiny_checkpoint

console = Console()
RECIPES = Path(__file__).parent


def main() -> None:
    args = _arguments()
    began = time.monotonic()
    out: Path = args.out
    make_tiny_checkpoint(out / "base", seed=args.seed)
    problems = split_problems(make_problems(100, seed=args.seed), held_out=10)
    write_jsonl(out / "data/train.jsonl", problems.train)
    write_jsonl(out / "data/heldout.jsonl", problems.held_out)
    write_jsonl(out / "data/sft.jsonl", problems.conversations)
    _molt(
        *("sft", "--config", str(RECIPES / "quickstart_sft.toml")),
        *("--model.model_name_or_path", str(out / "base"), "--data.dataset", str(out / "data/sft.jsonl")),
        *("--train.seed", str(args.seed), "--logger.run_dir", str(out / "sft")),
    )
    _molt(
        *("train", "--config", str(RECIPES / "quickstart.toml")),
        *("--actor.model_name_or_path", str(out / "sft/hf"), "--data.prompt_dataset", str(out / "data/train.jsonl")),
        *("--eval.dataset", str(out / "data/heldout.jsonl"), "--logger.run_dir", str(out / "rl")),
        *("--train.seed", str(args.seed), *args.train_options),
    )
    _report(out, time.monotonic() - began)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("train_options", nargs="*", help="options for `molt train`, after --")
    return parser.parse_args()


def _molt(*args: str) -> None:
    console.print(f"\n[bold]$ molt {shlex.join(args)}[/bold]", highlight=False)
    subprocess.run([sys.executable, "-m", "molt_core.cli", *args], check=True)


def _report(out: Path, seconds: float) -> None:
    """The table and the plot, read from what the run wrote."""
    steps, evaluations = (
        [json.loads(line) for line in (out / "rl" / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "eval.jsonl")
    )
    evals = [x["eval/reward_mean"] for x in evaluations]
    rewards = [x["rollout/reward_mean"] for x in steps]
    tenth = max(len(rewards) // 10, 1)
    _plot([x["step"] for x in steps], rewards, out / "reward.png")

    table = Table("", "before", "after", "change", title="Arithmetic with GRPO")
    for name, before, after in (
        ("reward, first and last tenth of the steps", _mean(rewards[:tenth]), _mean(rewards[-tenth:])),
        ("held-out accuracy", evals[0], evals[-1]),
    ):
        table.add_row(name, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}")
    console.print(table)
    for name, path in (
        ("warmed-up model", "sft/hf"),
        ("trained model", "rl/hf"),
        ("metrics", "rl/metrics.jsonl"),
        ("sampled rollouts", "rl/rollouts.jsonl"),
        ("reward plot", "reward.png"),
    ):
        console.print(f"{name:>17}: {out / path}", highlight=False)
    console.print(f"{len(steps)} steps; {seconds / 60:.1f} minutes in all")


def _plot(steps: list[int], rewards: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    window = max(len(rewards) // 20, 1)
    smooth = [_mean(rewards[max(0, i - window + 1) : i + 1]) for i in range(len(rewards))]
    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    axes.plot(steps, rewards, color="#9db8d9", linewidth=1, label="each step")
    axes.plot(steps, smooth, color="#1f4e8c", linewidth=2, label=f"mean of {window} steps")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="Arithmetic with GRPO")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
