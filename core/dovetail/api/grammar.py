"""The grammar backend: it compiles what an answer must follow (a JSON Schema, a regular expression …) and tells, token by token, which may come next.

The engine compiles in a thread pool while the request waits, then asks one `Matcher` a sample for a mask before each token is sampled, and tells it
the token that was. This file doesn't need torch: masks are numpy arrays, one bit a token id.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from pydantic import BaseModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    UInt32 = NDArray[np.uint32]

SpecKind = Literal["json_schema", "json_object", "regex", "grammar", "choice", "structural_tag"]
SPEC_KINDS: tuple[SpecKind, ...] = get_args(SpecKind)


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A rule that an answer must follow. `text` is, by kind:

    - `json_schema`: a JSON Schema, as JSON. A backend may allow less than the schema does (properties in their order alone, no white space, strings
      of a given length only without escapes), never more.
    - `json_object`: empty. Any JSON object.
    - `regex`: a regular expression that the whole answer matches, in the syntax of Python's `re` with the flag ASCII, as far as it is regular.
    - `grammar`: a context-free grammar, in Lark's syntax with a rule `start`, or in GBNF's with a rule `root`.
    - `choice`: a JSON list of strings, of which the answer is one.
    - `structural_tag`: JSON, `{"structures": [{"begin": "<f>", "schema": {…}, "end": "</f>"}], "triggers": ["<f"]}`. Text is free up to the first
      trigger. There one of the structures stands that begin with it, and behind that text is free again. With `"at_least_one": true` the
      answer begins with a structure, with `"stop_after_first": true` it ends behind the first. With `"separator": "\\n"` there is no free text: the
      answer is structures alone, with that string between them. Whether free text may have bytes that aren't UTF-8 is the backend's affair.
    """

    kind: SpecKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class GrammarContext:
    """Constants that a backend receives when it is made."""

    token_bytes: Sequence[bytes | None]  # [vocab_size] of each id. None, and b"": it is never text, and may never come unless it is a stop id
    stop_ids: frozenset[int]  # ids that end an answer, and aren't text whatever their bytes are; perhaps none
    vocab_size: int  # of the model's logits


@dataclass(frozen=True, slots=True)
class GrammarCapabilities:
    """The features that a backend declares: `kinds` of specs that it compiles; `rollback`, without which `Matcher.rollback` isn't called; `forced`,
    whether `Matcher.forced` ever finds something."""

    kinds: tuple[SpecKind, ...] = SPEC_KINDS
    rollback: bool = True
    forced: bool = True


class Matcher(ABC):
    """The state of one answer in its grammar. One thread at a time calls it.

    A matcher that can't go on (its library gave up at a limit, no token of the vocabulary fits) raises `DovetailError` with the reason in `fill`,
    `accept` or `forced`, and from then on in each of them. The engine ends that request, and no other.
    """

    @abstractmethod
    def fill(self, words: UInt32) -> None:
        """Write the mask of the next token to words [ceil(vocab_size / 32)], contiguous: bit `id % 32` of word `id // 32` is 1 if the id may come,
        else 0. An id may come if some text that follows the grammar goes on by its bytes. A stop id's bit is 1 just when the answer may end here.
        Bits beyond the vocabulary are 0. The matcher stays as it is."""

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Go on by one token. Return False, with nothing changed, if it may not come. A stop id is accepted when the answer may end; then nothing
        else may come."""

    @abstractmethod
    def rollback(self, tokens: int) -> None:
        """Take back the last `tokens` accepted ones, stop ids among them. Raises `ValueError` if there weren't so many."""

    @abstractmethod
    def forced(self) -> Sequence[int]:
        """Return tokens that must come next in this order, each the only one that may, as far as that is found out: perhaps none, never a stop id.
        The matcher stays as it is."""

    @property
    @abstractmethod
    def complete(self) -> bool:
        """True if nothing but an end may come."""


class Grammar(ABC):
    """A compiled spec. Requests and threads share it."""

    @abstractmethod
    def begin(self) -> Matcher:
        """Return a matcher at the beginning of an answer. Takes microseconds."""


class GrammarBackend(ABC):
    """Compiles specs. Made once an engine, when the first request asks for a grammar."""

    capabilities = GrammarCapabilities()
    options: BaseModel

    def __init__(self, options: BaseModel, context: GrammarContext) -> None:
        self.options, self.context = options, context

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> Grammar:
        """Compile `spec`. Several threads call this at once, and it may take long: the engine gives up waiting after its time limit.

        Raises `RequestError` that names what is wrong with the spec, or the feature that this backend can't do: it never ignores one. Whatever a
        library raises because of a spec becomes a `RequestError` too.
        """

    def fill_many(self, matchers: Sequence[Matcher], words: UInt32) -> None:
        """`fill` of each of these distinct matchers, all begun by this backend's grammars, to its line of words [m, ceil(vocab_size / 32)], which are
        contiguous. A backend that can use several cores overrides it. Raises `DovetailError` if one has failed: `fill` of each tells which."""
        for matcher, line in zip(matchers, words, strict=True):
            matcher.fill(line)
