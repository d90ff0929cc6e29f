"""Right managers of memory, grammars and what runs on a device, in styles that a suite
might take for wrong."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel

from dovetail.api.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionCapabilities,
    AttentionContext,
    AttentionLayer,
    LayerCache,
    LayerSpec,
)
from dovetail.api.executor import Batch, ExecutorContext, Masks, Result
from dovetail.api.grammar import Grammar, GrammarBackend, GrammarSpec, Matcher
from dovetail.api.kv_cache import (
    Allocation,
    KVCacheManager,
    KVCapabilities,
    KVContext,
    PageCounts,
    Pages,
)
from dovetail.api.model import BuildContext, ModelInputs
from dovetail.errors import DovetailError
from dovetail.request import Request
from dovetail_executors.local import LocalExecutor
from dovetail_executors.options import LocalOptions
from dovetail_grammars.llguidance_backend import LLGuidance
from dovetail_models.qwen3 import Qwen3

if TYPE_CHECKING:
    from dovetail.api.grammar import UInt32


class LazyLists(KVCacheManager):
    """Keeps the pages of freed requests as iterators over the lists that held them, and reads from
    these only when a page is needed; gives out the others by number, the last first."""

    capabilities = KVCapabilities(groups=True)

    def __init__(self, options: BaseModel, context: KVContext) -> None:
        super().__init__(options, context)
        self.given = dict[str, tuple[int, list[list[int]]]]()  # tokens, pages by group
        self.lists = deque[Iterator[int]]((iter(range(context.num_pages - 1, -1, -1)),))

    def next_page(self) -> int:
        for page in self.lists[0]:
            return page
        self.lists.popleft()
        return self.next_page()

    def held(self, request: Request) -> list[list[int]]:
        if request.id not in self.given:
            raise DovetailError(f"request {request.id!r} holds no blocks")
        return self.given[request.id][1]

    def pages_needed(
        self, request: Request, num_tokens: int, without: Sequence[Request] = ()
    ) -> int:
        _, tables = self.given.get(request.id, (0, []))
        freed = sum(map(len, chain.from_iterable(map(self.held, without))))
        more = self.context.layout.pages(num_tokens) - sum(map(len, tables))
        return max(0, more) - freed

    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        groups = self.context.layout.groups
        before, tables = self.given.get(request.id, (1, [[] for _ in groups]))
        if num_tokens < before:
            raise DovetailError(f"{request.id!r} had {before} tokens, not {num_tokens}")
        if self.pages_needed(request, num_tokens) > self.counts.empty:
            return None
        new = list[tuple[int, ...]]()
        for group, table in zip(groups, tables, strict=True):
            more = group.blocks(num_tokens) * group.pages_per_block - len(table)
            new.append(tuple(self.next_page() for _ in range(more)))
            table.extend(new[-1])
        self.given[request.id] = (num_tokens, tables)
        return Allocation(tuple(new))

    def tables(self, request: Request) -> tuple[Pages, ...]:
        return tuple(tuple(table) for table in self.held(request))

    def commit(self, request: Request, upto: int) -> None:
        self.held(request)
        if not 0 <= upto <= self.context.layout.capacity(self.given[request.id][0]):
            raise DovetailError(f"the blocks of {request.id!r} don't hold {upto} tokens")

    def uncommit(self, request: Request, upto: int) -> None:
        self.held(request)

    def free(self, request: Request) -> None:
        _, tables = self.given.pop(request.id, (0, []))
        self.lists.extend(map(iter, filter(None, tables)))

    def reset(self) -> None: ...

    @property
    def counts(self) -> PageCounts:
        held = sum(len(table) for _, tables in self.given.values() for table in tables)
        return PageCounts(empty=self.context.num_pages - held, held=held, cached=0)

    def check_integrity(self) -> None:
        empty = [list(pages) for pages in self.lists]
        self.lists = deque(map(iter, empty))
        held = (chain.from_iterable(tables) for _, tables in self.given.values())
        pages = sorted(chain(*empty, *held))
        if pages != list(range(self.context.num_pages)):
            raise DovetailError(f"pages were lost or given out twice: {pages}")


class AtFirstUse(LLGuidance):
    """Compiles a spec to reject what is wrong with it, and once more when a mask is needed."""

    def compile(self, spec: GrammarSpec) -> Grammar:
        compiles = partial(super().compile, spec)
        compiles()
        return LateGrammar(compiles)

    accept_many = GrammarBackend.accept_many
    start_fill = GrammarBackend.start_fill
    fill_many = GrammarBackend.fill_many


class LateGrammar(Grammar):
    def __init__(self, compiles: Callable[[], Grammar]) -> None:
        self.compiles = compiles

    @cached_property
    def inner(self) -> Grammar:
        return self.compiles()

    def begin(self) -> Matcher:
        return LateMatcher(self)


class LateMatcher(Matcher):
    def __init__(self, grammar: LateGrammar) -> None:
        self.grammar = grammar

    @cached_property
    def inner(self) -> Matcher:
        return self.grammar.inner.begin()

    def fill(self, words: UInt32) -> None:
        self.inner.fill(words)

    def accept(self, token: int) -> bool:
        return self.inner.accept(token)

    def rollback(self, tokens: int) -> None:
        self.inner.rollback(tokens)

    def forced(self) -> Sequence[int]:
        return tuple(self.inner.forced())

    @property
    def complete(self) -> bool:
        return self.inner.complete


class PicksAtTheEnd(Qwen3):
    """Computes the states of all tokens, and picks the wanted ones on the host."""

    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model: Any = super().build(config, context)
        forward = model.forward_tapped

        def of_all(inputs: ModelInputs, taps: Sequence[int]) -> Any:
            hidden, states = forward(replace(inputs, wanted=None), taps)
            if inputs.wanted is None:
                return hidden, states
            picked = hidden.cpu().index_select(0, inputs.wanted.cpu()).to(hidden.device)
            return picked, states if taps else picked

        model.forward_tapped = of_all
        return model  # type: ignore[no-any-return]


class Transposed(AttentionBackend):
    """Keeps K transposed in each block, and V by heads; gathers whole blocks."""

    capabilities = AttentionCapabilities(groups=True, window=True, causal=True)
    batch: AttentionBatch

    def __init__(self, options: BaseModel, context: AttentionContext) -> None:
        super().__init__(options, context)
        self.dtype: torch.dtype = getattr(torch, context.dtype)

    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        return TransposedLayer(spec, self)

    def tensor_bytes(self, spec: LayerSpec, block_size: int) -> tuple[int, ...]:
        return (block_size * spec.kv_heads * spec.head_size * self.dtype.itemsize,) * 2

    def prepare(self, max_rows: int, max_tokens: int, max_len: int) -> None: ...

    def plan(self, batch: AttentionBatch) -> None:
        self.batch = batch


class TransposedLayer(AttentionLayer):
    def __init__(self, spec: LayerSpec, backend: Transposed) -> None:
        self.spec = spec
        self.backend = backend

    def bind(self, cache: LayerCache) -> None:
        self.cache = cache
        self.place = (cache.group, cache.page)
        self.block_size = cache.block_size
        sizes = (self.spec.kv_heads, self.spec.head_size, cache.block_size)
        k, v = (of_pages.view(self.backend.dtype) for of_pages in cache.memory)
        # [pages, kv_heads, head_size, block_size] and [pages, kv_heads, block_size, head_size]
        self.k = k[:, : math.prod(sizes)].unflatten(1, sizes)
        self.v = v[:, : math.prod(sizes)].unflatten(1, (sizes[0], sizes[2], sizes[1]))

    def write(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        group, page = self.place
        slots = self.backend.batch.slots[group][page]
        pages = slots // self.block_size
        offsets = slots % self.block_size
        self.k[pages, :, :, offsets] = k
        if v is not None:
            self.v[pages, :, offsets] = v

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        batch = self.backend.batch
        group, page = self.place
        tables = batch.block_tables[group][page].long()
        rows = q[: batch.num_tokens].split(batch.host_query_lens.tolist())
        lengths = batch.host_kv_lens.tolist()
        outs = [self._attend_row(*row) for row in zip(rows, lengths, tables, strict=False)]
        return torch.cat([*outs, torch.zeros_like(q[batch.num_tokens :])])

    def _attend_row(self, q: torch.Tensor, length: int, table: torch.Tensor) -> torch.Tensor:
        window = self.spec.window or length
        begin = max(0, length - len(q) - window + 1) // self.block_size
        pages = table[begin : -(-length // self.block_size)]
        first = begin * self.block_size
        k = self.k[pages].permute(1, 0, 3, 2).flatten(1, 2)[:, : length - first]
        v = self.v[pages].transpose(0, 1).flatten(1, 2)[:, : length - first]
        at = torch.arange(length - len(q), length, device=q.device)[:, None]
        seen = torch.arange(first, length, device=q.device)
        visible = (seen <= at) & (seen > at - window)
        # what no query sees may be anything, NaN too
        v = v.masked_fill(~visible.any(0)[:, None], 0)
        k = k.masked_fill(~visible.any(0)[:, None], 0)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k[None],
            v[None],
            attn_mask=visible,
            scale=self.spec.scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)


class NumbersAsHandles(LocalExecutor):
    """Its handles are numbers, the first of them 0; its results are views and read-only maps."""

    def __init__(self, options: LocalOptions, context: ExecutorContext) -> None:
        super().__init__(options, context)
        self.numbers = count()
        self.steps = dict[int, Any]()

    def submit(self, batch: Batch) -> Any:
        number = next(self.numbers)
        self.steps[number] = super().submit(batch)
        return number

    def sample(self, handle: Any, masks: Masks) -> None:
        super().sample(self.steps[handle], masks)

    def collect(self, handle: Any) -> Result:
        result = super().collect(self.steps.pop(handle))
        ids = np.repeat(result.token_ids, 2)[::2]
        return replace(result, token_ids=ids, failed=MappingProxyType(dict(result.failed)))
