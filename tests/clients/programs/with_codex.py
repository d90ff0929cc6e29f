"""codex: a turn with a command, its result and an answer."""

from __future__ import annotations

import agent


def turn(url: str) -> None:
    files = {".codex/config.toml": agent.block("~/.codex/config.toml", url)}
    command = [
        "codex",
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        "--json",
        agent.ASK,
    ]
    with agent.home(files) as folder:
        said = agent.run(command, folder, {})
    assert '"type":"command_execution"' in said, said[-600:]
    assert f"It said {agent.WORD}." in said, said[-600:]
