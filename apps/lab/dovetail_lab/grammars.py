"""Stand-ins for grammars in a simulation: they allow every token, and are compiled after a delay on
the virtual clock.

The feeder passes them to the engine's own `Constraint`, which holds the request back, has masks
filled and passes each token to them. The simulated executor accounts for the time of this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel

from dovetail.api.clock import Clock
from dovetail.api.component import NoOptions
from dovetail.api.grammar import (
    SPEC_KINDS,
    Grammar,
    GrammarBackend,
    GrammarCapabilities,
    GrammarContext,
    GrammarSpec,
    Matcher,
)
from dovetail.request.structured import Structured
from dovetail_lab.traces.request import stream_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

# `params.structured` of requests with a grammar, as policies see it
RULE = Structured(regex="(?s).*")


class SimulatedGrammars:
    """Factory of an engine's stand-in grammars."""

    def __init__(
        self, clock: Clock, vocab_size: int, median_s: float, sigma: float, seed: int
    ) -> None:
        """Compiling takes `median_s` x exp(`sigma` z), z standard normal, drawn for each request
        from the seed and its id."""
        self._clock = clock
        self._median_s = median_s
        self._sigma = sigma
        self._seed = seed
        self.backend = FreeBackend(NoOptions(), GrammarContext((), frozenset(), vocab_size))

    def compile(self, request_id: str, arrival: float) -> Future[Grammar]:
        """Return the future grammar of a request; compilation starts when the request arrives."""
        share = (stream_of("compiling", self._seed, request_id) + 0.5) / 2**64
        drawn = self._median_s * math.exp(
            self._sigma * NormalDist().inv_cdf(min(share, 1 - 2**-53))
        )
        seconds = round(drawn, 6)  # math libraries differ in the last bits, results mustn't
        return _Compiling(self._clock, arrival + seconds, FreeGrammar(self.backend))


class _Compiling(Future[Grammar]):
    """A grammar whose simulated compilation starts at a given time."""

    def __init__(self, clock: Clock, ready: float, grammar: Grammar) -> None:
        super().__init__()
        self._clock = clock
        self._ready = ready
        self.set_result(grammar)

    def done(self) -> bool:
        return self._clock.now() >= self._ready


class FreeBackend(GrammarBackend):
    """A backend whose grammars allow every token."""

    capabilities = GrammarCapabilities(kinds=SPEC_KINDS, rollback=True)

    def __init__(self, options: BaseModel, context: GrammarContext) -> None:
        super().__init__(options, context)
        bits = np.zeros(-(-context.vocab_size // 32) * 32, np.uint8)
        bits[: context.vocab_size] = 1
        self.everything: NDArray[np.uint32] = (
            np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
        )

    def compile(self, spec: GrammarSpec) -> Grammar:
        return FreeGrammar(self)

    def fill_many(self, matchers: Sequence[Matcher], words: NDArray[np.uint32]) -> None:
        words[:] = self.everything


class FreeGrammar(Grammar):
    def __init__(self, backend: FreeBackend) -> None:
        self._backend = backend

    def begin(self) -> Matcher:
        return FreeMatcher(self._backend)


class FreeMatcher(Matcher):
    """A matcher that accepts every token and never ends an answer: the trace defines its length."""

    def __init__(self, backend: FreeBackend) -> None:
        self._backend = backend

    def fill(self, words: NDArray[np.uint32]) -> None:
        words[:] = self._backend.everything

    def accept(self, token: int) -> bool:
        return True

    def rollback(self, tokens: int) -> None:
        """Do nothing: there is no state."""

    def forced(self) -> Sequence[int]:
        return ()

    @property
    def complete(self) -> bool:
        return False
