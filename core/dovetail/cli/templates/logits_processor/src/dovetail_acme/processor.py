"""The logits processor: it changes the logits of requests that ask for it, before a token is sampled. A request asks with arguments of its own:
`SamplingParams(logits_processors={"acme": {"penalty": 2.0}})`."""

from collections.abc import Sequence

import torch
from dovetail.api.graphs import GraphSupport
from dovetail.api.logits_processor import ArgumentContext, LogitsProcessor, LogitsProcessorCapabilities, ProcessedRow
from dovetail.api.sampler import Lines
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

MAX_WINDOW = 64
MAX_SPARED = 16


class AcmeArguments(BaseModel):
    """Arguments of a request, which come from clients: give each a strict type and a range."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    penalty: float = Field(1.0, ge=0, le=100, allow_inf_nan=False, strict=True, description="Subtracted from the logits of the last tokens.")
    window: int = Field(MAX_WINDOW, ge=1, le=MAX_WINDOW, strict=True, description="Tokens that are looked at.")
    spared: tuple[int, ...] = Field((), max_length=MAX_SPARED, description="Tokens without a penalty: ids, or texts, of which all tokens are meant.")

    @field_validator("spared", mode="before")
    @classmethod
    def encode(cls, values: object, info: ValidationInfo) -> object:
        """Replace texts by ids. The tokenizer is in the context when a request arrives; on the ranks there are only ids."""
        if not isinstance(values, list | tuple):
            return values
        if not any(isinstance(value, str) for value in values):
            return values
        encode = ArgumentContext.of(info).encode
        if encode is None:
            raise ValueError("texts need a tokenizer, which the engine doesn't have: give token ids")
        return [token for value in values for token in (encode(value) if isinstance(value, str) else [value])]


class AcmeLogitsProcessor(LogitsProcessor):
    """Subtracts a penalty from the logits of a row's last tokens, once each."""

    Arguments = AcmeArguments
    capabilities = LogitsProcessorCapabilities(cuda_graph=GraphSupport.ALL)  # `apply` has fixed shapes, and reads only what is on the device

    def prepare(self, max_rows: int) -> None:
        device, count = self.context.device, max_rows + 1  # the last row is padding
        self.penalty = torch.zeros(count, device=device)  # 0: the row doesn't ask
        self.window = torch.zeros(count, dtype=torch.int64, device=device)
        self.spared = torch.full((count, MAX_SPARED), -1, dtype=torch.int64, device=device)

    def update(self, removed: Sequence[int], added: Sequence[ProcessedRow]) -> None:
        for row in removed:
            self.penalty[row] = 0
        for one in added:
            row, arguments = one.row, one.arguments
            assert isinstance(arguments, AcmeArguments)
            self.penalty[row], self.window[row] = arguments.penalty, arguments.window
            padding = [-1] * (MAX_SPARED - len(arguments.spared))
            self.spared[row] = torch.tensor([*arguments.spared, *padding])

    @torch.inference_mode()
    def apply(self, logits: torch.Tensor, lines: Lines) -> None:
        history, rows = self.context.history, lines.rows
        back = torch.arange(1, MAX_WINDOW + 1, device=logits.device)
        places = history.lengths(lines)[:, None] - back  # [n, MAX_WINDOW]: the last tokens first
        tokens = history.token_ids[rows[:, None], places.clamp(min=0)].long()
        meant = (places >= 0) & (back <= self.window[rows, None]) & (tokens < logits.shape[1])
        meant &= (tokens[:, :, None] != self.spared[rows, None]).all(-1)
        seen = torch.zeros((len(rows), logits.shape[1] + 1), dtype=torch.bool, device=logits.device)  # the last column: none of them
        seen.scatter_(1, tokens.where(meant, logits.shape[1]), True)
        penalty = self.penalty[rows, None]
        logits.copy_(torch.where(seen[:, :-1] & (penalty > 0), logits - penalty, logits))  # other bits stay as they are
