import logging
import pickle
import sys

import pytest

from molt_core import ConfigError, Env, Tracker
from molt_core.plugins import PluginSpec, absolute_name, load_plugins

PLUGIN = """
from molt_core import hookimpl

@hookimpl
def molt_register_environments(register):
    register("{name}", "{module}:Sums")
"""
ENV = """
from molt_core import Env
from pydantic import BaseModel

class Sums(Env):
    class Config(BaseModel):
        tries: int = 2
        label: str = "x"

    def __init__(self, config=None, extra=None):
        super().__init__(config)
        self.extra = extra
"""


def record(plugins, name):
    return next(r for r in plugins.records if r.name == name)


@pytest.fixture
def sums(install):
    install(
        "molt-sums",
        {"sums": "sums_plugin"},
        {"sums_plugin": PLUGIN.format(name="sums", module="sums_env"), "sums_env": ENV},
    )


def test_an_installed_plugin_is_found_and_its_component_created(sums):
    env = load_plugins().create("environment", "sums", {"tries": 5}, extra="e")
    assert isinstance(env, Env)
    assert env.config.tries == 5
    assert env.extra == "e"


def test_a_lazy_reference_is_not_imported_before_use(sums):
    plugins = load_plugins()
    assert "sums_env" not in sys.modules
    plugins.resolve("environment", "sums")
    assert "sums_env" in sys.modules


def test_the_class_itself_can_be_registered(install):
    source = """
from molt_core import Env, hookimpl

class Direct(Env):
    pass

@hookimpl
def molt_register_environments(register):
    register("direct", Direct)
"""
    install("molt-direct", {"direct": "direct_plugin"}, {"direct_plugin": source})
    plugins = load_plugins()
    assert plugins.resolve("environment", "direct").__name__ == "Direct"
    assert record(plugins, "direct").components[0].reference == "direct_plugin:Direct"


@pytest.mark.parametrize("order", [("alpha", "beta"), ("beta", "alpha")])
def test_a_name_offered_twice_is_an_error_in_every_path_order(install, order):
    for name in order:
        module = f"{name}_m"
        install(
            name,
            {"p": module},
            {
                module: PLUGIN.format(name="grid", module=f"{name}_env")
                + f'    register("{name}-own", "{name}_env:Sums")\n',
                f"{name}_env": ENV,
            },
        )
    plugins = load_plugins()
    with pytest.raises(ConfigError) as error:
        plugins.resolve("environment", "grid")
    assert str(error.value) == (
        "environment grid is offered by alpha and beta: write --env.name alpha/grid or --env.name beta/grid"
    )
    assert plugins.resolve("environment", "beta/grid").__module__ == "beta_env"
    assert plugins.resolve("environment", "alpha/grid").__module__ == "alpha_env"
    assert plugins.resolve("environment", "alpha-own").__module__ == "alpha_env"


def test_a_plugin_cannot_take_the_place_of_a_built_in(install):
    source = PLUGIN.format(name="default", module="gamma_env").replace("environments", "chat_templates")
    install("gamma", {"p": "gamma_m"}, {"gamma_m": source + '    register("own", "gamma_env:Sums")\n'})
    plugins = load_plugins()
    with pytest.raises(ConfigError, match="default is offered by gamma and molt-core"):
        plugins.resolve("chat-template", "default")
    assert plugins.resolve("chat-template", "molt-core/default").__module__ == "molt_core.chat.template"
    assert plugins.names("chat-template") == ["gamma/default", "molt-core/default", "own"]
    assert load_plugins(PluginSpec(disable=("gamma",))).resolve("chat-template", "default")


def test_a_distribution_twice_on_the_path_is_no_collision_and_the_first_counts(install):
    files = {"twice_m": PLUGIN.format(name="twice", module="twice_env"), "twice_env": ENV}
    install("molt-twice", {"p": "twice_m"}, files, version="1.0", site="old")
    install("molt-twice", {"p": "twice_m"}, files, version="2.0", site="new")
    plugins = load_plugins()
    assert [r.version for r in plugins.records if r.distribution == "molt-twice"] == ["2.0"]
    assert plugins.resolve("environment", "twice")


def test_a_copy_without_entry_points_shadows_one_with_them(install, tmp_path):
    install("molt-gone", {"p": "gone_m"}, {"gone_m": PLUGIN.format(name="gone", module="gone_env")}, site="old")
    newer = install("molt-gone", {}, version="2.0", site="new")
    (newer / "molt_gone-2.0.dist-info" / "entry_points.txt").unlink()
    assert [r for r in load_plugins().records if r.distribution == "molt-gone"] == []


