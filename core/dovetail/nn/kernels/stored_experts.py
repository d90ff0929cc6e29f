"""How the weights of experts are stored, for the kernels that multiply with them."""

from __future__ import annotations

from typing import NamedTuple

import torch

PLAIN, FLOAT8, INT4, FP4 = range(4)
CHUNK = 128  # inputs whose 4-bit weights are stored together
# of FP4, by the codes of e2m1 without their sign
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# where the bits of FP4's four codes are in a number, from the lowest: kernels need few instructions
# to move them to where 16-bit floating-point numbers have theirs
BITS = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (10, 11, 13, 14))
RAISED = 63  # added to the e8m0 codes of FP4's scales, so that a product with bits is exact


class Stored(NamedTuple):
    """The weights of one layer of all experts, contiguous: [experts, outputs, inputs], or as
    `streamed.Stored` has them, with experts before. FP4 and their scales are laid out
    as by `dovetail.nn.format.mxfp4`: int16 [experts, outputs, inputs / 4] and int32 [experts,
    inputs / CHUNK, outputs]."""

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
