"""Time that a process has had on a busy machine: waiting for a CPU isn't counted, sleeping is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.registry.doctor import process as own_time
from dovetail.registry.doctor.process import OwnTime, wait
from tests.support import examples

S = 1_000_000_000  # in nanoseconds

shares = st.dictionaries(st.sampled_from(["main", "helper", "child"]), st.floats(0, 1), min_size=1)


@examples(quick=50, full=2000)
@given(st.lists(st.tuples(st.floats(0.01, 5), shares), min_size=1, max_size=8))
def test_what_the_most_hindered_thread_waited_for_a_cpu_is_not_counted(
    passing: list[tuple[float, dict[str, float]]],
) -> None:
    """Each entry: seconds that pass, and the share of them that each thread which is alive
    waits."""
    now, waited = 0.0, {"main": 7 * S}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_time, "waits", lambda process: waited.items())
        patch.setattr(own_time.time, "monotonic", lambda: now)
        own = OwnTime(1)
        expected = 0.0
        for seconds, alive in passing:
            now += seconds
            waited = {
                thread: waited.get(thread, 0) + int(share * seconds * S)
                for thread, share in alive.items()
            }
            expected += seconds * (1 - max(alive.values()))
            assert own.elapsed_s() == pytest.approx(expected, abs=1e-6)
        own.restart()
        assert own.elapsed_s() == 0


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(),
    reason="this system doesn't tell what threads wait for",
)
def test_a_process_and_what_it_has_started_are_asked() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        while len(dict(own_time.waits(process.pid))) < 2:
            assert process.poll() is None
        assert process.stdin is not None
        process.stdin.close()


def test_processes_end_in_time_unless_they_wait_forever() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        assert wait(process, 60)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not wait(process, 0.1)
        process.kill()
    assert dict(own_time.waits(process.pid)) == {}
