"""Attention backends with one thing wrong each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import torch

from dovetail.api.attention import (
    AttentionBatch,
    AttentionCapabilities,
    AttentionContext,
    AttentionLayer,
    FusedCache,
    KVScales,
    LayerCache,
    LayerSpec,
)
from dovetail.api.graphs import GraphSupport
from dovetail.testing.checks import Untried
from dovetail_attention.packed import PackedAttention, Part
from dovetail_attention.scaled import ONE
from dovetail_attention.sdpa import TorchAttention, TorchLayer
from dovetail_attention.selected import IndexKeys
from tests.conformance.mutants import mutant

PLAIN = AttentionCapabilities(window=True, causal=True)


class PlainLayer(TorchLayer):
    """The `torch` backend's cache under attention as a textbook has it, row by row, in steps that a
    mutant can get wrong."""

    _backend: PlainAttention

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        out = q.new_zeros(*q.shape[:2], self.spec.out_size)
        for row, tokens, length in self.rows():
            slots = self.slots(row, torch.arange(length))
            out[tokens] = self.attend_row(q[tokens], self._k[slots], self._v[slots])
        return out

    def rows(self) -> Iterator[tuple[int, slice, int]]:
        """Each row's number, which tokens of the step are its queries, and how many tokens it
        sees."""
        batch, first = self._backend.batch, 0
        for row, (queries, length) in enumerate(
            zip(batch.host_query_lens.tolist(), batch.host_kv_lens.tolist(), strict=True)
        ):
            yield row, slice(first, first + queries), length
            first += queries

    def attend_row(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = k[:, self.kv_head()], v[:, self.kv_head()]
        scores = self.scored(torch.einsum("qhd,khd->hqk", q.float(), k.float()))
        at, key = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
        return self.mix(scores.masked_fill(~self.seen(at, key), -torch.inf), v).to(q.dtype)

    def scored(self, products: torch.Tensor) -> torch.Tensor:
        return products * self.scale()

    def slots(self, row: int, positions: torch.Tensor) -> torch.Tensor:
        size = self.block_size()
        return self.units.of_slots(
            self.table()[row, positions // size].long() * size + positions % size
        )

    def table(self) -> torch.Tensor:
        return self._backend.batch.block_tables[self.units.group][self.units.page]

    def block_size(self) -> int:
        return self.units.block_size

    def kv_head(self) -> torch.Tensor:
        return torch.arange(self.spec.heads) // (self.spec.heads // self.spec.kv_heads)

    def scale(self) -> float:
        return self.spec.scale

    def seen(self, at: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= at) & (key > at - (self.spec.window or len(key) + 1))

    def mix(self, scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float())


class PlainAttention(TorchAttention):
    capabilities = replace(PLAIN, groups=True)
    layer: type[PlainLayer] = PlainLayer
    batch: AttentionBatch

    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        layer = self.layer(spec, self)
        self._layers.append(layer)
        return layer

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        self.batch = batch


@mutant(caught_by="attention.values")
class LeavesOutRowsBeyondATile(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def rows(self) -> Iterator[tuple[int, slice, int]]:
            yield from (row for row in super().rows() if row[0] < 64)


@mutant(caught_by="attention.values")
class ForgetsWhatIsLongAgo(PlainAttention):
    """Sees as many tokens as its buffer for scores holds."""

    class layer(PlainLayer):  # noqa: N801
        def seen(self, at: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return super().seen(at, key) & (key > at - 4096)


@mutant(caught_by="attention.causal")
class SeesOneTokenTooFar(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def seen(self, at: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return super().seen(at, key) | (key == at + 1)


@mutant(caught_by="attention.causal")
class DoesNotSeeItself(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def seen(self, at: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return super().seen(at, key) & ((key < at) | (at == 0))


@mutant(caught_by="attention.causal")
class CountsPositionsFromTheStep(PlainAttention):
    """A chunk's queries are taken for the first tokens of their row."""

    class layer(PlainLayer):  # noqa: N801
        def seen(self, at: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return super().seen(at - at[0] if len(at) > 1 else at, key)


@mutant(caught_by="attention.window")
class WindowWithoutItself(PlainAttention):
    """The window is taken to be that many tokens before the query's own: one too wide."""

    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        return super().make_layer(replace(spec, window=spec.window and spec.window + 1))


@mutant(caught_by="attention.window")
class WindowOneTooNarrow(PlainAttention):
    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        return super().make_layer(replace(spec, window=spec.window and max(1, spec.window - 1)))


@mutant(caught_by="attention.window")
class OneWindowForAllLayers(PlainAttention):
    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        return super().make_layer(
            replace(spec, window=self._layers[0].spec.window if self._layers else spec.window)
        )


@mutant(caught_by="attention.bidirectional")
class WindowToTheLeftOnly(PackedAttention):
    def _cut(self, window: int | None, seen: list[int], device: torch.device) -> Iterator[Part]:
        for part in super()._cut(window, seen, device):
            query, key = (
                torch.arange(tokens.start, tokens.stop) for tokens in (part.queries, part.keys)
            )
            left = key <= query[:, None]
            yield (
                part
                if window is None
                else replace(part, mask=left if part.mask is None else part.mask & left)
            )


@mutant(caught_by="attention.hidden_tails")
class SeesHiddenTails(PackedAttention):
    def plan(self, batch: AttentionBatch) -> None:
        super().plan(replace(batch, host_seen=None))


@mutant(caught_by="attention.hidden_tails")
class SeesHiddenTailsOfWindows(PackedAttention):
    def _cut(self, window: int | None, seen: list[int], device: torch.device) -> Iterator[Part]:
        lens = [end - start for start, end in pairwise(self.starts)]
        return super()._cut(window, seen if window is None else lens, device)


@mutant(caught_by="attention.bidirectional")
class WindowCountsTheTokensBeside(PackedAttention):
    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        return super().make_layer(replace(spec, window=spec.window and spec.window + 1))


@mutant(caught_by="attention.bidirectional", soon=True)
class AttendsToOtherRows(PackedAttention):
    def plan(self, batch: AttentionBatch) -> None:
        whole = replace(
            batch,
            host_query_lens=batch.host_query_lens.sum(keepdims=True),
            host_kv_lens=batch.host_kv_lens.sum(keepdims=True),
        )
        super().plan(whole)


@mutant(caught_by="attention.both_ways")
class SeesNoLaterTokens(TorchAttention):
    def plan(self, batch: AttentionBatch) -> None:
        super().plan(replace(batch, host_both_ways=None))


@mutant(caught_by="attention.both_ways")
class BothWaysInAllLayers(TorchAttention):
    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        return super().make_layer(replace(spec, both_ways=True))


class _BothWays(PlainAttention):
    """Right, and the base of those that aren't."""

    capabilities = replace(PLAIN, both_ways=True)

    class layer(PlainLayer):  # noqa: N801
        sees_later = False  # the row that attends

        def rows(self) -> Iterator[tuple[int, slice, int]]:
            told = self._backend.batch.host_both_ways
            for row in super().rows():
                self.sees_later = told is not None and self.spec.both_ways and bool(told[row[0]])
                yield row

        def seen(self, at: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            later = self.later(at, key) if self.sees_later else key < 0
            return super().seen(at, key) | later

        def later(self, at: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return key > at


@mutant(caught_by="attention.both_ways", soon=True)
class WindowHidesLaterTokens(_BothWays):
    """As in an encoder."""

    class layer(_BothWays.layer):  # noqa: N801
        def later(self, at: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return super().later(at, key) & (key - at < (self.spec.window or len(key)))


@mutant(caught_by="attention.both_ways")
class WindowHidesNothing(_BothWays):
    class layer(_BothWays.layer):  # noqa: N801
        def later(self, at: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return key >= 0


class _Indexed(PlainAttention):
    """Attends to selected tokens as `torch` does, with index keys that a mutant can get wrong."""

    capabilities = replace(PLAIN, groups=True, v_in_k=True, indexer=True)
    keys: type[IndexKeys] = IndexKeys

    class layer(PlainLayer):  # noqa: N801
        def attend(self, q: torch.Tensor) -> torch.Tensor:
            return TorchLayer.attend(self, q)

    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        layer = super().make_layer(spec)
        if isinstance(layer, PlainLayer) and spec.indexer is not None and spec.indexer.selects:
            layer._index = self.keys(spec, self.dtype)
        return layer


@mutant(caught_by="attention.indexer")
class SelectsOneTokenTooFew(_Indexed):
    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        if spec.indexer is not None:
            fewer = max(1, spec.indexer.top_k - 1)
            spec = replace(spec, indexer=replace(spec.indexer, top_k=fewer))
        return super().make_layer(spec)


@mutant(caught_by="attention.indexer")
class AttendsToAllWhereItDoesNotSelect(_Indexed):
    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        if spec.indexer is not None and not spec.indexer.selects:
            spec = replace(spec, indexer=None)
        return super().make_layer(spec)


@mutant(caught_by="attention.indexer")
class SelectsTheLatestOfEquals(_Indexed):
    class keys(IndexKeys):  # noqa: N801
        def scores(
            self, table: torch.Tensor, end: int, q: torch.Tensor, weights: torch.Tensor
        ) -> torch.Tensor:
            return super().scores(table, end, q, weights) + torch.arange(end) / 1e4


@mutant(caught_by="attention.indexer", soon=True)
class DoesNotSelectItself(_Indexed):
    class keys(IndexKeys):  # noqa: N801
        def scores(
            self, table: torch.Tensor, end: int, q: torch.Tensor, weights: torch.Tensor
        ) -> torch.Tensor:
            scores = super().scores(table, end, q, weights)
            itself = torch.ones_like(scores, dtype=torch.bool).triu(end - len(q))
            return scores.masked_fill(itself, -torch.inf)


@mutant(caught_by="attention.indexer_keys")
class KeepsTheFirstKeysOfASlot(_Indexed):
    """As if what a preempted request left there were the next one's."""

    class keys(IndexKeys):  # noqa: N801
        def write(self, keys: torch.Tensor, batch: AttentionBatch) -> None:
            written = self.__dict__.setdefault("written", set())
            [slots] = batch.slots[0].tolist()
            fresh = torch.tensor([slot not in written for slot in slots])
            written.update(slots)
            kept = replace(batch, slots=(batch.slots[0][:, fresh],))
            super().write(keys[fresh], kept)


@mutant(caught_by="attention.indexer_reads")
class ReadsWhatItDoesNotSelect(_Indexed):
    """With a weight of 0."""

    class layer(_Indexed.layer):  # noqa: N801
        def attend(self, q: torch.Tensor) -> torch.Tensor:
            out = super().attend(q)
            for row, tokens, length in self.rows():
                out[tokens] += 0.0 * self._k[self.slots(row, torch.arange(length))].sum()
            return out


@mutant(caught_by="attention.scale")
class ScaleOfItsOwn(TorchAttention):
    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        return super().make_layer(replace(spec, scale=spec.head_size**-0.5))


@mutant(caught_by="attention.values")
class ReadsUnusedSlots(PlainAttention):
    """What lies in the rest of the last block gets the weight 0, and 0 * NaN is NaN."""

    class layer(PlainLayer):  # noqa: N801
        def attend(self, q: torch.Tensor) -> torch.Tensor:
            out, size = super().attend(q), self._backend.context.block_size
            for row, tokens, length in self.rows():
                whole_blocks = torch.arange(-(-length // size) * size)
                out[tokens] += 0.0 * self._v[self.slots(row, whole_blocks)].sum()
            return out


@mutant(caught_by="attention.values")
class ForgetsTheHistoryOfChunks(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def attend_row(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return (
                super().attend_row(q, k[-len(q) :], v[-len(q) :])
                if len(q) > 1
                else super().attend_row(q, k, v)
            )


@mutant(caught_by="attention.gqa")
class HeadsTakeTurnsAtKVHeads(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def kv_head(self) -> torch.Tensor:
            return torch.arange(self.spec.heads) % self.spec.kv_heads


@mutant(caught_by="attention.window")
class WindowOneTooWideForDecodes(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def seen(self, at: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            before = super().seen(at, key)
            return (
                before | (key == at - self.spec.window)
                if self.spec.window and len(at) == 1
                else before
            )


@mutant(caught_by="attention.window")
class AlwaysSeesTheFirstToken(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def seen(self, at: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return super().seen(at, key) | (key == 0)


@mutant(caught_by="attention.gqa")
class LargeGroupsReadTheFirstHead(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def kv_head(self) -> torch.Tensor:
            return super().kv_head() * (self.spec.heads <= 16 * self.spec.kv_heads)


@mutant(caught_by="attention.gqa")
class InterleavesManyKVHeads(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def kv_head(self) -> torch.Tensor:
            return (
                super().kv_head()
                if self.spec.kv_heads < 4
                else torch.arange(self.spec.heads) % self.spec.kv_heads
            )


@mutant(caught_by="attention.scale")
class UsualScaleWithAWindow(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def scale(self) -> float:
            return self.spec.head_size**-0.5 if self.spec.window else self.spec.scale


@mutant(caught_by="attention.block_table")
class BlocksThatFollowTheFirst(PlainAttention):
    """Takes a row's blocks to lie one after the other."""

    class layer(PlainLayer):  # noqa: N801
        def slots(self, row: int, positions: torch.Tensor) -> torch.Tensor:
            size = self._backend.context.block_size
            return (self.table()[row, 0].long() * size + positions) % len(self._k)


@mutant(caught_by="attention.block_sizes")
class ShiftsInsteadOfDividing(PlainAttention):
    """Right for powers of two, and any block size is claimed."""

    class layer(PlainLayer):  # noqa: N801
        def slots(self, row: int, positions: torch.Tensor) -> torch.Tensor:
            size = self._backend.context.block_size
            block = (positions >> (size.bit_length() - 1)).clamp(max=int(positions[-1]) // size)
            return self.table()[row, block].long() * size + (positions & (size - 1))


class _MovesPadding(TorchAttention):
    """Writes padding tokens, beyond the first so many, to another slot."""

    few = 0

    def slot(self, size: int, entries: int) -> int:
        raise NotImplementedError

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        kept = batch.num_tokens + self.few
        for units, slots in self.slots.items():
            moved = (
                torch.arange(len(slots)) >= kept
                if len(slots) > kept
                else torch.zeros(len(slots), dtype=torch.bool)
            )
            self.slots[units] = torch.where(
                moved, self.slot(units.block_size, units.entries), slots
            )


@mutant(caught_by="attention.padding")
class PaddingGoesToSlotZero(_MovesPadding):
    def slot(self, size: int, entries: int) -> int:
        return 0


@mutant(caught_by="attention.padding")
class PaddingGoesToTheLastPage(_MovesPadding):
    """Takes the page before the waste page for it."""

    def slot(self, size: int, entries: int) -> int:
        return entries - size - 1


@mutant(caught_by="attention.write_first")
class StoresWithTheNextPlan(PlainAttention):
    """K and V of a step are stored when the next one is planned; a row sees its own, and what
    others wrote before."""

    class layer(PlainLayer):  # noqa: N801
        later: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # slots, k, v

        def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
            self.later = self._backend.slots[self.units], k.clone(), v.clone()

        def store(self) -> None:
            if self.later is not None:
                slots, k, v = self.later
                self._k.index_copy_(0, slots, k)
                self._v.index_copy_(0, slots, v)
                self.later = None

        def attend(self, q: torch.Tensor) -> torch.Tensor:
            self.own = iter([tokens for _, tokens, _ in self.rows()])
            return super().attend(q)

        def attend_row(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            tokens = next(self.own)
            if self.later is not None:
                k[-len(q) :], v[-len(q) :] = self.later[1][tokens], self.later[2][tokens]
            return super().attend_row(q, k, v)

    def plan(self, batch: AttentionBatch) -> None:
        for layer in self._layers:
            layer.store()  # type: ignore[attr-defined]
        super().plan(batch)


@mutant(caught_by="attention.dtypes")
class SumsInTheCachesDtype(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def mix(self, scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            weights = (scores - scores.amax(-1, keepdim=True)).exp().to(v.dtype)
            total = torch.zeros_like(weights[..., 0])  # [heads, queries]
            for key in range(weights.shape[-1]):
                total = total + weights[..., key]
            return (
                torch.einsum("hqk,khd->qhd", weights.float(), v.float())
                / total.float().T[..., None]
            )


@mutant(caught_by="attention.head_sizes")
class RefusesAHeadSizeThatItClaims(TorchAttention):
    @classmethod
    def reasons_against(cls, context: AttentionContext, layers: Sequence[LayerSpec]) -> list[str]:
        odd = [
            f"head size {layer.head_size} is no power of two"
            for layer in layers
            if layer.head_size & (layer.head_size - 1)
        ]
        return super().reasons_against(context, layers) + odd


@mutant(caught_by="attention.head_sizes")
class CutsLargeHeads(PlainAttention):
    """Any head size is claimed, and 128 numbers of it are used."""

    class layer(PlainLayer):  # noqa: N801
        def attend_row(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return super().attend_row(
                q.clone().index_fill_(2, torch.arange(128, max(128, q.shape[2])), 0.0), k, v
            )


@mutant(caught_by="attention.layers")
class OneCacheForAllLayers(TorchAttention):
    def prepare(self, max_rows: int, max_tokens: int, max_len: int) -> None:
        super().prepare(max_rows, max_tokens, max_len)
        first: Any = self._layers[0]
        for layer in self._layers:
            layer._own, layer._k, layer._v = first._own, first._k, first._v


@mutant(caught_by="attention.unlike_layers")
class GroupsHeadsAsTheFirstLayerDoes(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def kv_head(self) -> torch.Tensor:
            first = self._backend._layers[0].spec
            return (
                torch.arange(self.spec.heads)
                // (first.heads // first.kv_heads)
                % self.spec.kv_heads
            )


@mutant(caught_by="attention.memory")
class SizesAllLayersByTheFirst(TorchAttention):
    def tensor_bytes(self, spec: LayerSpec, block_size: int) -> tuple[int, ...]:
        return super().tensor_bytes(self._layers[0].spec if self._layers else spec, block_size)


@mutant(caught_by="attention.window")
class LongWindowsAreNone(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def seen(self, at: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return key <= at if (self.spec.window or 0) > 1000 else super().seen(at, key)


@mutant(caught_by="attention.scale")
class UsualScaleForLargeHeads(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def scale(self) -> float:
            return self.spec.head_size**-0.5 if self.spec.head_size > 32 else self.spec.scale


@mutant(caught_by="attention.strides")
class TakesADecodesQToLieInOnePiece(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def attend(self, q: torch.Tensor) -> torch.Tensor:
            decodes = self._backend.batch.host_query_lens.max(initial=0) <= 1
            return super().attend(
                torch.as_strided(q, q.shape, torch.empty(q.shape).stride()) if decodes else q
            )


@mutant(caught_by="attention.padding")
class RoomForSomePadding(_MovesPadding):
    """More of it goes to slot 0."""

    few = 16

    def slot(self, size: int, entries: int) -> int:
        return 0


@mutant(caught_by="attention.refusals")
class LooksAtTheFirstLayer(TorchAttention):
    capabilities = replace(PLAIN, head_sizes=(8, 64))

    @classmethod
    def reasons_against(cls, context: AttentionContext, layers: Sequence[LayerSpec]) -> list[str]:
        return super().reasons_against(context, layers[:1])


@mutant(caught_by="attention.huge_scores")
class ExpOfRawScores(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def mix(self, scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            weights = scores.exp()
            return torch.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdim=True), v.float())


@mutant(caught_by="attention.again")
class ClearsByMultiplying(TorchAttention):
    """Its output buffer is used again, and 0 * NaN is NaN."""

    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        layer = super().make_layer(spec)
        attend, kept = layer.attend, {}

        def attend_into_buffer(q: torch.Tensor) -> torch.Tensor:
            values = attend(q)
            kept["out"] = (
                kept["out"].mul(0).add_(values)
                if "out" in kept and kept["out"].shape == values.shape
                else values
            )
            return kept["out"]

        layer.attend = attend_into_buffer  # type: ignore[method-assign]
        return layer


class _PlansOnlyWhatLooksNew(TorchAttention):
    """Keeps the parts of the step before if this one looks alike."""

    last: object = None

    def plan(self, batch: AttentionBatch) -> None:
        parts, inspected = self.parts, self.inspect(batch)
        super().plan(batch)
        if inspected == self.last:
            self.parts = parts
        self.last = inspected

    def inspect(self, batch: AttentionBatch) -> object:
        raise NotImplementedError


@mutant(caught_by="attention.replan")
class TakesEqualLengthsForTheSameStep(_PlansOnlyWhatLooksNew):
    def inspect(self, batch: AttentionBatch) -> object:
        return batch.host_query_lens.tolist(), batch.host_kv_lens.tolist(), batch.slots[0].shape[1]


@mutant(caught_by="attention.replan")
class TakesAsManyQueriesForTheSameStep(_PlansOnlyWhatLooksNew):
    def inspect(self, batch: AttentionBatch) -> object:
        return batch.host_query_lens.tolist(), batch.slots[0].shape[1]


class _Prepared(PlainAttention):
    """Has room for what it prepared for, or not quite."""

    max_rows = max_len = max_tokens = 0

    def prepare(self, max_rows: int, max_tokens: int, max_len: int) -> None:
        super().prepare(max_rows, max_tokens, max_len)
        self.max_rows, self.max_tokens, self.max_len = max_rows, max_tokens, max_len


@mutant(caught_by="attention.limits")
class HasNoColumnForTheLastPartOfABlock(_Prepared):
    """Its block tables have max_len // block_size columns."""

    class layer(PlainLayer):  # noqa: N801
        _backend: _Prepared

        def slots(self, row: int, positions: torch.Tensor) -> torch.Tensor:
            columns = max(1, self._backend.max_len // self._backend.context.block_size)
            return super().slots(
                row, positions.clamp(max=columns * self._backend.context.block_size - 1)
            )


@mutant(caught_by="attention.limits")
class TheLastRowIsForPadding(_Prepared):
    class layer(PlainLayer):  # noqa: N801
        _backend: _Prepared

        def rows(self) -> Iterator[tuple[int, slice, int]]:
            yield from (
                row for row in super().rows() if row[0] < max(1, self._backend.max_rows - 1)
            )


@mutant(caught_by="attention.large_pool")
class KeepsSlotsIn16Bits(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def slots(self, row: int, positions: torch.Tensor) -> torch.Tensor:
            return super().slots(row, positions) % 2**16


@mutant(caught_by="attention.large_pool")
class KeepsSlotsInSigned16Bits(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def slots(self, row: int, positions: torch.Tensor) -> torch.Tensor:
            return super().slots(row, positions).short().long() % len(self._k)


@mutant(caught_by="attention.read_only")
class ScalesQInPlace(TorchAttention):
    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        layer = super().make_layer(spec)
        attend = layer.attend

        def attend_scaled(q: torch.Tensor) -> torch.Tensor:
            out = attend(q)
            q *= spec.scale
            return out

        layer.attend = attend_scaled  # type: ignore[method-assign]
        return layer


@mutant(caught_by="attention.read_only")
class MendsTheSlotsOfTheBatch(TorchAttention):
    """Sends all padding to one slot in the batch's own tensor."""

    def plan(self, batch: AttentionBatch) -> None:
        for slots in batch.slots:
            slots[:, batch.num_tokens :] = slots[:, batch.num_tokens : batch.num_tokens + 1]
        super().plan(batch)


class _KeepsMore(TorchAttention):
    """Holds memory that isn't its own any more."""

    held: list[torch.Tensor]

    def __init__(self, options: Any, context: AttentionContext) -> None:
        super().__init__(options, context)
        self.held = []

    def prepare(self, max_rows: int, max_tokens: int, max_len: int) -> None:
        super().prepare(max_rows, max_tokens, max_len)
        self.hold(
            [memory for layer in self._layers if layer.cache for memory in layer.cache.memory]
        )

    def hold(self, memory: list[torch.Tensor]) -> None:
        raise NotImplementedError


@mutant(caught_by="attention.memory", soon=True)
class NeverGetsSmaller(_KeepsMore):
    """A smaller pool keeps the larger one's memory."""

    def hold(self, memory: list[torch.Tensor]) -> None:
        self.held = max(
            self.held, memory, key=lambda tensors: sum(tensor.nbytes for tensor in tensors)
        )


@mutant(caught_by="attention.strides")
class TakesKToLieInOnePiece(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
            super().write(torch.as_strided(k, k.shape, torch.empty(k.shape).stride()), v)


@mutant(caught_by="attention.memory")
class CountsKAlone(TorchAttention):
    def tensor_bytes(self, spec: LayerSpec, block_size: int) -> tuple[int, ...]:
        return super().tensor_bytes(spec, block_size)[:1]


@mutant(caught_by="attention.memory")
class KeepsTheOldCache(_KeepsMore):
    def hold(self, memory: list[torch.Tensor]) -> None:
        self.held += memory


@mutant(caught_by="attention.refusals")
class RefusesNothing(TorchAttention):
    @classmethod
    def reasons_against(cls, context: AttentionContext, layers: Sequence[LayerSpec]) -> list[str]:
        return []


@mutant(caught_by="attention.refusals")
class DeclaresNoDirection(PlainAttention):
    capabilities = AttentionCapabilities(groups=True)


@mutant(caught_by="attention.refusals")
class RefusesWithoutTheValue(TorchAttention):
    capabilities = replace(PLAIN, head_sizes=(8, 64))

    @classmethod
    def reasons_against(cls, context: AttentionContext, layers: Sequence[LayerSpec]) -> list[str]:
        return ["this is not supported"] if super().reasons_against(context, layers) else []


@mutant(caught_by="attention.shared_prefix")
class LeavesOutTheSharedPrefixForDecodes(PlainAttention):
    capabilities = replace(PLAIN, shared_prefix=True)

    class layer(PlainLayer):  # noqa: N801
        def attend_row(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            shared = self._backend.batch.shared_prefix_blocks * self._backend.context.block_size
            return (
                super().attend_row(q, k[shared:], v[shared:])
                if len(q) == 1
                else super().attend_row(q, k, v)
            )


@mutant(caught_by="attention.fused_write")
class OpensACopyOfTheCache(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def cache_for_fused_write(self) -> FusedCache:
            k, v = (
                cache.unflatten(0, (-1, self._backend.context.block_size)).clone()
                for cache in (self._k, self._v)
            )
            return FusedCache(k, v, self._backend.slots.get(self.units, torch.empty(0)))


@mutant(caught_by="attention.mixed_graph")
class HasTooFewProgramsForAMixedGraph(PlainAttention):
    """What is launched does for prefills of some length, not for as many rows as there may be."""

    capabilities = replace(PLAIN, cuda_graph=GraphSupport.ALL)

    class layer(PlainLayer):  # noqa: N801
        def rows(self) -> Iterator[tuple[int, slice, int]]:
            return islice(super().rows(), 64 if self._backend.batch.mixed_graph else None)


class SmallLayer(TorchLayer):
    """The `torch` backend's layer, for mutants of what a cache of FP8 asks of it."""


class SmallAttention(TorchAttention):
    layer: type[SmallLayer] = SmallLayer

    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        layer = self.layer(spec, self)
        self._layers.append(layer)
        return layer


@mutant(caught_by="attention.cache_dtypes")
class ScalesVAsK(SmallAttention):
    class layer(SmallLayer):  # noqa: N801
        def attend(self, q: torch.Tensor) -> torch.Tensor:
            scales = self.kv_scales or ONE
            return super().attend(q) / scales.v * scales.k


@mutant(caught_by="attention.cache_dtypes")
class ReadsItsScalesOnce(SmallAttention):
    class layer(SmallLayer):  # noqa: N801
        def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
            if self.kv_scales is not None:
                self.kv_scales = KVScales(self.kv_scales.k.clone(), self.kv_scales.v.clone())
            super().write(k, v)


@mutant(caught_by="attention.cache_dtypes")
class RoundsTowardsZero(SmallAttention):
    class layer(SmallLayer):  # noqa: N801
        def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
            super().write(k, v - v.abs() * 2**-6 * v.sign())


@mutant(caught_by="attention.cache_saturates")
class OverflowsToNaN(SmallAttention):
    class layer(SmallLayer):  # noqa: N801
        def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
            scales = self.kv_scales or ONE
            beyond = [
                values.masked_fill((values / scale).abs() > 464, torch.nan)
                for values, scale in ((k, scales.k), (v, scales.v))
            ]
            super().write(*(beyond if self.kv_scales is not None else (k, v)))


@mutant(caught_by="attention.cache_places")
class CountsBytesOfTheActivations(SmallAttention):
    def tensor_bytes(self, spec: LayerSpec, block_size: int) -> tuple[int, ...]:
        return (block_size * spec.kv_heads * spec.head_size * self.dtype.itemsize,) * 2


@mutant(caught_by="attention.cache_places")
class KeepsTheActivationsDtype(SmallAttention):
    """Claims FP8, says that a block takes as little, and keeps K and V in the dtype of q, beside
    the memory that it is lent."""

    class layer(SmallLayer):  # noqa: N801
        def bind(self, cache: LayerCache) -> None:
            super().bind(cache)
            self._own = [own.to(self._backend.dtype) for own in self._own]
            self._k, self._v = self._own


@mutant(caught_by="attention.graph", error=AssertionError if torch.cuda.is_available() else Untried)
class ReplaysThePlanOfItsCapture(TorchAttention):
    """What differs between steps isn't in buffers of fixed address, so that a graph holds the step
    that was captured."""

    capabilities = replace(PLAIN, cuda_graph=GraphSupport.DECODE)


# ---- right in the common case, wrong at an edge


@mutant(caught_by="attention.cache_saturates")
class TakesInfinityForNaN(SmallAttention):
    class layer(SmallLayer):  # noqa: N801
        def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
            if self.kv_scales is not None:
                k, v = k.masked_fill(k.isinf(), torch.nan), v.masked_fill(v.isinf(), torch.nan)
            super().write(k, v)


@mutant(caught_by="attention.cache_saturates")
class TakesInfiniteVForZero(SmallAttention):
    class layer(SmallLayer):  # noqa: N801
        def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
            super().write(k, v.masked_fill(v.isinf(), 0) if self.kv_scales is not None else v)


class _Rescaled(SmallAttention):
    """Computes with scales of its own making, whenever it runs."""

    class layer(SmallLayer):  # noqa: N801
        def used(self, scales: KVScales) -> KVScales:
            raise NotImplementedError

        def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
            given, self.kv_scales = self.kv_scales, self.kv_scales and self.used(self.kv_scales)
            super().write(k, v)
            self.kv_scales = given

        def attend(self, q: torch.Tensor) -> torch.Tensor:
            given, self.kv_scales = self.kv_scales, self.kv_scales and self.used(self.kv_scales)
            out = super().attend(q)
            self.kv_scales = given
            return out


@mutant(caught_by="attention.cache_dtypes")
class ScalesAllLayersAsTheFirst(_Rescaled):
    class layer(_Rescaled.layer):  # noqa: N801
        def used(self, scales: KVScales) -> KVScales:
            return self._backend._layers[0].kv_scales or scales


@mutant(caught_by="attention.cache_dtypes")
class HasALeastScale(_Rescaled):
    """So that nothing is divided by zero."""

    class layer(_Rescaled.layer):  # noqa: N801
        def used(self, scales: KVScales) -> KVScales:
            return KVScales(scales.k.clamp(min=1e-5), scales.v.clamp(min=1e-5))


@mutant(caught_by="attention.cache_dtypes")
class KeepsScalesInHalfPrecision(_Rescaled):
    """With room for what is small, by bfloat16's exponents, or for what is exact, by float16's
    digits; this one has the latter."""

    class layer(_Rescaled.layer):  # noqa: N801
        def used(self, scales: KVScales) -> KVScales:
            def kept(scale: torch.Tensor) -> torch.Tensor:
                return scale if scale > 1e-4 else scale.half().float()

            return KVScales(kept(scales.k), kept(scales.v))


@mutant(caught_by="attention.cache_places")
class DividesKInPlace(SmallAttention):
    class layer(SmallLayer):  # noqa: N801
        def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
            super().write(k, v)
            if self.kv_scales is not None:
                k.div_(self.kv_scales.k)


@mutant(caught_by="attention.cache_places")
class SaturatesVInPlace(SmallAttention):
    class layer(SmallLayer):  # noqa: N801
        def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
            super().write(k, v)
            if self.kv_scales is not None:
                v.clamp_(-448 * self.kv_scales.v, 448 * self.kv_scales.v).mul_(
                    1 / self.kv_scales.v
                ).mul_(self.kv_scales.v).add_(1e-3)


class _UsesMemoryAgain(PlainAttention):
    """Results lie in memory of the backend."""

    def __init__(self, options: Any, context: AttentionContext) -> None:
        super().__init__(options, context)
        self.memory = torch.empty(2**22, dtype=self.dtype)

    class layer(PlainLayer):  # noqa: N801
        _backend: _UsesMemoryAgain

        def attend(self, q: torch.Tensor) -> torch.Tensor:
            return self._backend.memory[: q.numel()].view(q.shape).copy_(super().attend(q))


@mutant(caught_by="attention.layers")
class StagesKWhereResultsLie(_UsesMemoryAgain):
    class layer(_UsesMemoryAgain.layer):  # noqa: N801
        def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
            super().write(self._backend.memory[: k.numel()].view(k.shape).copy_(k), v)


@mutant(caught_by="attention.layers")
class PlansWhereResultsLie(_UsesMemoryAgain):
    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        self.memory.zero_()


@mutant(caught_by="attention.replan")
class TakesTheSameTensorsForTheSameStep(TorchAttention):
    planned: Any = None

    def plan(self, batch: AttentionBatch) -> None:
        if self.planned is not None and self.planned.block_tables is batch.block_tables:
            return
        self.planned = batch
        super().plan(batch)


@mutant(caught_by="attention.replan")
class KeepsTheHostsArraysToCompare(TorchAttention):
    """By reference: what was refilled is equal to itself."""

    planned: Any = None

    def plan(self, batch: AttentionBatch) -> None:
        last, self.planned = self.planned, batch
        if (
            last is not None
            and last.block_tables[0].equal(batch.block_tables[0])
            and (last.host_kv_lens == batch.host_kv_lens).all()
        ):
            parts = self.parts
            super().plan(batch)
            self.parts = parts
        else:
            super().plan(batch)


class _OpenLayer(PlainLayer):
    """Lays its cache open."""

    _backend: _Open

    def cache_for_fused_write(self) -> FusedCache:
        k, v = (
            cache.view(-1, self.units.of_page, *cache.shape[1:])[:, : self.units.block_size]
            for cache in (self._k, self._v)
        )
        return FusedCache(k, v, self._backend.open_slots[self.units.group][self.units.page])


class _Open(PlainAttention):
    """Right, and the base of those that aren't."""

    layer: type[PlainLayer] = _OpenLayer
    open_slots: list[torch.Tensor]  # of each group, for up to 4 pages

    def prepare(self, max_rows: int, max_tokens: int, max_len: int) -> None:
        super().prepare(max_rows, max_tokens, max_len)
        self.open_slots = [torch.zeros((4, max_tokens), dtype=torch.int64) for _ in range(4)]

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        self.open(batch, batch.slots[0].shape[1])

    def open(self, batch: AttentionBatch, tokens: int) -> None:
        for own, slots in zip(self.open_slots, batch.slots, strict=False):
            own[: len(slots), :tokens] = slots[:, :tokens]


@mutant(caught_by="attention.fused_write")
class OpensSlotsWithoutPadding(_Open):
    """This backend leaves the slots of an earlier step in the padding of `FusedCache.slots`."""

    def open(self, batch: AttentionBatch, tokens: int) -> None:
        super().open(batch, batch.num_tokens)


@mutant(caught_by="attention.group_block_sizes")
class OpensSlotsOfTheFirstGroup(_Open):
    class layer(_OpenLayer):  # noqa: N801
        def cache_for_fused_write(self) -> FusedCache:
            return replace(super().cache_for_fused_write(), slots=self._backend.open_slots[0][0])


@mutant(caught_by="attention.fused_write")
class MakesRoomForMoreSlots(_Open):
    """As soon as a step has more tokens than any before, elsewhere."""

    def open(self, batch: AttentionBatch, tokens: int) -> None:
        if tokens > getattr(self, "room", 0):
            self.room = tokens
            self.open_slots = [torch.zeros((4, tokens), dtype=torch.int64) for _ in range(4)]
        super().open(batch, tokens)


@mutant(caught_by="attention.fused_write")
class OpensTheCacheOfTheFirstBind(_Open):
    class layer(_OpenLayer):  # noqa: N801
        def cache_for_fused_write(self) -> FusedCache:
            if not hasattr(self, "opened"):
                self.opened = super().cache_for_fused_write()
            return replace(self.opened, slots=super().cache_for_fused_write().slots)


@mutant(caught_by="attention.fused_write")
class MovesTheCacheWithEachPlan(_Open):
    """Each `plan` moves the cache to new memory, so tensors of an earlier `FusedCache` are no
    longer read."""

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        layer: Any
        for layer in self._layers:
            layer._k, layer._v = layer._k.clone(), layer._v.clone()


class _KeepsSharedPrefixes(PlainAttention):
    """Gathers a shared prefix once, and again where `look` gives something else."""

    capabilities = replace(PLAIN, shared_prefix=True)

    def inspect(self, blocks: torch.Tensor) -> object:
        raise NotImplementedError

    class layer(PlainLayer):  # noqa: N801
        _backend: _KeepsSharedPrefixes

        def attend(self, q: torch.Tensor) -> torch.Tensor:
            batch, size = self._backend.batch, self._backend.context.block_size
            if tokens := batch.shared_prefix_blocks * size:
                inspected = (
                    tokens,
                    self._backend.inspect(
                        batch.block_tables[0][0][0, : batch.shared_prefix_blocks]
                    ),
                )
                if getattr(self, "inspected", None) != inspected:
                    slots = self.slots(0, torch.arange(tokens))
                    self.inspected, self.kept = inspected, (self._k[slots], self._v[slots])
            return super().attend(q)

        def attend_row(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if (
                tokens := self._backend.batch.shared_prefix_blocks
                * self._backend.context.block_size
            ):
                k, v = (
                    torch.cat((kept, own[tokens:]))
                    for kept, own in zip(self.kept, (k, v), strict=True)
                )
            return super().attend_row(q, k, v)


@mutant(caught_by="attention.shared_prefix")
class TakesAnEqualPrefixForTheSame(_KeepsSharedPrefixes):
    def inspect(self, blocks: torch.Tensor) -> object:
        return self.batch.host_kv_lens.tolist()


@mutant(caught_by="attention.shared_prefix")
class TakesThePrefixOfTheSameBlocksForTheSame(_KeepsSharedPrefixes):
    """Blocks that were freed and written again have other K and V."""

    def inspect(self, blocks: torch.Tensor) -> object:
        return blocks.tolist()


class _WithSinks(PlainAttention):
    """Right, and the base of those that aren't."""

    capabilities = replace(PLAIN, sinks=True)

    class layer(PlainLayer):  # noqa: N801
        def mix(self, scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            weights = scores
            for _ in range(self.times(scores)):
                weights = torch.cat(
                    [weights, self.sink()[:, None, None].expand(*scores.shape[:2], 1)], -1
                )
            return torch.einsum(
                "hqk,khd->qhd", weights.softmax(-1)[..., : scores.shape[-1]], v.float()
            )

        def sink(self) -> torch.Tensor:
            return torch.zeros(0) if self.sinks is None else self.sinks

        def times(self, scores: torch.Tensor) -> int:
            return 0 if self.sinks is None else 1


@mutant(caught_by="attention.sinks")
class CountsASinkInEachPart(_WithSinks):
    """Splits the keys of long rows over programs, each of which begins with the sink."""

    class layer(_WithSinks.layer):  # noqa: N801
        def times(self, scores: torch.Tensor) -> int:
            return super().times(scores) * -(-scores.shape[-1] // 512)


@mutant(caught_by="attention.sinks")
class CopiesItsSinks(_WithSinks):
    """Before the weights are loaded into the parameter."""

    class layer(_WithSinks.layer):  # noqa: N801
        def bind_sinks(self, sinks: torch.Tensor) -> None:
            super().bind_sinks(sinks.clone())


@mutant(caught_by="attention.sinks")
class ForgetsTheSinkOfDecodes(_WithSinks):
    class layer(_WithSinks.layer):  # noqa: N801
        def times(self, scores: torch.Tensor) -> int:
            return super().times(scores) if scores.shape[1] > 1 else 0


@mutant(caught_by="attention.sinks")
class ScalesTheSink(_WithSinks):
    class layer(_WithSinks.layer):  # noqa: N801
        def sink(self) -> torch.Tensor:
            return super().sink() * self.scale()


@mutant(caught_by="attention.sinks")
class TakesTheSinkOfAKVHead(_WithSinks):
    """Reads one sink for each group of heads."""

    class layer(_WithSinks.layer):  # noqa: N801
        def sink(self) -> torch.Tensor:
            return super().sink()[self.kv_head()]


@mutant(caught_by="attention.sinks")
class CopiesTheSinks(_WithSinks):
    """Keeps the numbers that the parameter held when it was bound."""

    class layer(_WithSinks.layer):  # noqa: N801
        kept: torch.Tensor | None = None

        def sink(self) -> torch.Tensor:
            self.kept = super().sink().clone() if self.kept is None else self.kept
            return self.kept


class _Capped(PlainAttention):
    """Right, and the base of those that aren't."""

    capabilities = replace(PLAIN, softcap=True)

    class layer(PlainLayer):  # noqa: N801
        def scored(self, products: torch.Tensor) -> torch.Tensor:
            scores = super().scored(products)
            return scores if (cap := self.cap()) is None else self.capped(scores, cap)

        def cap(self) -> float | None:
            return self.spec.softcap

        def capped(self, scores: torch.Tensor, cap: float) -> torch.Tensor:
            return torch.tanh(scores / cap) * cap


@mutant(caught_by="attention.softcap")
class CapsBeforeScaling(_Capped):
    class layer(_Capped.layer):  # noqa: N801
        def scored(self, products: torch.Tensor) -> torch.Tensor:
            cap = self.cap()
            return PlainLayer.scored(self, products if cap is None else self.capped(products, cap))


@mutant(caught_by="attention.softcap")
class CutsScoresOff(_Capped):
    class layer(_Capped.layer):  # noqa: N801
        def capped(self, scores: torch.Tensor, cap: float) -> torch.Tensor:
            return scores.clamp(-cap, cap)


@mutant(caught_by="attention.softcap")
class CapsAllLayersAsTheFirst(_Capped):
    class layer(_Capped.layer):  # noqa: N801
        def cap(self) -> float | None:
            return self._backend._layers[0].spec.softcap


@mutant(caught_by="attention.softcap")
class ComputesTanhByExp(_Capped):
    """Which huge scores make infinite."""

    class layer(_Capped.layer):  # noqa: N801
        def capped(self, scores: torch.Tensor, cap: float) -> torch.Tensor:
            up, down = (scores / cap).exp(), (-scores / cap).exp()
            return (up - down) / (up + down) * cap


@mutant(caught_by="attention.softcap")
class RoundsCappedScores(_Capped):
    """With an instruction for half precision."""

    class layer(_Capped.layer):  # noqa: N801
        def capped(self, scores: torch.Tensor, cap: float) -> torch.Tensor:
            return torch.tanh(scores / cap).half().float() * cap


@mutant(caught_by="attention.softcap")
class CapsTheSink(_WithSinks):
    capabilities = replace(PLAIN, sinks=True, softcap=True)

    class layer(_WithSinks.layer):  # noqa: N801
        def scored(self, products: torch.Tensor) -> torch.Tensor:
            cap, scores = self.spec.softcap, super().scored(products)
            return scores if cap is None else torch.tanh(scores / cap) * cap

        def sink(self) -> torch.Tensor:
            cap = self.spec.softcap
            return super().sink() if cap is None else torch.tanh(super().sink() / cap) * cap


class _Latent(PlainAttention):
    """Right, and the base of those that aren't."""

    capabilities = replace(PLAIN, v_in_k=True, cache_dtypes=("float8_e4m3fn",))

    class layer(PlainLayer):  # noqa: N801
        def attend_row(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            scales = ONE if self.kv_scales is None else self.kv_scales
            return (
                super()
                .attend_row(q, k.float() * scales.k, v.float() * self.v_scale(scales))
                .to(q.dtype)
            )

        def v_scale(self, scales: KVScales) -> torch.Tensor:
            return scales.k if self.spec.v_in_k else scales.v


@mutant(caught_by="attention.v_in_k")
class TakesTheLastNumbersOfKForV(_Latent):
    class layer(_Latent.layer):  # noqa: N801
        def attend_row(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return super().attend_row(
                q, k, k[..., -self.spec.out_size :] if self.spec.v_in_k else v
            )


@mutant(caught_by="attention.v_in_k")
class ScoresByWhatIsVToo(_Latent):
    """Leaves out the numbers of K that aren't V."""

    class layer(_Latent.layer):  # noqa: N801
        def attend_row(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            size = self.spec.out_size
            return super().attend_row(q[..., :size], k[..., :size], v)


@mutant(caught_by="attention.v_in_k")
class ScalesLatentsAsV(_Latent):
    class layer(_Latent.layer):  # noqa: N801
        def v_scale(self, scales: KVScales) -> torch.Tensor:
            return scales.v


@mutant(caught_by="attention.v_in_k")
class HasRoomForFewHeads(_Latent):
    class layer(_Latent.layer):  # noqa: N801
        def attend_row(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = super().attend_row(q, k, v)
            out[:, 64:] = 0
            return out


@mutant(caught_by="attention.v_in_k_memory")
class CountsVOfLatentsToo(_Latent):
    def tensor_bytes(self, spec: LayerSpec, block_size: int) -> tuple[int, ...]:
        return super().tensor_bytes(spec, block_size) * (2 if spec.v_in_k else 1)


class _Elsewhere(PlainAttention):
    """Keeps some of K or V in memory of its own."""

    capabilities = replace(PLAIN, v_in_k=True)

    class layer(PlainLayer):  # noqa: N801
        def bind(self, cache: LayerCache) -> None:
            super().bind(cache)
            self.own_k, self.own_v = (
                torch.zeros_like(values, memory_format=torch.contiguous_format)
                for values in (self._k, self._v)
            )

        def write(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
            super().write(k, v)
            slots = self._backend.slots[self.units]
            self.own_k[slots] = k
            if v is not None:
                self.own_v[slots] = v


@mutant(caught_by="attention.v_in_k_memory")
class KeepsTheRestOfLatentsElsewhere(_Elsewhere):
    class layer(_Elsewhere.layer):  # noqa: N801
        def attend(self, q: torch.Tensor) -> torch.Tensor:
            if self.spec.v_in_k:
                self._k = torch.cat([self._v, self.own_k[..., self.spec.out_size :]], dim=-1)
            return super().attend(q)


@mutant(caught_by="attention.pages")
class KeepsVElsewhere(_Elsewhere):
    class layer(_Elsewhere.layer):  # noqa: N801
        def attend(self, q: torch.Tensor) -> torch.Tensor:
            self._v = self.own_v
            return super().attend(q)


@mutant(caught_by="attention.pages")
class TurnsTokensByTheNumberOfThePage(PlainAttention):
    """Begins each page at another token, so that memory channels are used evenly."""

    def turned(self, slots: torch.Tensor) -> torch.Tensor:
        size = self.context.block_size
        page = slots // size
        return page * size + (slots + page) % size

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(replace(batch, slots=tuple(map(self.turned, batch.slots))))

    class layer(PlainLayer):  # noqa: N801
        _backend: TurnsTokensByTheNumberOfThePage

        def slots(self, row: int, positions: torch.Tensor) -> torch.Tensor:
            size = self.block_size()
            return self.units.of_slots(
                self._backend.turned(
                    self.table()[row, positions // size].long() * size + positions % size
                )
            )


@mutant(caught_by="attention.pages")
class ClearsTheRestOfARow(TorchAttention):
    """Writes whole rows of memory, whoever the rest belongs to."""

    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        layer: Any = super().make_layer(spec)
        write = layer.write

        def write_rows(k: torch.Tensor, v: torch.Tensor | None) -> None:
            write(k, v)
            for memory, own in zip(
                layer.cache.memory, self.tensor_bytes(spec, layer.cache.block_size), strict=True
            ):
                memory[:, own:] = 0

        layer.write = write_rows
        return layer


@mutant(caught_by="attention.pages")
class WritesThePageAfterwards(TorchAttention):
    """Zeroes the page after the one that it writes, for the tokens to come."""

    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        layer: Any = super().make_layer(spec)
        write = layer.write

        def write_and_clear(k: torch.Tensor, v: torch.Tensor | None) -> None:
            used = {slot // layer.units.of_page for slot in self.slots[layer.units].tolist()}
            for memory in layer.cache.memory:
                memory[sorted({page + 1 for page in used} - used - {len(memory)})] = 0
            write(k, v)

        layer.write = write_and_clear
        return layer


@mutant(caught_by="attention.memory")
class KeepsALargerBinding(TorchAttention):
    """As it has room for as many pages."""

    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        layer: Any = super().make_layer(spec)
        bind = layer.bind
        layer.bind = lambda cache: bind(
            cache
            if layer.cache is None
            else max(layer.cache, cache, key=lambda known: len(known.memory[0]))
        )
        return layer


@mutant(caught_by="attention.values")
class FillsUpWithTheWastePage(PlainAttention):
    """Gathers what rows have too little of from the waste page, with the weight 0; and 0 * NaN is
    NaN."""

    class layer(PlainLayer):  # noqa: N801
        def attend(self, q: torch.Tensor) -> torch.Tensor:
            return super().attend(q) + 0.0 * self._v[-1].sum().to(q.dtype)


@mutant(caught_by="attention.unseen_pages")
class LoadsUnseenPages(PlainAttention):
    """V of tokens before the window has the weight 0."""

    class layer(PlainLayer):  # noqa: N801
        def attend(self, q: torch.Tensor) -> torch.Tensor:
            out = super().attend(q)
            for row, tokens, length in self.rows():
                out[tokens] += 0.0 * self._v[self.slots(row, torch.arange(length))].sum()
            return out

        def attend_row(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            first = (
                0 if self.spec.window is None else max(0, len(k) - len(q) - self.spec.window + 1)
            )
            return super().attend_row(q, k[first:], v[first:])


@mutant(caught_by="attention.unseen_pages")
class LoadsTheTileBeforeAWindow(PlainAttention):
    """Begins at a multiple of its tile's 64 tokens."""

    class layer(PlainLayer):  # noqa: N801
        def attend_row(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            first = (
                0
                if self.spec.window is None
                else max(0, len(k) - len(q) - self.spec.window + 1) // 64 * 64
            )
            return super().attend_row(q, k[first:], v[first:])


@mutant(caught_by="attention.groups")
class ReadsByTheFirstGroupsTable(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def table(self) -> torch.Tensor:
            return self._backend.batch.block_tables[0][0]


@mutant(caught_by="attention.groups")
class WritesToTheFirstGroupsSlots(PlainAttention):
    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        self.slots = {units: units.of_slots(batch.slots[0][0]) for units in self.slots}


@mutant(caught_by="attention.groups")
class HasOneTableForAllGroups(PlainAttention):
    """Reads and writes all layers by the first group's, in which nothing is released."""

    def plan(self, batch: AttentionBatch) -> None:
        groups = range(len(batch.slots))
        super().plan(
            replace(
                batch,
                block_tables=tuple(batch.block_tables[0] for _ in groups),
                slots=tuple(batch.slots[0] for _ in groups),
            )
        )


@mutant(caught_by="attention.groups")
class LooksBackAsFarAsTheFirstGroupWithAWindow(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def seen(self, at: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            windows = [layer.spec.window for layer in self._backend._layers if layer.spec.window]
            return (
                (key <= at) & (key > at - windows[0]) if self.spec.window else super().seen(at, key)
            )


@mutant(caught_by="attention.group_pages")
class ReadsTheFirstPageOfABlock(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def table(self) -> torch.Tensor:
            return self._backend.batch.block_tables[self.units.group][0]


@mutant(caught_by="attention.group_pages")
class WritesToTheFirstPageOfABlock(PlainAttention):
    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        self.slots = {units: units.of_slots(batch.slots[units.group][0]) for units in self.slots}


@mutant(caught_by="attention.group_pages")
class TakesPagesOfABlockForNeighbours(PlainAttention):
    """Finds a layer's page that far after the block's first."""

    class layer(PlainLayer):  # noqa: N801
        def table(self) -> torch.Tensor:
            pages = self._k.shape[0] // self.units.of_page
            return (self._backend.batch.block_tables[self.units.group][0] + self.units.page) % pages


@mutant(caught_by="attention.group_block_sizes")
class DividesByTheContextsBlockSize(PlainAttention):
    class layer(PlainLayer):  # noqa: N801
        def slots(self, row: int, positions: torch.Tensor) -> torch.Tensor:
            size, table = self._backend.context.block_size, self.table()[row].long()
            return self.units.of_slots(
                table[(positions // size).clamp(max=len(table) - 1)] * size + positions % size
            )


@mutant(caught_by="attention.group_block_sizes")
class TakesPagesToBeAsLongAsABlock(PlainAttention):
    """The next page begins where the layer's part of this one ends."""

    class layer(PlainLayer):  # noqa: N801
        def slots(self, row: int, positions: torch.Tensor) -> torch.Tensor:
            size = self.block_size()
            return (
                self.table()[row, positions // size].long() * size + positions % size
            ) * self.units.of_token


@mutant(caught_by="attention.shares")
class HasACacheForEachLayer(PlainAttention):
    """A layer that shares one reads its own, which nobody writes."""

    class layer(PlainLayer):  # noqa: N801
        def bind(self, cache: LayerCache) -> None:
            shared = self.spec.shares is not None
            super().bind(
                replace(cache, memory=tuple(torch.zeros_like(memory) for memory in cache.memory))
                if shared
                else cache
            )


@mutant(caught_by="attention.shares")
class MarksWhatItHasRead(PlainAttention):
    """A layer that shares a cache counts readers in it."""

    class layer(PlainLayer):  # noqa: N801
        def attend(self, q: torch.Tensor) -> torch.Tensor:
            out = super().attend(q)
            if self.spec.shares is not None:
                self._k[0] += 1
                self._k[0].nan_to_num_()
            return out


@mutant(caught_by="attention.fixed_shapes")
class AddsInAnotherOrderInContiguousBlocks(PlainAttention):
    """Reads contiguous blocks in place, where products add in another order."""

    capabilities = replace(PLAIN, groups=True, fixed_shapes=True)

    class layer(PlainLayer):  # noqa: N801
        def attend(self, q: torch.Tensor) -> torch.Tensor:
            out = super().attend(q)
            pages = self.table()[0, :2]
            if bool((pages.diff() == 1).all()):
                out = torch.nextafter(out, torch.full_like(out, torch.inf))
            return out


@mutant(caught_by="attention.fixed_shapes_beside_others")
class AddsInAnOrderOfTheLongestRow(PlainAttention):
    """Cuts all rows as the longest one needs."""

    capabilities = replace(PLAIN, groups=True, fixed_shapes=True)

    class layer(PlainLayer):  # noqa: N801
        def attend(self, q: torch.Tensor) -> torch.Tensor:
            out = super().attend(q)
            if self._backend.batch.host_kv_lens.max() > 100:
                out = torch.nextafter(out, torch.full_like(out, torch.inf))
            return out
