"""Executor: computes the steps that the core plans. It owns the model, the KV cache and the state
of each row.

For each step the core sends a `Batch` with only the changes, as numpy int32 arrays; while a request
keeps its row, its token ids stay with the executor. Results come back in the order of submission.
This module doesn't need torch: an executor may be a simulation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationInfo

from dovetail.api.clock import Clock
from dovetail.api.component import Kind, NoOptions
from dovetail.api.kv_cache import KVLayout, PageCopy
from dovetail.api.kv_transfers import KVTransfers
from dovetail.api.media import MediaCapacity
from dovetail.api.sampler import RowSampling
from dovetail.api.targets import import_target, make_component
from dovetail.errors import PluginError, UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int32 = NDArray[np.int32]
    UInt32 = NDArray[np.uint32]

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class ComponentRef:
    """Resolved component, passed to workers so that they don't search again. Picklable."""

    kind: Kind
    name: str  # qualified: "distribution:name"
    path: str  # "package.module:Class"
    options: Mapping[str, Any] = field(default_factory=dict)  # validated; plain values
    options_model: str | None = None  # "package.module:Model"
    architectures: tuple[str, ...] = ()

    def make(self, context: Any) -> Any:
        """Import the class and instantiate `cls(options, context)`. Raises `PluginError` that names
        the component if the import fails; an error of the class that isn't a `DovetailError`
        becomes one, too."""
        cls = import_target(self.path, self._wrong)
        model = import_target(self.options_model, self._wrong) if self.options_model else NoOptions
        return make_component(cls, model(**self.options), context, self.path, self._wrong)

    def _wrong(self, what: str) -> PluginError:
        return PluginError(f"{self.kind} {self.name}: {what}")


@dataclass(frozen=True, slots=True)
class QuantizationRef:
    """Resolved weight format, passed to workers. Picklable."""

    name: str  # qualified: "distribution:name"
    method: str  # the `quant_method` of checkpoints
    path: str  # "package.module:Class"
    quantizes: bool  # can quantize a plain checkpoint while loading

    def load(self) -> Any:
        """Import and return the subclass of `dovetail.nn.format.Quantization`. Raises `PluginError`
        that names it if the import fails."""
        return import_target(
            self.path, lambda what: PluginError(f"quantization {self.name}: {what}")
        )


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """Settings of `engine.yaml` that executors need, with the model resolved to a directory."""

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
    kv_cache_dtype: str = "auto"  # "auto" (the activations' dtype) or a name: "float8_e4m3fn"
    kv_cache_scales: str = "auto"  # "auto" (the checkpoint's, otherwise 1) | "calibrate"
    quantization: str | None = None  # None: the checkpoint's; otherwise a `QuantizationRef.method`
    state_dtype: str = "float32"  # of recurrent states
    max_drafts: int = 0  # most drafts that a row checks in a step; 0: no speculation
    # directory of a model or head that proposes drafts: see `dovetail.api.drafter.ModelDrafter`
    draft_model: str | None = None
    # the head, a `dovetail.api.draft_head.HeadArch` with its drafter's name and options; None:
    # `draft_model` is a whole model
    draft_head: ComponentRef | None = None
    # `pooling` of `engine.yaml`: what it sets differs from the checkpoint's own pooling
    pooling: Mapping[str, Any] = field(default_factory=dict)
    max_adapters: int = 0  # slots for LoRA adapters on the device; 0: none
    max_adapter_rank: int = 16
    # Features of an executor's own, for its workers: each is called with the arguments of
    # `dovetail_executors.runtime.feature_plans.feature_plans`, and returns a `FeaturePlan`.
    # Picklable.
    features: tuple[Callable[..., Any], ...] = ()
    # slots of the device's cache of images' rows, 0: no images; and rows that a step encodes
    media_cache_rows: int = 0
    media_step_rows: int = 0
    cpu_memory_utilization: float = 0.25  # share of the free RAM for K and V on a CPU
    # True if the engine calls `Executor.transfers`, whose memory on the device must be left free
    kv_transfers: bool = False


