import json

import pytest

from molt_core.cli import main
from molt_core.plugins import load_plugins

OWN = '''
from pydantic import BaseModel, Field
from molt_core import Estimator, Needs

class Mine(Estimator):
    """One line that says
    what it does.

    And more about it.
    """

    needs = Needs(groups=True, max_samples=4)

    class Config(BaseModel):
        scale: float = Field(description="How much.")
        band: tuple[float, float] = (0.5, 2.0)
        flat: bool = True
'''


def described(capsys, *args):
    assert main(["describe", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_component_of_a_package_shows_summary_needs_options_and_source(capsys):
    data = described(capsys, "estimator", "grpo")
    assert data["summary"].startswith("(r - mean) / (std + eps).")
    assert data["distribution"] == "molt-estimators"
    assert data["reference"] == "molt_estimators.groups:Grpo"
    assert (data["needs"]["groups"], data["needs"]["min_samples"]) == (True, 2)
    assert not data["needs"]["whitens"]
    assert described(capsys, "estimator", "reinforce_baseline")["needs"]["whitens"]
    assert data["options"] == [
        {
            "name": "--algo.advantage.args.eps",
            "type": "FLOAT",
            "default": 1e-6,
            "required": False,
            "description": "Added to the standard deviation.",
        }
    ]


def test_local_code_is_described_too(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    data = described(capsys, "estimator", f"{tmp_path}/mine.py:Mine")
    assert data["summary"] == "One line that says what it does."
    assert data["text"] == "And more about it."
    assert data["distribution"] == ""
    assert data["needs"]["max_samples"] == 4
    options = {option["name"].rpartition(".")[2]: option for option in data["options"]}
    assert options["scale"]["required"]
    assert options["scale"]["default"] is None
    assert (options["band"]["type"], options["band"]["default"]) == ("FLOAT FLOAT", [0.5, 2.0])
    assert (options["flat"]["type"], options["flat"]["default"]) == ("BOOL", True)


def test_the_text_has_the_same_and_no_colours_where_there_is_no_terminal(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    assert main(["describe", "estimator", f"{tmp_path}/mine.py:Mine"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    for part in ("One line that says what it does.", "max_samples  4", "scale FLOAT", "How much.  [required]"):
        assert part in out
    assert "[default: 0.5 2.0]" in out
    assert "[default: yes]" in out


def test_every_installed_component_can_be_described(capsys):
    for record in load_plugins().records:
        for component in record.components if record.status == "loaded" else ():
            assert described(capsys, component.kind, component.full_name)["summary"], component.full_name


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["estimatr", "grpo"], "unknown kind estimatr, did you mean estimator?"),
        (["estimator", "grop"], "unknown estimator grop, did you mean grpo?"),
        (["estimator", "molt-estimators/grop"], "unknown estimator molt-estimators/grop"),
        (["--no-plugin", "molt-estimators", "estimator", "grpo"], "molt-estimators/estimators is disabled"),
        (["loss", "molt_core.agents.env:Env"], "is not a subclass of molt_core.Loss"),
    ],
)
def test_what_is_not_there_is_one_line_and_exit_code_2(capsys, args, says):
    assert main(["describe", *args]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error
