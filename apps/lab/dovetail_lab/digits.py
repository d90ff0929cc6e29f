"""Number formatting for tables in terminals and reports."""

from __future__ import annotations

import math
from collections.abc import Sequence

MISSING = "–"
# significant digits: of the smallest number, and of the largest
_LEAST = 3
_MOST = 5


def evenly(values: Sequence[float]) -> list[str]:
    """Format numbers with equally many decimals: the smallest has three significant digits, unless
    the largest would have more than five. A dash for NaN; infinity as "∞"."""
    sizes = [
        math.floor(math.log10(abs(value))) for value in values if math.isfinite(value) and value
    ]
    decimals = max(0, min(_LEAST - 1 - min(sizes), _MOST - 1 - max(sizes))) if sizes else 0
    return [
        MISSING if math.isnan(value) else f"{value:,.{decimals}f}" if math.isfinite(value) else "∞"
        for value in values
    ]


def significant(value: float) -> str:
    """Return a number with four significant digits, for columns that span orders of magnitude."""
    return f"{value:#.4g}".removesuffix(".")


def per_cent(share: float) -> str:
    """Return a share as "12.3 %", or a dash for NaN."""
    return MISSING if math.isnan(share) else f"{100 * share:.1f} %"