@dataclass(frozen=True, slots=True)
class ExecutorContext:
    """Constants passed to an executor's constructor. `models`: all installed components of that
    kind. `attention`: the backends to consider, best first (only one if the config names it)."""

    config: ExecutorConfig
    clock: Clock
    models: tuple[ComponentRef, ...] = ()
    attention: tuple[ComponentRef, ...] = ()
    sampler: ComponentRef | None = None
    # (what, done, total): loading, capturing
    progress: Callable[[str, int, int], None] | None = None
    quantizations: tuple[QuantizationRef, ...] = ()  # all installed
    logits_processors: tuple[ComponentRef, ...] = ()  # in the order in which they are applied


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorCapabilities:
    """Features that an executor supports; later versions may add some, which are False by default.

    `virtual_clock`: `collect` advances a `VirtualClock`. `logprobs`: it can return
    log-probabilities; otherwise requests for them are rejected. `masks`: it implements `sample`;
    otherwise requests with a grammar are rejected. `samples`: it applies each row's sampling
    parameters; otherwise, as in a simulation, they have no effect. `draft_model`: it loads
    `ExecutorConfig.draft_model`, and proposes drafts with it. `draft_head`: also if that is a head.
    `logits_processors`: it applies `ExecutorContext.logits_processors` to rows that ask for
    them."""

    virtual_clock: bool = False
    logprobs: bool = False
    masks: bool = False
    samples: bool = False
    draft_model: bool = False
    draft_head: bool = False
    logits_processors: bool = False


# Later versions may add tasks and methods: an executor gets only tasks of its `PoolingCapacity`
PoolingTask = Literal["embed", "token_embed", "classify", "token_classify"]
PoolingMethod = Literal["last", "mean", "cls", "max", "weighted"]


@dataclass(frozen=True, slots=True)
class RowPooling:
    """Parameters of a pooling request. The task "embed" returns one vector for the prompt, and
    "classify" one score for each label; the tasks with the prefix "token_" return these for each
    token."""

    task: PoolingTask
    dimensions: int | None = None  # keep that many leading numbers of an embedding; None: all
    # normalize an embedding to length 1, turn scores into probabilities; False: as the last layer
    # returns them
    activate: bool = True
    # of a pair of texts, the index of the second one's first token: from there on, token types are
    # 1; None: all are 0
    second: int | None = None
    # scores of a pair of texts: a cross-encoder may use another activation for them than a
    # classifier for labels
    of_pair: bool = False
    # the prompt's first tokens, at least one, that its tokens see: those after them see these, too,
    # and are seen by none. None: all. Only with `PoolingCapacity.hidden_tails`
    seen: int | None = None


@dataclass(frozen=True, slots=True)
class PoolingCapacity:
    """How a model pools. It can serve `tasks`, and pools a vector of a whole prompt by `method`."""

    tasks: tuple[PoolingTask, ...]
    method: PoolingMethod
    size: int  # numbers of an embedding
    labels: tuple[str, ...] = ()  # of a classifier, in the order of its scores; one label: a score
    generates: bool = True  # it can generate, too
    # a prompt is computed in one step, without cached tokens: tokens attend to later ones
    indivisible: bool = False
    # sizes to which an embedding may be cut; None: any up to `size`
    dimensions: tuple[int, ...] | None = None
    # "classify" skips tokens of this id at a prompt's end, which the core leaves out; None: none
    padding: int | None = None
    # numbers of a token's vector, if it is computed by layers of its own; None: `size`
    token_size: int | None = None
    # the one score of "token_classify" is the token's lexical weight, at least 0 if it is activated
    is_lexical: bool = False
    hidden_tails: bool = False  # it can use `RowPooling.seen`

    def size_of(self, task: PoolingTask) -> int:
        """Return the numbers of a vector of this task."""
        if not task.endswith("embed"):
            return len(self.labels)
        return self.size if task == "embed" or self.token_size is None else self.token_size

    def needs_all_states(self, task: PoolingTask) -> bool:
        """Return True if tokens found in the prefix cache would be missing from the result."""
        return self.indivisible or self.method != "last" or task.startswith("token_")


