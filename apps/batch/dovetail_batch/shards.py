"""`ShardStore`: the answers of a job on disk, in shards of a fixed number of rows. It makes sure
that each row is answered exactly once.

    part-000007.jsonl        the answers of shard 7, complete, in row order
    part-000008.jsonl.open   the answers of shard 8 so far, in order of arrival, a JSON object per line

Answers are appended to an open shard as they arrive, so that nothing is computed twice or held in
memory. A complete shard is written to a temporary file and renamed, then the open file is removed.
A kill leaves at most a truncated last line, which is cut off.

The folder is locked (`locked`), and its `Manifest` records the input and the settings of the
answers, so that a job resumes only with the same ones. The errors here end a running job, which the
same command resumes; invalid settings are `ConfigError`s.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dovetail.api.whole_files import BESIDE, write_whole
from dovetail.errors import ConfigError, EngineDeadError, shown
from dovetail.serving import OutputError
from dovetail_batch.answers import KEYS, Answer, Writer

GO_ON = "the same command goes on with the job"
LOCK = ".lock"
MANIFEST = "manifest.json"
VERSION = 1
ANEW = (
    "Give back what it was, name another output folder, or start anew with --anew, which "
    "deletes the answers that are there"
)
_LISTED = 5
OPEN = ".open"
_OURS = re.compile(
    rf"part-[0-9]{{6,}}\.[a-z]+({re.escape(OPEN)}|{re.escape(BESIDE)})?|{re.escape(MANIFEST)}({re.escape(BESIDE)})?"
)


class BatchEngineFailed(EngineDeadError):
    """An engine failed before the end of the job."""


class UnwritableOutput(OutputError):
    """The output folder became unwritable."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an `OSError`, such as a full disk, to `UnwritableOutput`."""
    try:
        yield
    except OSError as error:
        raise UnwritableOutput(
            f"{path}: can't be written: {error.strerror or error}; once it can be, {GO_ON}"
        ) from None


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Create the folder if needed and lock it; the kernel releases the lock however the process
    ends.

    Raises `ConfigError` if another process holds the lock or the folder isn't writable.
    """
    import fcntl

    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / LOCK).open("w")
    except (OSError, ValueError) as error:  # ValueError: a NUL in its name
        raise ConfigError(
            f"output: {directory}: can't be written to: {getattr(error, 'strerror', None) or error}"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"output: {directory}: another run of a job is writing to it: wait until it ends, "
                f"or end it"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"output: {directory}: can't be locked: {error.strerror or error}; a local disk can"
            ) from None
        yield


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of `manifest.json`."""

    sha256: str  # of the input
    settings: Mapping[str, Any]  # `Plan.settings`
    rows: int
    starts: tuple[int, ...]  # positions in the input at which shards begin

    def write(self, directory: Path) -> None:
        """Raises `UnwritableOutput`."""
        text = json.dumps({"version": VERSION, **asdict(self)})
        with writing(directory / MANIFEST):
            write_whole(directory / MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """Return the folder's manifest, or None if there is none. Raises `ConfigError` if it is
        unreadable."""
        path = directory / MANIFEST
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values.pop("version") != VERSION:
                raise ValueError("another version of Dovetail wrote it")
            found = cls(
                values["sha256"], values["settings"], values["rows"], tuple(values["starts"])
            )
            if not all(
                type(number) is int for number in (found.rows, *found.starts)
            ) or not isinstance(found.settings, dict):
                raise ValueError("it isn't a manifest")
            return found
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path}: can't be read: {error}; {ANEW}") from None

    def check_settings(self, directory: Path, settings: Mapping[str, Any]) -> None:
        """Raise `ConfigError` with the differences unless the settings are the same."""
        differences = list(_differences("", self.settings, json.loads(json.dumps(settings))))
        if differences:
            more = (
                [f"… and {len(differences) - _LISTED} more"] if len(differences) > _LISTED else []
            )
            told = "\n  ".join([*differences[:_LISTED], *more])
            raise ConfigError(
                f"output: {directory}: its answers are of other settings than these:\n  "
                f"{told}\n{ANEW}"
            )

    def check_input(self, directory: Path, sha256: str) -> None:
        """Raise `ConfigError` unless the input has this hash."""
        if sha256 != self.sha256:
            told = (
                f"its answers are of an input with other content: its SHA-256 was "
                f"{self.sha256[:12]}…, now it is {sha256[:12]}…"
            )
            raise ConfigError(f"output: {directory}: {told}\n{ANEW}")


def _differences(key: str, was: Any, now: Any) -> Iterator[str]:
    if isinstance(was, dict) and isinstance(now, dict):
        for name in {**was, **now}:
            yield from _differences(f"{key}.{name}" if key else name, was.get(name), now.get(name))
    elif was != now:
        yield f"{key}: was {shown(was)}, now it is {shown(now)}"


