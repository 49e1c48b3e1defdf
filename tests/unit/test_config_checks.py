from typing import NamedTuple

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


class Case(NamedTuple):
    options: dict
    says: str
    needs: Needs = Needs()


SYNC = {"train__force_sync_mode": True}
REFUSED = {
    "one sample for a group estimator": Case({"rollout__n_samples_per_prompt": 1}, "n_samples_per_prompt to 2", GROUPS),
    "fewer samples than the estimator wants": Case(
        {"rollout__n_samples_per_prompt": 3}, "n_samples_per_prompt to 4", Needs(min_samples=4)
    ),
    "options of a critic that is not there": Case({"critic__value_clip": 0.1}, "options of --critic have no effect"),
    "warming up a critic that is not there": Case(
        {"actor__freezing_steps": 2}, "--actor.freezing_steps trains", GROUPS
    ),
    "beta of the critic": Case({"critic__adam__betas": (-0.1, 0.9)}, "--critic.adam.betas -0.1", Needs(values=True)),
    "KL as a reward that the estimator cannot use": Case(
        {"algo__kl__init_coef": 0.01, "algo__kl__use_loss": False},
        "would have no effect: set --algo.kl.use_loss",
        GROUPS,
    ),
    "KL to the rollout policy as a reward": Case(
        {"algo__kl__init_coef": 0.01, "algo__kl__use_loss": False, "algo__kl__ref": "rollout"},
        "set --algo.kl.use_loss, or --algo.kl.ref reference",
        Needs(token_kl=True),
    ),
    "distilling without a teacher": Case({}, "needs a teacher: set --ref.model_name_or_path to another", DISTILL),
    "distilling from the student": Case(
        {"ref__model_name_or_path": "m", "actor__model_name_or_path": "m"}, "needs a teacher", DISTILL
    ),
    "KL as a loss for a distilling estimator": Case({"algo__kl__use_loss": True}, "leave --algo.kl.use_loss", DISTILL),
    "distilling from the rollout policy": Case({"algo__kl__ref": "rollout"}, "--algo.kl.ref reference", DISTILL),
    "distilling with k3": Case({"algo__kl__estimator": "k3"}, "leave --algo.kl.estimator out", DISTILL),
    "reference model without a KL": Case({"ref__model_name_or_path": "m"}, "--ref.model_name_or_path has no effect"),
    "reference model beside a KL to the rollout policy": Case(
        {"ref__model_name_or_path": "m", "algo__kl__init_coef": 0.1, "algo__kl__ref": "rollout"},
        "--ref.model_name_or_path has no effect",
    ),
    "target of no KL": Case({"algo__kl__target": 0.1}, "set --algo.kl.init_coef above 0"),
    "target of a loss without a pull": Case(
        {"algo__kl__target": 0.1, "algo__kl__init_coef": 0.1, "algo__kl__estimator": "k1"}, "estimator k2 or k3"
    ),
    "filtering groups of one": Case(
        {"algo__dynamic_filtering_enable": True, "rollout__n_samples_per_prompt": 1}, "--no-algo.dynamic_filtering"
    ),
    # 2 x 6 = 12 rollouts; the divisors next to 5 are 4 and 6
    "batch that does not divide": Case(
        {"rollout__batch_size": 2, "rollout__n_samples_per_prompt": 6, "train__batch_size": 5}, "to 4 or 6"
    ),
    # 12 rollouts; 6 is the largest proper divisor
    "batch above all rollouts": Case(
        {"rollout__batch_size": 2, "rollout__n_samples_per_prompt": 6, "train__batch_size": 13}, "to 12, or"
    ),
    "too few groups in flight": Case({"rollout__vllm_generate_batch_size": 7}, "vllm_generate_batch_size 7"),
    "asynchronous without correction": Case(
        {"algo__advantage__is_correction_level": "off"}, "is_correction_level token, or --train.force_sync_mode"
    ),
    "several windows without correction": Case(
        {**SYNC, "algo__advantage__is_correction_level": "off", "train__batch_size": 32}, "several optimizer steps"
    ),
    "several epochs without correction": Case(
        {**SYNC, "algo__advantage__is_correction_level": "off", "train__max_epochs": 2}, "several optimizer steps"
    ),
    "sync mode with a queue": Case({**SYNC, "train__async_queue_size": 2}, "async_queue_size 1"),
    "sync mode with staleness": Case({**SYNC, "train__max_staleness": 1}, "max_staleness out"),
    "sync mode with more in flight": Case(
        {**SYNC, "rollout__vllm_generate_batch_size": 9}, "vllm_generate_batch_size to --rollout.batch_size"
    ),
    "sequence correction that truncates": Case(
        {"algo__advantage__is_correction_level": "geo"}, "is_correction_mode mask"
    ),
    "empty correction band": Case({"algo__advantage__is_correction_threshold": (2.0, 2.0)}, "empty band"),
    "top_p": Case({"rollout__top_p": 0.9}, "set --rollout.top_p 1"),
    "top_k": Case({"rollout__top_k": 50}, "set --rollout.top_k -1"),
    "prompt as long as the context": Case(
        {"data__max_len": 64, "data__max_prompt_len": 64}, "--data.max_prompt_len 64"
    ),
    "reply as long as the context": Case({"data__max_len": 64, "rollout__max_new_tokens": 64}, "max_new_tokens 64"),
    "held-out reply as long as the context": Case({"data__max_len": 9, "eval__max_new_tokens": 9}, "--eval.max_new"),
    "context of one": Case({"data__max_len": 1}, "at least 2"),
    "reversed reward range": Case({"reward__clip_range": (1, 0)}, "--reward.clip_range"),
    "beta of one": Case({"actor__adam__betas": (0.9, 1.0)}, "--actor.adam.betas 1.0"),
    "loss option given twice": Case(
        {"actor__dual_clip": 3.0, "actor__loss_args": {"dual_clip": 4}}, "give one of them"
    ),
    "eval every 0 steps": Case({"eval__steps": 0, "eval__dataset": "x"}, "--eval.steps 0"),
    "eval without prompts": Case({"eval__steps": 5}, "set --eval.dataset"),
    "eval at the start without prompts": Case({"eval__at_start": True}, "set --eval.dataset"),
    "checkpoint every 0 steps": Case({"ckpt__save_steps": 0}, "--ckpt.save_steps 0"),
    "tensor parallel": Case({"fsdp__tp_size": 2}, "set --fsdp.tp_size 1"),
    "context parallel": Case({"fsdp__cp_size": 2}, "set --fsdp.cp_size 1"),
    "expert parallel": Case({"fsdp__ep_size": 2}, "set --fsdp.ep_size 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_what_to_change(case):
    with pytest.raises(ConfigError) as error:
        check_rl(rl(**REFUSED[case].options), REFUSED[case].needs)
    assert REFUSED[case].says in str(error.value)


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({}, GROUPS),
        ({"rollout__n_samples_per_prompt": 1}, Needs(token_kl=True)),
        ({**SYNC, "algo__advantage__is_correction_level": "off"}, GROUPS),
        ({"train__batch_size": 16, "train__max_epochs": 2}, GROUPS),
        ({"train__async_queue_size": 3, "train__max_staleness": 2, "rollout__vllm_generate_batch_size": 32}, GROUPS),
        ({"algo__advantage__is_correction_level": "seq", "algo__advantage__is_correction_mode": "mask"}, GROUPS),
        ({"eval__steps": 5, "eval__dataset": "x.jsonl", "eval__temperature": 0}, GROUPS),
        ({"algo__kl__init_coef": 0.1, "ref__model_name_or_path": "m", "algo__kl__target": 0.1}, GROUPS),
        ({"algo__kl__init_coef": 0.1, "algo__kl__ref": "rollout"}, GROUPS),
        ({"algo__kl__init_coef": 0.1, "algo__kl__use_loss": False}, Needs(token_kl=True)),
        ({"ref__model_name_or_path": "m"}, DISTILL),
        ({"critic__value_clip": 0.1, "actor__freezing_steps": 2}, Needs(values=True)),
        ({"ckpt__save_steps": 10, "data__max_len": 64, "rollout__max_new_tokens": 63}, GROUPS),
    ],
)
def test_what_works_is_accepted(options, needs):
    assert check_rl(rl(**options), needs) is None


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
    with pytest.raises(ConfigError, match="needs at least 2"):
        check_rl(rl(rollout__n_samples_per_prompt=1), Needs(groups=True))
