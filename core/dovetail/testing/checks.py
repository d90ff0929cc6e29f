"""`Check`: a requirement on all components of a kind, with a stable id for reports, waivers and
documentation.

    class SchedulerSuite(Suite):
        @check("scheduler.budget", since="1.0")
        def test_budget(self) -> None:
            "A step computed more tokens than `SchedulerContext.max_tokens`. Grant through the step,
            and don't touch its fields."

The docstring tells the author of a failing component what went wrong and how to fix it. Needs
neither torch nor pytest.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn, Protocol

from dovetail.api.component import WAIVER

ID = re.compile(r"[a-z_]+\.[a-z0-9_]+")


@dataclass(frozen=True, slots=True)
class Check:
    """One check. With a `capability`, it applies only to components whose suite `declares` it; with
    None, to all."""

    id: str  # "scheduler.budget"
    attribute: str  # "test_budget", the suite's method
    since: str  # the first version of the suites that has it
    capability: str | None
    help: str  # the docstring, on one line

    @property
    def level(self) -> str:
        return "required" if self.capability is None else f"if {self.capability}"


@dataclass(frozen=True, slots=True)
class Waiver:
    """Permission for one check to fail, for a stated reason. Strict: a waived check that passes is
    a failure. Raises `ValueError`."""

    reason: str
    url: str  # the issue that tracks it

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise ValueError("a waiver needs a reason")
        if not re.fullmatch(r"https?://\S+", self.url):
            raise ValueError(
                f"a waiver needs the url of the issue that tracks it, got {self.url!r}"
            )


def declared_waivers(texts: Iterable[str]) -> dict[str, Waiver]:
    """Return waivers by the checks' ids, of texts like those of `ComponentSpec.waivers`. Raises
    `ValueError` for another text."""
    waivers = {}
    for text in texts:
        parts = WAIVER.fullmatch(text)
        if parts is None:
            raise ValueError(f'expected "id=reason https://…", got {text!r}')
        waivers[parts[1]] = Waiver(parts[2], parts[3])
    return waivers


class CheckFailed(AssertionError):
    """A component violates a check."""


class Absent(Exception):
    """A check doesn't apply to this component, which doesn't declare `capability`."""

    def __init__(self, capability: str) -> None:
        super().__init__(f"{capability} isn't declared")
        self.capability = capability


class Untried(Exception):
    """The component declares `capability`, but this machine has no device to test it on. The
    verdict says so."""

    def __init__(self, capability: str, why: str) -> None:
        super().__init__(f"{capability} is declared, but not tested: {why}")
        self.capability = capability


class Declares(Protocol):
    """Interface of a suite that its checks use."""

    def declares(self, capability: str) -> bool:
        """Return True if the checks tied to `capability` apply to the suite's component."""
        ...


def check(
    id: str, *, since: str, capability: str | None = None
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Turn a method of a suite into a check. It takes only `self` (no fixtures: checks must run
    without pytest, too), is named `test_…`, and has a docstring. Raises `TypeError` otherwise."""

    def decorate(method: Callable[[Any], None]) -> Callable[[Any], None]:
        name = method.__name__
        if (
            not ID.fullmatch(id)
            or not name.startswith("test_")
            or list(inspect.signature(method).parameters) != ["self"]
            or not method.__doc__
        ):
            raise TypeError(
                f'check {id!r} must be "kind.name", on a method {name!r} = "test_…(self)" that has '
                f"a docstring"
            )

        @wraps(method)
        def run(self: Declares) -> None:
            if capability is not None and not self.declares(capability):
                raise Absent(capability)
            method(self)

        run.check = Check(id, name, since, capability, " ".join(method.__doc__.split()))  # type: ignore[attr-defined]
        return run

    return decorate


def checks_of(suite: type) -> dict[str, Check]:
    """Return the checks of a suite by id: those of the kind first, then those of all kinds, each in
    the order of the source."""
    found: dict[str, Check] = {}
    for cls in suite.__mro__:
        for value in vars(cls).values():
            known = getattr(value, "check", None)
            if isinstance(known, Check) and getattr(suite, known.attribute, None) is value:
                found.setdefault(known.id, known)
    return found


def require(condition: object, what: str) -> None:
    """Raise `CheckFailed` unless the condition holds; unlike `assert`, also under `python -O`."""
    if not condition:
        fail(what)


def fail(what: str, cause: BaseException | None = None) -> NoReturn:
    """Raise `CheckFailed`. `cause`: an error of the component that prevented the check from
    reaching its assertion."""
    raise CheckFailed(what) from cause
