"""The state of one answer in llguidance, and the masks of many, for `llguidance_backend.py`.

Two things make masks quick. Copies of one of the library's matchers share, under a lock, the automaton that it builds as it goes: so a grammar has
several that share nothing, its `Lanes`. And in a string of bounded length, the library would try nearly the whole vocabulary. Which tokens may come
there without ending the string follows from the number of characters left (`positions.py`, `string_tokens.py`); a second matcher, which has only the
other tokens, gives their part of the mask.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import llguidance
import numpy as np

from dovetail.api.grammar import Grammar, GrammarContext, Matcher
from dovetail.errors import DovetailError
from dovetail_grammars.forced import forced_tokens
from dovetail_grammars.llguidance_reasons import reason
from dovetail_grammars.positions import Tracker
from dovetail_grammars.string_tokens import StringTokens

if TYPE_CHECKING:
    from dovetail.api.grammar import UInt32

MOST_LANES = 16
MOST_STATES = 250_000  # of the automaton of a grammar's first lane; the others have as many together, so that lanes don't multiply memory
MOVED_AT_MOST = 256  # tokens of an answer that moves to a lane of its own: the lane's matcher goes over all of them again


class Lanes:
    """Matchers of one grammar that share nothing, so that masks of different lanes are filled at the same time. At first there is one; more are
    made, in a thread, once several answers need masks together."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        """`make`: returns a new matcher whose automaton has at most so many states."""
        self._make = make
        self.firsts = [make(MOST_STATES)]  # of each lane, which copies. Replaced, never changed
        self._thread: threading.Thread | None = None
        self._answers = 0

    def number(self) -> int:
        """Return a number for another answer, by which answers are spread over the lanes."""
        self._answers += 1
        return self._answers

    def widen(self, wanted: int) -> None:
        """Have further lanes made, if there are less than wanted."""
        if wanted > len(self.firsts) and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._widen, args=(wanted,), name="dovetail-grammar-lanes")
            self._thread.start()

    def _widen(self, wanted: int) -> None:
        self.firsts = [*self.firsts, *(self._make(MOST_STATES // MOST_LANES) for _ in range(wanted - len(self.firsts)))]


class _Side:
    """A matcher of the library's for one answer. It goes over the answer's tokens when it is asked for something. `inner` is a copy of `first`, the
    lane's. What goes beyond a limit of another lane goes on in the first."""

    __slots__ = ("_made_of", "_number", "_spelled", "first", "inner", "lanes", "seen")

    def __init__(self, lanes: Lanes, spelled: Callable[[Sequence[int]], list[int]] | None) -> None:
        self.lanes, self._spelled = lanes, spelled
        self._number = lanes.number()
        self._made_of: list[Any] | None = None  # the lanes that there were
        self.first: Any = None
        self.inner: Any = None
        self.seen = 0  # tokens

    def go_to(self, tokens: list[int]) -> None:
        """Bring `inner` behind all of these tokens. Raises `DovetailError` if it can't go on."""
        firsts = self.lanes.firsts
        if self._made_of is not firsts and self.seen <= MOVED_AT_MOST:
            self._made_of = firsts
            self._move(firsts[self._number % len(firsts)])
        while self.seen < len(tokens):
            ids = tokens[self.seen :] if self._spelled is None else self._spelled(tokens[self.seen :])
            if self.inner.try_consume_tokens(ids) == len(ids):
                self.seen = len(tokens)
            elif not self.go_home():
                check(self.inner)
                raise DovetailError("a token was accepted that the grammar doesn't allow")

    def _move(self, first: Any) -> None:
        if first is not self.first:
            self.first, self.inner, self.seen = first, first.deep_copy(), 0

    def go_home(self) -> bool:
        """Move to the first lane, before all tokens. Returns False if it is there already."""
        moved = self.first is not self.lanes.firsts[0]
        self._move(self.lanes.firsts[0])
        return moved

    def take(self, tokens: list[int], token: int) -> bool:
        """Go on by `token`, after these. Returns False if it may not come."""
        self.go_to(tokens)
        taken = bool(self.inner.try_consume_tokens([token]))
        if self.inner.is_error() and self.go_home():
            return self.take(tokens, token)
        check(self.inner)
        self.seen += taken
        return taken

    def fill(self, tokens: list[int], line: UInt32) -> None:
        """Write the library's mask after these tokens."""
        self.go_to(tokens)
        self.inner.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
        if self.inner.is_error() and self.go_home():
            self.fill(tokens, line)
        check(self.inner)

    def go_back(self, tokens: list[int], to: int) -> None:
        """Take back what comes after the first `to` of these tokens."""
        if self.seen > to:
            taken = tokens[to : self.seen]
            self.inner.rollback(len(taken if self._spelled is None else self._spelled(taken)))
            check(self.inner)
            self.seen = to


class LLGrammar(Grammar):
    """A compiled grammar. `rest` and `tracker`: of one with strings of bounded length."""

    def __init__(self, fill: Fill, whole: Lanes, rest: Lanes | None = None, tracker: Tracker | None = None) -> None:
        self.fill, self.whole, self.rest, self.tracker = fill, whole, rest, tracker

    def begin(self) -> Matcher:
        return LLMatcher(self)


