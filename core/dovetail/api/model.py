"""Model architecture: serves Hugging Face `architectures` names by building a torch module that
computes hidden states and logits.

Build it from the layers of `dovetail.nn`. Attention layers are bound while the model is built:
there is no global context. All linear layers are tensor-parallel, over a group that may have a
single rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pydantic import BaseModel

from dovetail.api.attention import AttentionLayer, LayerSpec
from dovetail.api.state import StateLayer, StateSpec
from dovetail.errors import DovetailError

if TYPE_CHECKING:
    import torch

    from dovetail.api.executor import PoolingMethod


class ParallelGroup(Protocol):
    """The ranks that share a model's weights (tensor parallelism). With a single rank, all methods
    are no-ops."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over the ranks in place and return it."""

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' tensors along `dim`, in the order of ranks."""


@dataclass(frozen=True, slots=True)
class ModelCapabilities:
    """Features that a model supports. `tensor_parallel`: it can be split over ranks. `taps`: what
    it builds is `Tapped`. `types`: it reads `ModelInputs.types`. `media`: it reads
    `ModelInputs.rows[0]` and `is_row`. `levels`: it reads `ModelInputs.rows[1:]`, too. `axes`: it
    reads `ModelInputs.axes`. `hidden_tails`: what tokens see of each other is computed by its
    attention layers only, so that `AttentionBatch.host_seen` holds. `plain_config`: it reads only attributes of a config that are plain
    values, so that it may get one without methods, which needs no import of transformers; called
    without arguments, the config's class returns the defaults."""

    tensor_parallel: bool = False
    taps: bool = False
    types: bool = False
    media: bool = False
    levels: bool = False
    axes: bool = False
    plain_config: bool = False
    hidden_tails: bool = False


@dataclass(frozen=True, slots=True)
class ModelContext:
    """Constants passed to an architecture's constructor; empty for now."""


