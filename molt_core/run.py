"""One run on disk and on screen: its folder, trackers, progress and checkpoints."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from molt_core.config.toml import dump_toml
from molt_core.errors import ConfigError
from molt_core.progress import Progress
from molt_core.training.checkpoints import CheckpointStore
from molt_core.training.rows import fetch_rollouts

if TYPE_CHECKING:
    from molt_core.batches import RolloutBatch
    from molt_core.config import RLConfig, SFTConfig
    from molt_core.config.shared import CheckpointConfig, LoggerConfig
    from molt_core.contract import Rollout
    from molt_core.plugins import Plugins
    from molt_core.rollout.tasks import RolloutSummary
    from molt_core.tracker import Tracker
    from molt_core.training.group import TrainGroup

logger = logging.getLogger("molt")


class RunDir:
    """The folder of a run: ``config.toml``, ``metrics.jsonl``, ``rollouts.jsonl``, ``checkpoints/``, ``hf/``."""

    def __init__(self, program: str, config: LoggerConfig, ckpt: CheckpointConfig) -> None:
        name = config.run_name or f"{program}_{time.strftime('%m%d_%H%M%S')}"
        self.program = program
        self.path = config.run_dir or Path("runs") / name
        self.has_name = bool(config.run_dir or config.run_name or ckpt.path)
        self.checkpoints = ckpt.path or self.path / "checkpoints"
        self.hf = ckpt.output_dir or self.path / "hf"

    def save_config(self, config: RLConfig | SFTConfig) -> None:
        """Write the resolved configuration, this folder included; ``--config`` reads it back."""
        logger_section = config.logger.model_copy(update={"run_dir": self.path})
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            text = dump_toml(config.model_copy(update={"logger": logger_section}))
            (self.path / "config.toml").write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the run's folder cannot be written ({error}); give another --logger.run_dir") from error


class RunRecorder:
    """Everything a run leaves behind. Use as a context manager; an error in a tracker is logged, never raised."""

    def __init__(
        self,
        run_dir: RunDir,
        trackers: Mapping[str, Tracker],
        progress: Progress,
        store: CheckpointStore,
        ckpt: CheckpointConfig,
        config: LoggerConfig,
        *,
        on_step: Callable[[int, Mapping[str, float]], None] = lambda step, metrics: None,
    ) -> None:
        """``on_step`` is called after every step."""
        self.run_dir, self.trackers, self.progress, self.store = run_dir, dict(trackers), progress, store
        self.ckpt, self.config, self.on_step = ckpt, config, on_step
        self.evals: list[dict[str, float]] = []
        self.rewards: list[float] = []
        self.last_step = progress.start

    @contextmanager
    def open(self, config: BaseModel, resumed_step: int) -> Iterator[RunRecorder]:
        """Start the trackers and the progress display; close both whatever happens."""
        data = config.model_dump(mode="json")
        self._each_tracker(lambda t: t.start(self.run_dir.path, data, resumed_step))
        try:
            with self.progress:
                yield self
        finally:
            self._each_tracker(lambda t: t.close())

    def log_step(self, step: int, metrics: Mapping[str, float], batch: RolloutBatch | None = None) -> None:
        """Metrics, sampled rollouts, progress and the plugins' step hook for one finished step."""
        values = {"step": step, **metrics}
        self.last_step = step
        if step % self.config.logging_steps == 0:
            self._each_tracker(lambda t: t.log(step, values))
        if batch is not None and self.config.num_rollouts:
            chosen = _spread(batch.rollouts, self.config.num_rollouts)
            samples = [_record(rollout) for rollout in fetch_rollouts([summary.data for summary in chosen])]
            self._each_tracker(lambda t: t.log_rollouts(step, samples))
        if "rollout/reward_mean" in metrics:
            self.rewards.append(metrics["rollout/reward_mean"])
        self.progress.step(step, values)
        self.on_step(step, values)

    def log_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of an evaluation of the policy after ``step`` steps."""
        self.evals.append({"step": step, **metrics})
        self._each_tracker(lambda t: t.log_eval(step, {"step": step, **metrics}))
        reward = metrics.get("eval/reward_mean", float("nan"))
        logger.info("evaluation after step %d: mean reward %.3f", step, reward)

    def wants_checkpoint(self, step: int) -> bool:
        return self.ckpt.save_steps > 0 and step % self.ckpt.save_steps == 0

    def wants_last_checkpoint(self, step: int) -> bool:
        """Whether the end of a run that makes checkpoints is still to be saved."""
        return self.ckpt.save_steps > 0 and not self.wants_checkpoint(step)

    def save(self, step: int, trainer: TrainGroup, state: Mapping[str, Any]) -> None:
        """A resumable checkpoint; complete or absent, never half."""
        folder = self.store.begin(step)
        trainer.save(folder, {"program": self.run_dir.program, **state})
        if self.ckpt.save_hf:
            trainer.export_hf(folder / "hf")
        self.store.commit(step)
        self.store.prune()

    def print_summary(self) -> None:
        """What the run did and where everything is, as a table on standard output."""
        resumed = f" (resumed after {self.progress.start})" if self.progress.start else ""
        table = Table(title=f"{self.last_step} steps{resumed}" if self.rewards else "no step was run")
        for column in ("", "first", "last"):
            table.add_column(column)
        tenth = max(len(self.rewards) // 10, 1)
        if self.rewards:
            first, last = self.rewards[:tenth], self.rewards[-tenth:]
            table.add_row(f"mean reward of {tenth} step(s)", f"{fmean(first):.3f}", f"{fmean(last):.3f}")
        scores = [x["eval/reward_mean"] for x in self.evals if "eval/reward_mean" in x]
        if scores:
            table.add_row("held-out mean reward", f"{scores[0]:.3f}", f"{scores[-1]:.3f}")
        console = Console()
        console.print(table)
        console.print(f"everything is in {self.run_dir.path}", highlight=False)

    def _each_tracker(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in self.trackers.items():
            try:
                call(tracker)
            except Exception:
                logger.exception("tracker %s failed; the run goes on without this record", name)


def _record(rollout: Rollout) -> dict[str, Any]:
    """A rollout as JSON."""
    return {
        "id": rollout.id,
        "group_id": rollout.group_id,
        "reward": rollout.reward,
        "status": rollout.status.value,
        "info": dict(rollout.info),
        "text": rollout.text,
        "segments": [
            {
                "ids": s.ids.tolist(),
                "mask": s.action_mask.astype(int).tolist(),
                "logprobs": [round(float(x), 6) for x in s.logprobs],
                "versions": s.versions.tolist(),
            }
            for s in rollout.segments
        ],
    }


def make_trackers(plugins: Plugins, config: LoggerConfig) -> dict[str, Tracker]:
    """The trackers that are always on, and those that the configuration names."""
    names = dict.fromkeys((*plugins.trackers_always(), *config.trackers))
    return {name: cast("Tracker", plugins.create("tracker", name, config.tracker_args.get(name, {}))) for name in names}


def resume_point(run_dir: RunDir, ckpt: CheckpointConfig) -> tuple[Path | None, dict[str, Any]]:
    """The checkpoint to resume from with its state, or (None, {}) for a fresh start. Starts and changes nothing.

    Raises ConfigError where it is not clear which is meant: resuming a run without a name, from incomplete checkpoints
    or from another program's; and a fresh start in a folder that holds checkpoints.
    """
    store = CheckpointStore(run_dir.checkpoints, ckpt.max_num)
    newest = store.latest()
    if not ckpt.load_enable:
        if newest is not None:
            raise ConfigError(
                f"{store.root} holds checkpoints of an earlier run: resume it with --ckpt.load_enable, "
                "or give another --logger.run_dir"
            )
        return None, {}
    if not run_dir.has_name:
        raise ConfigError("--ckpt.load_enable needs to know which run: give --logger.run_dir or --ckpt.path")
    if newest is None and store.root.is_dir() and any(store.root.iterdir()):
        raise ConfigError(
            f"ckpt.load_enable is on, but {store.root} holds no complete checkpoint; "
            "give another --ckpt.path, or empty the folder to start afresh"
        )
    if newest is None:
        logger.warning("nothing to resume in %s: starting afresh", store.root)
        return None, {}
    state = read_state(newest)
    if state.get("program") != run_dir.program:
        raise ConfigError(
            f"{newest} was written by {state.get('program')!r}, not by {run_dir.program!r}: give another --ckpt.path"
        )
    return newest, state


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON state that was saved with a checkpoint: step, data cursor, versions."""
    return json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))


def _spread(items: Sequence[RolloutSummary], count: int) -> list[RolloutSummary]:
    """``count`` items spread evenly over the sequence."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]
