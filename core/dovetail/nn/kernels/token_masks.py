# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Sets logits of tokens that a grammar forbids to -inf, in place. Twin:
`dovetail.nn.token_masks`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.launch import launch

BLOCK = 4096  # logits per program
WARPS = 4


@triton.jit
def _mask_tokens(logits, lines, words, row_stride, words_stride, vocab_size, BLOCK: tl.constexpr):
    """Mask a part of one row, without reading logits."""
    row = tl.program_id(0).to(tl.int64)
    line = tl.load(lines + row)
    if line >= 0:
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = ids < vocab_size
        word = tl.load(words + line * words_stride + ids // 32, mask=inside, other=0)
        forbidden = ((word >> (ids % 32)) & 1) == 0
        nothing = tl.full((BLOCK,), float("-inf"), logits.dtype.element_ty)
        tl.store(logits + row * row_stride + ids, nothing, mask=inside & forbidden)


def mask_tokens(logits: torch.Tensor, lines: torch.Tensor, words: torch.Tensor) -> None:
    """Like the twin."""
    rows, vocab_size = logits.shape
    if rows:
        grid = (rows, triton.cdiv(vocab_size, BLOCK))
        launch(_mask_tokens, grid)(
            logits,
            lines,
            words,
            logits.stride(0),
            words.stride(0),
            vocab_size,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
