"""Estimators, losses, aggregations, corrections and KL terms in pairs, two real steps each, on engines started once.

Any two values of two factors meet in at least one run, unless the launch checks refuse them together.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from molt_core import ConfigError, launch
from molt_core.algorithms.aggregate import MODES
from molt_core.config import RLConfig
from molt_core.config.checks import check_rl
from molt_core.data.prompts import PromptCursor
from molt_core.learner import Learner
from molt_core.loop import Parts
from molt_core.loop import train as run_loop
from molt_core.plugins import load_plugins
from molt_core.rollout.generator import Generator, GeneratorSettings, GroupDispatcher
from molt_core.rollout.refit import Refitter
from molt_core.rollout.remote import start_engines, start_runners
from molt_core.rollout.runner import RunnerSettings
from molt_core.run import RunDir
from molt_core.testing.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.e2e

ENV = '''
from molt_core import Env, Result

class Digits(Env):
    """The share of sampled tokens that are digits."""
    columns = ("question",)

    async def reset(self, row, ctx):
        return [{"role": "user", "content": row["question"]}]

    async def step(self, action, ctx):
        return Result(reward=sum(48 <= i < 58 for i in action.ids) / len(action.ids), terminated=True)
'''
PLUGINS = load_plugins()
CORRECTIONS: dict[str, dict[str, Any]] = {
    "off": {"is_correction_level": "off"},
    "token-mask": {"is_correction_level": "token", "is_correction_mode": "mask"},
    "token-clip": {"is_correction_level": "token", "is_correction_mode": "clip"},
    "token-trunc": {"is_correction_level": "token", "is_correction_mode": "trunc"},
    "seq-mask": {"is_correction_level": "seq", "is_correction_mode": "mask"},
    "geo-mask": {"is_correction_level": "geo", "is_correction_mode": "mask", "is_correction_threshold": (0.99, 1.01)},
    **{
        f"gate-{gating}": {
            "is_correction_mode": "mask",
            "is_correction_gating": gating,
            "is_correction_threshold": (0.0, 0.05),
        }
        for gating in ("binary_kl", "tv")
    },
}
KLS: dict[str, dict[str, Any]] = {
    "no-kl": {},
    "kl-loss": {"init_coef": 0.01, "use_loss": True},
    "kl-rollout": {"init_coef": 0.01, "use_loss": True, "ref": "rollout", "estimator": "k2"},
    "kl-reward": {"init_coef": 0.01, "use_loss": False},
}
FACTORS = (PLUGINS.names("estimator"), PLUGINS.names("loss"), MODES, tuple(CORRECTIONS), tuple(KLS), ("1", "2"))
Values = tuple[str, ...]


def needs_of(values: Values) -> Any:
    return PLUGINS.resolve("estimator", values[0]).needs


def config_of(values: Values, model: str = "m", teacher: str = "t", prompts: str = "p", env: str = "e") -> RLConfig:
    """Strictly on-policy steps of 8 rollouts, in one window or two."""
    estimator, loss, mode, correction, kl, windows = values
    samples = min(4, needs_of(values).max_samples or 4)
    has_reference = needs_of(values).reference or kl in ("kl-loss", "kl-reward")
    return RLConfig.model_validate(
        {
            "device": "cpu",
            "actor": {
                **{"model_name_or_path": model, "loss_mode": loss, "loss_agg_mode": mode, "entropy_coef": 1e-3},
                "adam": {"lr": 1e-3},
            },
            "critic": {"adam": {"lr": 1e-3}} if needs_of(values).values else {},
            "ref": {"model_name_or_path": teacher} if has_reference else {},
            "data": {"prompt_dataset": prompts, "max_len": 48},
            "env": {"name": env},
            "algo": {"advantage": {"estimator": estimator, **CORRECTIONS[correction]}, "kl": KLS[kl]},
            "vllm": {"num_engines": 1},
            "rollout": {"batch_size": 8 // samples, "n_samples_per_prompt": samples, "max_new_tokens": 6},
            "train": {"force_sync_mode": True, "batch_size": 8 // int(windows), "num_episodes": 8},
        }
    )


def is_accepted(values: Values) -> bool:
    try:
        single = PLUGINS.resolve("loss", values[1]).single_step
        check_rl(config_of(values), needs_of(values), single_step_loss=single)
    except ConfigError:
        return False
    return True


def covering() -> list[Values]:
    """Combinations that hold every pair, found greedily: each next one holds most of the pairs that are missing."""
    bits: dict[Any, int] = {}

    def pairs_of(values: Values) -> int:
        pairs = itertools.combinations(enumerate(values), 2)
        return sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs)

    candidates = {values: pairs_of(values) for values in itertools.product(*FACTORS)}
    missing = (1 << len(bits)) - 1
    chosen = []
    while candidates:
        best = max(candidates, key=lambda values: (candidates[values] & missing).bit_count())
        if not candidates[best] & missing:
            break
        if is_accepted(best):
            chosen.append(best)
            missing &= ~candidates[best]
        del candidates[best]
    return chosen


@dataclass
class Notes:
    """Stands in for the recorder of a run: keeps the metrics."""

    steps: list[dict[str, float]] = field(default_factory=list)

    def wants_checkpoint(self, step: int) -> bool:
        return False

    def wants_last_checkpoint(self, step: int) -> bool:
        return False

    def log_step(self, step: int, metrics: dict[str, float], batch: Any) -> None:
        self.steps.append({"step": step, **metrics})


class Stage:
    """Ray, an engine, a runner and a training group with a reference model and a critic, for all runs."""

    def __init__(self, folder: Any) -> None:
        for seed, name in enumerate(("model", "teacher")):
            make_tiny_checkpoint(folder / name, seed=seed, hidden_size=32, layers=2, intermediate=64)
        (folder / "env.py").write_text(ENV)
        rows = [{"question": f"{i}?"} for i in range(8)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.paths = {
            "model": str(folder / "model"),
            "teacher": str(folder / "teacher"),
            "prompts": str(folder / "prompts.jsonl"),
            "env": f"{folder}/env.py:Digits",
        }
        self.step = 0

    async def open(self) -> None:
        values = ("gae", "ppo", "token-mean", "token-trunc", "kl-loss", "1")
        config = config_of(values, **self.paths)
        needs = needs_of(values)
        self.engines = start_engines(launch.engine_settings(config, "cpu"), 1)
        self.runners = start_runners(RunnerSettings.from_config(config, PLUGINS.spec), self.engines, 1)
        inputs = launch.TrainInputs([], [], "cpu", 1000, RunDir("rl", config.logger, config.ckpt), None, {})
        self.trainer = await asyncio.to_thread(launch.start_trainer, config, PLUGINS, inputs, needs)
        await asyncio.gather(*(e.check_health() for e in self.engines), *(r.ready() for r in self.runners))
        self.refitter = Refitter(self.engines, self.trainer.weights)

    async def run(self, values: Values) -> list[dict[str, float]]:
        """Two steps, which go on from those before; their metrics."""
        config, needs, notes = config_of(values, **self.paths), needs_of(values), Notes()
        inputs = launch.check_train(config, PLUGINS)
        estimator = PLUGINS.create("estimator", values[0])
        self.trainer.set_objective(launch.objective_spec(config, needs))
        cursor = PromptCursor(len(inputs.rows), seed=self.step, shuffle=True, num_episodes=8)
        settings = GeneratorSettings.from_config(config, needs.fewest)
        generator = Generator(inputs.rows, cursor, GroupDispatcher(self.runners), settings, version=self.step)
        learner = Learner(config, estimator, self.trainer)
        async with generator:
            parts = Parts(generator, self.trainer, self.refitter, learner, None, notes)  # type: ignore[arg-type]
            await run_loop(config, parts, self.step, self.step + 2)
        self.step += 2
        return notes.steps

    async def close(self) -> None:
        self.trainer.close()
        await launch.stop_actors([engine.shutdown for engine in self.engines])


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Runs a combination on the one stage, and one event loop."""
    made = Stage(tmp_path_factory.mktemp("stage"))
    with launch.ray_session(None), asyncio.Runner() as loop:
        loop.run(made.open())
        try:
            yield lambda values: loop.run(made.run(values))
        finally:
            loop.run(made.close())


COMBINATIONS = covering()


def test_every_value_of_every_factor_is_run():
    for index, values in enumerate(FACTORS):
        assert {combination[index] for combination in COMBINATIONS} == set(values)


@pytest.mark.parametrize("values", COMBINATIONS, ids=" ".join)
def test_two_steps_train_and_the_engine_follows(values, stage):
    steps = stage(values)
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["rollout/num_rollouts"] == 8
        assert metrics["train/optimizer_steps"] == int(values[-1])
        assert metrics["train/skipped_steps"] == 0
        assert metrics["train/grad_norm"] > 0
        assert all(math.isfinite(value) for value in metrics.values())
        # The engine samples from the very policy that is trained: refits arrive, whatever is minimised.
        assert metrics["staleness/max"] == 0
        assert metrics["mismatch/abs_max"] < 1e-4
        assert ("train/kl" in metrics) == (values[4] != "no-kl" or needs_of(values).reference)
        assert ("train/is_filter_ratio" in metrics) == (values[3] != "off")
        assert ("critic/value_loss" in metrics) == needs_of(values).values
    assert steps[1]["policy_version"] == steps[0]["policy_version"] + 1
