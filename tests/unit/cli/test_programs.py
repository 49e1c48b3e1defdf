import tomllib

import pytest
from click.testing import CliRunner

from molt_core import ConfigError
from molt_core.cli import main
from molt_core.cli.programs import ConfigCommand
from molt_core.config import RLConfig

REQUIRED = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "p.jsonl", "--env.name", "sums"]


class Program:
    """`molt train` with a check and a run that note what they were given."""

    def __init__(self):
        self.checked, self.ran = [], []
        self.command = ConfigCommand(
            "train",
            RLConfig,
            lambda config, plugins: self.checked.append((config, plugins)),
            lambda config, plugins, inputs: self.ran.append((config, plugins)),
            "Train.",
        )

    def __call__(self, *args):
        return CliRunner().invoke(self.command, [*REQUIRED, *args], standalone_mode=False)

    def config(self, *args):
        result = self(*args)
        assert result.exception is None, result.exception
        return self.ran[-1][0]

    def error(self, *args):
        result = self(*args)
        assert self.ran == []
        assert isinstance(result.exception, ConfigError), result.exception
        return str(result.exception)


@pytest.fixture
def program():
    return Program()


def test_options_reach_the_program_with_their_types(program):
    config = program.config(
        *("--algo.advantage.estimator", "grpo"),
        *("--actor.adam.betas", "0.9", "0.98"),
        *("--actor.adam.lr", "2e-6"),
        *("--rollout.n_samples_per_prompt", "4"),
        *("--rollout.top_k", "-1"),
        "--ckpt.load_enable",
        "--no-data.shuffle",
        *("--env.args.tries", "3"),
        "--env.args.words=a b",
        *("--env.args.deep.er", "[1]"),
        *("--logger.trackers", "jsonl,tensorboard", "--logger.trackers", "extra"),
        *("--logger.tracker_args.jsonl.flush", "true"),
    )
    assert config.algo.advantage.estimator == "grpo"
    assert config.actor.adam.betas == (0.9, 0.98)
    assert config.actor.adam.lr == 2e-6
    assert config.rollout.n_samples_per_prompt == 4
    assert config.ckpt.load_enable is True
    assert config.data.shuffle is False
    assert config.env.args == {"tries": 3, "words": "a b", "deep": {"er": [1]}}
    assert config.logger.trackers == ("jsonl", "tensorboard", "extra")
    assert config.logger.tracker_args == {"jsonl": {"flush": True}}


def test_what_is_not_given_keeps_its_default(program):
    defaults = RLConfig()
    config = program.config()
    assert config.train == defaults.train
    assert config.vllm == defaults.vllm


def test_options_win_over_files_and_none_unsets(program, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[train]\nmax_steps = 7\nseed = 3\n[ckpt]\nload_enable = true\n")
    config = program.config("--config", str(file), "--train.max_steps", "none", "--no-ckpt.load_enable")
    assert config.train.max_steps is None
    assert config.train.seed == 3
    assert config.ckpt.load_enable is False


def test_a_dry_run_checks_prints_toml_and_starts_nothing(program, tmp_path):
    result = program("--dry-run", "--env.args.tries", "3", "--eval.temperature", "0")
    assert program.ran == []
    assert len(program.checked) == 1
    data = tomllib.loads(result.output)
    assert data["env"]["args"] == {"tries": 3}
    assert "max_steps" not in data["train"]
    file = tmp_path / "resolved.toml"
    file.write_text(result.output)
    assert program("--config", str(file), "--dry-run").output == result.output


def test_a_run_is_checked_first_and_gets_the_plugins(program):
    program.config()
    (config, plugins), ran = program.checked[0], program.ran[0]
    assert ran == (config, plugins)
    assert plugins.names("chat-template") == ["default"]


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--env.arg.tries", "3"], ("--env.arg.tries",)),
        (["--algo.advantage.estimatr", "grpo"], ("did you mean --algo.advantage.estimator?",)),
        (["--estimator", "grpo"], ("did you mean --algo.advantage.estimator?",)),
        (["--actor.adam.betas", "0.9"], ("--actor.adam.betas",)),
        (["surplus"], ("surplus",)),
    ],
)
def test_what_the_command_line_does_not_know_is_one_line_and_code_2(capsys, args, parts):
    assert main(["train", *REQUIRED, *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--env.args", "3"], "--env.args.KEY VALUE"),
        (["--env.args.tries"], "--env.args.tries needs a value"),
        (["--env.args.tries", "--train.seed", "1"], "--env.args.tries needs a value"),
        (["--train.seed", "x"], "--train.seed: input should be a valid integer"),
        (["--rollout.batch_size", "0"], "--rollout.batch_size"),
        (["--config", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_wrong_values_are_errors_that_name_the_option(program, args, text):
    assert text in program.error(*args)


def test_missing_options_are_code_2_without_a_traceback(capsys):
    assert main(["sft"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Error: missing: --model.model_name_or_path, --data.dataset")
    assert "Traceback" not in err


def test_component_files_become_absolute(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = ["--env.name", "./my_env.py:E", "--logger.trackers", "t.py:T", "--algo.advantage.estimator", "sub/e.py:X"]
    config = program.config(*args, "--reward.name", "pkg.mod:R")
    assert config.env.name == f"{tmp_path}/my_env.py:E"
    assert config.logger.trackers == (f"{tmp_path}/t.py:T",)
    assert config.algo.advantage.estimator == f"{tmp_path}/sub/e.py:X"
    assert config.reward.name == "pkg.mod:R"
    assert config.data.chat_template == "default"


def test_no_plugin_becomes_part_of_the_configuration(program):
    config = program.config("--no-plugin", "molt-core", "--no-plugin", "other", "--plugins.disable", "first")
    assert config.plugins.disable == ("first", "molt-core", "other")
    assert program.ran[-1][1].names("chat-template") == []


def test_the_variable_that_turns_autoload_off_becomes_part_of_the_configuration(program, monkeypatch):
    assert program.config().plugins.autoload is True
    monkeypatch.setenv("MOLT_DISABLE_PLUGIN_AUTOLOAD", "1")
    config = program.config()
    assert config.plugins.autoload is False
    assert program.ran[-1][1].names("chat-template") == ["default"]


@pytest.mark.parametrize("program_name", ["train", "sft"])
def test_help_is_grouped_and_shows_defaults(capsys, program_name):
    assert main([program_name, "--help"]) == 0
    out = capsys.readouterr().out
    for text in (
        "ckpt (Resumable checkpoints",
        "--[no-]ckpt.load_enable",
        "[default: 3]",
        "--config FILE",
        "--dry-run",
    ):
        assert text in out
