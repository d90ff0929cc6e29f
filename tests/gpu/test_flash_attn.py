"""The `flash_attn` backend with the package that is installed; its planning is tested on the CPU,
in `tests/attention/test_flash_backend.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail_attention.flash import FlashAttention
from tests.attention.cases import Bench, Case, assert_close, cases
from tests.gpu.device import on_a_gpu, skip_unless_usable
from tests.support import examples

pytestmark = on_a_gpu

ROUNDING = 4e-2  # of bfloat16, in sums of numbers of about 1


@pytest.fixture(autouse=True)
def usable() -> None:
    skip_unless_usable("flash_attn", "bfloat16", 64)


def real(case: Case, head_size: int = 64) -> Case:
    return replace(case, block_size=256, head_size=head_size, dtype="bfloat16", device="cuda")


@examples(quick=40, full=1000)
@given(case=cases(max_len=700), head_size=st.sampled_from([64, 128]))
def test_any_mix_of_prefills_chunks_and_decodes_is_attended_as_defined_while_unused_slots_are_nan(
    case: Case, head_size: int
) -> None:
    skip_unless_usable("flash_attn", "bfloat16", head_size)
    bench = Bench(FlashAttention, real(case, head_size))
    assert_close(bench.run(), bench.expected(), ROUNDING)


def test_what_a_padding_row_says_is_never_followed() -> None:
    bench = Bench(FlashAttention, real(Case((300, 8), (1, 1), padding=5)))
    assert_close(bench.run(), bench.expected(), ROUNDING)
    torch.cuda.synchronize()


def test_a_graph_of_one_decode_step_replays_any_other_of_as_many_rows() -> None:
    case = real(Case((300, 5, 17, 900), (1,) * 4, heads=16, kv_heads=8), 128)
    bench = Bench(FlashAttention, case)
    bench.run()
    layer, q = bench.layers[0], bench._tensor(bench.q[0], 0)
    bench.plan((0, 1, 2, 16), (1, 2, 3, 17))  # an earlier moment of the same rows
    layer.attend(q)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.attend(q)
    bench.plan(case.history, case.lens)
    graph.replay()
    assert_close([out.double().cpu().numpy()], bench.expected(), ROUNDING)


def test_a_graph_leaves_rows_that_became_padding_alone() -> None:
    case = real(Case((300, 5, 17, 90), (1,) * 4, padding=4))
    bench = Bench(FlashAttention, case)
    bench.run()
    q = bench._tensor(bench.q[0], 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = bench.layers[0].attend(q)
    bench.plan(case.history, case.lens, padding=4)
    graph.replay()
    assert_close([out[:4].double().cpu().numpy()], bench.expected(), ROUNDING)
