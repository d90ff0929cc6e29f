"""`ModuleNames`: names of modules in compressed-tensors' configs, and regular expressions, whose
matching is bounded: a checkpoint's author chooses them, and some would take years."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import comb, inf, prod
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from dovetail.errors import ModelLoadError, shown

MARK = "re:"
MOST_CHARS = 500  # of an expression
NAME_CHARS = 64  # of a module's name, about
MOST_STEPS = 4e6  # of matching all expressions with one name, as estimated: 40 ms

_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)
_LOOKS = (_constants.ASSERT, _constants.ASSERT_NOT)
_CHARACTERS = (_constants.LITERAL, _constants.NOT_LITERAL, _constants.ANY, _constants.IN)


class ModuleNames:
    """Names, and texts that begin with "re:" and a regular expression, which matches at the start
    of a name."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """Raises `ModelLoadError` for invalid expressions, and those that take too long."""
        patterns = tuple(patterns)
        self.names = frozenset(one for one in patterns if not one.startswith(MARK))
        expressions = dict.fromkeys(one for one in patterns if one.startswith(MARK))  # each once
        self._expressions: list[re.Pattern[str]] = []
        steps = 0.0
        for one in expressions:
            expression, ways = _read(one)
            self._expressions.append(expression)
            steps += ways
            if steps > MOST_STEPS:
                raise ModelLoadError(
                    f"quantization_config: {shown(one)} takes too long to match: an expression may "
                    "repeat single characters, such as `.*`, a few times, but no groups"
                )

    def __contains__(self, module: str) -> bool:
        return module in self.names or any(one.match(module) for one in self._expressions)


def _read(pattern: str) -> tuple[re.Pattern[str], float]:
    """Return an expression, and an upper bound on the ways in which it may match a part of a name
    of `NAME_CHARS`, all of which the matcher tries. Raises `ModelLoadError`."""
    if len(pattern) > MOST_CHARS:
        raise ModelLoadError(
            f"quantization_config: {shown(pattern)} has {len(pattern)} characters; a regular "
            f"expression may have {MOST_CHARS}"
        )
    try:
        text = pattern.removeprefix(MARK)
        return re.compile(text), _ways(_parser.parse(text))
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelLoadError(
            f"quantization_config: {shown(pattern)} is not a valid regular expression: {error}"
        ) from error


def _ways(items: Sequence[tuple[Any, Any]]) -> float:
    """Return the number of ways in which a sequence may match: repeated characters share the name,
    so that k of them divide it in one of C(n, k) ways; other items multiply them."""
    repeated = []
    others = 1.0
    for kind, value in items:
        if kind in _REPEATS and len(value[2]) == 1 and value[2][0][0] in _CHARACTERS:
            least, most, _ = value
            repeated.append(max(1, min(most, NAME_CHARS) - least + 1))
        else:
            others *= _ways_of(kind, value)
    places = sum(count > 1 for count in repeated)
    return others * float(min(prod(repeated), comb(NAME_CHARS + places, places)))


def _ways_of(kind: Any, value: Any) -> float:
    if kind in _CHARACTERS or kind is _constants.AT:
        return 1.0
    if kind is _constants.SUBPATTERN:
        return _ways(value[-1])
    if kind is _constants.BRANCH:
        return sum(_ways(one) for one in value[1])
    if kind in _LOOKS:
        return _ways(value[1])
    if kind in _REPEATS and value[1] <= 1:  # an optional group
        return 1.0 + _ways(value[2])
    return inf
