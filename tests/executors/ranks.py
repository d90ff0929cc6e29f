"""Engines of several ranks for tests: which processes are theirs, and what an engine that is gone
has left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dovetail import LLMEngine, SamplingParams
from dovetail.testing.suites.footprint import Footprint, child_processes, temporary_folder

LIMIT_S = 60
SETTINGS: dict[str, Any] = {
    "model": "demo",
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 8,
    "generation_config": "none",
}
LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, detokenize=False)


def engine(size: int = 2, **options: Any) -> LLMEngine:
    return LLMEngine.from_config(
        {**SETTINGS, "executor": {"name": "tensor", "size": size, "device": "cpu", **options}}
    )


def processes_of_ranks(among: list[int] | None = None) -> list[int]:
    """The processes of ranks that this process has started, or those of `among` that still are."""
    pids = child_processes() if among is None else among
    return sorted(pid for pid in pids if b"dovetail_executors.rank_process" in _command(pid))


def children_of(pid: int) -> list[int]:
    """The child processes of any process."""
    children: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has just ended
            children += map(int, tasks.read_text().split())
    return children


def wait_until(true: Callable[[], Any], what: str) -> Any:
    until = time.monotonic() + LIMIT_S
    while not (value := true()):
        assert time.monotonic() < until, f"waited {LIMIT_S} s in vain until {what}"
        time.sleep(0.005)
    return value


def generate(one: LLMEngine, prompts: list[list[int]], params: SamplingParams = LONG) -> list[Any]:
    """The final outputs, in order of the prompts."""
    for index, prompt in enumerate(prompts):
        one.add_request(str(index), prompt, params)
    outputs: dict[str, Any] = {}
    while one.has_unfinished_requests():
        outputs |= {output.request_id: output for output in one.step()}
    return [outputs[str(index)] for index in range(len(prompts))]


@contextmanager
def nothing_left() -> Iterator[None]:
    """Afterwards there are no threads, processes, open files, shared memory or temporary files more
    than before."""
    before, shared = Footprint.now(), _shared_memory()
    with temporary_folder() as folder:
        yield
        left = [str(path) for path in folder.iterdir()]
    left += before.left_behind()
    assert not left, left
    assert _shared_memory() <= shared


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _shared_memory() -> set[str]:
    """Return the names in /dev/shm created by processes of this user, except those of tests running
    in parallel."""
    folder = Path("/dev/shm")
    return (
        {
            path.name
            for path in folder.iterdir()
            if path.stat().st_uid == os.getuid() and "dovetail" in path.name
        }
        if folder.is_dir()
        else set()
    )
