"""EAGLE-3 heads (arXiv:2503.01840) in the format of `speculators`: `transformer_layer_config` in
config.json describes the layers.

    state = fc([states of the target after a low, a middle and a high layer])
    x = attention([norm(embedding of token i + 1), norm(state i)]) + state i      out = x + feed-forward(norm(x))      logits = head(norm(out))

Logits are of a smaller vocabulary of frequent tokens: draft id d stands for the target's id d +
d2t[d]. Further drafts are made from `out`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.component import NoOptions
from dovetail.api.draft_head import HeadArch, HeadContext, HeadInputs
from dovetail.api.file_keys import FileKeys, NoEffect, Refused, Used
from dovetail.api.json_files import read_json_object
from dovetail.api.model import BuildContext, ModelContext, ParallelGroup, Tapped, WeightRule
from dovetail.errors import ModelLoadError, UnsupportedError, shown
from dovetail.nn.embedding import LMHead
from dovetail.nn.layer import LayerList
from dovetail.nn.linear import ReplicatedLinear
from dovetail.nn.model_files import model_length
from dovetail.nn.residual import Residual
from dovetail.nn.rotary import RotaryEmbedding, Rotation
from dovetail.nn.weights import dummy_weights, load_weights, tensor_names, tensors_named
from dovetail_models.llama import Llama
from dovetail_models.qwen3 import Qwen3

_KINDS: dict[str, type[Llama | Qwen3]] = {"llama": Llama, "qwen3": Qwen3}  # of layers
_FILE = NoEffect("the versions and classes that wrote the file")
KEYS = FileKeys(
    "config.json of a draft head",
    {
        "speculators_model_type": Used("eagle3; others are refused"),
        "transformer_layer_config": Used("the layer, whose fields are checked as a model's"),
        "draft_vocab_size": Used("the tokens that the head knows"),
        "eagle_aux_hidden_state_layer_ids": Used("the model's layers whose states are read"),
        "norm_before_residual": Used("where the layer's input is normed"),
        "target_hidden_size": Used("the model's hidden size"),
        "tie_word_embeddings": Used(
            "the head shares the model's embedding if it has none of its own"
        ),
        "norm_before_fc": Refused("a norm of the model's states", (False,)),
        "quantization_config": Refused("quantized weights", ({},)),
        "embed_requires_grad": NoEffect("of training"),
        "enable_sp_ulysses": NoEffect("of training"),
        "speculators_config": NoEffect("how other engines draft; see `speculation`"),
        **dict.fromkeys(
            ("architectures", "auto_map", "has_no_defaults_at_init", "model_type"), _FILE
        ),
        **dict.fromkeys(("speculators_version", "transformers_version"), _FILE),
        **dict.fromkeys(("dtype", "torch_dtype"), NoEffect("the dtype is the model's")),
    },
)
_OWN_EMBEDDING = "embed_tokens.weight"


class Eagle3(HeadArch):
    """A head in a checkpoint of its own."""

    def __init__(self, options: BaseModel, context: HeadContext) -> None:
        super().__init__(options, context)
        directory, target = context.directory, context.target
        raw = read_json_object(directory / "config.json")
        if raw.get("speculators_model_type") != "eagle3":
            found = shown(raw.get("speculators_model_type"))
            raise UnsupportedError(
                f"config.json: speculators_model_type is {found}: heads in the format of "
                f"`speculators` have 'eagle3'"
            )
        layer = _layer_config(raw.get("transformer_layer_config"))
        arch = _KINDS[layer.model_type](NoOptions(), ModelContext())
        self.layer = layer
        self.arch = arch
        self.hidden_size = layer.hidden_size
        self.vocab_size = target.vocab_size
        self.draft_vocab_size = _whole(raw, "draft_vocab_size", layer.vocab_size)
        self.norm_before_residual = bool(raw.get("norm_before_residual", False))
        self.taps = _taps(raw, target.num_hidden_layers)
        self.has_embedding = not context.dummy and _OWN_EMBEDDING in tensor_names(directory)
        why = KEYS.reasons_against(raw)
        why += [
            f"transformer_layer_config: {reason}" for reason in arch.reasons_against_fields(layer)
        ]
        states = _whole(raw, "target_hidden_size", layer.hidden_size)
        if states != target.hidden_size or (not self.has_embedding and layer.hidden_size != states):
            why.append(
                f"it is made for a hidden size of {states}, and the model has {target.hidden_size}"
            )
        if layer.vocab_size != target.vocab_size:
            why.append(
                f"it has a vocabulary of {layer.vocab_size} tokens, and the model one of "
                f"{target.vocab_size}"
            )
        if not 1 <= self.draft_vocab_size <= layer.vocab_size:
            why.append(
                f"draft_vocab_size = {self.draft_vocab_size} must be from 1 to vocab_size, "
                f"{layer.vocab_size}"
            )
        if why:
            raise UnsupportedError("; ".join(why))
        self.target_hidden_size = states

    def layer_specs(self, parallel: ParallelGroup) -> list[LayerSpec]:
        return self.arch.layer_specs(self.layer, parallel)

    def build(self, context: BuildContext, target: Tapped) -> nn.Module:
        return Eagle3Head(self, context, target)


def _layer_config(fields: Any) -> Any:
    """Return `transformer_layer_config` as a transformers config. Raises `UnsupportedError` if it
    is none of an implemented kind."""
    from transformers import CONFIG_MAPPING

    kind = fields.get("model_type", "llama") if isinstance(fields, dict) else None
    if kind not in _KINDS:
        what = (
            "must be the config of a model"
            if kind is None
            else f"model_type {shown(kind)} is not implemented (implemented: {', '.join(_KINDS)})"
        )
        raise UnsupportedError(f"config.json: transformer_layer_config: {what}")
    try:
        return CONFIG_MAPPING[kind](
            **{key: value for key, value in fields.items() if key != "model_type"}
        )
    except Exception as error:  # transformers raises any exception
        raise ModelLoadError(
            f"config.json: transformer_layer_config: {' '.join(str(error).split())[:300]}"
        ) from error


def _whole(raw: dict[str, Any], key: str, default: int) -> int:
    value = raw.get(key)
    if value is not None and type(value) is not int:
        raise ModelLoadError(f"config.json: {key}: expected a whole number, got {shown(value)}")
    return default if value is None else value


def _taps(raw: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Return the layers after which states are read. Heads that don't say are made for these
    three."""
    ids = raw.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        if layers < 5:
            raise UnsupportedError(
                f"the model's {layers} layers are too few to read states after the second, the "
                f"middle and the last but two"
            )
        return 2, layers // 2, layers - 3
    if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
        raise ModelLoadError(
            f"config.json: eagle_aux_hidden_state_layer_ids: expected numbers of layers, got "
            f"{shown(ids)}"
        )
    if wrong := [one for one in ids if not 0 <= one < layers]:
        raise UnsupportedError(
            f"eagle_aux_hidden_state_layer_ids: it reads states after {wrong[0]} layers, and the "
            f"model has {layers}"
        )
    return tuple(ids)


