"""Requests for `RouteSuite`: examples, and what clients may send instead of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

# a lone surrogate, as JSON may have it; no encoding of Unicode does
ODD_TEXTS = ("", "\ufeff\u2028é", "\ud800", "x" * 10_000)
ODD_VALUES: tuple[Any, ...] = (None, True, -1, 1.5, [], [None], {}, {"x": 1}, *ODD_TEXTS)
ODD_WORDS = ("", "x", "-1", "1.5", "%FF", quote("é\u2028"))
MOST_PLACES = 40  # of a body whose values are replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteExample:
    """A request that the routes answer. `body`: sent as JSON; None: no body."""

    path: str
    method: str = "POST"
    body: Any = None
    status: int = 200

    def encoded(self) -> bytes:
        """Return the body as it is sent."""
        return b"" if self.body is None else json.dumps(self.body).encode()


def with_odd_values(example: RouteExample) -> Iterator[RouteExample]:
    """Yield the example with each value of its body replaced or left out, and each part of its
    path and query."""
    for place in _places(example.body)[:MOST_PLACES]:
        for value in ODD_VALUES:
            yield replace(example, body=_changed(example.body, place, value))
        yield replace(example, body=_changed(example.body, place, None, is_dropped=True))
    for path in _odd_paths(example.path):
        yield replace(example, path=path)


def mark_of(number: int) -> str:
    """Return a word that no other number's texts have."""
    return f"mark{number}x"


def variations(example: RouteExample, most: int) -> Iterator[list[RouteExample]]:
    """Yield examples that differ in the texts of their bodies, `most` of them: in all texts, and
    in each; each has its own mark, and all have one length, or each its own. And examples that
    differ in a number."""
    places = _places(example.body)[:MOST_PLACES]
    texts = [place for place in places if type(_at(example.body, place)) is str]
    numbers = [place for place in places if type(_at(example.body, place)) in (int, float)]
    for changed in ([texts] if len(texts) > 1 else []) + [[place] for place in texts + numbers]:
        for longer in (0, 1):
            yield [_varied(example, changed, number, number * longer) for number in range(most)]


def _varied(
    example: RouteExample, places: Sequence[tuple[Any, ...]], number: int, words: int
) -> RouteExample:
    body = example.body
    for place in places:
        value = _at(body, place)
        text = f"{value} {mark_of(number)}{words * ' more'}"
        body = _changed(body, place, text if isinstance(value, str) else value + number)
    return replace(example, body=body)


def _at(body: Any, place: Sequence[Any]) -> Any:
    for key in place:
        body = body[key]
    return body


def _places(body: Any) -> list[tuple[Any, ...]]:
    """Return the paths of all values within a body."""
    pairs: Sequence[tuple[Any, Any]] = ()
    if isinstance(body, dict):
        pairs = list(body.items())
    elif isinstance(body, list):
        pairs = list(enumerate(body))
    found = []
    for key, value in pairs:
        found += [(key,), *((key, *below) for below in _places(value))]
    return found


def _changed(body: Any, place: Sequence[Any], value: Any, *, is_dropped: bool = False) -> Any:
    key, *below = place
    copied = dict(body) if isinstance(body, dict) else list(body)
    if below:
        copied[key] = _changed(body[key], below, value, is_dropped=is_dropped)
    elif is_dropped:
        del copied[key]
    else:
        copied[key] = value
    return copied


def _odd_paths(path: str) -> Iterator[str]:
    place, _, query = path.partition("?")
    parts = place.split("/")
    for index in range(2, len(parts)):
        for word in ODD_WORDS[1:]:
            yield "/".join([*parts[:index], word, *parts[index + 1 :]]) + ("?" + query) * bool(
                query
            )
    pairs = [pair.partition("=")[0] for pair in query.split("&") if pair]
    for index, name in enumerate(pairs):
        given = query.split("&")
        for word in ODD_WORDS:
            yield f"{place}?{'&'.join([*given[:index], f'{name}={word}', *given[index + 1 :]])}"
        yield f"{place}?{'&'.join([*given[:index], *given[index + 1 :]])}"
