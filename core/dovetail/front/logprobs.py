"""Log-probabilities on their way to the user: `LogprobLog` collects a sample's, `TokenLogprobs` is
what an output holds of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from dovetail.api.executor import HostLogprobs
from dovetail.request.outputs import Logprob, TokenLogprobMap

if TYPE_CHECKING:
    from dovetail.front.token_texts import TextsInOrder, TokenTexts

MOST_STEPS = 64  # whose results a log keeps as they came, other requests' rows and all


class TokenLogprobs(Sequence[TokenLogprobMap]):
    """A map of token ids to `Logprob`s for each of consecutive tokens: the token itself first,
    whose rank may be anything, then the likeliest, best first.

    Reads like a list, equals one with the same maps, and is pickled as one. A map is made whenever
    it is read: made in the engine, those of 256 requests with five alternatives each would take the
    host longer than a step takes the GPU.
    """

    __slots__ = ("_logprobs", "_ranks", "_texts", "_token_ids")

    def __init__(
        self,
        token_ids: NDArray[Any],
        logprobs: NDArray[Any],
        ranks: NDArray[Any],
        texts: TextsInOrder | None,
    ) -> None:
        """`token_ids` [n, 1 + k], `logprobs` [n, 1 + k], `ranks` [n] of the tokens themselves."""
        self._token_ids = token_ids
        self._logprobs = logprobs
        self._ranks = ranks
        self._texts = texts

    @classmethod
    def of_steps(
        cls, steps: Sequence[tuple[HostLogprobs, int]], asked: int, texts: TokenTexts | None
    ) -> TokenLogprobs:
        """Collect the log-probabilities of tokens, each at a position of its step's, and the first
        `asked` alternatives. Adds the tokens to `texts`, None without a tokenizer. Keeps no step's
        arrays."""
        token_ids = np.array([hosts.token_ids[position, : 1 + asked] for hosts, position in steps])
        logprobs = np.array([hosts.logprobs[position, : 1 + asked] for hosts, position in steps])
        ranks = np.array([hosts.ranks[position] for hosts, position in steps])
        return cls(
            token_ids,
            logprobs,
            ranks,
            None if texts is None else texts.append(token_ids[:, 0].tolist()),
        )

    @classmethod
    def joined(cls, parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
        """Return one or more parts of the same tokens, one after the other."""
        token_ids, logprobs, ranks = zip(
            *((part._token_ids, part._logprobs, part._ranks) for part in parts), strict=True
        )
        texts = parts[0]._texts
        for part in parts[1:]:
            if texts is not None and part._texts is not None:
                texts = texts.joined(part._texts)
        return cls(
            np.concatenate(token_ids), np.concatenate(logprobs), np.concatenate(ranks), texts
        )

    def end(self, rest: str) -> None:
        """Add the rest of the text, U+FFFD, to that of the last token, which has none, or only a
        name."""
        if self._texts is not None:
            self._texts.own[-1] = rest + self._texts.own[-1]

    def __len__(self) -> int:
        return len(self._ranks)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobMap: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprobMap]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobMap | list[TokenLogprobMap]:
        if isinstance(index, slice):
            return [self._map(place) for place in range(len(self))[index]]
        return self._map(range(len(self))[index])

    def __iter__(self) -> Iterator[TokenLogprobMap]:
        return map(self._map, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenLogprobs | list | tuple):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def _map(self, index: int) -> TokenLogprobMap:
        ids: list[int] = self._token_ids[index].tolist()
        values: list[float] = self._logprobs[index].tolist()
        texts = [None] * len(ids) if self._texts is None else self._texts.of(index, ids)
        own = ids[0]
        entries: TokenLogprobMap = {own: Logprob(values[0], int(self._ranks[index]), texts[0])}
        for place in range(1, len(ids)):
            token = ids[place]
            if token != own:
                entries[token] = Logprob(values[place], place, texts[place])
        return entries


class LogprobLog:
    """The log-probabilities of a sequence's tokens, as they come: of a sample, or of a prompt."""

    __slots__ = ("_asked", "_parts", "_steps", "_texts", "cumulative")

    def __init__(self, asked: int, texts: TokenTexts | None) -> None:
        """`asked`: alternatives a token. `texts`: None without a tokenizer."""
        self._asked = asked
        self._texts = texts
        self._steps: list[tuple[HostLogprobs, int]] = []
        self._parts: list[TokenLogprobs] = []
        self.cumulative = 0.0  # the sum of the tokens' own

    def add(self, hosts: HostLogprobs, position: int) -> None:
        """Add those of another token, at a position of its step's."""
        self.cumulative += float(hosts.logprobs[position, 0])
        self._steps.append((hosts, position))
        if len(self._steps) >= MOST_STEPS:
            self._pack()

    def end(self) -> None:
        """End the text: a character that it begins and doesn't complete is U+FFFD of its last
        token."""
        self._pack()
        rest = "" if self._texts is None else self._texts.flush()
        if rest and self._parts:
            self._parts[-1].end(rest)

    def read(self) -> Sequence[TokenLogprobMap]:
        """Return all of them, or all since `drain`."""
        self._pack()
        if len(self._parts) > 1:
            self._parts = [TokenLogprobs.joined(self._parts)]
        return self._parts[0] if self._parts else []

    def drain(self) -> Sequence[TokenLogprobMap]:
        """Return what `read` returns, and forget it."""
        new = self.read()
        self._parts = []
        return new

    def _pack(self) -> None:
        if self._steps:
            self._parts.append(TokenLogprobs.of_steps(self._steps, self._asked, self._texts))
            self._steps = []
