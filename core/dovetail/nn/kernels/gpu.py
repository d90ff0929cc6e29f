"""The facts about a GPU that kernels, tilings and dtypes follow: all that is asked of a device's properties is asked here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class GPU:
    """One kind of NVIDIA GPU. A program is what CUDA calls a block, a processor a streaming multiprocessor."""

    name: str
    capability: tuple[int, int]  # NVIDIA's "compute capability"
    shared_bytes: int  # shared memory that one program may have
    processor_shared_bytes: int  # and that all programs of a processor have together
    processors: int

    def __str__(self) -> str:
        return f"{self.name} (compute capability {'.'.join(map(str, self.capability))})"

    @property
    def is_hopper(self) -> bool:
        """True where kernels that are written for Hopper's matrix units and tensor memory accelerator run: nowhere else."""
        return self.capability[0] == 9

    @property
    def has_bfloat16(self) -> bool:
        """True from Ampere on. Before, nothing computes in bfloat16 but in steps of several instructions, and matrix units not at all."""
        return self.capability >= (8, 0)

    @property
    def has_matrix_units(self) -> bool:
        """True from Ampere on: Turing has them, and Triton multiplies without."""
        return self.capability >= (8, 0)

    @property
    def has_pdl(self) -> bool:
        """True from Hopper on, which has programmatic dependent launch."""
        return self.capability >= (9, 0)


def gpu_of(device: torch.device) -> GPU | None:
    """The GPU that a device is. None for the CPU, and for a GPU where there is none: what is asked of declarations may be asked anywhere."""
    return _gpu_of(device)


@cache
def _gpu_of(device: torch.device) -> GPU | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack some
    return GPU(
        properties.name,
        (properties.major, properties.minor),
        properties.shared_memory_per_block_optin,
        properties.shared_memory_per_multiprocessor,
        properties.multi_processor_count,
    )
