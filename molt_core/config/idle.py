"""Options that were changed from their defaults although something else turns them off. Needs no files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

from molt_core.config.kl import KlPlan
from molt_core.config.rl import CriticConfig, RLConfig
from molt_core.config.validation import field_names

if TYPE_CHECKING:
    from molt_core.config.checks import EstimatorNeeds


class Switch(NamedTuple):
    """Options of one section, and what turns them off."""

    is_off: bool
    section: str
    options: str
    why: str
    fix: str


def idle_problems(config: RLConfig, needs: EstimatorNeeds) -> Iterator[str]:
    """One sentence for every group of options without effect.

    Compared are values and not what the user wrote, because the resolved configuration that a run saves names all.
    """
    defaults = RLConfig()
    for switch in (*_of_rewards_and_models(config, needs), *_of_the_rest(config, needs)):
        names = [f"{switch.section}.{option}" for option in switch.options.split()]
        given = [f"--{name}" for name in names if _value(config, name) != _value(defaults, name)]
        if switch.is_off and given:
            verb, them = ("has", "it") if len(given) == 1 else ("have", "them")
            yield f"{' and '.join(given)} {verb} no effect {switch.why}: leave {them} out, or {switch.fix}"


def _of_rewards_and_models(config: RLConfig, needs: EstimatorNeeds) -> Iterator[Switch]:
    """What depends on the estimator."""
    estimator = f"with estimator {config.algo.advantage.estimator}"
    why, fix = f"{estimator}, which has no critic", "choose an estimator that needs values"
    of_critic = " ".join(".".join(path) for path in field_names(CriticConfig))
    yield Switch(not needs.values, "actor", "freezing_steps", why, fix)
    yield Switch(not needs.values, "critic", of_critic, why, fix)
    why, fix = f"{estimator}, which ignores rewards", "choose another --algo.advantage.estimator"
    of_reward = "name clip_range overlong_max overlong_buffer stop_properly"
    yield Switch(not needs.reward, "reward", of_reward, why, fix)
    yield Switch(not needs.reward, "algo", "dynamic_filtering_enable", why, fix)

    kl, target = KlPlan.of(config, needs), config.algo.kl.target
    why, fix = "without a KL", "set --algo.kl.init_coef above 0"
    yield Switch(kl.use == "off", "algo.kl", "use_loss estimator ref target horizon", why, fix)
    why, fix = "on a fixed coefficient", "set --algo.kl.target"
    yield Switch(kl.use != "off" and target is None, "algo.kl", "horizon", why, fix)
    why = "without a KL to the reference"
    fix = "set --algo.kl.init_coef above 0 with --algo.kl.ref reference"
    yield Switch(kl.model is None, "ref", "model_name_or_path", why, fix)


def _of_the_rest(config: RLConfig, needs: EstimatorNeeds) -> Iterator[Switch]:
    """What depends on other options."""
    off = config.algo.advantage.is_correction_level == "off"
    options = "is_correction_mode is_correction_threshold is_correction_gating"
    fix = "set --algo.advantage.is_correction_level token"
    yield Switch(off, "algo.advantage", options, "without a correction", fix)
    mode = config.actor.loss_agg_mode
    fix = "set --actor.loss_agg_mode seq-mean-token-sum"
    yield Switch(mode != "seq-mean-token-sum", "actor", "loss_agg_norm", f"with {mode}", fix)
    off = not config.algo.dynamic_filtering_enable
    options = "dynamic_filtering_metric dynamic_filtering_range dynamic_filtering_max_tries"
    yield Switch(off, "algo", options, "without a filter", "set --algo.dynamic_filtering_enable")
    off = config.reward.name is None
    yield Switch(off, "reward", "args timeout retries", "on the environment's own reward", "set --reward.name")

    when = config.eval
    off = when.dataset is None
    options = "steps at_start temperature n_samples_per_prompt max_new_tokens max_samples"
    yield Switch(off, "eval", options, "without held-out prompts", "set --eval.dataset")
    off = when.steps < 1 and not when.at_start and not when.at_end
    fix = "set --eval.steps, --eval.at_start or --eval.at_end"
    yield Switch(off, "eval", "dataset", "when nothing is evaluated", fix)


def _value(config: RLConfig, name: str) -> Any:
    node: Any = config
    return reduce(getattr, name.split("."), node)
