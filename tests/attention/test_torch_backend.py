"""The `torch` backend against the definition of attention, for all kinds of steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.attention import AttentionContext, LayerCache, LayerSpec
from dovetail.api.component import NoOptions
from dovetail.errors import DovetailError
from dovetail_attention.pieces import CHUNK, _group_ends
from dovetail_attention.sdpa import TorchAttention
from dovetail_attention.units import Units
from tests.attention.cases import Bench, Case, assert_close, cases
from tests.support import examples


@given(cases())
@examples(quick=80, full=3000)
def test_any_mix_of_prefills_chunks_and_decodes_is_attended_as_defined_while_unused_slots_are_nan(
    case: Case,
) -> None:
    bench = Bench(TorchAttention, case)
    assert_close(bench.run(), bench.expected())


@given(cases())
@examples(quick=30, full=1000)
def test_decodes_are_attended_alike_where_torch_has_no_sampled_product(case: Case) -> None:
    bench = Bench(TorchAttention, case)
    bench.backend._planner.use_bags = False  # type: ignore[attr-defined]
    assert_close(bench.run(), bench.expected())


@given(cases(), st.floats(1e-3, 2), st.floats(1e-3, 2))
@examples(quick=10, full=1000)
def test_k_and_v_in_fp8_are_attended_as_they_are_stored(
    case: Case, k_scale: float, v_scale: float
) -> None:
    bench = Bench(
        TorchAttention, replace(case, cache_dtype="float8_e4m3fn", kv_scales=((k_scale, v_scale),))
    )
    assert_close(bench.run(), bench.expected(), 1e-4)


def test_what_a_row_gets_in_a_bag_does_not_depend_on_the_other_rows() -> None:
    lens = (5, 90, 17, 41)
    bench = Bench(TorchAttention, Case(lens, (1,) * 4))
    together = bench.run()[0]
    bench.plan((0, *lens[1:3], 0), (0, *bench.case.lens[1:3], 0))
    apart = bench.layers[0].attend(torch.from_numpy(np.concatenate(bench.q[0][1:3])).float())
    np.testing.assert_array_equal(apart.double().numpy(), together[1:3])


@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize("block_size", [1, 16])
def test_rows_longer_than_a_stretch_are_attended_as_defined(
    window: int | None, block_size: int
) -> None:
    case = Case((0, CHUNK + 3, 5), (CHUNK + 70, CHUNK + 9, 1), block_size, windows=(window,))
    bench = Bench(TorchAttention, case)
    assert_close(bench.run(), bench.expected())


@pytest.mark.parametrize("length", [19, 20, 21])
def test_fresh_rows_about_as_long_as_the_window_are_attended_as_defined(length: int) -> None:
    bench = Bench(TorchAttention, Case((0, 0, length - 1), (length, length, 1), windows=(20,)))
    assert_close(bench.run(), bench.expected())


def test_many_decodes_of_very_different_lengths_are_attended_as_defined() -> None:
    lens = np.random.default_rng(0).integers(1, 900, 40).tolist()
    bench = Bench(
        TorchAttention, Case(tuple(lens), (1,) * len(lens), kv_heads=1, heads=2, windows=(None, 64))
    )
    assert_close(bench.run(), bench.expected())


def test_sinks_that_do_not_fit_a_layer_are_refused_and_it_does_not_attend_without_them() -> None:
    bench = Bench(TorchAttention, Case((0,), (5,), sinks=(True, False), windows=(None, None)))
    with_sinks, without = bench.layers
    with pytest.raises(
        DovetailError,
        match=r"layer 0: bind_sinks\(\) got a tensor of shape \[2\], expected 4 sinks",
    ):
        with_sinks.bind_sinks(torch.zeros(2))
    with pytest.raises(DovetailError, match="its LayerSpec has no sinks"):
        without.bind_sinks(torch.zeros(4))
    bench.write((0,), (5,))
    with_sinks.sinks = None
    with pytest.raises(
        DovetailError, match=r"layer 0 has sinks, and attend\(\) was called before bind_sinks\(\)"
    ):
        with_sinks.attend(torch.zeros(5, 4, 8))


def test_plan_before_prepare_is_an_error() -> None:
    backend = TorchAttention(NoOptions(), AttentionContext("cpu", "float32", 16))
    with pytest.raises(DovetailError, match=r"before prepare\(\)"):
        backend.plan(None)  # type: ignore[arg-type]


@given(
    st.lists(st.integers(1, 300), max_size=30).map(lambda lens: sorted(lens, reverse=True)),
    st.integers(1, 1000),
    st.integers(0, 200),
)
@examples(quick=50, full=2000)
def test_groups_keep_their_two_limits_and_take_every_row_once(
    lens: list[int], most: int, most_fill: int
) -> None:
    ends = _group_ends(lens, most, most_fill)
    groups = [lens[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert [length for group in groups for length in group] == lens
    for group in groups:
        filled = group[0] * len(group)
        assert group
        assert len(group) == 1 or (filled <= most and filled - sum(group) <= most_fill)


def test_a_row_in_blocks_that_follow_each_other_is_read_in_place() -> None:
    case = Case((40,), (1,), spare_blocks=0)
    bench = Bench(TorchAttention, case)
    bench.table[0, :3] = [0, 1, 2]
    bench.run()
    ((piece,),) = bench.backend.parts.values()  # type: ignore[attr-defined]
    assert piece.keys == slice(0, 41)
    assert_close(bench.attend(), bench.expected())


@pytest.mark.parametrize(
    ("block_size", "row", "numbers"), [(3, 30, 10), (3, 37, 8), (2, 16, 8), (1, 9, 6)]
)
def test_tokens_are_found_whatever_the_length_of_a_page(
    block_size: int, row: int, numbers: int
) -> None:
    spec = LayerSpec(0, 1, 1, numbers, 1.0)
    cache = LayerCache((), block_size)
    rows = torch.arange(4.0 * row).view(4, row)
    units = Units.of(cache, rows, spec)
    pages, offsets = (
        torch.arange(4).repeat_interleave(block_size),
        torch.arange(block_size).repeat(4),
    )
    found = units.view(rows, spec)[units.of_slots(pages * block_size + offsets)]
    assert torch.equal(found[:, 0], rows[:, : block_size * numbers].reshape(-1, numbers))


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ([(5, 64)], "expected 2 of one shape"),
        ([(5, 64), (5, 72)], "expected 2 of one shape"),
        ([(5, 60), (5, 60)], "a page has 60 bytes, expected a multiple of 4 from 64 on"),
        ([(5, 66), (5, 66)], "a page has 66 bytes"),
    ],
)
def test_memory_that_does_not_fit_a_layer_is_refused(
    shapes: list[tuple[int, int]], words: str
) -> None:
    layer = TorchAttention(NoOptions(), AttentionContext("cpu", "float32", 2)).make_layer(
        LayerSpec(3, 1, 1, 8, 1.0)
    )
    with pytest.raises(DovetailError, match=f"attention layer 3: .*{words}"):
        layer.bind(LayerCache(tuple(torch.zeros(shape, dtype=torch.uint8) for shape in shapes), 2))


def test_layers_that_look_back_differently_are_planned_apart() -> None:
    case = Case((30, 9), (1, 1), windows=(None, 7))
    bench = Bench(TorchAttention, case)
    bench.run()
    keys = {
        shape.window: int(part.lens.max()) for (shape, _), (part,) in bench.backend.parts.items()
    }  # type: ignore[attr-defined]
    assert keys == {None: 31, 7: 7}
    assert_close(bench.attend(), bench.expected())
