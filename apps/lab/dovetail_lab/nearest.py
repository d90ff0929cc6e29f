"""`suggest`: the ending of an error message about an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggest(wrong: str, valid: Iterable[str]) -> str:
    """Return ", did you mean x?" for the nearest valid name; all valid names if none is near."""
    names = list(valid)
    near = difflib.get_close_matches(wrong, names, n=1)
    return f", did you mean {near[0]}?" if near else f"; there are {', '.join(names)}"
