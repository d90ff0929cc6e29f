"""Towers that take a grid of patches of any size: Qwen-VL's and GLM-V's (`visual`).

transformers derives positions, lengths and windows from the grid by small operations on the device,
and reads the lengths back in every layer to split the sequence. Here they are computed on the CPU,
by transformers' own functions, and attention reads the lengths on the device, so that the host
doesn't wait for it. Attention and the projection of patches are replaced; the rest of the tower is
transformers'.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.transfer import to_device

KEPT = 16  # grids
# modules of attention that `PackedAttention` has; GLM-OCR has norms
_KNOWN = {"qkv", "proj", "q_norm", "k_norm"}
_HALF = (torch.float16, torch.bfloat16)
_FLASH_HEAD_SIZES = range(8, 257, 8)

Arguments = Mapping[str, Any]


class Grids:
    """Arguments of a vision model that depend on the grid only. Those of the last `KEPT` grids are
    kept on the device."""

    def __init__(self, visual: Any, device: torch.device) -> None:
        """Replace the attention of `visual`, a vision model of transformers, and its convolution of
        patches."""
        for block in visual.blocks:
            if {*dict(block.attn.named_children())} <= _KNOWN:
                block.attn = PackedAttention(block.attn)
        proj = visual.patch_embed.proj
        if isinstance(proj, nn.Conv3d) and proj.kernel_size == proj.stride:
            visual.patch_embed.proj = PatchProjection(proj)
        self._visual = visual
        self._device = device
        self._kept: OrderedDict[tuple[int, ...], Arguments] = OrderedDict()
        if hasattr(visual, "embeddings"):  # GLM-4V's index the grid
            visual.embeddings.register_forward_pre_hook(self._with_grid_on_device)

    @classmethod
    def of(cls, model: Any, device: torch.device) -> Grids | None:
        """Return the grids of a whole model; None if its vision model takes none, or if this
        release of transformers takes no such arguments."""
        try:
            import transformers.vision_utils  # noqa: F401
        except ImportError:
            return None
        visual = getattr(model, "visual", None)
        return None if visual is None else cls(visual, device)

    def arguments(self, image_grid_thw: Any) -> Arguments:
        """Return the arguments for one picture. `image_grid_thw`: an array [1, 3] of its number of
        frames, and of patches along its height and its width."""
        grid = torch.tensor(image_grid_thw, dtype=torch.int64)
        key = tuple(grid.flatten().tolist())
        if key not in self._kept:
            self._kept[key] = {
                name: to_device(value.numpy(), self._device)
                if isinstance(value, torch.Tensor)
                else value
                for name, value in self._computed(grid).items()
            }
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def forget(self) -> None:
        """Drop the kept arguments: those that one CUDA stream made mustn't be replaced while another
        one reads them."""
        self._kept.clear()

    def _with_grid_on_device(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_states, lengths, grid, *others = args
        return hidden_states, lengths, to_device(grid.numpy(), self._device), *others

    def _computed(self, grid: torch.Tensor) -> dict[str, Any]:
        from transformers import vision_utils

        visual = self._visual
        merge = visual.spatial_merge_size
        starts = vision_utils.get_vision_cu_seqlens(grid)
        found = {
            "position_ids": vision_utils.get_vision_position_ids(grid, merge),
            "cu_seqlens": starts,
            "max_seqlen": _longest(starts),
        }
        if hasattr(visual, "window_size"):
            index, starts = vision_utils.get_vision_window_index(
                grid, merge, visual.window_size, visual.patch_size
            )
            found["window_index"] = index
            found["cu_window_seqlens"] = starts
            found["max_window_seqlen"] = _longest(starts)
        if hasattr(visual, "num_grid_per_side"):
            indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
                grid,
                num_grid_per_side=visual.num_grid_per_side,
                mode=visual.interpolation_mode,
                align_corners=visual.interpolation_align_corners,
                spatial_merge_size=merge,
            )
            found["interp_indices"] = indices
            found["interp_weights"] = weights
        return found


class PatchProjection(nn.Module):
    """A convolution whose kernel is a whole patch, as a matrix product."""

    def __init__(self, convolution: nn.Conv3d) -> None:
        super().__init__()
        self.weight = convolution.weight
        self.bias = convolution.bias

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Return [n, outputs] of patches [n, channels, frames, height, width]."""
        return F.linear(patches.flatten(1), self.weight.flatten(1), self.bias)


class PackedAttention(nn.Module):
    """Attention in both directions within each of several sequences, with the weights of
    transformers' module."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv = attention.qkv
        self.proj = attention.proj
        self.q_norm = getattr(attention, "q_norm", nn.Identity())
        self.k_norm = getattr(attention, "k_norm", nn.Identity())
        self._head_size = attention.head_dim
        heads = attention.num_heads
        kv_heads = (self.qkv.out_features // self._head_size - heads) // 2
        self._heads = [heads, kv_heads, kv_heads]
        self._scale = attention.scaling

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        max_seqlen: int,
        **_: Any,
    ) -> torch.Tensor:
        """Return [tokens, hidden], of hidden_states [tokens, hidden]; cu_seqlens [sequences + 1]
        int32: where each sequence begins, and where the last ends; position_embeddings: cosines and
        sines [tokens, head_size]; max_seqlen: tokens of the longest sequence."""
        qkv = self.qkv(hidden_states).view(len(hidden_states), -1, self._head_size)
        q, k, v = qkv.split(self._heads, dim=1)  # [tokens, heads or kv_heads, head_size]
        q = rotated(self.q_norm(q), *position_embeddings)
        k = rotated(self.k_norm(k), *position_embeddings)
        values = attended(q, k, v, cu_seqlens, max_seqlen, self._scale)
        out: torch.Tensor = self.proj(values.flatten(1))
        return out


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x [tokens, heads, head_size] with pairs of numbers, half a head apart, turned by the
    angles of cos and sin [tokens, head_size]; computes in float32."""
    if use_kernels(cos, sin) and x.stride(1) == x.shape[2] and x.stride(2) == 1:
        from dovetail_executors.runtime import tower_kernels

        with suppress(KernelUnavailable):
            return tower_kernels.rotated(x, cos, sin)
    left, right = x.float().chunk(2, dim=-1)
    turned = torch.cat((-right, left), dim=-1)
    return (x.float() * cos[:, None].float() + turned * sin[:, None].float()).to(x.dtype)


def attended(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float,
) -> torch.Tensor:
    """Return values [tokens, heads, head_size] for q of the same shape, and k and v [tokens,
    kv_heads, head_size]. `starts`, `longest`: see `PackedAttention.forward`."""
    if (shared := q.shape[1] // k.shape[1]) > 1:  # torch 2.11 has no `enable_gqa` here
        k = k.repeat_interleave(shared, dim=1)
        v = v.repeat_interleave(shared, dim=1)
    if len(starts) == 2:
        return _of_one(q, k, v, scale)
    if q.is_cuda and q.dtype in _HALF and q.shape[-1] in _FLASH_HEAD_SIZES:
        from torch.nn.attention.varlen import varlen_attn  # loads torch's compiler: 1 s

        packed = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale)
        assert isinstance(packed, torch.Tensor)
        return packed
    parts = [
        _of_one(q[start:end], k[start:end], v[start:end], scale)
        for start, end in pairwise(starts.tolist())
    ]
    return torch.cat(parts)


def _of_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Return values of one sequence."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, tokens, head_size]
    return F.scaled_dot_product_attention(q, k, v, scale=scale)[0].transpose(0, 1)


def _longest(starts: torch.Tensor) -> int:
    """Return the tokens of the longest sequence."""
    return int(starts.diff().max())
