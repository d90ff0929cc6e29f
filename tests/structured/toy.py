"""A simple grammar backend for tests: it supports only choices, and certain words make it fail,
wait, crash or fill the memory."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dovetail.api.component import NoOptions
from dovetail.api.executor import ComponentRef
from dovetail.api.grammar import (
    Grammar,
    GrammarBackend,
    GrammarCapabilities,
    GrammarContext,
    GrammarSpec,
    Matcher,
)
from dovetail.errors import RequestError
from dovetail.front.grammar_trials import TrialTimeoutError
from dovetail.front.grammars import QUICK_S

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ToyMatcher(Matcher):
    """Compares what has come with each choice."""

    def __init__(self, choices: Sequence[bytes], context: GrammarContext) -> None:
        self._choices, self._context = choices, context
        self._said: list[bytes] = []
        self._ended = False

    def _text(self) -> bytes:
        return b"".join(self._said)

    def _may_come(self, token: int) -> bool:
        if self._ended:
            return False
        if token in self._context.stop_ids:
            return self._text() in self._choices
        piece = self._context.token_bytes[token]
        return piece is not None and any(
            choice.startswith(self._text() + piece) for choice in self._choices
        )

    def fill(self, words: NDArray[np.uint32]) -> None:
        words[:] = 0
        for token in range(self._context.vocab_size):
            if self._may_come(token):
                words[token // 32] |= 1 << (token % 32)

    def accept(self, token: int) -> bool:
        if not self._may_come(token):
            return False
        if token in self._context.stop_ids:
            self._ended = True
        else:
            self._said.append(self._context.token_bytes[token] or b"")
        return True

    def rollback(self, tokens: int) -> None:
        del self._said[len(self._said) - tokens :]

    def forced(self) -> Sequence[int]:
        return ()

    @property
    def complete(self) -> bool:
        text = self._text()
        return text in self._choices and not any(
            choice != text and choice.startswith(text) for choice in self._choices
        )


class ToyGrammar(Grammar):
    def __init__(self, choices: Sequence[bytes], context: GrammarContext) -> None:
        self._choices, self._context = choices, context

    def begin(self) -> Matcher:
        return ToyMatcher(self._choices, self._context)


class Toy(GrammarBackend):
    """`hangs` compiles until `release` is set, `panics` raises what no library should, `wrong` is
    refused. `crashes` ends its process, and `gorges` takes a lot of memory: both only on trial."""

    capabilities = GrammarCapabilities(kinds=("choice",), rollback=True)

    def __init__(self, options: object = None, context: GrammarContext | None = None) -> None:
        super().__init__(
            NoOptions(), context or GrammarContext([b"a", b"b", None], frozenset({2}), 3)
        )
        self.compiled: list[str] = []
        self.begun = threading.Semaphore(0)  # a permit for each that hangs
        self.release = threading.Event()

    def compile(self, spec: GrammarSpec) -> Grammar:
        self.compiled.append(spec.text)
        if "hangs" in spec.text:
            self.begun.release()
            self.release.wait(60)
        if "crashes" in spec.text:
            os.kill(os.getpid(), signal.SIGSEGV)
        if "gorges" in spec.text:
            bytearray(1 << 34)
        if "panics" in spec.text:
            raise Panic("the native library is beside itself")
        if "wrong" in spec.text:
            raise RequestError("the word isn't liked here")
        return ToyGrammar([choice.encode() for choice in json.loads(spec.text)], self.context)


class ToyTrials:
    """Trials of which some take long: those of `slow` specs longer than `QUICK_S`, until `release`
    is set, and those of `endless` ones any time."""

    def __init__(self, *_: object) -> None:
        self.tried: list[str] = []
        self.release = threading.Event()

    def check(self, spec: GrammarSpec, seconds: float) -> None:
        self.tried.append(spec.text)
        if "endless" in spec.text or ("slow" in spec.text and seconds <= QUICK_S):
            raise TrialTimeoutError
        if "slow" in spec.text:
            self.release.wait(60)

    def prepare(self) -> None:
        pass

    def close(self) -> None:
        self.release.set()


class Panic(BaseException):
    """A panic of Rust as it reaches Python: not an `Exception`."""


class ToyPart:
    """The part of a `ResolvedComponent` that an assembly uses."""

    qualified_name = "tests:toy"

    def load(self) -> type[Toy]:
        return Toy

    def ref(self) -> ComponentRef:
        return ComponentRef("grammar", self.qualified_name, "tests.structured.toy:Toy")

    def make(self, context: GrammarContext) -> Toy:
        return Toy(None, context)
