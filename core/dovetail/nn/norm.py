"""RMSNorm (arXiv:1910.07467) of tokens, and of the heads of q and k; LayerNorm (arXiv:1607.06450)
of tokens."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F

from dovetail.api.model import BuildContext
from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.layer import Layer
from dovetail.nn.parameter import Part, Weight, whole

# Norm of tokens: x [tokens, size] -> the same shape. Kernels fuse `RMSNorm` only, and see that any
# other, a `LayerNorm` or a model's own, is applied by itself.
Norm = Layer


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x [..., size] / sqrt(mean(x²) + eps) * weight, over the last dimension; the mean in at
    least float32, the result in x's dtype.

    `weight` [size], or any shape that broadcasts to x, such as [heads, size].
    """
    if x.device.type == "cpu" and x.dtype == torch.float32:
        return _rms_norm_in_few_ops(x, weight, eps)
    if weight.ndim == 1:
        if use_kernels(x, weight):
            from dovetail.nn.kernels import rms_norm as kernels

            with suppress(KernelUnavailable):
                return kernels.rms_norm(x, weight, eps)
        # torch has no fused norm of two dtypes
        wide = x.to(torch.promote_types(x.dtype, weight.dtype))
        return F.rms_norm(wide, weight.shape, weight.to(wide.dtype), eps).to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)


def _rms_norm_in_few_ops(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm in few operations: torch's own takes twice as many on a CPU, which dominates the
    time of small steps."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = torch.addcmul(_constant(eps), length, length, value=1 / x.shape[-1]).rsqrt_()
    return (x * scale).mul_(weight)


@cache
def _constant(value: float) -> torch.Tensor:
    return torch.tensor(value)


def _one_plus(weight: torch.Tensor) -> torch.Tensor:
    return 1 + weight


def _in_float32(context: BuildContext) -> BuildContext:
    """Return the context of weights that are 1 + w, which has more digits than w."""
    return replace(context, dtype=torch.float32)


class RMSNorm(Layer):
    """x [..., size] -> the same shape. `zero_centered`: a checkpoint has w for weights 1 + w, which
    are kept in float32."""

    def __init__(
        self, size: int, eps: float, context: BuildContext, *, zero_centered: bool = False
    ) -> None:
        super().__init__()
        self.eps = eps
        self.transform = _one_plus if zero_centered else None
        context = _in_float32(context) if zero_centered else context
        self.weight = whole((size,), context, scale=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(Layer):
    """x [..., size] -> the same shape: minus its mean, divided by its deviation, times a weight,
    plus a bias if there is one."""

    def __init__(self, size: int, eps: float, context: BuildContext, *, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = whole((size,), context, scale=True)
        self.bias = whole((size,), context) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class QKNorm(Layer):
    """Norms each head of q and k: qk [tokens, heads + kv_heads, head_size], q's heads first -> the
    same shape. Counts are this rank's.

    q's heads share a weight [head_size], k's another; these are repeated for each head, so that q
    and k are normed together. Shard ids: "q", "k". `zero_centered`: as of `RMSNorm`.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_size: int,
        eps: float,
        context: BuildContext,
        *,
        zero_centered: bool = False,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.heads = (heads + kv_heads, head_size)
        self.transform = _one_plus if zero_centered else None
        context = _in_float32(context) if zero_centered else context
        parts: dict[str | None, Part] = {
            "q": Part((head_size,), 0, 0, head_size, at=0, copies=heads)
        }
        if kv_heads:
            parts["k"] = Part((head_size,), 0, 0, head_size, at=heads * head_size, copies=kv_heads)
        self.weight = Weight(((heads + kv_heads) * head_size,), parts, context, scale=True)

    def forward(self, qk: torch.Tensor) -> torch.Tensor:
        return rms_norm(qk, self.weight.view(self.heads), self.eps)
