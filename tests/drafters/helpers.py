"""Requests that grow by hand, and drafters without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.api.drafter import Drafter, DrafterContext
from dovetail.registry.registry import Registry
from dovetail.request import Request
from dovetail.request.sampling_params import SamplingParams

CONTEXT = DrafterContext(vocab_size=512, max_drafts=8, max_model_len=100_000)


class Growing(Request):
    """A request whose output a test extends."""

    def __init__(
        self, id: str, prompt: Sequence[int], output: Sequence[int] = (), client: str | None = None
    ) -> None:
        super().__init__(id, prompt, SamplingParams(), max_tokens=100_000, client=client)
        self.output = list(output)

    @property
    def output_token_ids(self) -> Sequence[int]:
        return self.output

    @property
    def text(self) -> list[int]:
        return [*self.prompt_token_ids, *self.output]


def drafter(name: str, **options: Any) -> Drafter:
    made: Drafter = Registry.discover().resolve("drafter", name, options).make(CONTEXT)
    return made


def drafts_of(subject: Drafter, request: Request, most: int = 8) -> list[int]:
    return list(subject.propose([request], [most])[0])
