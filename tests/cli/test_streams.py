"""Output on full disks, closed pipes and unusual arguments: never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from tempfile import TemporaryFile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dovetail.cli.app import app
from dovetail.cli.streams import echo_json
from dovetail.config.engine import EngineConfig
from tests.preloaded import Preloaded
from tests.support import examples

DOVETAIL = f"{sys.executable} -m dovetail"


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = f"set -o pipefail; {command}"
    return subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_message_and_exit_code_1(unbuffered: str) -> None:
    done = shell(f"{DOVETAIL} --version > /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (
        1,
        "error: standard output can't be written to: No space left on device\n",
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.slow("starts a process that imports everything")
def test_a_reader_that_goes_is_no_failure(unbuffered: str) -> None:
    done = shell(f"{DOVETAIL} config schema | head -n 1", PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")


def test_a_reader_that_is_gone_is_no_failure(preloaded: Preloaded) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    with open(write_fd, "wb") as nobody, TemporaryFile() as errors:
        pid = preloaded.start(["-m", "dovetail", "config", "schema"], files=(None, nobody, errors))
        assert preloaded.wait(pid).exit_code == 0
        errors.seek(0)
        assert errors.read() == b""


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (f"{DOVETAIL} --version >&-", 0),
        (f"{DOVETAIL} bogus/x 2>&-", 2),
        (f"{DOVETAIL} generate demo - <&-", 2),
        (f"{DOVETAIL} config check nothing.yaml 2>/dev/full", 2),
    ],
)
def test_closed_and_full_streams_change_no_exit_code(command: str, code: int) -> None:
    done = shell(command)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_json_is_json_in_any_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"id": "\ud800", "prompt": "é"}
    for encoding in ("ascii", "utf-8"):
        code = (
            f"from dovetail.cli.streams import *; make_any_text_printable(); echo_json({value!r})"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": encoding},
            check=True,
        )
        assert json.loads(done.stdout) == value
    assert echo_json.__doc__


def test_an_unexpected_error_is_a_message_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise KeyError("foreseen by nobody")

    monkeypatch.setattr(EngineConfig, "load_what_is_right", fails)
    done = CliRunner().invoke(app, ["config", "show"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(
        "error: KeyError: 'foreseen by nobody'\nThis is a fault in Dovetail or in a plugin. "
        "`dovetail --traceback`"
    )
    assert "Traceback" in CliRunner().invoke(app, ["--traceback", "config", "show"]).stderr


def test_a_wrong_value_of_an_option_is_shown() -> None:
    for option, value in (("--temperature", "hot"), ("--max-tokens", "1e9")):
        done = CliRunner().invoke(app, ["generate", "demo", "x", option, value])
        assert done.exit_code == 2
        assert f"Invalid value for '{option}'" in done.stderr
        assert repr(value) in done.stderr


COMMANDS = [
    (["config", "show"], []),
    (["plugins", "info"], []),
    (["plugins", "test", "scheduler", "nobody"], []),
    (["generate", "demo", "x"], ["--set", "nothing=1"]),  # so that no engine is made
    ([], ["--no-such-option"]),
]
ODD = [
    "",
    "-",
    "--",
    "=",
    "~",
    "~nosuchuser/x",
    "x" * 5000,
    "a/" * 3000,
    "\udcff",
    "a\0b",
    "/dev/null",
    ".",
    "nan",
    "1e999",
    "9" * 5000,
    "[" * 400,
    "!!bool maybe",
    "é",
]
WORDS = st.sampled_from(
    [*ODD, "scheduler", "fcfs", "demo", "--chat", "--plain", "--json", "--traceback"]
) | st.text(max_size=4)
OPTIONS = st.tuples(
    st.sampled_from(["--set", "--param", "--options", "--seed", "--prompts-file", "--stop"]),
    st.sampled_from(
        [
            *EngineConfig.model_fields,
            "n",
            "logit_bias",
            "stop",
            "scheduler.x",
            "observers.0",
            "a.b",
            "",
        ]
    ),
    WORDS,
).map(lambda option: [option[0], f"{option[1]}={option[2]}"])


@examples(quick=30, full=3000)
@given(
    st.sampled_from(COMMANDS),
    st.lists(WORDS.map(lambda word: [word]) | OPTIONS, min_size=1, max_size=3),
)
def test_any_arguments_end_in_a_message_and_an_exit_code(
    command: tuple[list[str], list[str]], rest: list[list[str]]
) -> None:
    before, after = command
    done = CliRunner().invoke(app, [*before, *(word for words in rest for word in words), *after])
    assert isinstance(done.exception, SystemExit | None)
    assert done.exit_code in (0, 1, 2)
    assert "This is a fault" not in done.stderr
