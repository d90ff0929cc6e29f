"""The attention backend: it owns the paged K and V cache of each layer, writes to it and attends over it.

The runner calls `plan` once a step; each layer of a model, bound to the backend when the model is built, then calls `write` and `attend`. One
ragged batch may mix prefills, chunks of prefills and decodes: row i has query tokens [query_starts[i], query_starts[i + 1]).

The cache may have a smaller dtype than q, k and v. A layer then divides K and V by its `kv_scales`, rounds them to the nearest number of that dtype
(of two that are as near, the even one), and takes what lies beyond the largest for the largest; attention is over what is stored, times the scales.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, slots=True)
class AttentionCapabilities:
    """The features that a backend declares. None means any. The engine refuses at start-up, through `reasons_against`, whatever isn't declared.

    `cuda_graph`: the kernels that `attend` launches may be captured in a CUDA graph and replayed after a later `plan`. "decode": a graph captured for
    a step with one query a row is replayed for any such step of as many padded rows. "mixed": also a graph captured with
    `AttentionBatch.mixed_graph`, for any such step of as many padded tokens. Steps with a shared prefix and steps without have separate graphs.
    """

    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    head_sizes: tuple[int, ...] | None = None
    block_sizes: tuple[int, ...] | None = None  # if given, exactly these
    block_size_multiple: int = 1
    window: bool = True  # sliding window
    cuda_graph: Literal["none", "decode", "mixed"] = "none"
    shared_prefix: bool = False
    cache_dtypes: tuple[str, ...] = ()  # of K and V in the cache, other than that of q, k and v: "float8_e4m3fn"

    def supports_block_size(self, block_size: int) -> bool:
        if self.block_sizes is not None and block_size not in self.block_sizes:
            return False
        return block_size % self.block_size_multiple == 0

    def default_block_size(self) -> int:
        """The smallest supported block size of at least 16, or else the largest."""
        if self.block_sizes is not None:
            return min((size for size in self.block_sizes if size >= 16), default=max(self.block_sizes))
        return -(-16 // self.block_size_multiple) * self.block_size_multiple


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The shape of one attention layer on this rank."""

    index: int
    heads: int
    kv_heads: int
    head_size: int
    scale: float  # multiplies the scores before the softmax
    window: int | None = None  # a query sees this many tokens, itself included; None: all before it


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """Constants that a backend receives when it is made."""

    device: str  # "cpu", "cuda:0"
    dtype: str  # of q, k, v, and of the cache if `cache_dtype` is None: "float32", …
    block_size: int  # tokens
    cache_dtype: str | None = None  # of K and V in the cache, if not `dtype`: "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class KVScales:
    """The numbers by which a layer's K and V are divided before they are stored in a cache of a smaller dtype: positive numbers on the device, []
    float32 each.

    Kernels read them whenever they run. They change only while the cache holds nothing that a request needs.
    """

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The inputs of attention for one step. Tensors are on the device; the numpy arrays are the host's copies of the same numbers. A backend only
    reads them; they stay as they are until the next `plan`.

    Rows from `num_rows` on, and tokens from `num_tokens` on, are padding: the backend may compute them, but they must not change any block.
    The slot of a padding token is -1.
    """

    num_rows: int
    num_tokens: int
    query_starts: torch.Tensor  # [rows + 1] int32
    kv_lens: torch.Tensor  # [rows] int32: tokens a row can see once this step's K and V are written
    block_table: torch.Tensor  # [rows, max_blocks] int32; entries past a row's blocks are undefined
    slots: torch.Tensor  # [tokens] int64: block id * block_size + offset, where each token's K and V go
    host_query_lens: np.ndarray  # [num_rows] int32
    host_kv_lens: np.ndarray  # [num_rows] int32
    shared_prefix_blocks: int = 0  # leading blocks that all rows have in common
    mixed_graph: bool = False  # `attend` is captured or replayed for any rows within the padded tokens; only with cuda_graph="mixed"


@dataclass(frozen=True, slots=True)
class FusedCache:
    """A layer's cache, exposed to a kernel that computes K and V and writes them itself.

    Token i's K goes to `k[slots[i] // block_size, slots[i] % block_size]`, its V likewise; at slot -1 nothing is written. The kernel may run later
    and repeatedly (in a CUDA graph): the tensors must keep their addresses, and `slots` must hold the slots of the step planned last. With `scales`
    the kernel divides, rounds and saturates as `write` does.
    """

    k: torch.Tensor  # [num_blocks, block_size, kv_heads, head_size], a view with any strides, the last one 1
    v: torch.Tensor  # like k
    slots: torch.Tensor  # [tokens or more] int64
    scales: KVScales | None = None  # of a cache of a smaller dtype


class AttentionLayer(ABC):
    """One layer of a backend: its cache, with methods to write to it and attend over it, for the batch of the backend's last `plan`.

    q, k and v are the model's, and only read: they may be views of one tensor, with strides of their own.
    """

    spec: LayerSpec
    kv_scales: KVScales | None = None  # set by the executor right after `make_layer`, if the cache has a smaller dtype

    @abstractmethod
    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [tokens, kv_heads, head_size] at the batch's slots, scaled and rounded if the cache has a smaller dtype."""

    def cache_for_fused_write(self) -> FusedCache | None:
        """Return the cache if the kernel that computes K and V may store them itself instead of calling `write`; by default None: it may not."""
        return None

    @abstractmethod
    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """Compute causal attention of q [tokens, heads, head_size] over each row's cached K and V, including those of this step (they are
        written first, for the whole batch). Returns [tokens, heads, head_size], of padding tokens anything. The result is the model's until
        any layer's next `attend`, which may use its memory again."""


