"""The leaderboard: fixed traces, what counts as in time, ties, and going on after a stop."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.errors import ConfigError
from dovetail_lab.leaderboard import board
from dovetail_lab.leaderboard.board import BoardRun, Figures, entries, fingerprint, in_time, score
from dovetail_lab.leaderboard.results import Results
from dovetail_lab.leaderboard.standings import groups, leads
from dovetail_lab.power import anytime_half
from dovetail_lab.traces import TraceRequest
from tests.lab.commands import lab
from tests.lab.made_runs import record, rejected
from tests.registry.fakes import Site

SCORES = {"fcfs": 0.2, "sjf": 0.8, "slo": 0.8}


def figures(in_time: float = 0.5, **changes: Any) -> Figures:
    values = {
        "requests": 10,
        "completed": 9,
        "rejected": 1,
        "ttft_mean": 1.0,
        "ttft_p99": 2.0,
        "itl_p99": 0.1,
        "e2e_mean": 5.0,
        "cached": 0.0,
    }
    return Figures(in_time=in_time, **{**values, **changes})


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[BoardRun]:
    """Runs take no time, and have the score of their scheduler; those of `srpt` fail. Returns the
    list of runs that are made."""
    made: list[BoardRun] = []

    def run(self: BoardRun, progress: object = None) -> Figures | str:
        made.append(self)
        return (
            "DovetailError: too short"
            if self.scheduler == "srpt"
            else figures(SCORES[self.scheduler] + self.seed / 100)
        )

    monkeypatch.setattr(BoardRun, "run", run)
    monkeypatch.setattr(board, "fingerprint", lambda *of: "x")
    for module in ("leaderboard.results", "report.leaderboard_page"):
        monkeypatch.setattr(f"dovetail_lab.{module}.fingerprint", lambda *of: "x")
    # figures take most of the time
    monkeypatch.setattr("dovetail_lab.report.html.lay_out", lambda figure: None)
    monkeypatch.setattr("dovetail_lab.report.html.png", lambda figure: b"")
    return made


def test_the_traces_of_the_board_never_change() -> None:
    """A change here needs a new `VERSION` and a new folder: results on other requests can't be
    compared."""
    assert board.VERSION == 1
    found = {name: fingerprint(name, 0) for name in board.TRACES}
    assert found == {
        "chat": "5cf6be25d8a2b93f",
        "code": "b7c2494e34cab1d7",
        "agents": "e52461c6d71fe699",
        "overload": "9c1761cf1766e70a",
    }


def test_every_request_has_what_policies_differ_by() -> None:
    for name in board.TRACES:
        requests = board.trace_of(name, 0).requests
        assert all(
            one.client and one.predicted_tokens and one.ttft_deadline and one.tbt_s and one.deadline
            for one in requests
        ), name
        assert len({one.priority for one in requests}) > 1, name
        shared = [one.spans[0].stream for one in requests if one.spans]
        assert len(set(shared)) < len(shared), name


def test_in_time_is_each_token_by_its_due_time() -> None:
    request = TraceRequest("0", 0.0, 10, 3, ttft_deadline=1.0, tbt_s=0.1, deadline=5.0)
    assert in_time(request, record(0, 1.0, gaps_s=[0.1, 0.1]))
    assert in_time(request, record(0, 0.5, gaps_s=[0.6, 0.05])), (
        "a stall within what came early isn't felt"
    )
    assert not in_time(request, record(0, 1.01, gaps_s=[0.01, 0.01]))
    assert not in_time(request, record(0, 1.0, gaps_s=[0.1, 0.2]))
    assert not in_time(
        TraceRequest("0", 0.0, 10, 3, ttft_deadline=1.0, tbt_s=9.0, deadline=1.5),
        record(0, 1.0, gaps_s=[0.5, 0.5]),
    )
    assert not in_time(request, rejected(0))


def test_a_client_who_sends_much_counts_once() -> None:
    clients: tuple[dict[str, Any], ...] = tuple(
        {"client": client, "ttft_deadline": 99.0, "tbt_s": 1.0, "deadline": 99.0}
        for client in ("calm", "flood")
    )
    calm, flood = clients
    trace = [
        TraceRequest("0", 0.0, 10, 3, **calm),
        *(TraceRequest(str(i), 0.0, 10, 3, **flood) for i in range(1, 5)),
    ]
    assert score(trace, [record(0, 0.1), *(rejected(i) for i in range(1, 5))]) == 0.5


def test_schedulers_are_tied_with_the_best_of_their_group_unless_measurably_worse() -> None:
    seeds = np.array([0.0, 0.2, 0.4, 0.1])  # traffic that is hard for all alike
    noise = np.array([0.02, -0.03, 0.01, 0.0])
    found = groups(
        {
            "best": 0.5 + seeds,
            "tied": 0.495 + seeds + noise,
            "worse": 0.4 + seeds,
            "as bad": 0.4 + seeds,
            "last": 0.0 * seeds,
        }
    )
    assert found == {"best": 1, "tied": 1, "worse": 2, "as bad": 2, "last": 3}


def noisy(deviation: float, seeds: int, mean: float = 0.5) -> dict[str, list[Figures]]:
    """Runs on one trace, with this standard deviation over seeds."""
    signs = np.array([(-1) ** seed for seed in range(seeds)], dtype=float)
    values = mean + deviation * signs / signs.std(ddof=1)
    return {"chat": [figures(float(value)) for value in values]}


def test_a_lead_is_apart_or_within_some_points_or_open() -> None:
    one, other, third = list(entries(["fcfs", "sjf", "slo"]))
    first, second = leads(
        {one: noisy(0.0, 10, 0.5), other: noisy(0.05, 10, 0.7), third: noisy(0.0, 10, 0.49)}
    )
    assert (first.name, first.next, second.name, second.next) == ("sjf", "fcfs", "fcfs", "slo")
    assert first.apart
    assert not first.within(0.2)
    assert (second.apart, second.within(0.0101), second.within(0.0099)) == (True, True, False)
    [open_] = leads({one: noisy(0.05, 10, 0.50), other: noisy(0.0, 10, 0.51)})
    assert not open_.apart
    assert not open_.within(0.03)
    assert anytime_half(0.05, int(open_.seeds)) <= 0.01 < anytime_half(0.05, int(0.9 * open_.seeds))
    within = open_.seeds_within(0.04)
    assert anytime_half(0.05, int(within)) <= 0.03 < anytime_half(0.05, int(0.9 * within))
    assert within < open_.seeds, "a small lead is shown to be small before it is shown at all"
    assert open_.seeds_within(0.005) == math.inf
    assert leads({one: noisy(0.1, 10)}) == []
    [same] = leads({one: noisy(0.1, 10), other: noisy(0.1, 10)})
    assert (same.same, same.apart, open_.same) == (True, False, False)


@pytest.mark.parametrize(("noise", "budget", "seeds"), [(0.0, 60, 4), (0.2, 1e-9, 3)])
def test_a_leaderboard_adds_seeds_until_neighbours_are_apart_or_the_time_is_up(
    noise: float,
    budget: float,
    seeds: int,
    tmp_path: Path,
    made_up: list[BoardRun],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(self: BoardRun, progress: object = None) -> Figures:
        made_up.append(self)
        better = 0.1 + noise * (-1) ** self.seed
        return figures(0.5 + better * (self.scheduler == "sjf"))

    monkeypatch.setattr(BoardRun, "run", run)
    options = ("--traces", "chat", "--only", "fcfs,sjf", "--seeds", 3, "--until", 3)
    said = lab("leaderboard", "--out", tmp_path, "--jobs", 1, *options, "--budget", budget)
    made = len(made_up) // 2
    assert made == seeds, "of three seeds no interval holds that may be looked at again"
    assert f"intervals over {seeds} seeds" in said
    assert ("by 10.0 ±0.0: apart" in said, "open; " in said) == (noise == 0, noise > 0)


@pytest.mark.slow("simulates whole traces")
def test_a_run_gives_its_figures_and_one_that_fails_its_reason() -> None:
    made = BoardRun("fcfs", "overload", 0).run()
    assert isinstance(made, Figures)
    assert (made.requests, made.completed + made.rejected) == (300, 300)
    assert 0 < made.in_time < 0.5
    assert str(BoardRun("nobody", "overload", 0).run()).startswith("PluginError: ")


def test_a_new_policy_appears_by_being_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "fair" not in [entry.name for entry in entries()]
    monkeypatch.syspath_prepend(tmp_path)
    Site(tmp_path).install_scheduler()
    [fair] = [entry for entry in entries() if entry.name == "fair"]
    assert fair.plugin.startswith("dovetail-fair")
    (tmp_path / "dovetail_fair_plugin_policy.py").write_text(
        (tmp_path / "dovetail_fair_plugin_policy.py").read_text() + "# changed\n"
    )
    assert next(iter(entries(["fair"]))).digest != fair.digest, (
        "results of the policy as it was don't count any more"
    )


@pytest.mark.slow("simulates a leaderboard twice")
def test_a_leaderboard_resumes(tmp_path: Path, made_up: list[BoardRun]) -> None:
    common = ("leaderboard", "--out", tmp_path, "--traces", "chat,code", "--seeds", 2, "--jobs", 1)
    lab(*common, "--only", "fcfs,sjf")
    assert len(made_up) == 8
    lines = (tmp_path / "runs.jsonl").read_text().splitlines(keepends=True)
    # killed while it wrote
    (tmp_path / "runs.jsonl").write_text("".join(lines[:5]) + lines[5][:40])
    said = lab(*common, "--only", "fcfs,sjf,slo")
    assert "5 of 12 runs are in" in said
    assert len(made_up) == 8 + 7
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 12
    whole = lab(*common[:-1], 2, "--only", "fcfs,sjf,slo")
    assert "12 of 12 runs are in" in whole, "several processes with nothing to do"
    found = json.loads((tmp_path / "leaderboard.json").read_text())
    assert [(one["scheduler"], one["scores"]["all"]["group"]) for one in found["standings"]] == [
        ("sjf", 1),
        ("slo", 1),
        ("fcfs", 2),
    ]


@pytest.mark.slow("simulates a leaderboard twice")
def test_a_failing_policy_is_named_and_tried_again(tmp_path: Path, made_up: list[BoardRun]) -> None:
    common = (
        "leaderboard",
        "--out",
        tmp_path,
        "--traces",
        "chat",
        "--seeds",
        2,
        "--jobs",
        1,
        "--only",
        "fcfs,srpt",
    )
    assert "failed: srpt: chat, seed 0: DovetailError: too short" in lab(*common)
    assert "2 of 4 runs are in" in lab(*common)
    page = (tmp_path / "report.html").read_text()
    assert "srpt failed" in page
    assert json.loads((tmp_path / "leaderboard.json").read_text())["failures"] == {
        "srpt": "chat, seed 0: DovetailError: too short"
    }


def test_nothing_but_failures_is_a_page_too(tmp_path: Path, made_up: list[BoardRun]) -> None:
    assert "failed: srpt" in lab(
        "leaderboard",
        "--out",
        tmp_path,
        "--traces",
        "chat",
        "--seeds",
        2,
        "--jobs",
        1,
        "--only",
        "srpt",
    )


def test_figures_without_values_are_kept(tmp_path: Path, made_up: list[BoardRun]) -> None:
    [entry], run = entries(["fcfs"]), BoardRun("fcfs", "chat", 0)
    Results(tmp_path).add(entry, run, figures(ttft_mean=float("nan")))
    kept = Results(tmp_path).of(entry, run)
    assert kept is not None
    assert np.isnan(kept.ttft_mean)
    assert Results(tmp_path).of(entry, BoardRun("fcfs", "chat", 1)) is None


def test_what_a_killed_process_left_doesn_t_spoil_the_next_result(
    tmp_path: Path, made_up: list[BoardRun]
) -> None:
    [entry] = entries(["fcfs"])
    run, another = (BoardRun("fcfs", "chat", seed) for seed in (0, 1))
    Results(tmp_path).add(entry, run, figures())
    [path] = tmp_path.iterdir()
    with path.open("a") as file:
        file.write('{"board": ')
    Results(tmp_path).add(entry, another, figures(0.7))
    kept = Results(tmp_path)
    assert (kept.of(entry, run), kept.of(entry, another)) == (figures(), figures(0.7))


def test_runs_with_other_figures_are_made_again(tmp_path: Path, made_up: list[BoardRun]) -> None:
    [entry], run = entries(["fcfs"]), BoardRun("fcfs", "chat", 0)
    Results(tmp_path).add(entry, run, figures())
    row = json.loads((tmp_path / "runs.jsonl").read_text())
    (tmp_path / "runs.jsonl").write_text(
        json.dumps({**row, "figures": {**row["figures"], "energy": 1.0}}) + "\n"
    )
    assert Results(tmp_path).of(entry, run) is None
    Results(tmp_path).add(entry, run, figures(0.7))
    assert Results(tmp_path).of(entry, run) == figures(0.7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seeds", "1"), "--seeds: intervals need 2 or more, got 1"),
        (("--until", "0"), "--until: expected points between 0 and 100, got 0"),
        (("--until", "nan"), "--until: expected points between 0 and 100, got nan"),
        (("--budget", "-1"), "--budget: expected seconds above 0, got -1"),
        (("--requests", "0"), "--requests: expected 1 or more, got 0"),
        (
            ("--traces", "chats"),
            "--traces: there is no trace 'chats'; there are chat, code, agents, overload",
        ),
        (
            ("--only", "fcfs,nobody"),
            "--only: no scheduler 'nobody' is installed; there are andes, ",
        ),
        (
            ("--only", "fcfs,,vtc"),
            "--only: expected names with commas between, each once, got 'fcfs,,vtc'",
        ),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: tuple[str, str], message: str) -> None:
    assert message in lab("leaderboard", "--out", tmp_path, *options, fails=True).replace("\n", " ")


def test_a_file_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text("[1]\n")
    with pytest.raises(ConfigError, match=r"runs.jsonl:1: no result of a leaderboard"):
        Results(tmp_path)
