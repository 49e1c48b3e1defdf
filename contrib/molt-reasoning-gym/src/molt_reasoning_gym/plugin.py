"""What this package registers."""

from molt_core import hookimpl


@hookimpl
def molt_register_environments(register):
    register("reasoning_gym", "molt_reasoning_gym.env:ReasoningGym")
