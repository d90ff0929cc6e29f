"""claude-code: a turn with a command, its result and an answer; and one with an image file."""

from __future__ import annotations

import base64

import agent
from run import PICTURE


def turn(url: str) -> None:
    variables, arguments = agent.command_line("claude", url)
    with agent.home({}) as folder:
        said = agent.run(
            ["claude", *arguments, "-p", agent.ASK, "--allowedTools", "Bash"], folder, variables
        )
    assert f"It said {agent.WORD}." in said, said[-600:]


def images(url: str) -> None:
    variables, arguments = agent.command_line("claude", url)
    with agent.home({}) as folder:
        (folder / "square.png").write_bytes(base64.b64decode(PICTURE))
        asked = f"{agent.LOOK} {folder}/square.png"
        said = agent.run(
            ["claude", *arguments, "-p", asked, "--allowedTools", "Read"], folder, variables
        )
    assert agent.SEEN in said, said[-600:]
