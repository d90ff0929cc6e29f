"""Tiny models of each architecture, ours and transformers', with the same weights; and the plainest
attention there can be."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dovetail.api.attention import AttentionLayer, LayerCache, LayerSpec
from dovetail.api.executor import ComponentRef, ExecutorConfig
from dovetail.api.model import ModelArch, ModelContext, ModelInputs, ParallelGroup
from dovetail.nn.build import RuntimeContext
from dovetail.nn.parallel import SINGLE
from dovetail.testing.suites.attention_oracle import Rules, plain, selected
from dovetail_models import dovetail_components

torch.set_num_threads(1)

CPU = torch.device("cpu")
MODELS = tuple(
    ComponentRef("model", f"dovetail:{spec.name}", spec.target, architectures=spec.architectures)
    for spec in dovetail_components()
)
BY_TYPE = {target.name.partition(":")[2]: target for target in MODELS}


class DenseAttention(AttentionLayer):
    """Attention of one sequence that comes in chunks: keeps all K and V, masks by position. `of`:
    the layer whose K and V it shares."""

    def __init__(
        self,
        spec: LayerSpec,
        of: DenseAttention | None = None,
        chosen: list[torch.Tensor] | None = None,
    ) -> None:
        """`chosen`: what the layers of a model have selected, the latest last."""
        self.spec, self._of = spec, of
        self.chosen = [] if chosen is None else chosen
        self.index_keys = torch.zeros(0, 0 if spec.indexer is None else spec.indexer.size)
        self.keys, self.values = (
            torch.zeros(0, spec.kv_heads, spec.head_size),
            torch.zeros(0, spec.kv_heads, spec.out_size),
        )

    def bind(self, cache: LayerCache) -> None:
        raise NotImplementedError("K and V are kept here")

    def write(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        v = k[..., : self.spec.out_size] if v is None else v
        self.keys, self.values = torch.cat((self.keys, k)), torch.cat((self.values, v))

    def write_index(self, keys: torch.Tensor) -> None:
        self.index_keys = torch.cat((self.index_keys, keys))

    def select(self, q: torch.Tensor, weights: torch.Tensor) -> None:
        assert self.spec.indexer is not None
        self.chosen.append(selected(q, weights, self.index_keys, self.spec.indexer.top_k))

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        rules = Rules(self.spec.scale, self.spec.window, self.spec.softcap, self.sinks)
        if self.spec.indexer is not None:
            rules = rules._replace(selected=self.chosen[-1])
        kept = self._of or self
        return plain(q, kept.keys, kept.values, rules, q.dtype).to(q.dtype)


def context(
    parallel: ParallelGroup = SINGLE, make_attention: Any = None, **fields: Any
) -> RuntimeContext:
    layers: dict[int, DenseAttention] = {}
    chosen: list[torch.Tensor] = []

    def make(spec: LayerSpec) -> DenseAttention:
        layers[spec.index] = DenseAttention(
            spec, None if spec.shares is None else layers[spec.shares], chosen
        )
        return layers[spec.index]

    return RuntimeContext(
        parallel=parallel,
        dtype=torch.float32,
        device=CPU,
        make_attention=make_attention or make,
        **fields,
    )


def arch_of(config: Any) -> ModelArch:
    return BY_TYPE[config.model_type].make(ModelContext())


def build(config: Any, **fields: Any) -> Any:
    return arch_of(config).build(config, context(**fields))


def reference(config: Any, seed: int = 0) -> Any:
    """transformers' model, with random weights that leave no parameter at a neutral value."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.normal_(mean=1.0, std=0.2)
            if name.endswith("bias"):  # of experts
                buffer.normal_(std=0.2)
    return model


def checkpoint_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint of transformers' `model` holds."""
    from transformers.core_model_loading import revert_weight_conversion

    # a mixture's experts have tensors of their own
    held = revert_weight_conversion(model, model.state_dict())
    tensors = {name: value.detach().clone() for name, value in held.items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


def fill(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Load by the model's own rules, without files."""
    for rule in model.weights():
        if rule.source in tensors:
            rule.parameter.load(tensors[rule.source], rule.shard_id, rule.transform)


@torch.no_grad()
def run(
    model: Any, token_ids: torch.Tensor, chunks: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of one sequence, computed whole or in chunks of these lengths (which
    add up)."""
    positions = torch.arange(len(token_ids))
    steps = zip(
        *(torch.split(x, list(chunks or (len(token_ids),))) for x in (token_ids, positions)),
        strict=True,
    )
    hidden = torch.cat([model(ModelInputs(token_ids=ids, positions=at)) for ids, at in steps])
    return hidden, model.logits(hidden)


@torch.no_grad()
def run_reference(model: Any, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = model(token_ids[None], output_hidden_states=True)
    return out.hidden_states[-1][0], out.logits[0]


@dataclass
class FakeGroup:
    """One of several ranks without the others: its sums and gathers stay its own share, and are
    counted."""

    rank: int
    size: int
    sums: list[torch.Tensor] = field(default_factory=list)
    shares: Any = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.sums.append(x)
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return x


def executor_config(model: Path | str, **fields: Any) -> ExecutorConfig:
    settings: dict[str, Any] = {
        "dtype": "auto",
        "load_format": "auto",
        "max_model_len": None,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "gpu_memory_utilization": 0.9,
        "kv_cache_memory": None,
        "block_size": None,
        "cuda_graphs": False,
        "overlap": False,
        "seed": 0,
    }
    return ExecutorConfig(str(model), **(settings | fields))
