"""Token ids to text, token by token: never half a character, and nothing of a stop string.

Two things hold text back: bytes of a character whose other bytes are to come, and a suffix that may
turn out to begin a stop string. What has been released never changes, and with the flush it is the
text that decoding all tokens at once gives.

`StopStrings` finds a request's stop strings in streamed text with the automaton of Aho and Corasick
("Efficient string matching", Communications of the ACM 18, 1975): the cost of a character doesn't
depend on the number of strings. A state is the longest suffix of the text that begins a stop
string. On a mismatch the state's *fallback*, the next shorter such suffix, is tried.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from dovetail.end_reason import EndReason
from dovetail.engine.finish import Finish
from dovetail.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dovetail.front.tokenizer import Tokenizer

MARK = "\0"  # begins a symbol that isn't a character: the name of a special token follows
START = 0  # state without a partial match
# tokens that the next ones are decoded after: some tokenizers drop the space of a first word
CONTEXT = 6
# tokens held back as half a character; more are nonsense, and the first of them are released
MAX_HELD = 8
# of text that is kept: a tokenizer written in Python may make half a surrogate pair of a token
ENCODING = (
    "utf-8",
    "surrogatepass",
)
MAX_HALF = 3  # tokens that half a character can have: one of four bytes less one, a byte each


class StopStrings:
    """Automaton of one request's stop strings, of which none is empty. All samples share it and
    keep their own states.

    It reads symbols: the characters of the text, and special tokens that the text leaves out, each
    of which is one symbol. A stop string that has the name of a special token matches the token as
    well as the same characters.
    """

    __slots__ = ("_edges", "_fallback", "_found", "_held", "marks")

    def __init__(self, stops: Sequence[str], special: SpecialNames | None = None) -> None:
        """`special`: the special tokens that the text leaves out."""
        self.marks: dict[int, str] = {}  # special tokens in stop strings, by id: their symbols
        self._edges: dict[tuple[int, str], int] = {}  # (state, next character) -> state
        self._fallback = [START]  # by state
        self._found = [0]  # by state: the length of the longest stop string that ends here, or 0
        # by state: the length of the longest suffix that begins a stop string and isn't all of it
        self._held = [0]
        for stop in stops:
            self._add(stop)
            if special is not None and (marks := special.marks_in(stop)):
                self.marks |= marks
                self._add(special.symbols(stop))
        self._link()

    def advance(self, state: int, text: Sequence[str], stop: bool = True) -> tuple[int, int, int]:
        """Return (state, 0, 0) after the symbols of `text`. If `stop` is true and a stop string
        ends in them: the state at the first such end, the length of the longest one that ends
        there, and the number of symbols after it."""
        edges = self._edges
        fallback = self._fallback
        found = self._found
        for place, char in enumerate(text, start=1):
            while (state, char) not in edges and state != START:
                state = fallback[state]
            state = edges.get((state, char), START)
            if stop and found[state]:
                return state, found[state], len(text) - place
        return state, 0, 0

    def held(self, state: int) -> int:
        """Return how many of the last symbols may turn out to begin a stop string."""
        return self._held[state]

    def _add(self, stop: Sequence[str]) -> None:
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
        """Compute fallbacks, from short states to long ones. A state without a longer match
        inherits its fallback's `_found` and `_held`."""
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


class SpecialNames:
    """Names of a tokenizer's special tokens, as they occur in stop strings."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._ids = {name: token_id for token_id, name in names.items() if name}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def marks_in(self, stop: str) -> dict[int, str]:
        """Return the special tokens in a stop string, by id: their symbols."""
        return {self._ids[name]: MARK + name for name in self._pattern.findall(stop)}

    def symbols(self, stop: str) -> list[str]:
        """Return a stop string as symbols, its special tokens as one each."""
        symbols: list[str] = []
        end = 0
        for match in self._pattern.finditer(stop):
            symbols += [*stop[end : match.start()], MARK + match[0]]
            end = match.end()
        return [*symbols, *stop[end:]]


@lru_cache(maxsize=8)
def special_names(tokenizer: Tokenizer, /) -> SpecialNames:
    return SpecialNames(
        {token_id: tokenizer.decode([token_id]) for token_id in tokenizer.special_ids}
    )


def _spelled(symbols: Sequence[str]) -> str:
    return "".join(
        [symbol if len(symbol) == 1 else symbol.removeprefix(MARK) for symbol in symbols]
    )


class TokenText(Protocol):
    """Text of a growing list of token ids."""

    def append(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that can no longer change: often that of these tokens,
        sometimes none."""

    def flush(self) -> str:
        """Return what was held back, half a character, as U+FFFD."""


