"""A layer split over ranks computes what the whole layer computes, and each rank holds only its
part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from dovetail.errors import ModelLoadError, UnsupportedError
from dovetail.nn.activation import ACTIVATIONS
from dovetail.nn.embedding import LMHead, VocabParallelEmbedding
from dovetail.nn.linear import (
    ColumnParallelLinear,
    GateUpParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from dovetail.nn.norm import RMSNorm, rms_norm
from dovetail.nn.residual import Residual
from tests.models.oracle import FakeGroup, context
from tests.rounding import assert_rounded

SIZES = [1, 2, 4]


def ranks(size: int) -> list[Any]:
    return [context(FakeGroup(rank, size)) for rank in range(size)]


def load(
    layer: Any,
    weights: dict[str | None, torch.Tensor],
    biases: dict[str | None, torch.Tensor] | None = None,
) -> Any:
    for shard_id, weight in weights.items():
        layer.weight.load(weight, shard_id)
    for shard_id, bias in (biases or {}).items():
        layer.bias.load(bias, shard_id)
    return layer


# sums of at most 8 products over as many as 4 ranks, a bias, an activation and a norm
ROUNDINGS = 32


@pytest.mark.parametrize("size", SIZES)
def test_column_shares_lie_beside_each_other(size: int) -> None:
    x, weight, bias = torch.randn(3, 5), torch.randn(8, 5), torch.randn(8)
    shares = [
        load(ColumnParallelLinear(5, 8, own, bias=True), {None: weight}, {None: bias})(x)
        for own in ranks(size)
    ]
    assert all(share.shape == (3, 8 // size) for share in shares)
    assert_rounded(torch.cat(shares, dim=1), F.linear(x, weight, bias), ROUNDINGS)


@pytest.mark.parametrize("size", SIZES)
def test_row_shares_add_up_with_the_bias_once(size: int) -> None:
    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    layers = [
        load(RowParallelLinear(8, 5, own, bias=True), {None: weight}, {None: bias})
        for own in ranks(size)
    ]
    shares = [layer(part) for layer, part in zip(layers, x.chunk(size, dim=1), strict=True)]
    assert_rounded(torch.stack(shares).sum(0), F.linear(x, weight, bias), ROUNDINGS)
    assert all(len(layer.group.sums) == 1 for layer in layers)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", SIZES)
def test_gate_and_up_of_a_rank_belong_together(size: int, activation: str) -> None:
    x, gate, up = torch.randn(3, 5), torch.randn(8, 5), torch.randn(8, 5)
    layers = [
        load(
            GateUpParallelLinear(5, 8, own, bias=False, activation=activation),
            {"gate": gate, "up": up},
        )
        for own in ranks(size)
    ]
    expected = ACT2FN[activation](F.linear(x, gate)) * F.linear(x, up)  # what transformers calls so
    assert_rounded(torch.cat([layer(x) for layer in layers], dim=1), expected, ROUNDINGS)


def test_an_activation_that_is_not_implemented_is_refused_with_those_that_are() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"^hidden_act = 'relu' is not implemented \(implemented: silu, gelu, "
        r"gelu_pytorch_tanh\)$",
    ):
        GateUpParallelLinear(5, 8, context(), bias=False, activation="relu")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_what_a_row_parallel_layer_adds_is_what_it_gives(size: int, bias: bool) -> None:
    x, weight, residual = torch.randn(3, 8), torch.randn(5, 8), torch.randn(3, 5)
    for own in ranks(size):
        layer = load(
            RowParallelLinear(8, 5, own, bias=bias),
            {None: weight},
            {None: torch.randn(5)} if bias else {},
        )
        part = x.chunk(size, dim=1)[own.parallel.rank]
        stream = Residual(residual.clone())
        layer.add_to(stream, part)
        assert_rounded(stream.summed(), residual + layer(part), ROUNDINGS)


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads"),
    [(1, 4, 2), (2, 4, 2), (4, 8, 4), (4, 4, 2), (4, 4, 1), (2, 6, 1)],
)
def test_each_rank_has_the_kv_heads_that_its_q_heads_read(
    size: int, heads: int, kv_heads: int
) -> None:
    head_size, hidden, x = 2, 6, torch.randn(3, 6)
    q, k, v = (torch.randn(n * head_size, hidden) for n in (heads, kv_heads, kv_heads))
    bias = {
        "q": torch.randn(heads * head_size),
        "k": torch.randn(kv_heads * head_size),
        "v": torch.randn(kv_heads * head_size),
    }
    whole_q, whole_k, whole_v = (
        F.linear(x, w, bias[n]).unflatten(1, (-1, head_size))
        for n, w in (("q", q), ("k", k), ("v", v))
    )
    own_heads, own_kv = heads // size, max(1, kv_heads // size)
    for rank, own in enumerate(ranks(size)):
        layer = load(
            QKVParallelLinear(hidden, heads, kv_heads, head_size, own, bias=True),
            {"q": q, "k": k, "v": v},
            bias,
        )
        mine_q, mine_k, mine_v = (
            layer(x).unflatten(1, (-1, head_size)).split([own_heads, own_kv, own_kv], dim=1)
        )
        for local in range(own_heads):
            head = rank * own_heads + local
            read_locally, read = local // (own_heads // own_kv), head // (heads // kv_heads)
            assert_rounded(mine_q[:, local], whole_q[:, head], ROUNDINGS)
            assert_rounded(mine_k[:, read_locally], whole_k[:, read], ROUNDINGS)
            assert_rounded(mine_v[:, read_locally], whole_v[:, read], ROUNDINGS)


@pytest.mark.parametrize("vocab", [1, 3, 7, 8])
@pytest.mark.parametrize("size", SIZES)
def test_embedding_rows_of_all_ranks_are_the_table(size: int, vocab: int) -> None:
    table, ids = torch.randn(vocab, 5), torch.arange(vocab)
    shares = [
        load(VocabParallelEmbedding(vocab, 5, own), {None: table})(ids) for own in ranks(size)
    ]
    assert torch.equal(torch.stack(shares).sum(0), table)


@pytest.mark.parametrize("vocab", [1, 3, 7, 8])
@pytest.mark.parametrize("size", SIZES)
def test_head_of_all_ranks_gives_the_logits_then_padding(size: int, vocab: int) -> None:
    table, hidden = torch.randn(vocab, 5), torch.randn(3, 5)
    heads = [load(LMHead(vocab, 5, own), {None: table}) for own in ranks(size)]
    logits = torch.cat([F.linear(hidden, head.weight) for head in heads], dim=1)
    assert_rounded(logits[:, :vocab], F.linear(hidden, table), ROUNDINGS)
    assert torch.equal(logits[:, vocab:], torch.zeros(3, logits.shape[1] - vocab))


def test_what_cannot_be_split_evenly_is_rejected_by_name() -> None:
    own = context(FakeGroup(0, 4))
    with pytest.raises(UnsupportedError, match=r"intermediate_size \(6\)"):
        GateUpParallelLinear(5, 6, own, bias=False)
    with pytest.raises(UnsupportedError, match=r"num_attention_heads \(6\)"):
        QKVParallelLinear(5, 6, 2, 2, own, bias=False)
    with pytest.raises(UnsupportedError, match=r"num_key_value_heads \(3\)"):
        QKVParallelLinear(5, 12, 3, 2, own, bias=False)


def test_weights_are_converted_on_the_way_and_never_trained() -> None:
    layer, weight = ColumnParallelLinear(5, 8, context(), bias=False), torch.randn(8, 5).bfloat16()
    layer.weight.load(weight)
    assert layer.weight.dtype == torch.float32
    assert torch.equal(layer.weight, weight.float())
    assert not layer.weight.requires_grad


def test_wrong_shapes_and_dtypes_say_what_was_expected() -> None:
    layer = RowParallelLinear(8, 5, context(FakeGroup(1, 2)), bias=False)
    with pytest.raises(ModelLoadError, match=r"expected shape \[5, 8\], found \[5, 4\]"):
        layer.weight.load(torch.randn(5, 4))
    with pytest.raises(ModelLoadError, match="found int8"):
        layer.weight.load(torch.zeros(5, 8, dtype=torch.int8))
    with pytest.raises(ModelLoadError, match="found float8_e4m3fn"):
        layer.weight.load(torch.zeros(5, 8, dtype=torch.float8_e4m3fn))


class FakeShares:
    """Memory that ranks share, in which all have written before one of them adds."""

    def __init__(self, places: list[torch.Tensor | None], rank: int, room: int) -> None:
        self.places, self.rank, self.room = places, rank, room

    def place(self, rows: int, size: int, dtype: torch.dtype) -> torch.Tensor | None:
        self.places[self.rank] = (
            torch.full((rows, size), torch.nan, dtype=dtype) if rows <= self.room else None
        )
        return self.places[self.rank]

    def add(self, x: torch.Tensor, norm: tuple[torch.Tensor, float] | None) -> torch.Tensor | None:
        for place in self.places:
            assert place is not None
            x += place
        return None if norm is None else rms_norm(x, *norm)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("read", ["normed", "x", "keep"])
def test_ranks_that_share_memory_add_their_shares_when_the_stream_is_read(
    read: str, bias: bool
) -> None:
    x, weight, stream = torch.randn(3, 8), torch.randn(5, 8), torch.randn(3, 5)
    biases = torch.randn(5)
    places: list[torch.Tensor | None] = [None, None]
    residuals, layers = [], []
    for own, part in zip(ranks(2), x.chunk(2, dim=1), strict=True):
        own.parallel.shares = FakeShares(places, own.parallel.rank, room=3)
        layer = load(
            RowParallelLinear(8, 5, own, bias=bias),
            {None: weight},
            {None: biases} if bias else None,
        )
        residual = Residual(stream.clone())
        layer.add_to(residual, part)
        assert residual.is_shared
        residuals.append(residual)
        layers.append(layer)
    wanted = stream + F.linear(x, weight, biases if bias else None)
    for residual in residuals:
        if read == "normed":
            norm = RMSNorm(5, 1e-6, ranks(1)[0])
            norm.weight.load(torch.arange(1.0, 6.0))
            assert_rounded(
                residual.normed(norm), rms_norm(wanted, torch.arange(1.0, 6.0), 1e-6), ROUNDINGS
            )
        elif read == "keep":
            residual.keep(torch.tensor([2, 0]))
        assert_rounded(residual.summed(), wanted[[2, 0]] if read == "keep" else wanted, ROUNDINGS)
        assert not residual.is_shared
    assert all(not layer.group.sums for layer in layers), "nothing is summed twice"


def test_a_sum_that_has_no_room_in_shared_memory_goes_the_other_way() -> None:
    [own, _] = ranks(2)
    own.parallel.shares = FakeShares([None, None], 0, room=2)
    residual = Residual(torch.zeros(3, 5))
    load(RowParallelLinear(8, 5, own, bias=False), {None: torch.randn(5, 8)}).add_to(
        residual, torch.randn(3, 4)
    )
    assert not residual.is_shared
    assert len(own.parallel.sums) == 1