def _no_states(spec: StateSpec) -> StateLayer:
    """Raise `DovetailError`: the default of `BuildContext.make_state`, for callers that keep no
    states."""
    raise DovetailError(
        f"state layer {spec.index} was made where there are none: state_specs() must name it"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """Settings, attention backend and states for `build`. Layers of `dovetail.nn` take it as it
    is, or as `dataclasses.replace` makes it."""

    parallel: ParallelGroup
    dtype: torch.dtype
    device: torch.device
    make_attention: Callable[[LayerSpec], AttentionLayer]
    # tokens of the longest sequence that will run; None: the model's maximum
    max_len: int | None = None
    make_state: Callable[[StateSpec], StateLayer] = _no_states


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """Tokens of one step, a ragged batch, for a model to compute. Tensors are on the device, and
    only read.

    Later minor versions add fields. Their defaults change nothing: a model needs to read only those
    that it knows.
    """

    token_ids: torch.Tensor  # [tokens] int64
    # [tokens] int64: of each token in its sequence; any below the model's length, in any order of
    # sequences
    positions: torch.Tensor
    # [n] int64, n at least 1: distinct indices of the tokens whose states `forward` returns, in
    # this order; None: all
    wanted: torch.Tensor | None = None
    # [tokens] int64, only for a model with `ModelCapabilities.types`: the tokens' types, 1 from the
    # second text of a pair on; None: all are 0
    types: torch.Tensor | None = None
    # only for a model with `ModelCapabilities.media`, and steps with images. [levels, tokens,
    # hidden] in the model's dtype: where `is_row` is set, rows[0] replaces the embedding, after its
    # scale, and with `ModelCapabilities.levels` rows[i] is added to the residual stream after layer
    # i - 1; elsewhere they mean nothing. Embeddings for single layers are those of `pad_token_id`
    # there
    rows: torch.Tensor | None = None
    is_row: torch.Tensor | None = None  # [tokens] bool; None if and only if `rows` is
    # [3, tokens] int64, only for a model with `ModelCapabilities.axes`, whose rotary positions have
    # three axes (time, height, width): the positions to rotate by; None: `positions` on each axis,
    # which after images are less than the tokens' indices
    axes: torch.Tensor | None = None


class CausalLM(Protocol):
    """Module that `build` returns: a `torch.nn.Module` with parameters that have
    `load(source, shard_id, transform)`; see `dovetail.nn.parameter`."""

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """Return the hidden states [tokens, hidden_size], after the last norm, of all tokens, or
        those of the `wanted` ones [n, hidden_size]. The result belongs to the caller.

        A simple model computes all states and ends with
        `return hidden if inputs.wanted is None else hidden[inputs.wanted]`. Dropping the other
        tokens after the last attention saves nearly all of a prompt's last feed-forward. The K and
        V of all tokens must be written in every layer. Each recurrent layer replaces the states of
        all rows of `StateLayer.batch`, and writes its checkpoints.

        An encoder, whose layers aren't causal, gets whole rows only, and has no `logits`."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocab_size], the same on every rank, for hidden [n, hidden_size], one
        row per token to sample. The sampler may overwrite them; hidden is only read."""

    def weights(self) -> Iterable[WeightRule]:
        """Return the rules that map each tensor of a checkpoint to a parameter."""


class Tapped(CausalLM, Protocol):
    """`CausalLM` whose states between layers a draft head can read (see
    `dovetail.api.draft_head`)."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [tokens, hidden_size] that the first layer reads, of token_ids
        [tokens] int64."""

    def forward_tapped(
        self, inputs: ModelInputs, taps: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result of `forward`, and the states of *all* tokens at `taps`, which aren't
        empty, one after the other: [tokens, taps * hidden_size]. A tap t from 0 to the number of
        layers - 1 is the residual stream after the first t layers; the number of layers is the
        state after the last norm. Both are the same on every rank, and belong to the caller."""


@runtime_checkable
class LoadsItself(Protocol):
    """`CausalLM` that loads its checkpoint itself, without `WeightRule`s."""

    def load_checkpoint(self, directory: Path | None, seed: int) -> None:
        """Load the weights from `directory`; None: random weights, the same for the same seed.
        Raises `ModelLoadError` or `UnsupportedError`."""


class TrialRun(Protocol):
    """Computes tokens as those of requests are computed, before the first request. Every rank calls
    it alike."""

    rounds_kv: bool  # K and V are stored in a smaller dtype than the model's

    def __call__(
        self, sequences: Sequence[Sequence[int]], first: int, *, recorded: bool = True
    ) -> list[list[tuple[int, float]]]:
        """Compute the first `first` tokens of `sequences`, which are of equal length, in one step
        or a few, and the rest token by token. Return for each sequence, and each of its tokens from
        number `first` on, the most likely next token and its log-probability. `recorded`: use
        recorded graphs where there are any."""


@runtime_checkable
class VerifiesItself(Protocol):
    """`CausalLM` that compares what an executor computes with what it expects."""

    def verify(self, run: TrialRun) -> None:
        """Called once all is ready to run, before the first request. Raises `UnsupportedError` if
        the numbers are wrong."""


@dataclass(frozen=True, slots=True)
class WeightRule:
    """Rule that loads the checkpoint's tensor `source` by
    `parameter.load(source_slice, shard_id, transform)`. `shard_id` names the part of a fused
    parameter ("q", "k", "v"; "gate", "up"); None: the whole. `transform` converts a tensor stored
    in another form to the layer's own, such as `lambda w: 1 + w` for norms that multiply by 1 + w.
    It gets this rank's part in float32 and returns a tensor of the same shape; it must be
    element-wise.

    Two rules may name the same part (tied weights): the checkpoint may hold either tensor, or both
    if they are equal. Several rules may name one tensor of which each loads a part (all experts of
    a mixture)."""

    source: str
    # torch.nn.Parameter with .load; None: skip the tensor, or with a `source` "start*" all whose
    # names begin so
    parameter: Any
    shard_id: str | None = None
    optional: bool = False  # may be missing from the checkpoint (such as a tied head)
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """Layer of the head of a classifier: activation(x W^T + b), then a layer norm if `norm` names
    one. `name` and `norm` are modules of the checkpoint; W is its "name.weight", b "name.bias" if
    it has that. The runtime computes them, in float32: `weights` has no rules for them."""

    name: str
    activation: str = "identity"  # or gelu, gelu_pytorch_tanh, relu, sigmoid, silu, tanh
    norm: str = ""
    norm_eps: float = 1e-5


@dataclass(frozen=True, slots=True)
class ModelPooling:
    """How a model pools unless its checkpoint says otherwise."""

    method: PoolingMethod = "last"
    # of a classifier, from the pooled state to the scores of its labels; empty: it is none
    head: tuple[HeadLayer, ...] = ()
    generates: bool = False  # it has `logits`


class ModelArch(ABC):
    """Model architecture; serves the Hugging Face `architectures` that its `ComponentSpec`
    names."""

    capabilities = ModelCapabilities()
    options: BaseModel

    def __init__(self, options: BaseModel, context: ModelContext) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def reasons_against(self, config: Any) -> list[str]:
        """Return the reasons why this Hugging Face config can't be served, each naming the field;
        empty if it can. Every field that changes the numbers and isn't implemented (a rope type,
        quantization, softcap) must be covered."""

    @abstractmethod
    def layer_specs(self, config: Any, parallel: ParallelGroup) -> list[LayerSpec]:
        """Return the attention layers that `build` will create, with this rank's shapes."""

    def state_specs(self, config: Any, parallel: ParallelGroup) -> list[StateSpec]:
        """Return the states of the recurrent layers that `build` will create, with this rank's
        shapes; by default there are none."""
        return []

    def pooling(self, config: Any) -> ModelPooling:
        """Return how this model pools; by default as a generator does. A generator need not
        override it: checkpoints of its body alone (`LlamaModel`), or with a classifier instead of
        its head (`LlamaForSequenceClassification`), are given to it as if they were generators with
        tied embeddings."""
        return ModelPooling(generates=True)

    @abstractmethod
    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        """Return a `CausalLM` with uninitialized parameters on `context.device`. `config` is a
        transformers `PretrainedConfig`."""
