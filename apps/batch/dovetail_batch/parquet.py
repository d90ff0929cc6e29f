"""Parquet: a `Source` that reads it, and a function that writes answers. Needs pyarrow (extra
`batch`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError, MissingExtraError, RequestError
from dovetail_batch.sources import Fields, Source, names_of_columns, with_json_parsed

ROWS_AT_ONCE = 256
_BUFFER_BYTES = 2**20
_NO_PARQUET = "not a Parquet file"


def check_installed() -> None:
    """Raise `MissingExtraError` without pyarrow."""
    if find_spec("pyarrow") is None:
        raise MissingExtraError.naming("batch", "Parquet needs pyarrow")


class Parquet(Source):
    """A Parquet file. Positions are row numbers. Cells of `JSON_CELLS` are lists and structs, or
    JSON text."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        super().__init__(path, columns)
        with self._file() as file:
            self._groups = [
                file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)
            ]
            self._names = names_of_columns(path, file.schema_arrow.names, columns)

    def records(self, position: int) -> Iterator[tuple[Fields | RequestError, int]]:
        import pyarrow as pa

        group = 0
        begin = 0
        while group < len(self._groups) and begin + self._groups[group] <= position:
            begin += self._groups[group]
            group += 1
        with self._file() as file:
            try:
                rest = file.iter_batches(
                    ROWS_AT_ONCE,
                    row_groups=range(group, len(self._groups)),
                    columns=list(self._names.values()),
                )
                for batch in rest:
                    passed = min(max(0, position - begin), batch.num_rows)
                    for row in _rows(batch.slice(passed)):
                        yield row, begin + passed + 1
                        passed += 1
                    begin += batch.num_rows
            except (pa.ArrowException, OSError) as error:
                raise ConfigError(
                    f"input: {self.path}: can't be read from row {begin + 1} on: {error}"
                ) from None

    def fields(self, record: Fields | RequestError) -> Fields:
        if isinstance(record, RequestError):
            raise record
        return {
            ours: _without_nulls(record[theirs])
            for ours, theirs in self._names.items()
            if record[theirs] is not None
        }

    def convert(self, fields: Fields) -> Fields:
        return with_json_parsed(fields)

    def _file(self) -> Any:
        check_installed()
        import pyarrow as pa
        from pyarrow.parquet import ParquetFile

        self.opened().close()
        try:
            # otherwise it reads whole columns of a row group
            return ParquetFile(self.path, buffer_size=_BUFFER_BYTES)
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(f"input: {self.path}: {_NO_PARQUET}: {error}") from None


def _rows(batch: Any) -> list[Fields | RequestError]:
    """Return the rows of an Arrow batch; an error for each row that Python's types can't hold (text
    that isn't UTF-8, nanoseconds, years beyond 9999)."""
    try:
        return batch.to_pylist()  # type: ignore[no-any-return]
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1:
            return [RequestError(f"not readable: {error}")]
        return [row for at in range(batch.num_rows) for row in _rows(batch.slice(at, 1))]


def _without_nulls(value: Any) -> Any:
    """Remove null fields of structs: in Parquet every struct of a column has all fields."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def write_parquet(answers: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write answers (see `answers`) as one file. Log-probabilities and stop reasons, which may be
    numbers, are JSON text."""
    import pyarrow as pa
    from pyarrow.parquet import write_table

    output = pa.struct(
        [
            ("text", pa.string()),
            ("token_ids", pa.list_(pa.int32())),
            ("finish_reason", pa.string()),
            ("stop_reason", pa.string()),
            ("cumulative_logprob", pa.float64()),
            ("logprobs", pa.string()),
        ]
    )
    schema = pa.schema(
        [
            ("id", pa.string()),
            ("row", pa.int64()),
            ("error", pa.string()),
            ("prompt_tokens", pa.int32()),
            ("outputs", pa.list_(output)),
            ("prompt_logprobs", pa.string()),
            *(
                [("embedding", pa.list_(pa.float32()))]
                if any("embedding" in answer for answer in answers)
                else []
            ),
        ]
    )
    rows = [
        {
            **_with_json(answer, "prompt_logprobs"),
            **{name: _unicode(answer[name]) for name in ("id", "error")},
            "outputs": [
                _with_json(sample, "stop_reason", "logprobs") for sample in answer["outputs"]
            ],
        }
        for answer in answers
    ]
    write_table(pa.Table.from_pylist(rows, schema=schema), path)


def _unicode(text: str | None) -> str | None:
    """Escape lone surrogates as JSON does: Parquet can't hold them."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()


def _with_json(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Serialize the values of some names, where present, as JSON."""
    texts = {
        name: json.dumps(values[name], ensure_ascii=False)
        for name in names
        if values.get(name) is not None
    }
    return {**values, **texts}
