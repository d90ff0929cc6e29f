"""XTC, "Exclude Top Choices" (p-e-w, https://github.com/oobabooga/text-generation-webui/pull/6335):
of the tokens with at least the probability `threshold`, all but the least probable are removed, if
there are two or more. This happens at a position with the probability `probability`."""

from __future__ import annotations

import torch
from dovetail.api.logits_processor import ProcessedRow
from dovetail.api.sampler import Lines
from pydantic import BaseModel, ConfigDict, Field

from dovetail_samplers_extra.records import Record, Recorded, total

# 2^64 / golden ratio as int64; another stream than that of samplers
GOLDEN = -0x61C8864680B583EB
SALT = 0x58544358544358
MULTIPLIERS = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


class XtcArguments(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    threshold: float = Field(
        0.1, ge=1e-9, le=1, allow_inf_nan=False, strict=True, description="Probability, at temperature 1, from which a token is a top choice."
    )
    probability: float = Field(0.5, ge=0, le=1, allow_inf_nan=False, strict=True, description="How often top choices are removed.")


class Xtc(Recorded):
    """Whether they are removed is a function of the request's seed and the output position. Of
    equally probable tokens the lowest id stays."""

    Arguments = XtcArguments

    def record(self, row: ProcessedRow | None) -> Record:
        asked, seed = (row.arguments, row.sampling.seed) if row else (None, 0)
        threshold, probability = (asked.threshold, asked.probability) if isinstance(asked, XtcArguments) else (1.0, 0.0)
        signed = (seed + 2**63) % 2**64 - 2**63
        return {"threshold": torch.tensor(threshold), "probability": torch.tensor(probability, dtype=torch.float64), "seed": torch.tensor(signed)}

    @torch.inference_mode()
    def apply(self, logits: torch.Tensor, lines: Lines) -> None:
        rows = lines.rows
        history = self.context.history
        positions = (history.lengths(lines) - history.prompt_lens[rows]).long()[:, None]
        # [n, 1]
        removes = uniform(self.field("seed", rows), positions) < self.field("probability", rows)
        weights = (logits - logits.amax(1, keepdim=True)).exp()
        # nothing, if a number is NaN
        top = (weights >= self.field("threshold", rows) * total(weights)) & removes
        least = logits.where(top, torch.inf).amin(1, keepdim=True)
        ids = torch.arange(logits.shape[1], device=logits.device)
        stays = ids.where(top & (logits == least), logits.shape[1]).amin(1, keepdim=True)
        logits.masked_fill_(top & (ids != stays), -torch.inf)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return numbers from 0 to below 1, float64, hashed from seeds and positions, int64 of one
    shape, by SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    bits = mixed(mixed(seeds + SALT) + positions * GOLDEN)
    return shifted(bits, 11).double() * 2.0**-53


def mixed(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ shifted(x, 30)) * MULTIPLIERS[0]
    x = (x ^ shifted(x, 27)) * MULTIPLIERS[1]
    return x ^ shifted(x, 31)


def shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right without the sign: int64 is used for 64 bits."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
