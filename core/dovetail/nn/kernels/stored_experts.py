"""How the weights of experts are stored, for the kernels that multiply with them."""

from __future__ import annotations

from typing import NamedTuple

import torch

PLAIN, FLOAT8, INT4, FP4 = range(4)
CHUNK = 128  # inputs whose 4-bit weights are stored together


class Stored(NamedTuple):
    """The weights of one layer of all experts, contiguous: [experts, outputs, inputs], or as
    `streamed.Stored` has them, with experts before. FP4 are laid out as INT4: codes of e2m1, and
    `scales` [experts, inputs / 32, outputs] uint8, powers of two as e8m0 has them."""

    values: torch.Tensor
    inputs: int
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    group: int = 0  # inputs of a scale; 0: all
    kind: int = PLAIN
    narrows: bool = False  # FLOAT8: inputs of many rows are rounded to e4m3, too

    @property
    def outputs(self) -> int:
        return self.values.shape[1]

    def constants(self) -> dict[str, int | bool]:
        """Compile-time constants of the kernels."""
        sharing = (
            self.outputs // self.scales.shape[1]
            if self.kind == FLOAT8 and self.scales is not None
            else 1
        )
        return {
            "INPUTS": self.inputs,
            "BYTES": self.values.shape[2],
            "KIND": self.kind,
            "GROUP": self.group,
            "SHARING": sharing,
            "ASYMMETRIC": self.zeros is not None,
        }

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values, scales and zeros; unused tensors where there are none."""
        scales = self.values if self.scales is None else self.scales
        return self.values, scales, scales if self.zeros is None else self.zeros


def takes(kind: int, inputs: int, group: int) -> bool:
    """Return True if the kernels of `experts` support weights with this number of inputs, and one
    scale per `group` of them."""
    if kind == INT4:
        return group >= CHUNK or inputs % CHUNK == 0
    return kind == FP4 or group == 0 or (group >= 16 and group & (group - 1) == 0)
