"""Each kernel of `dovetail.nn` computes what its twin computes in float64, and the functions that
choose between them agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen3Config

from tests.rounding import assert_rounded, roundings_of

pytest.importorskip("triton")

from dovetail.api.attention import AttentionLayer, FusedCache, KVScales, LayerCache, LayerSpec
from dovetail.errors import DovetailError
from dovetail.nn import activation, embedding, logprobs, norm, qkv, token_masks
from dovetail.nn.activation import sigmoid_mul, silu_mul
from dovetail.nn.format import dense
from dovetail.nn.kernels import available, few_rows, gpu, many_rows, one_row, one_row_float8
from dovetail.nn.kernels import logprobs as kernels
from dovetail.nn.kernels import rms_norm as norm_kernel
from dovetail.nn.kernels.gpu import GPU
from dovetail.nn.logprobs import top_logprobs
from dovetail.nn.norm import QKNorm
from dovetail.nn.qkv import rope_and_store_kv
from dovetail.nn.rotary import Rope, RotaryEmbedding, Rotation
from dovetail.nn.weights import dummy_weights
from tests.kernels import (
    DEVICE,
    DTYPES,
    INTERPRETED,
    ON_GPU,
    assert_close,
    runs_kernels,
    take_kernels,
)
from tests.models.oracle import build, context, run
from tests.support import examples

some = examples(quick=100 if ON_GPU else 25, full=1000 if ON_GPU else 200)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from(DTYPES)
MAX_LEN = 64
SLOTS = 32


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    take_kernels(monkeypatch, activation, embedding, dense, logprobs, norm, qkv, token_masks)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


def test_a_cpu_tensor_never_meets_a_kernel() -> None:
    assert not available.use_kernels(torch.zeros(2))


# ---- norm


@runs_kernels
@given(
    rows=st.integers(0, 5),
    size=st.sampled_from([1, 2, 48, 64, 1000, 5120, 16384]),
    dtype=dtypes,
    seed=seeds,
)
@some
def test_rms_norm_is_its_twin(rows: int, size: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = randn(rows, size, dtype=dtype), randn(size, dtype=dtype)
    assert_close(norm_kernel.rms_norm(x, weight, 1e-5), exact_norm(x, weight, 1e-5))


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + eps) * weight.double()


# ---- embedding


@runs_kernels
@pytest.mark.usefixtures("with_kernels")
@given(
    ids=st.lists(st.integers(0, 99), max_size=20),
    size=st.sampled_from([1, 100, 1024]),
    dtype=dtypes,
    seed=seeds,
)
@some
def test_each_token_gets_its_row(ids: list[int], size: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    token_ids, weight = (
        torch.tensor(ids, dtype=torch.int64, device=DEVICE),
        randn(100, size, dtype=dtype),
    )
    assert torch.equal(embedding.embed(token_ids, weight), weight[token_ids])


# ---- a linear layer of few rows


@runs_kernels
@pytest.mark.usefixtures("with_kernels")
@given(
    vocab=st.sampled_from([1, 31, 32, 4096, 5000]),
    rows=st.integers(0, 4),
    lines=st.integers(1, 3),
    dtype=dtypes,
    seed=seeds,
)
@some
def test_masked_tokens_are_those_of_the_twin(
    vocab: int, rows: int, lines: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(rows, vocab, dtype=dtype, device=DEVICE)
    words = torch.randint(-(2**31), 2**31, (lines, -(-vocab // 32)), device=DEVICE).to(torch.int32)
    at = torch.randint(-1, lines, (rows,), device=DEVICE)
    ours, twin = logits.clone(), logits.cpu()
    token_masks.mask_tokens(ours, at, words)
    token_masks.mask_tokens(twin, at.cpu(), words.cpu())
    assert torch.equal(ours.cpu(), twin)


@dataclass(frozen=True)
class Around:
    """A linear layer, and what is done around it on the way."""

    rows: int
    inputs: int
    outputs: int
    normed: bool
    biased: bool
    after: str
    dtype: torch.dtype
    seed: int

    def holds(self, kernel: Callable[..., torch.Tensor]) -> None:
        torch.manual_seed(self.seed)
        dtype, gated = self.dtype, self.after == "gate"
        x, norm_weight, residual = (
            randn(*size, dtype=dtype)
            for size in ((self.rows, self.inputs), (self.inputs,), (self.rows, self.outputs))
        )
        weight = randn(self.outputs * (1 + gated), self.inputs, dtype=dtype) / self.inputs**0.5
        bias = randn(len(weight), dtype=dtype) if self.biased else None
        values = exact_norm(x, norm_weight, 1e-5) if self.normed else x.double()
        expected = values @ weight.double().T + (0 if bias is None else bias.double())
        if gated:
            gate, up = expected.chunk(2, dim=-1)
            expected = gate * torch.sigmoid(gate) * up
        if self.after == "add":
            expected = expected + residual.double()
        out = residual if self.after == "add" else None
        result = kernel(
            x, weight, bias, norm=(norm_weight, 1e-5) if self.normed else None, gated=gated, out=out
        )
        assert_close(result, expected)
        assert out is None or result is out


def layers(
    rows: st.SearchStrategy[int], inputs: list[int], dtypes: st.SearchStrategy[torch.dtype]
) -> st.SearchStrategy[Around]:
    after, outputs = st.sampled_from(["nothing", "gate", "add"]), st.sampled_from([1, 7, 16, 50])
    return st.builds(
        Around,
        rows,
        st.sampled_from(inputs),
        outputs,
        st.booleans(),
        st.booleans(),
        after,
        dtypes,
        seeds,
    )


@runs_kernels
@given(layers(st.just(1), [1, 40, 64, 1000, 3072, 9000], dtypes))
@some
def test_a_row_goes_through_a_linear_layer_as_many_do(layer: Around) -> None:
    layer.holds(one_row.linear)


@runs_kernels
@given(
    layers(
        st.integers(2, 16),
        [128, 384, 1024, 2048, 3072],
        st.sampled_from([dtype for dtype in DTYPES if dtype != torch.float32]),
    )
)
@some
def test_a_few_rows_go_through_a_linear_layer_as_many_do(layer: Around) -> None:
    weight = torch.empty(
        layer.outputs * (2 if layer.after == "gate" else 1), layer.inputs, dtype=layer.dtype
    )
    tiling = few_rows.tiling_for(weight, layer.rows, layer.after == "gate")
    assert tiling is not None
    layer.holds(partial(few_rows.linear, tiling=tiling))


@pytest.mark.parametrize(
    ("outputs", "inputs", "gated"),
    [
        (151_936, 1024, False),  # the head of Qwen3-0.6B: torch is as quick as the memory
        (4096, 12_288, False),  # of Qwen3-8B: too much for the registers of a program
        (1024, 1000, False),  # no large power of two divides it
        (1024, 2880, False),  # likewise
    ],
)
def test_layers_that_torch_computes_quicker_have_no_tiling(
    outputs: int, inputs: int, gated: bool
) -> None:
    assert (
        few_rows.tiling_for(
            torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta"), 8, gated
        )
        is None
    )


@pytest.mark.parametrize("shared_kb", [99, 163, 227])
def test_layers_of_few_rows_have_room_in_the_shared_memory(
    shared_kb: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer outputs a program where there is less than on a Hopper, whose tilings were
    measured."""
    shapes = [
        (rows, inputs, gated)
        for rows in (2, 8, 9, 16)
        for inputs in (1024, 1536, 2048, 3072, 4096, 6144)
        for gated in (False, True)
    ]
    weights = {
        inputs: torch.empty(1024, inputs, dtype=torch.bfloat16, device="meta")
        for _, inputs, _ in shapes
    }
    measured = {
        (rows, inputs, gated): few_rows.tiling_for(weights[inputs], rows, gated)
        for rows, inputs, gated in shapes
    }
    monkeypatch.setattr(
        gpu, "_gpu_of", lambda device: GPU("some GPU", (8, 9), shared_kb << 10, 100 << 10, 128)
    )
    for rows, inputs, gated in shapes:
        tiling = few_rows.tiling_for(weights[inputs], rows, gated)
        assert (
            tiling is None or few_rows.shared_bytes(tiling, rows, inputs, gated) <= shared_kb << 10
        )
        assert shared_kb < 227 or tiling == measured[rows, inputs, gated]


