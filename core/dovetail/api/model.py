"""What a model architecture is: it serves Hugging Face `architectures` names and builds a torch module that computes hidden states and logits.

Layers to build one from are in `dovetail.nn`. Attention layers are bound while the model is built: there is no global context. Every linear
layer is parallel from the first day, with a group of one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel

from dovetail.api.attention import AttentionLayer, LayerSpec

if TYPE_CHECKING:
    import torch


class ParallelGroup(Protocol):
    """The ranks that share a model's weights (tensor parallelism). A group of one does nothing."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; returns x."""

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' tensors along `dim`, in the order of ranks."""


@dataclass(frozen=True, slots=True)
class ModelCapabilities:
    """`tensor_parallel`: the model can be split over ranks."""

    tensor_parallel: bool = True


@dataclass(frozen=True, slots=True)
class ModelContext:
    """Constants that an architecture is made with; empty for now."""


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What `build` may need."""

    parallel: ParallelGroup
    dtype: torch.dtype
    device: torch.device
    make_attention: Callable[[LayerSpec], AttentionLayer]
    max_len: int | None = None  # tokens of the longest sequence that will run; None: the model's own


class CausalLM(Protocol):
    """What `build` returns: a `torch.nn.Module` whose parameters all carry `load(source, shard_id, transform)`: see `dovetail.nn.parameter`."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """token_ids [tokens] int64 and positions [tokens] int64 of a ragged batch -> hidden states [tokens, hidden_size], after the last norm.

        `wanted` [n] int64, n at least 1: the places of the tokens whose states are read -> the states of these, in this order, [n, hidden_size].
        None: all. A simple model computes all states and ends with `return hidden if wanted is None else hidden[wanted]`. One that leaves the others
        out after the last attention spares nearly all of a prompt's last feed-forward. The K and V of all tokens must be written in every layer."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] of the rows that sample -> logits [n, vocab_size], the same on every rank."""

    def weights(self) -> Iterable[WeightRule]:
        """Where each tensor of a checkpoint goes."""


@dataclass(frozen=True, slots=True)
class WeightRule:
    """The checkpoint's tensor `source` is loaded by `parameter.load(source_slice, shard_id, transform)`: `shard_id` names the part of a fused
    parameter ("q", "k", "v"; "gate", "up"), None: the whole. `transform` makes of the tensor, where a checkpoint
    keeps it in another form, what the layer computes with: `lambda w: 1 + w` for norms that multiply by 1 + w. It gets this rank's part in float32
    and returns a tensor of the same shape, each number of which is made of one alone.

    Two rules may name the same part (tied weights): the checkpoint may hold either tensor, or both if they are equal."""

    source: str
    parameter: Any  # torch.nn.Parameter with .load
    shard_id: str | None = None
    optional: bool = False  # may be missing from the checkpoint (a tied head, say)
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None


class ModelArch(ABC):
    """Serves the architectures that its `ComponentSpec` names."""

    capabilities = ModelCapabilities()
    options: BaseModel

    def __init__(self, options: BaseModel, context: ModelContext) -> None:
        self.options, self.context = options, context

    @abstractmethod
    def reasons_against(self, config: Any) -> list[str]:
        """Why this Hugging Face config can't be served, each naming the field: one that changes the numbers and isn't implemented (a rope
        type, quantization, softcap) must be here. Empty: it can."""

    @abstractmethod
    def layer_specs(self, config: Any, parallel: ParallelGroup) -> list[LayerSpec]:
        """The attention layers that `build` will make, as this rank computes them."""

    @abstractmethod
    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        """A `CausalLM` with uninitialised parameters on `context.device`. `config` is a transformers `PretrainedConfig`."""
