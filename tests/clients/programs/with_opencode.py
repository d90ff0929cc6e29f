"""opencode: a turn with a command, its result and an answer."""

from __future__ import annotations

import agent


def turn(url: str) -> None:
    with agent.home({"opencode.json": agent.block("opencode.json", url)}) as folder:
        said = agent.run(["opencode", "run", agent.ASK], folder, {})
    assert f"It said {agent.WORD}." in said, said[-600:]
