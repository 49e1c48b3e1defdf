"""Names of the losses. Imports nothing heavy."""

from molt_core import hookimpl


@hookimpl
def molt_register_losses(register):
    """Offer the losses of this package."""
    register("ppo", "molt_losses.losses:Ppo")
    register("gspo", "molt_losses.losses:Gspo")
    register("cispo", "molt_losses.losses:Cispo")
    register("reinforce", "molt_losses.losses:Reinforce")