on_a_hopper = pytest.mark.skipif(
    not ON_GPU or not available.has_many_rows(DEVICE),
    reason="needs a Hopper: nothing interprets Gluon",
)
halves = st.sampled_from([torch.float16, torch.bfloat16])


def test_a_triton_in_which_many_rows_fail_goes_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def exact(x: torch.Tensor, weight: torch.Tensor, **around: Any) -> torch.Tensor:
        return x @ weight.t()

    def fails(*args: Any, **around: Any) -> torch.Tensor:
        raise AttributeError("no such layout")

    for kernel, computes in (
        (exact, True),
        (lambda *args, **around: 2 * exact(*args), False),
        (fails, False),
    ):
        monkeypatch.setattr(many_rows, "linear", kernel)
        assert (
            available.works("many rows", lambda: many_rows.check(torch.device("cpu"))) == computes
        )
        assert bool(caplog.records) != computes
    assert "no such layout" in caplog.text


@pytest.mark.parametrize(
    ("capability", "computes", "expected"),
    [((9, 0), True, True), ((9, 0), False, False), ((8, 0), True, False), ((10, 0), True, False)],
)
@pytest.mark.parametrize(
    ("kernels", "asked"),
    [(many_rows, available.has_many_rows), (one_row_float8, available.has_one_row_float8)],
)
def test_kernels_in_gluon_need_a_hopper(
    monkeypatch: pytest.MonkeyPatch,
    kernels: Any,
    asked: Any,
    capability: tuple[int, int],
    computes: bool,
    expected: bool,
) -> None:
    def check(device: torch.device) -> None:
        if not computes:
            raise DovetailError("it computes wrong numbers")

    here = GPU("some GPU", capability, 227 << 10, 228 << 10, 132)
    monkeypatch.setattr(gpu, "_gpu_of", lambda device: here if device.type == "cuda" else None)
    monkeypatch.setattr(available, "runs_kernels", lambda device: True)
    monkeypatch.setattr(kernels, "check", check)
    assert asked.__wrapped__(torch.device("cuda")) == expected
    assert not asked.__wrapped__(torch.device("cpu"))


