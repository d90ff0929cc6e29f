"""Multi-token prediction (arXiv:2412.19437): a head that drafts, in checkpoints of DeepSeek-V3,
GLM-4.5, Qwen3-Next and Qwen3.5.

    x = project([norm(embedding of token i + 1), norm(state i)])
    out = norm(block(x))
    logits = the model's own, of out

The state is the model's final one, after its last norm, and further drafts are made from `out`. The
model's embedding and output layer are shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.component import NoOptions
from dovetail.api.draft_head import HeadArch, HeadContext, HeadInputs
from dovetail.api.model import BuildContext, ModelContext, ParallelGroup, Tapped, WeightRule
from dovetail.errors import UnsupportedError
from dovetail.nn.attention import spec_of_rank
from dovetail.nn.linear import ReplicatedLinear
from dovetail.nn.model_files import model_length
from dovetail.nn.parameter import weight_rules
from dovetail.nn.residual import Residual
from dovetail.nn.rotary import RotaryEmbedding, Rotation
from dovetail.nn.weights import tensor_names
from dovetail_models.deepseek import DeepseekV3, DeepseekV32, Glm4MoeLite, GlmMoeDsa
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


Family = DeepseekV3 | Glm4Moe | Qwen35
_DEEPSEEK: tuple[type[Family], ...] = (
    *(DeepseekV3, DeepseekV32, Glm4Moe),
    *(Glm4MoeLite, GlmMoeDsa),
)
_QWEN: tuple[type[Family], ...] = (Qwen3Next, Qwen35, Qwen35Moe)
_FAMILIES = {arch.model_type: (arch, _after_the_last) for arch in _DEEPSEEK} | {
    arch.model_type: (arch, _apart) for arch in _QWEN
}
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # fields of configs


class Mtp(HeadArch):
    """The head in the target's own checkpoint."""

    is_stored_as_target = True

    def __init__(self, options: BaseModel, context: HeadContext) -> None:
        super().__init__(options, context)
        target = context.target
        if target.model_type not in _FAMILIES:
            raise UnsupportedError(
                f"model_type {target.model_type!r} has no multi-token-prediction head that is "
                f"implemented "
                f"(implemented: {', '.join(sorted(_FAMILIES))})"
            )
        arch, names = _FAMILIES[target.model_type]
        self.names = names(target)
        count = next(
            (value for field in _COUNTS if (value := getattr(target, field, None)) is not None), 1
        )
        stored = () if context.dummy else tensor_names(context.directory)
        is_stored = any(name.startswith(self.names.prefix) for name in stored)
        if count < 1 or not (context.dummy or is_stored):
            raise UnsupportedError(
                f"this checkpoint has no multi-token-prediction head (tensors {self.names.prefix}*)"
            )
        if count > 1:
            raise UnsupportedError(
                f"{count} layers of multi-token prediction are not implemented (only 1)"
            )
        if getattr(target, "mtp_use_dedicated_embeddings", False):
            raise UnsupportedError("mtp_use_dedicated_embeddings = True is not implemented")
        self.taps = (target.num_hidden_layers,)
        self.hidden_size = target.hidden_size
        self.config = target
        self.arch = arch(NoOptions(), ModelContext())

    def layer_specs(self, parallel: ParallelGroup) -> list[LayerSpec]:
        return [spec_of_rank(self.arch.spec(self.config, 0), parallel)]

    def build(self, context: BuildContext, target: Tapped) -> nn.Module:
        return MtpHead(self.arch, self.config, self.names, context, target)


class MtpHead(nn.Module):
    """A `dovetail.api.draft_head.DraftHead`."""

    def __init__(
        self, arch: Family, config: Any, names: Names, context: BuildContext, target: Tapped
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.names = names
        self.embed = target.embed
        self.logits = target.logits
        self.embedding_norm = arch.norm(config, context)
        self.state_norm = arch.norm(config, context)
        self.norm = arch.norm(config, context)
        self.projection = ReplicatedLinear(2 * hidden, hidden, context)
        max_len = context.max_len or model_length(config)
        self.rotary = RotaryEmbedding(arch.rope(config, 0), max_len, device=context.device)
        self.block = arch.mtp_block(config, arch.spec(config, 0), context)

    def fuse(self, tapped: torch.Tensor) -> torch.Tensor:
        return tapped

    def store(self, inputs: HeadInputs) -> None:
        residual, rotation = self._projected(inputs)
        self.block.attention.store(residual, self.block.input_norm, rotation)

    def forward(self, inputs: HeadInputs) -> torch.Tensor:
        residual, rotation = self._projected(inputs)
        self.block.add_to(residual, rotation)
        return residual.normed(self.norm)

    def _projected(self, inputs: HeadInputs) -> tuple[Residual, Rotation]:
        embedded = self.embedding_norm(self.embed(inputs.token_ids))
        x = torch.cat((embedded, self.state_norm(inputs.states)), dim=1)
        return Residual(self.projection(x)), self.rotary(inputs.positions, inputs.axes)

    def weights(self) -> Iterator[WeightRule]:
        names = self.names
        prefix = self.names.prefix
        yield from weight_rules(
            prefix,
            {
                names.embedding_norm: self.embedding_norm,
                names.state_norm: self.state_norm,
                names.projection: self.projection,
                names.norm: self.norm,
            },
        )
        yield from self.block.weights(names.block)
        for name in names.shared:
            yield WeightRule(f"{prefix}{name}", None, optional=True)
