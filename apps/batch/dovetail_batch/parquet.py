"""Parquet: a `Source` that reads it and a function that writes answers. It needs pyarrow, which comes with the extra `batch`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError, MissingExtraError, RequestError
from dovetail_batch.sources import Fields, Source, names_of_columns, with_json_read

ROWS_AT_ONCE = 256
_BUFFER_BYTES = 2**20
_NO_PARQUET = "is no Parquet file"


def check_installed() -> None:
    """Raise `MissingExtraError` without pyarrow."""
    if find_spec("pyarrow") is None:
        raise MissingExtraError.naming("batch", "Parquet needs pyarrow")


class Parquet(Source):
    """A Parquet file. A position is a number of rows. Columns of `messages`, `token_ids` and `sampling` are lists and structs, or JSON texts."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        super().__init__(path, columns)
        with self._file() as file:
            self._groups = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
            self._names = names_of_columns(path, file.schema_arrow.names, columns)

    @property
    def first(self) -> int:
        return 0

    def records(self, position: int) -> Iterator[tuple[Fields | RequestError, int]]:
        import pyarrow as pa

        group, begin = 0, 0
        while group < len(self._groups) and begin + self._groups[group] <= position:
            begin += self._groups[group]
            group += 1
        with self._file() as file:
            try:
                rest = file.iter_batches(ROWS_AT_ONCE, row_groups=range(group, len(self._groups)), columns=list(self._names.values()))
                for batch in rest:
                    passed = min(max(0, position - begin), batch.num_rows)
                    for row in _rows(batch.slice(passed)):
                        yield row, begin + passed + 1
                        passed += 1
                    begin += batch.num_rows
            except (pa.ArrowException, OSError) as error:
                raise ConfigError(f"input: {self.path}: can't be read from row {begin + 1} on: {error}") from None

    def fields(self, record: Fields | RequestError) -> Fields:
        if isinstance(record, RequestError):
            raise record
        return {ours: _without_nulls(record[theirs]) for ours, theirs in self._names.items() if record[theirs] is not None}

    def convert(self, fields: Fields) -> Fields:
        return with_json_read(fields)

    def _file(self) -> Any:
        check_installed()
        import pyarrow as pa
        from pyarrow.parquet import ParquetFile

        self.opened().close()
        try:
            return ParquetFile(self.path, buffer_size=_BUFFER_BYTES)  # or it would read whole columns of a row group
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(f"input: {self.path}: {_NO_PARQUET}: {error}") from None


def _rows(batch: Any) -> list[Fields | RequestError]:
    """Return the rows of a batch of Arrow's; of one that Python's types can't hold (a text that isn't UTF-8, a time in nanoseconds, a date beyond the
    year 9999), what is wrong with it."""
    try:
        return batch.to_pylist()  # type: ignore[no-any-return]
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1:
            return [RequestError(f"not readable: {error}")]
        return [row for at in range(batch.num_rows) for row in _rows(batch.slice(at, 1))]


def _without_nulls(value: Any) -> Any:
    """Return a value without the fields of its structs that are null: in Parquet every struct of a column has all fields."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def write_parquet(answers: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write answers (see `answers`) as one file. Log-probabilities are JSON texts, and so is a stop reason, which may be a number."""
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
        ]
    )
    rows = [
        {
            **_with_texts(answer, "prompt_logprobs"),
            **{name: _unicode(answer[name]) for name in ("id", "error")},
            "outputs": [_with_texts(sample, "stop_reason", "logprobs") for sample in answer["outputs"]],
        }
        for answer in answers
    ]
    write_table(pa.Table.from_pylist(rows, schema=schema), path)


def _unicode(text: str | None) -> str | None:
    """Return a text of a row's own with halves of surrogate pairs as escapes, as in JSON: Parquet's texts can't hold them."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()


def _with_texts(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return values with those of some names, where there are any, as JSON."""
    texts = {name: json.dumps(values[name], ensure_ascii=False) for name in names if values.get(name) is not None}
    return {**values, **texts}
