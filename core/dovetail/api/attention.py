"""Attention backend: writes to the paged KV cache of each layer and attends over it.

The executor owns the memory of the caches; each layer is bound to its part of it (`LayerCache`),
and decides how a page of it is laid out. Layers of one cache group share block tables and slots
(see `dovetail.api.kv_cache`). The runner calls `plan` once a step; each layer of a model, bound to
the backend when the model is built, then calls `write` and `attend`. One ragged batch may mix
prefills, chunks of prefills and decodes: row i has query tokens [query_starts[i], query_starts[i +
1]).

The cache may have a smaller dtype than q, k and v. A layer then divides K and V by its `kv_scales`,
rounds to the nearest value of that dtype (ties to even), and saturates at its largest finite value;
attention reads the stored values times the scales.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel

from dovetail.api.graphs import GraphSupport
from dovetail.base.members import require_member
from dovetail.errors import DovetailError

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, slots=True)
class AttentionCapabilities:
    """Features that a backend supports. None means any. At start-up the engine rejects, through
    `reasons_against`, whatever isn't declared.

    `cuda_graph`: the kernels that `attend` launches may be captured in a CUDA graph and replayed
    after a later `plan`. `DECODE`: a graph captured for a step with one query a row is replayed for
    any such step with the same padded number of rows. `ALL`: additionally, a graph captured with
    `AttentionBatch.mixed_graph` is replayed for any step with the same padded number of tokens.
    Steps with and without a shared prefix have separate graphs.
    """

    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    head_sizes: tuple[int, ...] | None = None
    block_sizes: tuple[int, ...] | None = None  # None: see block_size_multiple
    block_size_multiple: int = 1
    window: bool = False  # `LayerSpec.window`
    cuda_graph: GraphSupport = GraphSupport.NONE
    shared_prefix: bool = False
    # supported for the cache besides the dtype of q, k and v: "float8_e4m3fn"
    cache_dtypes: tuple[str, ...] = ()
    sinks: bool = False  # `LayerSpec.sinks`
    softcap: bool = False  # `LayerSpec.softcap`
    v_in_k: bool = False  # `LayerSpec.v_in_k`; `head_sizes` doesn't apply to such layers
    # several cache groups, blocks of several pages, and block sizes that differ between groups
    groups: bool = False
    causal: bool = False  # layers with `LayerSpec.causal`, as all generators have
    bidirectional: bool = False  # layers without it
    # `AttentionBatch.host_both_ways`, of which no backend without it is told: it serves the text of
    # a model whose images need it
    both_ways: bool = False
    indexer: bool = False  # `LayerSpec.indexer`
    # `AttentionBatch.host_seen`, which only backends with it get
    hidden_tails: bool = False
    fixed_shapes: bool = False  # `AttentionBatch.fixed_shapes`

    def __post_init__(self) -> None:
        require_member(self, "cuda_graph", GraphSupport)

    def supports_block_size(self, block_size: int) -> bool:
        if self.block_sizes is not None and block_size not in self.block_sizes:
            return False
        return block_size % self.block_size_multiple == 0

    def default_block_size(self) -> int:
        """Return the smallest supported block size of at least 16, otherwise the largest."""
        if self.block_sizes is not None:
            return min(
                (size for size in self.block_sizes if size >= 16), default=max(self.block_sizes)
            )
        return -(-16 // self.block_size_multiple) * self.block_size_multiple


@dataclass(frozen=True, slots=True)
class Indexer:
    """Selects the tokens that each query of a layer attends to (DeepSeek Sparse Attention,
    DeepSeek-V3.2, equations 1 and 2). Every rank has all of its heads.

    A token t has an index key k_t. The query at position p, with index queries q_h and weights w_h,
    gives each token t <= p of its row the score sum over h of w_h * max(0, q_h · k_t), and attends
    to the min(top_k, p + 1) tokens with the highest scores; of equal scores, to the earliest.
    """

    top_k: int
    heads: int  # of index queries
    size: int  # numbers of an index key
    # False: the layer uses the selection of the last layer before it that selects. It has no index
    # keys, and `write_index` and `select` aren't called
    selects: bool = True


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The shape of one attention layer on this rank."""

    index: int
    heads: int
    kv_heads: int
    head_size: int
    scale: float  # multiplies the scores before the softmax
    window: int | None = None  # tokens a query attends to, itself included; None: all up to itself
    # each head has a sink, a logit that takes part in the softmax's denominator and in nothing
    # else: see `bind_sinks`
    sinks: bool = False
    # a scaled score s becomes softcap * tanh(s / softcap) before the softmax; a sink stays as it is
    softcap: float | None = None
    # V is the first `v_head_size` numbers of K, and K alone is stored (latent attention)
    v_in_k: bool = False
    # of V and of what `attend` returns, with `v_in_k`; None: head_size
    v_head_size: int | None = None
    # `index` of an earlier layer whose cache it reads: it has none of its own, and `write` isn't
    # called
    shares: int | None = None
    # False: each token attends to all tokens of its row, or of a `window` to those less than that
    # many tokens away on both sides. Every row then computes its whole prompt in one step, and
    # nothing is read later: such a backend may store nothing (`tensor_bytes` is empty)
    causal: bool = True
    # rows of `AttentionBatch.host_both_ways` attend in both directions here; in other layers they
    # are like any other
    both_ways: bool = False
    # queries attend only to the tokens that it selects; only in causal layers with `v_in_k`,
    # without a window, sinks and softcap
    indexer: Indexer | None = None

    @property
    def out_size(self) -> int:
        """Numbers of a head that `attend` returns."""
        return self.v_head_size or self.head_size


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """Constants passed to a backend's constructor."""

    device: str  # "cpu", "cuda:0"
    dtype: str  # of q, k, v, and of the cache if `cache_dtype` is None: "float32", …
    block_size: int  # tokens of the smallest block; a layer's own is `LayerCache.block_size`
    cache_dtype: str | None = None  # of the KV cache; None: `dtype`: "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class KVScales:
    """Scales that a layer's K and V are divided by before they are stored in a cache of a smaller
    dtype: positive, on the device, [] float32 each.

    Kernels read them whenever they run. They change only while the cache holds nothing that a
    request needs.
    """

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """A layer's part of the pool: where its blocks lie, and which of a step's block tables leads to
    them.

    `memory`: one tensor for each of `AttentionBackend.tensor_bytes`, contiguous uint8 [num_pages +
    1, its size or more] on the device, zeroed at first. Row i is what page i holds of it. The last
    page is waste: padding tokens are written to it, and it is never read. Other layers may use the
    same tensors for other pages, each with its own layout of a page.
    """

    memory: tuple[torch.Tensor, ...]
    block_size: int  # tokens
    group: int = 0  # index in `AttentionBatch.block_tables` and `slots`
    page: int = 0  # which page of a block is this layer's: index in these tensors' first dimension


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Attention inputs of one step. Tensors are on the device; numpy arrays are host copies of the
    same values. A backend only reads them; they don't change until the next `plan`.

    Rows from `num_rows` on, and tokens from `num_tokens` on, are padding: the backend may compute
    them, but they must not change any page but the waste page, in which the slot of a padding token
    lies.
    """

    num_rows: int
    num_tokens: int
    query_starts: torch.Tensor  # [rows + 1] int32
    kv_lens: torch.Tensor  # [rows] int32: tokens in a row's cache, including this step's
    # per group: [pages_per_block, rows, max_blocks] int32; entries that no query sees are any pages
    block_tables: tuple[torch.Tensor, ...]
    # per group: [pages_per_block, tokens] int64: page * block_size + offset; where each token's K
    # and V are stored
    slots: tuple[torch.Tensor, ...]
    host_query_lens: np.ndarray  # [num_rows] int32
    host_kv_lens: np.ndarray  # [num_rows] int32
    # number of leading blocks that all rows share in the first group; it concerns layers without a
    # window
    shared_prefix_blocks: int = 0
    # `attend` is captured or replayed for any distribution of rows over the padded tokens; only
    # with `GraphSupport.ALL`
    mixed_graph: bool = False
    # [num_rows] bool: rows whose queries see all of the row's `kv_lens` tokens, those after their
    # own too, in layers with `LayerSpec.both_ways`. A window w hides the tokens w or more before a
    # query, and none after it. None: there are no such rows. The tokens of one sequence may come in
    # several rows then, which have the same block table and consecutive tokens, such as text before
    # an image, the image, text after it
    host_both_ways: np.ndarray | None = None
    # [num_rows] int32, 1 or more: in layers without `LayerSpec.causal`, the queries of a row see the
    # first so many of its tokens, and none after these. None: they see all. The values of a query
    # whose window has none of these are undefined
    host_seen: np.ndarray | None = None
    # All rows have the same number of queries, and padding is whole rows of these. The bits of a
    # row's outputs depend on its number of keys, its q, K and V, and the padded number of tokens
    # alone: not on the other rows, nor on where its blocks are, nor on the batches before it. Rows
    # may be parts of one sequence, as with `host_both_ways`. True only with the capability
    fixed_shapes: bool = False


@dataclass(frozen=True, slots=True)
class FusedCache:
    """A layer's cache, exposed to a kernel that computes K and V and stores them itself.

    Token i's K goes to `k[slots[i] // block_size, slots[i] % block_size]`, its V likewise. The
    kernel may run later and repeatedly (in a CUDA graph): the tensors must keep their addresses,
    and `slots` must hold the slots of the most recently planned step. With `scales` the kernel
    divides, rounds and saturates as `write` does.
    """

    # [num_pages + 1, block_size, kv_heads, head_size], any strides, but the last one is 1
    k: torch.Tensor
    v: torch.Tensor  # like k
    slots: torch.Tensor  # [tokens or more] int64
    scales: KVScales | None = None  # if the cache has a smaller dtype


class AttentionLayer(ABC):
    """One layer of a backend: its cache, with methods to write to it and attend over it, for the
    batch of the last `plan`.

    q, k and v belong to the model and are only read: they may be strided views of one tensor.
    """

    spec: LayerSpec
    cache: LayerCache | None = None  # set by `bind`
    # set by the executor right after `make_layer`, if the cache has a smaller dtype
    kv_scales: KVScales | None = None
    sinks: torch.Tensor | None = None  # set by `bind_sinks`

    def bind_sinks(self, sinks: torch.Tensor) -> None:
        """Keep the sinks of this rank's heads [heads], of any floating dtype: a layer with
        `LayerSpec.sinks` is given them once, before its first `attend`. They are the model's
        parameter: kernels read it whenever they run. Raises `DovetailError` if they don't fit the
        layer."""
        if not self.spec.sinks or tuple(sinks.shape) != (self.spec.heads,):
            expected = (
                f"{self.spec.heads} sinks, one a head"
                if self.spec.sinks
                else "none: its LayerSpec has no sinks"
            )
            raise DovetailError(
                f"attention layer {self.spec.index}: bind_sinks() got a tensor of shape "
                f"{list(sinks.shape)}, expected {expected}"
            )
        self.sinks = sinks

    @abstractmethod
    def bind(self, cache: LayerCache) -> None:
        """Keep `cache`, in place of an earlier one, and make views of its memory. A layer with
        `LayerSpec.shares` gets that layer's cache."""

    @abstractmethod
    def write(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        """Store k and v [tokens, kv_heads, head_size] at the batch's slots, scaled and rounded if
        the cache has a smaller dtype. v is None in layers with `v_in_k`, and in no other; there K's
        scale is V's too."""

    def write_index(self, keys: torch.Tensor) -> None:
        """Store index keys [tokens, size] at the batch's slots, in the dtype of q whatever the
        cache's; only in layers with `LayerSpec.indexer` that select."""
        raise DovetailError(f"attention layer {self.spec.index} stores no index keys")

    def select(self, q: torch.Tensor, weights: torch.Tensor) -> None:
        """Select the tokens that this layer's next `attend` reads, and those of the layers after it
        that don't select, as `Indexer` defines it. q [tokens, heads, size], of q's dtype; weights
        [tokens, heads] float32. K and index keys of this step are written first. Sums are in at
        least float32."""
        raise DovetailError(f"attention layer {self.spec.index} selects no tokens")

    def cache_for_fused_write(self) -> FusedCache | None:
        """Return the cache if the kernel that computes K and V may store them itself instead of
        calling `write`; None (the default) if not."""
        return None

    @abstractmethod
    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """Compute causal attention of q [tokens, heads, head_size] over each row's cached K and V,
        including those of this step (they are written first, for the whole batch). Returns [tokens,
        heads, out_size]; values of padding tokens are undefined. The result is valid until the next
        `attend` of any layer, which may reuse its memory.

        With `LayerSpec.indexer`: attention over the selected tokens only. K and V of others aren't
        read.

        With `LayerSpec.causal` False: attention over the K and V that this step wrote, which are
        those of whole rows. No other layer is written between a layer's `write` and its
        `attend`."""


class _Feature(NamedTuple):
    """A requirement of some layers: the field of `AttentionCapabilities` that declares support for
    it, and the message when it is missing."""

    capability: str
    is_needed: Callable[[Sequence[LayerSpec]], bool]
    refusal: str


_FEATURES = (
    _Feature(
        "window",
        lambda layers: any(layer.window is not None for layer in layers),
        "sliding windows aren't supported",
    ),
    _Feature(
        "causal",
        lambda layers: any(layer.causal for layer in layers),
        "causal attention isn't supported",
    ),
    _Feature(
        "bidirectional",
        lambda layers: not all(layer.causal for layer in layers),
        "attention to later tokens (an encoder's) isn't supported",
    ),
    _Feature(
        "sinks",
        lambda layers: any(layer.sinks for layer in layers),
        "attention sinks aren't supported",
    ),
    _Feature(
        "softcap",
        lambda layers: any(layer.softcap is not None for layer in layers),
        "a softcap of attention scores isn't supported",
    ),
    _Feature(
        "groups",
        lambda layers: len({layer.window for layer in layers}) > 1,
        "layers with different windows (several cache groups) aren't supported",
    ),
    _Feature(
        "v_in_k",
        lambda layers: any(layer.v_in_k for layer in layers),
        "latent attention (v_in_k) isn't supported",
    ),
    _Feature(
        "indexer",
        lambda layers: any(layer.indexer is not None for layer in layers),
        "attention to the tokens that an indexer selects isn't supported",
    ),
)


def _reasons_against_values(
    caps: AttentionCapabilities, context: AttentionContext, layers: Sequence[LayerSpec]
) -> list[str]:
    """Return the reasons against sizes, dtypes and the device."""
    reasons = []
    device = context.device.split(":")[0]
    if device not in caps.devices:
        reasons.append(f"device {device} is not among {', '.join(caps.devices)}")
    if context.dtype not in caps.dtypes:
        reasons.append(f"dtype {context.dtype} is not among {', '.join(caps.dtypes)}")
    if context.cache_dtype is not None and context.cache_dtype not in caps.cache_dtypes:
        only = f", only in {', '.join(caps.cache_dtypes)}" if caps.cache_dtypes else ""
        reasons.append(f"the KV cache can't be {context.cache_dtype}{only}")
    if caps.head_sizes is not None:
        allowed = ", ".join(map(str, caps.head_sizes))
        sizes = {layer.head_size for layer in layers if not layer.v_in_k}
        wrong = sorted(sizes.difference(caps.head_sizes))
        reasons += [f"head size {size} is not among {allowed}" for size in wrong]
    if not caps.supports_block_size(context.block_size):
        allowed = ", ".join(map(str, caps.block_sizes or ()))
        allowed = allowed or f"multiples of {caps.block_size_multiple}"
        reasons.append(f"block size {context.block_size} is not among {allowed}")
    own_v = (layer for layer in layers if not layer.v_in_k)
    if any(layer.v_head_size not in (None, layer.head_size) for layer in own_v):
        reasons.append("V with a head size of its own (v_head_size) isn't supported without v_in_k")
    indexed = [layer for layer in layers if layer.indexer is not None]
    plain = (layer.v_in_k and layer.causal and layer.window is None for layer in indexed)
    if not all(plain) or any(layer.sinks or layer.softcap is not None for layer in indexed):
        reasons.append(
            "an indexer needs a causal layer with v_in_k, without a window, sinks and softcap"
        )
    return reasons


class AttentionBackend(ABC):
    """An attention backend. Its executor calls `make_layer` while the model is built, then `bind`
    of each layer, `prepare`, and `plan` in each step."""

    capabilities = AttentionCapabilities()
    options: BaseModel

    def __init__(self, options: BaseModel, context: AttentionContext) -> None:
        self.options = options
        self.context = context

    @classmethod
    def reasons_against(cls, context: AttentionContext, layers: Sequence[LayerSpec]) -> list[str]:
        """Return the reasons why this backend can't serve these layers, one sentence each; empty if
        it can. The default checks `capabilities`."""
        features = (
            feature.refusal
            for feature in _FEATURES
            if not getattr(cls.capabilities, feature.capability) and feature.is_needed(layers)
        )
        return [*_reasons_against_values(cls.capabilities, context, layers), *features]

    @abstractmethod
    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        """Return a layer bound to this backend."""

    @abstractmethod
    def tensor_bytes(self, spec: LayerSpec, block_size: int) -> tuple[int, ...]:
        """Return the size in bytes of one block of `block_size` tokens in each tensor of the
        layer's cache: (K, V), or (K,) if V is in it. Empty if the backend stores nothing, as it may
        for layers that aren't causal. Layers with an indexer that selects have one tensor more, of
        index keys."""

    @abstractmethod
    def prepare(self, max_rows: int, max_tokens: int, max_len: int) -> None:
        """Allocate all buffers, for steps of at most `max_rows` rows and `max_tokens` tokens, and
        sequences of at most `max_len` tokens (not necessarily a multiple of the block size). All
        layers are bound; if they are bound again, it is called again."""

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Fill the buffers; called once a step, before the model runs. On a GPU it must not
        allocate, synchronize or move a buffer."""
