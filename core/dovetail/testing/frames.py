"""Traceback excerpts for verdicts: the innermost calls of a failure, one per line."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from types import FrameType

SHOWN = 5
_OURS = Path(__file__).parent


def of_error(error: BaseException) -> str:
    """Return the calls from the suite on; the last one raised the error."""
    return _since_the_suite(traceback.extract_tb(error.__traceback__))


def of_frame(frame: FrameType | None) -> str:
    """Return the calls from the suite on, up to this frame."""
    return _since_the_suite(traceback.extract_stack(frame))


def of_dump(dump: str) -> str:
    """Return the calls, from the suite on, of the thread in which a fatal signal arrived, as
    `faulthandler` has written them: the innermost first."""
    thread = next((part for part in dump.split("\n\n") if part.startswith("Current thread")), "")
    calls = re.findall(r'File "(.+?)", line (\d+) in (.+)', thread)
    return _told(takewhile(lambda call: not Path(call[0]).is_relative_to(_OURS), calls))


def _since_the_suite(calls: traceback.StackSummary) -> str:
    frames = []
    for frame in reversed(calls):
        if Path(frame.filename).is_relative_to(_OURS):
            break
        frames.append((frame.filename, frame.lineno, frame.name))
    return _told(frames)


def _told(frames: Iterable[tuple[str, object, str]]) -> str:
    """Format the calls, without those of the import system."""
    shown = [frame for frame in frames if not frame[0].startswith("<frozen")][:SHOWN]
    return "".join(
        f"\n  in {function} ({Path(file).name}:{line})" for file, line, function in shown
    )
