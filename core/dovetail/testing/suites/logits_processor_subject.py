"""`LogitsProcessorSubject`: makes logits processors and their arguments for checks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ValidationError

from dovetail.api.graphs import GraphSupport
from dovetail.api.logits_processor import ArgumentContext
from dovetail.errors import describe, shown
from dovetail.testing.checks import fail, require
from dovetail.testing.suite import Suite
from dovetail.testing.suites.logits_processor_bench import (
    VOCAB,
    Asking,
    ProcessorBench,
    lines_of,
    shown_arguments,
)


class LogitsProcessorSubject(Suite):
    """A logits processor, with examples of arguments, on a device."""

    kind = "logits_processor"
    settings = Suite.settings | {"arguments", "device"}

    arguments: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    device: ClassVar[str | None] = None

    def declares(self, capability: str) -> bool:
        """`cuda_graph` is declared by `GraphSupport.ALL` only."""
        if capability == "cuda_graph":
            return bool(self.capabilities.cuda_graph is GraphSupport.ALL)
        return super().declares(capability)

    @property
    def place(self) -> str:
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def model(self) -> type[BaseModel]:
        model: type[BaseModel] = self.component_class.Arguments
        return model

    @cached_property
    def asked(self) -> list[BaseModel]:
        """The examples as `update` gets them."""
        require(
            len(self.arguments),
            "the suite has no example of arguments: set `arguments` to a list of mappings",
        )
        found = []
        for example in self.arguments:
            try:
                first = validated(self.model, example)
            except ValidationError as error:
                fail(
                    f"{self.model.__name__} refuses the example {shown(dict(example))}: {error}; "
                    f"set `arguments` to what requests may say",
                    error,
                )
            found.append(self.sent(first))
        return found

    def bench(
        self, lines: Sequence[Asking], places: Sequence[int] | None = None, **fields: Any
    ) -> ProcessorBench:
        return ProcessorBench(self.make, lines, places, device=self.place, **fields)

    def sent(self, first: BaseModel) -> BaseModel:
        """Return arguments as they arrive on a rank: through JSON, and validated without a
        tokenizer. Requires the same values."""
        try:
            values = json.loads(json.dumps(plain(first), allow_nan=False))
            sent = self.model.model_validate(values, context=context(None))
        except Exception as error:
            fail(
                f"the arguments {shown_arguments(first)} were taken, but can't be sent to the "
                f"ranks: {describe(error)}",
                error,
            )
        told = (
            f"the arguments {shown_arguments(first)} became {shown_arguments(sent)} on the way "
            f"to the ranks"
        )
        require(sent == first and plain(sent) == plain(first), told)
        return sent

    def lines(self, **fields: Any) -> tuple[list[Asking], list[int]]:
        return lines_of(self.asked, **fields)


def encode_bytes(text: str) -> list[int]:
    return list(text.encode())


def validated(model: type[BaseModel], example: Mapping[str, Any]) -> BaseModel:
    return model.model_validate(dict(example), context=context(encode_bytes))


def context(encode: Callable[[str], list[int]] | None, vocab_size: int = VOCAB) -> ArgumentContext:
    return ArgumentContext(encode=encode, vocab_size=vocab_size)


def plain(arguments: BaseModel) -> dict[str, Any]:
    return arguments.model_dump(mode="json", by_alias=True)