def token_text(
    tokenizer: Tokenizer, context: Sequence[int], skip_special_tokens: bool
) -> TokenText:
    """`context`: the tokens before, which are not part of the text."""
    pieces = byte_pieces(tokenizer, skip_special_tokens)
    return (
        ByteLevelText(pieces)
        if pieces is not None
        else WindowText(tokenizer, context, skip_special_tokens)
    )


class BytePieces(dict[int, bytes]):
    """Token id -> its bytes, for a byte-level tokenizer: one whose text is that of its tokens'
    bytes, one after the other."""

    def __init__(self, bytes_of: Callable[[int], bytes], skipped: frozenset[int]) -> None:
        self._bytes_of = bytes_of
        self._skipped = skipped
        self.texts = PieceTexts(self)

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = b"" if token_id in self._skipped else self._bytes_of(token_id)
        return piece

    def joined(self, token_ids: Sequence[int]) -> bytes:
        return b"".join([self[token_id] for token_id in token_ids])


class PieceTexts(dict[int, str | None]):
    """Token id -> its text, None if its bytes aren't whole characters."""

    def __init__(self, pieces: BytePieces) -> None:
        self._pieces = pieces

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._pieces[token_id].decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


@lru_cache(
    maxsize=8
)  # which takes the same argument, given by name, for another: hence by place alone
def byte_pieces(tokenizer: Tokenizer, skip_special_tokens: bool, /) -> BytePieces | None:
    """None: the tokenizer isn't a byte-level one."""
    bytes_of = tokenizer.bytes_of
    return (
        None
        if bytes_of is None
        else BytePieces(bytes_of, tokenizer.special_ids if skip_special_tokens else frozenset())
    )


class ByteLevelText:
    """For byte-level tokenizers: looks up each token's bytes and decodes them as UTF-8. Between
    characters, a token of whole ones is looked up as text."""

    __slots__ = ("_between", "_decoder", "_pieces", "_texts")

    def __init__(self, pieces: BytePieces) -> None:
        self._pieces = pieces
        self._texts = pieces.texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._between = True  # no bytes of a character wait for its others

    def append(self, token_ids: Sequence[int]) -> str:
        if (
            self._between
            and len(token_ids) == 1
            and (text := self._texts[token_ids[0]]) is not None
        ):
            return text
        text = self._decoder.decode(self._pieces.joined(token_ids))
        self._between = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        self._between = True
        return self._decoder.decode(b"", True)


