"""Counts what one prompt visits: files, functions, and changes from one file to another.

    python -m tools.walk              # front, engine and runtime of the core; and all of Dovetail
    python -m tools.walk --functions  # each function of the three, in the order of first visits

The prompt is warm (others ran before), on a CPU, greedy, of two tokens, through `LLMEngine`.
"""

from __future__ import annotations

import argparse
import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from dovetail import LLMEngine, SamplingParams

ROOT = Path(__file__).parents[1]
CORE = [str(ROOT / "core" / "dovetail" / name) for name in ("front", "engine", "runtime")]
Call = tuple[str, str]  # file and function


def calls() -> list[Call]:
    """Return the calls of Python functions of one prompt, in their order."""
    found: list[Call] = []

    def called(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            found.append((frame.f_code.co_filename, frame.f_code.co_qualname))

    with LLMEngine.from_config({"model": "demo"}) as engine:
        for number in range(4):
            if number == 3:
                sys.setprofile(called)
            engine.add_request(f"{number}", "To be", SamplingParams(temperature=0.0, max_tokens=2))
            while engine.has_unfinished_requests():
                engine.step()
        sys.setprofile(None)
    return found


def told(name: str, visited: list[Call]) -> str:
    changes = sum(one[0] != other[0] for one, other in pairwise(visited))
    files = {file for file, _ in visited}
    return f"{name}: {len(files)} files, {len(set(visited))} functions, {changes} changes of file"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--functions", action="store_true")
    arguments = parser.parse_args()
    visited = [call for call in calls() if call[0].startswith(str(ROOT))]
    own = [call for call in visited if call[0].startswith(tuple(CORE))]
    print(told("front, engine and runtime", own))
    print(told("all of Dovetail", [call for call in visited if "site-packages" not in call[0]]))
    if arguments.functions:
        for file, function in dict.fromkeys(own):
            print(Path(file).relative_to(ROOT), function)
