"""The KV-cache manager: it decides which request each block of the paged K and V memory belongs to, and which blocks can be shared.

The engine's step calls it; it never touches K and V themselves. A block id names that block in the cache of every layer, so a request has one
block table for all layers. This file doesn't need torch.

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
    """Layers that keep K and V for the same tokens. `window`: how far back they look, in tokens; None: all the way."""

    layers: tuple[int, ...]
    window: int | None
    bytes_per_block: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of the pool."""

    groups: tuple[KVGroup, ...]
    block_size: int  # tokens, 1 or more
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
    """Constants that a manager receives when it is made."""

    layout: KVLayout
    num_blocks: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class KVCapabilities:
    """The features that a manager declares. `reuse`: `lookup` may find tokens that another request computed. `fork`: samples share a prompt's
    blocks. `trim`: it frees blocks behind the window."""

    reuse: bool = True
    fork: bool = True
    trim: bool = True


@dataclass(frozen=True, slots=True)
class Allocation:
    """The result of `allocate`. `blocks` are appended to the request's block table; in the first call those of the `cached` tokens come first."""

    blocks: tuple[int, ...]
    cached: int = 0  # tokens whose K and V are there already; always 0 but in the call that gives a request its first blocks


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the K and V of block `src` to block `dst`, in every layer, before the next batch runs."""

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by state; they always add up: free + held + cached = all."""

    free: int  # in no table, without K and V that a lookup may find
    held: int  # in some request's block table
    cached: int  # in no table, with K and V that a lookup may find: taken when free ones run out


class KVCacheManager(ABC):
    """Owner of the pool's blocks. One thread at a time calls it. Misuse (an unknown request, fewer tokens than before) raises `DovetailError`.
    Requests are only read; a manager may keep them and numbers by their ids until `free`, after which an id may come again. What it returns is
    the caller's: it doesn't change afterwards.

    The request's tokens are `prompt_token_ids` followed by `output_token_ids`. "Holds blocks" below means: allocated or forked, not yet freed.
    """

    capabilities = KVCapabilities()
    options: BaseModel

    def __init__(self, options: BaseModel, context: KVContext) -> None:
        self.options, self.context = options, context

    @abstractmethod
    def lookup(self, request: Request) -> int:
        """Return how many tokens at the start of `request` have their K and V in the pool: a multiple of the block size, fewer than its known
        tokens (one is left to compute), and 0 if the request asks for prompt logprobs. Blocks are shared only under equal
        `request.cache_keys`. Changes nothing."""

    @abstractmethod
    def blocks_needed(self, request: Request, num_tokens: int, without: Sequence[Request] = ()) -> int:
        """Return how many fewer blocks would be available after freeing the requests `without` and then `allocate(request, num_tokens)`: below 0 if
        freeing gives back more than that takes. It fits if this is at most `available_blocks`. Available are empty blocks and cached ones that
        no request holds; a prefix hit on the latter counts. Changes nothing."""

    @abstractmethod
    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        """Give `request` exactly as many blocks as `num_tokens` tokens in all need; the number never shrinks. The first call for a request also
        takes hold of the prefix that `lookup` finds. Returns None, with nothing changed, if there are too few blocks."""

    @abstractmethod
    def commit(self, request: Request, upto: int) -> None:
        """Let `lookup` find the full blocks of its first `upto` tokens from now on. The steps submitted so far and the one being planned write
        their K and V (readers come later in stream order, or in the same batch, which writes before it attends).

        The core calls it when it grants prompt tokens, so that a request planned in the same step can share them; for generated ones when
        their ids arrive; and at the end of a request. The same tokens may be committed again.
        """

    @abstractmethod
    def uncommit(self, request: Request, upto: int) -> None:
        """Take back the commit of its tokens beyond the first `upto`: its grant was taken back before the step was submitted, or the request
        failed, so they won't be written after all. Blocks that others computed stay."""

    @abstractmethod
    def fork(self, parent: Request, child: Request, num_tokens: int) -> Allocation | None:
        """Give `child`, which holds no blocks, the K and V of the first `num_tokens` tokens of `parent`, which holds them: full blocks are
        shared, a partial one is copied (see `take_copies`). Returns the child's table, `cached` = num_tokens; None, with nothing changed,
        if there is no block for the copy."""

    @abstractmethod
    def take_copies(self) -> Sequence[BlockCopy]:
        """Return the copies that forks have asked for since the last call, in order; the next batch runs them first."""

    @abstractmethod
    def free(self, request: Request) -> None:
        """Release all blocks of `request`; its committed blocks can be found until their space is needed. The core calls it at a preemption and at
        every end of a request, even if it holds no blocks (then nothing is released): other notes on it, from `lookup` say, can go too."""

    @abstractmethod
    def trim(self, request: Request, first_needed_token: int) -> None:
        """Release the blocks that lie wholly before `first_needed_token`: no layer will read earlier tokens again. The table keeps its length. Called
        if the layout has a window, also on managers without the capability `trim`, which release nothing."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all K and V, because the weights have changed: cached blocks become free, and `lookup` finds neither the blocks held now nor
        those that their holders commit later, which build on them."""

    @property
    @abstractmethod
    def counts(self) -> BlockCounts:
        """The number of blocks in each state; O(1)."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise `DovetailError`, saying what is wrong, if the manager's books contradict themselves. For tests; it may be slow."""

    @property
    def available_blocks(self) -> int:
        """The number of blocks that an allocation can take: free and cached."""
        counts = self.counts
        return counts.free + counts.cached
