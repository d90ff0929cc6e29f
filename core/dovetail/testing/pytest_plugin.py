"""pytest plugin (entry point `dovetail`): compares the expected checks of each suite with those
that ran, and prints the verdicts.

It is loaded in every pytest run of an environment with Dovetail, so it imports nothing else of
Dovetail until it finds a suite. Under pytest-xdist, workers send their expectations and outcomes to
the controller, which computes the verdict.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from dovetail.testing.checks import Check
    from dovetail.testing.ledger import Expected, Outcome, Verdict

_EXPECTED = "dovetail_expected"  # key in a pytest-xdist worker's output
NUMBER = re.compile(r"\d[\d.]*")  # times and addresses, which make one fault look like several
_OUTPUT_LIMIT = 4_000  # characters kept of a component's output


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SuiteWatch(config), SuiteWatch.name)


class SuiteWatch:
    """All suites of a session by the node id of their class, with expected checks and observed
    outcomes."""

    name = "dovetail-suites"

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.expected: dict[str, Expected] = {}
        self.outcomes: dict[str, dict[str, Outcome]] = {}  # node id -> check's id -> outcome
        self._partial: set[str] = set()  # node ids of classes that get no verdict

    def leave_unjudged(self, node: str) -> None:
        """Give a class no verdict, because this session runs a part of its checks only. A check
        that fails is a failed test all the same."""
        self._partial.add(node)

    def _judged(self) -> dict[str, Expected]:
        return {
            node: expected for node, expected in self.expected.items() if node not in self._partial
        }

    def verdicts(self) -> dict[str, Verdict]:
        if not self.expected or self.config.option.collectonly:
            return {}
        from dovetail.testing.ledger import judge

        return {
            node: judge(expected, self.outcomes.get(node, {}))
            for node, expected in self._judged().items()
        }

    # Collecting

    @pytest.hookimpl(wrapper=True)
    def pytest_pycollect_makeitem(
        self, collector: Any, name: str, obj: object
    ) -> Generator[None, Any, Any]:
        """Expect a suite's class to run, whatever pytest does with it."""
        if (
            isinstance(obj, type)
            and getattr(obj, "__dovetail_suite__", False)
            and getattr(obj, "component", None) is not None
        ):
            from dovetail.testing.ledger import expected_of

            self.expected[f"{collector.nodeid}::{name}"] = expected_of(obj)
        return (yield)

    # Running

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: Any) -> Generator[None, Any, Any]:
        """Fail a check that hangs, so that the others can run. Skip one that doesn't apply: of an
        error, pytest would format the traceback, and with `--pdb` open a debugger."""
        check = getattr(pyfuncitem.function, "check", None)
        if check is None:
            return (yield)
        from dovetail.testing import frames
        from dovetail.testing.checks import Absent, Untried, fail
        from dovetail.testing.hanging import Hung, ended_after

        limit_s = getattr(pyfuncitem.cls, "time_limit_s", None)
        try:
            with ended_after(limit_s):
                return (yield)
        except Hung as error:
            fail(
                f"it hung, and was ended after {limit_s:g} s; the suite's time_limit_s gives it "
                f"longer{frames.of_frame(error.frame)}"
            )
        except (Absent, Untried) as error:
            if not self._is_expected(pyfuncitem) or error.capability != check.capability:
                raise
            raise pytest.skip.Exception(str(error)) from error

    def _is_expected(self, item: Any) -> bool:
        """Return True if an item is the check of a suite, with its name."""
        check = getattr(getattr(item, "function", None), "check", None)
        node = getattr(item.parent, "nodeid", "")
        return check is not None and node in self.expected and item.name == check.attribute

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, Any]:
        """Add the check and its outcome to the report; show absent ones as skipped and waived ones
        as expected failures."""
        report = yield
        uneventful = call.when != "call" and report.passed
        if uneventful or not self._is_expected(item):
            return report
        check = item.function.check
        node = item.parent.nodeid
        outcome = _outcome(check, report, call, item.instance)
        report.dovetail = {"node": node, "id": check.id, "outcome": asdict(outcome)}
        if outcome.status in ("absent", "untried"):
            report.outcome, report.longrepr = (
                "skipped",
                (str(item.path), 0, f"Skipped: {outcome.message}"),
            )
        elif outcome.status == "failed" and check.id in self.expected[node].waivers:
            report.outcome = "skipped"
            report.wasxfail = f"waived: {self.expected[node].waivers[check.id]}"
        elif outcome.status == "failed" and check.id in self.expected[node].newer:
            report.outcome = "skipped"
            report.wasxfail = f"newer than suite {self.expected[node].suite}"
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record the outcome of each report, including those of pytest-xdist's workers."""
        told = getattr(report, "dovetail", None)
        if told is not None:
            self.observe(told["node"], told["id"], told["outcome"])

    def observe(self, node: str, id: str, outcome: dict[str, Any]) -> None:
        from dovetail.testing.ledger import Outcome

        now = Outcome.from_json(outcome)
        before = self.outcomes.setdefault(node, {})
        before[id] = before[id].worse(now) if id in before else now

    # Judging

    def pytest_sessionfinish(self, session: Any) -> None:
        output = getattr(self.config, "workeroutput", None)
        if output is not None:
            output[_EXPECTED] = {
                node: expected.to_json() for node, expected in self._judged().items()
            }
        elif session.exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ) and not all(v.conformant for v in self.verdicts().values()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Collect the results of a pytest-xdist worker that has ended."""
        told = getattr(node, "workeroutput", {}).get(_EXPECTED)
        if told:
            from dovetail.testing.ledger import Expected

            self.expected |= {node: Expected.from_json(values) for node, values in told.items()}

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        verdicts = self.verdicts()
        if verdicts:
            terminalreporter.section("conformance")
        for node, verdict in verdicts.items():
            for line in (f"{node} ({verdict.component})", *verdict.report()):
                terminalreporter.write_line(
                    line, green=verdict.conformant, red=not verdict.conformant
                )


def _outcome(check: Check, report: Any, call: Any, suite: Any) -> Outcome:
    """Return the outcome of a check from its report. Only a check that is tied to a capability can
    be absent or untried."""
    from dovetail.testing.checks import Absent, Untried
    from dovetail.testing.ledger import Outcome

    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, pytest.skip.Exception) and error.__cause__ is not None:
        error = error.__cause__  # of one that doesn't apply
    notes = tuple(getattr(suite, "notes", ()))
    if isinstance(error, Absent | Untried) and error.capability == check.capability:
        return Outcome(
            "absent" if isinstance(error, Absent) else "untried",
            str(error),
            capability=error.capability,
        )
    if hasattr(report, "wasxfail"):
        return Outcome(
            "skipped",
            "it is marked as expected to fail; a waiver says why, `waivers = {id: Waiver(reason, "
            "url)}`",
        )
    if report.skipped:
        return Outcome(
            "skipped",
            f"it was skipped: "
            f"{report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr}",
        )
    output = "".join(text for title, text in report.sections if title.startswith("Captured"))[
        -_OUTPUT_LIMIT:
    ]
    if report.failed and error is not None:
        return _failed(error, _package_of(suite), output, notes)
    return (
        Outcome("failed", "failed", output=output, notes=notes)
        if report.failed
        else Outcome("passed", notes=notes)
    )


def _package_of(suite: Any) -> str:
    """Return the top-level package of the component; "" if it isn't installed."""
    from dovetail.errors import DovetailError

    try:
        target: str = getattr(suite, "target", "")
    except DovetailError:
        return ""
    return target.partition(".")[0].partition(":")[0]


def _failed(error: BaseException, package: str, output: str, notes: tuple[str, ...]) -> Outcome:
    """Return the outcome of a check that ended with an error: its own assertion, possibly caused by
    an error of the component, or any other error that prevented its assertion. The message has the
    component's file and line if it raised, and the failing example. `package`: the component's top
    level."""
    from dovetail.errors import describe, raised_at
    from dovetail.testing import frames
    from dovetail.testing.checks import CheckFailed
    from dovetail.testing.ledger import Outcome

    own = isinstance(error, CheckFailed)
    raised = error.__cause__ or error.__context__ if own else error
    place = raised_at(raised, package) if raised is not None else ""
    text = str(error) if own else f"the check broke off: {describe(error)}"
    text += (f" ({place})" if place else "") + ("" if own else frames.of_error(error))
    return Outcome(
        "failed",
        "\n".join([text, *getattr(error, "__notes__", ())]),
        output=output,
        notes=notes,
        fault=f"{NUMBER.sub('0', describe(raised))} at {place}"
        if raised is not None and place
        else "",
        judged=not place or (own and error.__cause__ is None),
    )
