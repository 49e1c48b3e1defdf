"""Running the real commands as a user does, and looking at what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


def start(*args: object, cwd: Path) -> subprocess.Popen[str]:
    """Start ``molt ARGS`` in a session of its own, so that a Ctrl-C reaches it as from a terminal."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-m", "molt_core.cli", *map(str, args)]
    log = (cwd / "log.txt").open("a")
    return subprocess.Popen(command, cwd=cwd, stdout=log, stderr=log, text=True, start_new_session=True)


def run(*args: object, cwd: Path, timeout: float = 400) -> str:
    """Run ``molt ARGS`` to its end, which must be a good one; returns its output."""
    process = start(*args, cwd=cwd)
    try:
        code = process.wait(timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    output = (cwd / "log.txt").read_text()
    assert code == 0, output[-4000:]
    return output


def steps(run_dir: Path) -> list[dict[str, float]]:
    """The objects of metrics.jsonl, one per training step."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], timeout: float = 300) -> None:
    """Poll until the condition holds; fails when the process ends first."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, "the process ended early"
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


def descendants(pid: int) -> set[int]:
    """Process ids of everything that ``pid`` started, directly or not."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        parent = int(text.rsplit(")", 1)[1].split()[1])
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, queue = set(), [pid]
    while queue:
        for child in children.get(queue.pop(), []):
            found.add(child)
            queue.append(child)
    return found


def alive(pids: set[int]) -> dict[int, str]:
    """Those that still run (zombies do not), with their command lines."""
    running = {}
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if state != "Z":
            running[pid] = command
    return running
