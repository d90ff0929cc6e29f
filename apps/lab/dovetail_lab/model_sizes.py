"""`ModelSizes`: the numbers of a transformer's config.json that determine how much a step reads and
computes, for the roofline model, and the layout of its K and V in the pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from dovetail.api.json_files import read_json_object
from dovetail.api.kv_layout import CachedLayer, CachedState, PlannedLayout, plan_layout
from dovetail.errors import ConfigError, ModelLoadError
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
# model types with two matrices in the MLP, not three
UNGATED = (
    "opt",
    "bloom",
    "gpt2",
    "gpt_neox",
    "phi",
)
REFUSED: Mapping[str, str] = {  # key, if set -> its meaning
    "kv_lora_rank": "latent attention",
    "ssm_cfg": "state-space layers",
    "mamba_num_heads": "state-space layers",
    "attention_chunk_size": "chunked attention",
    "num_kv_shared_layers": "K and V shared between layers",
    "global_head_dim": "layers with different head sizes",
    "first_k_dense_replace": "dense layers before the layers with experts",
    "mlp_only_layers": "dense layers among the layers with experts",
    "n_shared_experts": "shared experts counted in multiples of another",
    "vision_config": "an image encoder",
}
# model types with an image encoder that the engine leaves out: `text_config` is the model
TEXT_ONLY = (
    "gemma3",
    "mistral3",
    "qwen3_5",
    "qwen3_5_moe",
)
PATTERNS: Mapping[str, int] = {
    "gemma2": 2,
    "gemma3_text": 6,
    "gpt_oss": 2,
    "cohere2": 4,
}  # model type -> of how many layers the last has no window
# of keys that published files leave out, by model type
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "sliding_window": 4096,
    },
}
# model types with layers of Gated DeltaNet, and gated attention in the others
RECURRENT = (
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
# model types whose head is their embedding, unless the file says otherwise
TIED = (
    "gemma",
    "gemma2",
    "gemma3_text",
)


@dataclass(frozen=True, slots=True)
class RecurrentSizes:
    """Sizes of the layers that keep a state instead of K and V, by Gated DeltaNet
    (arXiv:2412.06464)."""

    layers: tuple[int, ...]  # their indices
    k_heads: int
    v_heads: int
    k_size: int  # of a head
    v_size: int
    kernel: int  # inputs that the short convolution sees

    @property
    def channels(self) -> int:
        """Number of channels of the short convolution: queries, keys and values."""
        return 2 * self.k_heads * self.k_size + self.v_heads * self.v_size

    @property
    def numbers(self) -> int:
        """Number of accumulated values of one layer's state."""
        return self.v_heads * self.v_size * self.k_size

    def weights(self, hidden: int) -> int:
        """Return the number of weights of one layer: queries, keys, values and gates, two numbers a
        head, and the output."""
        return hidden * (self.channels + 2 * self.v_heads * self.v_size + 2 * self.v_heads)

    def state_bytes(self, input_bytes: float = 2.0, state_bytes: float = 4.0) -> float:
        """Return the bytes of one layer's state: accumulated values and past inputs of the
        convolution."""
        return state_bytes * self.numbers + input_bytes * self.channels * (self.kernel - 1)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a decoder-only transformer whose layers are identical but for their windows, or for
    keeping a state instead of K and V."""

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
    # by attention layer: tokens that a query sees, itself included; None: all. Empty: all see
    # everything
    windows: tuple[int | None, ...] = ()
    recurrent: RecurrentSizes | None = None  # layers that keep a state
    gated: bool = False  # attention's output is multiplied by a gate as wide as the queries
    tied: bool = False  # the head's weights are the embedding's

    @classmethod
    def of(cls, source: str | Mapping[str, Any]) -> ModelSizes:
        """Read the sizes from a config.json, its folder, or its content.

        Raises `ConfigError` that names a key that is missing, isn't a positive integer, or can't be
        expressed by these sizes.
        """
        origin, config = ("model", dict(source)) if isinstance(source, Mapping) else _read(source)
        if config.get("model_type") in TEXT_ONLY and isinstance(config.get("text_config"), Mapping):
            config = dict(config["text_config"])
        model_type = config.get("model_type")
        config = (
            {**DEFAULTS.get(model_type, {}), **config} if isinstance(model_type, str) else config
        )
        for key, meaning in REFUSED.items():
            if config.get(key):
                raise ConfigError(
                    f"{origin}: {key} is {config[key]!r}: {meaning}: not supported (layers may "
                    f"differ only in their windows)"
                )

        def number(name: str, default: int | None = None) -> int:
            key = next((key for key in NAMES[name] if config.get(key) is not None), None)
            value = default if key is None else config[key]
            if (
                not isinstance(value, int)
                or isinstance(value, bool)
                or value < (0 if default == 0 else 1)
            ):
                raise ConfigError(
                    f"{origin}: expected {' or '.join(NAMES[name])} as a positive integer, got "
                    f"{value!r}"
                )
            return value

        hidden = number("hidden")
        heads = number("heads")
        experts = number("experts", 0)
        layers = number("layers")
        recurrent = None
        if model_type in RECURRENT:
            recurrent, config = _recurrent(origin, config, layers)
        windows = _windows(origin, config, layers - len(recurrent.layers) if recurrent else layers)
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=number("kv_heads", heads),
            head_size=number("head_size", max(hidden // heads, 1)),
            vocab=number("vocab"),
            mlp_matrices=2 if model_type in UNGATED else 3,
            mlp=number("shared_mlp", 0) if experts else number("mlp", 4 * hidden),
            experts=experts,
            experts_per_token=number("experts_per_token") if experts else 0,
            expert_mlp=number("expert_mlp", number("mlp", 4 * hidden)) if experts else 0,
            windows=windows if any(windows) else (),
            tied=bool(config.get("tie_word_embeddings", model_type in TIED)),
            recurrent=recurrent,
            gated=recurrent is not None,
        )

    @property
    def attention_layers(self) -> int:
        return self.layers - (len(self.recurrent.layers) if self.recurrent else 0)

    @property
    def attention_weights(self) -> int:
        """Number of weights of one layer's attention: queries, keys, values, gates and output."""
        return (
            self.hidden
            * self.head_size
            * (2 * (self.heads + self.kv_heads) + (self.heads if self.gated else 0))
        )

    @property
    def dense_weights(self) -> int:
        """Number of weights in all layers that every token uses, including the experts' router."""
        mixers = self.attention_layers * self.attention_weights
        if self.recurrent:
            mixers += len(self.recurrent.layers) * self.recurrent.weights(self.hidden)
        return mixers + self.layers * (
            self.mlp_matrices * self.hidden * self.mlp + self.hidden * self.experts
        )

    @property
    def expert_weights(self) -> int:
        """Number of weights of one expert, in all layers together."""
        return self.layers * self.mlp_matrices * self.hidden * self.expert_mlp

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Number of all weights. Norms and biases, some thousandths, are excluded."""
        return (
            self.dense_weights
            + self.experts * self.expert_weights
            + (1 if self.tied else 2) * self.head_weights
        )

    @property
    def kv_numbers(self) -> int:
        """Number of K and V values of a token, in all layers together."""
        return 2 * self.attention_layers * self.kv_heads * self.head_size

    @property
    def state_bytes(self) -> float:
        """Bytes of a request's state, in all layers together."""
        return len(self.recurrent.layers) * self.recurrent.state_bytes() if self.recurrent else 0.0

    @property
    def state_numbers(self) -> int:
        """Number of accumulated values of a request's state, in all layers together."""
        return len(self.recurrent.layers) * self.recurrent.numbers if self.recurrent else 0

    def cache_layout(
        self, block_size: int, kv_bytes: float = 2.0, max_len: int | None = None
    ) -> PlannedLayout:
        """Return the layout of the engine's pool for these layers, on all devices together.
        `block_size`: tokens of the smallest block. `kv_bytes`: of a K or V value. `max_len`:
        longest sequence; windows of as many tokens count as none."""

        def tensor_bytes(tokens: int) -> tuple[int, int]:
            size = ceil(kv_bytes * self.kv_heads * self.head_size * tokens)
            return size, size

        windows = self.windows or (None,) * self.attention_layers
        ending = [
            None if window is None or (max_len is not None and window >= max_len) else window
            for window in windows
        ]
        states = list[CachedState]()
        kept = self.recurrent
        if kept:
            tensors = (
                (kept.channels, 2 * (kept.kernel - 1)),
                (kept.v_heads * kept.v_size, 4 * kept.k_size),
            )
            states = [CachedState(index, tensors) for index in kept.layers]
        attention = sorted(set(range(self.layers)) - {state.index for state in states})
        layers = [
            CachedLayer(index, window, tensor_bytes)
            for index, window in zip(attention, ending, strict=True)
        ]
        return plan_layout(layers, block_size, "none", states=states)

    def experts_touched(self, tokens: int) -> float:
        """Return the expected number of a layer's E experts that a batch uses if each token chooses
        k uniformly: E (1 - (1 - k/E)^tokens)."""
        return (
            self.experts * share_touched(self.experts_per_token / self.experts, tokens)
            if self.experts
            else 0.0
        )