class FirstLayer(nn.Module):
    """The head's first layer, whose attention also reads the embedding of the next token."""

    def __init__(self, head: Eagle3, context: BuildContext) -> None:
        super().__init__()
        arch = head.arch
        config = head.layer
        self.norm_before_residual = head.norm_before_residual
        self.embedding_norm = arch.norm(config, context)
        self.state_norm = arch.norm(config, context)
        self.attention = arch.attention(
            config, arch.spec(config, 0), context, inputs=2 * config.hidden_size
        )
        self.mlp_norm = arch.norm(config, context)
        self.mlp = arch.feed_forward(config, context)

    def store(self, embedded: torch.Tensor, states: torch.Tensor, rotation: Rotation) -> None:
        """Store K and V only."""
        self.attention.store(self._inputs(embedded, self.state_norm(states)), None, rotation)

    def forward(self, embedded: torch.Tensor, states: torch.Tensor, rotation: Rotation) -> Residual:
        normed = self.state_norm(states)
        q = self.attention.store(self._inputs(embedded, normed), None, rotation)
        residual = Residual(normed if self.norm_before_residual else states.clone())
        self.attention.attend(residual, q)
        self.mlp.add_to(residual, self.mlp_norm)
        return residual

    def _inputs(self, embedded: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.embedding_norm(embedded), normed), dim=1)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        yield WeightRule(f"{prefix}input_layernorm.weight", self.embedding_norm.weight)
        yield WeightRule(f"{prefix}hidden_norm.weight", self.state_norm.weight)
        yield WeightRule(f"{prefix}post_attention_layernorm.weight", self.mlp_norm.weight)
        yield from self.attention.weights(f"{prefix}self_attn.")
        yield from self.mlp.weights(f"{prefix}mlp.")


