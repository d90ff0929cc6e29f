"""Loads a model directory into a module with its weights. Executors call it once per rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dovetail.api.attention import AttentionLayer, LayerSpec
from dovetail.api.executor import ComponentRef, ExecutorConfig, QuantizationRef
from dovetail.api.model import BuildContext, LoadsItself, ParallelGroup
from dovetail.runtime.model_files import find_architecture, resolve_dtype, resolve_max_model_len, stored_as
from dovetail.runtime.quantization import choose_quantization, place_weights
from dovetail.runtime.weights import Progress, dummy_weights, load_weights


class LoadedModel(NamedTuple):
    """A model that is ready to run."""

    module: torch.nn.Module  # a `dovetail.api.model.CausalLM`
    config: Any  # transformers' PretrainedConfig
    dtype: torch.dtype
    max_model_len: int  # tokens
    vocab_size: int
    quantization: str  # description of the weight format of its linear layers; "none" if plain


def load_model(
    model_dir: str | Path,
    config: ExecutorConfig,
    models: tuple[ComponentRef, ...],
    make_attention: Callable[[LayerSpec], AttentionLayer],
    parallel: ParallelGroup,
    device: torch.device,
    progress: Progress | None = None,
    quantizations: tuple[QuantizationRef, ...] = (),
    environment: str = "",
) -> LoadedModel:
    """Build the architecture that serves this directory and load its weights (random ones for `load_format: dummy`). `environment`: see
    `BuildContext`; the quantization is added.

    Raises `ModelLoadError` for unusable files, `UnsupportedError` if no architecture in `models` can serve the config, or none of `quantizations`
    its weights, and `ConfigError` if `config.quantization` contradicts the checkpoint's.
    """
    arch, hf_config = find_architecture(model_dir, models)
    quantization = choose_quantization(config.quantization, stored_as(model_dir), quantizations, model_dir)
    dtype = resolve_dtype(config.dtype, hf_config, device)
    max_model_len = resolve_max_model_len(config.max_model_len, hf_config)
    later = quantization is not None
    built_for = f"{environment}, {'plain' if quantization is None else quantization}"
    context = BuildContext(parallel, dtype, device, make_attention, max_len=max_model_len, weights_later=later, environment=built_for)
    module = arch.build(hf_config, context)
    if quantization is not None:
        place_weights(module, quantization, device)
    if isinstance(module, LoadsItself):
        module.load_checkpoint(None if config.load_format == "dummy" else Path(model_dir), config.seed)
    elif config.load_format == "dummy":
        dummy_weights(module, config.seed)
    else:
        load_weights(module, model_dir, progress)
    module.eval()
    return LoadedModel(module, hf_config, dtype, max_model_len, int(hf_config.vocab_size), "none" if quantization is None else str(quantization))