def _recurrent(
    origin: str, config: Mapping[str, Any], layers: int
) -> tuple[RecurrentSizes, dict[str, Any]]:
    """Return the sizes of the recurrent layers, and the config of the other layers alone. Raises
    `ConfigError` that names a key."""

    def number(key: str, default: int) -> int:
        value = default if config.get(key) is None else config[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{origin}: expected {key} as a positive integer, got {value!r}")
        return value

    every = number("full_attention_interval", 4)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [
            "full_attention" if (index + 1) % every == 0 else "linear_attention"
            for index in range(layers)
        ]
    if not isinstance(kinds, list | tuple) or len(kinds) != layers:
        raise ConfigError(
            f"{origin}: expected layer_types as a list of {layers} entries, one a layer, got "
            f"{kinds!r}"
        )
    indices = tuple(index for index, kind in enumerate(kinds) if kind == "linear_attention")
    sizes = RecurrentSizes(
        layers=indices,
        k_heads=number("linear_num_key_heads", 16),
        v_heads=number("linear_num_value_heads", 32),
        k_size=number("linear_key_head_dim", 128),
        v_size=number("linear_value_head_dim", 128),
        kernel=number("linear_conv_kernel_dim", 4),
    )
    return sizes, {**config, "layer_types": [kind for kind in kinds if kind != "linear_attention"]}


def _windows(origin: str, config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer. Raises `ConfigError` if the config's keys contradict each
    other, or name other kinds of attention."""
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    # Qwen's: the layers before it have none, and none has any unless `use_sliding_window` says so
    first = config.get("max_window_layers")
    if not config.get("use_sliding_window", first is None):
        window = None
    is_size = type(window) is int and window >= 1
    if window is not None and not is_size:
        raise ConfigError(
            f"{origin}: expected sliding_window as a positive integer, got {window!r}"
        )
    if kinds is None:
        default = PATTERNS.get(str(config.get("model_type")))
        pattern = config.get(
            "sliding_window_pattern", config.get("_sliding_window_pattern", default)
        )
        if pattern is not None and (not isinstance(pattern, int) or pattern < 1):
            raise ConfigError(
                f"{origin}: expected sliding_window_pattern as a positive integer, got {pattern!r}"
            )
        slides = [
            index >= (first or 0) and (pattern is None or (index + 1) % pattern != 0)
            for index in range(layers)
        ]
        return tuple(window if sliding else None for sliding in slides)
    if not isinstance(kinds, list | tuple) or len(kinds) != layers:
        raise ConfigError(
            f"{origin}: expected layer_types as a list of {layers} entries, one a layer, got "
            f"{kinds!r}"
        )
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(
                f"{origin}: layer_types has {kind!r}: not supported (only full_attention and "
                f"sliding_attention)"
            )
    if "sliding_attention" in kinds and window is None:
        raise ConfigError(
            f"{origin}: layer_types has sliding_attention, but sliding_window is null (or "
            f"use_sliding_window is false)"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _read(source: str) -> tuple[str, dict[str, Any]]:
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        return str(path), read_json_object(path)
    except ModelLoadError as error:
        raise ConfigError(str(error)) from None
