"""All kernels compile for a Hopper, on a machine without any GPU: with what only exists there, and
within its shared memory."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from dovetail.api.attention import (
    AttentionBatch,
    AttentionContext,
    FusedCache,
    Indexer,
    KVScales,
    LayerSpec,
)
from dovetail.api.component import NoOptions
from dovetail.api.sampler import Lines, RowHistory, SamplerContext
from dovetail.errors import DovetailError
from dovetail.nn.kernels.launch import compiling_ahead
from dovetail.testing.memory import bind_layers
from dovetail_attention import triton_backend
from dovetail_attention.triton_backend import TritonAttention
from dovetail_attention.triton_tuning import CUDA, HOPPER, REGISTERS, Shape, Tilings

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
    reason="a GPU compiles what it runs, and the interpreter nothing",
)
DEPENDENT = "griddepcontrol.wait"


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed here that could be looked at."""
    monkeypatch.setattr(triton_backend, "_loads_apart_well", lambda kind, limits: True)


def attend(
    dtype: str,
    head_size: int,
    block_size: int,
    window: int | None,
    mixed_graph: bool,
    heads: int = 16,
    cache_dtype: str | None = None,
    sinks: bool = False,
    softcap: float | None = None,
) -> TritonAttention:
    """A step of decodes with a shared prefix and of a prefill, as on an H200."""
    backend = TritonAttention(NoOptions(), AttentionContext("cpu", dtype, block_size, cache_dtype))
    backend.tilings, backend.processors = HOPPER, 132
    layer = backend.make_layer(
        LayerSpec(0, heads, 8, head_size, head_size**-0.5, window, sinks, softcap)
    )
    if sinks:
        layer.bind_sinks(torch.zeros(heads, dtype=backend.dtype))
    layer.kv_scales = KVScales(torch.ones(()), torch.ones(())) if cache_dtype else None
    bind_layers(backend, [layer], 4)
    backend.prepare(max_rows=32, max_tokens=1024, max_len=4096)
    lens, queries = np.array([3000] * 20 + [1500], np.int32), np.array([1] * 20 + [700], np.int32)
    starts, tokens = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32), int(queries.sum())
    table, slots = (
        torch.zeros((1, 21, 4096 // block_size), dtype=torch.int32),
        torch.full((1, tokens), 4 * block_size),
    )
    shared = 1024 // block_size
    backend.plan(
        AttentionBatch(
            21,
            tokens,
            torch.from_numpy(starts),
            torch.from_numpy(lens),
            (table,),
            (slots,),
            queries,
            lens,
            shared,
            mixed_graph,
        )
    )
    qkv = torch.zeros(tokens, heads + 16, head_size, dtype=backend.dtype)
    layer.write(qkv[:, heads : heads + 8], qkv[:, heads + 8 :])
    layer.attend(qkv[:, :heads])
    return backend


@pytest.mark.parametrize(
    ("dtype", "head_size", "block_size", "window", "loads_apart", "mixed_graph"),
    [
        (
            "bfloat16",
            128,
            16,
            None,
            True,
            False,
        ),  # what a Hopper's own kernel is compiled to doesn't depend on `mixed_graph`
        pytest.param("float16", 64, 256, None, True, True, marks=pytest.mark.full),
        pytest.param("bfloat16", 80, 8, None, True, True, marks=pytest.mark.full),
        pytest.param("bfloat16", 128, 24, None, False, False, marks=pytest.mark.full),
        pytest.param("bfloat16", 128, 24, None, False, True, marks=pytest.mark.full),
        pytest.param("bfloat16", 80, 256, 512, False, False, marks=pytest.mark.full),
        ("bfloat16", 80, 256, 512, False, True),
        ("float32", 256, 8, None, False, False),
        pytest.param("bfloat16", 512, 16, None, False, False, marks=pytest.mark.full),
        pytest.param("float32", 256, 8, None, False, True, marks=pytest.mark.full),
    ],
)
@pytest.mark.slow("compiles kernels")
def test_attention_compiles_within_the_shared_memory(
    dtype: str,
    head_size: int,
    block_size: int,
    window: int | None,
    loads_apart: bool,
    mixed_graph: bool,
) -> None:
    from tests.attention.hopper import SHARED_MEMORY_BYTES, compiling_for_hopper

    with compiling_for_hopper() as kernels:
        attend(dtype, head_size, block_size, window, mixed_graph)
    names = {kernel.name: kernel for kernel in kernels}
    prefill = "prefill_hopper" if loads_apart else "prefill_tiles"
    assert names.keys() == {
        "scatter",
        "decode_shares",
        prefill,
        *([] if window else ["attend_prefix"]),
    }
    assert (
        "wgmma.mma_async" in names[prefill].ptx and "cp.async.bulk.tensor" in names[prefill].ptx
    ) == loads_apart
    for kernel in kernels:
        assert kernel.shared_bytes <= SHARED_MEMORY_BYTES, kernel.name
    assert names["decode_shares"].shared_bytes * 2 <= SHARED_MEMORY_BYTES, (
        "several run on a multiprocessor"
    )
    assert DEPENDENT in names["decode_shares"].ptx
    assert "prefetch.global.L2" in names["decode_shares"].ptx


@pytest.mark.parametrize(
    ("head_size", "sinks", "softcap", "prefill"),
    [(64, True, None, "prefill_hopper"), (256, False, 50.0, "prefill_tiles")],
)
@pytest.mark.full
def test_attention_with_sinks_or_capped_scores_compiles_within_the_shared_memory(
    head_size: int, sinks: bool, softcap: float | None, prefill: str
) -> None:
    from tests.attention.hopper import SHARED_MEMORY_BYTES, compiling_for_hopper

    with compiling_for_hopper() as kernels:
        attend("bfloat16", head_size, 16, None, False, heads=64, sinks=sinks, softcap=softcap)
    assert {kernel.name for kernel in kernels} == {
        "scatter",
        "decode_shares",
        prefill,
        "attend_prefix",
    }
    assert all(kernel.shared_bytes <= SHARED_MEMORY_BYTES for kernel in kernels)


@pytest.mark.parametrize("head_size", [64, 128])
def test_trying_the_kernel_for_prefills_compiles_none_that_layers_would_not_need(
    head_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dovetail_attention import triton_prefill_hopper
    from tests.attention.hopper import compile_nothing, compiling_for_hopper

    compile_nothing(monkeypatch)
    with compiling_for_hopper() as kernels:
        backend = attend("bfloat16", head_size, 16, None, True, sinks=head_size == 64)
        [schedule] = backend.planned.schedules.values()
        with pytest.raises(DovetailError, match="wrong numbers"):
            triton_prefill_hopper.check(schedule.kind, schedule.limits, schedule.prefill_tiling)
    assert [kernel.name for kernel in kernels].count("prefill_hopper") == 1


@pytest.mark.parametrize(
    ("dtype", "head_size"), [pytest.param("bfloat16", 128, marks=pytest.mark.full), ("float16", 64)]
)
@pytest.mark.slow("compiles kernels")
def test_attention_over_fp8_compiles_and_reads_whole_pieces(dtype: str, head_size: int) -> None:
    """16 bytes at once into shared memory, and from there what matrix units take: never byte by
    byte."""
    from tests.attention.hopper import SHARED_MEMORY_BYTES, compiling_for_hopper

    with compiling_for_hopper() as kernels:
        attend(dtype, head_size, 16, None, False, cache_dtype="float8_e4m3fn")
    names = {kernel.name: kernel for kernel in kernels}
    decode = names["decode_shares"]
    assert all(kernel.shared_bytes <= SHARED_MEMORY_BYTES for kernel in kernels)
    assert "cvt.rn.f16x2.e4m3x2" in decode.ptx
    assert "ldmatrix.sync.aligned.m8n8.x4.trans" in decode.ptx
    assert not re.search(r"ld\.shared\.[usb]8|cp\.async\.ca", decode.ptx)
    prefill = names["prefill_hopper"]
    assert "cvt.rn.f16x2.e4m3x2" in prefill.ptx
    assert "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16" in prefill.ptx, (
        "not of FP8, whose sums keep fewer bits"
    )
    assert decode.spilled_bytes == prefill.spilled_bytes == 0


@pytest.mark.parametrize(
    "cache_dtype", [None, pytest.param("float8_e4m3fn", marks=pytest.mark.full)]
)
@pytest.mark.slow("compiles kernels")
def test_attention_to_selected_tokens_compiles_within_the_shared_memory(
    cache_dtype: str | None,
) -> None:
    """As in DeepSeek-V3.2."""
    from tests.attention.hopper import SHARED_MEMORY_BYTES, compiling_for_hopper

    indexer = Indexer(2048, 64, 128)
    spec = LayerSpec(0, 128, 1, 576, 0.1, v_in_k=True, v_head_size=512, indexer=indexer)
    backend = TritonAttention(NoOptions(), AttentionContext("cpu", "bfloat16", 16, cache_dtype))
    backend.tilings, backend.processors = HOPPER, 132
    layer = backend.make_layer(spec)
    layer.kv_scales = KVScales(torch.ones(()), torch.ones(())) if cache_dtype else None
    bind_layers(backend, [layer], 4)
    backend.prepare(max_rows=2, max_tokens=2, max_len=4096)
    backend.plan(
        AttentionBatch(
            2,
            2,
            torch.arange(3, dtype=torch.int32),
            torch.full((2,), 3000, dtype=torch.int32),
            (torch.zeros((1, 2, 256), dtype=torch.int32),),
            (torch.full((1, 2), 64),),
            np.ones(2, np.int32),
            np.full(2, 3000, np.int32),
        )
    )

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    with compiling_for_hopper() as kernels:
        layer.write_index(zeros(2, 128))
        layer.select(zeros(2, 64, 128), torch.zeros(2, 64))
        layer.attend(zeros(2, 128, 576))
    names = [kernel.name for kernel in kernels]
    assert names == [
        *("scatter", "index_scores", "choose"),
        *("find_entries", "attend_selected", "merge_splits"),
    ]
    assert all(kernel.shared_bytes <= SHARED_MEMORY_BYTES for kernel in kernels)
    assert all(kernel.spilled_bytes == 0 for kernel in kernels)
    by_name = {kernel.name: kernel.ptx for kernel in kernels}
    for name in ("index_scores", "attend_selected"):
        assert "mma" in by_name[name], f"{name}: no matrix units"


@pytest.mark.parametrize(
    ("heads", "head_size"), [(8, 128), (16, 128), (32, 128), (16, 64), (32, 64), (16, 256)]
)
@pytest.mark.slow("compiles kernels")
def test_as_many_programs_of_a_decode_fit_a_multiprocessor_as_share_the_keys(
    heads: int, head_size: int
) -> None:
    from tests.attention.hopper import SHARED_MEMORY_BYTES, compiling_for_hopper

    with compiling_for_hopper("decode_shares") as kernels:
        attend("bfloat16", head_size, 16, None, False, heads)
    [kernel] = kernels
    tiling = HOPPER.decode(Shape(heads // 8, head_size, 2, 16))
    [registers] = re.findall(r"\.maxnreg (\d+)", kernel.ptx)
    assert int(registers) * tiling.warps * 32 * tiling.programs <= REGISTERS
    assert kernel.shared_bytes * tiling.programs <= SHARED_MEMORY_BYTES


@pytest.mark.parametrize(
    ("inputs", "outputs", "around"),
    [(1024, 4096, {"norm": 1}), (1024, 6144, {"norm": 1, "gated": True}), (3072, 1024, {"out": 1})],
)
@pytest.mark.parametrize("rows", [2, 16])
def test_layers_of_few_rows_ask_for_their_weights_before_they_wait(
    inputs: int, outputs: int, around: dict[str, Any], rows: int
) -> None:
    from dovetail.nn.kernels import few_rows
    from tests.attention.hopper import SHARED_MEMORY_BYTES, compiling_for_hopper

    x, weight, norm, out = (
        torch.zeros(size, dtype=torch.bfloat16)
        for size in ((rows, inputs), (outputs, inputs), (inputs,), (rows, outputs))
    )
    tensors = {"norm": (norm, 1e-6), "out": out}
    tiling = few_rows.tiling_for(weight, rows, "gated" in around)
    assert tiling is not None
    with compiling_for_hopper() as kernels:
        few_rows.linear(
            x,
            weight,
            tiling=tiling,
            **{name: tensors.get(name, value) for name, value in around.items()},
        )
    [kernel] = kernels
    before, after = kernel.ptx.split(DEPENDENT)
    weights_of_a_thread = (
        tiling.outputs * inputs * (2 if "gated" in around else 1) // (tiling.warps * 32)
    )
    assert before.count("ld.global.v4") * 8 >= weights_of_a_thread
    assert "mma.sync" in after
    assert kernel.shared_bytes <= SHARED_MEMORY_BYTES


@pytest.mark.parametrize(
    ("inputs", "outputs", "around"),
    [
        (1024, 4096, {}),
        (1024, 6144, {"gated": True}),
        (3072, 1024, {"in_parts": True}),
        (2048, 1024, {"in_parts": True}),
        (896, 1152, {"bias": 1}),
    ],
)
@pytest.mark.parametrize("rows", [17, 64, 128])
def test_layers_of_many_rows_ask_for_their_weights_before_they_wait(
    inputs: int, outputs: int, around: dict[str, Any], rows: int
) -> None:
    from dovetail.nn.kernels import many_rows
    from tests.attention.hopper import SHARED_MEMORY_BYTES, compiling_for_hopper

    x, weight, bias = (
        torch.zeros(size, dtype=torch.bfloat16)
        for size in ((rows, inputs), (outputs, inputs), (outputs,))
    )
    gated, in_parts = "gated" in around, "in_parts" in around
    tiling = many_rows.tiling_for(weight, rows, gated=gated, in_parts=in_parts)
    assert tiling is not None
    with compiling_for_hopper() as kernels:
        many_rows.linear(
            x,
            weight,
            bias if "bias" in around else None,
            tiling=tiling,
            gated=gated,
            in_parts=in_parts,
        )
    [kernel] = kernels
    before, after = kernel.ptx.split(DEPENDENT)
    assert before.count("cp.async.bulk.tensor") == tiling.held * (2 if gated else 1)
    assert "wgmma.mma_async" in after
    assert kernel.shared_bytes <= SHARED_MEMORY_BYTES


@pytest.mark.parametrize(
    ("inputs", "outputs", "around"),
    [(4096, 6144, {}), (4096, 24_576, {"gated": True}), (12_288, 4096, {"in_parts": True})],
)
def test_large_layers_of_few_rows_multiply_no_padding_and_ask_for_their_weights_first(
    inputs: int, outputs: int, around: dict[str, bool]
) -> None:
    from dovetail.nn.kernels import many_rows
    from tests.attention.hopper import SHARED_MEMORY_BYTES, compiling_for_hopper

    x, weight = (torch.zeros(size, inputs, dtype=torch.bfloat16) for size in (5, outputs))
    tiling = many_rows.tiling_for(weight, len(x), **around)
    assert tiling is not None
    with compiling_for_hopper() as kernels:
        many_rows.linear(x, weight, tiling=tiling, **around)
    [kernel] = kernels
    before, after = kernel.ptx.split(DEPENDENT)
    assert before.count("cp.async.bulk.tensor") == tiling.held * (2 if "gated" in around else 1)
    assert "wgmma.mma_async.sync.aligned.m64n8k16" in after
    assert kernel.shared_bytes <= SHARED_MEMORY_BYTES
    assert kernel.spilled_bytes == 0


@pytest.mark.slow("compiles kernels")
def test_the_kernels_around_attention_compile() -> None:
    from dovetail.nn.kernels import embedding, gate, logprobs, one_row, qkv, rms_norm
    from dovetail_samplers import fused
    from dovetail_samplers.device_changes import DeviceChanges
    from dovetail_samplers.table import DeviceRows
    from tests.attention.hopper import compiling_for_hopper

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    cache = FusedCache(
        zeros(4, 16, 8, 128), zeros(4, 16, 8, 128), torch.zeros(5, dtype=torch.int64)
    )
    rows, ints = DeviceRows(4, 5000, torch.device("cpu")), torch.zeros(5, dtype=torch.int32)
    history = RowHistory(ints[:, None], ints, ints)
    changes, lines = (
        DeviceChanges(4, SamplerContext("cpu", 5000, history)),
        Lines(rows=torch.arange(3), ahead=torch.zeros(3, dtype=torch.int32)),
    )
    with compiling_for_hopper() as kernels:
        embedding.embed(torch.zeros(5, dtype=torch.int64), zeros(100, 1024))
        rms_norm.rms_norm(zeros(5, 1024), zeros(1024), 1e-6)
        rms_norm.add_and_norm(zeros(5, 1024), torch.zeros(3, 5, 1024), zeros(1024), 1e-6)
        gate.silu_mul(zeros(5, 6144))
        qkv.norm_turn_write(
            zeros(5, 32, 128),
            8,
            zeros(24 * 128),
            1e-6,
            torch.zeros(64, 128),
            torch.zeros(5, dtype=torch.int64),
            cache,
        )
        one_row.linear(zeros(1, 1024), zeros(6144, 1024), norm=(zeros(1024), 1e-6), gated=True)
        one_row.linear(zeros(1, 3072), zeros(1024, 3072), out=zeros(1, 1024))
        logprobs.top_logprobs(zeros(3, 5000), torch.arange(3), 20)
        logprobs.top_logprobs(
            zeros(3, 5000), torch.arange(3), 20, torch.arange(3), changes.asked_logprobs
        )
        changes.change(zeros(3, 5000), lines)
        fused.draw(zeros(3, 5000), lines, rows.records, history, rows.hashes)
    around = [
        "_embed",
        "_rms_norm",
        "_rms_norm",
        "_silu_mul",
        "_norm_turn_write",
        "_linear",
        "_linear",
    ]
    assert [kernel.name for kernel in kernels] == [
        *around,
        *["_survey", "_choose"] * 2,
        "_widen",
        "_change",
        "_survey",
        "_choose",
    ]
    assert all(DEPENDENT in kernel.ptx for kernel in kernels)
    [change] = [kernel for kernel in kernels if kernel.name == "_change"]
    assert not re.search(r"\bfma\.|div\.full|div\.approx", change.ptx), (
        "numbers that aren't the twin's"
    )


def backend_of(tilings: Tilings) -> TritonAttention:
    backend = TritonAttention(NoOptions(), AttentionContext("cpu", "bfloat16", 16))
    backend.tilings, backend.processors = tilings, 132
    bind_layers(backend, [backend.make_layer(LayerSpec(0, 16, 8, 128, 0.1))], 4)
    return backend


def prefill_loads_apart(backend: TritonAttention) -> bool:
    backend.prepare(max_rows=32, max_tokens=1024, max_len=4096)
    [schedule] = backend.planned.schedules.values()
    return schedule.prefill_tiling.loads_apart


@pytest.mark.parametrize("computes", [True, False])
def test_a_triton_in_which_the_kernel_for_prefills_fails_goes_without(
    computes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_backend, "_loads_apart_well", lambda kind, limits: computes)
    backend = backend_of(HOPPER)
    assert prefill_loads_apart(backend) == computes
    assert (backend.tilings, backend.planned.limits.tilings) == (
        (HOPPER,) * 2 if computes else (CUDA,) * 2
    )


def test_other_tilings_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        triton_backend, "_loads_apart_well", lambda kind, limits: pytest.fail("nobody asked")
    )
    assert prefill_loads_apart(backend_of(replace(HOPPER, scatter=(8, 1024))))
    assert not prefill_loads_apart(backend_of(CUDA))


def test_while_kernels_are_compiled_ahead_it_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        triton_backend, "_loads_apart_well", lambda kind, limits: pytest.fail("nothing is launched")
    )
    with compiling_ahead(torch.device("cpu"), 1):
        assert prefill_loads_apart(backend_of(HOPPER))
