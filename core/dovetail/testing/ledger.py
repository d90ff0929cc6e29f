"""Comparison of a suite's expected checks with the observed outcomes, so that a missing check is
never overlooked.

`Expected` is read from the suite's class before anything of the component runs; an `Outcome` comes
from each check that ran; `judge` compares them. A check that was overridden, deleted, marked,
skipped, deselected or never collected has no valid outcome, so the verdict is NOT CONFORMANT and
names it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from dovetail import __version__
from dovetail.api.component import API_VERSIONS, SUITE_VERSION, ComponentSpec, Kind
from dovetail.registry.contract.document import number
from dovetail.testing.binding import declared
from dovetail.testing.checks import Check, Waiver, checks_of, declared_waivers

if TYPE_CHECKING:
    from dovetail.testing.suite import Suite

# Names that every class body has.
_ALLOWED = {
    "__annotations__",
    "__dict__",
    "__doc__",
    "__firstlineno__",
    "__module__",
    "__qualname__",
    "__static_attributes__",
    "__weakref__",
}

Status = Literal["passed", "failed", "absent", "untried", "skipped"]
Judged = Literal["passed", "failed", "waived", "absent", "untried", "newer"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one check. `absent`: it doesn't apply, as `capability` isn't declared. `untried`:
    this machine can't test the capability. `skipped`: it was prevented from counting. `fault`:
    cause of the failure, such as a component's error with file and line, in identical words for
    identical causes. `judged`: False if it didn't reach its assertion for that reason."""

    status: Status
    message: str = ""
    capability: str | None = None
    output: str = ""  # text that the component printed meanwhile
    notes: tuple[str, ...] = ()
    fault: str = ""
    judged: bool = True

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Outcome:
        return cls(**{**values, "notes": tuple(values["notes"])})

    def worse(self, other: Outcome) -> Outcome:
        """Return the outcome that counts, of two phases of one check."""
        order: tuple[Status, ...] = ("passed", "absent", "untried", "skipped", "failed")
        return self if order.index(self.status) >= order.index(other.status) else other


@dataclass(frozen=True, slots=True)
class Expected:
    """Checks that should run, according to the suite's class. `suite`: the version of the suites
    whose checks count; `newer`: ids of later ones. `tampering`: descriptions of forbidden changes,
    by check id or, if they affect all checks, by attribute name."""

    kind: Kind
    component: str
    checks: Mapping[str, str]  # id -> its help
    waivers: Mapping[str, str] = field(default_factory=dict)  # id -> reason and url
    tampering: Mapping[str, str] = field(default_factory=dict)
    suite: str = SUITE_VERSION
    newer: tuple[str, ...] = ()

    @property
    def counted(self) -> dict[str, str]:
        """Return `checks` without those of later versions."""
        return {id: help for id, help in self.checks.items() if id not in self.newer}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Expected:
        return cls(**{**values, "newer": tuple(values["newer"])})


