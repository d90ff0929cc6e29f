"""What a decoder's linear layers cost for few rows: our kernels (`one_row` and `few_rows` of `dovetail.nn.kernels`) beside torch's products, each
with what stands around it.

    python -m bench.products --shape qwen3-0.6b qwen3-8b --rows 1 8
    python -m bench.products --rows 8 --tune                # every tiling of `few_rows`, quickest first

Times are of one call among many in a CUDA graph, each with weights of its own, so that nothing is found in the L2.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from triton.runtime.errors import OutOfResources

from bench.limits import require_gpu
from bench.shapes import SHAPES, Shape
from dovetail.nn.activation import silu_mul
from dovetail.nn.kernels import few_rows
from dovetail.nn.linear import Kernel, kernel_for
from dovetail.nn.norm import rms_norm

ROTATED_BYTES = 200 << 20
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Product:
    name: str
    inputs: int
    outputs: int  # rows of the weight
    normed: bool = False
    gated: bool = False
    adds: bool = False

    @property
    def bytes(self) -> int:
        return 2 * self.inputs * self.outputs


def products(shape: Shape) -> list[Product]:
    """Of one layer, and the head."""
    wide = shape.heads * shape.head_size
    return [
        Product("qkv", shape.hidden, wide + 2 * shape.kv_heads * shape.head_size, normed=True),
        Product("o", wide, shape.hidden, adds=True),
        Product("gate_up", shape.hidden, 2 * shape.intermediate, normed=True, gated=True),
        Product("down", shape.intermediate, shape.hidden, adds=True),
        Product("head", shape.hidden, shape.vocab),
    ]


class Work:
    """Inputs of one product, with as many weights as take turns."""

    def __init__(self, product: Product, rows: int) -> None:
        self.product = product
        turns = max(2, min(32, ROTATED_BYTES // product.bytes))
        self.weights = [_randn(product.outputs, product.inputs) for _ in range(turns)]
        self.x, self.norm = _randn(rows, product.inputs), _randn(product.inputs)
        self.out = _randn(rows, product.outputs) if product.adds else None

    def torch(self, weight: torch.Tensor) -> torch.Tensor:
        x = rms_norm(self.x, self.norm, EPS) if self.product.normed else self.x
        if self.out is not None:
            return self.out.addmm_(x, weight.t())
        y = F.linear(x, weight)
        return silu_mul(y) if self.product.gated else y

    def ours(self, kernel: Kernel) -> Callable[[torch.Tensor], torch.Tensor]:
        norm = (self.norm, EPS) if self.product.normed else None
        return lambda weight: kernel(self.x, weight, norm=norm, gated=self.product.gated, out=self.out)

    def seconds(self, call: Callable[[torch.Tensor], torch.Tensor]) -> float:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call(self.weights[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in self.weights:
                call(weight)
        times = []
        for _ in range(9):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000 / len(self.weights))
        return statistics.median(times)


def _randn(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16) * 0.1


def candidates(product: Product) -> Iterator[few_rows.Tiling]:
    for outputs, warps, inputs in itertools.product((8, 16, 32, 64), (4, 8), (512, 1024, 2048)):
        tiling = few_rows.Tiling(outputs, warps, inputs)
        if few_rows.fits(tiling, product.inputs, product.gated):
            yield tiling


def tune(work: Work) -> list[tuple[float, few_rows.Tiling]]:
    """Every tiling that fits the device, quickest first, with its seconds."""
    results = []
    for tiling in candidates(work.product):
        try:
            results.append((work.seconds(work.ours(partial(few_rows.linear, tiling=tiling))), tiling))
        except OutOfResources:
            continue
    return sorted(results, key=lambda result: result[0])


def tell(shape: str, work: Work, every_tiling: bool) -> None:
    product, rows = work.product, len(work.x)
    plain, kernel = work.seconds(work.torch), kernel_for(work.x, work.weights[0], gated=product.gated)
    line = f"{shape:>12} {rows:3} x {product.name:<8}  torch {plain * 1e6:6.1f} us"
    if kernel is not None:
        ours = work.seconds(work.ours(kernel))
        line += f"  ours {ours * 1e6:6.1f} us  {product.bytes / ours / 1e12:.2f} TB/s"
    print(line, flush=True)
    for seconds, tiling in tune(work) if every_tiling and rows > 1 else ():
        print(f"{'':24} {seconds * 1e6:6.1f} us  {tiling}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["qwen3-0.6b", "qwen3-8b"], choices=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    require_gpu()
    with torch.inference_mode():
        for name, rows in itertools.product(args.shape, args.rows):
            for product in products(SHAPES[name]):
                tell(name, Work(product, rows), args.tune)


if __name__ == "__main__":
    main()
