"""Transformations of a trace before its replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail_lab.traces import (
    Measured,
    Trace,
    TraceError,
    TraceRequest,
    scale_rate,
    set_max_tokens,
    slice_trace,
)
from dovetail_lab.traces.transform import set_window
from dovetail_lab.workloads import WorkloadOptions, load_workload
from tests.lab import trace_files
from tests.lab.trace_files import written

TRACE = Trace(
    "t",
    "here",
    tuple(
        TraceRequest(
            str(i),
            i * 10.0,
            5,
            3 * (i + 1),
            deadline=i * 10.0 + 4,
            ttft_deadline=i * 10.0 + 2,
            measured=Measured(i * 10 + 1.0, i * 10 + 2.0),
        )
        for i in range(6)
    ),
)


def ids(trace: Trace) -> str:
    return "".join(request.id for request in trace)


@pytest.mark.parametrize(
    ("text", "kept", "start"),
    [
        ("1:3", "12", 10.0),
        (":2", "01", 0.0),
        ("-2:", "45", 40.0),
        (":", "012345", 0.0),
        ("15s:35s", "23", 15.0),
        ("20s:40s", "23", 20.0),
        (":10s", "0", 0.0),
        ("45.5s:", "5", 45.5),
    ],
)
def test_a_slice_is_by_place_or_by_time_and_its_clock_begins_with_it(
    text: str, kept: str, start: float
) -> None:
    part = slice_trace(TRACE, text)
    assert ids(part) == kept
    first, whole = part.requests[0], TRACE.requests[int(kept[0])]
    assert first.arrival_time == whole.arrival_time - start
    assert first.deadline == (whole.deadline or 0) - start
    assert first.ttft_deadline == (whole.ttft_deadline or 0) - start
    assert first.measured is not None
    assert whole.measured is not None
    assert first.measured.first_token_time == whole.measured.first_token_time - start
    assert part.notes == (f"slice {text}: {len(kept)} of 6 requests",)


@pytest.mark.parametrize(
    "text", ["", "3", "a:b", "1:2:3", "1s:3", "1:3s", "2.5:4", "s:s", "nans:nans"]
)
def test_a_slice_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(TraceError, match=r"slice"):
        slice_trace(TRACE, text)


def test_a_slice_with_nothing_in_it_is_refused() -> None:
    with pytest.raises(
        TraceError, match=r"the slice 51s:52s of t is empty: it has 6 requests in 50 s"
    ):
        slice_trace(TRACE, "51s:52s")


def test_twice_the_rate_is_half_the_gaps_and_deadlines_keep_their_distance() -> None:
    fast = scale_rate(TRACE, 2)
    assert [request.arrival_time for request in fast] == [0, 5, 10, 15, 20, 25]
    assert {(request.deadline or 0) - request.arrival_time for request in fast} == {4.0}
    assert {(request.ttft_deadline or 0) - request.arrival_time for request in fast} == {2.0}
    assert {request.measured for request in fast} == {None}, (
        "what was measured belongs to the old arrivals"
    )
    assert fast.notes == ("arrival rate scaled by 2",)


@pytest.mark.parametrize("factor", [0, -1, float("nan"), float("inf")])
def test_a_rate_can_not_be_scaled_by_nonsense(factor: float) -> None:
    with pytest.raises(TraceError, match="must be a finite number > 0"):
        scale_rate(TRACE, factor)


def test_policies_see_the_trace_s_limits_or_one_for_all() -> None:
    assert [request.limit for request in set_max_tokens(TRACE, "trace")] == [3, 6, 9, 12, 15, 18]
    limited = set_max_tokens(TRACE, "12")
    assert {request.limit for request in limited} == {12}
    assert [request.output_tokens for request in limited] == [3, 6, 9, 12, 12, 12]
    assert limited.notes == ("policies see max_tokens=12, which cuts 2 of 6 answers",)


@pytest.mark.parametrize("value", ["", "0", "-4", "many", "1.5"])
def test_a_limit_is_trace_or_a_number(value: str) -> None:
    with pytest.raises(TraceError, match="max_tokens must be 'trace' or a whole number"):
        set_max_tokens(TRACE, value)


def test_all_that_was_done_is_told_in_order(tmp_path: Path) -> None:
    options = WorkloadOptions(
        arrivals="constant(2)",
        slice="1:",
        scale_rate=0.5,
        max_tokens="100",
        predictor="oracle",
        seed=3,
    )
    trace = load_workload(str(written(tmp_path, trace_files.VTC_ARENA)), options)
    assert [request.arrival_time for request in trace] == [0.0]
    assert trace.notes == (
        "arrivals replaced by Constant(rate=2.0), seed 3",
        "slice 1:: 1 of 2 requests",
        "arrival rate scaled by 0.5",
        "policies see max_tokens=100, which cuts 1 of 1 answers",
        "lengths predicted by oracle()",
    )


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(TraceError, match="the seed must be 0 or more"):
        load_workload("x.csv", WorkloadOptions(seed=-1))


@pytest.mark.parametrize(
    ("text", "window"), [("10s:30s", (10.0, 30.0)), ("10s:", (10.0, 50.0)), (":2.5s", (0.0, 2.5))]
)
def test_a_window_measures_a_part_of_a_run_of_all_requests(
    text: str, window: tuple[float, float]
) -> None:
    trace = set_window(TRACE, text)
    assert trace.window == window
    assert trace.requests == TRACE.requests
    assert trace.notes[-1].startswith(f"measured from {window[0]:g} s to {window[1]:g} s")


@pytest.mark.parametrize("text", ["", ":", "10", "1:3", "s:s", "30s:10s", "60s:", "-5s:"])
def test_a_window_that_is_none_or_in_which_nothing_arrives_is_refused(text: str) -> None:
    with pytest.raises(TraceError, match="window"):
        set_window(TRACE, text)


def test_the_same_requests_are_in_the_window_at_another_rate() -> None:
    trace = scale_rate(set_window(TRACE, "10s:30s"), 3)
    assert trace.window is not None
    assert (
        "".join(
            request.id
            for request in trace
            if trace.window[0] <= request.arrival_time < trace.window[1]
        )
        == "12"
    )
