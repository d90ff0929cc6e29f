"""LoRA adapters (arXiv:2106.09685) of linear layers: y + (x A^T) B^T, with another A and B for each
token.

A bank has a fixed number of slots for adapters; `LayerAdapters` are one layer's weights in it. Slot
0 is for no adapter. A step in which any token has one runs within `StepAdapters.of_tokens`: then
all layers with a bank compute the plain sequence of norm, product, adapters and gate, instead of
kernels that fuse these. Other steps don't notice the bank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from dovetail.errors import DovetailError
from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable

if TYPE_CHECKING:
    from dovetail.nn.kernels.adapters import SortedTokens

MOST_OUTPUTS = 128  # of a piece
# y, x, slot -> y with what that adapter adds
Summed = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def is_readable(tensor: torch.Tensor) -> bool:
    """Return True if the host may look into a tensor: work that is recorded must not."""
    return tensor.device.type == "cpu"


class TokenSlots:
    """The slots [tokens] int32 of the tokens that layers compute."""

    def __init__(self, slots: torch.Tensor) -> None:
        self.slots = slots
        self._sorted: SortedTokens | None = None

    def sorted(self, count: int) -> SortedTokens:
        """Return the tokens by slot, for kernels: sorted once for all layers. `count`: slots,
        including slot 0."""
        if self._sorted is None:
            from dovetail.nn.kernels import adapters as kernels

            self._sorted = kernels.sorted_tokens(self.slots, count)
        return self._sorted


class StepAdapters:
    """The slots of the tokens of the step that runs, for all layers of a model."""

    def __init__(self) -> None:
        self._of: dict[int, TokenSlots] = {}  # by the number of tokens that a layer computes

    @property
    def active(self) -> bool:
        """True if the running step has tokens with adapters."""
        return bool(self._of)

    @contextmanager
    def of_tokens(self, slots: torch.Tensor, wanted: torch.Tensor | None = None) -> Iterator[None]:
        """Context of a step whose tokens have the adapters `slots` [tokens] int32. `wanted` [n]
        int64: as of `CausalLM.forward`, fewer than all."""
        self._of = {len(slots): TokenSlots(slots)}
        if wanted is not None and len(wanted) != len(slots):
            self._of[len(wanted)] = TokenSlots(slots.index_select(0, wanted))
        try:
            yield
        finally:
            self._of = {}

    def of(self, count: int) -> TokenSlots:
        """Return the slots of the `count` tokens of a layer's input: all of the step, or those
        wanted. Raises `DovetailError` for another number."""
        if count not in self._of:
            raise DovetailError(
                f"a layer with adapters was given {count} tokens in a step of "
                f"{' or '.join(map(str, self._of))}"
            )
        return self._of[count]


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs [start, end) of a layer that belong to one module of the checkpoint, the layer's
    `module`-th."""

    start: int
    end: int
    module: int

    def pieces(self) -> list[tuple[int, int, int]]:
        """Return (start, end, module) of pieces of at most `MOST_OUTPUTS`, one for each program of
        a kernel."""
        return [
            (at, min(at + MOST_OUTPUTS, self.end), self.module)
            for at in range(self.start, self.end, MOST_OUTPUTS)
        ]


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """The adapters of one layer, which may merge several modules of a checkpoint (q, k and v).
    Ranks hold their shares, as of the weight."""

    step: StepAdapters
    # [slots + 1, modules * rank, in]; 0 beyond an adapter's own rank, and in slot 0
    a: torch.Tensor
    b: torch.Tensor  # [slots + 1, out, rank]; likewise
    outputs: tuple[Outputs, ...]  # ascending, of all outputs of the layer
    pieces: torch.Tensor  # the same in pieces [any, 3], for kernels

    @property
    def active(self) -> bool:
        return self.step.active

    def added_to(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add to y [tokens, out], in place, what the tokens' adapters compute of x [tokens, in];
        return y. Sums are float32; x A^T is rounded to x's dtype."""
        tokens = self.step.of(len(x))
        if use_kernels(x, y):
            from dovetail.nn.kernels import adapters as kernels

            with suppress(KernelUnavailable):
                kernels.add(
                    y, x, self.a, self.b, self.pieces, MOST_OUTPUTS, tokens.sorted(len(self.a))
                )
                return y
        return self._added(y, x, tokens.slots, self._sum)

    def added_by_heads(
        self, y: torch.Tensor, x: torch.Tensor, outputs: slice, *, from_left: bool
    ) -> torch.Tensor:
        """Add to y in place, and return it, what the tokens' adapters compute of x head by head,
        where the layer has the same number of outputs for each head, of which `outputs` are used.

        x [tokens, heads, in] -> y [tokens, heads, outputs]; or, `from_left`, x [tokens, heads,
        outputs] is multiplied by the transposed matrices -> y [tokens, heads, in]."""

        def summed(y: torch.Tensor, x: torch.Tensor, slot: int) -> torch.Tensor:
            a = self.a[slot].float()  # [rank, in]
            # [heads, outputs, rank]
            b = self.b[slot].float().view(x.shape[1], -1, a.shape[0])[:, outputs]
            if from_left:
                added = torch.einsum("thp,hpr->thr", x.float(), b) @ a
            else:
                added = torch.einsum("thr,hpr->thp", x.float() @ a.t(), b)
            return (y.float() + added).to(y.dtype)

        return self._added(y, x, self.step.of(len(x)).slots, summed)

    def _added(
        self, y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, summed: Summed
    ) -> torch.Tensor:
        """Replace, in y, the rows of tokens with an adapter by `summed` of them."""
        readable = is_readable(x)
        for slot in set(slots.tolist()) - {0} if readable else range(1, len(self.a)):
            if readable:
                rows = (slots == slot).nonzero()[:, 0]
                y[rows] = summed(y[rows], x[rows], slot)
            else:  # shapes are the same in every step
                has_it = (slots == slot).view(-1, *[1] * (y.ndim - 1))
                y.copy_(torch.where(has_it, summed(y, x, slot), y))
        return y

    def _sum(self, y: torch.Tensor, x: torch.Tensor, slot: int) -> torch.Tensor:
        """Return y plus what the adapter in a slot computes for all tokens."""
        rank = self.b.shape[2]
        # [tokens, modules * rank]
        inner = F.linear(x.float(), self.a[slot].float()).to(x.dtype).float()
        parts = [
            inner[:, part.module * rank :][:, :rank]
            @ self.b[slot, part.start : part.end].float().t()
            for part in self.outputs
        ]
        return (y.float() + torch.cat(parts, 1)).to(y.dtype)
