"""Checking that the packages which a component needs are installed, and the pip line that installs
missing ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from email import message_from_string
from email.message import Message
from functools import lru_cache
from importlib import metadata
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


class Missing(NamedTuple):
    """A requirement that isn't met. `installed`: the installed version, which doesn't fit; None:
    the package isn't installed."""

    requirement: Requirement
    installed: str | None

    def __str__(self) -> str:
        return (
            f"{self.requirement} ({f'{self.installed} is' if self.installed else 'not'} installed)"
        )


class PathState(NamedTuple):
    """The entries of `sys.path`, each with the time of its last change in ns. Installing, upgrading
    or removing a package changes the time of its folder."""

    changes: tuple[tuple[str, int], ...]

    @classmethod
    def now(cls) -> PathState:
        return cls(tuple((place, _last_change_ns(place)) for place in sys.path))


def _last_change_ns(place: str) -> int:
    try:
        return os.stat(place or os.curdir).st_mtime_ns
    except (OSError, ValueError):
        return 0


@lru_cache(maxsize=1024)
def parsed(requirement: str) -> Requirement:
    """Return a PEP 508 requirement, which callers don't change. Raises packaging's
    `InvalidRequirement`."""
    return Requirement(requirement)


def missing_requirements(requires: Iterable[str]) -> list[Missing]:
    """Return the PEP 508 requirements that the environment doesn't meet; one whose marker doesn't
    apply is met."""
    missing = []
    for requirement in map(parsed, requires):
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        installed = installed_version(requirement.name)
        if installed is None or not requirement.specifier.contains(installed, prereleases=True):
            missing.append(Missing(requirement, installed))
    return missing


def installed_version(package: str) -> str | None:
    """Return the version of a package, or None if it isn't installed."""
    return _version(package, PathState.now())


@lru_cache(maxsize=1024)
def _version(package: str, state: PathState) -> str | None:
    try:
        found = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None
    return header(found, "Version")


def header(distribution: metadata.Distribution, name: str) -> str | None:
    """Return a header of a distribution's metadata, such as "Version", or None if it has none.
    Every start of an engine asks for those of the same distributions, whose texts are long."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO")
    return _headers_in(text)[name] if text else distribution.metadata[name]


@lru_cache(maxsize=256)
def _headers_in(text: str) -> Message:
    return message_from_string(text)


def pip_line(missing: Iterable[Missing], distribution: str) -> str:
    """Return a line like `pip install "dovetail-llm[torch]"`, with the distribution's own extra for
    a package if there is one."""
    wanted = (
        _extra_for(lack.requirement.name, distribution) or str(lack.requirement) for lack in missing
    )
    return " ".join(["pip install", *(f'"{name}"' for name in dict.fromkeys(wanted))])


def _extra_for(package: str, distribution: str) -> str | None:
    """Return "distribution[extra]" for the smallest extra that installs the package, or None."""
    sizes: dict[str, int] = {}
    offering: set[str] = set()
    for extra, requirement in _extras_of(distribution):
        sizes[extra] = sizes.get(extra, 0) + 1
        if canonicalize_name(requirement.name) == canonicalize_name(package):
            offering.add(extra)
    best = min(offering, key=lambda extra: (sizes[extra], extra), default=None)
    return None if best is None else f"{distribution}[{best}]"


def _extras_of(distribution: str) -> Iterator[tuple[str, Requirement]]:
    """Yield each extra of a distribution with each package that it adds."""
    try:
        found = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return
    extras = found.metadata.get_all("Provides-Extra") or []
    for text in found.requires or []:
        requirement = parsed(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            continue  # a dependency without an extra
        for extra in extras:
            if requirement.marker.evaluate({"extra": extra}):
                yield extra, requirement
