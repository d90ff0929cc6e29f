"""Problems visible in installed metadata: leftovers, duplicates, and sources that moved or changed.
Imports nothing. `Finding` and `Diagnosis` are the doctor's report, of this and other problems."""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from importlib import metadata
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from dovetail.api.component import ENTRY_POINT_GROUP
from dovetail.errors import DISTRIBUTION
from dovetail.registry.loader import find_plugins
from dovetail.registry.plugin import NAMESPACE, PluginOrigin
from dovetail.registry.requirements import missing_requirements, pip_line

Severity = Literal["error", "warning"]
Problem = tuple[str, str, str]  # a key of PROBLEMS, what is wrong, what to do

PROBLEMS: dict[str, Severity] = {
    # found in metadata
    "metadata-unreadable": "error",
    "metadata-twice": "error",
    "files-gone": "error",
    "source-moved": "error",
    "entry-points-stale": "error",
    "wrong-group": "error",
    "no-plugin": "error",
    "dependency-missing": "error",
    "wrong-dovetail": "error",
    # found while a plugin makes its declarations
    "points-nowhere": "error",
    "import-fails": "error",
    "exits": "error",
    "hangs": "error",
    "crashes": "error",
    "hook-unknown": "error",
    "hook-missing": "error",
    "declaration-wrong": "error",
    "imports-torch": "error",
    "prints": "warning",
    "leaves-threads": "warning",
    # found in its offers
    "api-mismatch": "error",
    "contract-broken": "error",
    "requirement-missing": "warning",
    "target-fails": "error",
    "name-collision": "warning",
    "offered-twice": "error",
}
SHOWN = 3  # files named in a message
# problems that keep a component from being found
HIDING = (
    "source-moved",
    "entry-points-stale",
    "wrong-group",
)
_STRANGER: Problem = (
    "wrong-dovetail",
    f"a distribution called {NAMESPACE} is installed: an older Dovetail or another project, whose "
    f"modules may have replaced Dovetail's",
    f"pip uninstall {NAMESPACE} {DISTRIBUTION}, then install {DISTRIBUTION} again",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of one plugin, or (entry point "?") of its whole distribution."""

    origin: PluginOrigin
    problem: str  # a key of PROBLEMS
    what: str
    remedy: str  # what to do

    @property
    def severity(self) -> Severity:
        return PROBLEMS[self.problem]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The plugins examined, the findings, and the plugins skipped because `DOVETAIL_PLUGINS` denies
    them."""

    examined: tuple[PluginOrigin, ...]
    findings: tuple[Finding, ...]
    denied: tuple[PluginOrigin, ...] = ()

    def count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for finding in self.findings)


def metadata_findings(only: str | None = None) -> list[Finding]:
    """Return findings on all distributions with plugins, also in a misspelt entry-point group, or
    on the distribution `only` (a normalized name)."""
    findings = [
        Finding(
            failure.origin,
            "metadata-unreadable",
            failure.reason,
            f"reinstall it, or delete {failure.origin.distribution} by hand",
        )
        for failure in find_plugins().failures
        if only in (None, failure.origin.distribution) and failure.origin.distribution != NAMESPACE
    ]
    installed = _installed(only)
    findings += [
        Finding(PluginOrigin(NAMESPACE, "?", copy.version), *_STRANGER)
        for copy in installed.pop(NAMESPACE, [])
    ]
    for copies in installed.values():
        origin = PluginOrigin(canonicalize_name(copies[0].name), "?", copies[0].version)
        findings += [Finding(origin, *problem) for check in _CHECKS for problem in check(copies)]
    return findings


def hidden_plugins() -> list[Finding]:
    """Return the findings that explain why a distribution's components can't be found."""
    return [finding for finding in metadata_findings() if finding.problem in HIDING]


def _twice(copies: list[metadata.Distribution]) -> Iterator[Problem]:
    if len(copies) > 1:
        places = ", ".join(f"{copy.version} in {_home(copy)}" for copy in copies)
        remedy = (
            f"pip uninstall {copies[0].name} until it finds nothing more, delete what is left "
            f"of these, and install it once"
        )
        yield (
            "metadata-twice",
            f"it is installed {len(copies)} times: {places}; the first counts",
            remedy,
        )


def _files_gone(copies: list[metadata.Distribution]) -> Iterator[Problem]:
    # `files` leaves out what isn't there, from Python 3.12 on
    record = csv.reader((copies[0].read_text("RECORD") or "").splitlines())
    gone = [
        row[0]
        for row in record
        if row and row[0].endswith(".py") and not Path(str(copies[0].locate_file(row[0]))).exists()
    ]
    if gone:
        named = ", ".join(gone[:SHOWN]) + (
            f" and {len(gone) - SHOWN} more" if len(gone) > SHOWN else ""
        )
        remedy = (
            f"pip install --force-reinstall --no-deps {copies[0].name}, or pip uninstall "
            f"{copies[0].name}"
        )
        yield "files-gone", f"its metadata lists files that aren't there: {named}", remedy


def _source_moved(copies: list[metadata.Distribution]) -> Iterator[Problem]:
    source = _editable_source(copies[0])
    if source is not None and not source.is_dir():
        remedy = f"pip install -e WHERE_IT_IS_NOW, or pip uninstall {copies[0].name}"
        yield (
            "source-moved",
            f"it was installed with pip install -e from {source}, which isn't there any more",
            remedy,
        )


