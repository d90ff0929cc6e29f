"""`ModelSizes`: the numbers of a transformer's config.json that determine how much a step reads and computes, for the roofline model and estimates
of the KV pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError, ModelLoadError
from dovetail.json_files import read_json_object
from dovetail_lab.step_time import share_touched

NAMES: Mapping[str, tuple[str, ...]] = {  # names of the same number by model family
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embed", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "mlp": ("intermediate_size", "ffn_dim", "n_inner"),
    "vocab": ("vocab_size",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "expert_mlp": ("moe_intermediate_size",),
    "shared_mlp": ("shared_expert_intermediate_size",),
}
UNGATED = ("opt", "bloom", "gpt2", "gpt_neox", "phi")  # model types with two matrices in the MLP, not three
REFUSED: Mapping[str, str] = {  # key, if set -> its meaning
    "kv_lora_rank": "latent attention",
    "ssm_cfg": "state-space layers",
    "mamba_num_heads": "state-space layers",
    "linear_num_key_heads": "linear attention",
    "first_k_dense_replace": "dense layers before the layers with experts",
    "mlp_only_layers": "dense layers among the layers with experts",
    "n_shared_experts": "shared experts counted in multiples of another",
    "vision_config": "an image encoder",
}


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a decoder-only transformer with full attention and identical layers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    mlp_matrices: int  # 3 if gated, 2 if not
    mlp: int  # inner size of the MLP or shared expert, which all tokens use; 0: none
    experts: int = 0  # per layer; 0: no mixture of experts
    experts_per_token: int = 0
    expert_mlp: int = 0  # inner size of an expert

    @classmethod
    def of(cls, source: str | Mapping[str, Any]) -> ModelSizes:
        """Read the sizes from a config.json, its folder, or its content.

        Raises `ConfigError` that names a key that is missing, isn't a positive integer, or can't be expressed by these sizes.
        """
        origin, config = ("model", dict(source)) if isinstance(source, Mapping) else _read(source)
        for key, meaning in REFUSED.items():
            if config.get(key):
                raise ConfigError(f"{origin}: {key} is {config[key]!r}: {meaning}: not supported (only identical layers with full attention)")
        if config.get("sliding_window") and config.get("use_sliding_window", True):
            raise ConfigError(f"{origin}: sliding_window is {config['sliding_window']}: not supported (only full attention)")

        def number(name: str, default: int | None = None) -> int:
            key = next((key for key in NAMES[name] if config.get(key) is not None), None)
            value = default if key is None else config[key]
            if not isinstance(value, int) or isinstance(value, bool) or value < (0 if default == 0 else 1):
                raise ConfigError(f"{origin}: expected {' or '.join(NAMES[name])} as a positive integer, got {value!r}")
            return value

        hidden, heads = number("hidden"), number("heads")
        experts = number("experts", 0)
        return cls(
            layers=number("layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=number("kv_heads", heads),
            head_size=number("head_size", max(hidden // heads, 1)),
            vocab=number("vocab"),
            mlp_matrices=2 if config.get("model_type") in UNGATED else 3,
            mlp=number("shared_mlp", 0) if experts else number("mlp", 4 * hidden),
            experts=experts,
            experts_per_token=number("experts_per_token") if experts else 0,
            expert_mlp=number("expert_mlp", number("mlp", 4 * hidden)) if experts else 0,
        )

    @property
    def attention_weights(self) -> int:
        """Number of weights of one layer's attention: queries, keys, values and output."""
        return self.hidden * self.head_size * 2 * (self.heads + self.kv_heads)

    @property
    def dense_weights(self) -> int:
        """Number of weights in all layers that every token uses, including the experts' router."""
        return self.layers * (self.attention_weights + self.mlp_matrices * self.hidden * self.mlp + self.hidden * self.experts)

    @property
    def expert_weights(self) -> int:
        """Number of weights of one expert, in all layers together."""
        return self.layers * self.mlp_matrices * self.hidden * self.expert_mlp

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Number of all weights, with an embedding separate from the head. Norms and biases, some thousandths, are excluded."""
        return self.dense_weights + self.experts * self.expert_weights + 2 * self.head_weights

    @property
    def kv_numbers(self) -> int:
        """Number of K and V values of a token, in all layers together."""
        return 2 * self.layers * self.kv_heads * self.head_size

    def experts_touched(self, tokens: int) -> float:
        """Return the expected number of a layer's E experts that a batch uses if each token chooses k uniformly: E (1 - (1 - k/E)^tokens)."""
        return self.experts * share_touched(self.experts_per_token / self.experts, tokens) if self.experts else 0.0


def _read(source: str) -> tuple[str, dict[str, Any]]:
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        return str(path), read_json_object(path)
    except ModelLoadError as error:
        raise ConfigError(str(error)) from None
