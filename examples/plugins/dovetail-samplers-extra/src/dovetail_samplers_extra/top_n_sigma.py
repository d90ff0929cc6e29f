"""Top-n-sigma (Tang et al., arXiv:2411.07641): keeps the tokens whose logits are at most n standard
deviations below the largest."""

from __future__ import annotations

import torch
from dovetail.api.logits_processor import ProcessedRow
from dovetail.api.sampler import Lines
from pydantic import BaseModel, ConfigDict, Field

from dovetail_samplers_extra.records import Record, Recorded, total


class TopNSigmaArguments(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    n: float = Field(1.0, ge=1e-6, le=1000, allow_inf_nan=False, strict=True, description="Standard deviations below the largest logit.")


class TopNSigma(Recorded):
    """The deviation is that of all finite logits, so tokens that rules exclude don't count."""

    Arguments = TopNSigmaArguments

    def record(self, row: ProcessedRow | None) -> Record:
        return {"n": torch.tensor(row.arguments.n if row and isinstance(row.arguments, TopNSigmaArguments) else 0.0)}

    @torch.inference_mode()
    def apply(self, logits: torch.Tensor, lines: Lines) -> None:
        n = self.field("n", lines.rows)
        finite = logits.isfinite()
        count = finite.sum(1, keepdim=True)
        mean = total(logits.where(finite, 0)) / count
        variance = total((logits - mean).where(finite, 0).square()) / count
        # NaN, which excludes nothing, if a number is
        lowest = logits.amax(1, keepdim=True) - n * variance.sqrt()
        logits.masked_fill_((logits < lowest) & (n > 0), -torch.inf)
