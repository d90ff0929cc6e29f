"""Compiles every kernel for absent GPUs, and reports its resources: shared memory, registers,
spills.

    python -m bench.compiles                                   # every architecture: for each kernel the most that any of its variants takes
    python -m bench.compiles --arch 75 89 --every              # two of them, a line for each variant
    python -m bench.compiles --head-sizes 64 128 --processes 8

Kernels are launched as the engine launches them, by the functions that choose tilings, and compiled
to machine code by the ptxas that Triton brings. Needs no GPU. All head sizes take some minutes of a
core for each architecture.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from bench.compiling import GPUS, Compiled, compiling_for
from dovetail.api.attention import (
    AttentionBatch,
    AttentionContext,
    Indexer,
    KVScales,
    LayerSpec,
)
from dovetail.api.component import NoOptions
from dovetail.api.kv_cache import CacheGroup, KVLayout
from dovetail.api.sampler import (
    Capture,
    Lines,
    RowHistory,
    RowSampling,
    SampledRow,
    SampleInputs,
    SamplerContext,
)
from dovetail.nn.format import dense
from dovetail.nn.kernels import (
    adapters,
    delta_rule,
    embedding,
    experts,
    few_experts_float8,
    few_experts_fp4,
    float8_products,
    fp4_as_float8,
    gate,
    gated_norm,
    mamba2,
    one_row_float8,
    one_row_int4,
    qkv,
    rank_sums,
    rms_norm,
    routing,
    short_conv,
    streamed,
    widened,
)
from dovetail.nn.kernels.expert_sorting import SORTED_AT_ONCE
from dovetail.nn.kernels.stored_experts import CHUNK, FLOAT8, FP4, Stored
from dovetail.nn.state import DeltaShape, Mamba2Shape
from dovetail.testing.memory import bind_layers, bind_states
from dovetail_attention.triton_backend import TritonAttention
from dovetail_executors.runtime import decode_rows_kernels, slots_kernel, tower_kernels
from dovetail_executors.runtime.row_state import RowState
from dovetail_samplers.default import DefaultSampler

ROOT = Path(__file__).parents[1]
HEAD_SIZES = TritonAttention.capabilities.head_sizes or ()
DTYPES = ("float32", "float16", "bfloat16")
KV_HEADS = 8
FP8_FROM = 89  # architecture
TOWER_HEAD_SIZES = (16, 64, 72, 80, 128)
FORMATS_FROM = 80  # likewise, of weights with 4 bits
HIDDEN = (1024, 4096)
INTERMEDIATE = 3072
VOCAB = 5000
ROWS = (1, 2, 16, 17, 64)  # of a linear layer: each kernel for such layers has some
STATES = (
    DeltaShape(2, 4, 128, 128, 4),
    DeltaShape(1, 1, 256, 256, 4),
    DeltaShape(1, 1, 8, 8, 4),
    Mamba2Shape(4, 64, 128, 2, 4),
    Mamba2Shape(1, 80, 256, 1, 4),
)
SAMPLED = (
    RowSampling(temperature=0.0),
    RowSampling(seed=1),
    RowSampling(top_k=20, top_p=0.9, min_p=0.1),
    RowSampling(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5, logprobs=5),
    RowSampling(
        logit_bias=((5, 1.0),),
        allowed_token_ids=tuple(range(100)),
        bad_words=((1, 2), (3,)),
        min_tokens=20,
        stop_token_ids=(0,),
    ),
)


@dataclass(frozen=True, slots=True)
class Case:
    """Launches to compile for one architecture: of attention, or without a head size of everything
    else."""

    arch: int
    dtype: str
    head_size: int | None = None
    group: int = 2  # query heads that share a kv head
    block_size: int = 16
    window: int | None = None
    brief: bool = False  # one step for attention, instead of every kind
    fp8: bool = False  # K and V

    def __str__(self) -> str:
        if self.head_size is None:
            return self.dtype
        window = f", window {self.window}" if self.window else ""
        return (
            f"{self.dtype}{' over FP8' if self.fp8 else ''}, {self.group} x {self.head_size}, "
            f"block {self.block_size}{window}"
        )


def cases(arch: int, head_sizes: Iterable[int] = HEAD_SIZES) -> Iterator[Case]:
    """Everything supported on an architecture: every dtype, all of `head_sizes`; with windows,
    other groups and blocks for some."""
    for dtype in DTYPES:
        if dtype == "bfloat16" and not GPUS[arch].has_bfloat16:
            continue
        yield Case(arch, dtype)
        for head_size in head_sizes:
            yield Case(arch, dtype, head_size)
            if arch >= FP8_FROM:
                yield Case(arch, dtype, head_size, fp8=True)
            if head_size in (64, 128, 256):
                yield Case(arch, dtype, head_size, window=512)
                yield from (Case(arch, dtype, head_size, group=group) for group in (1, 8, 32))
                yield from (
                    Case(arch, dtype, head_size, block_size=block_size) for block_size in (8, 256)
                )


def compiled(case: Case) -> list[Compiled]:
    """Kernels compiled from its launches."""
    with compiling_for(case.arch) as kernels:
        if case.head_size is None:
            launch_layers(getattr(torch, case.dtype))
            launch_experts(getattr(torch, case.dtype))
            launch_adapters(getattr(torch, case.dtype))
            for shape in STATES:
                launch_states(getattr(torch, case.dtype), shape)
            launch_sampling(getattr(torch, case.dtype))
            launch_towers(getattr(torch, case.dtype))
            launch_indexed(case.dtype)
            if case.dtype != "float32" and case.arch >= FORMATS_FROM:
                launch_formats(getattr(torch, case.dtype), case.arch)
        else:
            launch_attention(
                case.dtype,
                case.head_size,
                case.group,
                case.block_size,
                case.window,
                case.brief,
                case.fp8,
            )
    return kernels


def launch_attention(
    dtype: str,
    head_size: int,
    group: int = 2,
    block_size: int = 16,
    window: int | None = None,
    brief: bool = False,
    fp8: bool = False,
) -> None:
    """A step of decodes with a shared prefix and a prefill, launched and as a graph; and all other
    kernels of a cache."""
    backend = TritonAttention(
        NoOptions(), AttentionContext("cpu", dtype, block_size, "float8_e4m3fn" if fp8 else None)
    )
    heads = KV_HEADS * group
    layer = backend.make_layer(LayerSpec(0, heads, KV_HEADS, head_size, head_size**-0.5, window))
    layer.kv_scales = KVScales(torch.ones(()), torch.ones(())) if fp8 else None
    bind_layers(backend, [layer], 4)
    backend.prepare(max_rows=32, max_tokens=1024, max_len=4096)
    lens = np.array([3000] * 20 + [1500], np.int32)
    queries = np.array([1] * 20 + [700], np.int32)
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    tokens = int(queries.sum())
    table = torch.zeros((1, 21, 4096 // block_size), dtype=torch.int32)
    slots = torch.full((1, tokens), 4 * block_size)
    on_device = torch.from_numpy(starts), torch.from_numpy(lens), (table,), (slots,)
    fused = torch.zeros(tokens, heads + 2 * KV_HEADS, head_size, dtype=backend.dtype)
    q, k, v = fused.split([heads, KV_HEADS, KV_HEADS], dim=1)
    shared = 1024 // block_size
    for mixed_graph, shared_blocks in (
        [(False, shared)] if brief else product((False, True), (0, shared))
    ):
        backend.plan(
            AttentionBatch(21, tokens, *on_device, queries, lens, shared_blocks, mixed_graph)
        )
        layer.attend(q)
    layer.write(k, v)
    if brief:
        return
    qkv.norm_turn_write(
        fused,
        KV_HEADS,
        fused.new_zeros((heads + KV_HEADS) * head_size),
        1e-6,
        torch.zeros(64, head_size),
        slots[0],
        layer.cache_for_fused_write(),
    )
    qkv.norm_turn_write(fused, KV_HEADS, None, 0.0, torch.zeros(64, head_size), slots[0], None)


def launch_indexed(dtype: str) -> None:
    """A decode of a layer with an indexer, in parts and in one piece."""
    block_size = 16
    indexer = Indexer(top_k=2048, heads=64, size=128)
    backend = TritonAttention(NoOptions(), AttentionContext("cpu", dtype, block_size))
    layer = backend.make_layer(LayerSpec(0, 16, KV_HEADS, 64, 0.1, indexer=indexer))
    bind_layers(backend, [layer], 4)
    backend.prepare(max_rows=32, max_tokens=64, max_len=4096)
    for rows in (1, 32):
        lens = np.full(rows, 3000, np.int32)
        queries = np.ones(rows, np.int32)
        starts = torch.arange(rows + 1, dtype=torch.int32)
        table = torch.zeros((1, rows, 4096 // block_size), dtype=torch.int32)
        slots = torch.zeros((1, rows), dtype=torch.int64)
        on_device = starts, torch.from_numpy(lens), (table,), (slots,)
        backend.plan(AttentionBatch(rows, rows, *on_device, queries, lens))
        x = torch.zeros(rows, 16, 64, dtype=backend.dtype)
        layer.write(x[:, :KV_HEADS], x[:, :KV_HEADS])
        layer.write_index(torch.zeros(rows, indexer.size, dtype=backend.dtype))
        layer.select(
            torch.zeros(rows, indexer.heads, indexer.size, dtype=backend.dtype),
            torch.zeros(rows, indexer.heads),
        )
        layer.attend(x)


def launch_layers(dtype: torch.dtype) -> None:
    """A decoder's layers besides attention, in two sizes, for few and many tokens; and the start
    and end of a step."""
    addresses = torch.zeros(2, dtype=torch.int64)
    released = torch.zeros(1, dtype=torch.int32)
    exchange = rank_sums.Exchange(addresses, addresses, addresses, released, 0)
    for hidden in HIDDEN:
        x = torch.zeros(5, hidden, dtype=dtype)
        norm = (torch.zeros(hidden, dtype=dtype), 1e-6)
        embedding.embed(torch.zeros(5, dtype=torch.int64), torch.zeros(100, hidden, dtype=dtype))
        rms_norm.rms_norm(x, *norm)
        rms_norm.add_and_norm(x, torch.zeros(3, 5, hidden), *norm)
        for around in (norm, None):
            rank_sums.add_shares(x, addresses, addresses, released, 0, around)
        rank_sums.sum_parts(x, exchange)
        rank_sums.gather_parts(torch.zeros(5, 2, hidden, dtype=dtype), hidden, exchange)
        gate.silu_mul(torch.zeros(5, 2 * INTERMEDIATE, dtype=dtype))
        state = RowState(4, 64, KVLayout((CacheGroup((0,), 16),), 1, "none"), torch.device("cpu"))
        rows = torch.arange(4)
        lines = Lines(rows=rows, ahead=torch.zeros(4, dtype=torch.int32))
        decode_rows_kernels.append(
            state, lines, *decode_rows_kernels.last_tokens(state, lines)[::-1], x[:4]
        )
        slots_kernel.put_slots(
            rows,
            state.tables,
            torch.ones(1, dtype=torch.int64),
            torch.zeros(1, 4, dtype=torch.int64),
            4,
            0,
            state.row_width,
        )
        if dtype != torch.float32:
            for rows_of_layer in ROWS:
                _launch_linear(rows_of_layer, hidden, dtype)


def launch_experts(dtype: torch.dtype) -> None:
    """Routing and a layer of experts, for one token and for more."""
    hidden = HIDDEN[0]
    inner = 256
    count = 8
    gate_up = Stored(torch.zeros(count, 2 * inner, hidden, dtype=dtype), hidden)
    down = Stored(torch.zeros(count, hidden, inner, dtype=dtype), inner)
    for tokens in (1, 20, SORTED_AT_ONCE // 2 + 1):
        ids, weights = routing.choose(torch.zeros(tokens, count), 2, normalize=True)
        experts.experts(
            torch.zeros(tokens, hidden, dtype=dtype),
            gate_up,
            down,
            None,
            None,
            "silu",
            ids,
            weights,
        )


def launch_adapters(dtype: torch.dtype) -> None:
    """A layer with adapters, for few tokens and for many."""
    hidden = HIDDEN[0]
    rank = 16
    width = 128
    a = torch.zeros(3, 3 * rank, hidden, dtype=dtype)
    b = torch.zeros(3, hidden, rank, dtype=dtype)
    pieces = torch.zeros(hidden // width, 3, dtype=torch.int32)
    for tokens in (1, adapters.FEW_TOKENS, adapters.FEW_TOKENS + 1):
        x = torch.zeros(tokens, hidden, dtype=dtype)
        adapters.add(
            x,
            x,
            a,
            b,
            pieces,
            width,
            adapters.sorted_tokens(torch.zeros(tokens, dtype=torch.int32), 3),
        )


def launch_experts_of_float8(dtype: torch.dtype) -> None:
    """Experts whose inputs are rounded, too, and those of few tokens."""
    hidden = HIDDEN[0]
    inner = 128
    count = 4
    many = SORTED_AT_ONCE // 2

    def stored(outputs: int, inputs: int) -> Stored:
        values, scales = (
            torch.zeros(count, outputs, inputs).to(torch.float8_e4m3fn),
            torch.zeros(count, outputs // 128, inputs // 128),
        )
        return Stored(values, inputs, scales, None, 128, FLOAT8, True)

    gate_up = stored(2 * inner, hidden)
    down = stored(hidden, inner)
    ids = torch.zeros(many + 1, 2, dtype=torch.int32)
    weights = torch.zeros(many + 1, 2)
    few_experts_float8.experts(
        torch.zeros(1, hidden, dtype=dtype), gate_up, down, ids[:1], weights[:1]
    )
    for tokens in (20, many + 1):
        x = torch.zeros(tokens, hidden, dtype=dtype)
        experts.experts(x, gate_up, down, None, None, "silu", ids[:tokens], weights[:tokens])


def launch_experts_of_fp4(dtype: torch.dtype) -> None:
    """Experts of one and of a few tokens, and the conversion for many."""
    hidden = HIDDEN[0]
    inner = 160
    count = 4

    def stored(outputs: int, inputs: int) -> Stored:
        chunks = -(-inputs // CHUNK)
        values = torch.zeros(count, outputs, chunks * CHUNK // 4, dtype=torch.int16)
        scales = torch.zeros(count, chunks, outputs, dtype=torch.int32)
        return Stored(values, inputs, scales, None, 32, FP4)

    layers = stored(2 * inner, hidden), stored(hidden, inner)
    fp4_as_float8.as_float8(layers[0])
    for tokens in (1, 3):
        few_experts_fp4.experts(
            torch.zeros(tokens, hidden, dtype=dtype),
            *layers,
            None,
            None,
            experts.gating("silu"),
            torch.zeros(tokens, 2, dtype=torch.int32),
            torch.zeros(tokens, 2),
        )


def launch_states(dtype: torch.dtype, shape: DeltaShape | Mamba2Shape) -> None:
    """A recurrent layer without its projections: a step of single tokens, one of a prefill, too,
    and one with drafts, which are accepted."""
    bound = bind_states([shape.spec(0)], 2, dtype, max_lines=8)
    state = bound.layers[0]
    is_delta = isinstance(shape, DeltaShape)
    heads, size = (
        (shape.v_heads, shape.v_size)
        if isinstance(shape, DeltaShape)
        else (shape.heads, shape.head_size)
    )
    gates = torch.zeros(heads)
    weight = torch.zeros(shape.conv_channels, shape.kernel, dtype=dtype)
    for lengths, drafts in (([1, 1], None), ([1, 70], None), ([4, 2], [3, 1])):
        checked = None
        if drafts is None:
            bound.plan([0, 1], lengths, [9, 0])
        else:
            checked = bound.plan_drafts([0, 1], lengths, [9, 5], drafts)
        x = torch.zeros(sum(lengths), shape.conv_channels, dtype=dtype)
        a = torch.zeros(sum(lengths), heads, dtype=dtype)
        y = short_conv.short_conv(
            x, weight, None if is_delta else weight[:, 0].contiguous(), state, 0, "silu"
        )
        if isinstance(shape, DeltaShape):
            y = delta_rule.gated_delta_rule(y, a, a, gates, gates, shape, state, 1)
        else:
            y = mamba2.mamba2(y, a, gates, gates, gates, (0.0, 1.0), shape, state, 1)
        y = y.flatten(1)
        gated_norm.gated_norm(y, y, y[0, :size].contiguous(), 1e-6, size, norm_before_gate=is_delta)
        bound.accept(checked, [11, 6])


def launch_formats(dtype: torch.dtype, arch: int) -> None:
    """Products with 8-bit and 4-bit weights, for one row and more."""
    hidden = HIDDEN[0]
    outputs = 256
    int4 = streamed.Stored(
        torch.zeros(outputs, hidden // 2, dtype=torch.uint8),
        torch.zeros(hidden // 128, outputs).half(),
        None,
        hidden,
        128,
    )
    one_row_int4.linear(torch.zeros(1, hidden, dtype=dtype), int4)
    wide = HIDDEN[1]
    zeros = torch.zeros(HIDDEN[1] // 32, 2 * outputs)
    of_32 = streamed.Stored(
        torch.zeros(2 * outputs, wide // 2, dtype=torch.uint8),
        zeros.half(),
        zeros.to(torch.uint8),
        wide,
        32,
    )
    one_row_int4.linear(
        torch.zeros(1, wide, dtype=dtype),
        of_32,
        norm=(torch.zeros(wide, dtype=dtype), 1e-6),
        gated=True,
    )
    x = torch.zeros(20, hidden, dtype=dtype)
    streamed.linear(x, int4)
    widened.widened(int4, dtype)
    if arch >= FP8_FROM:
        float8 = streamed.Stored(
            torch.zeros(outputs, hidden).to(torch.float8_e4m3fn),
            torch.zeros(outputs),
            None,
            hidden,
            0,
        )
        streamed.linear(x, float8)
        for group in (0, 128):
            float8_products.narrowed(x, group)
            float8_products.normed_and_narrowed(
                x, None, torch.zeros(hidden, dtype=dtype), 1e-6, group
            )
    if GPUS[arch].is_hopper:
        inputs = one_row_float8.CHUNK + 128
        values = torch.zeros(outputs, inputs).to(torch.float8_e4m3fn)
        row = torch.zeros(1, inputs, dtype=dtype)
        one_row_float8.linear(
            row,
            values,
            scales=torch.zeros(outputs),
            norm=(torch.zeros(inputs, dtype=dtype), 1e-6),
            gated=True,
        )
        one_row_float8.linear(
            row,
            values,
            scales=torch.zeros(2, inputs // 128),
            out=torch.zeros(1, outputs, dtype=dtype),
        )
        launch_experts_of_float8(dtype)
        launch_experts_of_fp4(torch.bfloat16)


def _launch_linear(rows: int, hidden: int, dtype: torch.dtype) -> None:
    """Layers of a decoder with whichever kernel takes them; the others are torch's."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    x = zeros(rows, hidden)
    norm = (zeros(hidden), 1e-6)
    qkv_weight = zeros(hidden + 1024, hidden)
    gated = zeros(2 * INTERMEDIATE, hidden)
    down = zeros(hidden, INTERMEDIATE)
    if kernel := dense.kernel_for_few(rows, qkv_weight):
        kernel(x, qkv_weight, zeros(len(qkv_weight)), norm=norm)
    if kernel := dense.kernel_for_few(rows, gated, gated=True):
        kernel(x, gated, norm=norm, gated=True)
    if kernel := dense.kernel_for_few(rows, down):
        kernel(zeros(rows, INTERMEDIATE), down, out=x)
    if kernel := dense.kernel_for_many(rows, qkv_weight):
        kernel(x, qkv_weight, zeros(len(qkv_weight)))
    if kernel := dense.kernel_for_many(rows, gated, gated=True):
        kernel(x, gated, gated=True)
    if kernel := dense.kernel_for_many(rows, down, in_parts=True):
        kernel(zeros(rows, INTERMEDIATE), down, in_parts=True)


