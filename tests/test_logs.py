"""The library's logs reach stderr, unless the program has configured logging."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from dovetail import LLM, SamplingParams
from dovetail.base.logs import LEVELS, VARIABLE

SPEAK = """
log = logging.getLogger("dovetail")
log.debug("a debug")
log.info("an info")
log.warning("a warning")
log.error("an error")
logging.getLogger("dovetail.part").critical("a part's end")
"""
ALL = ["a debug", "an info", "a warning", "an error", "a part's end"]
NUMBERS = [logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL]


def said(program: str, **environment: str) -> list[str]:
    """Return the lines that a program writes to stderr."""
    command = [sys.executable, "-c", f"import logging\n{program}"]
    kept = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        command, env=kept | environment, capture_output=True, text=True, check=True
    )
    return done.stderr.splitlines()


def test_logs_of_level_info_and_above_reach_stderr() -> None:
    lines = said(f"import dovetail\n{SPEAK}")
    assert [line.partition(": ")[2] for line in lines] == ALL[1:]
    assert [line.split()[1:3] for line in lines[:2]] == [
        ["INFO", "dovetail:"],
        ["WARNING", "dovetail:"],
    ]


@pytest.mark.parametrize("level", LEVELS)
def test_the_environment_sets_the_level(level: str) -> None:
    lines = said(f"import dovetail\n{SPEAK}", DOVETAIL_LOG=level.upper())
    wanted = [text for text, number in zip(ALL, NUMBERS, strict=True) if number >= LEVELS[level]]
    assert [line.partition(": ")[2] for line in lines] == wanted


def test_a_level_that_there_is_not_is_named() -> None:
    [line] = said("import dovetail", DOVETAIL_LOG="loud")
    assert line.endswith(
        "DOVETAIL_LOG must be debug, info, warning, error, off, got 'loud': it is taken for info"
    )


BASIC = 'logging.basicConfig(format="mine: %(message)s")'
BASIC_INFO = 'logging.basicConfig(level="INFO", format="mine: %(message)s")'


@pytest.mark.parametrize(
    "program", [f"{BASIC}\nimport dovetail", f"import dovetail\n{BASIC}"], ids=["before", "after"]
)
def test_a_program_that_configures_logging_gets_each_record_once_at_its_level(program: str) -> None:
    assert said(f"{program}\n{SPEAK}") == [f"mine: {text}" for text in ALL[2:]]
    assert said(f"{program.replace(BASIC, BASIC_INFO)}\n{SPEAK}") == [
        f"mine: {text}" for text in ALL[1:]
    ]
    assert said(f"{program}\n{SPEAK}", DOVETAIL_LOG="info") == [f"mine: {text}" for text in ALL[1:]]


def test_a_handler_or_level_of_the_program_on_the_librarys_logger_is_respected() -> None:
    handler = (
        'import dovetail, sys\nlogging.getLogger("dovetail").addHandler(logging.StreamHandler())'
    )
    assert said(f"{handler}\n{SPEAK}")[-2:] == ALL[-2:]
    lines = said(f'import dovetail\nlogging.getLogger("dovetail").setLevel("ERROR")\n{SPEAK}')
    assert [line.partition(": ")[2] for line in lines] == ALL[-2:]


def test_a_stderr_that_is_replaced_or_missing_is_no_problem() -> None:
    program = (
        f"import dovetail, sys, io\nkept, sys.stderr = sys.stderr, "
        f"io.StringIO()\n{SPEAK}\ntext, sys.stderr = sys.stderr.getvalue(), None\n{SPEAK}"
    )
    lines = said(f"{program}\nsys.stderr = kept\nprint(text.count('an info'), file=sys.stderr)")
    assert lines == ["1"]


@pytest.fixture(scope="module")
def torch_is_loaded() -> None:
    LLM("demo", max_model_len=64).close()


@pytest.mark.usefixtures("torch_is_loaded")
def test_what_the_log_observer_and_statistics_tell_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's
    with LLM("demo", disable_log_stats=False, max_model_len=64) as llm:
        llm.generate("ROMEO:", SamplingParams(max_tokens=4), use_tqdm=False)
        llm.engine.do_log_stats()
    lines = [line for line in capsys.readouterr().err.splitlines() if " INFO dovetail: " in line]
    assert [
        sum(part in line for line in lines)
        for part in ("started: scheduler", "1 finished", "stopped: 4 steps")
    ] == [1, 1, 1]


def test_a_line_keeps_a_progress_bar_whole() -> None:
    bar = """
import dovetail, sys
from tqdm import tqdm

with tqdm(total=2, desc="bar", file=sys.stderr) as shown:
    shown.update()
    logging.getLogger("dovetail").info("a line")
"""
    lines = said(bar)
    [line] = [line for line in lines if "a line" in line]
    assert "bar" not in line
