"""Grammar backend: compiles constraints on an answer (a JSON Schema, a regular expression …) and
computes which tokens may come next.

The engine compiles in a thread pool while the request waits. It has one `Matcher` per sample, asks
it for a mask before each token is sampled, and passes it the sampled token. This module doesn't
need torch: masks are numpy arrays, one bit per token id.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from pydantic import BaseModel

from dovetail.errors import DovetailError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    UInt32 = NDArray[np.uint32]

# Later versions may add kinds: a backend declares those that it knows.
SpecKind = Literal["json_schema", "json_object", "regex", "grammar", "choice", "structural_tag"]
SPEC_KINDS: tuple[SpecKind, ...] = get_args(SpecKind)


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """Constraint on an answer. Meaning of `text` by kind:

    - `json_schema`: a JSON Schema, as JSON. A backend may allow less than the schema (only one
      order of properties, no white space, no escapes in strings of bounded length), never more.
    - `json_object`: empty. Any JSON object.
    - `regex`: a regular expression that the whole answer matches, in the syntax of Python's `re`
      with the flag ASCII, limited to regular languages.
    - `grammar`: a context-free grammar, in Lark's syntax with a rule `start`, or in GBNF's with a
      rule `root`.
    - `choice`: a JSON list of strings; the answer is one of them.
    - `structural_tag`: JSON, `{"structures": [{"begin": "<f>", "schema": {…}, "end": "</f>"}],
      "triggers": ["<f"]}`. Text is free up to the first trigger. From there, one of the structures
      that begin with the trigger follows, and after it text is free again. With
      `"at_least_one": true` the answer begins with a structure, with `"stop_after_first": true` it
      ends after the first. With `"separator": "\\n"` there is no free text: the answer consists of
      structures joined by that string. Whether free text may have bytes that aren't UTF-8 is up to
      the backend.
    """

    kind: SpecKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class GrammarContext:
    """Constants passed to a backend's constructor."""

    # [vocab_size] by id. None or b"": never text, allowed only if it is a stop id
    token_bytes: Sequence[bytes | None]
    # ids that end an answer, not text whatever their bytes are; may be empty
    stop_ids: frozenset[int]
    vocab_size: int  # of the model's logits


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarCapabilities:
    """Features that a backend supports; later versions may add some, which are off by default.

    `kinds`: of specs that it compiles; requests with others are rejected. `rollback`:
    `Matcher.rollback` may be called; without it, drafts of constrained answers aren't checked.
    `forced`: `Matcher.forced` may return tokens, which become drafts."""

    kinds: tuple[SpecKind, ...] = ()
    rollback: bool = False
    forced: bool = False


class Matcher(ABC):
    """Position of one answer in its grammar. One thread at a time calls it.

    A matcher that can't continue (its library reached a limit, no token of the vocabulary fits)
    raises `DovetailError` with the reason in `fill`, `accept` or `forced`, and from then on in each
    of them. The engine ends that request only.
    """

    @abstractmethod
    def fill(self, words: UInt32) -> None:
        """Write the mask of the next token to words [ceil(vocab_size / 32)], contiguous: bit
        `id % 32` of word `id // 32` is 1 if the id is allowed, otherwise 0. An id is allowed if its
        bytes continue the answer to a prefix of some text of the grammar. A stop id is allowed
        exactly if the answer may end here. Bits beyond the vocabulary are 0. The matcher doesn't
        change."""

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Advance by one token. Returns False, with nothing changed, if it isn't allowed. A stop id
        is accepted when the answer may end; after it nothing is allowed."""

    def rollback(self, tokens: int) -> None:
        """Undo the last `tokens` accepted tokens, including stop ids. Raises `ValueError` if fewer
        were accepted. Not called, and raises by default, without the capability `rollback`."""
        raise DovetailError(f"{type(self).__name__} can't roll back")

    def forced(self) -> Sequence[int]:
        """Return the next tokens as far as they are known to be determined (each is the only
        allowed one); may be empty, never contains a stop id. The matcher doesn't change. Not
        called without the capability `forced`; empty by default."""
        return ()

    @property
    @abstractmethod
    def complete(self) -> bool:
        """True if only the end is allowed."""


class Grammar(ABC):
    """Compiled spec, shared by requests and threads."""

    @abstractmethod
    def begin(self) -> Matcher:
        """Return a matcher at the start of an answer. Takes microseconds."""


class GrammarBackend(ABC):
    """Compiles specs. Created once per engine, on the first request with a grammar."""

    capabilities = GrammarCapabilities()
    options: BaseModel

    def __init__(self, options: BaseModel, context: GrammarContext) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> Grammar:
        """Compile `spec`. Several threads call this at once. The engine first calls it in another
        process, which it ends after a time limit.

        Raises `RequestError` that names the error in the spec, or the feature that this backend
        doesn't support: features are never ignored. Any exception that a library raises because of
        a spec becomes a `RequestError` too.
        """

    def accept_many(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> Sequence[bool]:
        """Advance distinct matchers by one token each, where that can be done together. Return for
        each whether it was advanced. The others are unchanged, unless they have failed: the engine
        calls `accept` of each, which tells why. Raises nothing. Override it to use several cores;
        the default advances none."""
        return [False] * len(matchers)

    def fill_many(self, matchers: Sequence[Matcher], words: UInt32) -> None:
        """Call `fill` of each of these distinct matchers with its row of words [m, ceil(vocab_size
        / 32)], which are contiguous. Override it to use several cores. Raises `DovetailError` if
        one has failed: calling `fill` of each tells which."""
        for matcher, line in zip(matchers, words, strict=True):
            matcher.fill(line)

    def start_fill(self, matchers: Sequence[Matcher], words: UInt32) -> Callable[[], None] | None:
        """Begin what `fill_many` does, and return a function that waits for its end and raises as
        `fill_many` does. Until the engine has called it, it uses neither these matchers nor
        `words`, and calls no method of the backend but `compile`. None: the engine calls
        `fill_many`, as it does by default. Override it if masks are filled without Python's lock:
        the engine plans the next step meanwhile, and a thread that needed the lock would wait for
        it."""
        return None