def _entry_points_stale(copies: list[metadata.Distribution]) -> Iterator[Problem]:
    source = _editable_source(copies[0])
    if source is None or (wanted := _entry_points_of_source(source)) is None:
        return
    installed = {
        point.name: point.value for point in copies[0].entry_points.select(group=ENTRY_POINT_GROUP)
    }
    if installed != wanted:
        what = (
            f"{source / 'pyproject.toml'} has the entry points {_shown(wanted)}, installed are "
            f"{_shown(installed)}"
        )
        yield (
            "entry-points-stale",
            what,
            f"entry points are read at installation: pip install -e {source}",
        )


def _wrong_group(copies: list[metadata.Distribution]) -> Iterator[Problem]:
    for group in sorted({point.group for point in copies[0].entry_points}):
        if _is_misspelt(group):
            yield (
                "wrong-group",
                f"its entry points are in the group {group!r}",
                f"write [project.entry-points.{ENTRY_POINT_GROUP!r}]",
            )


def _is_misspelt(group: str) -> bool:
    """Return True if a group of entry points was meant to be Dovetail's; many projects have one
    that ends in ".plugins"."""
    likeness = SequenceMatcher(None, group.replace("_", "."), ENTRY_POINT_GROUP).ratio()
    return group != ENTRY_POINT_GROUP and likeness >= (
        0.6 if group.startswith("dovetail") else 0.85
    )


def _dependency_missing(copies: list[metadata.Distribution]) -> Iterator[Problem]:
    missing = missing_requirements(
        text for text in copies[0].requires or () if not _is_wrong_dovetail(text)
    )
    if missing:
        yield (
            "dependency-missing",
            f"it depends on {', '.join(map(str, missing))}",
            pip_line(missing, copies[0].name),
        )


def _wrong_dovetail(copies: list[metadata.Distribution]) -> Iterator[Problem]:
    """Yield a problem for a dependency on `dovetail`, the module's name, which on the package index
    is another project."""
    wrong = [Requirement(text) for text in copies[0].requires or () if _is_wrong_dovetail(text)]
    if wrong:
        wanted = [
            (f"[{','.join(sorted(one.extras))}]" if one.extras else "") + str(one.specifier)
            for one in wrong
        ]
        what = (
            f"it depends on {', '.join(NAMESPACE + part for part in wanted)}; the index's "
            f"{NAMESPACE} is another project, which pip would install"
        )
        right = " and ".join(f'"{DISTRIBUTION}{part}"' for part in wanted)
        yield "wrong-dovetail", what, f"write {right} in its pyproject.toml, and install it again"


def _is_wrong_dovetail(text: str) -> bool:
    try:
        return canonicalize_name(Requirement(text).name) == NAMESPACE
    except InvalidRequirement:
        return False


_CHECKS = (
    _twice,
    _files_gone,
    _source_moved,
    _entry_points_stale,
    _wrong_group,
    _dependency_missing,
    _wrong_dovetail,
)


def _installed(only: str | None) -> dict[str, list[metadata.Distribution]]:
    """Return the distributions with plugins, or a misspelt group, by normalized name; each with all
    copies in the order of `sys.path`."""
    found: dict[str, dict[str, metadata.Distribution]] = {}
    for distribution in metadata.distributions():
        try:
            name = canonicalize_name(distribution.metadata["Name"])
            groups = {point.group for point in distribution.entry_points}
        except Exception:  # `find_plugins` has reported it, if it has plugins
            continue
        is_wanted = name == only
        if only is None:
            is_wanted = name == NAMESPACE or any(map(_concerns_us, groups))
        if is_wanted:
            found.setdefault(name, {}).setdefault(_home(distribution), distribution)
    return {
        name: _without_leftovers_of_builds(list(copies.values())) for name, copies in found.items()
    }


def _without_leftovers_of_builds(
    copies: list[metadata.Distribution],
) -> list[metadata.Distribution]:
    """Drop the egg-info that `pip install -e` leaves in the source folder, which is on `sys.path`
    and would count as a second copy."""
    sources = [
        source.resolve() for copy in copies if (source := _editable_source(copy)) is not None
    ]

    def is_leftover(home: Path) -> bool:
        return home.suffix == ".egg-info" and any(home.is_relative_to(source) for source in sources)

    return [copy for copy in copies if not is_leftover(Path(_home(copy)))]


def _concerns_us(group: str) -> bool:
    """Return True for Dovetail's entry-point group and for misspellings of it."""
    return group.startswith("dovetail") or _is_misspelt(group)


def _home(distribution: metadata.Distribution) -> str:
    """Return the folder of a distribution's metadata."""
    return str(Path(str(getattr(distribution, "_path", distribution.locate_file("")))).resolve())


def _editable_source(distribution: metadata.Distribution) -> Path | None:
    """Return the folder that an editable installation points to (PEP 610); None for any other
    installation."""
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if not origin.get("dir_info", {}).get("editable"):
            return None
        return Path(url2pathname(unquote(urlsplit(origin["url"]).path)))
    except (ValueError, KeyError, AttributeError):
        return None


def _entry_points_of_source(source: Path) -> dict[str, str] | None:
    """Return the entry points in the project's pyproject.toml; None if it has none, or can't be
    read."""
    try:
        project: Any = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))[
            "project"
        ]
    except (OSError, ValueError, KeyError):
        return None
    if "entry-points" in project.get("dynamic", ()):
        return None
    return dict(project.get("entry-points", {}).get(ENTRY_POINT_GROUP, {}))


def _shown(entry_points: dict[str, str]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in sorted(entry_points.items())) or "none"
