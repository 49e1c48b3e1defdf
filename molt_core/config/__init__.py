"""Every option of every program, as frozen pydantic models. Imports nothing heavy."""

from molt_core.config.rl import RLConfig
from molt_core.config.sft import SFTConfig

__all__ = ["RLConfig", "SFTConfig"]
