"""Objects named by text: ``package.module:Class`` and ``./file.py:Class``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def is_local(name: str) -> bool:
    """Whether a component's name is a reference to code rather than a registered name."""
    return ":" in name or name.endswith(".py")


def absolute_name(name: str) -> str:
    """A name that means the same in a process with another working directory: file paths become absolute."""
    target, colon, attribute = name.rpartition(":")
    if not target.endswith(".py"):
        return name
    return f"{Path(target).expanduser().resolve()}{colon}{attribute}"


def load(reference: str) -> object:
    """The object that a reference names.

    Raises ValueError for a malformed reference, and whatever the import raises. A file is loaded once per process,
    under a module name made from its path; files beside it are not importable from it.
    """
    target, _, attribute = reference.rpartition(":")
    if not target or not attribute.isidentifier():
        raise ValueError(f"{reference!r} is not of the form package.module:Class or ./file.py:Class")
    module = _load_file(Path(target)) if target.endswith(".py") else importlib.import_module(target)
    return getattr(module, attribute)


def _load_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    name = f"molt_local_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution: pydantic looks annotations up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
