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

if TYPE_CHECKING:
    from molt_core.batches import RolloutBatch
    from molt_core.config.shared import CheckpointConfig, LoggerConfig
    from molt_core.contract import Rollout
    from molt_core.plugins import Plugins
    from molt_core.rollout.runner import RolloutSummary
    from molt_core.tracker import Tracker
    from molt_core.training.group import TrainGroup

logger = logging.getLogger("molt")


class RunDir:
    """The folder of a run: ``config.toml``, ``metrics.jsonl``, ``rollouts.jsonl``, ``checkpoints/``, ``hf/``."""

    def __init__(self, program: str, config: LoggerConfig, ckpt: CheckpointConfig) -> None:
        name = config.run_name or f"{program}_{time.strftime('%m%d_%H%M%S')}"
        self.path = config.run_dir or Path("runs") / name
        self.checkpoints = ckpt.path or self.path / "checkpoints"
        self.hf = ckpt.output_dir or self.path / "hf"

    def save_config(self, config: BaseModel) -> None:
        """Write the resolved configuration; ``--config`` reads it back."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "config.toml").write_text(dump_toml(config), encoding="utf-8")


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
        fetch: Callable[[Any], Rollout] = lambda x: x,
        on_step: Callable[[int, Mapping[str, float]], None] = lambda step, metrics: None,
    ) -> None:
        """``fetch`` resolves a summary's reference to its rollout; ``on_step`` is called after every step."""
        self.run_dir, self.trackers, self.progress, self.store = run_dir, dict(trackers), progress, store
        self.ckpt, self.config, self.fetch, self.on_step = ckpt, config, fetch, on_step
        self.evals: list[dict[str, float]] = []
        self.rewards: list[float] = []

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
        if step % self.config.logging_steps == 0:
            self._each_tracker(lambda t: t.log(step, values))
        if batch is not None and self.config.num_rollouts:
            samples = [self._sample(s) for s in _spread(batch.rollouts, self.config.num_rollouts)]
            self._each_tracker(lambda t: t.log_rollouts(step, samples))
        if "rollout/reward_mean" in metrics:
            self.rewards.append(metrics["rollout/reward_mean"])
        self.progress.step(step, values)
        self.on_step(step, values)

    def log_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of an evaluation of the policy after ``step`` steps."""
        self.evals.append({"step": step, **metrics})
        self._each_tracker(lambda t: t.log(step, {"step": step, **metrics}))
        reward = metrics.get("eval/reward_mean", float("nan"))
        logger.info("evaluation after step %d: mean reward %.3f", step, reward)

    def wants_checkpoint(self, step: int) -> bool:
        return self.ckpt.save_steps > 0 and step % self.ckpt.save_steps == 0

    def save(self, step: int, trainer: TrainGroup, state: Mapping[str, Any]) -> None:
        """A resumable checkpoint; complete or absent, never half."""
        folder = self.store.begin(step)
        trainer.save(folder, dict(state))
        if self.ckpt.save_hf:
            trainer.export_hf(folder / "hf")
        self.store.commit(step)
        self.store.prune()

    def print_summary(self) -> None:
        """What the run did and where everything is, as a table on standard output."""
        table = Table(title=f"{self.progress.total} steps" if self.rewards else "no step was run")
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

    def _sample(self, summary: RolloutSummary) -> dict[str, Any]:
        rollout = self.fetch(summary.data)
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

    def _each_tracker(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in self.trackers.items():
            try:
                call(tracker)
            except Exception:
                logger.exception("tracker %s failed; the run goes on without this record", name)


def make_trackers(plugins: Plugins, config: LoggerConfig) -> dict[str, Tracker]:
    """The trackers that are always on, and those that the configuration names."""
    names = dict.fromkeys((*plugins.trackers_always(), *config.trackers))
    return {name: cast("Tracker", plugins.create("tracker", name, config.tracker_args.get(name, {}))) for name in names}


def resume_point(store: CheckpointStore, load_enable: bool) -> Path | None:
    """The checkpoint to resume from, or None for a fresh start.

    Raises ConfigError where resuming was asked for and only incomplete checkpoints are there.
    """
    if not load_enable:
        return None
    newest = store.latest()
    if newest is None and store.root.is_dir() and any(store.root.iterdir()):
        raise ConfigError(
            f"ckpt.load_enable is on, but {store.root} holds no complete checkpoint; "
            "give another --ckpt.path, or empty the folder to start afresh"
        )
    return newest


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON state that was saved with a checkpoint: step, data cursor, versions."""
    return json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))


def _spread(items: Sequence[RolloutSummary], count: int) -> list[RolloutSummary]:
    """``count`` items spread evenly over the sequence."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]
