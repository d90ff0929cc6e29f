"""Trace files of all formats, read."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail_lab.token_ids import prompt_ids
from dovetail_lab.traces import FORMATS, Measured, Trace, load_trace, parse_columns
from tests.lab import trace_files
from tests.lab.trace_files import EVERY, written

Read = Callable[..., Trace]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Reads a file of that text, with the options of `load_trace`."""
    return lambda text, **options: load_trace(written(tmp_path, text), **options)


def rows(trace: Trace) -> list[tuple[float, int, int]]:
    return [
        (request.arrival_time, request.prompt_tokens, request.output_tokens) for request in trace
    ]


def test_every_format_has_a_file_here() -> None:
    assert {*FORMATS} == {*EVERY, "csv"}


@pytest.mark.parametrize("format", EVERY)
def test_a_format_is_found_by_content_as_if_it_had_been_named(format: str, read: Read) -> None:
    assert read(EVERY[format]) == read(EVERY[format], format=format)


@pytest.mark.parametrize("format", EVERY)
def test_gzip_a_byte_order_mark_and_other_line_ends_change_nothing(format: str, read: Read) -> None:
    plain = read(EVERY[format])
    assert read(gzip.compress(EVERY[format].encode())) == plain
    assert read(b"\xef\xbb\xbf" + EVERY[format].encode()) == plain
    assert read(EVERY[format].replace("\n", "\r\n")) == plain
    assert read(EVERY[format].replace("\n", "\r")) == plain


def test_azure_of_both_years_counts_from_its_first_arrival(read: Read) -> None:
    assert rows(read(trace_files.AZURE)) == [(0.0, 374, 44), (4.314579, 396, 109)]
    assert rows(read(trace_files.AZURE_2024)) == [(0.0, 2162, 5), (1.0, 2399, 6)]


def test_burstgpt_s_failures_are_left_out_and_said_so(read: Read) -> None:
    trace = read(trace_files.BURSTGPT)
    assert rows(trace) == [(0.0, 472, 18), (113.0, 417, 276)]
    assert trace.notes == ("left out 1 row that failed, with no answer",)


def test_the_arena_has_clients(read: Read) -> None:
    trace = read(trace_files.VTC_ARENA)
    assert [(request.id, request.client) for request in trace] == [("0", "alice"), ("1", "bob")]


def test_lengths_without_times_all_arrive_at_once_and_it_is_said(read: Read) -> None:
    trace = read(trace_files.SARATHI)
    assert rows(trace) == [(0.0, 74, 918), (0.0, 290, 905)]
    assert trace.notes == ("all requests arrive at once",)


def test_mooncake_s_equal_hash_ids_are_equal_tokens(read: Read) -> None:
    first, second = read(trace_files.MOONCAKE).requests
    assert second.arrival_time == 3.0
    a, b = (prompt_ids(request, 32_000).tolist() for request in (first, second))
    assert (len(a), len(b)) == (1100, 1030)
    assert a[:1024] == b[:1024]
    assert a[1024:1030] != b[1024:1030]
    assert a[:512] != a[512:1024]


def test_what_vllm_measured_is_put_on_the_clock_of_arrivals(read: Read) -> None:
    """The offset makes the shortest wait for the queue, which is the first request's, zero."""
    first, second = read(trace_files.VLLM_REQUESTS).requests
    assert (first.id, first.arrival_time, second.arrival_time) == ("bench-0", 0.0, 1.0)
    assert first.measured == Measured(
        first_token_time=1.0, last_token_time=3.0, scheduled_time=0.25
    )
    assert second.measured == Measured(
        first_token_time=2.0, last_token_time=4.0, scheduled_time=1.5
    )


def test_the_artifact_s_measurements_lack_who_was_aborted(read: Read) -> None:
    trace = read(trace_files.VTC_MEASURED)
    assert rows(trace) == [(0.0, 13, 9), (1.0, 14, 8)]
    assert trace.requests[1].measured == Measured(first_token_time=2.5, last_token_time=6.0)
    assert trace.notes == ("left out 1 row of aborted requests",)


def test_bench_serve_with_and_without_start_times(read: Read) -> None:
    trace = read(trace_files.BENCH_SERVE)
    assert rows(trace) == [(0.0, 11, 3), (1.0, 10, 2)]
    measured = trace.requests[0].measured
    assert measured is not None
    assert (measured.first_token_time, measured.last_token_time) == pytest.approx((0.5, 0.7))
    assert trace.notes == ("left out 1 row that failed",)
    without = read(trace_files.BENCH_SERVE_WITHOUT_TIMES)
    assert rows(without) == [(0.0, 11, 3), (0.0, 10, 2)]
    assert without.notes[-1] == "all requests arrive at once"


def test_each_answer_of_a_chat_is_a_request_whose_prompt_is_all_before(read: Read) -> None:
    trace = read(trace_files.SHAREGPT)
    assert [(request.id, request.prompt_tokens, request.output_tokens) for request in trace] == [
        ("chat/0", 4, 2),
        ("chat/1", 7, 4),
    ]
    assert trace.notes[0] == "lengths are counted in words, since no tokenizer was given"
    first, second = (prompt_ids(request, 1000).tolist() for request in trace)
    assert second[:4] == first


def test_chats_may_stand_in_a_list_or_a_line_each(read: Read) -> None:
    a_line_each = "\n".join(map(json.dumps, json.loads(trace_files.SHAREGPT)))
    assert rows(read(a_line_each)) == rows(read(trace_files.SHAREGPT))


def test_a_tokenizer_gives_lengths_where_there_is_one(read: Read) -> None:
    trace = read(trace_files.OPENAI, count_tokens=len)
    assert rows(trace) == [(0.0, 13, 9)]
    assert not any("words" in note for note in trace.notes)


def test_any_csv_is_read_by_a_column_map(read: Read) -> None:
    text = "when,who,in,out,most,due,rank,guess,first,gap\n1500,ann,10,20,64,4500,2,18,2500,40\n2500,,11,21,,,,,,\n"
    columns = "arrival=when:ms,prompt=in,output=out,client=who,max_tokens=most,deadline=due:ms,priority=rank,predicted=guess"
    columns += ",ttft_deadline=first:ms,tbt=gap:ms"
    first, second = read(text, columns=parse_columns(columns)).requests
    assert (first.client, first.limit, first.deadline, first.priority, first.predicted_tokens) == (
        "ann",
        64,
        3.0,
        2,
        18,
    )
    assert (first.ttft_deadline, first.tbt_s, second.ttft_deadline, second.tbt_s) == (
        1.0,
        0.04,
        None,
        None,
    )
    assert (
        second.arrival_time,
        second.client,
        second.limit,
        second.deadline,
        second.predicted_tokens,
    ) == (1.0, None, 21, None, None)


def test_rows_out_of_order_are_sorted_and_it_is_said(read: Read) -> None:
    trace = read("arrived_at,input_tokens,output_tokens\n2,1,1\n1,2,2\n1,3,3\n5,4,4\n")
    assert rows(trace) == [(0.0, 2, 2), (0.0, 3, 3), (1.0, 1, 1), (4.0, 4, 4)]
    assert [request.id for request in trace] == ["1", "2", "0", "3"]
    assert trace.notes == ("sorted by arrival: 1 row came before the one above",)


def test_reading_needs_neither_torch_nor_pandas(tmp_path: Path) -> None:
    code = (
        "import sys; from dovetail_lab.workloads import load_workload; "
        "load_workload(sys.argv[1]); print({'torch', 'pandas'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(written(tmp_path, trace_files.AZURE))],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "set()\n"
