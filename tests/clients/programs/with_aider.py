"""aider: a turn that edits a file. It brings no tools."""

from __future__ import annotations

import sys

import agent


def edit(url: str) -> None:
    variables, arguments = agent.command_line("aider", url)
    quiet = [
        "--no-git",
        "--yes-always",
        "--no-check-update",
        "--analytics-disable",
        "--no-show-model-warnings",
    ]
    command = [
        sys.executable,
        "-m",
        "aider",
        *arguments,
        *quiet,
        "--message",
        agent.ASK,
        "speech.txt",
    ]
    with agent.home({"speech.txt": "nothing\n"}) as folder:
        agent.run(command, folder, variables)
        assert (folder / "speech.txt").read_text(encoding="utf-8").strip() == agent.WORD