@dataclass(frozen=True, slots=True)
class Finding:
    """Reason why a component doesn't conform. `id`: the check, or the attribute that was tampered
    with. `also`: further checks that failed for the same reason."""

    id: str
    message: str
    help: str = ""
    output: str = ""
    also: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a suite for a component."""

    kind: Kind
    component: str
    api: str
    passed: int
    expected: int
    absent: tuple[str, ...]  # capabilities that aren't declared
    waived: tuple[str, ...]  # ids
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    untried: tuple[str, ...] = ()  # declared capabilities that can't be tested on this machine
    # id -> how it counts; empty if the component couldn't be loaded
    checks: Mapping[str, Judged] = field(default_factory=dict)
    distribution: str = ""  # of the component, as in the next two; "" of a class
    version: str = ""
    # the version of the interface that it declares; `api` is the one whose checks ran
    written_for: str = ""
    seconds: float = field(default=0.0, compare=False)  # wall time of `run`; 0: not measured
    suite: str = SUITE_VERSION  # the version of the suites whose checks count
    newer: tuple[str, ...] = ()  # ids of failed checks of later versions

    @property
    def conformant(self) -> bool:
        return not self.findings and self.passed + len(self.waived) == self.expected > 0

    @property
    def line(self) -> str:
        """Verdict in one line: "CONFORMANT scheduler api=1.1 suite=1.0, 41/41, 3 capabilities
        absent, 0 waived"."""
        word = "CONFORMANT" if self.conformant else "NOT CONFORMANT"
        counts = (
            f"{self.passed}/{self.expected}, {len(self.absent)} capabilities absent, "
            f"{len(self.waived)} waived"
        )
        if self.untried:
            counts += f", {len(self.untried)} not tried here ({', '.join(self.untried)})"
        broken = ", ".join(dict.fromkeys(finding.id for finding in self.findings))
        versions = f"api={self.api} suite={self.suite}"
        return f"{word} {self.kind} {versions}, {counts}" + (f": {broken}" if broken else "")

    def report(self) -> Iterator[str]:
        """Yield the lines of the report; the last is the verdict."""
        for (message, help, output), same in groupby(
            self.findings, key=lambda finding: (finding.message, finding.help, finding.output)
        ):
            findings = list(same)
            yield f"{', '.join(finding.id for finding in findings)}: {self.component}: {message}"
            if help:
                yield f"  {help}"
            if also := [id for finding in findings for id in finding.also]:
                yield f"  For the same reason failed: {', '.join(also)}"
            if output:
                yield from ("  its output:", *(f"    {line}" for line in output.splitlines()))
        yield from (f"  {note}" for note in self.notes)
        yield self.line

    def to_json(self) -> dict[str, Any]:
        """Return its fields and properties, and Dovetail's version, as plain values."""
        return {
            "conformant": self.conformant,
            "line": self.line,
            "dovetail": __version__,
            **asdict(self),
        }

    def badge(self) -> dict[str, Any]:
        """Return the verdict as shields.io's endpoint expects it: yellow if a check is waived or
        couldn't be tried."""
        word = "conformant" if self.conformant else "not conformant"
        color = (
            "red"
            if not self.conformant
            else "yellow"
            if self.waived or self.untried
            else "brightgreen"
        )
        return {
            "schemaVersion": 1,
            "label": f"Dovetail {__version__}",
            "message": f"{self.kind} {word}, {self.passed}/{self.expected}",
            "color": color,
        }


def expected_of(suite: type[Suite]) -> Expected:
    """Return the checks that the class should run, and all forbidden changes in it."""
    official = next(cls for cls in suite.__mro__ if _is_ours(cls))
    checks = checks_of(official)
    component = (
        suite.component
        if isinstance(suite.component, str)
        else getattr(suite.component, "__qualname__", repr(suite.component))
    )
    spec = declared(suite)
    waivers = {} if spec is None else declared_waivers(spec.waivers)
    waivers |= suite.waivers if isinstance(suite.waivers, Mapping) else {}
    version = _suite_version(suite, spec)
    return Expected(
        suite.kind,
        component,
        {id: check.help for id, check in checks.items()},
        {
            id: f"{waiver.reason} ({waiver.url})"
            for id, waiver in waivers.items()
            if isinstance(waiver, Waiver)
        },
        dict((*_tampering(suite, official, checks), *_wrong_waivers(suite, waivers, checks))),
        version,
        tuple(
            id
            for id, check in checks.items()
            if number(check.since) > number(version) and id not in waivers
        ),
    )


def _suite_version(suite: type[Suite], spec: ComponentSpec | None) -> str:
    """Return the version of the suites whose checks count: that of the class or the declaration,
    but at most the installed one."""
    wanted = suite.suite_version or (SUITE_VERSION if spec is None else spec.suite)
    return min(wanted, SUITE_VERSION, key=number)


