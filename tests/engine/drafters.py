"""Drafters for the tests of the engine: one that is always right, one that never is, and some
between."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from dovetail.api.component import NoOptions
from dovetail.api.drafter import Drafter, DrafterContext, ModelDrafter
from dovetail.request import Request


class Oracle(Drafter):
    """Knows the answers; `answers` gives all tokens of a request."""

    answers: Callable[[str], Sequence[int]]

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(NoOptions(), context)
        self.random = random.Random(0)
        self.asked: list[tuple[str, ...]] = []
        self.finished: list[str] = []

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> Sequence[Sequence[int]]:
        self.asked.append(tuple(request.id for request in requests))
        assert all(1 <= limit <= self.context.max_drafts for limit in most)
        return [
            self.changed(self.right(request, limit))
            for request, limit in zip(requests, most, strict=True)
        ]

    def on_finished(self, request: Request) -> None:
        self.finished.append(request.id)

    def right(self, request: Request, count: int) -> list[int]:
        generated = len(request.output_token_ids)
        tokens = [*self.answers(request.id)[generated : generated + count]]
        return tokens + [0] * (count - len(tokens))  # beyond its end

    def changed(self, tokens: list[int]) -> Sequence[int]:
        return tokens

    def wrong(self, token: int) -> int:
        return (token + 1) % self.context.vocab_size


class Adversary(Oracle):
    """Never right."""

    def changed(self, tokens: list[int]) -> Sequence[int]:
        return [self.wrong(token) for token in tokens]


class Alternating(Oracle):
    """Every other proposal is right, the others from their second token on wrong."""

    turn = 0

    def changed(self, tokens: list[int]) -> Sequence[int]:
        self.turn += 1
        return (
            tokens
            if self.turn % 2
            else [self.wrong(token) if index else token for index, token in enumerate(tokens)]
        )


class Moody(Oracle):
    """Right up to a random token; or short, or silent."""

    def changed(self, tokens: list[int]) -> Sequence[int]:
        right = self.random.randint(0, len(tokens))
        kept = tokens[:right] + [
            self.random.randrange(self.context.vocab_size) for _ in tokens[right:]
        ]
        return kept[: self.random.choice([0, 1, len(kept), len(kept)])]


class FakeModel(ModelDrafter):
    """The executor proposes."""

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(NoOptions(), context)

    @property
    def model(self) -> str:
        return "fake"


DRAFTERS: dict[str, Callable[[DrafterContext], Drafter]] = {
    "oracle": Oracle,
    "adversary": Adversary,
    "alternating": Alternating,
    "moody": Moody,
    "model": FakeModel,
}
