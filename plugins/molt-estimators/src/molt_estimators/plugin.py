"""Names of the estimators. Imports nothing heavy."""

from molt_core import hookimpl


@hookimpl
def molt_register_estimators(register):
    """Offer the estimators of this package."""
    register("reinforce", "molt_estimators.tokens:Reinforce")
    register("gae", "molt_estimators.tokens:Gae")
    register("on_policy_distill", "molt_estimators.tokens:OnPolicyDistill")
    register("reinforce_baseline", "molt_estimators.groups:ReinforceBaseline")
    register("rloo", "molt_estimators.groups:Rloo")
    register("grpo", "molt_estimators.groups:Grpo")
    register("dr_grpo", "molt_estimators.groups:DrGrpo")
    register("flash_reinforce", "molt_estimators.groups:FlashReinforce")