class AttentionBackend(ABC):
    """An attention backend. Its executor calls `make_layer` while the model is built, then `allocate`, `prepare`, and `plan` in each step."""

    capabilities = AttentionCapabilities()
    options: BaseModel

    def __init__(self, options: BaseModel, context: AttentionContext) -> None:
        self.options, self.context = options, context

    @classmethod
    def reasons_against(cls, context: AttentionContext, layers: Sequence[LayerSpec]) -> list[str]:
        """Return the reasons why it can't serve such layers, one sentence each; none means that it can. The default checks `capabilities`."""
        caps, reasons = cls.capabilities, []
        device = context.device.split(":")[0]
        if device not in caps.devices:
            reasons.append(f"device {device} is not among {', '.join(caps.devices)}")
        if context.dtype not in caps.dtypes:
            reasons.append(f"dtype {context.dtype} is not among {', '.join(caps.dtypes)}")
        if context.cache_dtype is not None and context.cache_dtype not in caps.cache_dtypes:
            served = ", ".join(caps.cache_dtypes)
            reasons.append(f"it can't keep K and V in {context.cache_dtype}" + (f", only in {served}" if served else ""))
        for size in sorted({layer.head_size for layer in layers}):
            if caps.head_sizes is not None and size not in caps.head_sizes:
                reasons.append(f"head size {size} is not among {', '.join(map(str, caps.head_sizes))}")
        if not caps.supports_block_size(context.block_size):
            sizes = ", ".join(map(str, caps.block_sizes)) if caps.block_sizes else f"multiples of {caps.block_size_multiple}"
            reasons.append(f"block size {context.block_size} is not among {sizes}")
        if not caps.window and any(layer.window is not None for layer in layers):
            reasons.append("it has no sliding window")
        return reasons

    @abstractmethod
    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        """Return a layer bound to this backend."""

    @abstractmethod
    def bytes_per_block(self, spec: LayerSpec) -> int:
        """Return the bytes that one block takes in such a layer's cache, K and V together."""

    @abstractmethod
    def allocate(self, num_blocks: int) -> None:
        """Make the caches of all layers, with `num_blocks` blocks each; earlier caches are dropped."""

    @abstractmethod
    def prepare(self, max_rows: int, max_tokens: int, max_len: int) -> None:
        """Make all buffers, for steps of at most `max_rows` rows and `max_tokens` tokens, and sequences of at most `max_len` tokens, which needn't
        be a multiple of the block size."""

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Fill the buffers; called once a step, before the model runs. On a GPU it must not allocate, synchronise or move a buffer."""

    @abstractmethod
    def copy_blocks(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy K and V of blocks `src` [n] int64 to blocks `dst` [n] int64 in every layer, as if one block after the other."""
