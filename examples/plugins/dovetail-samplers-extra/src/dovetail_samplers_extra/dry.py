"""DRY, "Don't Repeat Yourself" (p-e-w,
https://github.com/oobabooga/text-generation-webui/pull/5677): if the last k tokens occurred before,
the token that followed them there is lowered by multiplier * base ** (k - allowed_length). Sequence
breakers end what counts as a repetition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from dovetail.api.logits_processor import ArgumentContext, ProcessedRow
from dovetail.api.sampler import Lines
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from dovetail_samplers_extra.records import Record, Recorded

# tokens of a repetition that are compared; the penalty of longer ones is that of this many
MAX_MATCH = 50
MAX_BREAKERS = 128
MAX_PENALTY = 1e30  # so that a logit stays finite
# instead of token ids: before and after the earlier text; after the end of the last tokens
NONE = -1
ANY = -2

TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]


class DryArguments(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    multiplier: float = Field(0.8, ge=0, le=1e4, allow_inf_nan=False, strict=True, description="Penalty of the shortest repetition; 0: none.")
    base: float = Field(1.75, ge=1, le=100, allow_inf_nan=False, strict=True, description="Factor of the penalty for each further token.")
    allowed_length: int = Field(2, ge=1, le=MAX_MATCH, strict=True, description="Tokens of the shortest repetition with a penalty.")
    penalty_last_n: int = Field(-1, ge=-1, lt=2**31, strict=True, description="Last tokens that are searched; -1: all, prompt included.")
    sequence_breakers: tuple[TokenId, ...] = Field(
        ("\n", ":", '"', "*"),
        validate_default=True,
        description="Token ids, or texts, whose last token is used.",
    )

    @field_validator("sequence_breakers", mode="before")
    @classmethod
    def encode(cls, values: object, info: ValidationInfo) -> object:
        """Replace texts by ids. On the ranks there is no tokenizer, and there are only ids."""
        if not isinstance(values, list | tuple):
            return values
        if len(values) > MAX_BREAKERS:  # one error, instead of one for each
            raise ValueError(f"at most {MAX_BREAKERS} breakers are possible, got {len(values)}")
        if not any(isinstance(value, str) for value in values):
            return values
        encode = ArgumentContext.of(info).encode
        return [last_token(value, encode) if isinstance(value, str) else value for value in values]


def last_token(text: str, encode: Callable[[str], list[int]] | None) -> int:
    """Return the last token of a text that follows a letter: some tokenizers put a space before the
    first token. Raises `ValueError` without one."""
    if encode is None:
        raise ValueError("texts need a tokenizer, which the engine doesn't have: give token ids")
    tokens = encode(f"a{text}")
    if not text or not tokens or tokens == encode("a"):
        raise ValueError(f"{text[:50]!r} has no token")
    return tokens[-1]


class Dry(Recorded):
    """Searches all earlier places of the history at once, token by token backwards: `MAX_MATCH`
    comparisons of [n, history's width]."""

    Arguments = DryArguments

    def record(self, row: ProcessedRow | None) -> Record:
        asked = row.arguments if row and isinstance(row.arguments, DryArguments) else None
        breakers = asked.sequence_breakers if asked else ()
        penalties = [_penalty(asked, length) for length in range(MAX_MATCH + 1)]
        return {
            "penalties": torch.tensor(penalties),  # by the length of the repetition
            "window": torch.tensor(2**31 - 1 if asked is None or asked.penalty_last_n < 0 else asked.penalty_last_n),
            "breakers": torch.tensor([*breakers, *[NONE] * (MAX_BREAKERS - len(breakers))]),
        }

    @torch.inference_mode()
    def apply(self, logits: torch.Tensor, lines: Lines) -> None:
        vocab = logits.shape[1]
        history = self.context.history
        rows = lines.rows
        # [n, width], [n, 1]
        tokens = history.token_ids[rows]
        lengths = history.lengths(lines)[:, None]
        starts = (lengths - self.field("window", rows)).clamp(min=0)
        breakers = self.field("breakers", rows)
        matches = repetitions(tokens, lengths, starts, breakers)[:, :-1]
        follows = tokens[:, 1:].long()
        follows = follows.where((matches > 0) & (follows < vocab), vocab)
        # grow with the length, so the largest is that of the longest
        found = self.field("penalties", rows).gather(1, matches.long())
        penalties = logits.new_zeros((len(rows), vocab + 1)).scatter_reduce_(1, follows, found, "amax")
        penalties.scatter_(1, breakers.where((breakers >= 0) & (breakers < vocab), vocab), 0.0)
        penalties = penalties[:, :vocab]
        logits.copy_(torch.where(penalties > 0, logits - penalties, logits))


def repetitions(tokens: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor, breakers: torch.Tensor) -> torch.Tensor:
    """Return for each place of tokens [n, width] how many tokens up to it, `MAX_MATCH` at most, are
    the last ones of the line: [n, width] int32. The line's own last token has none. lengths [n, 1]:
    tokens of each line; starts [n, 1]: the first place that is searched; breakers [n, m]."""
    width = tokens.shape[1]
    device = tokens.device
    places = torch.arange(width, device=device)
    earlier = tokens.where((places >= starts) & (places < lengths - 1), NONE)
    # [n, MAX_MATCH]: places of the last tokens, the last first
    back = lengths - 1 - torch.arange(MAX_MATCH, device=device)
    last = tokens.gather(1, back.clamp(min=0).long())
    ends = (back < starts) | (last[:, :, None] == breakers[:, None]).any(-1)
    last = last.where(ends.cumsum(1) == 0, ANY)
    matches = torch.zeros_like(tokens)
    going = torch.ones_like(tokens, dtype=torch.bool)
    for step in range(min(MAX_MATCH, width)):
        # by the place of the step's token
        going = going[:, min(step, 1) :] & (earlier[:, : width - step] == last[:, step, None])
        matches[:, step:] += going
    return matches


def _penalty(asked: DryArguments | None, length: int) -> float:
    if asked is None or length < asked.allowed_length:
        return 0.0
    return min(asked.multiplier * asked.base ** (length - asked.allowed_length), MAX_PENALTY)
