"""Helpers for the programs of coding agents: the documentation's configuration, and runs of a
command with a home of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "docs" / "serving" / "fields.md"
DOCUMENTED_URL = "http://127.0.0.1:8000"
WORD = "wherefore"  # what the served model has the agent say
ASK = "Say it"
LOOK = "Look at"
SEEN = "I see a picture."  # what it says once it has one
TURN_S = 150
NO_NETWORK = {
    **dict.fromkeys(
        ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"
    ),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
}


def block(title: str, url: str) -> str:
    """Return the page's code block of a file, for the server at `url`."""
    found = re.search(
        rf'```\w+ title="{re.escape(title)}"\n(.*?)```', PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    assert found is not None, f"the page has no {title}"
    return found[1].replace(DOCUMENTED_URL, url)


def command_line(program: str, url: str) -> tuple[dict[str, str], list[str]]:
    """Return the page's variables and arguments for a program, for the server at `url`."""
    found = re.search(
        rf"^((?:\w+=\S+ )+){program}( .*)?$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert found is not None, f"the page has no command {program}"
    variables = dict(one.split("=", 1) for one in found[1].replace(DOCUMENTED_URL, url).split())
    return variables, (found[2] or "").split()


@contextmanager
def home(files: Mapping[str, str]) -> Iterator[Path]:
    """A folder with these files, for an agent to run in; deleted afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        for name, text in files.items():
            file = Path(made) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        yield Path(made)


def run(command: list[str], folder: Path, variables: Mapping[str, str]) -> str:
    """Run an agent in a folder, which is its home, too, without a network but loopback. Returns its
    output."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        **NO_NETWORK,
        **variables,
    }
    pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        command, text=True, env=environment, cwd=folder, start_new_session=True, **pipes
    ) as process:
        try:
            said, complained = process.communicate(timeout=TURN_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it starts others
    assert process.returncode == 0, (complained or said)[-600:]
    return str(said)
