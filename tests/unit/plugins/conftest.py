import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes an installed distribution: a folder on sys.path with modules and a *.dist-info."""
    before = set(sys.modules)

    def make(
        distribution: str,
        entry_points: Mapping[str, str],
        modules: Mapping[str, str] | None = None,
        *,
        version: str = "1.0",
        requires: Sequence[str] = (),
        site: str | None = None,
    ) -> Path:
        folder = tmp_path / (site or distribution)
        info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
        (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {line}" for line in requires)]) + "\n")
        points = "\n".join(f"{name} = {value}" for name, value in entry_points.items())
        (info / "entry_points.txt").write_text(f"[molt]\n{points}\n")
        for name, source in (modules or {}).items():
            (folder / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(str(folder))
        importlib.invalidate_caches()
        return folder

    yield make
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
