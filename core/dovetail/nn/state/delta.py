"""Gated DeltaNet (arXiv:2412.06464): a state that forgets, and that replaces what it holds for a
key instead of adding to it.

For each v head, with S [v_size, k_size], and for each token q, k [k_size], v [v_size], decay g <= 0
and 0 <= beta <= 1:

    S = exp(g) * S
    S = S + beta * (v - S k) kᵀ
    out = S q
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import torch
import torch.nn.functional as F

from dovetail.api.model import BuildContext, WeightRule
from dovetail.api.state import StateLayer
from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.layer import Layer
from dovetail.nn.parameter import Part, Weight, whole
from dovetail.nn.state.conv import ShortConv
from dovetail.nn.state.norm import gated_norm
from dovetail.nn.state.scan import Compute, Rule, Tensors, by_heads, scan, shared, with_drafts
from dovetail.nn.state.shapes import NORM_EPS, DeltaShape


def gated_delta_rule(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,  # noqa: N803 (names of the checkpoints)
    dt_bias: torch.Tensor,
    shape: DeltaShape,
    state: StateLayer,
    tensor: int,
) -> torch.Tensor:
    """Return the outputs [tokens, v_heads, v_size] of the rule for qkv [tokens, channels], all
    heads of q, then k, then v. q and k are divided by their lengths, and q by sqrt(k_size). Decay:
    -exp(A_log) * softplus(a + dt_bias); beta: sigmoid(b). a, b [tokens, v_heads]; A_log, dt_bias
    [v_heads] float32. Tensor `tensor` of the state is [v_heads * v_size, k_size]. Computed in
    float32, but for products of 16-bit numbers."""

    def compute(qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if use_kernels(A_log, dt_bias):
            from dovetail.nn.kernels import delta_rule as kernels

            with suppress(KernelUnavailable):
                return kernels.gated_delta_rule(qkv, a, b, A_log, dt_bias, shape, state, tensor)
        return _scanned(qkv, a, b, A_log, dt_bias, shape, state, tensor, in_chunks)

    return with_drafts(state, compute, qkv, a, b)


def _scanned(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,  # noqa: N803
    dt_bias: torch.Tensor,
    shape: DeltaShape,
    state: StateLayer,
    tensor: int,
    compute: Compute,
) -> torch.Tensor:
    keys = shape.k_heads * shape.k_size
    q, k, v = torch.split(qkv.float(), [keys, keys, shape.v_heads * shape.v_size], dim=-1)
    q, k = (_unit(by_heads(x, shape.k_heads)) for x in (q, k))
    decay = -A_log.exp() * F.softplus(a.float() + dt_bias)
    inputs = (q * shape.k_size**-0.5, k, by_heads(v, shape.v_heads), decay, b.float().sigmoid())
    return scan(state, tensor, inputs, compute, RULE).to(qkv.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def _change(held: torch.Tensor, inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    _, k, v, _, beta = inputs
    return beta[..., None] * (v - (held * shared(k, v.shape[1])).sum(-1)), k


# Inputs: q, k [n, k_heads, k_size], v [n, v_heads, v_size], decay, beta [n, v_heads]
RULE = Rule(
    decay=lambda inputs: inputs[3].exp(),
    change=_change,
    outputs=lambda held, inputs: (held * shared(inputs[0], held.shape[1])).sum(-1),
)


def in_chunks(states: torch.Tensor, inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """`RULE` as matrix products. What tokens change at their keys depends on the changes of earlier
    tokens: a triangular system (WY representation, arXiv:2406.06484)."""
    if inputs[0].shape[1] == 1:
        return RULE.token_by_token(states, inputs)
    q, k, v, decay, beta = (x.transpose(1, 2) for x in inputs)  # [n, heads, length, ...]
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    held = states.view(len(v), v.shape[1], v.shape[3], -1)
    total, between = decays(decay)
    system = beta[..., None] * (k @ k.mT) * between
    wanted = beta[..., None] * (v - total.exp()[..., None] * (k @ held.mT))
    # [n, heads, length, v_size]
    change = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    outputs = total.exp()[..., None] * (q @ held.mT) + (q @ k.mT * between) @ change
    to_end = (total[..., -1:] - total).exp()[..., None]
    after = total[..., -1].exp()[..., None, None] * held + change.mT @ (k * to_end)
    return outputs.transpose(1, 2), after.flatten(1, 2)


def decays(decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of decays [..., length] from the first token on, and the factors from token j
    to token i [..., i, j], 0 where j > i. Differences are taken before `exp`, which would overflow
    otherwise."""
    total = decay.cumsum(-1)
    later = torch.ones(
        decay.shape[-1], decay.shape[-1], dtype=torch.bool, device=decay.device
    ).triu_(1)
    return total, (total[..., None] - total[..., None, :]).masked_fill_(later, float("-inf")).exp_()


def per_head(heads: int, context: BuildContext) -> Weight:
    """Return a float32 parameter with a number for each of this rank's heads."""
    where = Part((heads * context.parallel.size,), 0, heads * context.parallel.rank, heads)
    return Weight((heads,), {None: where}, replace(context, dtype=torch.float32))


class GatedDeltaNet(Layer):
    """A Gated DeltaNet layer without its projections: qkv [tokens, conv_channels], z [tokens,
    v_heads * v_size], b and a [tokens, v_heads], which are parts of projections of the stream ->
    [tokens, v_heads * v_size], the input of the last projection. `shape` and all sizes are this
    rank's: heads are split evenly over the ranks."""

    def __init__(
        self, shape: DeltaShape, eps: float, state: StateLayer, context: BuildContext
    ) -> None:
        """`state`: made of `shape.spec`. `eps`: of the norm."""
        super().__init__()
        self.shape = shape
        self.eps = eps
        self.state = state
        keys = shape.k_heads * shape.k_size
        self.conv = ShortConv(
            {"q": keys, "k": keys, "v": shape.v_heads * shape.v_size},
            shape.kernel,
            context,
            bias=False,
        )
        self.A_log, self.dt_bias = (
            per_head(shape.v_heads, context),
            per_head(shape.v_heads, context),
        )
        self.norm_weight = whole((shape.v_size,), context, scale=True)

    def forward(
        self, qkv: torch.Tensor, z: torch.Tensor, b: torch.Tensor, a: torch.Tensor
    ) -> torch.Tensor:
        qkv = self.conv(qkv, self.state, 0)
        y = gated_delta_rule(qkv, a, b, self.A_log, self.dt_bias, self.shape, self.state, 1)
        return gated_norm(
            y.flatten(1), z, self.norm_weight, self.eps, self.shape.v_size, norm_before_gate=True
        )

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        """Yield the rules for a checkpoint's tensors: `{prefix}conv1d.weight`, `A_log`, `dt_bias`
        and `norm.weight`."""
        yield from self.conv.weights(f"{prefix}conv1d.")
        yield WeightRule(f"{prefix}A_log", self.A_log)
        yield WeightRule(f"{prefix}dt_bias", self.dt_bias)
        yield WeightRule(f"{prefix}norm.weight", self.norm_weight)
