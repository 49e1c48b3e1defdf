"""What a configuration comes to, and how its conflicts are told. What is refused is in test_refusals."""

import pytest

from molt_core import ConfigError, Needs
from molt_core.config import RLConfig, SFTConfig
from molt_core.config.checks import check_rl, check_sft
from molt_core.config.kl import KlPlan

DISTILL = Needs(token_kl=True, reference=True)
GROUPS = Needs(groups=True, min_samples=2)


def rl(**options) -> RLConfig:
    """A configuration from `section__name=value`."""
    data: dict = {}
    for dotted, value in options.items():
        *sections, name = dotted.split("__")
        node = data
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return RLConfig.model_validate(data)


@pytest.mark.parametrize(
    ("options", "needs", "plan"),
    [
        ({}, Needs(token_kl=True), ("off", 0.0, None)),
        ({"algo__kl__init_coef": 0.1}, Needs(token_kl=True), ("loss", 0.1, "actor")),
        ({"algo__kl__init_coef": 0.1, "ref__model_name_or_path": "ref"}, Needs(), ("loss", 0.1, "ref")),
        ({"algo__kl__init_coef": 0.1, "algo__kl__ref": "rollout"}, Needs(), ("loss", 0.1, None)),
        ({"algo__kl__init_coef": 0.1, "algo__kl__use_loss": False}, Needs(token_kl=True), ("reward", 0.1, "actor")),
        ({}, DISTILL, ("reward", 1.0, "actor")),
        ({"algo__kl__init_coef": 0.5, "ref__model_name_or_path": "ref"}, DISTILL, ("reward", 0.5, "ref")),
    ],
)
def test_a_reference_model_is_loaded_exactly_where_a_kl_needs_one(options, needs, plan):
    found = KlPlan.of(rl(actor__model_name_or_path="actor", **options), needs)
    assert (found.use, found.coef, found.model) == plan
    assert found.estimator == ("k1" if found.use == "reward" else "k3")


def test_all_conflicts_are_in_one_message():
    with pytest.raises(ConfigError) as error:
        check_rl(rl(rollout__top_p=0.5, fsdp__tp_size=2, ckpt__save_steps=0), GROUPS)
    for option in ("--rollout.top_p", "--fsdp.tp_size", "--ckpt.save_steps"):
        assert option in str(error.value)


def test_sft_refuses_what_is_not_yet_available():
    with pytest.raises(ConfigError, match=r"--fsdp\.cp_size 1"):
        check_sft(SFTConfig.model_validate({"fsdp": {"cp_size": 2}}))
    assert check_sft(SFTConfig()) is None


def test_comparing_takes_two_rollouts_even_where_the_estimator_names_no_minimum():
    assert [needs.fewest for needs in (Needs(), Needs(groups=True), Needs(groups=True, min_samples=4))] == [1, 2, 4]
