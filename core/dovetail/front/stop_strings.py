"""Finds the stop strings of a request in text that comes piece by piece: `StopStrings`, one automaton for all of them and all samples.

It is that of Aho and Corasick ("Efficient string matching", Communications of the ACM 18, 1975): a character costs the same however many strings
there are. A state is the longest suffix of the text so far that begins a stop string; where the text goes on otherwise than that string, the
state's *fallback*, the next shorter such suffix, is tried.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

START = 0  # the state of a text that ends in nothing of a stop string


class StopStrings:
    """Made once a request, from one string or more, none of them empty; the samples keep their own states."""

    __slots__ = ("_edges", "_fallback", "_found", "_held")

    def __init__(self, stops: Sequence[str]) -> None:
        self._edges: dict[tuple[int, str], int] = {}  # (state, next character) -> state
        self._fallback = [START]  # by state
        self._found = [0]  # by state: the length of the longest stop string that ends here, or 0
        self._held = [0]  # by state: the length of the longest suffix that begins a stop string and isn't all of it
        for stop in stops:
            self._add(stop)
        self._link()

    def advance(self, state: int, text: str, stop: bool = True) -> tuple[int, int, int]:
        """The state behind `text`, 0 and 0; or, if a stop string ends in it and `stop` is true, the state where the first does, the length of the
        longest that ends there, and how many characters of `text` lie behind it."""
        edges, fallback, found = self._edges, self._fallback, self._found
        for place, char in enumerate(text, start=1):
            while (state, char) not in edges and state != START:
                state = fallback[state]
            state = edges.get((state, char), START)
            if stop and found[state]:
                return state, found[state], len(text) - place
        return state, 0, 0

    def held(self, state: int) -> int:
        """Return how many of the last characters may turn out to begin a stop string."""
        return self._held[state]

    def _add(self, stop: str) -> None:
        state = START
        for depth, char in enumerate(stop, start=1):
            self._held[state] = depth - 1  # there is more to come
            new = len(self._found)
            if self._edges.setdefault((state, char), new) == new:
                self._fallback.append(START)
                self._found.append(0)
                self._held.append(0)
            state = self._edges[state, char]
        self._found[state] = len(stop)

    def _link(self) -> None:
        """Fallbacks, from short states to long ones; a state ends and begins whatever its fallback does, unless it has something longer."""
        children: list[list[tuple[str, int]]] = [[] for _ in self._found]
        for (state, char), child in self._edges.items():
            children[state].append((char, child))
        queue = deque(child for _, child in children[START])
        while queue:
            state = queue.popleft()
            back = self._fallback[state]
            self._found[state] = self._found[state] or self._found[back]
            self._held[state] = self._held[state] or self._held[back]
            for char, child in children[state]:
                self._fallback[child], _, _ = self.advance(back, char, stop=False)
                queue.append(child)
