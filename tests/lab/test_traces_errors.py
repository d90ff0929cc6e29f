"""Errors in a trace are reported with file, line, column and what was expected."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail_lab.traces import TraceError, load_trace, parse_columns
from tests.lab import trace_files
from tests.lab.trace_files import EVERY, lines, written
from tests.support import examples

HEADER = "arrived_at,input_tokens,output_tokens\n"


def error_of(folder: Path, text: str | bytes, **options: object) -> str:
    """The message, without the folder."""
    with pytest.raises(TraceError) as caught:
        load_trace(written(folder, text), **options)  # type: ignore[arg-type]
    return str(caught.value).replace(f"{folder}/", "")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            "1,nan,3",
            "trace:3: column input_tokens: expected a whole number of at least 1, got 'nan'",
        ),
        ("1,-5,3", "trace:3: column input_tokens: expected a whole number of at least 1, got '-5'"),
        (
            "1,2.5,3",
            "trace:3: column input_tokens: expected a whole number of at least 1, got '2.5'",
        ),
        ("1,2,0", "trace:3: column output_tokens: expected a whole number of at least 1, got '0'"),
        ("1,2,", "trace:3: column output_tokens: expected a whole number of at least 1, got ''"),
        (
            "1,2,1e999",
            "trace:3: column output_tokens: expected a whole number from 1 to 16,777,216, got "
            "'1e999'",
        ),
        (
            "1,1e300,3",
            "trace:3: column input_tokens: expected a whole number from 1 to 16,777,216, got "
            "'1e300'",
        ),
        (
            "1,1_000,3",
            "trace:3: column input_tokens: expected a whole number of at least 1, got '1_000'",
        ),
        (
            "1_0,2,3",
            "trace:3: column arrived_at: expected a time in s >= 0 or a date and time, got '1_0'",
        ),
        (
            "nan,2,3",
            "trace:3: column arrived_at: expected a time in s >= 0 or a date and time, got 'nan'",
        ),
        (
            "-1,2,3",
            "trace:3: column arrived_at: expected a time in s >= 0 or a date and time, got '-1'",
        ),
        (
            "inf,2,3",
            "trace:3: column arrived_at: expected a time in s >= 0 or a date and time, got 'inf'",
        ),
        (
            "2023-13-45 00:00:00,2,3",
            "trace:3: column arrived_at: expected a time in s >= 0 or a date and time, got "
            "'2023-13-45 00:00:00'",
        ),
        (
            "soon,2,3",
            "trace:3: column arrived_at: expected a time in s >= 0 or a date and time, got 'soon'",
        ),
        ("1,2", "trace:3: expected 3 columns, got 2"),
        ("1,2,3,4", "trace:3: expected 3 columns, got 4"),
        ('1,"2,3', "trace:3: expected CSV: unexpected end of data"),
    ],
)
def test_a_bad_row_of_a_table_is_named(row: str, message: str, tmp_path: Path) -> None:
    assert error_of(tmp_path, f"{HEADER}0,1,1\n{row}\n") == message


def test_an_acceptance_is_a_probability_or_none(tmp_path: Path) -> None:
    columns = parse_columns("prompt=in,output=out,acceptance=share")
    requests = load_trace(written(tmp_path, "in,out,share\n1,2,0.7\n3,4,\n"), columns=columns)
    assert [request.acceptance for request in requests] == [0.7, None]
    assert "trace:2: column share: expected a probability from 0 to 1, got '1.5'" in error_of(
        tmp_path, "in,out,share\n1,2,1.5\n", columns=columns
    )


def test_an_id_that_no_file_could_hold_is_named(tmp_path: Path) -> None:
    said = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    message = (
        "trace: item 1: expected ids and clients that are text, got half a surrogate pair in "
        "'a\\ud83d/0'"
    )
    assert error_of(tmp_path, json.dumps([{"id": "a\ud83d", "conversations": said}])) == message


GOOD = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"input_length": True},
            "trace:2: column input_length: expected a whole number of at least 1, got True",
        ),
        (
            {"input_length": None},
            "trace:2: column input_length: expected a whole number of at least 1, got None",
        ),
        (
            {"output_length": "many"},
            "trace:2: column output_length: expected a whole number of at least 1, got 'many'",
        ),
        (
            {"timestamp": -3},
            "trace:2: column timestamp: expected a time in ms >= 0 or a date and time, got -3",
        ),
        (
            {"hash_ids": [1]},
            "trace:2: column hash_ids: expected 2 whole numbers, one for each 512 of 600 tokens, "
            "got [1]",
        ),
        (
            {"hash_ids": "ab"},
            "trace:2: column hash_ids: expected 2 whole numbers, one for each 512 of 600 tokens, "
            "got 'ab'",
        ),
    ],
)
def test_a_bad_row_of_json_is_named(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    assert error_of(tmp_path, lines(GOOD, {**GOOD, **change})) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace: expected a trace, the file is empty"),
        ("\ufeff \n", "trace: expected a trace, the file is empty"),
        (b"\xff\xfe\x00", "trace: expected text in UTF-8, byte 0 is none"),
        (b"\x1f\x8bnot gzip", "trace: can't be read: "),
        (gzip.compress(trace_files.AZURE.encode(), mtime=0)[:-9], "trace: can't be read: "),
        (
            gzip.compress(trace_files.AZURE.encode(), mtime=0)[:20] + bytes(30),
            "trace: can't be read: ",
        ),
        (HEADER, "trace: expected at least one request, there is none"),
        (
            "a,b\n1,2\n",
            "trace:1: no known format has the columns 'a', 'b'; map them, such as "
            "arrival=ts:ms,prompt=in,output=out",
        ),
        (
            "arrived_at,input_tokens\n1,2\n",
            "trace:1: no known format has the columns 'arrived_at', 'input_tokens'; for "
            "llmservingsim the column",
        ),
        (
            HEADER.replace("\n", ",arrived_at\n1,2,3,4\n"),
            "trace:1: expected a column 'arrived_at'; it is there 2 times",
        ),
        ("{'single': 'quotes'}", "trace:1: column 2: expected JSON: Expecting property name"),
        ('{"x": 1}', "trace:1: no known format has the fields 'x'"),
        (
            '{\n "input_lens": [1, 2],\n "outp',
            "trace:3: column 2: expected JSON: the text is truncated",
        ),
        (
            '{"input_lens": [1], "output_lens": [1], "start_times": [0], "ttfts": [1], "itls": '
            "[3]}",
            "trace: item 1: column itls: expected a list of",
        ),
        (trace_files.SHAREGPT[:60], "trace:1: column 61: expected JSON: the text is truncated"),
        (trace_files.MOONCAKE[:-20], "trace:2: column 63: expected JSON: the text is truncated"),
        ("[1]", "trace: item 1: expected a JSON object, got 1"),
        ("[{}]", "trace: item 1: expected a list at messages, got None"),
        (
            '[{"messages": [7]}]',
            "trace: item 1: expected a turn with `from` and `value`, or `role` and `content`, as "
            "texts, got 7",
        ),
        ("[]", "trace: expected at least one request, there is none"),
        (
            '{"total_input_tokens": 4}',
            "trace: expected a list 'input_lens': only a run of vLLM's bench serve with "
            "--save-detailed writes it",
        ),
        (
            '{"input_lens": [1, 2], "output_lens": [1]}',
            "trace: expected lists of equal length, got input_lens 2, output_lens 1",
        ),
        ('{"config": 1, "result": []}', "trace:1: expected a list at result.responses, got None"),
    ],
)
def test_nonsense_is_answered_in_words(text: str | bytes, message: str, tmp_path: Path) -> None:
    assert error_of(tmp_path, text).startswith(message)


def test_a_header_that_never_ends_is_answered_in_words(tmp_path: Path) -> None:
    assert (
        error_of(tmp_path, '"TIMESTAMP,ContextTokens\n1,2\n', format="azure")
        == "trace:2: expected CSV: unexpected end of data"
    )


def test_two_requests_of_one_id_are_refused(tmp_path: Path) -> None:
    text = trace_files.VTC_ARENA.replace("\n1,", "\n0,")
    assert error_of(tmp_path, text) == "trace:3: expected ids that differ, '0' is also in line 2"
    chats = json.dumps(2 * json.loads(trace_files.SHAREGPT))
    assert error_of(tmp_path, chats).startswith("trace: item ")


def test_times_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    row = json.loads(trace_files.VLLM_REQUESTS.splitlines()[0])
    assert "expected arrival <= scheduled <= first token <= last token" in error_of(
        tmp_path, lines({**row, "first_token_ts": 500.0})
    )


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nothing\.csv: can't be read: No such file or directory"):
        load_trace(tmp_path / "nothing.csv")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "azur"}, "unknown trace format 'azur'; there are azure, "),
        ({"format": "csv"}, "the format csv needs a column map"),
        (
            {"format": "mooncake", "columns": parse_columns("prompt=a,output=b")},
            "a column map is for CSV, not for the format 'mooncake'",
        ),
        (
            {"columns": parse_columns("prompt=a,output=b")},
            "trace:1: expected a column 'a'; there are 'arrived_at', 'input_tokens', "
            "'output_tokens'",
        ),
        ({"format": "azure"}, "trace:1: expected a column 'TIMESTAMP'"),
        ({"format": "mooncake"}, "trace:1: column 1: expected JSON"),
    ],
)
def test_a_wrong_format_is_answered_in_words(
    options: dict[str, object], message: str, tmp_path: Path
) -> None:
    assert error_of(tmp_path, trace_files.LLMSERVINGSIM, **options).startswith(message)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "prompt",
        "prompt=",
        "size=a,output=b",
        "prompt=a",
        "output=b",
        "prompt=a,prompt=b,output=c",
    ],
)
def test_a_column_map_must_say_where_lengths_are(text: str) -> None:
    with pytest.raises(TraceError, match="column map: "):
        parse_columns(text)


@examples(quick=150, full=5000)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_but_nothing_else(
    data: st.DataObject, tmp_path: Path
) -> None:
    text = bytearray(EVERY[data.draw(st.sampled_from(sorted(EVERY)))].encode())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        text[start : start + data.draw(st.integers(0, 8))] = data.draw(
            st.sampled_from(
                [b"", b",", b"\n", b"\r", b'"', b"-", b"nan", b"[]", b"\xff", b"\0", b"1e400"]
            )
        )
    try:
        trace = load_trace(written(tmp_path, bytes(text)))
    except TraceError:
        return
    arrivals = [request.arrival_time for request in trace]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0.0
    assert all(request.prompt_tokens >= 1 and request.output_tokens >= 1 for request in trace)
