import json
import subprocess
import sys

import pytest

from molt_core.cli import main

HEAVY = "import sys; heavy = {'torch', 'ray', 'vllm', 'transformers', 'nemo_automodel', 'numpy'}; "
COMMAND = """
import click
from molt_core import hookimpl

@hookimpl
def molt_add_commands(cli):
    @cli.command("hello")
    def hello():
        "Say hello."
        click.echo("hello there")
"""
REPLACES = COMMAND.replace('"hello"', '"train"')
LAZY = """
from molt_core import hookimpl

@hookimpl
def molt_register_environments(register):
    register("lazy", "lazy_env:Env")
"""


@pytest.mark.parametrize(
    "code",
    [
        "import molt_core",
        "from molt_core.cli import main; main(['--help'])",
        "from molt_core.cli import main; main(['list-plugins'])",
        "from molt_core.cli import main; main(['list-plugins', '--json'])",
        "from molt_core.cli import main; main(['train', '--help'])",
        "from molt_core.cli import main; assert main(['describe', 'tracker', 'jsonl']) == 0",
        "from molt_core.cli import main; main(['sft', '--help'])",
    ],
)
def test_looking_around_imports_nothing_heavy(code):
    check = f"{code}\n{HEAVY}found = heavy & set(sys.modules); assert not found, found"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_module_runs_as_a_program():
    result = subprocess.run([sys.executable, "-m", "molt_core.cli", "--version"], capture_output=True, text=True)
    assert result.stdout.startswith("molt, version ")


def listed(capsys, *args):
    assert main(["list-plugins", "--json", *args]) == 0
    return {item["distribution"]: item for item in json.loads(capsys.readouterr().out)}


def test_plugins_are_listed_as_json_without_importing_their_components(install, capsys):
    install("molt-lazy", {"lazy": "lazy_m"}, {"lazy_m": LAZY, "lazy_env": "raise RuntimeError"}, version="1.2")
    install("molt-bad", {"bad": "bad_m"}, {"bad_m": "import a_module_that_is_not_there"})
    install("molt-new", {"new": "new_m"}, {"new_m": ""}, requires=["molt-core>=999"])
    found = listed(capsys)
    assert found["molt-lazy"] == {
        "name": "lazy",
        "distribution": "molt-lazy",
        "version": "1.2",
        "status": "loaded",
        "error": "",
        "note": "",
        "components": [{"kind": "environment", "name": "lazy", "reference": "lazy_env:Env"}],
    }
    assert found["molt-bad"]["status"] == "failed"
    assert "a_module_that_is_not_there" in found["molt-bad"]["error"]
    assert found["molt-new"]["status"] == "incompatible"
    assert "lazy_env" not in sys.modules


def test_the_table_shows_plugins_and_reasons(install, capsys):
    install("molt-bad", {"bad": "bad_m"}, {"bad_m": "1 / 0"})
    assert main(["list-plugins"]) == 0
    out = capsys.readouterr().out
    assert "molt-bad/bad" in out
    assert "failed" in out
    assert "default" in out


@pytest.mark.parametrize(
    "args", [["list-plugins", "--no-plugin", "molt-lazy"], ["--no-plugin", "lazy", "list-plugins"]]
)
def test_a_disabled_plugin_is_listed_as_such(install, capsys, args):
    install("molt-lazy", {"lazy": "lazy_m"}, {"lazy_m": LAZY})
    assert main([*args, "--json"]) == 0
    found = {item["distribution"]: item for item in json.loads(capsys.readouterr().out)}
    assert found["molt-lazy"]["status"] == "disabled"
    assert found["molt-core"]["status"] == "loaded"


def test_autoload_can_be_turned_off(install, capsys, monkeypatch):
    install("molt-lazy", {"lazy": "lazy_m"}, {"lazy_m": LAZY})
    monkeypatch.setenv("MOLT_DISABLE_PLUGIN_AUTOLOAD", "1")
    found = listed(capsys)
    assert found["molt-lazy"]["status"] == "disabled"
    assert found["molt-core"]["status"] == "loaded"


def test_a_plugin_adds_a_command(install, capsys):
    install("molt-hello", {"hello": "hello_m"}, {"hello_m": COMMAND})
    assert main(["hello"]) == 0
    assert capsys.readouterr().out == "hello there\n"
    assert main(["--help"]) == 0
    assert "Say hello." in capsys.readouterr().out
    assert main(["--no-plugin", "hello", "hello"]) == 2


def test_a_plugin_cannot_replace_a_command(install, capsys, caplog):
    install("molt-evil", {"evil": "evil_m"}, {"evil_m": REPLACES})
    assert main(["--help"]) == 0
    assert "plugin molt-evil/evil: molt_add_commands failed" in caplog.text
    assert main(["train", "--help"]) == 0
    assert "--actor.model_name_or_path" in capsys.readouterr().out


def test_an_unknown_command_is_one_line_with_the_nearest(capsys):
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "Error: unknown command trian, did you mean train?\n"


def test_without_a_command_the_help_is_shown(capsys):
    assert main([]) == 0
    assert "list-plugins" in capsys.readouterr().out
