"""The model architecture: it serves Hugging Face `architectures` names and builds a torch module that computes hidden states and logits.

`dovetail.nn` has the layers to build one from. Attention layers are bound while the model is built: there is no global context. Every linear
layer is a parallel one, today with a group of one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pydantic import BaseModel

from dovetail.api.attention import AttentionLayer, LayerSpec

if TYPE_CHECKING:
    import torch


class RankShares(Protocol):
    """Memory of GPUs that read each other's, through which a sum over the ranks is added to a residual stream in one kernel."""

    def place(self, rows: int, size: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return memory [rows, size] for this rank's share of the next sum. It must be filled, and `add` called, before it is asked for again. None,
        on all ranks, if there is no room for such a sum."""

    def add(self, x: torch.Tensor, norm: tuple[torch.Tensor, float] | None) -> torch.Tensor | None:
        """x [rows, size] += the sum over the ranks of what they wrote to the place given last. `norm`: (weight [size], eps) of an RMS norm; then
        x's norm is returned, like x, and otherwise None."""


class ParallelGroup(Protocol):
    """The ranks that share a model's weights (tensor parallelism). A group of one does nothing."""

    @property
    def shares(self) -> RankShares | None:
        """None: sums that are added to a residual stream go through `all_reduce` like others."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over the ranks, in place, and return it."""

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' tensors along `dim`, in the order of ranks."""


@dataclass(frozen=True, slots=True)
class ModelCapabilities:
    """The features that a model declares. `tensor_parallel`: it can be split over ranks."""

    tensor_parallel: bool = True


@dataclass(frozen=True, slots=True)
class ModelContext:
    """Constants that an architecture receives when it is made; empty for now."""


@dataclass(frozen=True, slots=True)
class BuildContext:
    """The settings and the attention backend that `build` needs."""

    parallel: ParallelGroup
    dtype: torch.dtype
    device: torch.device
    make_attention: Callable[[LayerSpec], AttentionLayer]
    max_len: int | None = None  # tokens of the longest sequence that will run; None: the model's own
    weights_later: bool = False  # linear layers of `dovetail.nn` get memory after `build`, in the format of the checkpoint


class CausalLM(Protocol):
    """The module that `build` makes: a `torch.nn.Module` whose parameters carry `load(source, shard_id, transform)`: see `dovetail.nn.parameter`."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Return the hidden states [tokens, hidden_size], after the last norm, for token_ids and positions [tokens] int64 of a ragged batch.

        `wanted` [n] int64, n at least 1: distinct indices of the tokens whose states are read; then only these are returned, in this order, [n,
        hidden_size]. None: all. A simple model computes all states and ends with `return hidden if wanted is None else hidden[wanted]`. One that
        leaves the others out after the last attention spares nearly all of a prompt's last feed-forward. The K and V of all tokens must be written in
        every layer.

        What it is given is only read; the result is the caller's. Positions may be any below the model's length, in any order of sequences."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocab_size], the same on every rank, for hidden [n, hidden_size] of the rows that sample. The sampler may overwrite
        them; hidden is only read."""

    def weights(self) -> Iterable[WeightRule]:
        """Return the rules that say which parameter each tensor of a checkpoint goes to."""


@runtime_checkable
class LoadsItself(Protocol):
    """A `CausalLM` that reads its checkpoint without `WeightRule`s."""

    def load_checkpoint(self, directory: Path | None, seed: int) -> None:
        """Load the weights from `directory`; None: make random ones, the same for the same seed. Raises `ModelLoadError` or `UnsupportedError`."""


@dataclass(frozen=True, slots=True)
class WeightRule:
    """A rule that loads the checkpoint's tensor `source` by `parameter.load(source_slice, shard_id, transform)`. `shard_id` names the part of a
    fused parameter ("q", "k", "v"; "gate", "up"); None: the whole. `transform` turns a tensor that the checkpoint keeps in another form into the
    layer's own: `lambda w: 1 + w` for norms that multiply by 1 + w. It gets this rank's part in float32 and returns a tensor of the same shape;
    each number of the result depends on one number alone.

    Two rules may name the same part (tied weights): the checkpoint may hold either tensor, or both if they are equal."""

    source: str
    parameter: Any  # torch.nn.Parameter with .load
    shard_id: str | None = None
    optional: bool = False  # may be missing from the checkpoint (a tied head, say)
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None


class ModelArch(ABC):
    """A model architecture; it serves the Hugging Face `architectures` that its `ComponentSpec` names."""

    capabilities = ModelCapabilities()
    options: BaseModel

    def __init__(self, options: BaseModel, context: ModelContext) -> None:
        self.options, self.context = options, context

    @abstractmethod
    def reasons_against(self, config: Any) -> list[str]:
        """Return the reasons why this Hugging Face config can't be served, each naming the field; an empty list means that it can. Every field
        that changes the numbers and isn't implemented (a rope type, quantization, softcap) must be here."""

    @abstractmethod
    def layer_specs(self, config: Any, parallel: ParallelGroup) -> list[LayerSpec]:
        """Return the attention layers that `build` will make, with the shapes that this rank computes."""

    @abstractmethod
    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        """Return a `CausalLM` with uninitialised parameters on `context.device`. `config` is a transformers `PretrainedConfig`."""
