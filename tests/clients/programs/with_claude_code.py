"""claude-code: a turn with a command, its result and an answer."""

from __future__ import annotations

import agent


def turn(url: str) -> None:
    variables, arguments = agent.command_line("claude", url)
    with agent.home({}) as folder:
        said = agent.run(
            ["claude", *arguments, "-p", agent.ASK, "--allowedTools", "Bash"], folder, variables
        )
    assert f"It said {agent.WORD}." in said, said[-600:]