@dataclass(frozen=True, slots=True)
class AdapterCapacity:
    """Bank of slots for LoRA adapters, and the modules that adapters may change. Slot 0 holds none
    and is never loaded."""

    slots: int  # besides slot 0
    max_rank: int
    # module's full name in checkpoints, "model.layers.0.self_attn.q_proj" -> (in, out) features, of
    # all ranks
    modules: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Capacity:
    """Limits of a started executor and its model."""

    num_pages: int
    max_in_flight: int  # steps that may be submitted but not yet collected, at least 1
    layout: KVLayout
    vocab_size: int
    max_model_len: int  # tokens of the longest sequence, prompt plus output
    # choices for humans to read: device, dtype, attention, reasons
    details: Mapping[str, str] = field(default_factory=dict)
    # it can use `Batch.shared_prefix_blocks`; otherwise the core leaves that 0
    shared_prefix: bool = False
    # in a step with drafts: lines (see `Batch`) that it can sample; 0: it can't check drafts
    max_lines: int = 0
    # (lines, seconds on the device) of steps that compute that many tokens, each with a line;
    # ascending. Empty: not measured
    line_costs: tuple[tuple[int, float], ...] = ()
    # (rows, seconds) that a draft model takes for one draft of each of that many rows; ascending.
    # Empty: there is none, or it isn't measured
    draft_costs: tuple[tuple[int, float], ...] = ()
    pooling: PoolingCapacity | None = None  # None: it only generates
    # None: it can't use adapters, or `ExecutorConfig.max_adapters` is 0
    adapters: AdapterCapacity | None = None
    # prompt tokens per second, a cautious guess: the core cuts prompts so that a step takes some
    # seconds, by this and then by what it measures. None: steps may be as large as
    # `max_num_batched_tokens`
    prompt_rate: float | None = None
    # What further features offer, one object of a type each. Its method `feature` makes their side
    # of the loop, a `dovetail.engine.feature.EngineFeature`
    parts: tuple[Any, ...] = ()
    media: MediaCapacity | None = None  # None: it computes no images
    # Why no request may be deterministic (`RowSampling.deterministic`), for its client; empty: they
    # may. Then token ids and log-probabilities of such a row have the same bits whatever else is
    # computed before and beside it: other rows, in any number; its tokens in any chunks, from a
    # prefix that another such row computed, or again after a preemption; with right or wrong
    # drafts. They need not be those of a row that isn't deterministic.
    not_deterministic: str = "its executor doesn't offer it"
    # Tokens: a step may check drafts of a deterministic row whatever `max_lines` is, up to the next
    # multiple of this number, and these take about as long as one token. The core then lets such
    # requests decode by rows that aren't deterministic, and checks their tokens from time to time:
    # see `dovetail.engine.windows`. 0: each of their tokens is computed by a deterministic row
    deterministic_window: int = 0
    # `Batch.changes` may change how rows sample. False: such rows are removed and added
    changes_rows: bool = False

    def part(self, kind: type[Part]) -> Part | None:
        """Return the part of that type; None if there is none."""
        return _part_of(self.parts, kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraContext:
    """Context that the engine passes to validators of a `ComponentSpec.request_extra` model, as
    pydantic's `info.context`."""

    capacity: Capacity  # of the engine that the request arrives at

    @classmethod
    def of(cls, info: ValidationInfo) -> ExtraContext:
        """Return the context of a validator. Raises `ValueError` if there is none, which the engine
        never does."""
        if not isinstance(info.context, cls):
            raise ValueError("values are validated with context=ExtraContext(...)")
        return info.context


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request that takes a row. It may have run before (preempted, or displaced from its row):
    `token_ids` holds all its tokens.

    Its tokens are sampled by `sampling`, in full; an executor without the capability `samples` may
    ignore it.
    """

    row: int
    request_id: str
    token_ids: Int32  # [known tokens] prompt and generated tokens
    prompt_len: int
    computed: int  # leading tokens whose K and V are in its blocks already
    # per group: [blocks * pages_per_block] its block table, block after block; -1: not held, and
    # never read. Of a recurrent group, one block
    pages: tuple[Int32, ...]
    sampling: RowSampling | None  # None: it yields no token, but what a part of the batch says


@dataclass(frozen=True, slots=True)
class RowChanges:
    """Rows that go on with other sampling parameters. The effect is that of removing each row and
    adding it again with the same request, pages and parts of features. Of its known tokens it keeps
    the first `known`; the others are forgotten, and `token_ids` follow instead."""

    rows: Int32  # [n] distinct rows
    known: Int32  # [n]
    counts: Int32  # [n] of the tokens that follow
    token_ids: Int32  # [sum of counts] row by row
    computed: Int32  # [n] leading tokens whose K and V are in the row's blocks
    samplings: tuple[RowSampling, ...]  # [n]


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """A LoRA adapter to be written to a slot of the device's bank, in place of what the slot held.
    For a module named m, the safetensors file at `path` holds "m.lora_A" [rank, in] and "m.lora_B"
    [out, rank], of any floating dtype; the module then adds (x A^T) B^T to its output, as the
    adapter's scale is in B already. The file doesn't change while a step with this load is
    uncollected."""

    slot: int  # 1 or more
    path: str
    digest: str  # of the adapter's content: a name for what was prepared earlier for the same bytes


@dataclass(frozen=True, slots=True)
class HostLogprobs:
    """`TopLogprobs` as host arrays: [n, 1 + k] ids, [n, 1 + k] logprobs, [n] ranks."""

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PoolingRows:
    """Part of a batch: rows that pool. Once its prompt is computed such a row yields what it
    pools."""

    added: Mapping[int, RowPooling]  # of rows in `Batch.added`, which have no `sampling`
    due: Int32  # [any] ascending indices of `Batch.rows` that end their prompts: results are due


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Part of a batch: what changes in the device's bank of adapters, and the rows that use it."""

    loads: tuple[AdapterLoad, ...]  # written before anything is computed
    slots: Mapping[int, int]  # of rows in `Batch.added`; others have no adapter


@dataclass(frozen=True, slots=True)
class Pooled:
    """Part of a result: what rows pooled, by index in the batch. [size], or [prompt tokens, size]
    of tasks that begin with "token_"."""

    values: Mapping[int, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Part of a result: by index in the batch, the log-probabilities of the token *after* each
    computed one (n = num_tokens, one less at the end of the known tokens)."""

    values: Mapping[int, HostLogprobs]


@dataclass(frozen=True, slots=True)
class RowCheckpoint:
    """Copy of the live state of `row` after its first `tokens` tokens, which this step computes, to
    `pages` [pages_per_block]."""

    row: int
    tokens: int
    pages: Int32


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses of the tokens that follow the last known one of each row of a batch."""

    counts: Int32  # [b]; 0: none, as in rows that yield no token
    # [sum of counts] row by row; -1: the executor's draft model proposes it, as then all others of
    # the row
    token_ids: Int32


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, carried out in this order: release the rows in `removed`, start those in `added`,
    make `changes`, append `new_pages` to the block tables, run `copies`, then compute the next
    `num_tokens` tokens of each of `rows`, and on the way write `checkpoints`. A row with
    `yields_token` then yields one token, which becomes its next known token. The state of a row
    without computed tokens is zero, whatever its pages hold. Executors only read a batch; its
    arrays don't change until its results are collected, and may be reused afterwards.

    Drafts (speculative decoding): a row with d drafts has `yields_token`, and computes exactly 1 +
    d tokens: its last known one and the drafts. It has 1 + d *lines*, where any other row that
    yields a token has one: line j is sampled from the logits of the j-th of these tokens, as if
    drafts [0, j) were known tokens of the row. The row yields the tokens of its lines up to the
    first that differs from its draft, that one included; so 1 to 1 + d. They become known, and all
    but the last of them computed. K and V of other drafts are worthless, and later steps overwrite
    them; a live state is that after the computed tokens. Each token is what would be sampled
    without drafts. A batch with drafts is submitted only while no other step is in flight, and
    nothing is submitted before its results are collected."""

    step: int
    removed: Int32  # [any] rows
    added: tuple[NewRow, ...]
    new_pages: Int32  # [any, 3] (group, row, page), in the order in which a table of a row grows
    copies: tuple[PageCopy, ...]
    rows: Int32  # [b] distinct rows
    num_tokens: Int32  # [b] >= 1
    yields_token: NDArray[np.bool_]  # [b]
    # number of leading blocks that all rows share in the first group, whose attention is full
    shared_prefix_blocks: int = 0
    # at most one per row of `rows`, and none of a row with drafts
    checkpoints: tuple[RowCheckpoint, ...] = ()
    # a mask depends on tokens still in flight: `submit` runs the model only, `sample` samples
    late: bool = False
    drafts: Drafts | None = None  # None: no row has any
    # What features of some steps need, one object of a type each: `PoolingRows`, `AdapterRows`, and
    # those of plugins. An executor is only given parts of features that its `Capacity` declares
    parts: tuple[Any, ...] = ()
    # None: no row changes, as always without `Capacity.changes_rows`. No step is in flight
    # otherwise
    changes: RowChanges | None = None

    def part(self, kind: type[Part]) -> Part | None:
        """Return the part of that type; None if there is none."""
        return _part_of(self.parts, kind)

    @property
    def num_lines(self) -> Int32:
        """[b] lines of each row: 0 for a row that yields no token."""
        return (
            self.yields_token.astype(np.int32)
            if self.drafts is None
            else self.yields_token * (1 + self.drafts.counts)
        )


@dataclass(frozen=True, slots=True)
class Masks:
    """Allowed token ids of constrained lines of a late batch (see `Batch`); others may sample any
    id. Bit `id % 32` of word `id // 32` is 1 if the id is allowed; each line allows at least one. A
    line after a draft that the grammar forbids allows all ids, since its row never reaches it."""

    lines: Int32  # [m] indices among the lines of all rows, row by row; ascending
    words: UInt32  # [m, ceil(vocab_size / 32)]


@dataclass(frozen=True, slots=True)
class Result:
    """Results of a batch, owned by the core: later steps don't change them. Times are seconds on
    the engine's clock at which the device began and ended the step."""

    step: int
    # [b] the sampled token of each row of the batch, -1: none; with `counts`: [sum of counts], row
    # by row
    token_ids: NDArray[np.int64]
    started: float
    ended: float
    # one row per yielded token, in order; columns beyond those that a row requests are undefined,
    # all if it requests none
    logprobs: HostLogprobs | None = None
    # index in the batch -> why this row failed; the others are valid
    failed: Mapping[int, str] = field(default_factory=dict)
    # [b] tokens that each row yielded; None: at most one each. Given exactly if the batch has
    # `drafts`
    counts: Int32 | None = None
    # kinds of the recorded graphs that the step replayed, in order; the rest was launched kernel by
    # kernel
    graphs: tuple[str, ...] = ()
    # results of features, one object of a type each: `Pooled`, `PromptLogprobs`
    parts: tuple[Any, ...] = ()

    def part(self, kind: type[Part]) -> Part | None:
        """Return the part of that type; None if there is none."""
        return _part_of(self.parts, kind)

    def values(self, kind: type[Pooled] | type[PromptLogprobs]) -> Mapping[int, Any]:
        """Return the values of the part of that type, by index in the batch."""
        part = self.part(kind)
        return {} if part is None else part.values


def _part_of(parts: tuple[Any, ...], kind: type[Part]) -> Part | None:
    for part in parts:
        if type(part) is kind:
            return part
    return None


class Executor(ABC):
    """Computes steps. One thread at a time calls it: `start`, then in turn `submit`, for late
    batches `sample`, and `collect`; `stop` at the end."""

    capabilities = ExecutorCapabilities()
    options: BaseModel

    def __init__(self, options: BaseModel, context: ExecutorContext) -> None:
        self.options = options
        self.context = context

    @classmethod
    def forecast(cls, context: ExecutorContext) -> str | None:
        """Return how the model of `context` would be served, in a few words for humans, or None if
        the class can't say. Only the model's config and the headers of its weights are read. Raises
        what `start` would raise because of these."""
        return None

    @abstractmethod
    def start(self) -> Capacity:
        """Load the model and allocate memory. Raises `ModelLoadError` or `UnsupportedError` with
        the reasons."""

    @abstractmethod
    def submit(self, batch: Batch) -> Any:
        """Enqueue a step and return its handle as soon as possible. At most
        `Capacity.max_in_flight` steps are uncollected at any time."""

    def mask_words(self, count: int, width: int) -> UInt32:
        """Return uninitialized memory [count, width] for the words of the next masks. Override it
        if the device copies faster from a certain kind of memory; `sample` must accept any other
        memory as well."""
        return np.empty((count, width), np.uint32)

    def sample(self, handle: Any, masks: Masks) -> None:
        """Enqueue the sampling of the late batch `handle`: each line samples a token that its mask
        allows. Called once for each late batch, after the results of all earlier batches were
        collected and before anything else is submitted. Memory from `mask_words` belongs to the
        executor again afterwards. Log-probabilities are still those of the unmasked distribution.
        Raises `UnsupportedError` unless `capabilities.masks`.
        """
        raise UnsupportedError(f"executor {type(self).__name__} can't mask tokens")

    def transfers(self) -> KVTransfers | None:
        """Return the interface that copies pages between the device and the host's memory; None if
        the executor has none, as by default. Called once, after `start`."""
        return None

    @abstractmethod
    def collect(self, handle: Any) -> Result:
        """Wait for the results of `handle`, the oldest uncollected step."""

    @abstractmethod
    def check(self) -> None:
        """Raise `DovetailError` if the executor can't continue (a dead worker, a lost device, a
        partly executed step), on every call from then on; `submit` raises then too."""

    def finish_start(self) -> bool:
        """Do a piece of what `start` has left for later, such as recording a CUDA graph. Returns
        True if more is left.

        Called again and again while a server's engine has no request; one that arrives meanwhile
        waits for the piece, which should take some 10 ms at most. Never called in a user's program,
        whose other threads may use the device. Raises like `submit`.
        """
        return False

    @abstractmethod
    def stop(self) -> None:
        """Release all resources. Idempotent; may be called after a failed start."""
