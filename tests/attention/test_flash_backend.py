"""The `flash_attn` backend against the definition of attention, with stand-ins for the packages;
`tests/gpu` has the real ones."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.attention import AttentionContext, LayerSpec
from dovetail.api.component import NoOptions
from dovetail.errors import DovetailError, UnsupportedError
from dovetail_attention import flash
from dovetail_attention.flash import FlashAttention
from dovetail_attention.flash_library import (
    FlashAttention2,
    FlashAttention3,
    find_library,
    reason_against,
)
from dovetail_executors.runtime.attention_choice import choose_attention
from tests.attention import fake_flash
from tests.attention.cases import Bench, Case, assert_close, cases
from tests.rounding import allowed
from tests.runtime.demo import context
from tests.support import examples

PACKAGES = {"flash_attn": fake_flash.flash_attn_2, "flash_attn_interface": fake_flash.flash_attn_3}
CPU = torch.device("cpu")
HEADS_OF_64 = [LayerSpec(0, 4, 2, 64, 1.0)]


def install(monkeypatch: pytest.MonkeyPatch, *packages: ModuleType) -> None:
    """These, and no others."""
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)  # as if it weren't there
    for package in packages:
        monkeypatch.setitem(sys.modules, package.__name__, package)


@pytest.fixture(params=PACKAGES)
def package(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    install(monkeypatch, PACKAGES[name]())
    return name


def of_pages(case: Case) -> Case:
    return replace(case, block_size=256, spare_blocks=1)


@given(case=cases(max_len=300))
@examples(quick=25, full=1000)
def test_any_mix_of_prefills_chunks_and_decodes_is_attended_as_defined_while_unused_slots_are_nan(
    package: str, case: Case
) -> None:
    bench = Bench(FlashAttention, of_pages(case))
    assert_close(bench.run(), bench.expected())


@given(case=cases(max_len=300), relabel=st.integers(1, 2**31))
@examples(quick=5, full=300)
def test_which_physical_blocks_a_row_has_changes_nothing(
    package: str, case: Case, relabel: int
) -> None:
    here, there = (
        Bench(FlashAttention, of_pages(case)),
        Bench(FlashAttention, of_pages(case), relabel=relabel),
    )
    assert_close(here.run(), there.run(), allowed(300))


@pytest.mark.parametrize("queries", [(1, 1, 1), (1, 1, 6), (6, 1, 1), (1, 6, 1)])
def test_decodes_are_attended_as_defined_before_between_and_after_prefills(
    package: str, queries: tuple[int, ...]
) -> None:
    bench = Bench(
        FlashAttention, of_pages(Case((300, 20, 511), queries, windows=(None, 30), padding=3))
    )
    assert_close(bench.run(), bench.expected())


def test_padding_tokens_change_no_slot(package: str) -> None:
    case = Case((255, 0), (1, 256), 256, spare_blocks=0)  # every slot of the pool is somebody's
    bench = Bench(FlashAttention, case)
    bench.run()
    bench.write((255, 256), case.lens, padding=9)  # one token once more, and NaN for the padding
    bench.plan(case.history, case.lens)
    assert_close(bench.attend(), bench.expected())


def test_what_a_padding_row_says_is_never_followed(package: str) -> None:
    bench = Bench(FlashAttention, of_pages(Case((3, 8), (1, 1), padding=5)))
    bench.run()
    out = bench.layers[0].attend(torch.zeros(7, 4, 8))  # the waste page is NaN
    assert not out[2:].any()


def test_a_step_of_padding_alone_computes_nothing(package: str) -> None:
    bench = Bench(FlashAttention, of_pages(Case((3,), (1,))))
    bench._plan(bench.table[:0], np.zeros(0, np.int64), np.zeros(0, np.int64), padding=4)
    assert not bench.layers[0].attend(torch.ones(4, 4, 8)).any()


def test_q_k_and_v_may_be_parts_of_one_tensor(package: str) -> None:
    case = of_pages(Case((0, 9), (12, 1), heads=4, kv_heads=2, head_size=8))
    bench = Bench(FlashAttention, case)
    bench.run()
    qkv = torch.randn(13, 8, 8, generator=torch.Generator().manual_seed(0))
    q, k, v = qkv.split([4, 2, 2], dim=1)
    bench.layers[0].write(k, v)
    together = bench.layers[0].attend(q)
    bench.layers[0].write(k.contiguous(), v.contiguous())
    assert torch.equal(together, bench.layers[0].attend(q.contiguous()))


def test_what_a_fused_kernel_writes_is_what_attention_reads(package: str) -> None:
    case = of_pages(Case((0, 40), (300, 1), padding=2))
    bench = Bench(FlashAttention, case)
    bench.run()
    bench.poison()
    bench.write((0, 0), case.history)
    bench.plan(case.history, case.lens, padding=2)
    cache = bench.layers[0].cache_for_fused_write()
    assert cache is not None
    slots = cache.slots[:303]
    for place, rows in ((cache.k, bench.k[0]), (cache.v, bench.v[0])):
        place[slots // 256, slots % 256] = torch.cat(
            [torch.from_numpy(np.concatenate([rows[0], rows[1][40:]])).float(), torch.ones(2, 2, 8)]
        )
    assert_close(bench.attend(padding=2), bench.expected())


def test_buffers_stay_where_they_are_from_step_to_step(package: str) -> None:
    bench = Bench(FlashAttention, of_pages(Case((3, 8), (1, 1))))
    step = bench.backend.step  # type: ignore[attr-defined]
    [group] = step.groups.values()
    places = [tensor.data_ptr() for tensor in (group.tables, step.lens, group.slots)]
    bench.run()
    assert [tensor.data_ptr() for tensor in (group.tables, step.lens, group.slots)] == places


def test_plan_before_prepare_and_a_step_larger_than_prepared_for_are_errors_that_say_so(
    package: str,
) -> None:
    backend = FlashAttention(NoOptions(), AttentionContext("cpu", "float32", 256))
    with pytest.raises(DovetailError, match=r"before prepare\(\)"):
        backend.plan(None)  # type: ignore[arg-type]
    bench = Bench(FlashAttention, of_pages(Case((0,), (9,))))
    bench.backend.prepare(1, 8, 100)
    with pytest.raises(DovetailError, match=r"1 rows and 9 tokens.*room for 1 and 8"):
        bench.plan((0,), (9,))


# Which package, and why not


def test_flash_attention_3_is_used_where_both_are_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, fake_flash.flash_attn_2(), fake_flash.flash_attn_3())
    assert isinstance(find_library(CPU), FlashAttention3)
    # a GPU that isn't a Hopper
    monkeypatch.setattr(FlashAttention3, "runs_on", classmethod(lambda cls, device: False))
    assert isinstance(find_library(CPU), FlashAttention2)


def test_without_any_package_the_engine_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch)
    target = next(target for target in context().attention if target.name == "dovetail:flash_attn")
    with pytest.raises(
        UnsupportedError,
        match=r"flash_attn: it needs FlashAttention, and it isn't installed; .*: pip install "
        r".*\[flash-attn\]",
    ):
        choose_attention((target,), HEADS_OF_64, "cuda:0", "bfloat16", None)


def test_a_package_that_does_not_load_is_told_apart_from_one_that_is_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch)

    def fail(name: str) -> None:
        raise ImportError("undefined symbol: _ZN3c105Error")

    monkeypatch.setattr("dovetail_attention.flash_library.import_module", fail)
    reasons = FlashAttention.reasons_against(
        AttentionContext("cuda:0", "bfloat16", 256), HEADS_OF_64
    )
    assert "importing flash_attn failed: undefined symbol" in reasons[0]


def test_a_package_that_is_not_made_for_the_device_is_told_apart_from_one_that_is_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, fake_flash.flash_attn_3())
    monkeypatch.setattr(FlashAttention3, "runs_on", classmethod(lambda cls, device: False))
    with pytest.raises(
        ImportError,
        match="flash_attn_interface doesn't support cpu; install it with: pip install "
        "--no-build-isolation",
    ):
        find_library(CPU)


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        (AttentionContext("cpu", "bfloat16", 256), "device cpu is not among cuda"),
        (
            AttentionContext("cuda:0", "float32", 256),
            "dtype float32 is not among float16, bfloat16",
        ),
        (AttentionContext("cuda:0", "bfloat16", 16), "block size 16 is not among multiples of 256"),
    ],
)
def test_what_it_can_not_do_is_refused_in_words(
    package: str, context: AttentionContext, reason: str
) -> None:
    assert FlashAttention.reasons_against(context, HEADS_OF_64) == [reason]


def test_head_sizes_that_are_no_multiple_of_8_are_refused(package: str) -> None:
    [reason] = FlashAttention.reasons_against(
        AttentionContext("cuda:0", "bfloat16", 256), [LayerSpec(0, 4, 2, 20, 1.0)]
    )
    assert reason.startswith("head size 20 is not among 8, 16, ")


@pytest.mark.parametrize("head_size", [8, 64, 256])
def test_a_complete_build_passes_its_trial(package: str, head_size: int) -> None:
    assert reason_against(find_library(CPU), CPU, torch.bfloat16, head_size) is None


def test_a_build_that_lacks_kernels_is_found_out_before_the_weights_are_read(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = find_library(CPU)
    monkeypatch.setattr(flash, "find_library", lambda device: library)
    monkeypatch.setattr(flash.torch, "device", lambda name: CPU)
    monkeypatch.setattr(library, "decode", lambda q, *rest: torch.full_like(q, 7.0))
    [reason] = FlashAttention.reasons_against(
        AttentionContext("cuda:0", "bfloat16", 256), HEADS_OF_64
    )
    assert "computes nonsense with heads of 64 in torch.bfloat16" in reason


def test_its_blocks_are_of_256_unless_said_otherwise() -> None:
    assert FlashAttention.capabilities.default_block_size() == 256
    assert FlashAttention.capabilities.supports_block_size(512)
