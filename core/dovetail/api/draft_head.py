"""Draft head: a few layers that guess tokens from the hidden states of the model that checks them,
the *target* (EAGLE-3, multi-token prediction).

At position i a head reads the target's state of token i and the embedding of token i + 1, and its
output says what token i + 2 is. Its output also stands for the state that the target has not
computed yet, to guess the token after that:

      known tokens           a    b    c    d
      states of the target   A    B    C             d is sampled from C
      the head reads         Ab   Bc   Cd            from the last output e is drafted; then from that output and e, the next one; and so on

K and V of the head's layers at position i are in the target's cache groups. The executor stores
them in every step, right after the target, so that they are there whenever the head drafts. A
drafter names its head's class: see `dovetail.api.drafter.ModelDrafter`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, ParallelGroup, Tapped, WeightRule

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadInputs:
    """Tokens of one step, for a head to compute. Tensors are on the device, and only read. Later
    minor versions add fields, whose defaults change nothing."""

    token_ids: torch.Tensor  # [tokens] int64: of each position, the id of the token *after* it
    positions: torch.Tensor  # [tokens] int64
    # [tokens, hidden_size] of each position: of `fuse`, or what `forward` returned
    states: torch.Tensor
    # [3, tokens] int64, of a target whose rotary positions have three axes, and which may read
    # images: the positions to rotate by, if the head's have three axes, too; None: `positions`
    axes: torch.Tensor | None = None


class DraftHead(Protocol):
    """Module that `HeadArch.build` returns: a `torch.nn.Module` with parameters like those of a
    `CausalLM`, or one that `LoadsItself`. Inputs are only read; results belong to the caller, and
    are the same on every rank.
    """

    def fuse(self, tapped: torch.Tensor) -> torch.Tensor:
        """Return states [tokens, hidden_size] of tapped [tokens, taps * the target's hidden size],
        the target's states at the taps, one after the other."""

    def store(self, inputs: HeadInputs) -> None:
        """Store K and V of the states, and of the tokens after them."""

    def forward(self, inputs: HeadInputs) -> torch.Tensor:
        """As `store`; also attend, and return the states [tokens, hidden_size] that stand for those
        of the next positions."""

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits [n, the target's vocabulary] of the drafts that follow `states` [n,
        hidden_size], which `forward` returned: -inf for ids that it can't draft. The sampler may
        overwrite them."""

    def weights(self) -> Iterable[WeightRule]:
        """Return the rules that map each tensor of the head in a checkpoint, which may hold others,
        to a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadContext:
    """Constants passed to a head's constructor."""

    directory: Path  # of the head's checkpoint
    target: Any  # the target's transformers config
    dummy: bool = False  # weights will be random, and the directory may hold none


class HeadArch(ABC):
    """Builds a head. Made once per rank, before weights are read."""

    options: BaseModel
    taps: tuple[int, ...]  # see `dovetail.api.model.Tapped`
    hidden_size: int  # of its states
    is_stored_as_target = False  # True: its linear layers have the target's weight format

    def __init__(self, options: BaseModel, context: HeadContext) -> None:
        """`options`: of the drafter that names this class.

        Raises `UnsupportedError` with the reasons if there is no such head, or it doesn't fit the
        target; `ModelLoadError` if files can't be used."""
        self.options = options
        self.context = context

    @abstractmethod
    def layer_specs(self, parallel: ParallelGroup) -> list[LayerSpec]:
        """Return the attention layers that `build` will create, numbered from 0, with this rank's
        shapes."""

    @abstractmethod
    def build(self, context: BuildContext, target: Tapped) -> torch.nn.Module:
        """Return a `DraftHead` with uninitialized parameters on `context.device`. It may use the
        target's embedding and logits."""
