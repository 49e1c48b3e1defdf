"""The built-in environment. Light: nothing heavy is imported at discovery."""

from collections.abc import Callable

from molt_core import hookimpl


@hookimpl
def molt_register_environments(register: Callable[[str, object], None]) -> None:
    """Register the environment that only asks."""
    register("single-turn", "molt_core.agents.single_turn:SingleTurn")