class LLMatcher(Matcher):
    """The library's matchers, without their own idea of the end: it takes any number of stop ids, and doesn't count them."""

    def __init__(self, grammar: LLGrammar) -> None:
        self._fill, self._context = grammar.fill, grammar.fill.context
        self._whole = _Side(grammar.whole, None)
        self.tokens: list[int] = []  # that were accepted, without a stop id
        self.running = True  # no stop id was accepted
        self.room: float | None = None  # how many characters its string may still have, if that decides which of the string's tokens may come
        self._tracker, self._rest = grammar.tracker, self._whole
        if grammar.rest is not None and self._tracker is not None:
            self._rest = _Side(grammar.rest, grammar.fill.strings.spelled)
            self._characters = grammar.fill.strings.characters
            self._places = [(self._tracker.start, 0)]  # before each token and at the end: the position, and the characters of its string so far

    def side(self) -> _Side:
        """Return the one whose mask is wanted, after all tokens. Raises `DovetailError` if it can't go on."""
        side = self._whole if self.room is None else self._rest
        side.go_to(self.tokens)
        return side

    def fill(self, words: UInt32) -> None:
        self._fill([self], words.reshape(1, -1))

    def accept(self, token: int) -> bool:
        if not self.running or not 0 <= token < self._context.vocab_size:
            return False
        if token in self._context.stop_ids:
            inner = self.side().inner
            ends = bool(inner.is_accepting())
            check(inner)
            self.running = not ends
            return ends
        if self._tracker is None:
            if not self._whole.take(self.tokens, token):
                return False
        elif not self._goes_on(self._tracker, token):
            return False
        self.tokens.append(token)
        return True

    def _goes_on(self, tracker: Tracker, token: int) -> bool:
        """Go on by a token, which it may refuse, but for adding it to the others."""
        position, before = self._places[-1]
        room, characters = self.room, self._characters[token]
        if room is not None and characters:
            if characters > room:
                return False
            self.room = room - characters
        elif not (self._whole if room is None else self._rest).take(self.tokens, token):
            return False
        elif not (characters and position.stays):
            position, characters, begins = tracker.step(position, token, self._context.token_bytes[token] or b"")
            self._places.append((position, characters if begins else before + characters))
            self._find_room()
            return True
        self._places.append((position, before + characters))
        return True

    def _find_room(self) -> None:
        position, characters = self._places[-1]
        longest = position.longest
        self.room = None if longest is None else longest - characters

    def rollback(self, tokens: int) -> None:
        accepted = len(self.tokens) + (not self.running)
        if not 0 <= tokens <= accepted:
            raise ValueError(f"{tokens} tokens can't be taken back: {accepted} were accepted")
        if tokens and not self.running:
            self.running = True
            tokens -= 1
        to = len(self.tokens) - tokens
        self._whole.go_back(self.tokens, to)
        self._rest.go_back(self.tokens, to)
        del self.tokens[to:]
        if self._tracker is not None:
            del self._places[to + 1 :]
            self._find_room()

    def forced(self) -> Sequence[int]:
        if not self.running:
            return ()
        self._whole.go_to(self.tokens)
        return forced_tokens(self, self._context) if self._whole.inner.compute_ff_bytes() else ()

    @property
    def complete(self) -> bool:
        if not self.running or self.room is not None:
            return not self.running
        side = self._rest if self._rest.seen > self._whole.seen else self._whole  # the one that took the last token
        side.go_to(self.tokens)
        return bool(side.inner.is_stopped())


class Fill:
    """Fills the masks of one backend's answers."""

    def __init__(self, context: GrammarContext, strings: StringTokens, threads: int | None) -> None:
        self.context, self.strings = context, strings
        self._threads = threads
        self._most_lanes = min(MOST_LANES, 2 * (threads or os.cpu_count() or 1))
        self._executor: Any = None  # made when several masks are filled for the first time: its threads aren't for nothing
        self._width = -(-(context.vocab_size + (not context.stop_ids)) // 32)  # of the library's masks: it makes up a stop id if there is none
        self._last_word = np.uint32((1 << ((context.vocab_size - 1) % 32 + 1)) - 1)  # its bits that belong to the vocabulary

    def __call__(self, matchers: Sequence[LLMatcher], words: UInt32) -> None:
        """Write the mask of each to its line of words [m, ceil(vocab_size / 32)]."""
        wide = words if words.shape[1] == self._width else np.zeros((len(words), self._width), dtype=np.uint32)
        sides = [(matcher.side(), line) for line, matcher in enumerate(matchers) if matcher.running]
        if len(sides) < len(matchers):
            wide.fill(0)
        if len(sides) > 1:
            self._together(sides, wide)
        for side, line in sides:
            if len(sides) == 1 or side.inner.is_error():
                side.fill(matchers[line].tokens, wide[line])
        if wide is not words:
            words[...] = wide[:, : words.shape[1]]
        if not self.context.stop_ids:
            words[:, -1] &= self._last_word
        for line, matcher in zip(words, matchers, strict=True):
            if matcher.room is not None and matcher.running:
                np.bitwise_or(line, self.strings.words(matcher.room), line)

    def _together(self, sides: list[tuple[_Side, int]], words: UInt32) -> None:
        if self._executor is None:
            self._executor = llguidance.LLExecutor(self._threads)
        by_lane = sorted([(id(side.first), line, side) for side, line in sides])  # so that few threads wait for each other
        rows = [(side.inner, line) for _, line, side in by_lane]
        self._executor.unsafe_compute_mask_ptr(rows, words.ctypes.data, words.strides[0], len(words))
        for lanes, answers in Counter([side.lanes for side, _ in sides]).items():
            lanes.widen(min(1 << (answers - 1).bit_length(), self._most_lanes))


def check(inner: Any) -> None:
    """Raise `DovetailError` if the matcher has failed: it went beyond a limit, or came to where no token of the vocabulary can go on."""
    if inner.is_error():
        raise DovetailError(reason(inner.get_error()))
