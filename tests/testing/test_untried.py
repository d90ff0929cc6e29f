"""A claim that this machine can't test is reported in the verdict, and counts neither as passed nor
as absent."""

from __future__ import annotations

from dataclasses import replace

from dovetail import __version__
from dovetail.testing.ledger import Expected, Outcome, judge

EXPECTED = Expected(
    "attention", "mine", {"attention.values": "", "attention.window": "", "attention.graph": ""}
)


def test_what_was_not_tried_stands_in_the_verdicts_line() -> None:
    verdict = judge(
        EXPECTED,
        {
            "attention.values": Outcome("passed"),
            "attention.window": Outcome("absent", capability="window"),
            "attention.graph": Outcome("untried", capability="cuda_graph"),
        },
    )
    assert verdict.conformant
    assert (
        verdict.line
        == "CONFORMANT attention api=1.1 suite=1.1, 1/1, 1 capabilities absent, 0 waived, "
        "1 not tried here (cuda_graph)"
    )


def test_a_badge_is_green_only_if_every_declared_capability_was_tried_and_no_check_is_waived() -> (
    None
):
    passed = dict.fromkeys(EXPECTED.checks, Outcome("passed"))
    waived = replace(EXPECTED, waivers={"attention.graph": "slow (https://example.org/1)"})
    broken, untried = (
        {"attention.graph": Outcome("failed", "wrong")},
        {"attention.graph": Outcome("untried", capability="cuda_graph")},
    )
    verdicts = [
        judge(EXPECTED, passed),
        judge(EXPECTED, passed | untried),
        judge(waived, passed | broken),
        judge(EXPECTED, passed | broken),
    ]
    assert [verdict.badge()["color"] for verdict in verdicts] == [
        "brightgreen",
        "yellow",
        "yellow",
        "red",
    ]
    assert verdicts[0].badge() == {
        "schemaVersion": 1,
        "label": f"Dovetail {__version__}",
        "message": "attention conformant, 3/3",
        "color": "brightgreen",
    }
    assert [verdict.checks["attention.graph"] for verdict in verdicts] == [
        "passed",
        "untried",
        "waived",
        "failed",
    ]


def test_a_suite_that_could_try_nothing_does_not_conform() -> None:
    assert not judge(
        EXPECTED, dict.fromkeys(EXPECTED.checks, Outcome("untried", capability="cuda"))
    ).conformant
