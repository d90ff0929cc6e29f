"""The load generator `bench/serve.py`: every request is accounted for, tokens are counted from
usage, and a wrong text is found."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bench import serve
from bench.serve import Quantiles, drawn_workload, metrics, poisson, run_here, tpot
from bench.streams import COMPLETED, HUNG_UP, Outcome, Plan, Record
from bench.workloads import WORKLOADS

from tests.bench.fake_server import FakeServer


def plan(url: str, requests: int | None = 12, **fields: Any) -> Plan:
    work = drawn_workload(8, 10, requests or 12, seed=1, max_id=90)
    return Plan(
        **{
            "url": url,
            "model": "toy",
            "work": work,
            "requests": requests,
            "concurrency": 4,
            "checked": True,
            **fields,
        }
    )


def ended(behave: str, **fields: Any) -> Record:
    server = FakeServer(behave)
    with server.running() as url:
        (record,) = run_here(plan(url, **fields))
    return record


def kinds(record: Record) -> Counter[str]:
    return Counter(outcome.kind for outcome in record.outcomes)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("behave", ["well", "split", "bundle"])
def test_a_good_answer_is_completed_however_it_is_cut(behave: str, chat: bool) -> None:
    record, lens = ended(behave, chat=chat), drawn_workload(8, 10, 12, seed=1, max_id=90).lens
    assert kinds(record) == {COMPLETED: 12}
    assert sorted((one.prompt_tokens, one.output_tokens) for one in record.outcomes) == sorted(
        lens
    ), "as usage says, not as events are"
    assert all(one.sent <= one.first <= one.last for one in record.outcomes)
    assert record.events == len(record.gaps) + 12
    assert (record.events == sum(output for _, output in lens)) == (behave != "bundle")


@pytest.mark.parametrize(
    ("behave", "kind", "told"),
    [
        ("refuse", "HTTP 429", "too many"),
        ("lose", "lost or doubled tokens", "from 2 on"),
        ("cut", "cut off", "the connection ended"),
        ("error", "error event", "the engine died"),
    ],
)
def test_a_failure_is_of_a_kind_and_told_in_words(behave: str, kind: str, told: str) -> None:
    record = ended(behave)
    assert kinds(record) == {kind: 12}
    assert told in record.examples[kind]


def test_nobody_there_is_a_failure() -> None:
    server = FakeServer()
    with server.running() as url:
        pass
    assert set(kinds(run_here(plan(url, requests=2))[0])) == {"not connected"}


def test_clients_that_hang_up_are_no_failures_and_the_others_go_on() -> None:
    record = ended("well", requests=60, disconnects=0.5)
    assert set(kinds(record)) == {COMPLETED, HUNG_UP}
    assert 15 < kinds(record)[HUNG_UP] < 45
    assert not record.failures


def test_requests_come_at_their_times() -> None:
    arrivals = poisson(200, 12, seed=3)
    record = ended("well", arrivals=arrivals)
    assert kinds(record) == {COMPLETED: 12}
    assert all(one.sent - one.late >= record.began for one in record.outcomes)
    assert sorted(one.sent for one in record.outcomes)[-1] >= record.began + arrivals[-1]


def test_a_closed_loop_by_the_clock_ends() -> None:
    record = ended("well", requests=None, seconds=0.2)
    assert set(kinds(record)) == {COMPLETED}


def test_a_request_is_the_same_in_every_process_and_prompts_differ() -> None:
    one = plan("http://x", requests=6)
    jobs = list(one.jobs(0))
    two = Plan(**{**{name: getattr(one, name) for name in Plan.__slots__}, "processes": 2})
    assert [job.body for job in two.jobs(0)] == [job.body for job in jobs[::2]]
    assert [job.body for job in two.jobs(1)] == [job.body for job in jobs[1::2]]
    assert len({job.body for job in jobs}) == 6
    assert [two.streams(process) for process in range(2)] == [2, 2]


def test_a_shared_prefix_is_shared() -> None:
    shared = Plan(url="http://x", model="toy", work=WORKLOADS["shared"], requests=2)
    first, second = (json.loads(job.body)["prompt"] for job in shared.jobs(0))
    assert first[:2000] == second[:2000]
    assert first[2000:] != second[2000:]


def test_metrics_are_those_that_are_stated() -> None:
    good = Outcome(COMPLETED, sent=1.0, first=1.5, last=2.5, prompt_tokens=10, output_tokens=5)
    record = Record(began=0.5, outcomes=[good, Outcome("HTTP 429", sent=1.0)], cpu_s=1.0, events=5)
    record.gaps.extend([0.1, 0.4, 0.5])
    told = metrics([record], wanted_tokens=6)
    assert tpot(good) == pytest.approx(0.25)
    assert (told["completed"], told["failures"], told["missing_tokens"]) == (1, {"HTTP 429": 1}, 1)
    assert told["duration_s"] == pytest.approx(2.0)
    assert told["output_tok_s"] == pytest.approx(2.5)
    assert told["total_tok_s"] == pytest.approx(7.5)
    assert told["ttft_ms"]["p50"] == pytest.approx(500)
    assert told["e2e_ms"]["max"] == pytest.approx(1500)
    assert told["itl_ms"]["max"] == pytest.approx(500)
    assert Quantiles.of([]) is None


@pytest.mark.slow("starts a server's processes")
def test_the_program_runs_a_plan_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,3\n2023-11-16 "
        "18:15:46.1,7,4\n"
    )
    server, out = FakeServer(), tmp_path / "out.json"
    with server.running() as url:
        for load in (
            ["--trace", str(trace)],
            [
                "--prompt",
                "4",
                "--output",
                "6",
                "--requests",
                "8",
                "--concurrency",
                "2",
                "--processes",
                "2",
            ],
        ):
            monkeypatch.setattr(
                sys,
                "argv",
                ["serve", "--url", url, *load, "--check-toy", "--max-id", "90", "--json", str(out)],
            )
            with pytest.raises(SystemExit) as status:
                serve.main()
            assert status.value.code == 0, capsys.readouterr().out
    (row,) = json.loads(out.read_text())
    assert (row["completed"], row["failures"], row["missing_tokens"]) == (8, {}, 0)
    assert "2 of 2 requests completed" in capsys.readouterr().out
    assert server.bodies[0]["stream_options"] == {"include_usage": True}
