"""The `triton` backend against the definition of attention: on a GPU as it is, without one in
Triton's interpreter (`tests/test_interpreter.py`)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("triton")

from dovetail.api.attention import AttentionBatch, AttentionContext, LayerCache, LayerSpec
from dovetail.api.component import NoOptions
from dovetail.errors import DovetailError
from dovetail_attention import triton_backend, triton_schedule, triton_trial
from dovetail_attention.triton_backend import TritonAttention
from dovetail_attention.triton_tuning import HOPPER, DecodeTiling
from dovetail_executors.runtime.model_io import MIXED, SHARED
from tests.attention import interpreter
from tests.attention.cases import TOLERANCE, Bench, Case, assert_close, cases
from tests.kernels import INTERPRETED, ON_GPU
from tests.runtime.fakes import Bench as RunnerBench
from tests.runtime.fakes import generate
from tests.runtime.recorded import give_graphs, keep_launches
from tests.runtime.test_decode_graphs import CapturableGreedy, decode_steps
from tests.runtime.test_mixed_graphs import PROMPTS, bench_with_graphs, generate_in_chunks
from tests.support import FULL, examples

DEVICE = "cuda" if ON_GPU else "cpu"
# the interpreter rounds bfloat16 wrongly
HALF = {"float16": 4e-3, "bfloat16": 4e-2} if ON_GPU else {"float16": 4e-3}

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not ON_GPU,
    reason="needs a GPU or the interpreter: tests/test_interpreter.py starts it",
)
gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")

# On a GPU every new shape is compiled, in the interpreter every tile takes milliseconds.
few, enough = (
    examples(quick=6 if ON_GPU else 2, full=400),
    examples(quick=10 if ON_GPU else 5, full=3000 if ON_GPU else 500),
)
beside_the_named = examples(quick=6 if ON_GPU else 1, full=400)
# lies between two that the quick profile tries
full_when_interpreted = () if ON_GPU else (pytest.mark.full,)


class SharingAttention(TritonAttention):
    """Gets a shared prefix in each step, and always uses it."""

    shared_blocks = 0

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(replace(batch, shared_prefix_blocks=self.shared_blocks))


class MixedGraphAttention(SharingAttention):
    """Plans each step as a replay of a mixed-step graph of at least `size` tokens."""

    size = 0

    def plan(self, batch: AttentionBatch) -> None:
        slots, waste_slot = (
            batch.slots[0],
            self._layers[0]._k.shape[0] * self._layers[0]._k.shape[2] - 1,
        )
        padded = torch.nn.functional.pad(
            slots, (0, max(0, self.size - slots.shape[1])), value=waste_slot
        )
        super().plan(replace(batch, slots=(padded,), mixed_graph=True))

    def launches(self) -> list[object]:
        """Return the host arguments of the launches of `attend`, for each kind of layer."""
        kinds = self.planned.schedules.values()
        return [
            (kind.decodes, kind.num_tiles, kind.zero_from, kind.may_share, kind.mixed_graph)
            for kind in kinds
        ]


def mixed_graph_bench(case: Case) -> tuple[Bench, MixedGraphAttention]:
    bench = Bench(MixedGraphAttention, on_device(case))
    assert isinstance(bench.backend, MixedGraphAttention)
    return bench, bench.backend


def plan_padding(bench: Bench) -> None:
    """The step that a graph of mixed steps is captured of."""
    bench._plan(bench.table[:0], np.zeros(0, np.int64), np.zeros(0, np.int64), padding=0)


def on_device(case: Case) -> Case:
    return replace(case, device=DEVICE)


def triton_bench(case: Case, relabel: int = 0) -> Bench:
    return Bench(TritonAttention, on_device(case), relabel=relabel)


def assert_as_defined(case: Case, tolerance: float = TOLERANCE) -> None:
    bench = triton_bench(case)
    assert_close(bench.run(), bench.expected(), tolerance)


@given(cases(max_len=80 if ON_GPU or FULL else 40))
@enough
def test_any_mix_of_prefills_chunks_and_decodes_is_attended_as_defined_while_unused_slots_are_nan(
    case: Case,
) -> None:
    assert_as_defined(case)


@given(cases(max_len=40))
@few
def test_a_mixed_step_is_attended_as_defined_by_what_is_launched_for_any_of_as_many_tokens(
    case: Case,
) -> None:
    bench, backend = mixed_graph_bench(case)
    assert_close(bench.run(), bench.expected())
    tokens = sum(case.queries) + case.padding
    q = torch.full((tokens, case.heads, case.head_size), torch.nan, device=DEVICE)
    assert not bench.layers[0].attend(q)[sum(case.queries) :].any(), (
        "what is computed for padding is zero"
    )
    launched, backend.size = backend.launches(), tokens
    plan_padding(bench)
    assert backend.launches() == launched
    assert not bench.layers[0].attend(q).any()


@given(cases(max_len=40), st.integers(1, 2**31))
@few
def test_which_physical_blocks_a_row_has_changes_nothing(case: Case, relabel: int) -> None:
    case = replace(case, windows=case.windows[:1])
    here, there = triton_bench(case), triton_bench(case, relabel)
    assert_close(here.run(), there.run(), tolerance=0)


@pytest.mark.parametrize("window", [None, 1, pytest.param(50, marks=full_when_interpreted), 130])
def test_rows_of_many_tiles_are_attended_as_defined(window: int | None) -> None:
    assert_as_defined(Case((0, 131, 5), (70, 33, 1), heads=2, kv_heads=1, windows=(window,)))


@pytest.mark.parametrize("heads", [5, pytest.param(72, marks=pytest.mark.full)])
def test_latents_are_attended_as_defined(heads: int) -> None:
    assert_as_defined(
        Case((0, 51, 70), (40, 13, 1), heads=heads, kv_heads=1, head_size=24, v_in_k=16, padding=2)
    )


def test_latents_of_sizes_that_have_no_room_are_refused_by_name() -> None:
    layers = [
        LayerSpec(0, 4, 1, 1088, 1.0, v_in_k=True, v_head_size=1024),
        LayerSpec(1, 4, 2, 576, 1.0, v_in_k=True, v_head_size=512),
    ]
    [heads, sizes] = TritonAttention.reasons_against(
        AttentionContext("cuda:0", "float16", 16), layers
    )
    assert heads == "latent attention with more than one KV head isn't supported"
    assert sizes.startswith("latent attention with K of 1088 numbers, 1024 of them V: ")


@pytest.mark.parametrize(("sinks", "softcap"), [(True, None), (False, 2.0), (True, 0.5)])
def test_sinks_and_capped_scores_are_attended_as_defined(
    sinks: bool, softcap: float | None
) -> None:
    assert_as_defined(
        Case(
            (0, 51, 5),
            (40, 13, 1),
            heads=3,
            kv_heads=1,
            windows=(None, 30),
            sinks=(sinks, False),
            softcaps=(softcap,),
            padding=2,
        )
    )


@pytest.mark.parametrize("group", [1, pytest.param(3, marks=full_when_interpreted), 7])
def test_any_number_of_heads_may_share_a_kv_head(group: int) -> None:
    assert_as_defined(Case((0, 20), (30, 1), heads=2 * group, kv_heads=2))


@pytest.mark.parametrize(
    "block_size",
    [8, *(pytest.param(size, marks=full_when_interpreted) for size in (16, 32, 64)), 256],
)
def test_blocks_smaller_and_larger_than_a_tile_are_read_as_defined(block_size: int) -> None:
    assert_as_defined(Case((70, 40), (1, 30), block_size, heads=2, kv_heads=1))


@pytest.mark.parametrize(
    "head_size",
    [80, *(pytest.param(size, marks=full_when_interpreted) for size in (64, 96, 128)), 256, 512],
)
def test_head_sizes_that_are_no_power_of_two_are_attended_as_defined(head_size: int) -> None:
    assert_as_defined(Case((70, 10), (1, 9), head_size=head_size, heads=2, kv_heads=1))


def test_many_decodes_of_very_different_lengths_are_attended_as_defined() -> None:
    lens = (
        np.random.default_rng(0).integers(1, 900 if ON_GPU else 120, 100 if ON_GPU else 12).tolist()
    )
    assert_as_defined(Case(tuple(lens), (1,) * len(lens), kv_heads=1, heads=2, windows=(None, 64)))


@pytest.mark.parametrize(
    ("tokens", "least", "most"),
    [(64, 2, 4), pytest.param(240, 5, 16, marks=full_when_interpreted), (600, 17, 64)],
)
def test_a_row_of_many_parts_is_put_together_in_groups_of_groups(
    tokens: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_backend, "MERGE_NUMBERS", 64)  # two parts at once
    monkeypatch.setattr(triton_backend, "LEAST_TOGETHER", 4)  # by one program
    monkeypatch.setattr(triton_schedule, "LEAST_KEYS", 16)
    bench = triton_bench(
        Case((tokens - 1, 99, 2), (1, 1, 1), heads=2, kv_heads=1, sinks=(tokens != 600,))
    )
    assert isinstance(bench.backend, TritonAttention)
    bench.backend.tilings = replace(
        bench.backend.tilings, decode=lambda shape: DecodeTiling(16, 1, 1, 1)
    )
    bench.backend.processors = 50
    bench.backend.prepare(max_rows=3, max_tokens=1024, max_len=1024)
    [schedule] = bench.backend.planned.schedules.values()
    for seed in range(2):  # the second time with what the first left behind
        with interpreter.shuffled(seed) if INTERPRETED else nullcontext():
            assert_close(bench.run(), bench.expected(), TOLERANCE)
        assert least <= schedule.rows[2] <= most, "parts of the first row"
        assert not schedule.arrived.any()


@pytest.mark.parametrize("dtype", list(HALF))
def test_half_precision_is_as_close_as_its_rounding(dtype: str) -> None:
    assert_as_defined(Case((0, 30, 77), (40, 9, 1), dtype=dtype, windows=(None, 20)), HALF[dtype])


@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32", marks=pytest.mark.full)])
def test_k_and_v_in_fp8_are_attended_as_they_are_stored(dtype: str) -> None:
    case = Case(
        (0, 30, 77, 5),
        (40, 9, 1, 1),
        dtype=dtype,
        windows=(None, 20),
        padding=3,
        cache_dtype="float8_e4m3fn",
        kv_scales=((0.037, 0.21),),
    )
    assert_as_defined(case, HALF.get(dtype, TOLERANCE))


@pytest.mark.parametrize("block_size", [3, 16])
def test_padding_tokens_change_no_slot(block_size: int) -> None:
    whole = block_size * 4
    # every slot of the pool is somebody's
    case = Case((whole - 1, 0), (1, whole), block_size, spare_blocks=0, windows=(None, 5))
    bench = triton_bench(case)
    bench.run()
    # one token once more, and NaN for the padding
    bench.write((whole - 1, whole), case.lens, padding=9)
    bench.plan(case.history, case.lens)
    assert_close(bench.attend(), bench.expected())


@pytest.mark.parametrize("queries", [(1, 1), (1, 6)])
def test_what_is_computed_for_padding_is_zero(queries: tuple[int, int]) -> None:
    bench = triton_bench(Case((3, 8), queries, padding=5))
    bench.run()
    q = torch.full((sum(queries) + 5, 4, 8), torch.nan, device=DEVICE)
    assert not bench.layers[0].attend(q)[sum(queries) :].any()


def test_a_step_of_padding_alone_computes_zeros() -> None:
    bench = triton_bench(Case((3,), (1,)))
    bench._plan(bench.table[:0], np.zeros(0, np.int64), np.zeros(0, np.int64), padding=4)
    assert not bench.layers[0].attend(torch.full((4, 4, 8), torch.nan, device=DEVICE)).any()


def test_a_row_sees_what_another_row_writes_in_the_same_step() -> None:
    bench = triton_bench(Case((0, 16), (20, 4)))
    for values in (bench.k, bench.v):
        values[0][1][:16] = values[0][0][:16]  # a shared prefix …
    # … of one block, which the first row computes in this very step
    bench.table[1, 0] = bench.table[0, 0]
    bench.write(bench.case.history, bench.case.lens)
    assert_close(bench.attend(), bench.expected())


@beside_the_named
@given(
    own=st.lists(st.integers(0, 120), min_size=2, max_size=5),
    shared=st.integers(3, 16),
    chunk=st.sampled_from([0, 5]),
    group=st.sampled_from([1, 2, 4]),
    kv_heads=st.sampled_from([1, 2]),
    processors=st.sampled_from([1, 3, 16]),
    backend=st.sampled_from([SharingAttention, MixedGraphAttention]),
)
@example(
    own=[120, 7, 111],
    shared=8,
    chunk=0,
    group=2,
    kv_heads=2,
    processors=16,
    backend=SharingAttention,
)  # several parts, and rows that are cut
@example(
    own=[22, 1, 62],
    shared=8,
    chunk=5,
    group=2,
    kv_heads=1,
    processors=1,
    backend=MixedGraphAttention,
)  # one part, and rows that are whole
@example(
    own=[1, 0], shared=16, chunk=5, group=2, kv_heads=1, processors=16, backend=SharingAttention
)  # a row that has nothing but what it shares
def test_a_prefix_read_once_for_all_rows_is_attended_as_defined(
    own: list[int],
    shared: int,
    chunk: int,
    group: int,
    kv_heads: int,
    processors: int,
    backend: type[SharingAttention],
) -> None:
    history = (*(shared * 16 + tokens - 1 for tokens in own), *([300] if chunk else []))
    queries, sinks = (1,) * len(own) + ((chunk,) if chunk else ()), (chunk == 0,)
    case = on_device(
        Case(
            history,
            queries,
            16,
            kv_heads * group,
            kv_heads,
            padding=2,
            windows=(None, 40),
            sinks=sinks,
        )
    )
    bench = Bench(backend, case)
    bench.backend.processors = processors  # type: ignore[attr-defined]
    bench.backend.prepare(max_rows=16, max_tokens=4096, max_len=512)
    for layer in range(2):
        for values in (bench.k[layer], bench.v[layer]):
            for row in values[1:]:
                row[: shared * 16] = values[0][: shared * 16]
    bench.table[1:, :shared] = bench.table[0, :shared]
    bench.write((0,) * len(history), case.history)
    bench.backend.shared_blocks = shared  # type: ignore[attr-defined]
    bench.write(case.history, case.lens, case.padding)
    [whole_rows] = [
        schedule
        for kind, schedule in bench.backend.step.schedules.items()
        if kind.shape.window is None
    ]  # type: ignore[attr-defined]
    # for a program to take one step over it
    long_enough = shared * 16 - (min(own) == 0) >= whole_rows.decode_tiling.keys
    assert (whole_rows.prefix.parts > 0) == long_enough
    assert_close(bench.attend(case.padding), bench.expected())


@pytest.mark.skipif(not INTERPRETED, reason="graphs are played on the CPU; tests/gpu has real ones")
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.full), 5])
def test_a_model_with_it_says_the_same_when_its_mixed_steps_are_recorded_whole(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_launches(monkeypatch)
    bench = bench_with_graphs(TritonAttention, [16, 8], monkeypatch)
    assert bench.runner.graphs is not None
    graphs = [
        bench.runner.graphs.find(key, size)
        for key in (MIXED, replace(MIXED, axes=SHARED))
        for size in (16, 8)
    ]
    assert all(graph is not None and graph.whole for graph in graphs)
    assert generate_in_chunks(bench, chunk, 2) == [generate(prompt, 2) for prompt in PROMPTS]


@pytest.mark.skipif(not INTERPRETED, reason="graphs are played on the CPU; tests/gpu has real ones")
def test_a_model_with_it_says_the_same_when_its_decodes_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep_launches(monkeypatch)
    bench = RunnerBench(max_rows=4, attention=TritonAttention)
    bench.sampler.__class__ = CapturableGreedy
    give_graphs(bench, decode_steps(bench))
    first = bench.run(
        {row: len(prompt) for row, prompt in enumerate(PROMPTS)},
        [bench.new(row, prompt) for row, prompt in enumerate(PROMPTS)],
    )
    tokens = [[int(token)] for token in first.token_ids]
    for rows in ((0, 1, 2), (2,), (1, 0, 2)):
        for row, token in zip(
            rows, bench.run(dict.fromkeys(rows, 1)).token_ids.tolist(), strict=True
        ):
            tokens[row].append(token)
    assert tokens == [
        generate(prompt, len(told)) for prompt, told in zip(PROMPTS, tokens, strict=True)
    ]


def test_q_k_and_v_may_be_parts_of_one_tensor() -> None:
    case = Case((0, 9), (12, 1), heads=4, kv_heads=2, head_size=8)
    apart, together = triton_bench(case), triton_bench(case)
    apart.run()
    together.run()
    together.poison()
    together.write((0,) * 2, case.history)
    together.plan(case.history, case.lens)
    rng = np.random.default_rng(1)
    qkv = torch.from_numpy(rng.normal(size=(13, 8 * 8))).float().to(DEVICE)
    q, k, v = (part.unflatten(1, (-1, 8)) for part in qkv.split([32, 16, 16], dim=1))
    apart.layers[0].write(k.contiguous(), v.contiguous())
    together.layers[0].write(k, v)
    assert torch.equal(apart.layers[0].attend(q.contiguous()), together.layers[0].attend(q))


def test_pages_of_fp8_that_pairs_do_not_fill_are_refused() -> None:
    layer = TritonAttention(
        NoOptions(), AttentionContext(DEVICE, "float16", 1, "float8_e4m3fn")
    ).make_layer(LayerSpec(0, 1, 1, 8, 1.0))
    with pytest.raises(DovetailError, match="a page has 9 bytes, and FP8 is read in pairs"):
        layer.bind(
            LayerCache(
                tuple(torch.zeros((3, 9), dtype=torch.uint8, device=DEVICE) for _ in range(2)), 1
            )
        )


def test_plan_before_prepare_is_an_error() -> None:
    backend = TritonAttention(NoOptions(), AttentionContext(DEVICE, "float32", 16))
    with pytest.raises(DovetailError, match=r"before prepare\(\)"):
        backend.plan(None)  # type: ignore[arg-type]


def test_a_step_larger_than_prepared_for_is_an_error() -> None:
    bench = triton_bench(Case((0,), (9,)))
    bench.backend.prepare(1, 8, 100)
    with pytest.raises(DovetailError, match=r"1 rows and 9 tokens.*room for 1 and 8"):
        bench.plan((0,), (9,))


def test_what_it_can_not_do_is_refused_in_words() -> None:
    layers = [LayerSpec(0, 4, 2, 520, 1.0)]
    reasons = TritonAttention.reasons_against(AttentionContext("cpu", "float32", 16), layers)
    assert len(reasons) == 2
    assert "device cpu" in reasons[0]
    assert "head size 520" in reasons[1]


@gpu
@pytest.mark.parametrize(
    ("dtype", "head_size", "block_size", "heads"),
    [
        ("bfloat16", 128, 16, 4),
        ("bfloat16", 128, 128, 1),
        ("float16", 128, 32, 12),
        ("bfloat16", 64, 8, 2),
        ("bfloat16", 40, 64, 4),
        ("bfloat16", 80, 256, 8),
    ],
)
@pytest.mark.parametrize("backend", [TritonAttention, MixedGraphAttention])
@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(1, 300)), min_size=1, max_size=4),
    st.integers(0, 9),
)
@enough
def test_prefills_on_a_hopper_are_attended_as_defined_while_unused_slots_are_nan(
    backend: type[TritonAttention],
    dtype: str,
    head_size: int,
    block_size: int,
    heads: int,
    rows: list[tuple[int, int]],
    padding: int,
) -> None:
    history, queries = zip(*rows, strict=True)
    bench = Bench(
        backend,
        on_device(
            Case(history, queries, block_size, heads, 1, head_size, dtype=dtype, padding=padding)
        ),
    )
    if bench.backend.tilings != HOPPER:
        pytest.skip("needs a Hopper, and a Triton with which its kernel works")
    assert_close(bench.run(), bench.expected(), HALF[dtype])


@gpu
def test_a_graph_of_one_decode_step_replays_any_other_of_as_many_rows() -> None:
    case = replace(
        on_device(
            Case((300, 5, 17, 90), (1,) * 4, heads=16, kv_heads=8, head_size=128, dtype="bfloat16")
        ),
        padding=0,
    )
    bench = Bench(TritonAttention, case)
    bench.run()
    layer, q = bench.layers[0], bench._tensor(bench.q[0], 0)
    starts, ends = (0, 1, 2, 16), (1, 2, 3, 17)  # an earlier moment of the same rows
    bench.plan(starts, ends)
    layer.attend(q)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.attend(q)
    bench.plan(case.history, case.lens)
    graph.replay()
    assert_close([out.double().cpu().numpy()], bench.expected(), HALF["bfloat16"])


@gpu
@pytest.mark.parametrize(
    ("shared", "steps"), [(0, [(0, 1), (0, 1, 2, 3, 4), (4, 3), (2,)]), (16, [(0, 1), (1, 0)])]
)
def test_a_graph_of_padding_replays_any_mix_of_as_many_tokens(
    shared: int, steps: list[tuple[int, ...]]
) -> None:
    case = Case(
        (299, 299, 5, 17, 0),
        (1, 1, 1, 40, 19),
        heads=16,
        kv_heads=8,
        head_size=128,
        dtype="bfloat16",
        windows=(None, 40),
    )
    bench, backend = mixed_graph_bench(case)
    for values in (*bench.k, *bench.v):
        values[1][:256] = values[0][:256]
    bench.table[1, :16] = bench.table[0, :16]
    bench.run()
    backend.size, backend.shared_blocks = 64, shared
    qs = [
        torch.full((64, 16, 128), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        for _ in bench.layers
    ]
    plan_padding(bench)
    for layer, q in zip(bench.layers, qs, strict=True):
        layer.attend(q)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [layer.attend(q) for layer, q in zip(bench.layers, qs, strict=True)]
    ends, expected = np.cumsum(case.queries), bench.expected()
    for rows in steps:
        queries, lens = (
            np.array([values[row] for row in rows]) for values in (case.queries, case.lens)
        )
        bench._plan(bench.table[list(rows)], queries, lens, padding=0)
        for q, out, own in zip(qs, outs, bench.q, strict=True):
            q[: sum(queries)] = bench._tensor([own[row] for row in rows], 0)
            out.fill_(torch.nan)
        graph.replay()
        wanted = np.concatenate(
            [np.arange(ends[row] - case.queries[row], ends[row]) for row in rows]
        )
        got = [out[: sum(queries)].double().cpu().numpy() for out in outs]
        assert_close(got, [exact[wanted] for exact in expected], HALF["bfloat16"])
        assert not any(out[sum(queries) :].any() for out in outs)


@gpu
def test_a_graph_captured_with_a_shared_prefix_serves_steps_without() -> None:
    case = on_device(Case((299, 299), (1, 1), windows=(None,)))
    bench = Bench(SharingAttention, case)
    for values in (bench.k[0], bench.v[0]):
        values[1][:256] = values[0][:256]
    bench.table[1, :16] = bench.table[0, :16]
    bench.backend.shared_blocks = 16  # type: ignore[attr-defined]
    bench.run()
    q = bench._tensor(bench.q[0], 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = bench.layers[0].attend(q)
    for shared in (0, 16, 3):
        bench.backend.shared_blocks = shared  # type: ignore[attr-defined]
        bench.plan(case.history, case.lens)
        out.fill_(torch.nan)
        graph.replay()
        assert_close([out.double().cpu().numpy()], bench.expected())


@pytest.mark.parametrize("both_ways", [False, True])
def test_the_trial_before_a_gpu_is_relied_on_is_passed(both_ways: bool) -> None:
    spec = LayerSpec(0, 4, 2, 16, 0.25, both_ways=both_ways)
    triton_trial.check(TritonAttention, AttentionContext(DEVICE, "float16", 16), spec)


@gpu
@pytest.mark.parametrize("head_size", [64, 128])
def test_sinks_count_once_where_loading_warps_compute_prefills_in_parts(head_size: int) -> None:
    """On a Hopper; elsewhere by the plain kernel."""
    assert_as_defined(
        Case(
            (0, 1250, 6000),
            (300, 70, 64),
            heads=16,
            kv_heads=2,
            head_size=head_size,
            dtype="bfloat16",
            sinks=(True,),
        ),
        HALF["bfloat16"],
    )


@gpu
@pytest.mark.parametrize("heads", [16, 20, 128])
def test_latents_of_true_sizes_are_attended_as_defined(heads: int) -> None:
    case = Case(
        (0, 1250, 6000, 700, 5),
        (300, 70, 1, 1, 1),
        heads=heads,
        kv_heads=1,
        head_size=576,
        v_in_k=512,
        dtype="bfloat16",
        padding=3,
    )
    assert_as_defined(case, HALF["bfloat16"])


@gpu
def test_a_graph_leaves_rows_that_became_padding_alone() -> None:
    case = on_device(Case((300, 5, 17, 90), (1,) * 4, padding=4))
    bench = Bench(TritonAttention, case)
    bench.run()
    q = bench._tensor(bench.q[0], 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = bench.layers[0].attend(q)
    out.fill_(torch.nan)
    bench.plan(case.history, case.lens, padding=4)
    graph.replay()
    assert not out[4:].any()
    assert_close([out[:4].double().cpu().numpy()], bench.expected())
