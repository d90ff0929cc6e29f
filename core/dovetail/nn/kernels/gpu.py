"""Properties of a GPU that kernels, tilings and dtypes depend on; the only place that queries
them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class GPU:
    """NVIDIA GPU model. A program is CUDA's thread block, a processor a streaming
    multiprocessor."""

    name: str
    capability: tuple[int, int]  # NVIDIA's "compute capability"
    shared_bytes: int  # maximum shared memory of one program
    processor_shared_bytes: int  # shared memory of all programs of a processor together
    processors: int

    def __str__(self) -> str:
        return f"{self.name} (compute capability {'.'.join(map(str, self.capability))})"

    @property
    def is_hopper(self) -> bool:
        """True if kernels for Hopper's matrix units and tensor memory accelerator run; they run on
        no other generation."""
        return self.capability[0] == 9

    @property
    def has_bfloat16(self) -> bool:
        """True from Ampere on. Earlier GPUs emulate bfloat16 with several instructions, and their
        matrix units don't support it."""
        return self.capability >= (8, 0)

    @property
    def has_matrix_units(self) -> bool:
        """True from Ampere on. Turing has them, but Triton doesn't use them."""
        return self.capability >= (8, 0)

    @property
    def has_pdl(self) -> bool:
        """True from Hopper on: supports programmatic dependent launch."""
        return self.capability >= (9, 0)


def gpu_of(device: torch.device) -> GPU | None:
    """Return the GPU of a device. None for the CPU, and on machines without a GPU, where
    declarations may also be queried."""
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
