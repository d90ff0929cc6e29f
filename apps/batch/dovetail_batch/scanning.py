"""A look through a job's input before the first row is computed: how many rows, where shards begin, that no id is there twice."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from itertools import islice

import numpy as np
import xxhash

from dovetail.checks import shown
from dovetail.errors import ConfigError, RequestError
from dovetail_batch.rows import RowReader, id_of
from dovetail_batch.sources import Source, unreadable

TRIED = 100  # rows: if that many, or all, are wrong from the first on, the job is
_CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Scan:
    """The outcome. Row `shard_rows` * k is at position `starts[k]`."""

    rows: int
    starts: tuple[int, ...]


def digest(source: Source) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits. Raises `ConfigError`."""
    hashed = hashlib.sha256()
    with source.opened() as file:
        try:
            while chunk := file.read(_CHUNK_BYTES):
                hashed.update(chunk)
        except OSError as error:
            raise unreadable(source.path, error) from None
    return hashed.hexdigest()


def scan(source: Source, reader: RowReader, shard_rows: int) -> Scan:
    """Read the input once. Of each row 8 bytes are held, a hash of its id.

    Raises `ConfigError` if there are no rows, if the first ones are all wrong, or if an id is there twice: its answers couldn't be told apart.
    """
    _check_first_rows(source, reader)
    starts: list[int] = []
    hashes: array[int] = array("Q")
    position, rows = source.first, 0
    for record, behind in source.records(source.first):
        if rows % shard_rows == 0:
            starts.append(position)
        rows, position = rows + 1, behind
        if (name := _id(source, record, rows)) is not None:
            hashes.append(_hash(name))
    ordered = np.sort(np.frombuffer(hashes, np.uint64))
    if len(twice := ordered[1:][ordered[1:] == ordered[:-1]]):
        _refuse_twins(source, set(twice.tolist()))
    return Scan(rows, tuple(starts))


def _check_first_rows(source: Source, reader: RowReader) -> None:
    """Refuse an input of which no row would be computed: a wrong format or wrong names, rather than wrong rows."""
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
    """Return the id of a row; None of one that can't be read, which will be told with its number."""
    try:
        return id_of(source.fields(record), number, source.id_key)
    except RequestError:
        return None


def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"))


def _refuse_twins(source: Source, hashes: set[int]) -> None:
    """Raise `ConfigError` for the first id that is there twice; by chance, ids of the same hash may differ."""
    seen: dict[str, int] = {}
    for number, (record, _) in enumerate(source.records(source.first), start=1):
        name = _id(source, record, number)
        if name is None or _hash(name) not in hashes:
            continue
        if name in seen:
            raise ConfigError(f"input: {source.path}: rows {seen[name]} and {number} have the same id, {shown(name)}")
        seen[name] = number
