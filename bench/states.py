"""Measures the layers with recurrent states: time of a step, and its share of what the memory or
the matrix units allow.

    python -m bench.states                                        # decode and prefill of each model's layer
    python -m bench.states --only prefill --shapes qwen3-next --parts     # each kernel by itself
    python -m bench.states --only decode --tune                   # tilings, quickest first

A layer is the short convolution, the recurrence and the gated norm, without projections. The floor
of a decode is reading and writing each row's states once; beside a prefill stands the time of the
layer's projections at the rate of the device's matrix product. Random data, states in random order;
several layers take turns, so that their states exceed the L2 many times. All is replayed from a
CUDA graph.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from bench.attention import replayed_seconds
from bench.limits import copy_bytes_per_s, require_gpu, sustained_seconds
from dovetail.nn.kernels import delta_rule, launch, mamba2
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.kernels.states import Tiling
from dovetail.nn.state import DeltaShape, Mamba2Shape, gated_norm, short_conv
from dovetail.testing.memory import BoundStates, bind_states

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
ROTATED_BYTES = 1 << 30  # of states that the layers hold together, at least
SLOT_BYTES = 1 << 15
INDEX = 0


@dataclass(frozen=True)
class Model:
    """Sizes of a model's layer: `hidden` and `projected` outputs are those of its projections."""

    hidden: int
    shape: DeltaShape | Mamba2Shape
    norm_group: int

    @property
    def heads(self) -> int:
        return self.shape.v_heads if isinstance(self.shape, DeltaShape) else self.shape.heads

    @property
    def channels(self) -> int:
        """Number of channels of the layer's output."""
        return self.heads * (
            self.shape.v_size if isinstance(self.shape, DeltaShape) else self.shape.head_size
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of one row's state."""
        inputs, state = self.shape.spec(INDEX).tensors
        return inputs.rows * inputs.row_size * DTYPE.itemsize + state.rows * state.row_size * 4

    @property
    def projection_flop(self) -> int:
        """Return the multiplications of a token in the layer's projections: inputs of convolution,
        gate and heads, and the output."""
        return 2 * self.hidden * (self.shape.conv_channels + 2 * self.channels + 2 * self.heads)

    def flop(self) -> int:
        """Return the operations of a token in chunks of 64: matrix products, without the triangular
        inverse."""
        if isinstance(self.shape, DeltaShape):
            d = self.shape
            return 2 * d.v_heads * (3 * d.k_size * d.v_size + 64 * (2 * d.k_size + 2 * d.v_size))
        m = self.shape
        return 2 * m.heads * (2 * m.state_size * m.head_size + 64 * (m.state_size + m.head_size))


MODELS = {
    "qwen3.5-4b": Model(2560, DeltaShape(16, 32, 128, 128, 4), 128),
    "qwen3-next": Model(2048, DeltaShape(16, 32, 128, 128, 4), 128),
    "nemotron-h-8b": Model(4096, Mamba2Shape(128, 64, 128, 8, 4), 1024),
    "granite-4-h-small": Model(4096, Mamba2Shape(128, 64, 128, 1, 4), 8192),
}
DECODES = (1, 64, 256)
PREFILLS = ((8, 8192), (1, 8192), (1, 2048), (64, 64))


class Bench:
    """Layers of a model with a planned step: `lengths` tokens of each row."""

    def __init__(self, model: Model, lengths: Sequence[int], state_dtype: torch.dtype) -> None:
        self.model = model
        shape = model.shape
        rows = len(lengths)
        tokens = sum(lengths)
        decodes = max(lengths) == 1
        count = max(1, min(64, -(-ROTATED_BYTES // (rows * model.state_bytes)))) if decodes else 1
        self.layers = [self._layer(index, lengths, state_dtype) for index in range(count)]
        self.x = torch.randn(
            tokens, shape.conv_channels + model.channels, dtype=DTYPE, device=DEVICE
        )
        self.qkv, self.z = torch.split(self.x, [shape.conv_channels, model.channels], dim=-1)
        self.a, self.b = (
            torch.randn(tokens, model.heads, dtype=DTYPE, device=DEVICE) for _ in range(2)
        )
        self.weight = torch.randn(shape.conv_channels, shape.kernel, dtype=DTYPE, device=DEVICE) / 2
        self.gates = [torch.randn(model.heads, device=DEVICE) for _ in range(3)]
        self.norm = torch.ones(
            model.norm_group if isinstance(shape, DeltaShape) else model.channels,
            dtype=DTYPE,
            device=DEVICE,
        )

    def _layer(self, index: int, lengths: Sequence[int], state_dtype: torch.dtype) -> BoundStates:
        spec = self.model.shape.spec(INDEX)
        bound = bind_states(
            [spec],
            len(lengths),
            DTYPE,
            state_dtype,
            slot_bytes=SLOT_BYTES,
            slots=12,
            device=DEVICE,
            seed=index,
        )
        rows = list(range(len(lengths)))
        for tensor, shape in enumerate(spec.tensors):
            dtype = bound.layers[INDEX].memory[tensor].dtype
            for row in rows:
                values = torch.randn(1, shape.rows, shape.row_size, device=DEVICE).to(dtype) / 8
                bound.layers[INDEX].write(tensor, torch.tensor([row], device=DEVICE), values)
        bound.plan(rows, lengths, [9] * len(rows))
        return bound

    def conv(self, layer: BoundStates) -> torch.Tensor:
        return short_conv(self.qkv, self.weight, None, layer.layers[INDEX], 0)

    def recur(self, layer: BoundStates, x: torch.Tensor) -> torch.Tensor:
        shape = self.model.shape
        state = layer.layers[INDEX]
        if isinstance(shape, DeltaShape):
            return delta_rule.gated_delta_rule(
                x, self.a, self.b, self.gates[0], self.gates[1], shape, state, 1
            )
        return mamba2.mamba2(
            x,
            self.a,
            self.gates[0],
            self.gates[2],
            self.gates[1],
            (0.0, float("inf")),
            shape,
            state,
            1,
        )

    def norm_of(self, y: torch.Tensor) -> torch.Tensor:
        return gated_norm(
            y.flatten(1),
            self.z,
            self.norm,
            1e-6,
            self.model.norm_group,
            norm_before_gate=isinstance(self.model.shape, DeltaShape),
        )

    def run(self) -> None:
        for layer in self.layers:
            self.norm_of(self.recur(layer, self.conv(layer)))

    def seconds(self, run: Callable[[], None] | None = None) -> float:
        """Return the time of one layer, replayed from a graph."""
        return replayed_seconds(run or self.run) / len(self.layers)

    def parts(self) -> dict[str, float]:
        """Return the times of the convolution, the recurrence and the norm."""
        y = self.recur(self.layers[0], self.conv(self.layers[0]))

        def convs() -> None:
            for layer in self.layers:
                self.conv(layer)

        def norms() -> None:
            for _ in self.layers:
                self.norm_of(y)

        return {
            "conv": self.seconds(convs),
            "recurrence": self.recurrence_seconds(),
            "norm": self.seconds(norms),
        }

    def recurrence_seconds(self) -> float:
        """Return the time of the recurrence alone. Raises `KernelUnavailable` if a kernel doesn't
        compile."""
        x = self.conv(self.layers[0])

        def recurrences() -> None:
            for layer in self.layers:
                self.recur(layer, x)

        return self.seconds(recurrences)


def product_rate() -> float:
    """Return the operations per second of a large product."""
    a, b = (torch.randn(8192, 8192, dtype=DTYPE, device=DEVICE) for _ in range(2))
    return 2 * 8192**3 / sustained_seconds(lambda: a @ b.T)


def describe(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in parts.items())


def decode_table(names: Sequence[str], state_dtype: torch.dtype, with_parts: bool) -> None:
    bandwidth = copy_bytes_per_s()
    print(f"\ndecode: states read and written (device copy: {bandwidth / 1e12:.2f} TB/s)")
    print(f"{'layer':20} {'rows':>5} {'us':>8} {'of copy':>8}  parts, us")
    for name, rows in itertools.product(names, DECODES):
        bench = Bench(MODELS[name], [1] * rows, state_dtype)
        seconds = bench.seconds()
        share = (
            2
            * rows
            * bench.model.state_bytes
            * (1 if state_dtype == torch.float32 else 0.5)
            / bandwidth
            / seconds
        )
        print(
            f"{name:20} {rows:5} {seconds * 1e6:8.1f} {share:8.0%}  "
            f"{describe(bench.parts()) if with_parts else ''}",
            flush=True,
        )


def prefill_table(names: Sequence[str], state_dtype: torch.dtype, with_parts: bool) -> None:
    rate = product_rate()
    print(f"\nprefill (matrix product: {rate / 1e12:.0f} TFLOP/s)")
    print(
        f"{'layer':20} {'step':>10} {'ms':>8} {'TFLOP/s':>8} {'projections ms':>14} {'of them':>8} "
        f" parts, us"
    )
    for name, (rows, length) in itertools.product(names, PREFILLS):
        bench = Bench(MODELS[name], [length] * rows, state_dtype)
        seconds = bench.seconds()
        tokens = rows * length
        projections = tokens * bench.model.projection_flop / rate
        numbers = (
            f"{seconds * 1e3:8.3f} {tokens * bench.model.flop() / seconds / 1e12:8.0f} "
            f"{projections * 1e3:14.3f} {seconds / projections:8.0%}"
        )
        print(
            f"{name:20} {f'{rows} x {length}':>10} {numbers}  "
            f"{describe(bench.parts()) if with_parts else ''}",
            flush=True,
        )


def candidates(decode: bool) -> Iterator[Tiling]:
    if decode:
        yield from (
            Tiling(rows, warps)
            for rows, warps in itertools.product((8, 16, 32, 64, 128), (1, 2, 4, 8))
        )
    else:
        yield from (
            Tiling(*choice) for choice in itertools.product((16, 32, 64, 128), (4, 8), (1, 2, 3))
        )


def tuning_table(names: Sequence[str], decode: bool, state_dtype: torch.dtype) -> None:
    for name in names:
        module: Any = delta_rule if isinstance(MODELS[name].shape, DeltaShape) else mamba2
        for lengths in (
            [[1] * rows for rows in DECODES]
            if decode
            else [[length] * rows for rows, length in PREFILLS[:2]]
        ):
            bench = Bench(MODELS[name], lengths, state_dtype)
            results = list[tuple[float, Tiling]]()
            for tiling in candidates(decode):
                name_of = "recur_tiling" if decode else "carry_tiling"
                with (
                    patch.object(module, name_of, lambda *of, tiling=tiling: tiling),
                    patch.object(launch, "_unavailable", {}),
                ):
                    try:
                        results.append((bench.recurrence_seconds(), tiling))
                    except KernelUnavailable as error:  # too much shared memory, or registers
                        print(f"  {tiling}: {str(error)[-80:]}")
            print(f"\n{name}, {len(lengths)} x {lengths[0]}: the recurrence")
            for seconds, tiling in sorted(results, key=lambda result: result[0])[:8]:
                print(f"  {seconds * 1e6:9.1f} us  {tiling}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["decode", "prefill"])
    parser.add_argument("--shapes", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--state-dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--parts",
        action="store_true",
        help="the convolution, the recurrence and the norm by themselves, too",
    )
    parser.add_argument("--tune", action="store_true", help="every tiling of the recurrence")
    args = parser.parse_args()
    require_gpu()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    state_dtype: torch.dtype = getattr(torch, args.state_dtype)
    for what in ("decode", "prefill") if args.only is None else (args.only,):
        if args.tune:
            tuning_table(args.shapes, what == "decode", state_dtype)
        elif what == "decode":
            decode_table(args.shapes, state_dtype, args.parts)
        else:
            prefill_table(args.shapes, state_dtype, args.parts)


if __name__ == "__main__":
    main()