BROKEN = {
    "missing module": ({}, "ModuleNotFoundError"),
    "import error": ({"bad_m": "import a_module_that_is_not_there"}, "a_module_that_is_not_there"),
    "syntax error": ({"bad_m": "def"}, "SyntaxError"),
    "exit": ({"bad_m": "raise SystemExit(3)"}, "SystemExit"),
    "unknown hook": (
        {"bad_m": "from molt_core import hookimpl\n@hookimpl\ndef molt_register_enviroments(register): pass"},
        "did you mean molt_register_environments",
    ),
    "wrong argument": (
        {"bad_m": "from molt_core import hookimpl\n@hookimpl\ndef molt_configure(settings): pass"},
        "settings",
    ),
    "no marker": ({"bad_m": "def molt_register_losses(register): pass"}, "hookimpl"),
    "bad name": ({"bad_m": PLUGIN.format(name="a/b", module="m")}, "a/b"),
    "bad reference": ({"bad_m": PLUGIN.format(name="a", module="m:x")}, "m:x:Sums"),
    "twice": ({"bad_m": PLUGIN.format(name="a", module="m") + '    register("a", "m:Other")'}, "twice"),
    "always": (
        {"bad_m": PLUGIN.format(name="a", module="m").replace('Sums")', 'Sums", always=True)')},
        "only a tracker",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_shown_with_its_reason_and_harms_no_other(install, sums, case):
    modules, reason = BROKEN[case]
    install("molt-bad", {"bad": "bad_m"}, modules)
    plugins = load_plugins()
    assert record(plugins, "bad").status == "failed"
    assert reason in record(plugins, "bad").error
    assert record(plugins, "bad").components == ()
    assert plugins.resolve("environment", "sums")


def test_two_entry_points_of_one_distribution_cannot_register_the_same_name(install):
    modules = {m: PLUGIN.format(name="same", module=m) for m in ("one_m", "two_m")}
    install("molt-pair", {"one": "one_m", "two": "two_m"}, modules)
    plugins = load_plugins()
    assert record(plugins, "one").status == "loaded"
    assert "environment same is registered twice by molt-pair" in record(plugins, "two").error


def test_an_entry_point_that_is_no_module_or_object_with_hooks_harms_no_other(install, sums):
    install("molt-bad", {"bad": "bad_m:plugin"}, {"bad_m": "plugin = {}"})
    plugins = load_plugins()
    assert "unhashable" in record(plugins, "bad").error
    assert plugins.resolve("environment", "sums")


def test_a_missing_attribute_of_the_entry_point_is_a_failure(install):
    install("molt-bad", {"bad": "bad_m:plugin"}, {"bad_m": ""})
    assert "plugin" in record(load_plugins(), "bad").error


def test_unreadable_entry_points_harm_no_other(install, sums):
    folder = install("molt-bad", {"bad": "bad_m"})
    (folder / "molt_bad-1.0.dist-info" / "entry_points.txt").write_text("[molt]\nno equals sign\n")
    plugins = load_plugins()
    assert next(r for r in plugins.records if r.distribution == "molt-bad").status == "failed"
    assert plugins.resolve("environment", "sums")


def test_a_plugin_for_another_core_is_not_imported(install, sums):
    install("molt-new", {"new": "new_m"}, {"new_m": "raise RuntimeError"}, requires=["molt-core>=999"])
    plugins = load_plugins()
    assert record(plugins, "new").status == "incompatible"
    assert "update molt-core" in record(plugins, "new").error
    assert "new_m" not in sys.modules
    assert plugins.resolve("environment", "sums")


def test_an_unknown_name_shows_the_nearest_all_and_what_failed(install, sums):
    install("molt-bad", {"bad": "bad_m"}, {"bad_m": "import a_module_that_is_not_there"})
    with pytest.raises(ConfigError) as error:
        load_plugins().resolve("environment", "sum")
    text = str(error.value)
    assert "unknown environment sum, did you mean sums?" in text
    assert "molt-bad/bad is failed" in text
    assert "a_module_that_is_not_there" in text


def test_a_component_that_cannot_be_imported_is_an_error_of_the_run_that_needs_it(install):
    install("molt-lazy", {"lazy": "lazy_m"}, {"lazy_m": PLUGIN.format(name="lazy", module="nowhere_env")})
    plugins = load_plugins()
    assert record(plugins, "lazy").status == "loaded"
    with pytest.raises(ConfigError, match=r"environment lazy of molt-lazy .*nowhere_env"):
        plugins.resolve("environment", "lazy")


@pytest.mark.parametrize("name", ["sums", "molt-sums", "molt_sums", "molt-sums/sums"])
def test_a_plugin_is_disabled_by_entry_point_or_distribution_name(sums, name):
    plugins = load_plugins(PluginSpec(disable=(name,)))
    assert record(plugins, "sums").status == "disabled"
    assert "sums_plugin" not in sys.modules
    with pytest.raises(ConfigError, match="molt-sums/sums is disabled"):
        plugins.resolve("environment", "sums")


def test_disabling_what_does_not_exist_warns_with_the_nearest_name(sums, caplog):
    load_plugins(PluginSpec(disable=("molt-sum",)))
    assert "did you mean molt-sums?" in caplog.text


def test_without_autoload_only_what_is_asked_for_and_the_cores_own_is_loaded(install, sums):
    install("molt-other", {"other": "other_m"}, {"other_m": ""})
    plugins = load_plugins(PluginSpec(autoload=False, only=("sums",)))
    status = {r.distribution: r.status for r in plugins.records}
    assert status["molt-sums"] == "loaded"
    assert status["molt-other"] == "disabled"


def test_a_worker_gets_the_same_set_from_the_spec_whatever_else_is_installed(install, sums):
    spec = pickle.loads(pickle.dumps(load_plugins().spec))
    install("molt-late", {"late": "late_m"}, {"late_m": PLUGIN.format(name="sums", module="late_env")})
    worker = load_plugins(spec)
    assert record(worker, "late").status == "disabled"
    assert worker.resolve("environment", "sums").__module__ == "sums_env"


def test_a_worker_that_lacks_a_plugin_says_so():
    plugins = load_plugins(PluginSpec(autoload=False, only=("molt-far/far",)))
    with pytest.raises(ConfigError, match=r"molt-far/far is failed .it is not installed here"):
        plugins.resolve("environment", "far")


def test_unknown_options_name_the_flag_and_the_nearest(sums):
    with pytest.raises(ConfigError, match=r"unknown option --env\.args\.trys, did you mean --env\.args\.tries\?"):
        load_plugins().create("environment", "sums", {"trys": 3})


def test_a_wrong_type_names_the_option(sums):
    with pytest.raises(ConfigError, match=r"--env\.args\.tries: .*integer.*'many'"):
        load_plugins().validate("environment", "sums", {"tries": "many"})


def test_a_number_for_a_text_option_says_how_to_quote(sums):
    with pytest.raises(ConfigError, match=r"--env\.args\.label: .* for text write '\"5\"'"):
        load_plugins().validate("environment", "sums", {"label": 5})


def test_a_class_of_the_wrong_kind_is_refused(sums):
    plugins = load_plugins()
    with pytest.raises(ConfigError, match=r"not a subclass of molt_core\.Estimator"):
        plugins.resolve("estimator", "molt_core:Env")
    with pytest.raises(ConfigError, match=r"not a subclass of molt_core\.Env"):
        plugins.resolve("environment", "json:dumps")


def test_a_local_file_works_without_packaging(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_env.py").write_text(ENV)
    plugins = load_plugins()
    name = absolute_name("./my_env.py:Sums")
    assert name == f"{tmp_path}/my_env.py:Sums"
    cls = plugins.resolve("environment", "./my_env.py:Sums")
    monkeypatch.chdir("/")
    assert plugins.resolve("environment", name) is cls
    assert plugins.create("environment", name, {"tries": 1}).config.tries == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("./none.py:Sums", "there is no file"),
        ("./my_env.py", "./file.py:Class"),
        ("./my_env.py:Nope", "Nope"),
        ("./broken.py:Sums", "ZeroDivisionError"),
        ("no_such_module:Sums", "no_such_module"),
    ],
)
def test_a_bad_local_reference_says_what_is_wrong(tmp_path, monkeypatch, name, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_env.py").write_text(ENV)
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ConfigError) as error:
        load_plugins().resolve("environment", name)
    assert text in str(error.value)
    assert f"--env.name {name}" in str(error.value)


def test_names_that_are_no_files_stay_as_they_are():
    assert [absolute_name(n) for n in ("sums", "a/b", "pkg.mod:Cls")] == ["sums", "a/b", "pkg.mod:Cls"]


EVENTS = """
from molt_core import hookimpl
seen = []

@hookimpl
def molt_step_finished(step, metrics):
    seen.append((step, metrics))
    raise RuntimeError("boom")

@hookimpl
def molt_configure():
    seen.append("configured")
"""


def test_an_exception_in_an_event_hook_is_logged_with_the_plugins_name_and_stops_nobody(install, caplog):
    install("molt-one", {"one": "one_m"}, {"one_m": EVENTS})
    install("molt-two", {"two": "two_m"}, {"two_m": EVENTS})
    plugins = load_plugins()
    with caplog.at_level(logging.ERROR, logger="molt"):
        plugins.hook.molt_step_finished(step=3, metrics={"reward": 1.0})
        plugins.hook.molt_configure(config=None)
    for name in ("one", "two"):
        assert sys.modules[f"{name}_m"].seen == [(3, {"reward": 1.0}), "configured"]
        assert f"plugin molt-{name}/{name}: molt_step_finished failed" in caplog.text
    assert "boom" in caplog.text


TRACKERS = """
from molt_core import Tracker, hookimpl

class Quiet(Tracker):
    pass

@hookimpl
def molt_register_trackers(register):
    register("quiet", Quiet)
    register("loud", Quiet, always=True)
"""


def test_trackers_that_are_always_on_are_listed(install):
    install("molt-track", {"track": "track_m"}, {"track_m": TRACKERS})
    plugins = load_plugins(PluginSpec(autoload=False, only=("track",)))
    assert "loud" in plugins.trackers_always()
    assert "quiet" not in plugins.trackers_always()
    assert isinstance(plugins.create("tracker", "loud"), Tracker)
    with pytest.raises(ConfigError, match=r"unknown option --logger\.tracker_args\.loud\.file"):
        plugins.validate("tracker", "loud", {"file": "x"})
