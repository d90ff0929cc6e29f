"""KV-cache manager: decides which request owns each block of the paged KV cache, and which blocks can be shared.

The engine's step calls it; it never touches the K and V tensors. A block id refers to the same block in the cache of every layer, so a request
has one block table for all layers. This module doesn't need torch.

      token positions    0 ... 15 | 16 ... 31 | 32 ... 40 |           (block_size 16, 41 tokens)
      block table        [   7    ,     3     ,    12     ]           allocate() only ever appends to it
                           full, cached, shared   partial, own
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from dovetail.request import Request


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that keep K and V of the same tokens. `window`: sliding window in tokens; None: unlimited."""

    layers: tuple[int, ...]
    window: int | None
    bytes_per_block: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the block pool."""

    groups: tuple[KVGroup, ...]
    block_size: int  # tokens, at least 1
    dtype: str  # "float32", "bfloat16", …

    @property
    def bytes_per_block(self) -> int:
        return sum(group.bytes_per_block for group in self.groups)

    @property
    def window(self) -> int | None:
        """The largest window of any layer, in tokens; None if a layer has none, so that no block can be trimmed."""
        windows = [group.window for group in self.groups]
        return None if not windows or None in windows else max(w for w in windows if w is not None)


@dataclass(frozen=True, slots=True)
class KVContext:
    """Constants passed to a manager's constructor."""

    layout: KVLayout
    num_blocks: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class KVCapabilities:
    """Features that a manager supports. `reuse`: `lookup` may find tokens that another request computed. `fork`: samples share a prompt's blocks.
    `trim`: it frees blocks that have left the sliding window."""

    reuse: bool = True
    fork: bool = True
    trim: bool = True


@dataclass(frozen=True, slots=True)
class Allocation:
    """Result of `allocate`. `blocks` are appended to the request's block table; in the first call, the blocks of the `cached` tokens come first."""

    blocks: tuple[int, ...]
    cached: int = 0  # leading tokens whose K and V exist already; 0 except in the first call for a request


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy of the K and V of block `src` to block `dst`, in every layer, to be run before the next batch."""

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Number of blocks in each state; they always add up: free + held + cached = all."""

    free: int  # in no table, without K and V that a lookup may find
    held: int  # in some request's block table
    cached: int  # in no table, with K and V that a lookup may find: taken when free ones run out


class KVCacheManager(ABC):
    """Owner of the block pool. One thread at a time calls it. Misuse (an unknown request, fewer tokens than before) raises `DovetailError`.
    Requests are only read; a manager may keep them, and values by their ids, until `free`; after that an id may be reused. What it returns belongs
    to the caller: it doesn't change afterwards.

    The request's tokens are `prompt_token_ids` followed by `output_token_ids`. "Holds blocks" below means: allocated or forked, not yet freed.
    """

    capabilities = KVCapabilities()
    options: BaseModel

    def __init__(self, options: BaseModel, context: KVContext) -> None:
        self.options, self.context = options, context

    @abstractmethod
    def lookup(self, request: Request) -> int:
        """Return the number of leading tokens of `request` that have their K and V in the pool: a multiple of the block size, fewer than its known
        tokens (at least one is computed), and 0 if the request asks for prompt logprobs. Blocks are shared only between equal
        `request.cache_keys`. Changes nothing."""

    @abstractmethod
    def blocks_needed(self, request: Request, num_tokens: int, without: Sequence[Request] = ()) -> int:
        """Return the net number of available blocks that freeing the requests `without` and then `allocate(request, num_tokens)` would take: negative
        if freeing gives back more than allocating takes. It fits if this is at most `available_blocks`. Available are empty blocks and cached ones
        that no request holds; a prefix hit on the latter counts. Changes nothing."""

    @abstractmethod
    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        """Extend the request's table to exactly as many blocks as `num_tokens` tokens in total need; `num_tokens` never shrinks. The first call for a
        request also acquires the prefix that `lookup` finds. Returns None, with nothing changed, if there are too few blocks."""

    @abstractmethod
    def commit(self, request: Request, upto: int) -> None:
        """Let `lookup` find the full blocks of the first `upto` tokens from now on. The steps submitted so far and the one being planned write their
        K and V (readers follow in stream order, or run in the same batch, which writes before it attends).

        The core calls it for prompt tokens when it grants them, so that a request planned in the same step can share them; for generated tokens when
        their ids arrive; and when a request ends. The same tokens may be committed again.
        """

    @abstractmethod
    def uncommit(self, request: Request, upto: int) -> None:
        """Undo the commit of the tokens beyond the first `upto`: the grant was revoked before the step was submitted, or the request failed, so they
        won't be written. Blocks that other requests computed stay."""

    @abstractmethod
    def fork(self, parent: Request, child: Request, num_tokens: int) -> Allocation | None:
        """Give `child`, which holds no blocks, the K and V of the first `num_tokens` tokens of `parent`, which holds them: full blocks are
        shared, a partial one is copied (see `take_copies`). Returns the child's table, with `cached` = num_tokens; None, with nothing changed,
        if there is no block for the copy."""

    @abstractmethod
    def take_copies(self) -> Sequence[BlockCopy]:
        """Return the copies that forks requested since the last call, in order; the next batch runs them first."""

    @abstractmethod
    def free(self, request: Request) -> None:
        """Release all blocks of `request`; its committed blocks can be found until their space is needed. The core calls it on preemption and
        whenever a request ends, even if it holds no blocks (then nothing is released): drop other per-request state, such as cached lookups, here
        too."""

    @abstractmethod
    def trim(self, request: Request, first_needed_token: int) -> None:
        """Release the blocks that contain only tokens before `first_needed_token`, which no layer will read again. The table keeps its length. Called
        if the layout has a window, also on managers without the capability `trim`, which release nothing."""

    @abstractmethod
    def reset(self) -> None:
        """Drop all K and V, because the weights have changed: cached blocks become free, and `lookup` finds neither the blocks held now nor those
        that their holders commit later on top of them."""

    @property
    @abstractmethod
    def counts(self) -> BlockCounts:
        """Return the number of blocks in each state. O(1)."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise `DovetailError` that names the fault if the manager's state is inconsistent. For tests; may be slow."""

    @property
    def available_blocks(self) -> int:
        """Number of blocks that an allocation can take: free and cached."""
        counts = self.counts
        return counts.free + counts.cached
