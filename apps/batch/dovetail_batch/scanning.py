"""First pass over a job's input: counts the rows, finds where shards begin, and rejects duplicate ids."""

from __future__ import annotations

import hashlib
from array import array
from itertools import islice

import numpy as np
import xxhash

from dovetail.checks import shown
from dovetail.errors import ConfigError, RequestError
from dovetail_batch.rows import RowReader, id_of
from dovetail_batch.sources import Source, unreadable

TRIED = 100  # rows: if the first so many, or all, are invalid, the job is rejected


def digest(source: Source) -> str:
    """Return the SHA-256 of a file in hexadecimal. Raises `ConfigError`."""
    with source.opened() as file:
        try:
            return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise unreadable(source.path, error) from None


def scan(source: Source, reader: RowReader, shard_rows: int) -> tuple[int, tuple[int, ...]]:
    """Return the number of rows and the positions at which shards begin. Holds 8 bytes per row, a hash of its id.

    Raises `ConfigError` if there are no rows, if the first ones are all invalid, or if an id occurs twice: its answers would be ambiguous.
    """
    _check_first_rows(source, reader)
    starts: list[int] = []
    hashes: array[int] = array("Q")
    position, rows = source.first, 0
    for record, end in source.records(source.first):
        if rows % shard_rows == 0:
            starts.append(position)
        rows, position = rows + 1, end
        if (name := _id(source, record, rows)) is not None:
            hashes.append(_hash(name))
    ordered = np.sort(np.frombuffer(hashes, np.uint64))
    if len(twice := ordered[1:][ordered[1:] == ordered[:-1]]):
        _reject_duplicate(source, set(twice.tolist()))
    return rows, tuple(starts)


def _check_first_rows(source: Source, reader: RowReader) -> None:
    """Raise `ConfigError` if no row would be computed: then the format or the names of columns are wrong rather than the rows."""
    first: RequestError | None = None
    number = 0
    for number, (record, _) in enumerate(islice(source.records(source.first), TRIED), start=1):
        try:
            reader.read(number, source.convert(source.fields(record)))
            return
        except RequestError as error:
            first = first or error
    if first is None:
        raise ConfigError(f"input: {source.path}: no rows in it")
    which = "its only row is wrong" if number == 1 else f"its first {number} rows are all wrong, row 1 for instance"
    raise ConfigError(f"input: {source.path}: {which}: {first}")


def _id(source: Source, record: object, number: int) -> str | None:
    """Return the id of a row; None if it is unreadable: such a row is reported by its number."""
    try:
        return id_of(source.fields(record), number, source.id_key)
    except RequestError:
        return None


def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"))


def _reject_duplicate(source: Source, hashes: set[int]) -> None:
    """Raise `ConfigError` for the first id that occurs twice. Different ids may have the same hash."""
    seen: dict[str, int] = {}
    for number, (record, _) in enumerate(source.records(source.first), start=1):
        name = _id(source, record, number)
        if name is None or _hash(name) not in hashes:
            continue
        if name in seen:
            raise ConfigError(f"input: {source.path}: rows {seen[name]} and {number} have the same id, {shown(name)}")
        seen[name] = number
