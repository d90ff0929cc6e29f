"""Where something went wrong in a component: its innermost calls, as a verdict shows them, a line each."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

SHOWN = 5
_OURS = Path(__file__).parent


def of_error(error: BaseException) -> str:
    """The calls from the suite on, of which the last one raised."""
    return _since_the_suite(traceback.extract_tb(error.__traceback__))


def of_frame(frame: FrameType | None) -> str:
    """The calls from the suite on, of which the last one is this."""
    return _since_the_suite(traceback.extract_stack(frame))


def of_dump(dump: str) -> str:
    """Those of the main thread, which `faulthandler` writes last, the innermost first."""
    return _told(re.findall(r'File "(.+?)", line (\d+) in (.+)', dump.strip().split("\n\n")[-1]))


def _since_the_suite(calls: traceback.StackSummary) -> str:
    frames = []
    for frame in reversed(calls):
        if Path(frame.filename).is_relative_to(_OURS):
            break
        frames.append((frame.filename, frame.lineno, frame.name))
    return _told(frames)


def _told(frames: Iterable[tuple[str, object, str]]) -> str:
    """Without those of the import system, which say nothing."""
    shown = [frame for frame in frames if not frame[0].startswith("<frozen")][:SHOWN]
    return "".join(f"\n  in {function} ({Path(file).name}:{line})" for file, line, function in shown)
