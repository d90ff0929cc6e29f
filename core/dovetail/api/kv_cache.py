"""What a KV-cache manager is: which block of the paged K and V memory belongs to whom, and which can be shared.

The engine's step calls it; it never touches K and V themselves. A block id names that block in the cache of every layer, so one block table a
request serves all layers. Plain Python and numpy: no torch.

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
    """Layers whose K and V live alike. `window`: how far back they look, in tokens; None: all the way."""

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
        """The longest look back of any layer; None if one looks all the way, so that nothing can be trimmed."""
        windows = [group.window for group in self.groups]
        return None if not windows or None in windows else max(w for w in windows if w is not None)


@dataclass(frozen=True, slots=True)
class KVContext:
    """Constants that a manager is made with."""

    layout: KVLayout
    num_blocks: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class KVCapabilities:
    """`reuse`: lookup may find tokens that another request computed. `fork`: samples share a prompt's blocks. `trim`: frees behind a window."""

    reuse: bool = True
    fork: bool = True
    trim: bool = True


@dataclass(frozen=True, slots=True)
class Allocation:
    """What `allocate` did. `blocks` are appended to the request's block table; the first call's begin with the `cached` tokens' blocks."""

    blocks: tuple[int, ...]
    cached: int = 0  # tokens whose K and V are there already; not 0 only in the call that gives a request its first blocks


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the K and V of block `src` to block `dst`, in every layer, before the next batch runs."""

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by state; they always add up: free + held + cached = all."""

    free: int  # hold nothing of use
    held: int  # in some request's block table
    cached: int  # hold K and V that a lookup may find, in nobody's table: taken when free ones run out


class KVCacheManager(ABC):
    """Owner of the pool's blocks. Called by one thread at a time. Misuse (an unknown request, tokens that shrink) raises `DovetailError`.

    The request's tokens are `prompt_token_ids` followed by `output_token_ids`. "Holds blocks" below means: allocated or forked, not yet freed.
    """

    capabilities = KVCapabilities()
    options: BaseModel

    def __init__(self, options: BaseModel, context: KVContext) -> None:
        self.options, self.context = options, context

    @abstractmethod
    def lookup(self, request: Request) -> int:
        """Tokens at the start of `request` whose K and V are in the pool: pure, fewer than its known tokens (one is left to compute), a
        multiple of the block size; 0 when the request asks for prompt logprobs. Shared only under equal `request.cache_keys`."""

    @abstractmethod
    def blocks_needed(self, request: Request, num_tokens: int, without: Sequence[Request] = ()) -> int:
        """Blocks that `allocate(request, num_tokens)` would take from those available (empty ones, and cached ones that nobody holds;
        a prefix hit on such a one counts), if the requests `without` were freed first: pure."""

    @abstractmethod
    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        """Make room for `num_tokens` tokens in all, never fewer than before: exactly as many blocks as they need. The first call for a request
        also pins its prefix hit, that of `lookup`, in the same act. None, with nothing changed, if the blocks don't suffice."""

    @abstractmethod
    def commit(self, request: Request, upto: int) -> None:
        """The K and V of its first `upto` tokens are written by the steps submitted so far and the one being planned (readers come later in
        stream order, or in the same batch, which writes before it attends): full blocks of them may be found by `lookup` from now on.

        The core calls it when it grants prompt tokens, so that a request planned in the same step can share them; for generated ones when
        their ids arrive; and at the end of a request. What was committed before may be committed again.
        """

    @abstractmethod
    def uncommit(self, request: Request, upto: int) -> None:
        """Take back what was committed of it beyond its first `upto` tokens: its grant was taken back before the step was submitted, or the
        request failed, so they will not be written after all. What others computed stays."""

    @abstractmethod
    def fork(self, parent: Request, child: Request, num_tokens: int) -> Allocation | None:
        """Give `child`, which holds no blocks, the K and V of the first `num_tokens` tokens of `parent`, which holds them: full blocks are
        shared, a partial one is copied (see `take_copies`). Returns the child's table, `cached` = num_tokens; None, with nothing changed,
        if there is no block for the copy."""

    @abstractmethod
    def take_copies(self) -> Sequence[BlockCopy]:
        """The copies that forks have asked for since the last call, in order; the next batch carries them and runs them first."""

    @abstractmethod
    def free(self, request: Request) -> None:
        """It holds no blocks from now on; what it committed stays to be found until the space is needed. The core calls it at a preemption and at
        every end of a request, whether or not it holds blocks (nothing, if it doesn't): what was kept of it, after a `lookup` say, can go too."""

    @abstractmethod
    def trim(self, request: Request, first_needed_token: int) -> None:
        """No layer will look at tokens before `first_needed_token` again: let go of the blocks wholly before it. The table keeps its length. Called
        where the layout has a window, of managers without the capability too, which let go of nothing."""

    @abstractmethod
    def common_prefix(self, requests: Sequence[Request]) -> int:
        """Leading blocks that are the same in the tables of all `requests`: attention may read them once."""

    @abstractmethod
    def held_only_by(self, requests: Sequence[Request]) -> int:
        """Blocks that freeing all of these would make available."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all K and V, because the weights have changed: the cached become free, and those held can't be found by `lookup` any more, nor
        what their holders commit from now on, which builds on them."""

    @property
    @abstractmethod
    def counts(self) -> BlockCounts:
        """Blocks by state, O(1)."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise `DovetailError`, saying what, if the books contradict themselves. For tests: may be slow."""

    @property
    def available_blocks(self) -> int:
        """Blocks that an allocation can take: free and cached."""
        counts = self.counts
        return counts.free + counts.cached
