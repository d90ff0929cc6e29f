"""Backend `xgrammar`: the library compiles a grammar with the whole vocabulary.

Everything is given to it as GBNF, since it silently ignores parts of other notations.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import xgrammar
from dovetail.api.grammar import (
    Grammar,
    GrammarBackend,
    GrammarCapabilities,
    GrammarContext,
    GrammarSpec,
    Matcher,
)
from dovetail.errors import DovetailError, RequestError
from numpy.typing import NDArray

from dovetail_xgrammar.options import XGrammarOptions
from dovetail_xgrammar.regexes import gbnf
from dovetail_xgrammar.schemas import grammar_of, grammar_of_objects, literal

UInt32 = NDArray[np.uint32]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

COMPILING_THREADS = min(8, os.cpu_count() or 1)
MOST_MASK_S = 0.25  # of a core: the library has no limit of its own for ambiguous grammars
MAX_REASON = 300  # characters of a library's explanation
_NOISE = re.compile(r"\[[\d:]+\] \S+?:\d+: |Check failed: \(.*\) is false: ")


class XGrammar(GrammarBackend):
    """See https://github.com/mlc-ai/xgrammar."""

    capabilities = GrammarCapabilities(
        kinds=("json_schema", "json_object", "regex", "grammar", "choice"), rollback=True
    )
    options: XGrammarOptions

    def __init__(self, options: XGrammarOptions, context: GrammarContext) -> None:
        super().__init__(options, context)
        vocabulary = [
            b"" if id in context.stop_ids else text or b""
            for id, text in enumerate(context.token_bytes)
        ]
        vocabulary += _parting_texts(vocabulary)
        self._masks = Masks(context, -(-len(vocabulary) // 32))
        tokenizer = xgrammar.TokenizerInfo(
            vocabulary,
            xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary),
            stop_token_ids=sorted(context.stop_ids),
        )
        # the engine caches compiled grammars
        self._compiler = xgrammar.GrammarCompiler(
            tokenizer, max_threads=COMPILING_THREADS, cache_enabled=False
        )
        self._batch: Any = None  # made when first needed, since its threads have a cost

    def compile(self, spec: GrammarSpec) -> Grammar:
        if spec.kind not in self.capabilities.kinds:
            raise RequestError(f"{spec.kind}: the backend xgrammar doesn't support this kind")
        try:
            return XGrammarGrammar(self._compiler.compile_grammar(written(spec)), self._masks)
        except RecursionError:
            raise RequestError(f"{spec.kind}: it is nested too deeply") from None
        except Exception as error:  # whatever the library raises is this request's error
            lines = str(error).splitlines() or [type(error).__name__]
            reason = _NOISE.sub("", lines[0])[:MAX_REASON]
            raise RequestError(f"{spec.kind}: {reason}") from None

    def fill_many(self, matchers: Sequence[Matcher], words: UInt32) -> None:
        ours = [matcher for matcher in matchers if isinstance(matcher, XGrammarMatcher)]
        for matcher in ours:
            matcher.require_not_failed()
        running = [(matcher, line) for line, matcher in enumerate(ours) if matcher.running]
        if len(running) < 2:
            super().fill_many(matchers, words)
            return
        if len(running) < len(matchers):
            words.fill(0)
        if self._batch is None:
            self._batch = xgrammar.BatchGrammarMatcher(self.options.threads or "auto")
        begun = time.monotonic()
        with self._masks.in_full(words) as wide:
            self._batch.batch_fill_next_token_bitmask(
                [matcher.inner for matcher, _ in running],
                wide.view(np.int32),
                [line for _, line in running],
            )
        for matcher, line in running:
            matcher.require_some(words[line])
        if time.monotonic() - begun > MOST_MASK_S:  # find out whether it is the fault of one
            super().fill_many(matchers, words)


def written(spec: GrammarSpec) -> str:
    """Return a spec as GBNF. Raises `ValueError` for what is wrong or not supported."""
    if spec.kind == "json_schema":
        return grammar_of(spec.text)
    if spec.kind == "json_object":
        return grammar_of_objects()
    if spec.kind == "regex":
        return f"root ::= {gbnf(spec.text)}"
    if spec.kind == "choice":
        return f"root ::= {' | '.join(map(literal, _choices(spec.text)))}"
    if not re.search(r"^\s*root\s*::=", spec.text, re.MULTILINE):
        raise ValueError("the backend xgrammar takes grammars in GBNF, with a rule `root`")
    return spec.text


def _choices(text: str) -> list[str]:
    choices = json.loads(text)
    is_list = isinstance(choices, list) and bool(choices)
    if not is_list or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("expected a list of one string or more")
    for choice in choices:
        choice.encode()  # raises `ValueError` for half a surrogate pair
    return choices


class Masks:
    """The library's masks, which may be wider than ours and have bits beyond the vocabulary."""

    def __init__(self, context: GrammarContext, width: int) -> None:
        """`width`: of the library's masks, in words."""
        self.context = context
        self._width = width
        bits = (context.vocab_size - 1) % 32 + 1
        self._last_word = np.uint32((1 << bits) - 1)  # the bits that belong to the vocabulary

    @contextmanager
    def in_full(self, words: UInt32) -> Iterator[UInt32]:
        """Yield masks [..., width] for the library to fill, and then copy them to `words`."""
        fits = words.shape[-1] == self._width
        wide = words if fits else np.zeros((*words.shape[:-1], self._width), dtype=np.uint32)
        yield wide
        if not fits:
            words[...] = wide[..., : words.shape[-1]]
        words[..., -1] &= self._last_word

    def fill(self, inner: Any, words: UInt32) -> None:
        with self.in_full(words) as wide:
            inner.fill_next_token_bitmask(wide.view(np.int32).reshape(1, -1))

    def only_end(self, inner: Any) -> bool:
        """Return True if only a stop id is allowed."""
        words = np.zeros(-(-self.context.vocab_size // 32), dtype=np.uint32)
        self.fill(inner, words)
        for id in self.context.stop_ids:
            words[id // 32] &= ~np.uint32(1 << id % 32)
        return not words.any()


class XGrammarGrammar(Grammar):
    def __init__(self, compiled: Any, masks: Masks) -> None:
        self._compiled = compiled
        self._masks = masks

    def begin(self) -> Matcher:
        return XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._masks)


def _may_fail(
    call: Callable[Concatenate["XGrammarMatcher", Arguments], Result],
) -> Callable[Concatenate["XGrammarMatcher", Arguments], Result]:
    """Decorate a method: once it has raised, all such methods of its matcher raise."""

    @wraps(call)
    def checked(
        self: "XGrammarMatcher", /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        self.require_not_failed()
        try:
            return call(self, *args, **kwargs)
        except DovetailError as error:
            self.failure = str(error)
            raise

    return checked


class XGrammarMatcher(Matcher):
    """The library's matcher, plus a flag for stop ids, after which the library fills no mask."""

    def __init__(self, inner: Any, masks: Masks) -> None:
        self.inner = inner
        self.running = True  # no stop id has been accepted
        self.failure: str | None = None  # why it can't continue
        self._masks = masks
        self._accepted = 0  # tokens, including a stop id

    def require_not_failed(self) -> None:
        if self.failure is not None:
            raise DovetailError(self.failure)

    def require_some(self, words: UInt32) -> None:
        """Raise `DovetailError` if neither a token nor an end is allowed."""
        if not words.any() and not self.inner.is_completed():
            raise DovetailError("no token of the vocabulary can continue the answer")

    @_may_fail
    def fill(self, words: UInt32) -> None:
        if not self.running:
            words.fill(0)
            return
        begun = time.thread_time()
        self._masks.fill(self.inner, words)
        if time.thread_time() - begun > MOST_MASK_S:
            raise DovetailError(
                f"a mask takes more than {MOST_MASK_S:g} s: "
                "the grammar is too ambiguous for the backend xgrammar"
            )
        self.require_some(words)

    @_may_fail
    def accept(self, token: int) -> bool:
        context = self._masks.context
        if not self.running or not 0 <= token < context.vocab_size:
            return False
        if token in context.stop_ids:
            accepted = bool(self.inner.is_completed())
            self.running = not accepted
        else:
            accepted = bool(self.inner.accept_token(token))
        self._accepted += accepted
        return accepted

    def rollback(self, tokens: int) -> None:
        if not 0 <= tokens <= self._accepted:
            raise ValueError(f"can't roll back {tokens} tokens: {self._accepted} were accepted")
        self._accepted -= tokens
        if tokens and not self.running:
            self.running = True
            tokens -= 1
        if tokens:
            self.inner.rollback(tokens)

    @property
    def complete(self) -> bool:
        if not self.running:
            return True
        return bool(self.inner.is_completed()) and self._masks.only_end(self.inner)


def _parting_texts(vocabulary: Sequence[bytes]) -> list[bytes]:
    """Return texts beyond the vocabulary that make the library's table of prefixes correct.

    In the sorted order of texts, the library takes a token for a continuation of an earlier one if
    that occurs *anywhere* in it (as `":` in `"a":`), and then forbids both when it forbids the
    first. A text between the two, which begins like the second, separates them.
    """
    added: list[bytes] = []
    while True:
        parting: list[bytes] = []
        continued: list[bytes] = []
        for text in sorted(filter(None, [*vocabulary, *added])):
            while continued and continued[-1] not in text:
                continued.pop()
            if continued and not text.startswith(continued[-1]):
                parting.append(_parting(continued[-1], text))
            continued.append(text)
        if not parting:
            return added
        added += dict.fromkeys(parting)


def _parting(before: bytes, text: bytes) -> bytes:
    """Return the prefix of `text` up to and including its first byte that differs."""
    pairs = enumerate(zip(before, text, strict=False))
    shorter = min(len(before), len(text))
    same = next((number for number, (one, other) in pairs if one != other), shorter)
    return text[: same + 1]
