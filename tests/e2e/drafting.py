"""Drafters that know the answers, for tests of whole engines; and an executor whose steps all take
as long, however many lines they have."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from dovetail.api.drafter import Drafter, DrafterContext
from dovetail.api.executor import Capacity, ExecutorContext, Result
from dovetail.request import Request
from dovetail_executors.local import LocalExecutor
from dovetail_executors.tensor import TensorExecutor
from tests.registry.fakes import Site, components

Answers = Mapping[tuple[int, ...], Sequence[Sequence[int]]]  # prompt -> what its requests generate

ANSWERS: dict[tuple[int, ...], Sequence[Sequence[int]]] = {}  # a test sets them
STEP_S = 0.01
NAMES = ("oracle", "alternating", "moody", "random")


class Free:
    """Advances a virtual clock by the same time for each step, however many lines it has. So drafts
    are checked as long as there is hope."""

    context: ExecutorContext

    def start(self) -> Capacity:
        return replace(super().start(), line_costs=((1, STEP_S), (1024, STEP_S)))  # type: ignore[misc]

    def collect(self, handle: Any) -> Result:
        result, started = super().collect(handle), self.context.clock.now()  # type: ignore[misc]
        self.context.clock.wait_until(started + STEP_S)
        return replace(result, started=started, ended=started + STEP_S)


class FreeLines(Free, LocalExecutor):
    pass


class FreeRanks(Free, TensorExecutor):
    pass


class Oracle(Drafter):
    """Always right, as far as there is an answer that begins as the request's output does."""

    def __init__(self, options: BaseModel, context: DrafterContext) -> None:
        super().__init__(options, context)
        self.random = random.Random(0)
        self.turn = 0

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> Sequence[Sequence[int]]:
        return [
            self.changed(self.right(request, limit))
            for request, limit in zip(requests, most, strict=True)
        ]

    def right(self, request: Request, count: int) -> list[int]:
        known = list(request.output_token_ids)
        for answer in ANSWERS.get(request.prompt_token_ids, ()):
            if list(answer[: len(known)]) == known:
                tokens = list(answer[len(known) : len(known) + count])
                return tokens + self.any(count - len(tokens))  # beyond its end
        return self.any(count)

    def any(self, count: int) -> list[int]:
        return [self.random.randrange(self.context.vocab_size) for _ in range(count)]

    def changed(self, tokens: list[int]) -> list[int]:
        return tokens


class Alternating(Oracle):
    """Right, wrong, right up to one token, right up to two, and so on."""

    def changed(self, tokens: list[int]) -> list[int]:
        self.turn += 1
        right = (len(tokens), 0, 1, 2, 3)[self.turn % 5]
        return tokens[:right] + self.any(len(tokens) - right)


class Moody(Oracle):
    """Right up to some token; or shorter; or silent."""

    def changed(self, tokens: list[int]) -> list[int]:
        right = self.random.randint(0, len(tokens))
        drafts = tokens[:right] + self.any(len(tokens) - right)
        return drafts[: self.random.choice((0, 1, len(drafts), len(drafts)))]


class Random(Oracle):
    """Mostly wrong."""

    def right(self, request: Request, count: int) -> list[int]:
        return self.any(count)


def install(site: Site) -> None:
    """Offer all of them as the distribution dovetail-drafting."""
    drafters = [
        f'kind="drafter", name={name!r}, target="tests.e2e.drafting:{name.title()}"'
        for name in NAMES
    ]
    of_executors = 'kind="executor", options="dovetail_executors.options:'
    executors = [
        f'{of_executors}LocalOptions", name="free", target="tests.e2e.drafting:FreeLines"',
        f'{of_executors}TensorOptions", name="free-ranks", target="tests.e2e.drafting:FreeRanks"',
    ]
    site.install(
        "dovetail-drafting", modules={"drafting_plugin": components(*drafters, *executors)}
    )
