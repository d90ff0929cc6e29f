"""`require_proportional`: the CPU time for a text grows with its length, and not faster."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.testing.checks import fail

LONG = 2**17  # characters of a long text
SHORT = LONG // 8
# a long text takes so much CPU time, and so many times a short one's: more than in proportion
SLOW_S = 0.1
SLOWER = 20
TRIES = 3  # all of them have to be slow, since one may be interrupted


def require_proportional(piece: str, seconds: Callable[[str], float]) -> None:
    """Require that a text of LONG characters doesn't take far more than eight times as long as its
    first eighth. `piece`: what the text repeats. `seconds`: returns the CPU time for a text.

    Raises `CheckFailed`.
    """
    text = (piece * LONG)[:LONG]
    for _ in range(TRIES):
        long_s = seconds(text)
        if long_s <= SLOW_S:
            return
        short_s = seconds(text[:SHORT])
        if long_s <= SLOWER * short_s:
            return
    fail(f"{piece!r}: {SHORT} characters took {short_s:.3f} s, {LONG} took {long_s:.3f} s")
