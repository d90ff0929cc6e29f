"""The weight formats of `dovetail.nn.format`: each kernel of each against dequantizing and
multiplying in float32, its time beside bfloat16's, and what a decoder's layer takes with each.

    python -m bench.formats                                   # all tables: some ten minutes on an H200
    python -m bench.formats --only layers --rows 1 64 256     # whole layers alone, without attention
    python -m bench.formats --only tune --rows 1 16 64        # every tiling of `streamed`, quickest first
    python -m bench.formats --only one-row --shape qwen3-8b   # one row of 8 and 4 bits: layers, then outputs and warps of a program; 2 minutes
    TRITON_INTERPRET=1 python -m bench.formats --only check   # without a GPU: small sizes, in float16

A line of the first table is one product: us, the share of the copy bandwidth measured in the same
run at which weights, inputs and outputs pass, how often it fits into cuBLAS's time for bfloat16,
and its error, ‖y - exact‖ / ‖exact‖, which must be below the rounding of what it rounds: 2**-8
where that is the result alone, 2**-4 where inputs are rounded to e4m3. What the format itself would
choose is marked *. Times are of calls in a CUDA graph, whose weights take turns, so that together
they exceed the L2.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch

from bench.kernels import DEVICE, ON_GPU, seconds_in_graph
from bench.limits import copy_bytes_per_s, require_gpu, seconds
from bench.shapes import SHAPES, Shape
from dovetail.api.model import BuildContext, ModelInputs
from dovetail.nn.activation import silu_mul
from dovetail.nn.build import RuntimeContext
from dovetail.nn.format import DENSE, Quantization, WeightFormat, float8, int4
from dovetail.nn.format.compressed_tensors import PackedInt4
from dovetail.nn.format.float8 import Float8
from dovetail.nn.kernels.launch import KernelUnavailable, _unavailable
from dovetail.nn.parallel import SINGLE
from dovetail.nn.parameter import Part, Weight
from dovetail.nn.placed_weights import place_weights
from dovetail.nn.residual import Residual
from dovetail.nn.weights import dummy_weights
from dovetail_executors.runtime.recording import record

DTYPE = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter rounds bfloat16 wrongly
FORMATS: dict[str, WeightFormat] = {
    "bf16": DENSE,
    "fp8": Float8("computed"),
    "fp8 128x128": Float8("block", (128, 128), "weight_scale_inv"),
    "int4 g128": PackedInt4(128, symmetric=True),
    "int4 g64 z": PackedInt4(64, symmetric=False),
    "int4 g32 z": PackedInt4(32, symmetric=False),
}
ROTATED_BYTES = 256 << 20
# bounds of errors
WIDE = 2.0**-8
NARROW = 2.0**-4
Run = Callable[[torch.Tensor, Any], torch.Tensor]


@dataclass(frozen=True)
class Product:
    """A linear layer of a decoder."""

    name: str
    outputs: int  # pairs, if gated
    inputs: int
    gated: bool = False
    adds: bool = False

    @property
    def stored_outputs(self) -> int:
        return self.outputs * (2 if self.gated else 1)


def products(shape: Shape) -> list[Product]:
    heads = shape.head_size * shape.heads
    return [
        Product("qkv", heads + 2 * shape.head_size * shape.kv_heads, shape.hidden),
        Product("o", shape.hidden, heads, adds=True),
        Product("gate_up", shape.intermediate, shape.hidden, gated=True),
        Product("down", shape.hidden, shape.intermediate, adds=True),
    ]


def every(shapes: Sequence[str]) -> list[tuple[str, Product]]:
    return [(shape, product) for shape in shapes for product in products(SHAPES[shape])]


def weight_of(form: WeightFormat, product: Product) -> Any:
    """Return random weights, quantized to the format."""
    shape = (product.stored_outputs, product.inputs)
    context = BuildContext(
        parallel=SINGLE,
        dtype=DTYPE,
        device=DEVICE,
        make_attention=lambda spec: None,  # type: ignore[arg-type, return-value]
    )
    weight: Any = form.allocate(
        Weight(shape, {None: Part(shape, 0, 0, shape[0])}, context, later=True), DEVICE
    )
    weight.load(torch.randn(shape, device=DEVICE) * 0.02)
    return weight


def bytes_of(weight: Any) -> int:
    others = (getattr(weight, name, None) for name in ("scales", "zeros"))
    return sum(
        tensor.nbytes for tensor in (weight.data, *others) if isinstance(tensor, torch.Tensor)
    )


def exact(form: WeightFormat, product: Product, x: torch.Tensor, weight: Any) -> torch.Tensor:
    """Return the product, dequantized and computed in float32."""
    y = x.float() @ form.dequantized(weight).t()
    if product.gated:
        gate, up = y.chunk(2, dim=-1)
        y = gate * torch.sigmoid(gate) * up
    return y


@cache
def _stream_of(rows: int, outputs: int) -> torch.Tensor:
    """Zeros to add to: allocated once, to exclude that time."""
    return torch.zeros(rows, outputs, dtype=DTYPE, device=DEVICE)


def as_chosen(form: WeightFormat, product: Product, x: torch.Tensor, weight: Any) -> torch.Tensor:
    """Compute a layer. Partial sums aren't added up here: the next norm does that, for any
    format."""
    if not product.adds:
        return form.columns(weight, x, gated=product.gated)
    stream = Residual(_stream_of(len(x), product.outputs))
    form.add_to(weight, stream, x)
    return stream._x if stream._parts is None else stream._parts


def kernels(form: WeightFormat, product: Product, rows: int) -> Iterator[tuple[str, Run, float]]:
    """Return every kernel that computes the product, with its error bound; the format's choice
    first."""
    gated = product.gated
    # at most: few rows of small layers aren't rounded
    narrow = isinstance(form, Float8) and rows > 1
    yield "*", partial(as_chosen, form, product), NARROW if narrow else WIDE
    if form == DENSE:
        yield (
            "cuBLAS",
            lambda x, weight: silu_mul(x @ weight.t()) if gated else x @ weight.t(),
            WIDE,
        )
        return
    stored: Any = form
    from dovetail.nn.kernels import streamed

    if rows <= 512:
        yield (
            "streamed",
            lambda x, weight: streamed.linear(
                x, stored._stored(weight), gated=gated, in_parts=product.adds
            ),
            WIDE,
        )
    if isinstance(form, Float8):
        yield from float8_kernels(form, gated, product.adds, rows)
    else:
        yield "widened", partial(_widened, stored, gated), WIDE


def _widened(form: Any, gated: bool, x: torch.Tensor, weight: Any) -> torch.Tensor:
    from dovetail.nn.kernels import widened

    y = x @ widened.widened(form._stored(weight), x.dtype).t()
    return silu_mul(y) if gated else y


def float8_kernels(
    form: Float8, gated: bool, adds: bool, rows: int
) -> Iterator[tuple[str, Run, float]]:
    from dovetail.nn.kernels import few_rows, one_row, one_row_float8

    if rows == 1:
        yield (
            "one_row",
            lambda x, weight: one_row.linear(
                x, weight, gated=gated, scales=weight.scales, group=form.block[1]
            ),
            WIDE,
        )
        yield (
            "one_row_float8",
            lambda x, weight: one_row_float8.linear(x, weight, gated=gated, scales=weight.scales),
            WIDE,
        )
    elif rows <= float8.FEW_ROWS and form.scales != "block":

        def few(x: torch.Tensor, weight: Any) -> torch.Tensor:
            tiling = few_rows.tiling_for(weight, len(x), gated)
            if tiling is None:
                raise KernelUnavailable("no tiling")
            return few_rows.linear(x, weight, tiling=tiling, gated=gated, scales=weight.scales)

        yield "few_rows", few, WIDE
    if 1 < rows <= 512:

        def many(x: torch.Tensor, weight: Any) -> torch.Tensor:
            around = {"gated": gated, "in_parts": adds}
            tiling = form._tiling(weight, len(x), **around)
            if tiling is None:
                raise KernelUnavailable("no tiling")
            return form._product(
                weight,
                *form._narrowed(weight, Residual(x), None),
                tiling,
                None,
                dtype=x.dtype,
                **around,
            )

        yield "many_rows", many, NARROW
    if rows >= 16:
        yield (
            "float8 x float8",
            lambda x, weight: form._product(
                weight,
                *form._narrowed(weight, Residual(x), None),
                None,
                None,
                dtype=x.dtype,
                gated=gated,
            ),
            NARROW,
        )


def error(form: WeightFormat, product: Product, run: Run, x: torch.Tensor, weight: Any) -> float:
    _stream_of.cache_clear()
    y = run(x, weight).float()
    right = exact(form, product, x, weight)
    y = y.sum(0) if y.ndim == 3 else y
    return float((y - right).norm() / right.norm())


def product_table(shapes: Sequence[str], all_rows: Sequence[int], bandwidth: float) -> None:
    print(
        f"\ncopy bandwidth {bandwidth / 1e12:.2f} TB/s\n{'shape':12} {'layer':8} {'rows':>5} "
        f"{'format':12} {'kernel':16}",
        end="",
    )
    print(f" {'us':>8} {'share':>6} {'x cuBLAS':>8} {'error':>9}")
    for name, product in every(shapes):
        weights = {label: [weight_of(form, product)] for label, form in FORMATS.items()}
        for label, form in FORMATS.items():
            weights[label] += [
                weight_of(form, product)
                for _ in range(1, max(3, ROTATED_BYTES // bytes_of(weights[label][0])))
            ]
        for rows in all_rows:
            cublas = timed(
                next(run for kernel, run, _ in kernels(DENSE, product, rows) if kernel == "cuBLAS"),
                rows,
                product,
                weights["bf16"],
            )
            for label, form in FORMATS.items():
                for kernel, run, bound in kernels(form, product, rows):
                    print(
                        f"{name:12} {product.name:8} {rows:5} {label:12} {kernel:16}",
                        end=" ",
                        flush=True,
                    )
                    print(
                        told(form, product, run, rows, weights[label], bound, bandwidth, cublas),
                        flush=True,
                    )
        del weights
        torch.cuda.empty_cache()


def told(
    form: WeightFormat,
    product: Product,
    run: Run,
    rows: int,
    weights: list[Any],
    bound: float,
    bandwidth: float,
    cublas: float,
) -> str:
    x = torch.randn(rows, product.inputs, device=DEVICE, dtype=DTYPE)
    try:
        wrong = error(form, product, run, x, weights[0])
        took = timed(run, rows, product, weights)
    except Exception as failure:  # the other kernels are still of interest
        _unavailable.clear()
        return f"fails: {type(failure).__name__}: {' '.join(str(failure).split())[:120]}"
    moved = bytes_of(weights[0]) + 2 * rows * (product.inputs + product.outputs)
    verdict = "" if wrong <= bound else f"  MORE THAN {bound:.4f}"
    return (
        f"{took * 1e6:8.2f} {moved / took / bandwidth:6.2f} {cublas / took:8.2f} "
        f"{wrong:9.6f}{verdict}"
    )


def timed(run: Run, rows: int, product: Product, weights: list[Any]) -> float:
    x = torch.randn(rows, product.inputs, device=DEVICE, dtype=DTYPE)
    return seconds_in_graph([lambda weight=weight: run(x, weight) for weight in weights])


# ---- whole layers


class One(Quantization):
    """Return every linear layer in one format."""

    def __init__(self, form: WeightFormat) -> None:
        super().__init__(None)
        self.form = form

    def of_module(self, name: str) -> WeightFormat:
        return self.form


def decoder(shape: Shape, form: WeightFormat) -> Any:
    from bench.products import NoAttention
    from bench.products import decoder as of_shape

    later = form != DENSE
    context = RuntimeContext(
        parallel=SINGLE,
        dtype=torch.bfloat16,
        device=DEVICE,
        make_attention=NoAttention,
        weights_later=later,
    )
    model = of_shape(shape, context)
    if form != DENSE:
        place_weights(model, One(form), DEVICE)
    dummy_weights(model, seed=0)
    return model


def layer_table(shapes: Sequence[str], all_rows: Sequence[int], bandwidth: float) -> None:
    print(
        f"\na layer of the decoder without attention, us (share of the copy bandwidth for its "
        f"weights)\n{'shape':12} {'rows':>5}",
        end="",
    )
    print("".join(f" {label:>18}" for label in FORMATS))
    for name in shapes:
        took: dict[tuple[int, str], str] = {}
        for label, form in FORMATS.items():
            model = decoder(SHAPES[name], form)
            weight_bytes = sum(
                bytes_of(weight)
                for key, weight in model.blocks[0].named_parameters()
                if key.endswith("proj.weight")
            )
            for rows in all_rows:
                us = layer_seconds(model, rows) * 1e6
                took[rows, label] = f"{us:10.1f} ({weight_bytes / us * 1e6 / bandwidth:.2f})"
            del model
            torch.cuda.empty_cache()
        for rows in all_rows:
            print(
                f"{name:12} {rows:5}" + "".join(f" {took[rows, label]:>18}" for label in FORMATS),
                flush=True,
            )


def layer_seconds(model: Any, rows: int) -> float:
    from bench.products import REPLAYS, VOCAB

    positions = torch.arange(rows, device=DEVICE)
    inputs = ModelInputs(token_ids=positions % VOCAB, positions=positions)
    return seconds(record(lambda: model(inputs)).replay, REPLAYS) / len(model.blocks)


# ---- tilings


def tune(shapes: Sequence[str], all_rows: Sequence[int]) -> None:
    """Every tiling of `streamed` for each product, for weights that are widened; then for float8
    inputs, where scales are of blocks."""
    from dovetail.nn.kernels import streamed

    for name, product in every(shapes):
        for label, form in list(FORMATS.items())[1:]:
            weights = [weight_of(form, product)]
            weights += [
                weight_of(form, product)
                for _ in range(1, max(3, ROTATED_BYTES // bytes_of(weights[0])))
            ]
            for rows in all_rows:
                results = []
                for tiling in tilings(product, rows):
                    run = partial(_streamed_with, form, product, tiling)
                    try:
                        results.append((timed(run, rows, product, weights) * 1e6, tiling))
                    except Exception:  # too little shared memory, mostly
                        _unavailable.clear()
                own = streamed.tiling_for(
                    max(16, rows), product.outputs, product.inputs, **_around(form, product)
                )
                print(f"\n{name} {product.name} {label}, {rows} rows; now {own}")
                for us, tiling in sorted(results, key=lambda result: result[0])[:5]:
                    print(f"{us:9.2f} us {tiling}", flush=True)


def _around(form: WeightFormat, product: Product) -> dict[str, bool]:
    return {"int4": not isinstance(form, Float8), "gated": product.gated, "in_parts": product.adds}


def _streamed_with(
    form: Any, product: Product, tiling: Any, x: torch.Tensor, weight: Any
) -> torch.Tensor:
    from dovetail.nn.kernels import streamed

    return streamed.linear(
        x, form._stored(weight), gated=product.gated, in_parts=product.adds, tiling=tiling
    )


def tilings(product: Product, rows: int) -> Iterator[Any]:
    from dovetail.nn.kernels import streamed

    padded = max(16, 1 << (rows - 1).bit_length())
    chunks = -(-product.inputs // 128)
    for m, n, parts, stages, warps in itertools.product(
        (16, 32, 64, 128, 256), (16, 32, 64, 128), (1, 2, 4, 8), (3, 4, 6, 8), (4, 8)
    ):
        if (
            m <= padded
            and (m == padded or m >= 64)
            and (parts == 1 or product.adds)
            and chunks % parts == 0
            and (n >= 64 or warps == 4)
        ):
            yield streamed.Tiling(m, n, parts, stages, warps)


# ---- one row


def one_row_table(shapes: Sequence[str], bandwidth: float) -> None:
    """Each product of one row with so many outputs and warps of a program, in its own graph; what
    the kernel chooses itself comes first."""
    print(
        f"\n{'shape':12} {'product':8} {'format':12} {'outputs':>8} {'warps':>5} {'us':>8} "
        f"{'GB/s':>6} {'share':>6}"
    )
    for name, product in every(shapes):
        for label, form in FORMATS.items():
            weights = [weight_of(form, product)]
            weights += [
                weight_of(form, product)
                for _ in range(1, max(3, ROTATED_BYTES // bytes_of(weights[0])))
            ]
            for at_once, warps in [
                (None, None),
                *(itertools.product((2, 4, 8, 16), (4, 8)) if form != DENSE else ()),
            ]:
                if isinstance(form, Float8) and warps == 8:
                    continue  # its warps are fixed
                print(
                    f"{name:12} {product.name:8} {label:12} {at_once or 'chosen':>8} "
                    f"{warps or '':>5}",
                    end=" ",
                )
                try:
                    took = timed(
                        partial(_one_row, form, product, at_once, warps), 1, product, weights
                    )
                except Exception as failure:  # too many registers, mostly
                    _unavailable.clear()
                    print(
                        f"fails: {type(failure).__name__}: {' '.join(str(failure).split())[:120]}",
                        flush=True,
                    )
                    continue
                per_s = bytes_of(weights[0]) / took
                print(f"{took * 1e6:8.2f} {per_s / 1e9:6.0f} {per_s / bandwidth:6.2f}", flush=True)
        torch.cuda.empty_cache()


def _one_row(
    form: Any,
    product: Product,
    at_once: int | None,
    warps: int | None,
    x: torch.Tensor,
    weight: Any,
) -> torch.Tensor:
    from dovetail.nn.kernels import one_row_float8, one_row_int4

    if at_once is None:
        return as_chosen(form, product, x, weight)
    out = _stream_of(1, product.outputs) if product.adds else None
    if isinstance(form, Float8):
        return one_row_float8.linear(
            x, weight, gated=product.gated, out=out, scales=weight.scales, at_once=at_once
        )
    return one_row_int4.linear(
        x, form._stored(weight), gated=product.gated, out=out, at_once=at_once, warps=warps
    )


# ---- without a GPU


@contextmanager
def interpreting() -> Iterator[None]:
    from tests.attention import interpreter

    interpreter.mend()
    taken = (
        patch.object(float8, "use_kernels", lambda *tensors: True),
        patch.object(int4, "use_kernels", lambda *tensors: True),
    )
    with taken[0], taken[1], patch.object(float8, "has_float8_products", lambda device: True):
        yield


def check() -> None:
    """Run small products of each format in the interpreter."""
    with interpreting():
        for product in (
            Product("columns", 64, 256),
            Product("gated", 64, 256, gated=True),
            Product("adds", 128, 512, adds=True),
        ):
            for (label, form), rows in itertools.product(list(FORMATS.items())[1:], (1, 4, 20)):
                weight = weight_of(form, product)
                x = torch.randn(rows, product.inputs, dtype=DTYPE)
                for kernel, run, bound in kernels(form, product, rows):
                    if "*" in kernel or (
                        kernel == "float8 x float8" and form != FORMATS["fp8 128x128"]
                    ):  # torch's needs a GPU
                        continue
                    with suppress(KernelUnavailable):
                        wrong = error(form, product, run, x, weight)
                        print(
                            f"{product.name:8} {rows:3} {label:12} {kernel:16} {wrong:9.6f} "
                            f"{'' if wrong <= bound else 'MORE THAN ' + str(bound)}"
                        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", default=["qwen3-8b", "qwen3-0.6b"], choices=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64, 256, 8192])
    parser.add_argument("--only", choices=["products", "layers", "tune", "one-row", "check"])
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.inference_mode():
        if args.only == "check" and os.environ.get("TRITON_INTERPRET") == "1":
            check()
            return
        require_gpu()
        bandwidth = copy_bytes_per_s()
        if args.only in (None, "layers", "one-row"):
            layer_table(args.shape, [1] if args.only == "one-row" else args.rows, bandwidth)
        if args.only in (None, "products", "check"):
            product_table(args.shape, args.rows, bandwidth)
        if args.only == "one-row":
            one_row_table(args.shape, bandwidth)
        if args.only == "tune":
            tune(args.shape, args.rows)


if __name__ == "__main__":
    main()
