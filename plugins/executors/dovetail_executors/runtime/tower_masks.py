"""Pixtral's vision model without its mask, which keeps several pictures of a call apart.

A call encodes one picture. Its mask [patches, patches] hides nothing, but takes memory and rules out
FlashAttention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# transformers makes no mask for attention functions with "flash" in their name
_NAME = "dovetail_flash"


def without_mask(model: nn.Module) -> None:
    """Change the attention of Pixtral's vision model, if `model` has one; its config names it."""
    from transformers import AttentionInterface

    for module in model.modules():
        if type(module).__name__ == "PixtralVisionModel":
            AttentionInterface.register(_NAME, _attend)
            config: Any = module.config
            config._attn_implementation = _NAME  # noqa: SLF001 (as transformers' documentation says)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention of all to all [1, patches, heads, head_size], as functions of transformers'
    `AttentionInterface` do, of query, key and value [1, heads, patches, head_size]."""
    values = F.scaled_dot_product_attention(query, key, value, scale=scaling)
    return values.transpose(1, 2), None
