from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_core import ConfigError
from molt_core.config import RLConfig, SFTConfig
from molt_core.config.flags import flags, merge, nested, parse_text, resolve
from molt_core.config.toml import dump_toml, read_toml

REQUIRED = {"actor": {"model_name_or_path": "m"}, "data": {"prompt_dataset": "p.jsonl"}, "env": {"name": "e"}}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("model", [RLConfig, SFTConfig])
def test_every_option_is_documented_and_has_a_name_of_its_own(model):
    found = list(flags(model))
    assert len({flag.name for flag in found}) == len(found)
    assert [flag.name for flag in found if not flag.help] == []


def test_forms_follow_from_the_types():
    forms = {flag.dotted: (flag.form, flag.arity, flag.metavar) for flag in flags(RLConfig)}
    assert forms["actor.adam.betas"] == ("tuple", 2, "FLOAT FLOAT")
    assert forms["actor.eps_clip_low_high"] == ("tuple", 2, "FLOAT FLOAT")
    assert forms["ckpt.load_enable"][0] == "switch"
    assert forms["vllm.enforce_eager"][0] == "switch"
    assert forms["logger.trackers"] == ("list", 1, "TEXT[,...]")
    assert forms["env.args"][0] == "table"
    assert forms["data.max_samples"] == ("value", 1, "INT")
    assert forms["data.prompt_dataset"] == ("value", 1, "PATH")
    assert forms["device"] == ("value", 1, "auto|cuda|cpu")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-1.5", -1.5),
        ("true", True),
        ('"3"', "3"),
        ("[1, 2]", [1, 2]),
        ("{a = 1}", {"a": 1}),
        ("plain text", "plain text"),
        ("True", "True"),
        ("2024-01-01", "2024-01-01"),
        ("1\nother = 2", "1\nother = 2"),
        ("", ""),
    ],
)
def test_table_values_are_toml_or_text(text, value):
    assert parse_text(text) == value
    assert type(parse_text(text)) is type(value)


TABLES = st.recursive(
    st.integers() | st.text(max_size=3),
    lambda children: st.dictionaries(st.sampled_from("abc"), children, max_size=3),
    max_leaves=8,
).filter(lambda value: isinstance(value, dict))


@given(TABLES, TABLES)
def test_merging_keeps_all_of_the_later_and_what_it_does_not_touch(base, over):
    merged = merge(base, over)
    assert merge(merged, over) == merged
    assert set(merged) == set(base) | set(over)
    assert all(merged[key] == base[key] for key in set(base) - set(over))
    assert all(merged[key] == over[key] for key in over if not isinstance(over[key], dict))


def test_later_files_win_over_earlier_and_options_over_files(tmp_path):
    one = write(tmp_path / "one.toml", "[train]\nseed = 1\nmax_steps = 10\n[env.args]\na = 1\nb = 1\n")
    two = write(tmp_path / "two.toml", "[train]\nseed = 2\n[env.args]\nb = 2\n")
    config = resolve(
        RLConfig, [one, two], [REQUIRED, nested(("env", "args", "c"), 3), nested(("train", "max_steps"), "5")]
    )
    assert (config.train.seed, config.train.max_steps) == (2, 5)
    assert config.env.args == {"a": 1, "b": 2, "c": 3}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "[algo.advantage]\nestimater = 'grpo'",
            ("run.toml: unknown option algo.advantage.estimater, did you mean algo.advantage.estimator?",),
        ),
        ("algo = 3", ("--algo", "got 3")),
        ("[train]\nseed = 'x'", ("--train.seed", "integer", "got 'x'")),
        ("[fsdp]\nparam_dtype = 'bf17'", ("--fsdp.param_dtype", "did you mean bf16?")),
        ("[rollout]\nbatch_size = 0", ("--rollout.batch_size", "greater than 0", "got 0")),
        ("[actor.adam]\nbetas = [0.9]", ("--actor.adam.betas",)),
        ("[train\n", ("not valid TOML", "line 1")),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, text, parts):
    with pytest.raises(ConfigError) as error:
        resolve(RLConfig, [write(tmp_path / "run.toml", text)], [REQUIRED])
    for part in parts:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        resolve(RLConfig, [tmp_path / "nowhere.toml"], [])


def test_required_options_are_named_together():
    with pytest.raises(ConfigError) as error:
        resolve(RLConfig, [], [])
    for name in ("--actor.model_name_or_path", "--data.prompt_dataset"):
        assert name in str(error.value)
    with pytest.raises(ConfigError, match=r"--model\.model_name_or_path, --data\.dataset"):
        resolve(SFTConfig, [], [])


@given(
    args=st.dictionaries(
        st.text(min_size=1), st.integers(-9, 9) | st.text() | st.booleans() | st.lists(st.integers(0, 9))
    ),
    steps=st.none() | st.integers(1, 99),
    temperature=st.floats(0.001, 100),
    trackers=st.lists(st.sampled_from(["jsonl", "tensorboard"])),
)
def test_the_resolved_configuration_reads_back_the_same(tmp_path_factory, args, steps, temperature, trackers):
    config = resolve(
        RLConfig,
        [],
        [
            REQUIRED,
            {"env": {"args": args}, "train": {"max_steps": steps}, "logger": {"trackers": trackers}},
            {"rollout": {"temperature": temperature}},
        ],
    )
    path = write(tmp_path_factory.mktemp("toml") / "config.toml", "")
    path.write_text(dump_toml(config), encoding="utf-8")
    assert resolve(RLConfig, [path], []) == config
    assert "max_steps" in read_toml(path)["train"] or steps is None


@pytest.mark.parametrize("model", [RLConfig, SFTConfig])
def test_what_may_be_unset_is_unset_by_default_so_that_leaving_it_out_means_the_same(model):
    assert {flag.name for flag in flags(model) if flag.optional and flag.default is not None} == set()
