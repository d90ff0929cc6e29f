"""Choice of the attention backend for a model, and the error if none fits."""

from __future__ import annotations

import pytest

from dovetail.api.attention import AttentionCapabilities, AttentionContext, LayerSpec
from dovetail.api.executor import ComponentRef
from dovetail.errors import UnsupportedError
from dovetail_attention.sdpa import TorchAttention
from dovetail_executors.runtime.attention_choice import choose_attention

SPECS = [LayerSpec(0, 8, 4, 32, 0.2), LayerSpec(1, 8, 4, 32, 0.2, window=16)]


class WholeBlocks(TorchAttention):
    """Stands for a backend that can do little."""

    capabilities = AttentionCapabilities(
        devices=("cuda",),
        dtypes=("bfloat16",),
        block_sizes=(64,),
        head_sizes=(128,),
        groups=True,
        causal=True,
    )


class BigBlocks(TorchAttention):
    capabilities = AttentionCapabilities(
        block_size_multiple=32, groups=True, window=True, causal=True
    )


def target(backend: type[TorchAttention]) -> ComponentRef:
    return ComponentRef("attention", f"test:{backend.__name__}", f"{__name__}:{backend.__name__}")


def test_the_first_backend_with_no_reason_against_it_is_taken() -> None:
    chosen = choose_attention(
        (target(WholeBlocks), target(BigBlocks), target(TorchAttention)),
        SPECS,
        "cpu",
        "float32",
        None,
    )
    assert chosen.name == "test:BigBlocks"
    assert chosen.backend.context.block_size == 32


def test_a_block_size_that_was_asked_for_passes_over_backends_that_lack_it() -> None:
    assert (
        choose_attention(
            (target(BigBlocks), target(TorchAttention)), SPECS, "cpu", "float32", 8
        ).name
        == "test:TorchAttention"
    )


def test_if_no_backend_fits_every_reason_of_each_is_reported() -> None:
    with pytest.raises(UnsupportedError) as caught:
        choose_attention((target(WholeBlocks), target(BigBlocks)), SPECS, "cpu", "float32", 24)
    assert str(caught.value).splitlines() == [
        "no attention backend can serve this model on cpu in float32 with block_size: 24:",
        "  - test:WholeBlocks: device cpu is not among cuda",
        "  - test:WholeBlocks: dtype float32 is not among bfloat16",
        "  - test:WholeBlocks: head size 32 is not among 128",
        "  - test:WholeBlocks: block size 24 is not among 64",
        "  - test:WholeBlocks: sliding windows aren't supported",
        "  - test:BigBlocks: block size 24 is not among multiples of 32",
    ]


def test_layers_with_sinks_or_capped_scores_pass_over_a_backend_that_declares_neither() -> None:
    specs = [LayerSpec(0, 8, 4, 32, 0.2, sinks=True), LayerSpec(1, 8, 4, 32, 0.2, softcap=50.0)]
    with pytest.raises(
        UnsupportedError,
        match="BigBlocks: attention sinks aren't supported\n  - test:BigBlocks: a softcap of "
        "attention scores isn't supported",
    ):
        choose_attention((target(BigBlocks),), specs, "cpu", "float32", None)


def test_a_backend_that_cannot_be_imported_is_a_reason_too() -> None:
    missing = ComponentRef("attention", "test:flash", "no_such_package.flash:Flash")
    assert (
        choose_attention((missing, target(TorchAttention)), SPECS, "cpu", "float32", None).name
        == "test:TorchAttention"
    )
    with pytest.raises(
        UnsupportedError,
        match=r"attention test:flash: importing no_such_package\.flash failed: "
        r"ModuleNotFoundError: No module",
    ):
        choose_attention((missing,), SPECS, "cpu", "float32", None)


def test_layers_with_different_windows_pass_over_a_backend_of_one_group() -> None:
    class OneGroup(BigBlocks):
        capabilities = AttentionCapabilities(window=True, causal=True)

    assert OneGroup.reasons_against(AttentionContext("cpu", "float32", 16), SPECS) == [
        "layers with different windows (several cache groups) aren't supported"
    ]
    assert OneGroup.reasons_against(AttentionContext("cpu", "float32", 16), SPECS[1:]) == []
