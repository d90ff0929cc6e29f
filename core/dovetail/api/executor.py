"""The executor: it computes the steps that the core plans. It owns the model, its K and V memory and the state of each row.

For each step the core sends a `Batch` that carries only what changed, as numpy int32 arrays; while a request keeps its row, its token ids stay
with the executor. Results come in the order of submission. This file doesn't need torch: an executor may be a simulation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel

from dovetail.api.clock import Clock
from dovetail.api.component import Kind, NoOptions
from dovetail.api.kv_cache import BlockCopy, KVLayout
from dovetail.api.sampler import RowSampling
from dovetail.errors import PluginError, UnsupportedError
from dovetail.targets import import_target, make_component

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int32 = NDArray[np.int32]
    UInt32 = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class ComponentRef:
    """A component that was found and can be imported. Workers get it, so that they needn't search again. Picklable."""

    kind: Kind
    name: str  # qualified: "distribution:name"
    path: str  # "package.module:Class"
    options: Mapping[str, Any] = field(default_factory=dict)  # validated, as plain values
    options_model: str | None = None  # "package.module:Model"
    architectures: tuple[str, ...] = ()

    def load(self) -> Any:
        """Import and return the component's class. Raises `PluginError` with the component's name if the import fails."""
        return import_target(self.path, self._wrong)

    def make(self, context: Any) -> Any:
        """Make the component, `cls(options, context)`. An error that isn't a `DovetailError` becomes a `PluginError` with the component's name."""
        model = import_target(self.options_model, self._wrong) if self.options_model else NoOptions
        return make_component(self.load(), model(**self.options), context, self.path, self._wrong)

    def _wrong(self, what: str) -> PluginError:
        return PluginError(f"{self.kind} {self.name}: {what}")


@dataclass(frozen=True, slots=True)
class QuantizationRef:
    """A way of storing weights that was found and can be imported. Workers get it. Picklable."""

    name: str  # qualified: "distribution:name"
    method: str  # the `quant_method` of checkpoints
    path: str  # "package.module:Class"
    quantizes: bool  # it can quantize a plain checkpoint while that is loaded

    def load(self) -> Any:
        """Import and return the class, a `dovetail.nn.format.Quantization`. Raises `PluginError` with its name if the import fails."""
        return import_target(self.path, lambda what: PluginError(f"quantization {self.name}: {what}"))


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """The settings of `engine.yaml` that concern an executor, with the model's directory found."""

    model: str  # a local directory
    dtype: str  # "auto" or a name
    load_format: str  # "auto" | "safetensors" | "dummy"
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kv_cache_memory: int | None  # bytes
    block_size: int | None  # None: the attention backend's default
    cuda_graphs: bool
    overlap: bool
    seed: int
    kv_cache_dtype: str = "auto"  # "auto" (that of the activations), or a name: "float8_e4m3fn"
    kv_cache_scales: str = "auto"  # "auto" (the checkpoint's, else 1) | "calibrate"
    quantization: str | None = None  # None: as the checkpoint says; else a `QuantizationRef.method`


@dataclass(frozen=True, slots=True)
class ExecutorContext:
    """Constants that an executor receives when it is made. Of its components, `models` are all that are installed, `attention` the backends to
    consider, best first (only one, if the config names it)."""

    config: ExecutorConfig
    clock: Clock
    models: tuple[ComponentRef, ...] = ()
    attention: tuple[ComponentRef, ...] = ()
    sampler: ComponentRef | None = None
    progress: Callable[[str, int, int], None] | None = None  # (what, done, total): loading, capturing
    quantizations: tuple[QuantizationRef, ...] = ()  # all that are installed


@dataclass(frozen=True, slots=True)
class ExecutorCapabilities:
    """The features that an executor declares. `virtual_clock`: its `collect` moves a `VirtualClock`. `logprobs`: it can return them. `masks`: it has
    `sample`; without it, requests with a grammar are refused. `samples`: it samples by each row's own parameters; one that only pretends to compute
    says that it doesn't."""

    virtual_clock: bool = False
    logprobs: bool = True
    masks: bool = False
    samples: bool = True