def launch_towers(dtype: torch.dtype) -> None:
    """Rotation of queries and keys of image encoders."""
    for head_size in TOWER_HEAD_SIZES:
        q = torch.zeros(100, 3, 16, head_size, dtype=dtype)[:, 0]
        tower_kernels.rotated(q, *torch.zeros(2, 100, head_size))


def launch_sampling(dtype: torch.dtype) -> None:
    """Rows that use all features of the sampler `default`, drawn as in a step and in CUDA graphs;
    and log-probabilities of some."""
    rows = list(SAMPLED)
    history = RowHistory(
        *(
            torch.ones(size, dtype=torch.int32)
            for size in ((len(rows) + 1, 16), (len(rows) + 1,), (len(rows) + 1,))
        )
    )
    sampler = DefaultSampler(NoOptions(), SamplerContext("cpu", VOCAB, history))
    sampler.prepare(len(rows))
    sampler.update(
        [], [SampledRow(row=row, sampling=sampling) for row, sampling in enumerate(rows)]
    )
    host_rows = np.arange(len(rows))
    logits = torch.zeros(len(rows), VOCAB, dtype=dtype)
    ahead = torch.zeros(len(rows), dtype=torch.int32)
    lines = Lines(rows=torch.from_numpy(host_rows), ahead=ahead)
    for capture in Capture:
        sampler.sample(SampleInputs(logits=logits, lines=lines, capture=capture))
    sampler.sample(SampleInputs(logits=logits, lines=lines, host_rows=host_rows))


