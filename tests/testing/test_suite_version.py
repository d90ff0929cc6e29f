"""The suites have a version: checks of later ones are shown, and don't count. Waivers are declared
with the component."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dovetail.api.component import SUITE_VERSION, ComponentSpec
from dovetail.errors import PluginError
from dovetail.testing import ledger
from dovetail.testing.checks import Waiver, check
from dovetail.testing.ledger import Outcome, Verdict, expected_of, judge
from dovetail.testing.suite import Suite

SPEC = ComponentSpec(kind="scheduler", name="mine", target="a:B", api="1.0")
REASON = "evicts too eagerly"
URL = "https://example.org/7"
PASSED = Outcome("passed")
FAILED = Outcome("failed", "it is late\nmore")
ABSENT = Outcome("absent", capability="order")
UNTRIED = Outcome("untried", capability="order")


class Versioned(Suite):
    """A suite that looks like one of Dovetail's own."""

    __module__ = "dovetail.testing.suites.versioned"
    kind = "scheduler"
    component = None

    @check("tiny.first", since="1.0")
    def test_first(self) -> None:
        """Never fails."""

    @check("tiny.later", since="1.1")
    def test_later(self) -> None:
        """Is too late."""


@pytest.fixture(autouse=True)
def next_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "SUITE_VERSION", "1.1")


def verdict_of(
    monkeypatch: pytest.MonkeyPatch,
    outcomes: Mapping[str, Outcome],
    suite: str = "1.0",
    declared: tuple[str, ...] = (),
    **body: object,
) -> Verdict:
    spec = ComponentSpec(
        kind="scheduler", name="mine", target="a:B", api="1.0", suite=suite, waivers=declared
    )
    monkeypatch.setattr(ledger, "declared", lambda suite: spec)
    own = type("TestMine", (Versioned,), {"component": "mine", "__module__": __name__, **body})
    expected = expected_of(own)
    return judge(expected, {**dict.fromkeys(expected.checks, PASSED), **outcomes})


def test_checks_of_a_later_suite_are_shown_and_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdict = verdict_of(monkeypatch, {"tiny.later": FAILED})
    assert verdict.conformant
    assert " suite=1.0, " in verdict.line
    assert verdict.newer == ("tiny.later",)
    assert verdict.checks["tiny.later"] == "newer"
    assert verdict.passed == verdict.expected == len(verdict.checks) - 1
    noted = "newer than suite 1.0, so it doesn't count: tiny.later: it is late"
    assert f"  {noted}" in list(verdict.report())


def test_a_package_that_says_so_is_tested_by_the_later_suite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdict = verdict_of(monkeypatch, {"tiny.later": FAILED}, suite="1.1")
    assert [finding.id for finding in verdict.findings] == ["tiny.later"]
    assert (verdict.suite, verdict.newer) == ("1.1", ())


def test_a_package_for_a_suite_that_is_not_installed_is_tested_by_all_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdict = verdict_of(monkeypatch, {}, suite="1.9")
    assert (verdict.suite, verdict.passed) == ("1.1", len(verdict.checks))


def test_a_class_is_tested_by_the_newest_suite_unless_its_suite_says_otherwise() -> None:
    body = {"component": dict, "__module__": __name__}
    newest = type("TestNewest", (Versioned,), body)
    older = type("TestOlder", (Versioned,), body | {"suite_version": "1.0"})
    assert [expected_of(suite).suite for suite in (newest, older)] == ["1.1", "1.0"]
    assert [expected_of(suite).newer for suite in (newest, older)] == [(), ("tiny.later",)]
    assert not expected_of(older).tampering


def test_a_declared_waiver_is_shown_and_one_for_a_check_that_passes_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waivers = (f"tiny.first={REASON} {URL}",)
    failed = verdict_of(monkeypatch, {"tiny.first": FAILED}, declared=waivers)
    assert failed.conformant
    assert failed.waived == ("tiny.first",)
    assert f"waived: tiny.first: {REASON} ({URL})" in failed.notes
    (finding,) = verdict_of(monkeypatch, {}, declared=waivers).findings
    assert (finding.id, finding.message) == (
        "tiny.first",
        "it is waived, but passes: remove the waiver",
    )


def test_a_waiver_of_what_this_machine_can_not_test_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    waivers = (f"tiny.first={REASON} {URL}",)
    assert verdict_of(monkeypatch, {"tiny.first": UNTRIED}, declared=waivers).conformant
    assert not verdict_of(monkeypatch, {"tiny.first": ABSENT}, declared=waivers).conformant


def test_waivers_of_the_test_are_added_to_those_that_are_declared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdict = verdict_of(
        monkeypatch,
        {"tiny.first": FAILED, "tiny.later": FAILED},
        declared=(f"tiny.first={REASON} ({URL})",),
        waivers={"tiny.later": Waiver("known", URL)},
    )
    assert verdict.waived == ("tiny.first", "tiny.later")


def test_declarations_say_the_version_and_the_waivers_in_their_form() -> None:
    assert (SPEC.suite, SPEC.waivers) == ("1.0", ())
    assert SPEC.suite <= SUITE_VERSION
    with pytest.raises(PluginError, match="suite is '1'"):
        ComponentSpec(kind="scheduler", name="mine", target="a:B", api="1.0", suite="1")
    for wrong in ("tiny.first", "tiny.first=because", f"tiny.first={URL}"):
        with pytest.raises(PluginError, match="waivers is"):
            ComponentSpec(kind="scheduler", name="mine", target="a:B", api="1.0", waivers=(wrong,))
