"""Known problems with their severity, and the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dovetail.registry.plugin import PluginOrigin

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
    "requirement-missing": "warning",
    "target-fails": "error",
    "name-collision": "warning",
    "offered-twice": "error",
}


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
    """The plugins examined, the findings, and the plugins skipped because `DOVETAIL_PLUGINS` denies them."""

    examined: tuple[PluginOrigin, ...]
    findings: tuple[Finding, ...]
    denied: tuple[PluginOrigin, ...] = ()

    def count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for finding in self.findings)
