import pytest

from molt_core.plugins.compat import check_core


@pytest.mark.parametrize(
    ("specifier", "running", "accepted"),
    [
        (">=1.9", "1.10", True),
        (">=1.10", "1.9", False),
        ("<2", "1.99", True),
        (">=2", "1.4", False),
        (">=1,<2", "1.4", True),
        ("==1.*", "1.10", True),
        ("~=1.4", "1.10", True),
        ("~=1.4", "2.0", False),
        ("", "1.4", True),
    ],
)
def test_versions_are_compared_as_versions(specifier, running, accepted):
    assert (check_core("p", "dist", [f"molt-core{specifier}"], running).problem == "") is accepted


def test_a_prerelease_counts_as_its_release_with_a_note():
    result = check_core("p", "dist", ["molt-core>=2"], "2.0.0rc1")
    assert result.problem == ""
    assert "2.0.0rc1" in result.note


def test_a_prerelease_beyond_the_bound_is_refused():
    assert check_core("p", "dist", ["molt-core<2"], "2.0.0rc1").problem


def test_no_requirement_on_the_core_is_accepted():
    assert check_core("p", "dist", ["numpy>=99", "this is not a requirement"], "1.4").problem == ""


def test_a_requirement_of_an_extra_does_not_count():
    assert check_core("p", "dist", ['molt-core>=9; extra == "dev"'], "1.4").problem == ""


def test_an_unreadable_requirement_names_the_plugin():
    problem = check_core("sums", "molt-sums", ["molt_core not a version"], "1.4").problem
    assert "sums" in problem
    assert "not a version" in problem


@pytest.mark.parametrize(
    ("specifier", "running", "update"),
    [
        (">=2", "1.4", "molt-core"),
        ("<2", "2.1", "molt-sums"),
        ("==1.*", "2.1", "molt-sums"),
        ("==3.*", "2.1", "molt-core"),
    ],
)
def test_the_refusal_says_who_needs_what_and_which_side_to_update(specifier, running, update):
    problem = check_core("sums", "molt-sums", [f"Molt_Core{specifier}"], running).problem
    assert "plugin sums of molt-sums" in problem
    assert specifier in problem
    assert running in problem
    assert problem.endswith(f"update {update}")
