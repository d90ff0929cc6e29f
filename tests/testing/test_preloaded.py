"""A child of the preloaded process is a program of its own, and the process forks only while that
is safe."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.budget import Spent
from tests.preloaded import Preloaded, PreloadError


@pytest.fixture(scope="module")
def bare() -> Iterator[Preloaded]:
    """A process that has nothing of torch: what is claimed here doesn't depend on it."""
    with closing(Preloaded(["json"])) as process:
        yield process


def printed(process: Preloaded, code: str, *args: str) -> str:
    ended = process.run(["-c", code, *args])
    assert ended.exit_code == 0, ended.errors
    return ended.output.strip()


def test_torch_and_dovetail_are_imported_before_a_program_starts(preloaded: Preloaded) -> None:
    code = (
        "import sys; print({'torch', 'dovetail.front.llm', 'dovetail.cli.app'} <= "
        "sys.modules.keys())"
    )
    assert printed(preloaded, code) == "True"


def test_two_programs_share_nothing_but_what_is_preloaded(bare: Preloaded) -> None:
    assert printed(bare, "import json, wave; json.seen = wave.seen = 1; print(1)") == "1"
    assert (
        printed(bare, "import sys, json; print('wave' in sys.modules, hasattr(json, 'seen'))")
        == "False False"
    )
    assert printed(bare, "x = 1; print(__name__)") == "__main__"
    assert printed(bare, "print('x' in globals())") == "False"


def test_random_numbers_differ_between_programs(preloaded: Preloaded) -> None:
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    first, second = printed(preloaded, code).split(), printed(preloaded, code).split()
    assert not set(first) & set(second)


def test_a_program_has_its_arguments_folder_environment_and_path(
    bare: Preloaded, tmp_path: Path
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "mine.py").write_text("import sys\nprint('mine', __name__, sys.argv[1:])\n")
    (tmp_path / "input").write_text("asked\n")
    environ = os.environ | {"PYTHONPATH": str(tmp_path / "lib"), "OF_MY_OWN": "1"}
    environ.pop("HOME", None)
    code = (
        "import os, sys, mine; print(os.getcwd(), os.environ['OF_MY_OWN'], 'HOME' in "
        "os.environ, input())"
    )
    with (tmp_path / "input").open() as given:
        ended = bare.run(["-c", code, "a"], cwd=tmp_path, environ=environ, stdin=given)
    assert ended.output == f"mine mine ['a']\n{tmp_path} 1 False asked\n", ended.errors
    assert bare.run(["-m", "mine", "b"], environ=environ).output == "mine __main__ ['b']\n"
    assert bare.run([tmp_path / "lib" / "mine.py", "c"]).output == "mine __main__ ['c']\n"


@pytest.mark.parametrize(
    ("code", "exit_code", "errors"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('wrong')", 1, "wrong\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os._exit(3)", 3, ""),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        (
            "import atexit, sys; atexit.register(print, 'last words', file=sys.stderr)",
            0,
            "last words\n",
        ),
        (
            "import threading, sys; threading.Timer(0.01, print, ['late'], {'file': "
            "sys.stderr}).start()",
            0,
            "late\n",
        ),
    ],
)
def test_a_program_ends_as_that_of_an_interpreter(
    bare: Preloaded, code: str, exit_code: int, errors: str
) -> None:
    ended = bare.run(["-c", code])
    assert ended.exit_code == exit_code
    assert ended.errors.endswith(errors)


def test_the_budget_counts_programs_and_they_report_their_own_usage(bare: Preloaded) -> None:
    begun = Spent.now()
    ended = bare.run(["-c", "import time\nwhile time.process_time() < 0.15: pass"])
    assert Spent.now().cpu_s - begun.cpu_s >= 0.12  # the system counts in hundredths
    assert 0.15 <= ended.cpu_s < 0.5
    assert ended.max_rss_bytes > 2**20


def test_programs_run_beside_each_other(bare: Preloaded) -> None:
    read_fd, write_fd = os.pipe()
    with open(read_fd, "rb") as reader:
        waiting = bare.start(["-c", "input()"], files=(reader, None, None))
        assert printed(bare, "print('meanwhile')") == "meanwhile"
        os.write(write_fd, b"\n")
        os.close(write_fd)
        assert bare.wait(waiting).exit_code == 0


def test_a_program_that_takes_too_long_is_killed(bare: Preloaded) -> None:
    with pytest.raises(TimeoutError, match=r"more than 0\.05 s"):
        bare.run(["-c", "import signal; signal.pause()"], timeout_s=0.05)


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "OMP_NUM_THREADS", "LD_PRELOAD"])
def test_an_environment_that_needs_a_real_start_is_refused(bare: Preloaded, name: str) -> None:
    with pytest.raises(PreloadError, match=f"{name} is read as a process starts"):
        bare.run(["-c", "pass"], environ=os.environ | {name: "31"})


def test_a_module_that_cannot_be_imported_is_an_error_at_the_start() -> None:
    with pytest.raises(PreloadError, match="No module named 'there_is_no_such_module'"):
        Preloaded(["json", "there_is_no_such_module"])


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            "import threading, signal\nthreading.Thread(target=signal.pause, daemon=True).start()",
            "has 2 threads",
        ),
        pytest.param(
            "import torch\ntorch.ones(2)",
            r"has run torch operations: aten\.ones",
            marks=pytest.mark.slow("imports torch in a process of its own"),
        ),
    ],
    ids=["thread", "operation"],
)
def test_a_process_that_could_break_its_children_forks_none(
    source: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "preloaded_here.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    modules = ["torch"] * ("torch" in source)
    with (
        closing(Preloaded([*modules, "preloaded_here"])) as process,
        pytest.raises(PreloadError, match=why),
    ):
        process.run(["-c", "pass"])


def test_programs_end_with_the_process(tmp_path: Path) -> None:
    process = Preloaded(["json"])
    read_fd, write_fd = os.pipe()
    with open(write_fd, "wb") as writer:
        process.start(
            ["-c", "import signal; print(1, flush=True); signal.pause()"],
            files=(None, writer, None),
        )
    with open(read_fd, "rb") as reader:
        assert reader.readline() == b"1\n"
        process.close()
        assert reader.read() == b"", "the other end is closed"
