"""Logits processors for tests of whole engines. The order of the first two matters; `after` is
their plain twin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from dovetail.api.graphs import GraphSupport
from dovetail.api.logits_processor import (
    ArgumentContext,
    LogitsProcessor,
    LogitsProcessorCapabilities,
    ProcessedRow,
)
from dovetail.api.sampler import Lines
from tests.registry.fakes import Site, components

LONGEST = 16


class ShunArguments(BaseModel):
    model_config = ConfigDict(extra="forbid")
    amount: float = Field(2.0, gt=0, le=100, strict=True)
    window: int = Field(8, ge=1, le=LONGEST, strict=True)
    spare: list[int] = []  # never shunned; as texts or ids

    @field_validator("spare", mode="before")
    @classmethod
    def _ids(cls, given: Any, info: ValidationInfo) -> Any:
        encode = ArgumentContext.of(info).encode
        return (
            [token for one in given for token in (encode(one) if isinstance(one, str) else [one])]
            if isinstance(given, list)
            else given
        )


class Shun(LogitsProcessor):
    """Subtracts `amount` from the logits of the last `window` tokens."""

    Arguments = ShunArguments
    capabilities = LogitsProcessorCapabilities(cuda_graph=GraphSupport.ALL)

    def prepare(self, max_rows: int) -> None:
        device = self.context.device
        self.amounts = torch.zeros(max_rows + 1, device=device)
        self.windows = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self.spared = torch.zeros(
            max_rows + 1, self.context.vocab_size, dtype=torch.bool, device=device
        )
        self.back = 1 + torch.arange(LONGEST, device=device)

    def update(self, removed: Sequence[int], added: Sequence[ProcessedRow]) -> None:
        for row in removed:
            self.amounts[row] = 0.0
        for one in added:
            row, arguments = one.row, one.arguments
            assert isinstance(arguments, ShunArguments)
            self.amounts[row], self.windows[row] = arguments.amount, arguments.window
            self.spared[row] = False
            self.spared[row, arguments.spare] = True

    def apply(self, logits: torch.Tensor, lines: Lines) -> None:
        places = self.context.history.lengths(lines).long()[:, None] - self.back
        near = (places >= 0) & (self.back <= self.windows[lines.rows][:, None])
        ids = self.context.history.token_ids[lines.rows[:, None], places.clamp(min=0)].long()
        shunned = (
            torch.zeros_like(logits, dtype=torch.int32).scatter_add_(1, ids, near.to(torch.int32))
            > 0
        )
        logits.sub_((shunned & ~self.spared[lines.rows]) * self.amounts[lines.rows][:, None])


class ClipArguments(BaseModel):
    width: float = Field(gt=0)


class Clip(LogitsProcessor):
    """Forbids tokens whose logits are more than `width` below the largest."""

    Arguments = ClipArguments
    capabilities = LogitsProcessorCapabilities(cuda_graph=GraphSupport.ALL)

    def prepare(self, max_rows: int) -> None:
        self.widths = torch.full((max_rows + 1,), torch.inf, device=self.context.device)

    def update(self, removed: Sequence[int], added: Sequence[ProcessedRow]) -> None:
        for row in removed:
            self.widths[row] = torch.inf
        for one in added:
            row, arguments = one.row, one.arguments
            assert isinstance(arguments, ClipArguments)
            self.widths[row] = arguments.width

    def apply(self, logits: torch.Tensor, lines: Lines) -> None:
        least = logits.amax(-1) - self.widths[lines.rows]
        logits.masked_fill_(logits < least[:, None], -torch.inf)


class FaultyArguments(BaseModel):
    at: Literal["nowhere", "update", "removal", "apply", "nan", "inf", "nothing"] = "nowhere"
    length: int = 0  # of the history from which on `apply` goes wrong
    own: Any = None

    @field_validator("own")
    @classmethod
    def _unlike_itself(cls, given: Any) -> Any:
        if given == "changed":
            raise ValueError("not what it was")
        if given == "unplain":
            return object()
        return None if given is None else "changed"


class Faulty(LogitsProcessor):
    """Goes wrong as a request asks. It isn't captured."""

    Arguments = FaultyArguments

    def prepare(self, max_rows: int) -> None:
        self.asked: dict[int, FaultyArguments] = {}

    def update(self, removed: Sequence[int], added: Sequence[ProcessedRow]) -> None:
        for row in removed:
            if row in self.asked and self.asked.pop(row).at == "removal":
                raise KeyError("never forgets")
        for one in added:
            row, arguments = one.row, one.arguments
            assert isinstance(arguments, FaultyArguments)
            if arguments.at == "update":
                raise RuntimeError("no such row")
            self.asked[row] = arguments

    def apply(self, logits: torch.Tensor, lines: Lines) -> None:
        lengths = self.context.history.lengths(lines).tolist()
        for line, (row, length) in enumerate(zip(lines.rows.tolist(), lengths, strict=True)):
            if (asked := self.asked.get(row)) is None or length < asked.length:
                continue
            if asked.at == "apply":
                logits[line] = 0.0
                raise ZeroDivisionError("nothing left")
            if asked.at in ("nan", "inf"):
                logits[line, 7] = float(asked.at)
            elif asked.at == "nothing":
                logits[line] = -torch.inf


class Unready(Clip):
    def prepare(self, max_rows: int) -> None:
        raise MemoryError("too many rows")


def install(site: Site) -> None:
    """Offer all of them as the distribution dovetail-processing."""
    of = 'kind="logits_processor", target="tests.e2e.processing:'
    specs = [
        f'{of}{name}", name={name.lower()!r}' for name in ("Shun", "Clip", "Faulty", "Unready")
    ]
    site.install("dovetail-processing", modules={"processing_plugin": components(*specs)})


def after(
    logits: torch.Tensor, history: Sequence[int], asked: Mapping[str, Mapping[str, Any]]
) -> torch.Tensor:
    """Return logits [vocab] changed by `shun` and then `clip`, for a request with these arguments
    and tokens."""
    logits = logits.clone()
    if (shun := asked.get("shun")) is not None:
        near = set(history[-shun.get("window", 8) :]) - set(shun.get("spare", ()))
        for token in near:
            logits[token] -= shun.get("amount", 2.0)
    if (clip := asked.get("clip")) is not None:
        largest = max(logits.tolist())
        logits = torch.tensor(
            [value if value >= largest - clip["width"] else -torch.inf for value in logits.tolist()]
        )
    return logits
