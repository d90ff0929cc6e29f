"""Mamba2 (arXiv:2405.21060): a state that forgets, and to which each token adds.

For each head, with S [head_size, state_size], and for each token x [head_size], B, C [state_size],
step dt > 0, and numbers A < 0, D of the head:

    S = exp(A * dt) * S + dt * x Bᵀ
    out = S C + D * x
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import torch
import torch.nn.functional as F

from dovetail.api.model import BuildContext, WeightRule
from dovetail.api.state import StateLayer
from dovetail.errors import UnsupportedError
from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.layer import Layer
from dovetail.nn.parameter import Part, Weight
from dovetail.nn.state.conv import ShortConv
from dovetail.nn.state.delta import decays, per_head
from dovetail.nn.state.norm import gated_norm
from dovetail.nn.state.scan import Compute, Rule, Tensors, by_heads, scan, shared, with_drafts
from dovetail.nn.state.shapes import Mamba2Shape

UNLIMITED = (0.0, float("inf"))


def mamba2(
    xBC: torch.Tensor,  # noqa: N803 (names of the paper and the checkpoints)
    dt: torch.Tensor,
    A_log: torch.Tensor,  # noqa: N803
    D: torch.Tensor,  # noqa: N803
    dt_bias: torch.Tensor,
    limits: tuple[float, float],
    shape: Mamba2Shape,
    state: StateLayer,
    tensor: int,
) -> torch.Tensor:
    """Return the outputs [tokens, heads, head_size] for xBC [tokens, channels], all heads of x,
    then all groups of B, then C. Steps: softplus(dt + dt_bias), clamped to `limits`; dt [tokens,
    heads]. A = -exp(A_log); A_log, D, dt_bias [heads] float32. Tensor `tensor` of the state is
    [heads * head_size, state_size]. Computed in float32, but for products of 16-bit numbers."""

    def compute(xBC: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:  # noqa: N803
        if use_kernels(A_log, D, dt_bias):
            from dovetail.nn.kernels import mamba2 as kernels

            with suppress(KernelUnavailable):
                return kernels.mamba2(xBC, dt, A_log, D, dt_bias, limits, shape, state, tensor)
        return _scanned(xBC, dt, A_log, D, dt_bias, limits, shape, state, tensor, in_chunks)

    return with_drafts(state, compute, xBC, dt)


def _scanned(
    xBC: torch.Tensor,  # noqa: N803
    dt: torch.Tensor,
    A_log: torch.Tensor,  # noqa: N803
    D: torch.Tensor,  # noqa: N803
    dt_bias: torch.Tensor,
    limits: tuple[float, float],
    shape: Mamba2Shape,
    state: StateLayer,
    tensor: int,
    compute: Compute,
) -> torch.Tensor:
    size = shape.groups * shape.state_size
    x, into, out_of = torch.split(xBC.float(), [shape.heads * shape.head_size, size, size], dim=-1)
    x = by_heads(x, shape.heads)
    into, out_of = (by_heads(part, shape.groups) for part in (into, out_of))
    steps = F.softplus(dt.float() + dt_bias).clamp(*limits)
    y = scan(
        state, tensor, (x * steps[..., None], into, out_of, -A_log.exp() * steps), compute, RULE
    )
    y += D[:, None] * x
    return y.to(xBC.dtype)


# The recurrence without D. Inputs: dt * x [n, heads, head_size], B, C [n, groups, state_size], A *
# dt [n, heads]
RULE = Rule(
    decay=lambda inputs: inputs[3].exp(),
    change=lambda held, inputs: inputs[:2],  # type: ignore[arg-type, return-value]
    outputs=lambda held, inputs: (held * shared(inputs[2], held.shape[1])).sum(-1),
)


def in_chunks(states: torch.Tensor, inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """`RULE` as matrix products: attention within the chunk, whose scores decay, and what the state
    adds."""
    if inputs[0].shape[1] == 1:
        return RULE.token_by_token(states, inputs)
    # [n, heads or groups, length, ...]
    x, into, out_of, decay = (part.transpose(1, 2) for part in inputs)
    sharing = x.shape[1] // into.shape[1]
    held = states.view(len(x), x.shape[1], x.shape[3], -1)
    total, between = decays(decay)
    scores = (out_of @ into.mT).repeat_interleave(sharing, dim=1) * between
    into, out_of = (part.repeat_interleave(sharing, dim=1) for part in (into, out_of))
    outputs = scores @ x + total.exp()[..., None] * (out_of @ held.mT)
    to_end = (total[..., -1:] - total).exp()[..., None]
    after = total[..., -1].exp()[..., None, None] * held + (x * to_end).mT @ into
    return outputs.transpose(1, 2), after.flatten(1, 2)


class Mamba2Mixer(Layer):
    """A Mamba2 layer without its projections: xBC [tokens, conv_channels], z [tokens, heads *
    head_size] and dt [tokens, heads], which are parts of a projection of the stream -> [tokens,
    heads * head_size], the input of the last projection. `shape` and all sizes are this rank's:
    heads and groups are split evenly over the ranks."""

    def __init__(
        self,
        shape: Mamba2Shape,
        eps: float,
        state: StateLayer,
        context: BuildContext,
        *,
        conv_bias: bool,
        norm_group: int,
        norm_before_gate: bool = False,
        limits: tuple[float, float] = UNLIMITED,
    ) -> None:
        """`state`: made of `shape.spec`. `eps`: of the norm, which norms groups of `norm_group`
        channels; for `norm_before_gate` see `gated_norm`. `limits`: of dt. Raises
        `UnsupportedError` if the ranks don't hold whole groups."""
        super().__init__()
        channels = shape.heads * shape.head_size
        if channels % norm_group:
            raise UnsupportedError(
                f"Mamba2: the gated norm has groups of {norm_group} channels, and each of "
                f"{context.parallel.size} ranks has {channels}: groups would "
                "cross ranks"
            )
        self.shape = shape
        self.eps = eps
        self.state = state
        self.limits = limits
        self.norm_group = norm_group
        self.norm_before_gate = norm_before_gate
        groups = shape.groups * shape.state_size
        self.conv = ShortConv(
            {"x": channels, "B": groups, "C": groups}, shape.kernel, context, bias=conv_bias
        )
        self.A_log, self.D, self.dt_bias = (per_head(shape.heads, context) for _ in range(3))
        where = Part(
            (channels * context.parallel.size,), 0, channels * context.parallel.rank, channels
        )
        self.norm_weight = Weight((channels,), {None: where}, context, scale=True)

    def forward(self, xBC: torch.Tensor, z: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:  # noqa: N803
        y = mamba2(
            self.conv(xBC, self.state, 0),
            dt,
            self.A_log,
            self.D,
            self.dt_bias,
            self.limits,
            self.shape,
            self.state,
            1,
        )
        return gated_norm(
            y.flatten(1),
            z,
            self.norm_weight,
            self.eps,
            self.norm_group,
            norm_before_gate=self.norm_before_gate,
        )

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        """Yield the rules for a checkpoint's tensors: `{prefix}conv1d.weight` and `.bias`, `A_log`,
        `D`, `dt_bias` and `norm.weight`."""
        yield from self.conv.weights(f"{prefix}conv1d.")
        for name, parameter in (
            ("A_log", self.A_log),
            ("D", self.D),
            ("dt_bias", self.dt_bias),
            ("norm.weight", self.norm_weight),
        ):
            yield WeightRule(f"{prefix}{name}", parameter)