class ShardStore:
    """The folder of a job's answers, which the caller has locked."""

    def __init__(self, directory: Path, manifest: Manifest, writer: Writer, suffix: str) -> None:
        """Resume from the folder's files. `suffix` ends the names of complete shards. Raises
        `UnwritableOutput`."""
        self._directory = directory
        self._writer = writer
        self._suffix = suffix
        self._rows, self._shard_rows = manifest.rows, int(manifest.settings["shard_rows"])
        with writing(directory):
            sizes = {
                entry.name: entry.stat().st_size
                for entry in os.scandir(directory)
                if _OURS.fullmatch(entry.name)
            }
            # The numbers of the unanswered rows, by shard; an empty file has lost its answers.
            self._left: dict[int, range | set[int]] = {
                shard: self._numbers(shard)
                for shard in range(len(manifest.starts))
                if not sizes.get(self._path(shard).name)
            }
            for name in (name for name in sizes if name.endswith(BESIDE)):
                (directory / name).unlink()
            for name in (name for name in sizes if name.endswith(OPEN)):
                self._recover(directory / name)

    @property
    def answered(self) -> int:
        """The number of answered rows."""
        return self._rows - sum(map(len, self._left.values()))

    def left(self) -> dict[int, Collection[int]]:
        """Return the numbers of the rows that are unanswered now, by shard, without complete
        shards."""
        return {
            shard: left if isinstance(left, range) else frozenset(left)
            for shard, left in self._left.items()
        }

    def add(self, answers: Iterable[Answer]) -> list[Answer]:
        """Write answers of unanswered rows, and return them; others are ignored. Raises
        `UnwritableOutput`."""
        new: dict[int, dict[int, Answer]] = defaultdict(dict)  # by shard and row
        for answer in answers:
            shard = (answer["row"] - 1) // self._shard_rows
            if answer["row"] in self._left.get(shard, ()):
                new[shard][answer["row"]] = answer
        for shard, by_row in new.items():
            path = self._open_path(shard)
            with writing(path), path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{json.dumps(answer)}\n" for answer in by_row.values()))
            self._mark(shard, by_row)
        return [answer for by_row in new.values() for answer in by_row.values()]

    def _mark(self, shard: int, rows: Collection[int]) -> None:
        """Note that these rows are in the open shard's file, which is finished with the last
        one."""
        left = self._left[shard]
        if isinstance(left, range):
            left = self._left[shard] = set(left)
        left.difference_update(rows)
        if not left:
            self._finish(shard)

    def _finish(self, shard: int) -> None:
        path = self._path(shard)
        opened = self._open_path(shard)
        rows = self._numbers(shard)
        with writing(path):
            answers = sorted(_answers_in(opened, rows), key=lambda answer: int(answer["row"]))
            if [answer["row"] for answer in answers] != list(rows):
                raise UnwritableOutput(
                    f"{opened}: another program has changed it: remove it, and {GO_ON}"
                )
            write_whole(path, lambda beside: self._writer(answers, beside))
            opened.unlink()
        del self._left[shard]

    def _recover(self, opened: Path) -> None:
        """Resume an open shard of an earlier run, or remove its file if the shard is complete."""
        shard = int(opened.name[len("part-") :].partition(".")[0])
        if shard in self._left:
            self._mark(
                shard, [answer["row"] for answer in _answers_in(opened, self._numbers(shard))]
            )
        else:
            opened.unlink()

    def _numbers(self, shard: int) -> range:
        return range(
            shard * self._shard_rows + 1, min((shard + 1) * self._shard_rows, self._rows) + 1
        )

    def _path(self, shard: int) -> Path:
        return self._directory / f"part-{shard:06d}.{self._suffix}"

    def _open_path(self, shard: int) -> Path:
        path = self._path(shard)
        return path.with_name(path.name + OPEN)


def _answers_in(opened: Path, rows: Collection[int]) -> list[Answer]:
    """Return the answers in the file of an open shard with these rows. Truncates the file at the
    first line that isn't one of them."""
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
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ):  # garbage after a power failure
            break
        whole += len(line)
    if whole < len(data):
        os.truncate(opened, whole)
    return answers


def begin_anew(directory: Path) -> None:
    """Delete a job's files, and nothing else, from a folder. Raises `UnwritableOutput`."""
    with writing(directory):
        for entry in os.scandir(directory):
            if _OURS.fullmatch(entry.name):
                os.unlink(entry.path)


def is_ours(directory: Path, path: Path) -> bool:
    """Return True if a file in a job's folder has a name that the job uses, so that it would be
    overwritten or deleted."""
    return _OURS.fullmatch(path.name) is not None and path.parent.resolve() == directory.resolve()


def stray_answers(directory: Path) -> str | None:
    """Return the name of a file of answers in a folder, or None."""
    return next(
        (
            entry.name
            for entry in os.scandir(directory)
            if entry.name.startswith("part-") and _OURS.fullmatch(entry.name)
        ),
        None,
    )
