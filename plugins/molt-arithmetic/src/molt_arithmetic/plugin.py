"""Name of the environment. Imports nothing heavy."""

from molt_core import hookimpl


@hookimpl
def molt_register_environments(register):
    """Offer the environment of this package."""
    register("arithmetic", "molt_arithmetic.env:Arithmetic")
