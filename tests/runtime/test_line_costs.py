"""Costs of decode steps by lines, with graphs that are played on the CPU."""

from __future__ import annotations

import pytest

from dovetail_executors.runtime import line_costs as module
from dovetail_executors.runtime.line_costs import LINES, TIMES, line_costs
from tests.runtime.fakes import Bench, generate
from tests.runtime.recorded import WatchedGraphs
from tests.runtime.test_decode_graphs import PROMPTS, with_graphs


class Span:
    """Takes as many seconds as spans there were before."""

    made = 0

    def __init__(self, device: object) -> None:
        Span.made += 1
        self.seconds = float(Span.made)

    def close(self) -> None:
        pass

    def wait(self) -> None:
        pass


@pytest.fixture(autouse=True)
def spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Span, "made", 0)
    monkeypatch.setattr(module, "DeviceSpan", Span)


def bench_with_graphs(**sizes: int) -> tuple[Bench, WatchedGraphs]:
    bench = Bench(max_rows=4, max_lines=13, **sizes)
    return bench, with_graphs(bench, 13)


def test_the_median_of_some_replays_is_taken_for_each_number_of_lines_that_a_step_may_have() -> (
    None
):
    bench, graphs = bench_with_graphs()
    costs = line_costs(bench.runner, graphs)
    assert [lines for lines, _ in costs] == [lines for lines in LINES if lines <= 13]
    assert [seconds for _, seconds in costs] == [TIMES * n + 2 for n in range(len(costs))]
    assert graphs.replayed[:: 1 + TIMES] == [("decode", size) for size in (1, 2, 3, 4, 5, 6, 8, 12)]
    assert graphs.replayed_rows[4] == [0, 0, 1, 2, 3], "drafts are dealt to all rows"


def test_rows_are_as_they_were_afterwards() -> None:
    bench, graphs = bench_with_graphs()
    line_costs(bench.runner, graphs)
    assert not bench.rows.known.any()
    result = bench.run({0: 5}, [bench.new(0, PROMPTS[0])])
    assert result.token_ids.tolist() == generate(PROMPTS[0], 1)


def test_rows_too_short_for_replays_are_not_measured() -> None:
    bench, graphs = bench_with_graphs(max_len=8)
    assert [lines for lines, _ in line_costs(bench.runner, graphs)] == [1, 2, 3, 4]
