"""KV-cache manager: decides which request owns each page of the KV cache, and which blocks can be
shared.

The engine's step calls it; it never touches the K and V tensors. Layers that keep the same tokens
form a *cache group*: all layers with full attention are one, all layers with the same sliding
window another. A request has one block table for each group. The blocks of all groups come from one
pool of equal pages; a block of a group is `pages_per_block` of them, neighbours or not. This module
doesn't need torch.

Recurrent layers keep a state instead of K and V. They form one more group, the last. A request has
exactly one block of it, its *live state*, which each step replaces by the state after the step's
tokens. A *checkpoint* is a copy of it after some earlier tokens: a block that nobody holds, found
like a cached prefix. A hit copies a checkpoint to the live state of the request.

      token positions         0 ... 15 | 16 ... 31 | 32 ... 47 | 48 ... 56        (blocks of 16 tokens, 57 tokens)
      full                  [    7     ,     3     ,    12     ,    5     ]        allocate() only ever appends to it
      window of 20, two     [  -   -   ,   -   -   ,   9   1   ,  14  20  ]        blocks that no query will see again are released: "-"
        pages a block
      recurrent             [ 31 8 22 40 ]                                        one block, however many tokens
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from dovetail.errors import DovetailError
from dovetail.request import Request


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep K and V of the same tokens, or layers that keep a state.

    `window`: tokens that a query sees, itself included; None: all of them. `block_tokens`: tokens
    of a block; groups may differ in it. `recurrent`: a block is a state; checkpoints exist after
    multiples of `block_tokens` tokens.
    """

    layers: tuple[int, ...]
    block_tokens: int
    window: int | None = None
    pages_per_block: int = 1
    recurrent: bool = False

    @property
    def name(self) -> str:
        """Short name, unique in a layout: "full", "window 1024", or "states"."""
        if self.recurrent:
            return "states"
        return "full" if self.window is None else f"window {self.window}"

    def blocks(self, num_tokens: int) -> int:
        """Return the number of blocks in a table of `num_tokens` tokens."""
        return min(num_tokens, 1) if self.recurrent else -(-num_tokens // self.block_tokens)

    def first_visible_block(self, computed: int) -> int:
        """Return the index of the first block that queries after the first `computed` tokens see;
        earlier ones can be released."""
        return 0 if self.window is None else max(0, computed - self.window + 1) // self.block_tokens


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the page pool. Groups are ordered by window, the full one first if there is one; the
    recurrent one, if there is one, is last.

    `reads_next`: some layers' K and V of a token are also made of the token after it (a draft
    head's). So a block serves only texts that go on with the same token; for others, drafts are
    worse."""

    groups: tuple[CacheGroup, ...]
    page_bytes: int  # of a page, in the caches of all layers that use it
    dtype: str  # "float32", "bfloat16", …
    reads_next: bool = False

    @property
    def block_size(self) -> int:
        """Tokens of the smallest block."""
        return min((group.block_tokens for group in self.groups), default=1)

    @property
    def hit_tokens(self) -> int:
        """The smallest number of tokens that is a whole number of blocks in every group; prefixes
        are found in multiples of it."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @property
    def recurrent(self) -> bool:
        """True if the last group is recurrent."""
        return bool(self.groups) and self.groups[-1].recurrent

    @property
    def state_pages(self) -> int:
        """Number of pages of one state; 0 without recurrent layers."""
        return self.groups[-1].pages_per_block if self.recurrent else 0

    @property
    def has_windows(self) -> bool:
        """True if blocks of some group leave a sliding window, so that `trim` can release them."""
        return any(group.window is not None for group in self.groups)

    def next_release(self, computed: int) -> int:
        """Return the number of computed tokens, more than `computed`, at which the next block
        leaves its group's window. The layout has windows."""
        windows = [
            (group.window, group.block_tokens, group.first_visible_block(computed))
            for group in self.groups
            if group.window is not None
        ]
        return min((first + 1) * tokens + window - 1 for window, tokens, first in windows)

    def capacity(self, num_tokens: int) -> int:
        """Return how many tokens fit into the blocks that `allocate(request, num_tokens)` has
        provided."""
        paged = [
            group.blocks(num_tokens) * group.block_tokens
            for group in self.groups
            if not group.recurrent
        ]
        return min(paged, default=num_tokens)

    def pages(self, num_tokens: int) -> int:
        """Return the number of pages of a request with `num_tokens` tokens that has released
        nothing."""
        return sum(group.blocks(num_tokens) * group.pages_per_block for group in self.groups)

    def visible_pages(self, num_tokens: int) -> int:
        """Return the number of pages of a request with `num_tokens` tokens, the last of them about
        to be computed, that has released all blocks which no query sees any more."""
        computed = max(0, num_tokens - 1)
        return sum(
            (group.blocks(num_tokens) - group.first_visible_block(computed)) * group.pages_per_block
            for group in self.groups
        )

    def most_pages(self, num_tokens: int, chunk: int) -> int:
        """Return the most pages that a request of `num_tokens` tokens holds at a time if it
        computes at most `chunk` of them in a step."""
        total = 0
        for group in self.groups:
            blocks = group.blocks(num_tokens)
            if group.window is not None:
                blocks = min(blocks, group.blocks(group.window - 1 + chunk) + 1)
            total += blocks * group.pages_per_block
        return total


@dataclass(frozen=True, slots=True)
class KVContext:
    """Constants passed to a manager's constructor."""

    layout: KVLayout
    num_pages: int
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCapabilities:
    """Features that a manager supports; later versions may add some, which are False by default.

    `reuse`: `lookup` may find tokens that another request
    computed. `fork`: samples share a prompt's blocks. `trim`: it releases blocks that have left the
    sliding window. `groups`: it serves layouts of several groups, or of blocks of several pages;
    otherwise such a model is refused at load. `states`: it serves layouts with a recurrent group;
    otherwise those are refused, too. `media`: it tells prompts with different `Request.media`
    apart; otherwise their digests are in `cache_keys`, so that it shares less. `place`: it
    implements `place_checkpoint`, without which states aren't kept beyond the device."""

    reuse: bool = False
    fork: bool = False
    trim: bool = False
    groups: bool = False
    states: bool = False
    media: bool = False
    place: bool = False


Pages = tuple[int, ...]  # page ids, block after block: `pages_per_block` of each


@dataclass(frozen=True, slots=True)
class Allocation:
    """Result of `allocate`. `pages`, one entry per group, are appended to the request's block
    tables; in the first call, those of the `cached` tokens come first. For a block that the request
    doesn't hold, since no query will see it, the entry holds `HOLE` for each page."""

    pages: tuple[Pages, ...]
    # leading tokens whose K and V exist already; 0 except in the first call for a request
    cached: int = 0


HOLE = -1  # in place of a page that isn't held, since it lies before every query's window


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy of page `src` to page `dst`, in every layer, to be run before the next batch."""

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Copy of the live state of `request` after its first `tokens` tokens, which the next batch
    computes, to `pages`."""

    request: Request
    tokens: int
    pages: Pages


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Number of pages in each state; they always add up: empty + held + cached = all."""

    empty: int  # in no table, without K and V that a lookup may find
    held: int  # in some request's block table, or of a checkpoint that the next batch writes
    # in no table, with K and V or a checkpoint that a lookup may find: taken when empty ones run
    # out
    cached: int
    held_by_group: tuple[int, ...] = ()  # `held` by group; empty: not told apart


class KVCacheManager(ABC):
    """Owner of the page pool. One thread at a time calls it. Misuse (an unknown request, fewer
    tokens than before) raises `DovetailError`. Requests are only read; a manager may keep them, and
    values by their ids, until `free`; after that an id may be reused. What it returns belongs to
    the caller: it doesn't change afterwards.

    The request's tokens are `prompt_token_ids` followed by `output_token_ids`. "Holds blocks" below
    means: allocated or forked, not yet freed.
    """

    capabilities = KVCapabilities()
    options: BaseModel

    def __init__(self, options: BaseModel, context: KVContext) -> None:
        self.options = options
        self.context = context

    def lookup(self, request: Request) -> int:
        """Return the number of leading tokens of `request` whose K and V the pool holds, as far as
        later tokens will see them: a multiple of every group's block, such that a full group has
        all blocks before it, a group with a window those that hold any of the last `window` - 1
        tokens, and a recurrent group a checkpoint after exactly these tokens. Fewer than the
        request's known tokens (at least one is computed), and 0 if it asks for prompt logprobs.
        Blocks are shared only between equal `request.cache_keys`. Changes nothing. By default 0:
        override it with the capability `reuse`."""
        return 0

    @abstractmethod
    def pages_needed(
        self, request: Request, num_tokens: int, without: Sequence[Request] = ()
    ) -> int:
        """Return the net number of available pages that freeing the requests `without` and then
        `allocate(request, num_tokens)` would take: negative if freeing gives back more than
        allocating takes. It fits if this is at most `available_pages`. Available are empty pages
        and cached ones that no request holds; a prefix hit on the latter counts. Changes
        nothing."""

    @abstractmethod
    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        """Extend the request's tables to exactly as many blocks as `num_tokens` tokens in total
        need; `num_tokens` never shrinks. The first call for a request also acquires the prefix that
        `lookup` finds; a checkpoint isn't acquired but copied to the live state (see
        `take_copies`). Returns None, with nothing changed, if there are too few pages."""

    @abstractmethod
    def tables(self, request: Request) -> tuple[Pages, ...]:
        """Return the block tables of `request`, one per group: what `allocate` and `fork` have
        returned, appended, of which some blocks may have been released since. O(blocks)."""

    @abstractmethod
    def commit(self, request: Request, upto: int) -> None:
        """Let `lookup` find the full blocks of the first `upto` tokens from now on. The steps
        submitted so far and the one being planned write their K and V (readers follow in stream
        order, or run in the same batch, which writes before it attends).

        The core calls it for prompt tokens when it grants them, so that a request planned in the
        same step can share them; for generated tokens when their ids arrive; and when a request
        ends. The same tokens may be committed again.

        Here a manager may also decide on a checkpoint, of the state after some of the tokens that
        this call commits first: see `take_checkpoints`. Useful are those before the end of the
        tokens known at the first `allocate`, and where the prompt parts from others in the cache.
        Only calls for tokens known at the first `allocate` may write one, since the step that
        computes later tokens has been submitted by then.
        """

    @abstractmethod
    def uncommit(self, request: Request, upto: int) -> None:
        """Undo the commit of the tokens beyond the first `upto`: the grant was revoked before the
        step was submitted, or the request failed, so they won't be written. Blocks that other
        requests computed stay. Checkpoints of this request after more than `upto` tokens are
        dropped."""

    def distrust(self, request: Request) -> None:
        """Let no later request find K and V of `request`'s tokens, whoever computed them: a row
        that has read them failed, and so would others. `request` needn't hold blocks; requests
        that hold them keep them. By default does nothing: then they are found until they are
        evicted."""

    def fork(self, parent: Request, child: Request, num_tokens: int) -> Allocation | None:
        """Give `child`, which holds no blocks, the K and V of the first `num_tokens` tokens of
        `parent`, which holds them as far as later tokens see them: full blocks are shared, a
        partial one is copied (see `take_copies`). Returns the child's tables, with `cached` =
        num_tokens; None, with nothing changed, if there are no pages for the copies. Not called for
        layouts with a recurrent group: a live state is past `num_tokens` already, so samples of a
        prompt start from its checkpoint, as any hit does. Not called, and raises by default,
        without the capability `fork`."""
        raise DovetailError(f"KV-cache manager {type(self).__name__} can't fork requests")

    def take_copies(self) -> Sequence[PageCopy]:
        """Return the copies that forks and hits on checkpoints requested since the last call, in
        order; the next batch runs them first. By default there are none."""
        return ()

    def take_checkpoints(self) -> Sequence[Checkpoint]:
        """Return the checkpoints that commits requested since the last call, of which `uncommit`,
        `free` and `reset` have dropped none: at most one per request. The next batch writes them,
        and is submitted now, so `lookup` finds them from now on. Their pages count as held until
        this call, and as cached afterwards. Called after `take_copies`, once for each batch."""
        return ()

    def place_checkpoint(self, request: Request, tokens: int) -> Pages | None:
        """Keep a checkpoint of the state after the first `tokens` tokens of `request`, which are
        committed, a multiple of every group's block. Its state was computed before, and kept
        elsewhere: the core writes it to the pages that this returns before the next batch reads or
        writes any page. `lookup` finds it from now on. Returns None, with nothing changed, if there
        is no page for it, or it is there already. Not called, and raises by default, without the
        capability `place`."""
        raise DovetailError(f"KV-cache manager {type(self).__name__} can't place checkpoints")

    @abstractmethod
    def free(self, request: Request) -> None:
        """Release all blocks of `request`; its committed blocks can be found until their space is
        needed. The core calls it on preemption and whenever a request ends, even if it holds no
        blocks (then nothing is released): drop other per-request state, such as cached lookups,
        here too."""

    def trim(self, request: Request, computed: int) -> None:
        """Release, in each group with a window, the blocks that queries after the first `computed`
        tokens won't see (`CacheGroup.first_visible_block`). Tables keep their length. Called if the
        layout has windows, also on managers without the capability `trim`, which release nothing,
        as this default does."""

    @abstractmethod
    def reset(self) -> None:
        """Drop all K and V, because the weights have changed: cached pages become empty, and
        `lookup` finds neither the blocks held now nor those that their holders commit later on top
        of them."""

    @property
    @abstractmethod
    def counts(self) -> PageCounts:
        """Return the number of pages in each state. Called in each step, so it should be O(1)."""

    def check_integrity(self) -> None:
        """Raise `DovetailError` that names the fault if the manager's state is inconsistent. For
        tests; may be slow. By default it checks nothing."""

    @property
    def available_pages(self) -> int:
        """Number of pages that an allocation can take: empty and cached."""
        counts = self.counts
        return counts.empty + counts.cached
