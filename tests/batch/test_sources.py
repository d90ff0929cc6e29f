"""Tests of input files: every format and start position gives the same rows, and each invalid row a
reason."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import RequestError
from dovetail_batch.open_job import scan
from dovetail_batch.rows import JobRow, RowReader
from dovetail_batch.sources import Csv, Jsonl, Source
from tests.support import examples

READER = RowReader({}, seed=0)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
ROWS = st.lists(st.tuples(TEXTS, st.integers(1, 9)), min_size=1, max_size=12)


def written(path: Path, format: str, rows: list[tuple[str, int]]) -> Source:
    """A file of prompts and how many tokens each is to have, in some format."""
    if format == "jsonl":
        lines = [
            json.dumps(
                {"id": at, "prompt": text, "sampling": {"max_tokens": n}}, ensure_ascii=at % 2 == 0
            )
            for at, (text, n) in enumerate(rows)
        ]
        path.write_bytes("\n\n".join(lines).encode() + (b"\n" if len(rows) % 2 else b""))
        return Jsonl(path, {})
    if format == "csv":
        with path.open("w", encoding="utf-8-sig", newline="") as file:
            quoting = csv.QUOTE_ALL if len(rows) % 3 else csv.QUOTE_MINIMAL
            writer = csv.writer(
                file, lineterminator="\n" if len(rows) % 2 else "\r\n", quoting=quoting
            )
            writer.writerows(
                [
                    ["id", "prompt", "sampling"],
                    *(
                        [at, text, json.dumps({"max_tokens": n})]
                        for at, (text, n) in enumerate(rows)
                    ),
                ]
            )
        return Csv(path, {})
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("dovetail_batch.parquet")
    from pyarrow.parquet import write_table

    values = [
        {"id": at, "prompt": text, "sampling": {"max_tokens": n, "top_k": None}}
        for at, (text, n) in enumerate(rows)
    ]
    write_table(pa.Table.from_pylist(values), path, row_group_size=3)
    return parquet.Parquet(path, {})  # type: ignore[no-any-return]


def read(source: Source, position: int, first: int) -> list[JobRow]:
    return [
        READER.read(number, source.convert(source.fields(record)))
        for number, (record, _) in enumerate(source.records(position), start=first)
    ]


@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet"])
@examples(15, 300)
@given(rows=ROWS, shard_rows=st.integers(1, 5))
def test_rows_are_the_same_from_the_start_of_any_shard_on(
    format: str, tmp_path: Path, rows: list[tuple[str, int]], shard_rows: int
) -> None:
    source = written(tmp_path / "rows", format, rows)
    whole = read(source, source.first, 1)
    assert [(row.id, row.content, row.params.max_tokens) for row in whole] == [
        (str(at), *row) for at, row in enumerate(rows)
    ]
    count, starts = scan(source, READER, shard_rows)
    assert count == len(rows)
    assert len(starts) == -(-len(rows) // shard_rows)
    for shard, start in enumerate(starts):
        assert read(source, start, shard * shard_rows + 1) == whole[shard * shard_rows :]


def test_columns_are_named_and_others_ignored(tmp_path: Path) -> None:
    columns = {"id": "key", "token_ids": "tokens"}
    (tmp_path / "rows.csv").write_text('key,tokens,note\na,"[1, 2]",x\n')
    (tmp_path / "rows.jsonl").write_text('{"key": "a", "tokens": [1, 2], "note": "x"}\n')
    for source in (Csv(tmp_path / "rows.csv", columns), Jsonl(tmp_path / "rows.jsonl", columns)):
        (row,) = read(source, source.first, 1)
        assert (row.id, row.form, row.content) == ("a", "token_ids", [1, 2])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"id": 1', "not valid JSON: Expecting ',' delimiter: line 1 column 9"),
        (b"[" * 100_000, "more than 128 lists and objects in one another"),
        (b'{"id": 1, "id": 2, "prompt": "x"}', "key 'id' is given twice"),
        (b'{"id": 1, "prompt": "\xff"}', "not UTF-8: invalid start byte at byte 21"),
        (b'"ROMEO:"', "expected an object like"),
        (b'{"id": 1}', "expected exactly one of prompt, messages, token_ids, got none"),
        (
            b'{"id": 1, "prompt": "x", "token_ids": [1]}',
            "expected exactly one of prompt, messages, token_ids, got prompt and token_ids",
        ),
        (b'{"id": 1.5, "prompt": "x"}', "id must be a string or an integer, got 1.5"),
        (b'{"id": "", "prompt": "x"}', "id must be a string or an integer, got ''"),
        (b'{"id": 1, "prompt": 5}', "prompt must be a string, got 5"),
        (b'{"id": 1, "token_ids": []}', "token_ids must be a non-empty list, got []"),
        (b'{"id": 1, "messages": "hi"}', "messages must be a non-empty list, got 'hi'"),
        (
            b'{"id": 1, "messages": ' + b"[" * 100 + b"]" * 100 + b"}",
            "messages: more than 50 lists and objects in one another",
        ),
        (
            b'{"id": 1, "token_ids": ' + b"[" * 100 + b"]" * 100 + b"}",
            "token_ids: more than 50 lists and objects in one another",
        ),
        (b'{"id": 1, "promt": "x"}', "promt: unknown key, did you mean prompt?"),
        (
            b'{"id": 1, "prompt": "x", "max_tokens": 5}',
            "max_tokens: a sampling parameter, which belongs in the row's `sampling`",
        ),
        (b'{"id": 1, "prompt": "x", "sampling": 5}', "sampling must be an object like"),
        (
            b'{"id": 1, "prompt": "x", "sampling": {"top_p": 2}}',
            "sampling: top_p must be a finite number > 0 and <= 1",
        ),
        (
            b'{"id": 1, "prompt": "x", "sampling": {"max_new_tokens": 2}}',
            "sampling: max_new_tokens: use the name max_tokens",
        ),
    ],
)
def test_a_wrong_line_says_why(tmp_path: Path, line: bytes, told: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(line + b"\n")
    with pytest.raises(RequestError) as refused:
        read(Jsonl(tmp_path / "rows.jsonl", {}), 0, 1)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ("a,x", "2 cells, where the header has 3"),
        ("a,,[1", "token_ids must be JSON, got '[1'"),
        ("a,,", "expected exactly one of prompt, messages, token_ids, got none"),
        ("a,,5", "token_ids must be a non-empty list, got 5"),
    ],
)
def test_a_wrong_line_of_a_table_says_why(tmp_path: Path, cells: str, told: str) -> None:
    (tmp_path / "rows.csv").write_text(f"id,prompt,token_ids\n{cells}\n")
    source = Csv(tmp_path / "rows.csv", {})
    with pytest.raises(RequestError) as refused:
        read(source, source.first, 1)
    assert told in str(refused.value)


def test_a_value_that_python_cannot_hold_fails_its_row_alone(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("dovetail_batch.parquet")
    from pyarrow.parquet import write_table

    not_utf8 = pa.Array.from_buffers(pa.string(), 2, pa.array([b"a", b"\xff"]).buffers())
    for column, told in [
        (not_utf8, "not readable: 'utf-8' codec"),
        (pa.array([1000, 1], pa.timestamp("ns")), "not readable: Nanosecond"),
    ]:
        write_table(pa.table({"id": column, "prompt": ["x", "y"]}), tmp_path / "rows.parquet")
        source = parquet.Parquet(tmp_path / "rows.parquet", {})
        (first, _), (second, behind) = source.records(source.first)
        assert (source.fields(first)["prompt"], behind) == ("x", 2)
        with pytest.raises(RequestError, match=told):
            source.fields(second)


def test_cells_hold_values_for_components_as_json(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(
        'prompt,extra,predicted_tokens\nx,"{""some-plugin"": {""tier"": '
        '1}}",12\nx,,\nx,3,\nx,,5.5\n'
    )
    source = Csv(tmp_path / "rows.csv", {})
    records = [source.convert(source.fields(record)) for record, _ in source.records(source.first)]
    reader = RowReader({}, 0)
    assert reader.read(1, records[0]).fields == {
        "extra": {"some-plugin": {"tier": 1}},
        "predicted_tokens": 12,
    }
    assert reader.read(2, records[1]).fields == {}
    for record, told in [
        (records[2], "extra must be an object"),
        (records[3], "predicted_tokens must be an integer from 0 to"),
    ]:
        with pytest.raises(RequestError, match=f"^{told}"):
            reader.read(3, record)


def test_rows_without_a_seed_get_one_of_the_job_and_their_number() -> None:
    def seed(job: int, number: int, **sampling: Any) -> int | None:
        return RowReader({}, job).read(number, {"prompt": "x", "sampling": sampling}).params.seed

    assert len({seed(job, number) for job in range(10) for number in range(1, 101)}) == 1000
    assert seed(3, 4) == seed(3, 4) == seed(3, 4, temperature=0.5)
    assert seed(3, 4, seed=7) == 7
