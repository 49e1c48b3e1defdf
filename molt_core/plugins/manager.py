"""Finding plugins, loading each by itself, and looking components up by kind and name.

A name is `name`, or `distribution/name`. When two distributions offer the same kind and name, built-ins included, the
short form is an error that shows the long ones: which is installed or found first never decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import pluggy
from packaging.utils import canonicalize_name

import molt_core
from molt_core.errors import ConfigError, did_you_mean
from molt_core.plugins import hookspecs, references
from molt_core.plugins.compat import CORE, check_core
from molt_core.plugins.hookspecs import EVENTS, KINDS

if TYPE_CHECKING:
    from pydantic import BaseModel

    from molt_core.component import Component
    from molt_core.config.shared import PluginsConfig

logger = logging.getLogger("molt")

GROUP = "molt"
Status = Literal["loaded", "disabled", "failed", "incompatible"]


@dataclass(frozen=True, slots=True)
class PluginSpec:
    """Which plugins to load; picklable, so that every process of a run loads the same ones.

    ``disable`` and ``only`` hold entry-point names, distribution names, or `distribution/entry-point`. Without
    ``autoload`` the plugins in ``only`` and the core's own are loaded. ``disable`` wins, for the core's own too.
    """

    disable: tuple[str, ...] = ()
    autoload: bool = True
    only: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: PluginsConfig) -> PluginSpec:
        return cls(config.disable, config.autoload, config.only)


@dataclass(frozen=True, slots=True)
class Registration:
    """A component on offer. ``ref`` is imported when it is first used, if it is text."""

    kind: str
    name: str
    ref: str | type
    distribution: str
    always: bool = False

    @property
    def reference(self) -> str:
        return self.ref if isinstance(self.ref, str) else f"{self.ref.__module__}:{self.ref.__qualname__}"

    @property
    def full_name(self) -> str:
        return f"{self.distribution}/{self.name}"


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """What became of one entry point. ``error`` says why it is not loaded, ``note`` what to know although it is."""

    name: str
    distribution: str
    version: str
    status: Status
    error: str = ""
    note: str = ""
    components: tuple[Registration, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.distribution}/{self.name}"

    def is_named(self, names: Iterable[str]) -> bool:
        """Whether one of the names means this plugin."""
        return any(
            name in (self.name, self.key) or canonicalize_name(name) == canonicalize_name(self.distribution)
            for name in names
        )


class Plugins:
    """The plugins of one process, as ``load_plugins`` found them.

    ``records``: one per entry point, broken ones included. ``hook``: the event hooks, called as
    `plugins.hook.molt_step_finished(step=1, metrics={})`; exceptions in them are logged. ``spec``: what a worker
    passes to ``load_plugins`` to get this same set, whatever else is installed where it runs.
    """

    def __init__(
        self, records: tuple[PluginRecord, ...], manager: pluggy.PluginManager, disable: tuple[str, ...] = ()
    ) -> None:
        self.records = records
        self.hook: Any = SimpleNamespace(
            **{event: partial(_call_each, event, _callers(manager, event)) for event in EVENTS}
        )
        loaded = tuple(r.key for r in records if r.status == "loaded")
        self.spec = PluginSpec(disable, autoload=False, only=loaded)
        self._offers: dict[tuple[str, str], list[Registration]] = {}
        for record in records:
            for component in record.components:
                self._offers.setdefault((component.kind, component.name), []).append(component)
        self._classes: dict[tuple[str, str], type[Component]] = {}

    def names(self, kind: str) -> list[str]:
        """What can be written for a component of this kind, sorted; the long form where the short one is ambiguous."""
        return sorted(
            offer.full_name if len(offers) > 1 else name
            for (offered, name), offers in self._offers.items()
            if offered == kind
            for offer in offers
        )

    def trackers_always(self) -> tuple[str, ...]:
        """Names of the trackers that are on in every run."""
        return tuple(
            offer.full_name if len(offers) > 1 else offer.name
            for (kind, _), offers in self._offers.items()
            for offer in offers
            if kind == "tracker" and offer.always
        )

    def resolve(self, kind: str, name: str) -> type[Component]:
        """The class for `name`, `distribution/name`, `package.module:Class` or `./file.py:Class`.

        ConfigError when nothing or more than one thing has the name, when it cannot be imported, or when it is not
        a component of this kind.
        """
        if (kind, name) not in self._classes:
            if references.is_local(name):
                self._classes[kind, name] = _load_class(kind, name, f"--{KINDS[kind].option} {name}")
            else:
                offer = self._find(kind, name)
                owner = f"{kind} {name} of {offer.distribution} ({offer.reference})"
                self._classes[kind, name] = _load_class(kind, offer.ref, owner)
        return self._classes[kind, name]

    def find(self, kind: str, name: str) -> Registration | None:
        """The registration of a name, None for a reference to local code; ConfigError as of ``resolve``."""
        return None if references.is_local(name) else self._find(kind, name)

    def validate(self, kind: str, name: str, args: Mapping[str, Any] | None = None) -> type[Component]:
        """The class for a name, its options checked as ``create`` does; ConfigError names the option."""
        cls = self.resolve(kind, name)
        self._config(cls, kind, name, args)
        return cls

    def create(self, kind: str, name: str, args: Mapping[str, Any] | None = None, /, **init: Any) -> Any:
        """An instance with validated options: ``cls(config, **init)``."""
        cls = self.resolve(kind, name)
        return cls(self._config(cls, kind, name, args), **init)

    def _config(self, cls: type[Component], kind: str, name: str, args: Mapping[str, Any] | None) -> BaseModel:
        from molt_core.config.validation import validated

        prefix = f"--{KINDS[kind].args}." if KINDS[kind].args else f"{kind} {name}: "
        if kind == "tracker":
            prefix += f"{name}."
        return validated(cls.Config, dict(args or {}), lambda path: prefix + ".".join(path))

    def _find(self, kind: str, name: str) -> Registration:
        distribution, _, short = name.rpartition("/")
        offers = [
            offer
            for offer in self._offers.get((kind, short), ())
            if not distribution or canonicalize_name(offer.distribution) == canonicalize_name(distribution)
        ]
        if not offers:
            raise ConfigError(self._unknown(kind, name))
        if len(offers) > 1:
            owners = " and ".join(offer.distribution for offer in offers)
            forms = " or ".join(f"--{KINDS[kind].option} {offer.full_name}" for offer in offers)
            raise ConfigError(f"{kind} {name} is offered by {owners}: write {forms}")
        return offers[0]

    def _unknown(self, kind: str, name: str) -> str:
        names = self.names(kind)
        text = f"unknown {kind} {name}{did_you_mean(name, names)}; available: {', '.join(names) or 'none'}"
        missing = [f"{r.key} is {r.status}{f' ({r.error})' if r.error else ''}" for r in self.records if r.error]
        missing += [f"{r.key} is disabled" for r in self.records if r.status == "disabled"]
        return f"{text}; not loaded: {'; '.join(missing)}" if missing else text


def load_plugins(spec: PluginSpec | None = None) -> Plugins:
    """Load what ``spec`` asks for out of the installed entry points in the group ``molt``.

    A plugin that cannot be loaded becomes a record with the reason and harms no other. Nothing but the plugins' own
    light modules is imported.
    """
    spec = spec or PluginSpec()
    manager = pluggy.PluginManager("molt")
    manager.add_hookspecs(hookspecs)
    records: list[PluginRecord] = []
    for found in _entry_points():
        records.append(_load(manager, spec, records, *found))
    for wanted in spec.only:
        if not any(record.is_named([wanted]) for record in records):
            distribution, _, name = wanted.rpartition("/")
            records.append(PluginRecord(name, distribution or wanted, "", "failed", "it is not installed here"))
    for name in spec.disable:
        if not any(record.is_named([name]) for record in records):
            near = did_you_mean(name, [form for r in records for form in (r.name, r.distribution)])
            logger.warning("no plugin is called %s, so none is disabled by that name%s", name, near)
    return Plugins(tuple(records), manager, spec.disable)


def _entry_points() -> list[tuple[metadata.Distribution, metadata.EntryPoint | str]]:
    """Entry points of the group, one distribution once, sorted by name; text instead where they cannot be read."""
    names = set()
    for distribution in metadata.distributions():
        if f"[{GROUP}]" in (distribution.read_text("entry_points.txt") or ""):
            names.add(canonicalize_name(distribution.metadata["Name"]))
    found: list[tuple[metadata.Distribution, metadata.EntryPoint | str]] = []
    for name in sorted(names):
        # The first on the path shadows the others, as it does for imports.
        distribution = metadata.distribution(name)
        try:
            points = sorted(distribution.entry_points.select(group=GROUP), key=lambda point: point.name)
        except Exception as error:
            found.append((distribution, f"its entry points cannot be read ({_one_line(error)})"))
        else:
            found += [(distribution, point) for point in points]
    return found


def _load(
    manager: pluggy.PluginManager,
    spec: PluginSpec,
    earlier: Sequence[PluginRecord],
    distribution: metadata.Distribution,
    point: metadata.EntryPoint | str,
) -> PluginRecord:
    owner = distribution.metadata["Name"]
    if isinstance(point, str):
        return PluginRecord("?", owner, distribution.version, "failed", point)
    record = PluginRecord(point.name, owner, distribution.version, "loaded")
    wanted = spec.autoload or canonicalize_name(owner) == CORE or record.is_named(spec.only)
    if record.is_named(spec.disable) or not wanted:
        return replace(record, status="disabled")
    compatible = check_core(point.name, owner, distribution.requires or (), molt_core.__version__)
    if compatible.problem:
        return replace(record, status="incompatible", error=compatible.problem)
    try:
        siblings = [component for r in earlier if r.distribution == owner for component in r.components]
        components = _register(manager, record, point, siblings)
    except (Exception, SystemExit) as error:
        return replace(record, status="failed", error=_one_line(error))
    return replace(record, note=compatible.note, components=components)


def _register(
    manager: pluggy.PluginManager,
    record: PluginRecord,
    point: metadata.EntryPoint,
    siblings: Sequence[Registration],
) -> tuple[Registration, ...]:
    """Import the plugin, check its hooks, and collect what it registers; the manager is as before on any failure."""
    plugin = point.load()
    hash(plugin)  # pluggy keeps plugins in sets
    others = manager.get_plugins()
    manager.register(plugin, record.key)
    try:
        _check_hooks(manager, plugin)
        components: list[Registration] = []
        for kind in KINDS:
            collect = partial(_collect, components, siblings, kind, record.distribution)
            manager.subset_hook_caller(KINDS[kind].hook, others)(register=collect)
    except BaseException:
        manager.unregister(name=record.key)
        raise
    return tuple(components)


def _collect(
    components: list[Registration],
    siblings: Sequence[Registration],
    kind: str,
    distribution: str,
    name: str,
    ref: str | type,
    always: bool = False,
) -> None:
    """The ``register`` that a plugin is given (hookspecs.Register)."""
    if not isinstance(name, str) or not name or set(name) & set("/: ,"):
        raise ValueError(f"{kind} name {name!r} must be text without '/', ':', ',' and spaces")
    if isinstance(ref, str) and (ref.count(":") != 1 or not all(ref.split(":"))):
        raise ValueError(f"{kind} {name}: reference {ref!r} is not of the form package.module:Class")
    if not isinstance(ref, str | type):
        raise TypeError(f"{kind} {name}: {ref!r} is neither a class nor a reference to one")
    if always and kind != "tracker":
        raise ValueError(f"{kind} {name}: only a tracker can be registered with always=True")
    if any((other.kind, other.name) == (kind, name) for other in (*siblings, *components)):
        raise ValueError(f"{kind} {name} is registered twice by {distribution}")
    components.append(Registration(kind, name, ref, distribution, always))


def _check_hooks(manager: pluggy.PluginManager, plugin: object) -> None:
    """Refuse implementations of hooks that do not exist, and hooks without the marker: neither would ever be called."""
    known = [*(kind.hook for kind in KINDS.values()), *EVENTS]
    implemented = {caller.name for caller in manager.get_hookcallers(plugin) or ()}
    for name in sorted(implemented - set(known)):
        raise ValueError(f"it implements the unknown hook {name}{did_you_mean(name, known)}")
    for name in known:
        if name not in implemented and callable(getattr(plugin, name, None)):
            raise ValueError(f"{name} lacks the marker @molt_core.hookimpl")


def _callers(manager: pluggy.PluginManager, event: str) -> list[tuple[str, Callable[..., Any]]]:
    """One caller per plugin that implements the event, so that each can fail alone."""
    plugins = manager.get_plugins()
    implementers = [implementation.plugin for implementation in getattr(manager.hook, event).get_hookimpls()]
    return [
        (manager.get_name(plugin) or "?", manager.subset_hook_caller(event, plugins - {plugin}))
        for plugin in implementers
    ]


def _call_each(event: str, callers: list[tuple[str, Callable[..., Any]]], **arguments: Any) -> None:
    for key, caller in callers:
        try:
            caller(**arguments)
        except (Exception, SystemExit):
            logger.exception("plugin %s: %s failed; the run goes on", key, event)


def _load_class(kind: str, ref: str | type, owner: str) -> type[Component]:
    from molt_core.component import Component

    try:
        found = references.load(ref) if isinstance(ref, str) else ref
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{owner} cannot be loaded: {_one_line(error)}") from error
    if not (isinstance(found, type) and issubclass(found, Component) and found.kind == kind):
        raise ConfigError(f"{owner} is not a subclass of {KINDS[kind].base}")
    return found


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
