"""Multi-token prediction (arXiv:2412.19437): a head that drafts, in checkpoints of DeepSeek-V3, GLM-4.5, Qwen3-Next and Qwen3.5.

    x = project([norm(embedding of token i + 1), norm(state i)])      out = norm(block(x))      logits = the model's own, of out

The state is the model's final one, after its last norm, and further drafts are made from `out`. The model's embedding and output layer are shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.component import NoOptions
from dovetail.api.draft_head import HeadArch
from dovetail.api.model import BuildContext, ModelContext, ParallelGroup, Tapped, WeightRule
from dovetail.errors import UnsupportedError
from dovetail.nn.linear import ReplicatedLinear
from dovetail.nn.residual import Residual
from dovetail.nn.rotary import RotaryEmbedding, Rotation
from dovetail.nn.weights import tensor_names
from dovetail_models.arch import ShapedArch
from dovetail_models.decoder import Block, DecoderShape, one_plus
from dovetail_models.deepseek import DeepseekV3, Glm4MoeLite
from dovetail_models.glm4_moe import Glm4Moe
from dovetail_models.qwen3_next import Qwen3Next, Qwen35, Qwen35Moe


@dataclass(frozen=True, slots=True)
class Names:
    """Names in a checkpoint; `prefix` and `block` are beginnings."""

    prefix: str  # of all tensors of the head
    block: str  # of the block's
    embedding_norm: str
    state_norm: str
    projection: str
    norm: str
    shared: tuple[str, ...] = ()  # copies of the model's own tensors


def _after_the_last(config: Any) -> Names:
    prefix = f"model.layers.{config.num_hidden_layers}."
    shared = "embed_tokens.weight", "shared_head.head.weight"
    return Names(prefix, prefix, "enorm", "hnorm", "eh_proj", "shared_head.norm", shared)


def _apart(config: Any) -> Names:
    return Names(
        "mtp.", "mtp.layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"
    )


_DEEPSEEK: tuple[type[ShapedArch], ...] = (DeepseekV3, Glm4Moe, Glm4MoeLite)
_FAMILIES = {arch.model_type: (arch, _after_the_last) for arch in _DEEPSEEK} | {
    arch.model_type: (arch, _apart) for arch in (Qwen3Next, Qwen35, Qwen35Moe)
}
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # fields of configs


class Mtp(HeadArch):
    """The head in the target's own checkpoint."""

    is_stored_as_target = True

    def __init__(self, directory: Path, target: Any, *, dummy: bool) -> None:
        if target.model_type not in _FAMILIES:
            raise UnsupportedError(
                f"model_type {target.model_type!r} has no multi-token-prediction head that is implemented "
                f"(implemented: {', '.join(sorted(_FAMILIES))})"
            )
        arch, names = _FAMILIES[target.model_type]
        self.names = names(target)
        count = next(
            (value for field in _COUNTS if (value := getattr(target, field, None)) is not None), 1
        )
        if count < 1 or not (
            dummy or any(name.startswith(self.names.prefix) for name in tensor_names(directory))
        ):
            raise UnsupportedError(
                f"this checkpoint has no multi-token-prediction head (tensors {self.names.prefix}*)"
            )
        if count > 1:
            raise UnsupportedError(
                f"{count} layers of multi-token prediction are not implemented (only 1)"
            )
        if getattr(target, "mtp_use_dedicated_embeddings", False):
            raise UnsupportedError("mtp_use_dedicated_embeddings = True is not implemented")
        self.taps, self.hidden_size = (target.num_hidden_layers,), target.hidden_size
        self.shape = _of_one_layer(arch(NoOptions(), ModelContext()).shape(target))

    def layer_specs(self, parallel: ParallelGroup) -> list[LayerSpec]:
        return [self.shape.layer_spec(0, parallel)]

    def build(self, context: BuildContext, target: Tapped) -> nn.Module:
        return MtpHead(self.shape, self.names, context, target)


def _of_one_layer(shape: DecoderShape) -> DecoderShape:
    """Return the shape of a model with one layer of full attention, and experts if there are any."""
    experts = None if shape.experts is None else replace(shape.experts, layers=frozenset({0}))
    return replace(shape, windows=(None,), layers=(), experts=experts)


class MtpHead(nn.Module):
    """A `dovetail.api.draft_head.DraftHead`."""

    def __init__(
        self, shape: DecoderShape, names: Names, context: BuildContext, target: Tapped
    ) -> None:
        super().__init__()
        self.names, self.norms_around_one = names, shape.norms_around_one
        self.embed, self.logits = target.embed, target.logits
        self.embedding_norm, self.state_norm, self.norm = (shape.norm(context) for _ in range(3))
        self.projection = ReplicatedLinear(2 * shape.hidden_size, shape.hidden_size, context)
        self.rotary = RotaryEmbedding(
            shape.rope, context.max_len or shape.max_len, device=context.device
        )
        self.block = Block(0, shape, context)

    def fuse(self, tapped: torch.Tensor) -> torch.Tensor:
        return tapped

    def store(self, token_ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor) -> None:
        self.block.store(*self._inputs(token_ids, positions, states))

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        residual, rotations = self._inputs(token_ids, positions, states)
        self.block.add_to(residual, rotations)
        return residual.normed(self.norm)

    def _inputs(
        self, token_ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor
    ) -> tuple[Residual, list[Rotation]]:
        x = torch.cat((self.embedding_norm(self.embed(token_ids)), self.state_norm(states)), dim=1)
        return Residual(self.projection(x)), [self.rotary(positions)]

    def weights(self) -> Iterator[WeightRule]:
        for rule in self._rules():
            around_one = self.norms_around_one and getattr(rule.parameter, "scale", False)
            yield replace(rule, transform=one_plus) if around_one else rule

    def _rules(self) -> Iterator[WeightRule]:
        names, prefix = self.names, self.names.prefix
        yield WeightRule(f"{prefix}{names.embedding_norm}.weight", self.embedding_norm.weight)
        yield WeightRule(f"{prefix}{names.state_norm}.weight", self.state_norm.weight)
        yield WeightRule(f"{prefix}{names.projection}.weight", self.projection.weight)
        yield WeightRule(f"{prefix}{names.norm}.weight", self.norm.weight)
        yield from self.block.weights(names.block)
        for name in names.shared:
            yield WeightRule(f"{prefix}{name}", None, optional=True)
