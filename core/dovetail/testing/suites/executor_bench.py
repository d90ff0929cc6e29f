"""Minimal core that drives an executor for checks: assigns rows and blocks, sends changes, and
collects results."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dovetail.api.executor import (
    AdapterLoad,
    AdapterRows,
    Batch,
    Capacity,
    Drafts,
    Executor,
    Masks,
    NewRow,
    PoolingRows,
    Result,
    RowChanges,
    RowPooling,
)
from dovetail.api.kv_cache import PageCopy
from dovetail.api.kv_transfers import KVTransfers
from dovetail.api.sampler import RowSampling
from dovetail.testing.checks import fail, require

IDS = 90  # prompts are of token ids below this, or below the vocabulary's size


@dataclass
class BenchRequest:
    """A request in its row."""

    name: str
    row: int
    tokens: list[int]  # known to this core: prompt, and what was collected
    prompt_len: int
    computed: int
    blocks: list[int]  # of `Bench.block_size` tokens
    sampling: RowSampling
    known: int  # to the executor: those in flight too
    pooling: RowPooling | None = None  # it pools, and yields no token
    adapter: int = 0  # slot


@dataclass
class Sent:
    """A step in flight."""

    batch: Batch
    handle: Any
    requests: list[BenchRequest]


@dataclass
class Bench:
    """`tokens[name]`: generated tokens of a request, in order. Any error of a valid call fails the
    check.

    A block here is of `block_size` tokens, a whole number of blocks in every cache group: its pages
    follow each other, group by group."""

    executor: Executor
    capacity: Capacity
    tokens: dict[str, list[int]] = field(default_factory=dict)
    requests: dict[str, BenchRequest] = field(default_factory=dict)
    sent: deque[Sent] = field(default_factory=deque)
    step: int = -1
    frames: Any = None  # of the checks of transfers

    def __post_init__(self) -> None:
        self._transfers: list[KVTransfers | None] = []  # one, once asked for
        self._free_blocks = list(range(self.num_blocks))
        self._added: list[BenchRequest] = []
        self._changed: list[tuple[BenchRequest, int]] = []  # with the tokens kept
        self._removed: list[int] = []
        self._appended: list[tuple[int, int]] = []
        self._loads: list[AdapterLoad] = []

    def clear(self) -> None:
        """Leave all requests, for a check that uses the same executor. Their rows are removed in
        the next batch. Raises `CheckFailed` if a step wasn't collected."""
        require(not self.sent, f"{len(self.sent)} steps weren't collected")
        unsent = [request.row for request in self._added]
        rows = [request.row for request in self.requests.values()]
        self._removed += [row for row in rows if row not in unsent]
        self._added = []
        self._changed = []
        self._appended = []
        self._loads = []
        self.requests = {}
        self.tokens = {}
        self._free_blocks = list(range(self.num_blocks))

    def transfers(self) -> KVTransfers:
        """Return the executor's transfers. Fails if it has none."""
        found = self.own_transfers()
        if found is None:
            fail("transfers() returned None, and it hadn't for another executor")
        return found

    def own_transfers(self) -> KVTransfers | None:
        """Return the executor's transfers, which are asked for once; None if it has none."""
        if not self._transfers:
            self._transfers.append(self.executor.transfers())
        return self._transfers[0]

    # What a check asks for

    def prompt(self, length: int, variant: int = 0) -> list[int]:
        ids = min(IDS, self.capacity.vocab_size)
        return [(7 * position + position // 5 + 13 * variant) % ids for position in range(length)]

    def add(
        self,
        name: str,
        tokens: Sequence[int],
        *,
        row: int | None = None,
        prompt_len: int | None = None,
        computed: int = 0,
        blocks: Sequence[int] | None = None,
        room: int = 8,
        pooling: RowPooling | None = None,
        adapter: int = 0,
        **sampling: Any,
    ) -> BenchRequest:
        """Start a request in the next batch, with blocks for `room` more tokens. Its seed is a
        function of its name."""
        if row is None:
            row = next(
                row
                for row in range(1000)
                if row not in [request.row for request in self.requests.values()]
            )
        if blocks is None:
            blocks = self.take_blocks(-(-(len(tokens) + room) // self.block_size))
        params = RowSampling(**{"temperature": 0.0, "seed": zlib.crc32(name.encode()), **sampling})
        request = BenchRequest(
            name,
            row,
            list(tokens),
            prompt_len or len(tokens),
            computed,
            list(blocks),
            params,
            len(tokens),
            pooling,
            adapter,
        )
        self.requests[name] = request
        self.tokens.setdefault(name, [])
        self._added.append(request)
        return request

    def remove(self, *names: str) -> None:
        """Free the rows and blocks of these requests, which may be reused at once."""
        for name in names:
            request = self.requests.pop(name)
            self._removed.append(request.row)
            self._free_blocks += [
                block for block in request.blocks if block not in self._free_blocks
            ]

    def change(
        self,
        name: str,
        known: int,
        computed: int,
        token_ids: Sequence[int] = (),
        **sampling: Any,
    ) -> None:
        """Let the row of a request keep its first `known` tokens in the next batch, followed by
        `token_ids`, and sample by these parameters."""
        request = self.requests[name]
        request.tokens[known:] = token_ids
        request.known = known + len(token_ids)
        request.computed = computed
        request.sampling = RowSampling(
            **{"temperature": 0.0, "seed": request.sampling.seed, **sampling}
        )
        self._changed.append((request, known))

    def load(self, adapter: AdapterLoad) -> None:
        """Have the next batch write an adapter."""
        self._loads.append(adapter)

    def take_blocks(self, count: int) -> list[int]:
        require(
            count <= len(self._free_blocks),
            f"this check needs a pool of {count - len(self._free_blocks)} blocks more: give the "
            f"executor more",
        )
        taken = self._free_blocks[-1 : -1 - count : -1]  # not in the order of their ids
        del self._free_blocks[len(self._free_blocks) - count :]
        return taken

    def grow(self, names: Iterable[str]) -> None:
        """Append one block to each in the next batch."""
        for name in names:
            (block,) = self.take_blocks(1)
            self.requests[name].blocks.append(block)
            self._appended.append((self.requests[name].row, block))

    def submit(
        self,
        counts: Mapping[str, int],
        copies: Sequence[PageCopy] = (),
        shared: int = 0,
        *,
        late: bool = False,
        drafts: Mapping[str, Sequence[int]] | None = None,
    ) -> Batch:
        """Submit a step with the given number of tokens of each, and its drafts, in this order.
        Requests that reach their last known token sample. `shared`: number of common leading
        blocks. A `late` step must be sampled (`sample`) before it is collected."""
        batch = self.build(counts, copies, shared, late=late, drafts=drafts)
        requests = [self.requests[name] for name in counts]
        self.sent.append(Sent(batch, self._call("submit", batch), requests))
        for request, count, yields_token in zip(
            requests, counts.values(), batch.yields_token.tolist(), strict=True
        ):
            if drafts is None:  # otherwise `collect` shows how many
                request.computed += count
                request.known += yields_token
        return batch

    def sample(
        self, allowed: Mapping[str | tuple[str, int], Sequence[int]], *, own_memory: bool = True
    ) -> None:
        """Sample the oldest, late step: each request named in `allowed`, or its line after the
        given number of drafts, samples one of these ids. The masks are in the executor's own
        memory, or, although that was requested, elsewhere; the executor's memory then allows
        everything."""
        sent = self.sent[0]
        lines = [
            (request.name, ahead)
            for request, count in zip(sent.requests, sent.batch.num_lines.tolist(), strict=True)
            for ahead in range(count)
        ]
        of_lines = {(key, 0) if isinstance(key, str) else key: ids for key, ids in allowed.items()}
        indices = [index for index, line in enumerate(lines) if line in of_lines]
        width = -(-self.capacity.vocab_size // 32)
        words = self.executor.mask_words(len(indices), width)
        require(
            words.shape == (len(indices), width),
            f"mask_words({len(indices)}, {width}) has the shape {words.shape}",
        )
        require(
            words.dtype == np.uint32, f"mask_words has the dtype {words.dtype}, expected uint32"
        )
        if not own_memory:
            words[:] = ~np.uint32(0)
            words = np.empty_like(words)
        words[:] = 0
        for line, index in enumerate(indices):
            for token in of_lines[lines[index]]:
                words[line, token // 32] |= np.uint32(1 << token % 32)
        self._call("sample", sent.handle, Masks(np.array(indices, np.int32), words))

    def collect(self, broken: str = "") -> Result:
        """Collect the oldest step. `broken`: the request with a row that may fail."""
        sent = self.sent.popleft()
        result: Result = self._call("collect", sent.handle)
        require(
            result.step == sent.batch.step,
            f"collect returned step {result.step} where {sent.batch.step} was the oldest "
            f"uncollected",
        )
        may_fail = {index for index, request in enumerate(sent.requests) if request.name == broken}
        told = (
            f"of step {result.step}, {may_fail or 'no'} places in the batch may fail, and "
            f"Result.failed is {result.failed}"
        )
        require(
            result.failed.keys() <= may_fail and all(map(str.strip, result.failed.values())), told
        )
        ids = result.token_ids
        count = len(sent.batch.rows)
        if sent.batch.drafts is not None:
            count = self._collect_drafts(sent, sent.batch.drafts, result.counts)
        else:
            require(
                result.counts is None, f"a step without drafts has Result.counts {result.counts!r}"
            )
        shaped = (
            isinstance(ids, np.ndarray)
            and ids.shape == (count,)
            and np.issubdtype(ids.dtype, np.integer)
        )
        require(
            shaped,
            f"token_ids of a step of {len(sent.batch.rows)} rows are {ids!r}; expected [{count}] "
            f"integers",
        )
        counts = [1] * count if result.counts is None else result.counts.tolist()
        tokens = ids.tolist()
        for request, own, yields_token in zip(
            sent.requests, counts, sent.batch.yields_token.tolist(), strict=True
        ):
            if yields_token:
                self.tokens[request.name] += tokens[:own]
                request.tokens += tokens[:own]
            del tokens[:own]
        return result

    def _collect_drafts(self, sent: Sent, drafts: Drafts, counts: Any) -> int:
        """Check `Result.counts` of a step with drafts, and count what its rows got. Returns the
        number of tokens."""
        told = (
            f"of a step whose rows have {sent.batch.num_lines.tolist()} lines, Result.counts is "
            f"{counts!r}"
        )
        require(
            isinstance(counts, np.ndarray)
            and counts.dtype == np.int32
            and counts.shape == sent.batch.rows.shape,
            f"{told}; expected int32 [b]",
        )
        possible = (counts <= sent.batch.num_lines) & ((counts >= 1) | ~sent.batch.yields_token)
        require(
            bool(possible.all()), f"{told}; expected 1 to that many, and 0 for rows that yield none"
        )
        for request, count, drafted, own in zip(
            sent.requests,
            sent.batch.num_tokens.tolist(),
            drafts.counts.tolist(),
            counts.tolist(),
            strict=True,
        ):
            request.known += own
            request.computed += own if drafted else count
        return int(counts.sum())

    def check(self, drafts: Mapping[str, Sequence[int]], **others: int) -> Result:
        """Run a step in which each request named in `drafts` checks its drafts, possibly none, and
        each of `others` computes the given number of tokens."""
        self.submit({**dict.fromkeys(drafts, 1), **others}, drafts=drafts)
        return self.collect()

    def run(
        self, counts: Mapping[str, int], copies: Sequence[PageCopy] = (), shared: int = 0
    ) -> Result:
        self.submit(counts, copies, shared)
        return self.collect()

    def prefill(self, *names: str) -> Result:
        """All known tokens that aren't computed."""
        return self.run(
            {name: self.requests[name].known - self.requests[name].computed for name in names}
        )

    def decode(self, *names: str, steps: int = 1) -> None:
        for _ in range(steps):
            self.run(dict.fromkeys(names, 1))

    def alone(self, name: str, tokens: Sequence[int], count: int, **fields: Any) -> list[int]:
        """Return a request's tokens when it runs alone, with its prompt computed in one step: the
        reference for all other ways to run it."""
        self.add(name, tokens, row=0, **fields)
        self.prefill(name)
        self.decode(name, steps=count - 1)
        generated = self.tokens.pop(name)
        self.remove(name)
        return generated

    @property
    def block_size(self) -> int:
        return self.capacity.layout.hit_tokens

    @property
    def num_blocks(self) -> int:
        return self.capacity.num_pages // self.capacity.layout.pages(self.block_size)

    def pages(self, blocks: Sequence[int]) -> tuple[list[int], ...]:
        """Return the pages of `blocks`, by group; of a recurrent one, those of the first block."""
        groups = self.capacity.layout.groups
        counts = [group.blocks(self.block_size) * group.pages_per_block for group in groups]
        starts = [sum(counts[:index]) for index in range(len(counts))]
        return tuple(
            [
                block * sum(counts) + start + page
                for block in (blocks[:1] if group.recurrent else blocks)
                for page in range(count)
            ]
            for group, start, count in zip(groups, starts, counts, strict=True)
        )

    def copies(self, source: int, target: int) -> list[PageCopy]:
        """Return the copies of one block's pages."""
        return [
            PageCopy(src, dst)
            for pair in zip(self.pages([source]), self.pages([target]), strict=True)
            for src, dst in zip(*pair, strict=True)
        ]

    # How it is sent

    def build(
        self,
        counts: Mapping[str, int],
        copies: Sequence[PageCopy] = (),
        shared: int = 0,
        *,
        late: bool = False,
        drafts: Mapping[str, Sequence[int]] | None = None,
    ) -> Batch:
        self.step += 1
        own = [list((drafts or {}).get(name, ())) for name in counts]
        requests = [self.requests[name] for name in counts]
        appended = self._appended
        self._appended = []
        added = self._added
        self._added = []
        removed = self._removed
        self._removed = []
        loads = self._loads
        self._loads = []
        changed = self._changed
        self._changed = []
        ends = [request.computed + counts[request.name] == request.known for request in requests]
        pooled = [
            index
            for index, (request, at_end) in enumerate(zip(requests, ends, strict=True))
            if at_end and request.pooling is not None
        ]
        return Batch(
            step=self.step,
            removed=np.array(sorted(set(removed)), np.int32),
            added=tuple(_new_row(request, self.pages(request.blocks)) for request in added),
            new_pages=np.array(
                [
                    (group, row, page)
                    for row, block in appended
                    for group, pages in enumerate(self.pages([block]))
                    for page in pages
                ],
                np.int32,
            ).reshape(-1, 3),
            copies=tuple(copies),
            rows=np.array([request.row for request in requests], np.int32),
            num_tokens=np.array(
                [count + len(ids) for count, ids in zip(counts.values(), own, strict=True)],
                np.int32,
            ),
            yields_token=np.array(
                [
                    at_end and request.pooling is None
                    for request, at_end in zip(requests, ends, strict=True)
                ],
                np.bool_,
            ),
            shared_prefix_blocks=shared
            * self.block_size
            // self.capacity.layout.groups[0].block_tokens,
            late=late,
            parts=_parts(added, loads, pooled),
            changes=_changes(changed) if changed else None,
            drafts=None
            if drafts is None
            else Drafts(
                np.array([*map(len, own)], np.int32),
                np.array([id for ids in own for id in ids], np.int32),
            ),
        )

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self.executor, method)(*arguments)
        except Exception as error:
            fail(f"{method} raised {type(error).__name__} for a lawful step: {error}", error)


def _changes(changed: Sequence[tuple[BenchRequest, int]]) -> RowChanges:
    after = [request.tokens[known:] for request, known in changed]
    return RowChanges(
        rows=np.array([request.row for request, _ in changed], np.int32),
        known=np.array([known for _, known in changed], np.int32),
        counts=np.array([*map(len, after)], np.int32),
        token_ids=np.array([token for ids in after for token in ids], np.int32),
        computed=np.array([request.computed for request, _ in changed], np.int32),
        samplings=tuple(request.sampling for request, _ in changed),
    )


def _new_row(request: BenchRequest, pages: Sequence[Sequence[int]]) -> NewRow:
    return NewRow(
        row=request.row,
        request_id=request.name,
        token_ids=np.array(request.tokens, np.int32),
        prompt_len=request.prompt_len,
        computed=request.computed,
        pages=tuple(np.array(own, np.int32) for own in pages),
        sampling=None if request.pooling is not None else request.sampling,
    )


def _parts(
    added: Sequence[BenchRequest], loads: Sequence[AdapterLoad], pooled: Sequence[int]
) -> tuple[Any, ...]:
    """Return the parts of a batch that starts these requests, and in which these results are
    due."""
    parts: list[Any] = []
    pooling = {request.row: request.pooling for request in added if request.pooling is not None}
    if pooling or pooled:
        parts.append(PoolingRows(pooling, np.array(pooled, np.int32)))
    slots = {request.row: request.adapter for request in added if request.adapter}
    if slots or loads:
        parts.append(AdapterRows(tuple(loads), slots))
    return tuple(parts)
