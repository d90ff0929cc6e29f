"""What a decoder's linear layers cost for one row: `dovetail.nn.kernels.one_row` beside torch's products, each with what stands around it.

    python -m bench.products --shape qwen3-0.6b qwen3-8b

Times are of one call among many in a CUDA graph, each with weights of its own, so that nothing is found in the L2.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bench.limits import require_gpu
from bench.shapes import SHAPES, Shape
from dovetail.nn.activation import silu_mul
from dovetail.nn.kernels import one_row

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

    def __init__(self, product: Product) -> None:
        self.product = product
        turns = max(2, min(32, ROTATED_BYTES // product.bytes))
        self.weights = [_randn(product.outputs, product.inputs) for _ in range(turns)]
        self.x, self.norm = _randn(1, product.inputs), _randn(product.inputs)
        self.out = _randn(1, product.outputs) if product.adds else None

    def torch(self, weight: torch.Tensor) -> torch.Tensor:
        x = F.rms_norm(self.x, self.norm.shape, self.norm, EPS) if self.product.normed else self.x
        if self.out is not None:
            return self.out.addmm_(x, weight.t())
        y = F.linear(x, weight)
        return silu_mul(y) if self.product.gated else y

    def ours(self, weight: torch.Tensor) -> torch.Tensor:
        norm = (self.norm, EPS) if self.product.normed else None
        return one_row.linear(self.x, weight, norm=norm, gated=self.product.gated, out=self.out)

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["qwen3-0.6b", "qwen3-8b"], choices=SHAPES)
    args = parser.parse_args()
    require_gpu()
    with torch.inference_mode():
        for shape in args.shape:
            for product in products(SHAPES[shape]):
                work = Work(product)
                plain, ours = work.seconds(work.torch), work.seconds(work.ours)
                print(
                    f"{shape:>12} {product.name:>8}  torch {plain * 1e6:6.1f} us  ours {ours * 1e6:6.1f} us  {product.bytes / ours / 1e12:.2f} TB/s"
                )


if __name__ == "__main__":
    main()