class Eagle3Head(nn.Module):
    """A `dovetail.api.draft_head.DraftHead`."""

    def __init__(self, arch: Eagle3, context: BuildContext, target: Tapped) -> None:
        super().__init__()
        family = arch.arch
        config = arch.layer
        self.vocab_size = arch.vocab_size
        self.draft_vocab_size = arch.draft_vocab_size
        self.embedding = family.embedding(config, context) if arch.has_embedding else None
        self.embed: Callable[[torch.Tensor], torch.Tensor] = (
            target.embed if self.embedding is None else self.embedding
        )
        self.fc = ReplicatedLinear(
            len(arch.taps) * arch.target_hidden_size, config.hidden_size, context
        )
        max_len = context.max_len or model_length(config)
        self.rotary = RotaryEmbedding(family.rope(config, 0), max_len, device=context.device)
        self.first = FirstLayer(arch, context)
        self.blocks = LayerList(
            family.block(config, family.spec(config, index), context)
            for index in range(1, config.num_hidden_layers)
        )
        self.norm = family.norm(config, context)
        self.head = LMHead(arch.draft_vocab_size, config.hidden_size, context)
        # [draft vocabulary] int64: the target's id of each draft id; None: the same
        self.targets: torch.Tensor | None = None

    def fuse(self, tapped: torch.Tensor) -> torch.Tensor:
        return self.fc(tapped)

    def store(self, inputs: HeadInputs) -> None:
        embedded = self.embed(inputs.token_ids)
        rotation = self.rotary(inputs.positions, inputs.axes)
        if not self.blocks:
            self.first.store(embedded, inputs.states, rotation)
            return
        residual = self.first(embedded, inputs.states, rotation)
        *earlier, last = self.blocks
        for block in earlier:
            block.add_to(residual, rotation)
        last.attention.store(residual, last.input_norm, rotation)

    def forward(self, inputs: HeadInputs) -> torch.Tensor:
        rotation = self.rotary(inputs.positions, inputs.axes)
        embedded = self.embed(inputs.token_ids)
        residual: Residual = self.first(embedded, inputs.states, rotation)
        for block in self.blocks:
            block.add_to(residual, rotation)
        return residual.summed()

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        own = self.head(self.norm(states))
        if self.targets is None:
            return own
        return own.new_full((len(own), self.vocab_size), -torch.inf).index_copy_(
            1, self.targets, own
        )

    def weights(self) -> Iterator[WeightRule]:
        if self.embedding is not None:
            yield WeightRule(_OWN_EMBEDDING, self.embedding.weight)
        yield WeightRule("fc.weight", self.fc.weight)
        yield from self.first.weights("layers.0.")
        for index, block in enumerate(self.blocks, 1):
            yield from block.weights(f"layers.{index}.")
        yield WeightRule("norm.weight", self.norm.weight)
        yield WeightRule("lm_head.weight", self.head.weight)
        for name in ("d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight"):
            yield WeightRule(name, None, optional=True)

    def load_checkpoint(self, directory: Path | None, seed: int) -> None:
        device = self.head.weight.device
        if directory is None:
            dummy_weights(self, seed)
            targets = torch.arange(self.draft_vocab_size) * (
                self.vocab_size // self.draft_vocab_size
            )
        else:
            load_weights(self, directory)
            targets = self._targets(directory)
        self.targets = (
            None if torch.equal(targets, torch.arange(self.vocab_size)) else targets.to(device)
        )

    def _targets(self, directory: Path) -> torch.Tensor:
        """Return the target's id of each draft id [draft vocabulary] int64. Raises `ModelLoadError`
        if the checkpoint's tables can't be right."""
        tables = dict(tensors_named(directory, lambda name: name in ("d2t", "t2d")))
        if "d2t" not in tables and self.draft_vocab_size < self.vocab_size:
            raise ModelLoadError(
                f"{directory}: the checkpoint lacks d2t, and draft_vocab_size is less than "
                f"vocab_size"
            )
        offsets = tables.get("d2t", torch.zeros(self.draft_vocab_size, dtype=torch.int64))
        if offsets.shape != (self.draft_vocab_size,) or offsets.is_floating_point():
            raise ModelLoadError(
                f"{directory}: d2t: expected {self.draft_vocab_size} whole numbers, found "
                f"{offsets.dtype} {list(offsets.shape)}"
            )
        targets = torch.arange(self.draft_vocab_size) + offsets.long()
        if (
            int(targets.min()) < 0
            or int(targets.max()) >= self.vocab_size
            or len({*targets.tolist()}) < len(targets)
        ):
            raise ModelLoadError(
                f"{directory}: d2t: draft ids must stand for different ids of the model's "
                f"{self.vocab_size}"
            )
        if (drafted := tables.get("t2d")) is not None:
            expected = torch.zeros(self.vocab_size, dtype=torch.bool).index_fill_(0, targets, True)
            if not torch.equal(drafted.bool(), expected):
                raise ModelLoadError(f"{directory}: t2d and d2t disagree")
        return targets
