"""Measure the layers of a decoder for some rows, without attention: with our kernels for linear
layers (`one_row`, `few_rows` and `many_rows` of `dovetail.nn.kernels`), and with torch's products
and kernels for the norm, the gate and the addition around them.

    python -m bench.products --shape qwen3-0.6b qwen3-8b --rows 1 8 64 256
    python -m bench.products --rows 8 --tune                # every tiling of `few_rows`, one layer after the other, quickest first

The whole decoder runs in a CUDA graph, but in attention's place a kernel copies q. Chained kernels
overlap, so what one of them costs shows only among the others: told is by how much a layer of the
decoder takes longer with one product left to torch.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from bench.limits import require_gpu, seconds
from bench.shapes import SHAPES, Shape
from dovetail.api.attention import AttentionLayer, LayerCache, LayerSpec
from dovetail.api.model import BuildContext, ModelInputs
from dovetail.nn.attention import Attention
from dovetail.nn.decoder import Block, Decoder
from dovetail.nn.embedding import LMHead, VocabParallelEmbedding
from dovetail.nn.feed_forward import GatedFeedForward
from dovetail.nn.format import dense
from dovetail.nn.kernels import few_rows
from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.norm import RMSNorm
from dovetail.nn.parallel import SINGLE
from dovetail.nn.rotary import Rope
from dovetail.nn.weights import dummy_weights
from dovetail_executors.runtime.recording import record

WEIGHTS_BYTES = 1 << 30  # of all layers, about: nothing is found in the L2
REPLAYS = 15
VOCAB = 128
PRODUCTS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


@triton.jit
def _copy_row(
    x,
    out,
    STRIDE: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    let_next_begin(PDL)
    wait(PDL)
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    tl.store(out + row * SIZE + i, tl.load(x + row * STRIDE + i, mask=i < SIZE), mask=i < SIZE)


class NoAttention(AttentionLayer):
    """Gives q back."""

    def __init__(self, spec: LayerSpec) -> None:
        self.spec = spec

    def bind(self, cache: LayerCache) -> None:
        """Store nothing."""

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store nothing."""

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        size = out[0].numel()
        block = triton.next_power_of_2(size)
        _copy_row[(len(q),)](
            q, out, STRIDE=q.stride(0), SIZE=size, BLOCK=block, num_warps=4, **pdl_options(q.device)
        )
        return out


@dataclass(slots=True)
class Choice:
    """Kernels that linear layers may use, by the names of `PRODUCTS`."""

    left_to_torch: frozenset[str] = frozenset()
    tilings: dict[str, few_rows.Tiling] | None = None  # else what `few_rows.tiling_for` says


def decoder(shape: Shape, context: BuildContext) -> Decoder:
    """Return enough layers of a dense model that their weights don't fit in the GPU's cache."""
    count = max(2, min(shape.layers, WEIGHTS_BYTES * shape.layers // (2 * shape.block_weights)))
    hidden = shape.hidden
    size = shape.head_size
    eps = 1e-6

    def block(index: int) -> Block[Attention]:
        spec = LayerSpec(index, shape.heads, shape.kv_heads, size, size**-0.5)
        return Block(
            RMSNorm(hidden, eps, context),
            Attention(hidden, spec, context),
            RMSNorm(hidden, eps, context),
            GatedFeedForward(hidden, shape.intermediate, context),
        )

    embedding = VocabParallelEmbedding(VOCAB, hidden, context)
    return Decoder(
        embedding,
        [block(index) for index in range(count)],
        RMSNorm(hidden, eps, context),
        LMHead(VOCAB, hidden, context, tied=embedding),
        [Rope(int(shape.rope_theta), size)] * count,
        shape.max_len,
    )


class Layers:
    """Enough layers of a model that their weights don't fit in the GPU's cache."""

    def __init__(self, shape: Shape) -> None:
        device = torch.device("cuda")
        self.model = decoder(
            shape,
            BuildContext(
                parallel=SINGLE, dtype=torch.bfloat16, device=device, make_attention=NoAttention
            ),
        )
        dummy_weights(self.model, seed=0)
        self.names = {
            weight.data_ptr(): name.split(".")[-2] for name, weight in self.model.named_parameters()
        }

    def us(self, rows: int, choice: Choice) -> float:
        """Return the microseconds of one layer."""
        positions = torch.arange(rows, device="cuda")
        inputs = ModelInputs(token_ids=positions % VOCAB, positions=positions)
        with self.taking(choice):
            recording = record(lambda: self.model(inputs))
        return seconds(recording.replay, REPLAYS) * 1e6 / len(self.model.blocks)

    @contextmanager
    def taking(self, choice: Choice) -> Iterator[None]:
        """Context in which layers use the kernels in `choice`."""

        def unless_left(kernel_for: Callable[..., Any]) -> Callable[..., Any]:
            def decide(rows: int, weight: torch.Tensor, *around: bool, **named: bool) -> Any:
                left = self.names[weight.data_ptr()] in choice.left_to_torch
                return None if left else kernel_for(rows, weight, *around, **named)

            return decide

        def tiling_for(weight: torch.Tensor, rows: int, gated: bool) -> few_rows.Tiling | None:
            return (choice.tilings or {}).get(self.names[weight.data_ptr()]) or own_tiling_for(
                weight, rows, gated
            )

        own_tiling_for = few_rows.tiling_for
        few, many = (
            patch.object(dense, name, unless_left(getattr(dense, name)))
            for name in ("kernel_for_few", "kernel_for_many")
        )
        with few, many, patch.object(few_rows, "tiling_for", tiling_for):
            yield


def candidates(weight: torch.Tensor, gated: bool) -> Iterator[few_rows.Tiling]:
    for outputs, warps, inputs in itertools.product(
        (8, 16, 32, 64), (4, 8), (256, 512, 1024, 2048)
    ):
        tiling = few_rows.Tiling(outputs, warps, inputs)
        if few_rows.fits(tiling, weight.shape[1], gated):
            yield tiling


def tune(layers: Layers, rows: int) -> None:
    """Every tiling that fits the device, for one product after the other, the others as they are.
    Each is told with what a layer takes."""
    weights = {name.split(".")[-2]: weight for name, weight in layers.model.named_parameters()}
    for name in PRODUCTS:
        results = []
        for tiling in candidates(weights[name], name == "gate_up_proj"):
            try:
                results.append((layers.us(rows, Choice(tilings={name: tiling})), tiling))
            except OutOfResources:
                continue
        for us, tiling in sorted(results, key=lambda result: result[0])[:8]:
            print(f"{name:>24} {us:7.2f} us  {tiling}", flush=True)


def tell(name: str, layers: Layers, rows: int) -> None:
    ours = layers.us(rows, Choice())
    plain = layers.us(rows, Choice(frozenset(PRODUCTS)))
    without = (
        f"{product} {layers.us(rows, Choice(frozenset({product}))) - ours:+.1f}"
        for product in PRODUCTS
    )
    print(
        f"{name:>12} {rows:4} rows: {ours:6.1f} us a layer, with torch's {plain:6.1f}; of these "
        f"alone, {', '.join(without)}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", default=["qwen3-0.6b", "qwen3-8b"], choices=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    require_gpu()
    with torch.inference_mode():
        for name in args.shape:
            layers = Layers(SHAPES[name])
            for rows in args.rows:
                tell(name, layers, rows)
                if args.tune:
                    tune(layers, rows)


if __name__ == "__main__":
    main()
