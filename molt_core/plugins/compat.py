"""Whether a plugin's distribution accepts the running core, from its metadata alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import Specifier
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

CORE = "molt-core"


@dataclass(frozen=True, slots=True)
class Compatibility:
    """``problem`` is empty when the core is accepted; ``note`` says when it is only nearly what was asked for."""

    problem: str = ""
    note: str = ""


def check_core(plugin: str, distribution: str, requires: Iterable[str], running: str) -> Compatibility:
    """Compare the ``Requires-Dist`` lines of a distribution with the running core's version (PEP 440).

    A prerelease counts as the release that it leads to, with a note. A line on the core that cannot be read is refused.
    """
    version = Version(running)
    who = f"plugin {plugin} of {distribution}"
    notes = []
    for line in requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            if canonicalize_name(line.strip()).startswith(CORE):
                return Compatibility(
                    f"{who} has an unreadable requirement on the core, {line!r}: update {distribution}"
                )
            continue
        if canonicalize_name(requirement.name) != CORE or not _applies(requirement):
            continue
        specifiers = requirement.specifier
        if specifiers.contains(version, prereleases=True):
            continue
        if version.is_prerelease and specifiers.contains(version.base_version):
            notes.append(f"prerelease {running} of {CORE} taken for {version.base_version}")
            continue
        failed = [s for s in specifiers if not s.contains(version, prereleases=True)]
        update = CORE if any(_wants_newer(s, version) for s in failed) else distribution
        return Compatibility(
            f"{who} requires {CORE} {specifiers}, but {running} is running: update {update}",
        )
    return Compatibility(note="; ".join(notes))


def _applies(requirement: Requirement) -> bool:
    """Requirements of an extra, or for another platform, do not count."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _wants_newer(specifier: Specifier, running: Version) -> bool:
    """Whether a failed specifier asks for a later version than the running one."""
    if specifier.operator in ("<", "<=", "!="):
        return specifier.operator == "!="
    try:
        return running < Version(specifier.version.removesuffix(".*"))
    except InvalidVersion:
        return False