@on_a_hopper
@given(
    rows=st.integers(1, 256),
    inputs=st.sampled_from([64, 192, 896, 1024, 3072]),
    outputs=st.sampled_from([16, 48, 1024, 4096]),
    biased=st.booleans(),
    gated=st.booleans(),
    dtype=halves,
    seed=seeds,
)
@some
def test_many_rows_go_through_a_linear_layer_as_few_do(
    rows: int, inputs: int, outputs: int, biased: bool, gated: bool, dtype: torch.dtype, seed: int
) -> None:
    layer = Around(
        rows, inputs, outputs, False, biased, "gate" if gated else "nothing", dtype, seed
    )
    weight = torch.empty(outputs * (1 + gated), inputs, dtype=dtype, device="meta")
    tiling = many_rows.tiling_for(weight, rows, gated=gated) or many_rows.tiling_for(
        weight, 64, gated=gated
    )
    assert tiling is not None

    def kernel(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **around: Any
    ) -> torch.Tensor:
        return many_rows.linear(x, weight, bias, tiling=tiling, gated=gated)

    layer.holds(kernel)


@on_a_hopper
@given(
    rows=st.integers(1, 256),
    inputs=st.sampled_from([64, 896, 2048, 3072]),
    outputs=st.sampled_from([48, 896, 1024]),
    dtype=halves,
    seed=seeds,
)
@some
def test_what_is_added_in_parts_is_what_is_added_at_once(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    x, weight, before, scale = (
        randn(*size, dtype=dtype)
        for size in ((rows, inputs), (outputs, inputs), (rows, outputs), (outputs,))
    )
    tiling = many_rows.tiling_for(weight, rows, in_parts=True)
    assert tiling is not None
    parts = many_rows.linear(x, weight / inputs**0.5, tiling=tiling, in_parts=True)
    stream = before.clone()
    normed = norm_kernel.add_and_norm(stream, parts, scale, 1e-5)
    assert_close(stream, before.double() + x.double() @ (weight / inputs**0.5).double().T)
    assert_close(normed, exact_norm(stream, scale, 1e-5))


@on_a_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("outputs", "inputs", "around"),
    [
        (6144, 2048, {"biased": True}),
        (2 * 4096, 2048, {"gated": True}),
        (2 * 4096, 2048, {"gated": True, "biased": True}),
        (4096, 4096, {"in_parts": True}),
    ],
)
def test_rows_of_a_large_layer_are_computed_apart(
    outputs: int, inputs: int, around: dict[str, bool], dtype: torch.dtype
) -> None:
    torch.manual_seed(outputs)
    gated, in_parts = "gated" in around, "in_parts" in around
    x, weight, bias = (
        randn(*size, dtype=dtype) for size in ((31, inputs), (outputs, inputs), (outputs,))
    )
    weight, bias = weight / inputs**0.5, bias if "biased" in around else None

    def computed(rows: int) -> torch.Tensor:
        tiling = many_rows.tiling_for(weight, rows, gated=gated, in_parts=in_parts)
        assert tiling is not None
        out = many_rows.linear(
            x[:rows].contiguous(), weight, bias, tiling=tiling, gated=gated, in_parts=in_parts
        )
        return out.sum(0) if in_parts else out

    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    if gated:
        exact = torch.nn.functional.silu(exact[:, : outputs // 2]) * exact[:, outputs // 2 :]
    few = computed(8)
    for rows in (2, 3, 5, 7):
        torch.testing.assert_close(computed(rows), few[:rows], rtol=0, atol=0)
    for rows in (8, 9, 16, 31):
        assert_close(computed(rows).to(dtype), exact[:rows])


@pytest.mark.parametrize(
    ("outputs", "inputs", "around"),
    [
        (6144, 4096, {}),
        (24_576, 4096, {"gated": True}),
        (4096, 12_288, {"in_parts": True}),
        (151_936, 4096, {}),
    ],
)
def test_the_products_of_two_to_eight_rows_of_a_large_layer_are_those_of_one_tile(
    outputs: int, inputs: int, around: dict[str, bool]
) -> None:
    weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
    [tiling] = {many_rows.tiling_for(weight, rows, **around) for rows in range(2, 9)}
    assert tiling is not None
    assert tiling.outputs_first
    assert tiling.rows == 8


@runs_kernels
@given(
    rows=st.integers(0, 5),
    size=st.sampled_from([1, 48, 1000, 5120]),
    parts=st.integers(1, 8),
    dtype=dtypes,
    seed=seeds,
)
@some
def test_parts_are_added_before_the_norm(
    rows: int, size: int, parts: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    x, weight, added = (
        randn(rows, size, dtype=dtype),
        randn(size, dtype=dtype),
        randn(parts, rows, size),
    )
    stream = x.clone()
    normed = norm_kernel.add_and_norm(stream, added, weight, 1e-5)
    assert_close(stream, x.double() + added.double().sum(0))
    assert_close(normed, exact_norm(stream, weight, 1e-5))


@pytest.mark.parametrize(
    ("outputs", "inputs", "rows", "around"),
    [
        (151_936, 1024, 65, {}),  # the head of Qwen3-0.6B
        (24_576, 4096, 65, {"gated": True}),  # of Qwen3-8B
        (6144, 1024, 129, {"gated": True}),  # of Qwen3-0.6B
        (1024, 1024, 257, {}),
        (1000, 1024, 64, {}),  # no tile divides it
        (1024, 1000, 64, {}),  # nor this
    ],
)
def test_many_rows_that_torch_computes_quicker_have_no_tiling(
    outputs: int, inputs: int, rows: int, around: dict[str, bool]
) -> None:
    assert (
        many_rows.tiling_for(
            torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta"), rows, **around
        )
        is None
    )


# ---- silu and product


@runs_kernels
@pytest.mark.usefixtures("with_kernels")
@given(rows=st.integers(0, 4), size=st.sampled_from([1, 100, 1024, 1500]), dtype=dtypes, seed=seeds)
@some
def test_silu_mul_is_its_twin(rows: int, size: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    gate_up = randn(rows, 2 * size, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(silu_mul(gate_up), gate * torch.sigmoid(gate) * up)


@runs_kernels
@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_mul_takes_gates_that_lie_beside_other_numbers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, beside = torch.randn(3, 1100).to(dtype).to(DEVICE), torch.randn(3, 1500).to(dtype).to(DEVICE)
    exact = x.double() * beside[:, 400:].double().sigmoid()
    assert_close(sigmoid_mul(x, beside[:, 400:]), exact)


@runs_kernels
@pytest.mark.usefixtures("with_kernels")
def test_silu_mul_of_huge_gates_is_finite() -> None:
    gate_up = torch.tensor([[-1e30, -200.0, 200.0, 1.0, 1.0, 2.0]], device=DEVICE)
    assert silu_mul(gate_up).tolist() == [[0.0, 0.0, 400.0]]


# ---- log-probabilities


@runs_kernels
@given(
    rows=st.integers(0, 3),
    vocab=st.sampled_from([1, 7, 300, 9000]),
    k=st.integers(0, 12),
    spread=st.sampled_from([0.0, 1.0, 30.0]),
    ties=st.booleans(),
    dtype=dtypes,
    seed=seeds,
)
@some
def test_logprobs_and_ranks_are_their_twins(
    rows: int, vocab: int, k: int, spread: float, ties: bool, dtype: torch.dtype, seed: int
) -> None:
    """Of equal logits the lowest ids, of as many alternatives as there are."""
    torch.manual_seed(seed)
    logits, ids = (
        randn(rows, vocab, dtype=dtype) * spread,
        torch.randint(vocab, (rows,), device=DEVICE),
    )
    if ties:
        logits = logits.round()
    logits[:, 1::3] = -torch.inf
    found, twin = (
        kernels.top_logprobs(logits, ids, min(k, vocab)),
        top_logprobs(logits.cpu(), ids.cpu(), k),
    )
    assert found[0].tolist() == twin.token_ids.tolist()
    assert_rounded(found[1], twin.logprobs, vocab + 3)
    assert found[2].tolist() == twin.ranks.tolist()


@runs_kernels
def test_each_row_gets_as_many_logprobs_as_it_asks_for_and_others_are_left_alone() -> None:
    logits = randn(5, 300, dtype=torch.float32)
    ids, rows, asked = (
        torch.tensor(values, device=DEVICE)
        for values in ([5, 9, 5, 7, 2**40], [3, 0, 1, 2, 4], [-1, 4, 0, 2, -1])
    )
    # a column of a table
    asked = torch.stack((torch.full_like(asked, 99), asked), dim=1).int()[:, 1]
    token_ids, logprobs, ranks = kernels.top_logprobs(logits, ids, 4, rows, asked)
    for place, k in ((0, 2), (2, 4), (3, 0)):
        alone = kernels.top_logprobs(
            logits[place : place + 1].contiguous(), ids[place : place + 1], k
        )
        assert token_ids[place, : 1 + k].tolist() == alone[0][0].tolist()
        assert logprobs[place, : 1 + k].tolist() == alone[1][0].tolist()
        assert ranks[place] == alone[2][0]


@runs_kernels
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logprobs_of_a_row_without_numbers_are_of_tokens_that_exist(value: float) -> None:
    logits = torch.full((2, 70), value, device=DEVICE)
    logits[1, 3] = torch.nan
    token_ids, _, _ = kernels.top_logprobs(logits, torch.tensor([1, 2], device=DEVICE), 5)
    assert (
        token_ids[:, 1:].tolist()
        == top_logprobs(logits.cpu(), torch.tensor([1, 2]), 5).token_ids[:, 1:].tolist()
    )


# ---- q, k and v


@dataclass
class Layer(AttentionLayer):
    """Records what is written; or exposes its cache, with unusual strides and NaN where nothing was
    written."""

    spec: LayerSpec
    slots: torch.Tensor
    fused: bool
    written: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """SLOTS of them, in blocks of 4, and a block for padding."""
        self.kv = torch.full(
            (2, SLOTS // 4 + 1, self.spec.kv_heads, 4, self.spec.head_size),
            torch.nan,
            device=DEVICE,
        )

    def bind(self, cache: LayerCache) -> None:
        raise NotImplementedError

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.written.append((k.clone(), v.clone()))

    def cache_for_fused_write(self) -> FusedCache | None:
        k, v = (part.transpose(1, 2) for part in self.kv)
        return FusedCache(k, v, self.slots, self.kv_scales) if self.fused else None

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Case:
    """Heads of a few tokens, and what is done to them."""

    heads: int
    kv_heads: int
    size: int
    tokens: int
    normed: bool
    dtype: torch.dtype
    seed: int
    share: float = 1.0  # of a head that rotates
    beside: int = 0  # heads between those of one token and of the next

    @property
    def rotated(self) -> int:
        return int(self.size * self.share) // 2 * 2

    def make(self) -> tuple[torch.Tensor, QKNorm | None, Rotation]:
        torch.manual_seed(self.seed)
        rotary = RotaryEmbedding(Rope(100.0, self.rotated), MAX_LEN, device=DEVICE)
        rotation = rotary(torch.randint(MAX_LEN, (self.tokens,), device=DEVICE))
        head_norm = (
            QKNorm(self.heads, self.kv_heads, self.size, 1e-6, context()) if self.normed else None
        )
        if head_norm is not None:
            head_norm.weight.load(torch.randn(self.size), "q")
            head_norm.weight.load(torch.randn(self.size), "k")
            head_norm = head_norm.to(DEVICE, self.dtype)
        count = self.heads + 2 * self.kv_heads
        return (
            randn(self.tokens, count + self.beside, self.size, dtype=self.dtype)[:, :count],
            head_norm,
            rotation,
        )

    def layer(self, slots: torch.Tensor, fused: bool) -> Layer:
        return Layer(LayerSpec(0, self.heads, self.kv_heads, self.size, 1.0), slots, fused)


def exact(qkv: torch.Tensor, case: Case, head_norm: QKNorm | None, rotation: Rotation) -> Any:
    """q, k and v in float64."""
    q, k, v = qkv.double().split((case.heads, case.kv_heads, case.kv_heads), dim=1)
    qk = torch.cat((q, k), dim=1)
    if head_norm is not None:
        qk = (
            qk
            / torch.sqrt((qk**2).mean(-1, keepdim=True) + head_norm.eps)
            * head_norm.weight.view(-1, case.size).double()
        )
    first, rest = qk[..., : case.rotated], qk[..., case.rotated :]
    turned = torch.cat(
        (
            first * rotation.cos.double()
            + torch.roll(first, case.rotated // 2, -1) * rotation.sin.double(),
            rest,
        ),
        dim=-1,
    )
    return *turned.split((case.heads, case.kv_heads), dim=1), v


cases = st.builds(
    Case,
    heads=st.sampled_from([1, 3, 8]),
    kv_heads=st.sampled_from([1, 2]),
    size=st.sampled_from([2, 8, 24, 64, 128]),
    tokens=st.integers(0, 5),
    normed=st.booleans(),
    dtype=dtypes,
    seed=seeds,
    share=st.sampled_from([1.0, 0.5, 0.25, 0.0]),
    beside=st.sampled_from([0, 3]),
)


@runs_kernels
@pytest.mark.usefixtures("with_kernels")
@given(case=cases)
@some
def test_q_and_k_are_normed_and_turned_and_written(case: Case) -> None:
    qkv, head_norm, rotation = case.make()
    expected = exact(qkv, case, head_norm, rotation)
    layer = case.layer(torch.zeros(case.tokens, dtype=torch.int64, device=DEVICE), fused=False)
    q = rope_and_store_kv(qkv.clone(), head_norm, rotation, layer)
    for ours, theirs in zip((q, *layer.written[0]), expected, strict=True):
        assert_close(ours, theirs)


@runs_kernels
@pytest.mark.usefixtures("with_kernels")
@given(case=cases, data=st.data())
@some
def test_a_cache_that_is_laid_open_gets_k_and_v_at_its_slots_and_nothing_elsewhere(
    case: Case, data: st.DataObject
) -> None:
    qkv, head_norm, rotation = case.make()
    expected = exact(qkv, case, head_norm, rotation)
    chosen = data.draw(st.permutations(range(SLOTS)))[: case.tokens]
    # the latter is padding's
    slots = [slot if data.draw(st.booleans()) else SLOTS for slot in chosen]
    layer = case.layer(
        torch.tensor([*slots, SLOTS - 1, SLOTS - 1], dtype=torch.int64, device=DEVICE), fused=True
    )
    layer.kv = layer.kv.to(case.dtype)
    assert_close(rope_and_store_kv(qkv, head_norm, rotation, layer), expected[0])
    assert not layer.written
    for cache, values in zip(layer.kv, expected[1:], strict=True):
        flat = cache.transpose(1, 2).reshape(SLOTS + 4, case.kv_heads, case.size)
        for slot, value in zip(slots, values, strict=True):
            if slot < SLOTS:
                assert_close(flat[slot], value)
        untouched = [slot for slot in range(SLOTS) if slot not in slots]
        assert flat[untouched].isnan().all()


@runs_kernels
@pytest.mark.usefixtures("with_kernels")
@given(case=cases, k_scale=st.floats(1e-3, 3), v_scale=st.floats(1e-3, 3))
@some
def test_a_cache_of_fp8_gets_what_its_twin_rounds(
    case: Case, k_scale: float, v_scale: float
) -> None:
    qkv, head_norm, rotation = case.make()
    qkv[:, -1] *= 1000  # beyond what FP8 holds
    wide, small = (
        case.layer(torch.arange(case.tokens, device=DEVICE), fused=True) for _ in range(2)
    )
    scales = KVScales(torch.tensor(k_scale, device=DEVICE), torch.tensor(v_scale, device=DEVICE))
    wide.kv, small.kv = wide.kv.to(case.dtype), torch.zeros_like(wide.kv).to(torch.float8_e4m3fn)
    small.kv_scales = scales
    rope_and_store_kv(qkv.clone(), head_norm, rotation, wide)
    rope_and_store_kv(qkv, head_norm, rotation, small)
    for written, codes, scale in zip(wide.kv, small.kv, (scales.k, scales.v), strict=True):
        twin = (written.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        real = ~written.isnan()
        assert torch.equal(codes.view(torch.uint8)[real], twin.view(torch.uint8)[real])


# ---- FP8


def hard_to_round() -> torch.Tensor:
    """Every number of e4m3, all midpoints between two, float32 right beside these, what is beyond
    all, and no numbers."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[~numbers.isnan()].unique()
    ties = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(ties, torch.full_like(ties, end)) for end in (-1e9, 1e9)]
    others = torch.tensor(
        [
            -0.0,
            449.0,
            464.0,
            465.0,
            -1e30,
            torch.inf,
            -torch.inf,
            torch.nan,
            1e-30,
            2.0**-10,
            -(2.0**-10),
        ]
    )
    return torch.cat(
        [numbers, ties, *beside, others, torch.randn(500) * 100, torch.randn(500) * 0.01]
    ).to(DEVICE)


@runs_kernels
def test_numbers_become_the_nearest_of_fp8_ties_to_even_and_the_largest_beyond() -> None:
    from tests.nn.fp8_kernels import encode

    x = hard_to_round()
    for scale in (1.0, 0.037, 3.0):
        expected = (x / torch.tensor(scale, device=DEVICE)).clamp(-448, 448).to(torch.float8_e4m3fn)
        found = encode(x, scale)
        assert torch.equal(found.isnan(), x.isnan())
        assert torch.equal(
            found.view(torch.uint8)[~x.isnan()], expected.view(torch.uint8)[~x.isnan()]
        )


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_two_numbers_of_a_pair_come_apart_whatever_their_codes(dtype: torch.dtype) -> None:
    from tests.nn.fp8_kernels import widen_pairs

    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].to(DEVICE)
    pairs = torch.stack([codes, codes.flip(0)], 1).flatten()
    assert torch.equal(widen_pairs(pairs, dtype), pairs.view(torch.float8_e4m3fn).to(dtype))


# ---- a whole model


@pytest.mark.skipif(not INTERPRETED, reason="the oracle's attention is on the CPU")
@pytest.mark.parametrize("make", [Qwen3Config, LlamaConfig])
def test_a_decoder_with_kernels_computes_what_it_does_without(
    monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    config = make(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    plain, fused = build(config), build(config)
    for model in (plain, fused):
        dummy_weights(model, 0)
        for parameter in model.parameters():
            parameter.mul_(10)  # 0.2, not 0.02: what is lost shows
    tokens = torch.arange(9)
    expected = run(plain, tokens)
    for module in (activation, norm, qkv):
        monkeypatch.setattr(module, "use_kernels", lambda *tensors: True)
    for ours, theirs in zip(run(fused, tokens), expected, strict=True):
        assert not torch.equal(ours, theirs), "both came from the same operations"
        assert_rounded(ours, theirs, roundings_of(config, len(tokens)))
