"""The kernels of mixtures of experts: which tiling is quickest for how many tokens, and its share
of what the memory allows.

    python -m bench.experts --shape qwen3-30b-a3b --tokens 1 8 64 256           # as chosen now
    python -m bench.experts --shape qwen3-30b-a3b --tune                        # every tiling, quickest first
    python -m bench.experts --checkpoint fp8 --tune --tokens 1 8 64             # of weights in another format

Routing is uniform. A CUDA graph computes several steps of one layer, each with its own tokens. The
floor is reading the weights of the chosen experts once, or the arithmetic.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.limits import BYTES, Limits, measure_limits, require_gpu, seconds
from bench.shapes import EXPERT_BYTES, SHAPES, Shape
from dovetail.nn.kernels import experts as kernels
from dovetail.nn.kernels import few_experts_fp4
from dovetail.nn.kernels.available import has_float8_products
from dovetail.nn.kernels.expert_sorting import sort
from dovetail.nn.kernels.experts import Few, FewTiling, Many, Tiling
from dovetail.nn.kernels.launch import compiling_ahead
from dovetail.nn.kernels.stored_experts import CHUNK, FLOAT8, FP4, PLAIN, RAISED, Stored
from dovetail_executors.runtime.recording import record

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 8192)
STEPS = 6  # of a graph
MOST_FEW = 32  # tokens for which pairs one by one are tried
MOST_HELD = 384  # weights of a thread then: three quarters of its registers


@dataclass
class Layer:
    """One layer's experts, and tokens for them."""

    gate_up: Stored
    down: Stored
    count: int
    per_token: int

    def steps(
        self, tokens: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield x, what lies between the layers, ids and weights."""
        for _ in range(STEPS):
            x = torch.randn(tokens, self.gate_up.inputs, device="cuda", dtype=torch.bfloat16)
            inner = torch.randn(
                tokens * self.per_token, self.down.inputs, device="cuda", dtype=torch.bfloat16
            )
            ids = torch.rand(tokens, self.count, device="cuda").topk(self.per_token).indices.int()
            yield x, inner, ids, torch.full(ids.shape, 1 / self.per_token, device="cuda")


def layer_of(shape: Shape, checkpoint: str | None) -> Layer:
    """Return experts with random weights in the format of such a checkpoint; None: bfloat16."""

    def stored(outputs: int, inputs: int) -> Stored:
        count = shape.experts
        fp4_bytes = -(-inputs // CHUNK) * CHUNK // 2
        if checkpoint is None:
            values = torch.empty(count, outputs, inputs, device="cuda", dtype=torch.bfloat16)
            return Stored(values.normal_(std=0.02), inputs)
        if checkpoint == "fp8":
            codes = torch.randint(0, 96, (count, outputs, inputs), device="cuda", dtype=torch.uint8)
            scales = torch.full((count, -(-outputs // 128), -(-inputs // 128)), 0.02, device="cuda")
            return Stored(
                codes.view(torch.float8_e4m3fn),
                inputs,
                scales,
                None,
                128,
                FLOAT8,
                has_float8_products(scales.device),
            )
        codes = torch.randint(0, 256, (count, outputs, fp4_bytes), device="cuda", dtype=torch.uint8)
        codes = codes.view(torch.int16)
        scales = torch.full(
            (count, -(-inputs // CHUNK), outputs, 4), RAISED + 120, device="cuda", dtype=torch.uint8
        )
        return Stored(codes, inputs, scales.view(torch.int32)[..., 0], None, 32, FP4)

    inner = shape.intermediate
    return Layer(
        stored(2 * inner, shape.hidden),
        stored(shape.hidden, inner),
        shape.experts,
        shape.experts_per_token,
    )


def us_of(steps: Sequence[Callable[[], Any]]) -> float:
    """Microseconds of a step."""

    def run() -> None:
        for step in steps:
            step()

    return seconds(record(run).replay, 8, 2) * 1e6 / len(steps)


AnyTiling = FewTiling | Tiling | few_experts_fp4.Tiling


def calls(layer: Layer, tokens: int, tiling: AnyTiling, first: bool) -> list[Callable[[], Any]]:
    """Steps of gate and up with this tiling, or of down, sorted before."""
    found: list[Callable[[], Any]] = []
    stored = layer.gate_up if first else layer.down
    around = kernels.gating("silu") if first else {}
    for x, inner, ids, weights in layer.steps(tokens):
        source, outputs = (x, layer.down.inputs) if first else (inner, layer.down.outputs)
        if not isinstance(tiling, Tiling):
            out = torch.empty(
                len(ids) * (1 if isinstance(tiling, FewTiling) and not first else layer.per_token),
                outputs,
                device="cuda",
                dtype=torch.bfloat16 if first else torch.float32,
            )
            few = kernels.few_layer if isinstance(tiling, FewTiling) else few_experts_fp4.multiply
            found.append(
                lambda a=(source, stored, None, ids, weights, out, tiling, around), few=few: few(*a)
            )
            continue
        places, blocks = sort(ids, layer.count, tiling.rows)
        out = torch.empty(ids.numel(), outputs, device="cuda", dtype=torch.bfloat16)
        run = kernels.many_layer
        if layer.gate_up.narrows:
            run = kernels.float8_layer if narrows(layer, tokens) else kernels.split_layer
        found.append(
            lambda a=(source, stored, None, weights, places, blocks, out, tiling, around), run=run: (
                run(*a)
            )
        )
    return found


def narrows(layer: Layer, tokens: int) -> bool:
    """True if inputs of this many tokens are rounded to float8."""
    return layer.gate_up.narrows and tokens * layer.per_token > kernels.NARROW_FROM * layer.count


def candidates(tokens: int, layer: Layer, first: bool) -> Iterator[AnyTiling]:
    if layer.gate_up.kind == FP4 and tokens <= few_experts_fp4.TOKENS:
        for n, warps in itertools.product((8, 16, 32), (4, 8)):
            if first or n > 8:
                yield few_experts_fp4.Tiling(n, warps)
        return
    pairs = tokens * layer.per_token
    # weights of an output that are asked for at once
    held = 2 * layer.gate_up.inputs if first else min(8, layer.per_token) * layer.down.inputs
    for n, warps in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8)):
        if tokens <= MOST_FEW and 16 <= n * held // (32 * warps) <= MOST_HELD:
            yield FewTiling(n, warps)
    if tokens < 4:
        return
    average = pairs / layer.count
    if narrows(layer, tokens):
        for rows, n, stages, warps in itertools.product(
            (64, 128), (64, 128, 256), (3, 4, 5), (4, 8)
        ):
            held = rows * n * (2 if first else 1) // (32 * warps)  # sums of a thread
            if 32 <= held <= 128 and CHUNK * (rows + (2 if first else 1) * n) * stages <= 220 << 10:
                yield Tiling(rows, n, CHUNK, stages, warps)
        return
    if layer.gate_up.narrows:
        for n, stages, warps in itertools.product((64, 128), (3, 4, 6), (4, 8)):
            rows = 16 if average <= 8 else 32
            if CHUNK * (2 * rows + (2 if first else 1) * n) * stages <= 220 << 10:
                yield Tiling(rows, n, CHUNK, stages, warps)
        return
    narrow = layer.gate_up.kind != PLAIN  # these have a chunk of their own, and fewer bytes of it
    chunks, stages_tried = ((CHUNK,), (3, 4, 5, 6, 8)) if narrow else ((64, 128), (2, 3, 4, 5))
    for rows, n, k, stages, warps in itertools.product(
        (16, 32, 64, 128), (32, 64, 128), chunks, stages_tried, (4, 8)
    ):
        if (
            rows > max(16, 8 * average)
            or rows < min(64, average)
            or n * rows > 128 * 128
            or (n == 32 and rows > 32)
        ):
            continue
        if rows < 64 and warps == 8 and not (narrow and n == 128):
            continue
        weight_bytes = layer.gate_up.values.nbytes / (
            layer.gate_up.values.shape[0] * layer.gate_up.outputs * layer.gate_up.inputs
        )
        if k * (weight_bytes * (2 if first else 1) * n + 2 * rows) * stages <= 220 << 10 and (
            n,
            k,
        ) != (32, 64):
            yield Tiling(rows, n, k, stages, warps)


def tune(layer: Layer, tokens: int, best: int) -> Few | Many | None:
    """Every tiling for each of both layers; those quickest together have blocks alike. None for
    `few_experts_fp4`, whose tilings aren't arguments."""
    found: dict[bool, dict[AnyTiling, float]] = {True: {}, False: {}}
    for first in (True, False):
        tilings = list(candidates(tokens, layer, first))
        with compiling_ahead(
            torch.device("cuda", torch.cuda.current_device()), os.cpu_count() or 1
        ):
            for tiling in tilings:
                calls(layer, tokens, tiling, first)[0]()
        for tiling in tilings:
            try:
                found[first][tiling] = us_of(calls(layer, tokens, tiling, first))
            except Exception as error:  # too much shared memory, say
                print(f"    {tiling}: {type(error).__name__}", flush=True)
        for tiling, us in sorted(found[first].items(), key=lambda item: item[1])[:best]:
            print(
                f"{tokens:>6} {'gate_up' if first else 'down':>8} {us:9.1f} us  {tiling}",
                flush=True,
            )
    sums: dict[Few | Many, float] = {}
    for (a, us), (b, more) in itertools.product(found[True].items(), found[False].items()):
        if isinstance(a, FewTiling) and isinstance(b, FewTiling):
            sums[Few(a, b)] = us + more
        elif isinstance(a, Tiling) and isinstance(b, Tiling) and a.rows == b.rows:
            sums[Many(a, b)] = us + more
    return min(sums, key=lambda choice: sums[choice], default=None)


def tell(
    layer: Layer, tokens: int, tuned: Few | Many | None, limits: Limits, weight_bytes: float
) -> None:
    """The whole of a layer, sorting included, as chosen now unless it is `tuned`."""
    choice: Any = tuned or kernels.choice_for(
        tokens, layer.per_token, layer.gate_up, layer.down.inputs
    )
    if layer.gate_up.kind == FP4 and tokens <= few_experts_fp4.TOKENS:
        choice = few_experts_fp4.FIRST, few_experts_fp4.LAST
    steps = list(layer.steps(tokens))
    distinct = sum(len(ids.unique()) for _, _, ids, _ in steps) / len(steps)
    weights = layer.gate_up.outputs * layer.gate_up.inputs + layer.down.outputs * layer.down.inputs
    around = (layer.gate_up, layer.down, None, None, "silu")
    us = us_of(
        [lambda x=x, a=(ids, w, tuned): kernels.experts(x, *around, *a) for x, _, ids, w in steps]
    )
    read = weight_bytes * weights * distinct / limits.copy_bytes_per_s
    floor = 1e6 * max(read, 2 * weights * tokens * layer.per_token / limits.flop_per_s)
    print(
        f"    {tokens}: {choice},  # {us:.1f} us, {distinct:.1f} experts, {100 * floor / us:.0f} % "
        f"of the floor",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape",
        default="qwen3-30b-a3b",
        choices=[name for name, shape in SHAPES.items() if shape.experts],
    )
    parser.add_argument(
        "--checkpoint", choices=["fp8", "mxfp4"], help="format of weights, instead of bfloat16"
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--best", type=int, default=4, help="tilings that are shown")
    args = parser.parse_args()
    require_gpu()
    with torch.inference_mode():
        shape = SHAPES[args.shape]
        limits = measure_limits(shape)
        layer = layer_of(shape, args.checkpoint)
        weight_bytes = EXPERT_BYTES.get(args.checkpoint, BYTES)
        print(
            f"{args.shape}: {limits.copy_bytes_per_s / 1e12:.2f} TB/s, "
            f"{limits.flop_per_s / 1e12:.0f} TFLOP/s",
            flush=True,
        )
        for tokens in args.tokens:
            tell(layer, tokens, None, limits, weight_bytes)
            if args.tune:
                tell(layer, tokens, tune(layer, tokens, args.best), limits, weight_bytes)


if __name__ == "__main__":
    main()
