"""Position of one answer in llguidance, and the masks of many, for `llguidance_backend.py`.

Two techniques make masks fast. Copies of one of the library's matchers share, under a lock, the
automaton that it builds incrementally: so a grammar has several matchers that share nothing, its
`Lanes`. And in a string of bounded length, the library would try nearly the whole vocabulary. Which
tokens are allowed there without ending the string depends only on the number of characters left
(`positions.py`, `string_tokens.py`); a second matcher, with only the other tokens, provides their
part of the mask.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import llguidance
import numpy as np

from dovetail.api.grammar import Grammar, GrammarContext, Matcher
from dovetail.errors import DovetailError
from dovetail_grammars.failing import Failing, forced_tokens, may_fail, require_none_failed
from dovetail_grammars.positions import Tracker
from dovetail_grammars.string_tokens import StringMask, StringTokens

if TYPE_CHECKING:
    from dovetail.api.grammar import UInt32

MOST_THREADS = 4  # by default: idle ones slow down the engine's thread
MOST_LANES = 16
# Of the automaton of a grammar's first lane; all others together have as many, which bounds memory
MOST_STATES = 250_000
# tokens of an answer that moves to another lane, whose matcher consumes all of them again
MOVED_AT_MOST = 256
HEAD = '%llguidance {"no_forcing": true}\n'  # of each grammar, before the user's text
_IN_PLAIN_WORDS = (  # the library's message -> its meaning to the author of a spec
    (
        r"oneOf constraints are not supported.*",
        "oneOf: the backend llguidance can't verify that its parts exclude each other; try anyOf",
    ),
    (r"Unsatisfiable schema: .*|NoExtensionBias", "nothing follows it"),
    (r"Failed to generate regex for .*", "the bounds are too large for the backend llguidance"),
    (r"decimal literal invalid.*", "the count of a repetition is too large"),
    (
        r"(fuel exhausted|initial lexer configuration|lexer error: too many expressions).*",
        "it is too large for the backend llguidance",
    ),
    (
        r"Parser Error: Current row has .*",
        "more alternatives at one place than the backend llguidance follows (2000)",
    ),
    (
        r"(?i:parser error: )?Too many items .*",
        "it is too ambiguous for the backend llguidance",
    ),
    (r"lexer error", "not valid Lark from here on"),
)


class Lanes:
    """Matchers of one grammar that share nothing, so that masks of different lanes are filled in
    parallel. Initially there is one; more are created, in a thread, once several answers need masks
    together."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        """`make(states)`: returns a new matcher whose automaton has at most `states` states."""
        self._make = make
        # the matcher of each lane, to be copied. The list is replaced, never modified
        self.firsts = [make(MOST_STATES)]
        self._thread: threading.Thread | None = None
        self._answers = 0

    def number(self) -> int:
        """Return a number for a new answer, which distributes answers over the lanes."""
        self._answers += 1
        return self._answers

    def widen(self, wanted: int) -> None:
        """Create further lanes in a thread if there are fewer than `wanted`."""
        if wanted > len(self.firsts) and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(
                target=self._widen, args=(wanted,), name="dovetail-grammar-lanes"
            )
            self._thread.start()

    def _widen(self, wanted: int) -> None:
        self.firsts = [
            *self.firsts,
            *(self._make(MOST_STATES // MOST_LANES) for _ in range(wanted - len(self.firsts))),
        ]


class _Side:
    """The library's matcher for one answer.

    Consumes the answer's tokens lazily. `inner` is a copy of `first`, the lane's. An answer that
    exceeds a limit of another lane continues in the first.
    """

    __slots__ = ("_made_of", "_number", "first", "inner", "lanes", "seen", "tokens")

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.tokens: list[int] = []  # of the answer, for this matcher
        self._number = lanes.number()
        self._made_of: list[Any] | None = None  # the lanes at that time
        self.first: Any = None
        self.inner: Any = None
        self.seen = 0  # number of tokens consumed

    def go_on(self) -> None:
        """Advance `inner` past all tokens. Raises `DovetailError` if it can't continue."""
        firsts = self.lanes.firsts
        if self._made_of is not firsts:
            self._made_of = firsts
            if self.seen <= MOVED_AT_MOST:
                self._move(firsts[self._number % len(firsts)])
        while self.seen < len(self.tokens):
            if self.inner.consume_tokens(self.tokens[self.seen :]):
                self.seen = len(self.tokens)
            elif not self.go_home():
                check(self.inner)

    def _move(self, first: Any) -> None:
        if first is not self.first:
            self.first = first
            self._start_again()

    def _start_again(self) -> None:
        self.inner = self.first.deep_copy()
        self.seen = 0

    def go_home(self) -> bool:
        """Move to the first lane, with no tokens consumed. Returns False if already there."""
        moved = self.first is not self.lanes.firsts[0]
        self._move(self.lanes.firsts[0])
        return moved

    def allows(self, token: int) -> bool:
        """Return True if `token` is allowed next; then `inner` may have consumed it, and it must be
        appended to `tokens`."""
        self.go_on()
        if self.inner.consume_token(token):
            self.seen += 1
            return True
        if not self.go_home():  # after rejecting a token, `inner` is unusable
            self._start_again()
        self.go_on()
        allowed = bool(self.inner.validate_tokens([token]))
        check(self.inner)
        return allowed

    def fill(self, line: UInt32) -> None:
        """Write the library's mask of the next token."""
        self.go_on()
        self.inner.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
        if self.inner.is_error() and self.go_home():
            self.fill(line)
        check(self.inner)

    def go_back(self, to: int) -> None:
        """Roll back to the first `to` tokens."""
        if self.inner is not None and self.inner.is_error():
            self._start_again()
        elif self.seen > to:
            self.inner.rollback(self.seen - to)
            check(self.inner)
            self.seen = to
        del self.tokens[to:]