class WindowText:
    """For any tokenizer: decodes the new tokens together with a few before them, since what they
    look like depends on those.

    The window starts where text was once released, so that it doesn't cut a character. Where a
    tokenizer spells broken UTF-8 by another rule than byte by byte, broken output (and it alone)
    may differ from decoding all at once.
    """

    __slots__ = ("_before", "_held", "_ids", "_mark", "_skip", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = self._window(context)  # [context | held back]
        self._held = 0  # how many are held back
        self._mark = len(self._ids)  # in the context, where the next window starts
        self._before = self._decode(self._ids)  # the context's text

    def append(self, token_ids: Sequence[int]) -> str:
        return "".join([self._append(token_id) for token_id in token_ids])

    def flush(self) -> str:
        return self._release(self._decode(self._ids), 0) if self._held else ""

    def following(self, token_id: int) -> str:
        """Return what `append` would for one more token, without adding it."""
        text = self._decode([*self._ids, token_id])
        return "" if text.endswith("\ufffd") else text[len(self._before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip)

    def _append(self, token_id: int) -> str:
        self._ids.append(token_id)
        self._held += 1
        text = self._decode(self._ids)
        if not text.endswith("\ufffd"):
            return self._release(text, 0)
        if self._held > MAX_HELD:
            return self._release(self._decode(self._ids[:-MAX_HALF]), MAX_HALF)
        return ""

    def _release(self, text: str, held: int) -> str:
        """`text` is the window's, without its last `held` tokens."""
        new = text[len(self._before) :]
        self._before = text
        self._held = held
        settled = len(self._ids) - held
        if settled - self._mark >= CONTEXT:
            del self._ids[: self._mark]
            self._mark = settled - self._mark
            self._before = self._decode(self._ids[: self._mark])
        return new

    def _window(self, context: Sequence[int]) -> list[int]:
        """The last of these tokens: at least `CONTEXT`, and more until they have text and start
        with a whole character."""
        for size in range(CONTEXT, 4 * CONTEXT):
            ids = list(context[-size:])
            text = self._decode(ids)
            if size >= len(context) or (text.strip() and not text.startswith("\ufffd")):
                break
        return ids


class IncrementalText:
    """The text of one sample. `text` is all that is certain; with stop strings, a suffix that could
    begin one is not.

    A stop string matches as soon as its last character is there, wherever the tokens' borders are;
    of those that end together the one that began first. One that ends before `min_tokens` tokens is
    text like any other.
    """

    __slots__ = (
        "_held",
        "_include",
        "_min_tokens",
        "_num_tokens",
        "_released",
        "_state",
        "_stops",
        "_taken",
        "_tokens",
        "stopped",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        stops: StopStrings | None,
    ) -> None:
        """`stops`: those of `params`, which the samples of a request share; None if it has none."""
        self._tokens = token_text(tokenizer, prompt_token_ids, params.skip_special_tokens)
        self._stops = stops
        self._state = START
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        # UTF-8. Not a list of pieces: the garbage collector would go through those of all running
        # requests
        self._released = bytearray()
        self._taken = 0  # bytes of it, as deltas
        self._held: list[str] = []  # symbols that could begin a stop string
        self.stopped: str | None = None  # the stop string that ended it

    @property
    def text(self) -> str:
        """The text released so far."""
        return self._released.decode(*ENCODING)

    def take_delta(self) -> str:
        """Return the text that was released since the last call."""
        delta = self._released[self._taken :].decode(*ENCODING)
        self._taken = len(self._released)
        return delta

    def delta_of(self, token_ids: Sequence[int]) -> str:
        """Add tokens of a request without stop strings, all of whose deltas were taken, and return
        the delta. `text` will be without it."""
        return self._tokens.append(token_ids)

    def append(self, token_ids: Sequence[int]) -> None:
        """More tokens; those behind one that completes a stop string are dropped."""
        if self._stops is None:
            text = self._tokens.append(token_ids)
            self._released += text.encode(*ENCODING)
            return
        for token_id in token_ids:
            if self.append_and_check(token_id) is not None:
                return

    def see(self, token: int) -> Finish | None:
        """As `append_and_check`, for the engine: a `TokenWatcher`."""
        matched = self.append_and_check(token)
        return None if matched is None else Finish(EndReason.STOP, matched)

    def append_and_check(self, token_id: int) -> str | None:
        """One more token of a request with stop strings; the one that it completes, or None. From
        the match on (or from its end, with `include_stop_str_in_output`) nothing becomes text."""
        if self.stopped is not None or self._stops is None:
            return self.stopped
        self._num_tokens += 1
        new = list(self._tokens.append((token_id,)))
        if token_id in self._stops.marks:
            new.append(self._stops.marks[token_id])
        self._state, length, behind = self._stops.advance(
            self._state, new, self._num_tokens >= self._min_tokens
        )
        window = self._held + new
        if length:
            end = len(window) - behind
            start = end - length
            self.stopped = _spelled(window[start:end])
            self._put(window[:start], [])
            if self._include:
                self._put(self.stopped, [])
            return self.stopped
        held = len(window) - self._stops.held(self._state)
        self._put(window[:held], window[held:])
        return None

    def flush(self, stopped: bool = False) -> None:
        """End the text. What was held back is released, unless a stop string ended it (`stopped`,
        or as seen here)."""
        if not stopped and self.stopped is None:
            self._put([*self._held, *self._tokens.flush()], [])
        self._held = []

    def _put(self, symbols: Sequence[str], held: list[str]) -> None:
        text = "".join([symbol for symbol in symbols if len(symbol) == 1])
        self._released += text.encode(*ENCODING)
        self._held = held
