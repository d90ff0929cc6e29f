"""`ShardStore`: whoever is killed at any file operation, and has any part of the last line on disk,
loses and doubles nothing."""

from __future__ import annotations

import errno
import json
import os
import random
import sys
from pathlib import Path

import pytest

from dovetail_batch.answers import Answer, failure_of, writer_of
from dovetail_batch.shards import Manifest, ShardStore, UnwritableOutput

ROWS, SHARD_ROWS = 8, 3
MANIFEST = Manifest("", {"shard_rows": SHARD_ROWS}, ROWS, (0, 3, 6))
OPERATIONS = ("open", "os.rename", "os.remove", "os.truncate", "os.scandir")


def store_in(directory: Path) -> ShardStore:
    return ShardStore(directory, MANIFEST, writer_of("jsonl", "demo"), "jsonl")


def answer(number: int) -> Answer:
    return failure_of(number, f"q{number}", "none")


def left_in(store: ShardStore) -> list[int]:
    return [number for numbers in store.left().values() for number in sorted(numbers)]


def complete(store: ShardStore, seed: int, told: int | None = None) -> None:
    """Answer the remaining rows in random order, some at once. Each row that is stored permanently
    is written to the file descriptor `told`."""
    rng, left = random.Random(seed), left_in(store)
    rng.shuffle(left)
    while left:
        some = [left.pop() for _ in range(min(len(left), rng.randint(1, 3)))]
        store.add([answer(number) for number in some])
        if told is not None:
            os.write(told, bytes(some))


def answered(directory: Path) -> list[int]:
    return [
        json.loads(line)["row"]
        for path in sorted(directory.glob("part-*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def killed_at(operation: int, directory: Path, seed: int) -> tuple[bool, set[int]]:
    """Work in a process that ends amidst its n-th file operation. Return whether it came to that,
    and the rows that it had kept before."""
    receive, send = os.pipe()
    if (child := os.fork()) == 0:
        count = 0

        def hook(event: str, args: tuple[object, ...]) -> None:
            nonlocal count
            if event in OPERATIONS and str(args[0]).startswith(str(directory)):
                count += 1
                if count == operation:
                    os._exit(9)

        try:
            sys.addaudithook(hook)
            complete(store_in(directory), seed, send)
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        kept = set(pipe.read())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, kept


@pytest.mark.slow("takes more than the budget")
def test_a_job_killed_at_any_file_operation_resumes_with_the_rest(tmp_path: Path) -> None:
    operation, died = 0, True
    while died:
        operation += 1
        directory = tmp_path / str(operation)
        directory.mkdir()
        died, kept = killed_at(operation, directory, seed=operation)
        store = store_in(directory)
        left = left_in(store)
        assert not kept & set(left), "what was kept is computed once"
        assert store.answered == ROWS - len(left)
        complete(store, seed=0)
        assert answered(directory) == list(range(1, ROWS + 1))
        assert {path.suffix for path in directory.iterdir()} == {".jsonl"}, (
            "nothing else stays behind"
        )
    assert operation > 20, "it was killed somewhere"


def test_a_last_line_cut_anywhere_is_computed_again(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.add([answer(2)])
    opened = tmp_path / "part-000000.jsonl.open"
    first = opened.read_bytes()
    store.add([answer(1)])
    both = opened.read_bytes()
    for cut in range(len(first), len(both)):
        opened.write_bytes(both[:cut])
        assert store_in(tmp_path).left()[0] == {1, 3}
        assert opened.read_bytes() == first
    opened.write_bytes(first + b"\0" * 40 + b"\n" + both)  # a disk that lost its power
    assert store_in(tmp_path).left()[0] == {1, 3}


@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b"[]",
        b"5",
        b'{"row": 1}',
        b'{"row": []}',
        json.dumps(answer(2)).encode(),
        json.dumps(answer(9)).encode(),
        b"[" * 10**5,
    ],
)
def test_a_line_that_is_no_answer_of_its_shard_and_those_behind_it_are_computed_again(
    tmp_path: Path, line: bytes
) -> None:
    store = store_in(tmp_path)
    store.add([answer(2)])
    opened = tmp_path / "part-000000.jsonl.open"
    first = opened.read_bytes()
    opened.write_bytes(first + line + b"\n" + json.dumps(answer(1)).encode() + b"\n")
    again = store_in(tmp_path)
    assert again.left()[0] == {1, 3}
    complete(again, seed=0)
    assert answered(tmp_path) == list(range(1, ROWS + 1))


def test_a_shard_whose_file_is_empty_is_computed_again(tmp_path: Path) -> None:
    complete(store_in(tmp_path), seed=0)
    (tmp_path / "part-000001.jsonl").write_bytes(b"")
    again = store_in(tmp_path)
    assert left_in(again) == [4, 5, 6]
    complete(again, seed=0)
    assert answered(tmp_path) == list(range(1, ROWS + 1))


def test_a_full_disk_ends_the_job_with_a_sentence_and_it_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(
            UnwritableOutput,
            match=r"part-00000\d\.jsonl: can't be written: No space left on device; once it can "
            r"be, the same command",
        ):
            complete(store_in(tmp_path), seed=1)
    assert not list(tmp_path.glob("*.tmp"))
    complete(store_in(tmp_path), seed=2)
    assert answered(tmp_path) == list(range(1, ROWS + 1))
