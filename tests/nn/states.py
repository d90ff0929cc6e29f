"""Recurrent layers with random weights, exact results in float64, and a driver that serves
sequences step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from dovetail.nn.state import (
    DeltaShape,
    Mamba2Shape,
    delta,
    gated_delta_rule,
    mamba,
    mamba2,
    short_conv,
)
from dovetail.testing.memory import BoundStates, bind_states
from tests.kernels import DEVICE

DELTA = DeltaShape(k_heads=1, v_heads=2, k_size=16, v_size=8, kernel=4)
MAMBA = Mamba2Shape(heads=2, head_size=8, state_size=16, groups=1, kernel=4)
SHAPES = {"delta": DELTA, "mamba2": MAMBA}
LIMITS = (0.01, 3.0)


@dataclass(frozen=True)
class Tokens:
    """Inputs of a row: of the convolution [length, channels], and of a token's gates [length,
    heads]."""

    x: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor

    def __len__(self) -> int:
        return len(self.x)

    def part(self, begin: int, end: int) -> Tokens:
        return Tokens(self.x[begin:end], self.a[begin:end], self.b[begin:end])


@dataclass(frozen=True)
class Net:
    """Weights of a layer without its projections and norm."""

    shape: DeltaShape | Mamba2Shape
    weight: torch.Tensor
    bias: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    D: torch.Tensor

    @property
    def heads(self) -> int:
        return len(self.A_log)

    def sequence(self, length: int) -> Tokens:
        make = torch.randn(
            length,
            self.shape.conv_channels + 2 * self.heads,
            dtype=self.weight.dtype,
            device=DEVICE,
        )
        return Tokens(*make.split([self.shape.conv_channels, self.heads, self.heads], dim=-1))

    def bound(
        self,
        rows: int,
        slot_bytes: int = 256,
        state_dtype: torch.dtype = torch.float32,
        max_lines: int = 0,
    ) -> BoundStates:
        # a second layer, so that changes are told apart
        specs = [self.shape.spec(index) for index in ((5, 9) if max_lines else (5,))]
        return bind_states(
            specs,
            rows,
            self.weight.dtype,
            state_dtype,
            slot_bytes=slot_bytes,
            slots=2,
            device=DEVICE,
            max_lines=max_lines,
        )

    def compute(self, bound: BoundStates, s: Tokens, index: int = 5) -> torch.Tensor:
        """The planned step: [tokens, heads, size]."""
        state = bound.layers[index]
        y = short_conv(s.x, self.weight, self.bias, state, 0)
        if isinstance(self.shape, DeltaShape):
            return gated_delta_rule(y, s.a, s.b, self.A_log, self.dt_bias, self.shape, state, 1)
        return mamba2(y, s.a, self.A_log, self.D, self.dt_bias, LIMITS, self.shape, state, 1)

    def exact(self, s: Tokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Outputs [tokens, heads, size] of a whole sequence, the convolution's inputs and the state
        after it; in float64, token by token."""
        wide = Tokens(s.x.double(), s.a.double(), s.b.double())
        past = self.shape.kernel - 1
        seen = F.pad(wide.x.T, (past, 0))
        y = F.silu(
            F.conv1d(seen, self.weight[:, None].double(), self.bias.double(), groups=len(seen))
        ).T
        rate, steps = -self.A_log.double().exp(), F.softplus(wide.a + self.dt_bias.double())
        if isinstance(self.shape, DeltaShape):
            d = self.shape
            q, k, v = y.split([d.k_heads * d.k_size] * 2 + [d.v_heads * d.v_size], dim=-1)
            q, k = (
                x.unflatten(-1, (d.k_heads, -1))
                / (x.unflatten(-1, (d.k_heads, -1)).square().sum(-1, keepdim=True) + 1e-6).sqrt()
                for x in (q, k)
            )
            inputs = (
                q / d.k_size**0.5,
                k,
                v.unflatten(-1, (d.v_heads, -1)),
                rate * steps,
                wide.b.sigmoid(),
            )
            start, compute = (
                torch.zeros(1, d.v_heads * d.v_size, d.k_size, dtype=torch.float64, device=DEVICE),
                delta.RULE.token_by_token,
            )
            skip: torch.Tensor | float = 0.0
        else:
            m = self.shape
            x, into, out_of = y.split(
                [m.heads * m.head_size] + [m.groups * m.state_size] * 2, dim=-1
            )
            x, into, out_of = (
                x.unflatten(-1, (m.heads, -1)),
                into.unflatten(-1, (m.groups, -1)),
                out_of.unflatten(-1, (m.groups, -1)),
            )
            steps = steps.clamp(*LIMITS)
            inputs = x * steps[..., None], into, out_of, rate * steps
            start, compute = (
                torch.zeros(
                    1, m.heads * m.head_size, m.state_size, dtype=torch.float64, device=DEVICE
                ),
                mamba.RULE.token_by_token,
            )
            skip = self.D.double()[:, None] * x
        outputs, after = compute(start, tuple(x[None] for x in inputs))
        return outputs[0] + skip, seen[:, len(s) :], after[0]


def net(kind: str, dtype: torch.dtype = torch.float32, **sizes: int) -> Net:
    shape = replace(SHAPES[kind], **sizes)
    heads = shape.v_heads if isinstance(shape, DeltaShape) else shape.heads
    weight, bias = (
        torch.randn(shape.conv_channels, shape.kernel) / 2,
        torch.randn(shape.conv_channels) / 2,
    )
    return Net(
        shape,
        weight.to(DEVICE, dtype),
        bias.to(DEVICE, dtype),
        *(torch.randn(heads, device=DEVICE) for _ in range(3)),
    )


def serve(
    model: Net,
    bound: BoundStates,
    sequences: Sequence[Tokens],
    steps: Sequence[Sequence[tuple[int, int, int]]],
) -> list[torch.Tensor]:
    """Compute steps of (row, tokens, checkpoint_at); row i is sequence i. Return each row's outputs
    so far."""
    done, outputs = [0] * len(sequences), [list[torch.Tensor]() for _ in sequences]
    for step in steps:
        rows, lengths, at = (list(part) for part in zip(*step, strict=True))
        bound.plan(rows, lengths, [done[row] for row in rows], at)
        parts = [
            sequences[row].part(done[row], done[row] + length)
            for row, length in zip(rows, lengths, strict=True)
        ]
        result = model.compute(
            bound,
            Tokens(
                *(torch.cat([getattr(part, name) for part in parts]) for name in ("x", "a", "b"))
            ),
        )
        for row, part in zip(rows, result.split(lengths), strict=True):
            outputs[row].append(part)
            done[row] += len(part)
    return [torch.cat(parts) if parts else torch.empty(0) for parts in outputs]


def state_of(bound: BoundStates, place: int, index: int = 5) -> list[torch.Tensor]:
    """The convolution's inputs and the state at a place."""
    return [
        bound.layers[index].read(tensor, torch.tensor([place], device=DEVICE))[0]
        for tensor in (0, 1)
    ]
