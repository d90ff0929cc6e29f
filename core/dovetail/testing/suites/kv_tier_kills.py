"""`killed_after`: kills a process whose tier stores frames."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from tempfile import TemporaryFile

from dovetail.api.kv_tier import FrameKey
from dovetail.testing.binding import Binding
from dovetail.testing.checks import require
from dovetail.testing.elsewhere import pickled, unpickled
from dovetail.testing.processes import python_path
from dovetail.testing.suites.kv_tier_world import TierWorld

SIZE = 2**21 + 64  # bytes of a frame: writing it takes long enough to be killed in it
KEYS = 16
_CODE = "from dovetail.testing.suites.kv_tier_kills import _store; _store()"


def killed_after(suite: Binding, reports: int) -> tuple[list[int], Sequence[FrameKey]]:
    """Store frames in a process, and kill it after so many reports, in the middle of others.
    Returns the indices of the frames that it reported as stored, and the keys of all."""
    namespace = os.urandom(32)
    keys = [FrameKey(namespace, os.urandom(32)) for _ in range(KEYS)]
    with TemporaryFile() as given, TemporaryFile() as told:
        given.write(pickled(suite, keys))
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=told,
            env=os.environ | {"PYTHONPATH": python_path()},
        )
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline() for _ in range(reports)]
        finally:
            process.kill()
            lines += process.stdout.readlines()
            process.stdout.close()
            process.wait()
        stored = [int(line) for line in lines if line.endswith(b"\n")]
        told.seek(0)
        words = told.read().decode(errors="replace").strip()[-1_000:]
    require(len(stored) >= reports, f"a new process couldn't store: {words or 'it ended'}")
    return stored, keys


def _store() -> None:
    """Store the frames of the keys on standard input, as many at a time as the tier takes, and
    write the index of each that was stored."""
    bound, keys = unpickled()
    world = TierWorld(bound.make, sizes=(SIZE,))
    indices = {}
    for index, key in enumerate(keys):
        indices[world.begin("store", [key])] = index
        _tell(world, indices)
    while indices:  # until it is killed, or all are stored
        world.woken.wait()
        world.woken.clear()
        _tell(world, indices)


def _tell(world: TierWorld, indices: dict[int, int]) -> None:
    for done in world.reported():
        world.require_stored(done, "frames weren't stored")
        print(indices.pop(done.job), flush=True)