def entry_points() -> set[str]:
    """Return the `Compiled.full_name` of every kernel launched anywhere in the sources."""
    found = set()
    for path in (ROOT / top for top in ("core", "plugins", "apps")):
        for file in path.rglob("*.py"):
            # `launch(_linear, …)` names a function of its own file,
            # `launch(triton_cache.scatter, …)` one of a neighbour's
            neighbour = file.stem
            for module, name in re.findall(
                r"\b_?launch(?:_sorted)?\(\s*(?:(\w+)\.)?(\w+),\s+\(", file.read_text()
            ):
                if name != "kernel":  # the argument of `launch_sorted`
                    found.add(f"{file.parent.name}.{module or neighbour}.{name}")
    return found


@dataclass(frozen=True, slots=True)
class Most:
    """Return the maximum resources over a kernel's variants, and the one that spills most."""

    shared_bytes: int
    registers: int
    spilled_bytes: int
    variants: int
    worst: str

    @classmethod
    def of(cls, variants: Sequence[tuple[Case, Compiled]]) -> Most:
        worst_case, worst = max(
            variants, key=lambda pair: (pair[1].spilled_bytes, pair[1].shared_bytes)
        )
        kernels = [kernel for _, kernel in variants]
        return cls(
            max(kernel.shared_bytes for kernel in kernels),
            max(kernel.registers for kernel in kernels),
            worst.spilled_bytes,
            len(kernels),
            str(worst_case),
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", type=int, nargs="+", choices=sorted(GPUS), default=sorted(GPUS))
    parser.add_argument(
        "--head-sizes", type=int, nargs="+", choices=HEAD_SIZES, default=HEAD_SIZES, metavar="N"
    )
    parser.add_argument("--every", action="store_true", help="print a line for each variant")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args(arguments)
    for arch in options.arch:
        gpu = GPUS[arch]
        print(
            f"sm_{arch} ({gpu.name}): {gpu.shared_bytes >> 10} KB of shared memory for a program\n"
        )
        print(
            "| kernel | variants | shared KB | registers | spilled bytes | the variant that spills "
            "most, or takes most |"
        )
        print("|---|---:|---:|---:|---:|---|")
        of_kernel: dict[str, list[tuple[Case, Compiled]]] = {}
        for case, kernels in _compile_all(list(cases(arch, options.head_sizes)), options.processes):
            for kernel in kernels:
                of_kernel.setdefault(
                    f"{kernel.full_name} ({case})" if options.every else kernel.full_name, []
                ).append((case, kernel))
        for name, variants in sorted(of_kernel.items()):
            most = Most.of(variants)
            print(
                f"| {name} | {most.variants} | {most.shared_bytes / 1024:.0f} | {most.registers} | "
                f"{most.spilled_bytes} | {most.worst} |"
            )
        largest = max(
            kernel.shared_bytes for variants in of_kernel.values() for _, kernel in variants
        )
        print(f"\nlargest: {largest / 1024:.1f} of {gpu.shared_bytes >> 10} KB\n", flush=True)


def _compile_all(wanted: list[Case], processes: int) -> Iterator[tuple[Case, list[Compiled]]]:
    if processes == 1:
        yield from ((case, compiled(case)) for case in wanted)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from zip(wanted, pool.map(compiled, wanted), strict=True)


if __name__ == "__main__":
    main()
