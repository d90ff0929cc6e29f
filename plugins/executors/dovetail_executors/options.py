"""Options of the built-in executors; apart from them, so that checking a config imports no torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class LocalOptions(BaseModel):
    """Options of the executor `local`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str = Field(default="auto", description='"cpu", "cuda", "cuda:1", …; auto: a CUDA device if there is one, else the CPU.')
    num_blocks: int | None = Field(default=None, ge=1, le=2**31 - 1, description="Blocks in the KV pool, instead of as many as the memory allows.")
    max_in_flight: int | None = Field(
        default=None,
        ge=1,
        le=8,
        description="Steps submitted before the oldest is collected. Unset: 2 on CUDA, 1 on the CPU, where submitting is computing.",
    )
    threads: int | None = Field(
        default=None, ge=1, le=1024, description="Threads that torch computes with on the CPU, in this whole process. Unset: as torch has it."
    )
