"""The grammar backend: it compiles what an answer must follow, and tells which tokens may come next. This one does choices alone."""

import json
from collections.abc import Iterable, Sequence

import numpy as np
from dovetail.api.grammar import Grammar, GrammarBackend, GrammarCapabilities, GrammarContext, GrammarSpec, Matcher
from dovetail.errors import DovetailError, RequestError
from numpy.typing import NDArray
from pydantic import BaseModel


class AcmeBackend(GrammarBackend):
    """A backend that holds an answer to one of several texts."""

    capabilities = GrammarCapabilities(kinds=("choice",), rollback=True)

    def __init__(self, options: BaseModel, context: GrammarContext) -> None:
        super().__init__(options, context)
        self.ids: dict[bytes, list[int]] = {}  # of each text; several ids may have the same
        for id, text in enumerate(context.token_bytes):
            if text and id not in context.stop_ids:
                self.ids.setdefault(text, []).append(id)
        self.longest = max(map(len, self.ids), default=1)  # bytes of a token

    def compile(self, spec: GrammarSpec) -> Grammar:
        if spec.kind != "choice":
            raise RequestError(f"{spec.kind}: the grammar backend acme does only choice")
        try:
            choices = json.loads(spec.text)
            if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
                raise ValueError("expected a list of one string or more")
            return AcmeGrammar(self, [choice.encode() for choice in choices])
        except (ValueError, RecursionError) as error:  # no JSON, or not to be written in UTF-8
            raise RequestError(f"choice: {error}") from None


class AcmeGrammar(Grammar):
    def __init__(self, backend: AcmeBackend, choices: Sequence[bytes]) -> None:
        self.backend, self.choices = backend, choices

    def begin(self) -> Matcher:
        return AcmeMatcher(self.backend, self.choices)


class AcmeMatcher(Matcher):
    """The text so far, and the tokens that it came by."""

    def __init__(self, backend: AcmeBackend, choices: Sequence[bytes]) -> None:
        self.backend, self.choices = backend, choices
        self.stop_ids = backend.context.stop_ids
        self.text = b""
        self.tokens: list[int] = []

    @property
    def ended(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self.stop_ids

    def allowed(self) -> set[int]:
        if self.ended:
            return set()
        start = len(self.text)
        end = start + self.backend.longest
        rests = [choice[start:end] for choice in self.choices if choice.startswith(self.text)]
        ids = {id for rest in rests for text in beginnings(rest) for id in self.backend.ids.get(text, ())}
        if not ids and b"" not in rests:
            raise DovetailError(f"no token of the vocabulary can go on behind {self.text!r}")
        return ids | self.stop_ids if b"" in rests else ids

    def fill(self, words: NDArray[np.uint32]) -> None:
        words.fill(0)
        for id in self.allowed():
            words[id // 32] |= np.uint32(1 << id % 32)

    def accept(self, token: int) -> bool:
        if token not in self.allowed():
            return False
        self.tokens.append(token)
        self.text += self.bytes_of(token)
        return True

    def rollback(self, tokens: int) -> None:
        if tokens > len(self.tokens):
            raise ValueError(f"{tokens} tokens can't be taken back: {len(self.tokens)} were accepted")
        for _ in range(tokens):
            self.text = self.text[: len(self.text) - len(self.bytes_of(self.tokens.pop()))]

    def bytes_of(self, token: int) -> bytes:
        return b"" if token in self.stop_ids else self.backend.context.token_bytes[token] or b""

    @property
    def complete(self) -> bool:
        return self.ended or all(choice == self.text for choice in self.choices if choice.startswith(self.text))


def beginnings(text: bytes) -> Iterable[bytes]:
    return (text[:end] for end in range(1, len(text) + 1))