def judge(expected: Expected, outcomes: Mapping[str, Outcome]) -> Verdict:
    """Return the verdict; `outcomes` are by the checks' ids."""
    findings = [Finding(id, message) for id, message in expected.tampering.items()]
    told: dict[str, int] = {}  # fault -> place of its finding
    waived = []
    judged: dict[str, Judged] = dict.fromkeys(expected.counted, "failed")
    unwanted: dict[Status, set[str]] = {"absent": set(), "untried": set()}
    for id, help in expected.counted.items():
        outcome = outcomes.get(
            id,
            Outcome(
                "skipped", "it didn't run: deleted, deselected, or its class can't be collected"
            ),
        )
        if outcome.status == "absent" or outcome.status == "untried":
            unwanted[outcome.status].add(str(outcome.capability))
            judged[id] = outcome.status
            if id in expected.waivers and outcome.status == "absent":
                findings.append(
                    Finding(id, "it is waived, but not wanted of this component: remove the waiver")
                )
            continue
        if outcome.status == "passed" and id in expected.waivers:
            findings.append(Finding(id, "it is waived, but passes: remove the waiver"))
        elif outcome.status == "passed":
            judged[id] = "failed" if id in expected.tampering else "passed"
        elif outcome.status == "failed" and id in expected.waivers:
            waived.append(id)
            judged[id] = "waived"
        elif id in expected.tampering:
            continue
        elif outcome.fault in told:
            first = findings[told[outcome.fault]]
            findings[told[outcome.fault]] = replace(first, also=(*first.also, id))
        else:
            if outcome.fault:
                told[outcome.fault] = len(findings)
            findings.append(
                Finding(
                    id,
                    outcome.message,
                    help if outcome.status == "failed" and outcome.judged else "",
                    outcome.output,
                )
            )
    notes = dict.fromkeys(note for outcome in outcomes.values() for note in outcome.notes)
    api = API_VERSIONS[expected.kind]
    newer = _failed_newer(expected, outcomes)
    return Verdict(
        expected.kind,
        expected.component,
        api,
        sum(status == "passed" for status in judged.values()),
        sum(status not in unwanted for status in judged.values()),
        tuple(sorted(unwanted["absent"])),
        tuple(waived),
        tuple(findings),
        (*notes, *_exemptions(expected, newer)),
        tuple(sorted(unwanted["untried"])),
        judged | dict.fromkeys(expected.newer, "newer"),
        suite=expected.suite,
        newer=tuple(newer),
    )


def _failed_newer(expected: Expected, outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    """Return the messages of later checks that failed, by id."""
    return {
        id: outcomes[id].message
        for id in expected.newer
        if id in outcomes and outcomes[id].status == "failed"
    }


def _exemptions(expected: Expected, newer: Mapping[str, str]) -> Iterator[str]:
    """Yield a note for each waiver, and each failure of a later check, which doesn't count."""
    yield from (f"waived: {id}: {why}" for id, why in expected.waivers.items())
    for id, message in newer.items():
        first = message.partition("\n")[0]
        yield f"newer than suite {expected.suite}, so it doesn't count: {id}: {first}"


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith("dovetail.testing.")


def _tampering(
    suite: type[Suite], official: type[Suite], checks: Mapping[str, Check]
) -> Iterator[tuple[str, str]]:
    """Yield (id or attribute, complaint); of two complaints about one check the later counts."""
    by_attribute = {check.attribute: check for check in checks.values()}
    for name, check in by_attribute.items():
        if inspect.getattr_static(suite, name) is not inspect.getattr_static(official, name):
            yield check.id, "it isn't the suite's own"
    for cls in suite.__mro__:
        if _is_ours(cls) or cls is object:
            continue
        for name, value in vars(cls).items():
            alias = getattr(value, "check", None)
            if name in by_attribute:
                how = "deleted" if value is None else f"overridden by {cls.__qualname__}.{name}"
                yield (
                    by_attribute[name].id,
                    f"it was {how}: a check counts only as the suite has it",
                )
            elif isinstance(alias, Check):
                yield (
                    alias.id,
                    f"it was given the other name {cls.__qualname__}.{name}: a check counts only "
                    f"as the suite has it",
                )
            elif (
                name not in official.settings
                and name not in _ALLOWED
                and (hasattr(official, name) or name.startswith("__"))
            ):
                yield (
                    name,
                    f"{cls.__qualname__}.{name} replaces a part of the suite; set only "
                    f"{', '.join(sorted(official.settings))}",
                )


def _wrong_waivers(
    suite: type[Suite], waivers: Mapping[str, Waiver], checks: Mapping[str, Check]
) -> Iterator[tuple[str, str]]:
    if not isinstance(suite.waivers, Mapping):
        yield "waivers", f"expected {{id: Waiver(reason, url)}}, got {suite.waivers!r}"
        return
    for id, waiver in waivers.items():
        if id not in checks:
            yield str(id), "it is waived, but there is no such check"
        elif not isinstance(waiver, Waiver):
            yield id, f"expected Waiver(reason, url), got {waiver!r}"
