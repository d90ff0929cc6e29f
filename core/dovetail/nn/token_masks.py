"""Token masks of requests with a grammar, applied to logits before sampling."""

from __future__ import annotations

from contextlib import suppress

import torch

from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable


def mask_tokens(logits: torch.Tensor, lines: torch.Tensor, words: torch.Tensor) -> None:
    """Set the logits of tokens that a row's mask forbids to -inf, in place.

    logits [n, vocab], any float dtype; lines [n] int64: the row's line in `words`, or -1 if all
    tokens are allowed; words [m, ceil(vocab / 32)] int32: bit `id % 32` of word `id // 32` is 1 if
    the token is allowed. Can be recorded in a CUDA graph.
    """
    if logits.stride(1) == 1 and use_kernels(lines, words):
        from dovetail.nn.kernels import token_masks as kernels

        with suppress(KernelUnavailable):
            kernels.mask_tokens(logits, lines, words)
            return
    if not len(words):
        return
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    chosen = words[lines.clamp(min=0)]  # [n, words]
    allowed = ((chosen[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits.masked_fill_(~allowed & (lines >= 0)[:, None], -torch.inf)
