"""The cells of a comparison's table, for terminals and for the report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from dovetail_lab.compare import Line
from dovetail_lab.digits import MISSING, evenly
from dovetail_lab.statistics import Change


def change_rows(lines: Sequence[Line]) -> Iterator[tuple[Line, list[str]]]:
    """Yield each line with its cells: before, after, the change and its interval."""
    for _, same in groupby(lines, key=lambda line: line.metric):
        of_metric = list(same)
        texts = iter(evenly([value for line in of_metric for value in (line.change.a, line.change.b)]))
        for line in of_metric:
            yield line, [next(texts), next(texts), _signed(line.change.relative), _interval(line.change)]


def _signed(value: float) -> str:
    return MISSING if math.isnan(value) else f"{_tenths(value)} %"


def _interval(change: Change) -> str:
    return MISSING if math.isnan(change.low) else f"[{_tenths(change.low)}, {_tenths(change.high)}]"


def _tenths(share: float) -> str:
    """Return a signed percentage with one decimal; what rounds to nothing has no sign."""
    tenths = round(100 * share, 1)
    return f"{tenths:+.1f}" if tenths else "0.0"