@dataclass(frozen=True, slots=True)
class Capacity:
    """The size of a started executor and the model that it runs."""

    num_blocks: int
    max_in_flight: int  # steps that may be submitted and not collected, 1 or more
    layout: KVLayout
    vocab_size: int
    max_model_len: int  # tokens of the longest sequence: prompt and output
    details: Mapping[str, str] = field(default_factory=dict)  # its choices in words, for people: device, dtype, attention, why
    shared_prefix: bool = False  # it can use `Batch.shared_prefix_blocks`, which is 0 otherwise


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request takes a row. It may have run before (it was preempted, or lost its row to another): `token_ids` holds all its tokens.

    Its tokens are sampled by `sampling`, in full; an executor without the capability `samples` may pass over it.
    """

    row: int
    request_id: str
    token_ids: Int32  # [known tokens] prompt and generated tokens
    prompt_len: int
    computed: int  # tokens whose K and V are in its blocks already
    blocks: Int32  # [blocks] its block table
    sampling: RowSampling


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. It is carried out in this order: the rows in `removed` are given up, those in `added` begin, `new_blocks` are appended to the block
    tables, `copies` run, then each of `rows` computes its next `num_tokens` tokens. A row whose `yields_token` is True then yields one token, which
    becomes its next known token. A batch is only read, and its arrays stay as they are until its results are collected, no longer."""

    step: int
    removed: Int32  # [any] rows
    added: tuple[NewRow, ...]
    new_block_rows: Int32  # [any] the row that gets each of `new_blocks`, in order
    new_blocks: Int32  # [any] block ids
    copies: tuple[BlockCopy, ...]
    rows: Int32  # [b] distinct rows
    num_tokens: Int32  # [b] >= 1
    yields_token: NDArray[np.bool_]  # [b]
    shared_prefix_blocks: int = 0  # leading blocks that all rows have in common
    late: bool = False  # some row's mask depends on tokens that aren't in yet: `submit` runs the model, and `sample` samples


@dataclass(frozen=True, slots=True)
class Masks:
    """The ids that may come next, for the rows of a late batch that have a grammar; any id may come in the others. Bit `id % 32` of word `id // 32`
    is 1 if the id is allowed; at least one is."""

    indices: Int32  # [m] in the batch, rising; rows that yield a token
    words: UInt32  # [m, ceil(vocab_size / 32)]


@dataclass(frozen=True, slots=True)
class HostLogprobs:
    """`TopLogprobs` as host arrays: [n, 1 + k] ids, [n, 1 + k] logprobs, [n] ranks."""

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Result:
    """The results of a batch, which are the core's: they don't change when later steps run. Times are seconds on the engine's clock: when the device
    began and ended the step."""

    step: int
    token_ids: NDArray[np.int64]  # [b] the sampled token of each row of the batch; -1: none
    started: float
    ended: float
    logprobs: HostLogprobs | None = None  # one row for each row of the batch with `yields_token`, in order
    # index in the batch -> logprobs of the known token *after* each one computed (n = num_tokens, less one where there is none)
    prompt_logprobs: Mapping[int, HostLogprobs] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)  # index in the batch -> why this row alone failed


class Executor(ABC):
    """An executor computes steps. One thread at a time calls it: `start`, then `submit`, for late batches `sample`, and `collect` in turn, `stop` at
    the end."""

    capabilities = ExecutorCapabilities()
    options: BaseModel

    def __init__(self, options: BaseModel, context: ExecutorContext) -> None:
        self.options, self.context = options, context

    @abstractmethod
    def start(self) -> Capacity:
        """Load the model and make the memory. Raises `ModelLoadError` or `UnsupportedError` with the reasons."""

    @abstractmethod
    def submit(self, batch: Batch) -> Any:
        """Enqueue a step and return its handle as soon as possible. At most `Capacity.max_in_flight` steps are uncollected at any time."""

    def mask_words(self, count: int, width: int) -> UInt32:
        """Return memory [count, width] of undefined content for the words of the next masks. An executor whose device copies faster from memory of a
        certain kind overrides it; `sample` must take other memory as well."""
        return np.empty((count, width), np.uint32)

    def sample(self, handle: Any, masks: Masks) -> None:
        """Enqueue the sampling of a late batch, whose handle this is: rows that yield a token draw one that their mask allows. It comes once for each
        late batch, when the results of all earlier batches have been collected, and before anything else is submitted. Memory from
        `mask_words` is the executor's own again afterwards. Log-probabilities are those of the raw distribution, as ever. Raises `UnsupportedError`
        unless `capabilities.masks`.
        """
        raise UnsupportedError(f"executor {type(self).__name__} can't mask tokens")

    @abstractmethod
    def collect(self, handle: Any) -> Result:
        """Wait for the results of the oldest uncollected step, whose handle is `handle`."""

    @abstractmethod
    def check(self) -> None:
        """Raise `DovetailError` if it can't go on (a dead worker, a lost device, a step that failed half done), at each call from then on; `submit`
        raises then too."""

    @abstractmethod
    def stop(self) -> None:
        """Release everything. It may be called twice, and after a failed start."""
