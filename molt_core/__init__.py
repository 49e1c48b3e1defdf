"""molt: reinforcement learning of language-model agents, with everything that varies as a plugin.

Importing this package is light: the names below are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

import pluggy

__version__ = "0.1.0"

hookimpl = pluggy.HookimplMarker("molt")
"""Marks a function of a plugin module as the implementation of a molt hook."""

_LAZY = {
    "Env": "molt_core.agents.env",
    "Action": "molt_core.agents.env",
    "EnvContext": "molt_core.agents.env",
    "Result": "molt_core.agents.env",
    "Reward": "molt_core.agents.reward",
    "Score": "molt_core.agents.reward",
    "Estimator": "molt_core.algorithms.estimator",
    "Needs": "molt_core.algorithms.estimator",
    "Loss": "molt_core.algorithms.loss",
    "LossInputs": "molt_core.algorithms.loss",
    "Tracker": "molt_core.tracker",
    "Batch": "molt_core.contract",
    "Rollout": "molt_core.contract",
    "RolloutStatus": "molt_core.contract",
    "ConfigError": "molt_core.errors",
}

if TYPE_CHECKING:
    from molt_core.agents.env import Action, Env, EnvContext, Result
    from molt_core.agents.reward import Reward, Score
    from molt_core.algorithms.estimator import Estimator, Needs
    from molt_core.algorithms.loss import Loss, LossInputs
    from molt_core.contract import Batch, Rollout, RolloutStatus
    from molt_core.errors import ConfigError
    from molt_core.tracker import Tracker

__all__ = [
    "Action",
    "Batch",
    "ConfigError",
    "Env",
    "EnvContext",
    "Estimator",
    "Loss",
    "LossInputs",
    "Needs",
    "Result",
    "Reward",
    "Rollout",
    "RolloutStatus",
    "Score",
    "Tracker",
    "__version__",
    "hookimpl",
]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'molt_core' has no attribute {name!r}")