class LLGrammar(Grammar):
    """Compiled grammar. `rest` and `tracker`: for grammars with strings of bounded length."""

    def __init__(
        self, fill: Fill, whole: Lanes, rest: Lanes | None = None, tracker: Tracker | None = None
    ) -> None:
        self.fill = fill
        self.whole = whole
        self.rest = rest
        self.tracker = tracker

    def begin(self) -> Matcher:
        return LLMatcher(self)


class LLMatcher(Failing):
    """The library's matchers with our own handling of the end: the library accepts any number of
    stop ids without counting them.

    In a string that is constrained only in length, they are asked once, since allowed tokens change
    only with the number of characters left. They consume its tokens when something after it is
    needed; the rest's matcher not even then, since nothing there depends on them.
    """

    def __init__(self, grammar: LLGrammar) -> None:
        self._fill = grammar.fill
        self._context = grammar.fill.context
        self._whole = _Side(grammar.whole)
        self.running = True  # no stop id has been accepted
        # Characters left in its string, if that determines which tokens of the string are allowed
        self.room: float | None = None
        # in a string with `room`: the library's mask of the rest's tokens
        self.known: StringMask | None = None
        self._tracker = grammar.tracker
        self._rest = self._whole
        if grammar.rest is not None and self._tracker is not None:
            self._strings, self._rest = grammar.fill.strings, _Side(grammar.rest)
            self._characters = self._strings.characters
            self._lengths = self._strings.lengths
            # Before each token and at the end: position, characters of its string so far, number
            # of tokens in the rest's matcher
            self._positions = [self._tracker.start]
            self._counts = [0]
            self._spelled = [0]

    @property
    def side(self) -> _Side:
        """The side whose mask is needed."""
        return self._whole if self.room is None else self._rest

    @may_fail
    def fill(self, words: UInt32) -> None:
        self._fill([self], words.reshape(1, -1))

    @may_fail
    def accept(self, token: int) -> bool:
        if not self.running or not 0 <= token < self._context.vocab_size:
            return False
        if token in self._context.stop_ids:
            self._whole.go_on()
            ends = bool(self._whole.inner.is_accepting())
            check(self._whole.inner)
            self.running = not ends
            return ends
        if self._tracker is not None:
            return self._go_on(self._tracker, token)
        if not self._whole.allows(token):
            return False
        self._whole.tokens.append(token)
        self._whole.go_on()
        return True

    def _go_on(self, tracker: Tracker, token: int) -> bool:
        position = self._positions[-1]
        before = self._counts[-1]
        room = self.room
        characters = self._characters[token]
        # restrained: what follows the string may depend on the token
        restrained = room is None or before < position.least
        begins = False
        if room is not None and self._lengths[token] > room:
            return False
        if room is None or not characters:
            known = self.known
            if not (known.allows(token) if known is not None else self.side.allows(token)):
                return False
        if restrained or not characters:
            self._rest.tokens += self._strings.spelled(token)
        if not (characters and position.stays):
            position, characters, begins = tracker.step(
                position, token, self._context.token_bytes[token] or b""
            )
        count = characters if begins else before + characters
        self._whole.tokens.append(token)
        self._positions.append(position)
        self._counts.append(count)
        self._spelled.append(len(self._rest.tokens))
        self.room = None if position.longest is None else position.longest - count
        if begins or restrained or self.room is None:
            self.known = None
        if not position.within:
            self._whole.go_on()
        return True

    def rollback(self, tokens: int) -> None:
        accepted = len(self._whole.tokens) + (not self.running)
        if not 0 <= tokens <= accepted:
            raise ValueError(f"can't roll back {tokens} tokens: {accepted} were accepted")
        if tokens and not self.running:
            self.running = True
            tokens -= 1
        if not tokens:
            return
        to = len(self._whole.tokens) - tokens
        self._whole.go_back(to)
        self.known = None
        if self._tracker is not None:
            del self._positions[to + 1 :], self._counts[to + 1 :], self._spelled[to + 1 :]
            self._rest.go_back(self._spelled[-1])
            longest = self._positions[-1].longest
            self.room = None if longest is None else longest - self._counts[-1]

    @may_fail
    def forced(self) -> Sequence[int]:
        if not self.running:
            return ()
        self._whole.go_on()
        return forced_tokens(self, self._context) if self._whole.inner.compute_ff_bytes() else ()

    @property
    def complete(self) -> bool:
        if self.failure is not None:
            return False
        if not self.running or (self._tracker is not None and self._positions[-1].within):
            return not self.running
        self._whole.go_on()
        return bool(self._whole.inner.is_stopped())

    def know(self, rest: UInt32) -> None:
        """Store the library's mask of the rest's tokens, in a string with `room`."""
        if self._tracker is not None:
            self.known = self._tracker.mask(self._positions[-1], rest)


