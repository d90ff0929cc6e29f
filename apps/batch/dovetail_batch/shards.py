"""`ShardStore`: the answers of a job on disk, in shards of a fixed number of rows. It is what makes each row be answered exactly once.

    part-000007.jsonl        the answers of shard 7, whole, in the order of its rows
    part-000008.jsonl.open   those that have come of shard 8, in the order in which they came, a JSON object a line

An open shard's answers are appended as they come, so that what an engine has computed is computed once, and are no burden on memory. When the last
has come, the whole is written beside, renamed, and the open file removed. Whoever is killed leaves at most a last line cut short, which is cut off.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dovetail.whole_files import BESIDE, write_whole
from dovetail_batch.answers import KEYS, Answer
from dovetail_batch.errors import GO_ON, UnwritableOutput
from dovetail_batch.files import writing
from dovetail_batch.manifest import NAME as MANIFEST
from dovetail_batch.manifest import Manifest
from dovetail_batch.writers import Writer

OPEN = ".open"
_OURS = re.compile(rf"part-[0-9]{{6,}}\.[a-z]+({re.escape(OPEN)}|{re.escape(BESIDE)})?|{re.escape(MANIFEST)}({re.escape(BESIDE)})?")


class ShardStore:
    """The folder of a job's answers, which the caller has locked."""

    def __init__(self, directory: Path, manifest: Manifest, writer: Writer, suffix: str) -> None:
        """Look at what is there. `suffix` ends the names of whole shards. Raises `UnwritableOutput`."""
        self._directory, self._writer, self._suffix = directory, writer, suffix
        self._rows, self._shard_rows, self._shards = manifest.rows, int(manifest.settings["shard_rows"]), len(manifest.starts)
        self._left: dict[int, set[int]] = {}  # rows without an answer, of the shards that are open
        with writing(directory):
            sizes = {entry.name: entry.stat().st_size for entry in os.scandir(directory) if _OURS.fullmatch(entry.name)}
            names = sizes.keys()
            self._whole = bytearray(sizes.get(self._path(shard).name, 0) > 0 for shard in range(self._shards))  # an empty one has lost its answers
            for name in (name for name in names if name.endswith(BESIDE)):
                (directory / name).unlink()
            for name in (name for name in names if name.endswith(OPEN)):
                self._recover(directory / name)

    @property
    def answered(self) -> int:
        """The number of rows that have an answer."""
        begun = sum(len(self._numbers(shard)) - len(left) for shard, left in self._left.items())
        return begun + sum(len(self._numbers(shard)) for shard in range(self._shards) if self._whole[shard])

    def left(self, shard: int) -> frozenset[int]:
        """Return the numbers of a shard's rows that have no answer. It is open from now on, unless it is whole."""
        if self._whole[shard]:
            return frozenset()
        return frozenset(self._left.setdefault(shard, set(self._numbers(shard))))

    def lacks(self, row: int) -> bool:
        """Return True if a row has no answer. Its shard is open from now on, unless it is whole."""
        shard = (row - 1) // self._shard_rows
        return not self._whole[shard] and row in self._left.setdefault(shard, set(self._numbers(shard)))

    def snapshot(self) -> LeftNow:
        """Return what is left of each shard now, as plain values."""
        return LeftNow(self._rows, self._shard_rows, bytes(self._whole), {shard: frozenset(left) for shard, left in self._left.items()})

    def add(self, answers: Iterable[Answer]) -> None:
        """Take answers of rows that have none. Raises `UnwritableOutput`."""
        of_shards: dict[int, list[Answer]] = defaultdict(list)
        for answer in answers:
            of_shards[(answer["row"] - 1) // self._shard_rows].append(answer)
        for shard, some in of_shards.items():
            left = self._left[shard]
            assert left.issuperset(answer["row"] for answer in some), "a row is answered once"
            path = self._open_path(shard)
            with writing(path), path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{json.dumps(answer)}\n" for answer in some))
            left.difference_update(answer["row"] for answer in some)
            if not left:
                self._finish(shard)

    def _finish(self, shard: int) -> None:
        path, opened = self._path(shard), self._open_path(shard)
        with writing(path):
            answers = _answers_in(opened, self._numbers(shard))
            if {answer["row"] for answer in answers} != set(self._numbers(shard)) or len(answers) > len(self._numbers(shard)):
                raise UnwritableOutput(f"{opened}: somebody else has changed it: remove it, and {GO_ON}")
            write_whole(path, lambda beside: self._writer(sorted(answers, key=lambda answer: int(answer["row"])), beside))
            opened.unlink()
        self._whole[shard] = True
        del self._left[shard]

    def _recover(self, opened: Path) -> None:
        """Go on with an open shard that an earlier run has left, or remove it if it was whole before that run ended."""
        shard = int(opened.name[len("part-") :].partition(".")[0])
        if self._whole[shard]:
            opened.unlink()
            return
        self._left[shard] = set(self._numbers(shard)) - {answer["row"] for answer in _answers_in(opened, self._numbers(shard))}
        if not self._left[shard]:
            self._finish(shard)

    def _numbers(self, shard: int) -> range:
        return numbers_of(shard, self._shard_rows, self._rows)

    def _path(self, shard: int) -> Path:
        return self._directory / f"part-{shard:06d}.{self._suffix}"

    def _open_path(self, shard: int) -> Path:
        path = self._path(shard)
        return path.with_name(path.name + OPEN)


def numbers_of(shard: int, shard_rows: int, rows: int) -> range:
    """Return the numbers of a shard's rows."""
    return range(shard * shard_rows + 1, min((shard + 1) * shard_rows, rows) + 1)


@dataclass(frozen=True, slots=True)
class LeftNow:
    """The rows without an answer at one moment, in a form that other processes can be sent."""

    rows: int  # of the job
    shard_rows: int
    whole: bytes  # a byte each shard: 1 if all its rows have an answer
    begun: Mapping[int, frozenset[int]]  # by shard that has some answers: the numbers of the others

    def __call__(self, shard: int) -> Collection[int]:
        """Return the numbers of a shard's rows that had no answer."""
        return () if self.whole[shard] else self.begun.get(shard, numbers_of(shard, self.shard_rows, self.rows))


def _answers_in(opened: Path, rows: Collection[int]) -> list[Answer]:
    """Return the answers in the file of an open shard with these rows. It is truncated at the first line that isn't one of them."""
    data = opened.read_bytes()
    answers: list[Answer] = []
    left = set(rows)
    whole = 0
    for line in data.splitlines(keepends=True):
        try:
            if not line.endswith(b"\n"):
                break
            answer: Answer = json.loads(line)
            left.remove(answer["row"])
            if not answer.keys() >= KEYS:
                break
            answers.append(answer)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # blocks of a disk that lost its power
            break
        whole += len(line)
    if whole < len(data):
        os.truncate(opened, whole)
    return answers


def begin_anew(directory: Path) -> None:
    """Remove the files of a job from a folder, and nothing else. Raises `UnwritableOutput`."""
    with writing(directory):
        for entry in os.scandir(directory):
            if _OURS.fullmatch(entry.name):
                os.unlink(entry.path)


def is_ours(directory: Path, path: Path) -> bool:
    """True if a file in a job's folder has a name that the job gives, so that it would write over or remove it."""
    return _OURS.fullmatch(path.name) is not None and path.parent.resolve() == directory.resolve()


def stray_answers(directory: Path) -> str | None:
    """Return the name of a file with answers, if a folder has one."""
    return next((entry.name for entry in os.scandir(directory) if entry.name.startswith("part-") and _OURS.fullmatch(entry.name)), None)
