"""Options of the built-in executors, in their own module so that validating a config imports no
torch."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class LocalOptions(BaseModel):
    """Options of the executor `local`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str = Field(
        default="auto",
        description='"cpu", "cuda", "cuda:1", …; auto: a CUDA device if there is one, else the '
        "CPU.",
    )
    num_pages: int | None = Field(
        default=None,
        ge=1,
        le=2**31 - 1,
        description="Pages in the KV pool, instead of as many as the memory allows.",
    )
    max_in_flight: int | None = Field(
        default=None,
        ge=1,
        le=8,
        description="Steps submitted before the oldest is collected. Unset: 2 on CUDA, 1 on the "
        "CPU, where submitting is computing.",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Threads that torch computes with on the CPU, in this whole process. Unset: as "
        "torch has it.",
    )


class TensorOptions(BaseModel):
    """Options of the executor `tensor`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int = Field(
        default=2,
        ge=2,
        le=64,
        description="Ranks that the model is split over: as many GPUs, or as many processes on the "
        "CPU.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="Where the ranks compute; auto: on CUDA devices if there is one, else on the "
        "CPU.",
    )
    devices: tuple[int, ...] | None = Field(
        default=None,
        min_length=1,
        description="Indices of the CUDA devices of ranks 0, 1, …; as many as `size`, or with "
        "`hosts` as many as each host has ranks. Unset: 0, 1, …",
    )
    hosts: tuple[str, ...] | None = Field(
        default=None,
        min_length=2,
        description="IP addresses of the hosts that the ranks are dealt to, as many to each; the "
        "first is this one, and on each other one "
        "`dovetail ranks FIRST:PORT` runs. Unset: all ranks are on this host.",
    )
    port: int = Field(
        default=29555,
        ge=1,
        le=65535,
        description="With `hosts`: the TCP port at which this host listens for the others.",
    )
    num_pages: int | None = Field(
        default=None,
        ge=1,
        le=2**31 - 1,
        description="Pages in the KV pool, instead of as many as the memory allows.",
    )
    max_in_flight: int | None = Field(
        default=None,
        ge=1,
        le=8,
        description="Steps submitted before the oldest is collected. Unset: 2 on CUDA, 1 on the "
        "CPU, where submitting is computing.",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Threads that torch computes with on the CPU, in each rank's process, the "
        "engine's own included. Unset: a share of the cores.",
    )
    all_reduce: Literal["auto", "symmetric", "nccl"] = Field(
        default="auto",
        description="How GPUs sum what they computed: small sums through symmetric memory and "
        "large ones by NCCL, or all by NCCL. auto: by symmetric "
        "memory where the GPUs can read each other's memory; symmetric refuses to start where they "
        "can't.",
    )
    start_timeout_s: float = Field(
        default=900.0,
        gt=0,
        le=86400,
        description="Seconds that all ranks may take to start: to load, allocate and record. Then "
        "the start fails.",
    )
    step_timeout_s: float = Field(
        default=120.0,
        gt=0,
        le=86400,
        description="Seconds that a step may take on all ranks. Then the ranks are ended, and the "
        "engine with them.",
    )

    @field_validator("hosts")
    @classmethod
    def _addresses(cls, hosts: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Normalize addresses as the system writes them, to recognise connecting hosts."""
        return None if hosts is None else tuple(str(ip_address(host)) for host in hosts)