class Fill:
    """Fills masks for one backend."""

    def __init__(self, context: GrammarContext, strings: StringTokens, threads: int | None) -> None:
        self.context = context
        self.strings = strings
        self._threads = threads or min(MOST_THREADS, os.cpu_count() or 1)
        self._most_lanes = min(MOST_LANES, 2 * self._threads)
        # Created when several masks are first filled at once, since its threads have a cost
        self._executor: Any = None
        # of the library's masks: it adds a stop id if there is none
        self._width = -(-(context.vocab_size + (not context.stop_ids)) // 32)
        # the bits that belong to the vocabulary
        self._last_word = np.uint32((1 << ((context.vocab_size - 1) % 32 + 1)) - 1)

    def __call__(self, matchers: Sequence[LLMatcher], words: UInt32) -> None:
        """Write the mask of each matcher to its row of words [m, ceil(vocab_size / 32)].

        Raises `DovetailError` if one has failed.
        """
        require_none_failed(matchers)
        running = [(matcher, line) for line, matcher in enumerate(matchers) if matcher.running]
        if len(running) < len(matchers):
            words.fill(0)
        asked = [(matcher, line) for matcher, line in running if matcher.known is None]
        if asked:
            self._ask(asked, words)
        for matcher, line in running:
            if matcher.known is not None and matcher.room is not None:
                words[line] = self.strings.within(matcher.known, matcher.room)

    def _ask(self, asked: list[tuple[LLMatcher, int]], words: UInt32) -> None:
        """Write the library's masks of these answers to their rows; in a string with room, also
        store them."""
        wide = (
            words
            if words.shape[1] == self._width
            else np.zeros((len(words), self._width), dtype=np.uint32)
        )
        sides = [(matcher.side, line) for matcher, line in asked]
        if len(sides) > 1:
            self._together(sides, wide)
        for side, line in sides:
            if len(sides) == 1 or side.inner.is_error():
                side.fill(wide[line])
        if wide is not words:
            words[...] = wide[:, : words.shape[1]]
        if not self.context.stop_ids:
            words[:, -1] &= self._last_word
        for matcher, line in asked:
            if matcher.room is not None:
                matcher.know(words[line])

    def _together(self, sides: list[tuple[_Side, int]], words: UInt32) -> None:
        if self._executor is None:
            self._executor = llguidance.LLExecutor(self._threads)
        for side, _ in sides:
            side.go_on()
        # to reduce contention between threads
        by_lane = sorted([(id(side.first), line, side.inner) for side, line in sides])
        rows = [(inner, line) for _, line, inner in by_lane]
        self._executor.unsafe_compute_mask_ptr(
            rows, words.ctypes.data, words.strides[0], len(words)
        )
        for lanes, answers in Counter([side.lanes for side, _ in sides]).items():
            lanes.widen(min(1 << (answers - 1).bit_length(), self._most_lanes))


def check(inner: Any) -> None:
    """Raise `DovetailError` if the matcher has failed: it exceeded a limit, or no token of the
    vocabulary can continue."""
    if inner.is_error():
        raise DovetailError(reason(inner.get_error()))


def reason(error: str) -> str:
    """Return the message of the library's error, without positions in and excerpts of generated
    Lark."""
    lines = [
        re.sub(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?", "", line.strip())
        for line in error.splitlines()
    ]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    sentence = said[0] if said else next(iter(lines), "it failed without a message")
    _, place, sentence = re.split(r"^(\d+\(\d+\): |)", sentence, maxsplit=1)
    if place:  # in a user's grammar, which follows `HEAD`
        line, column = map(int, re.findall(r"\d+", place))
        place = f"line {line - HEAD.count(chr(10))}, column {column}: "
    return place + next(
        (words for theirs, words in _IN_PLAIN_WORDS if re.fullmatch(theirs, sentence, re.DOTALL)),
        sentence,
    )
