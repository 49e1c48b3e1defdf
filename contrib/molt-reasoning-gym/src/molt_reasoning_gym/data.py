"""Write prompts of a task: ``python -m molt_reasoning_gym.data TASK FILE [--size N] [--seed S] [--option k=v]``."""

import argparse
import json
from pathlib import Path

import reasoning_gym


def write_prompts(task: str, path: Path, *, size: int, seed: int, **options: int) -> Path:
    """``size`` questions of ``task`` as JSONL; ``options`` are the task's own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in reasoning_gym.create_dataset(task, size=size, seed=seed, **options):
            file.write(json.dumps(row) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task")
    parser.add_argument("path", type=Path)
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--option", action="append", default=[], help="key=value, a whole number")
    args = parser.parse_args()
    options = {key: int(value) for key, value in (option.split("=", 1) for option in args.option)}
    write_prompts(args.task, args.path, size=args.size, seed=args.seed, **options)


if __name__ == "__main__":
    main()
