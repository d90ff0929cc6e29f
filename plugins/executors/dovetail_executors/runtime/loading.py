"""Decides how a model is served (`ModelPlan`) and loads it. Each rank of an executor does both
once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dovetail.api.attention import AttentionLayer, LayerSpec
from dovetail.api.executor import ComponentRef, ExecutorConfig, ExecutorContext, QuantizationRef
from dovetail.api.model import (
    HeadLayer,
    LoadsItself,
    ModelArch,
    ParallelGroup,
)
from dovetail.api.state import StateLayer, StateSpec
from dovetail.errors import ConfigError, UnsupportedError, shown
from dovetail.nn.build import RuntimeContext
from dovetail.nn.format.base import Quantization
from dovetail.nn.model_files import stored_as
from dovetail.nn.moe import Experts
from dovetail.nn.parallel import SINGLE
from dovetail.nn.placed_weights import place_weights
from dovetail.nn.weights import Progress, dummy_weights, load_weights, stored_bytes
from dovetail_executors.runtime.architecture import (
    find_architecture,
    resolve_dtype,
    resolve_max_model_len,
)
from dovetail_executors.runtime.memory import require_ram
from dovetail_executors.runtime.pooling import PoolingPlan
from dovetail_executors.runtime.quantization import choose_quantization

log = logging.getLogger("dovetail")


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Decisions about a model, made before any of its weights are read."""

    arch: ModelArch
    config: Any  # transformers' PretrainedConfig
    quantization: Quantization | None  # weight format of its linear layers; None: plain
    dtype: torch.dtype
    max_model_len: int  # tokens
    specs: list[LayerSpec]  # of this rank's share of the attention layers
    cache_dtype: str | None  # of K and V; None: `dtype`
    states: list[StateSpec]  # of this rank's share of the recurrent layers
    state_dtype: torch.dtype  # of what they accumulate
    pooling: PoolingPlan

    @classmethod
    def of(
        cls,
        config: ExecutorConfig,
        models: tuple[ComponentRef, ...],
        group: ParallelGroup,
        device: torch.device,
        quantizations: tuple[QuantizationRef, ...] = (),
    ) -> ModelPlan:
        """Return the plan for the model in `config.model`, and log it.

        Raises `ModelLoadError` for an unusable config file, `UnsupportedError` if no architecture
        in `models` can serve it on these ranks, or none of `quantizations` its weights, and
        `ConfigError` if `config` contradicts the checkpoint or itself.
        """
        _require_known(config)
        arch, hf_config, made_for = find_architecture(config.model, models)
        quantization = choose_quantization(
            config.quantization, stored_as(config.model), quantizations, config.model
        )
        if group.size > 1 and not arch.capabilities.tensor_parallel:
            raise UnsupportedError(
                f"{type(arch).__name__} declares that it can't be split over ranks "
                f"(tensor_parallel), and there are {group.size}"
            )
        dtype = resolve_dtype(config.dtype, hf_config, device)
        specs = arch.layer_specs(hf_config, group)
        own = arch.pooling(hf_config)
        indivisible = bool(specs) and not any(spec.causal for spec in specs)
        if made_for == "classify" and not own.head:
            own = replace(own, head=(HeadLayer("score"),))
        pooling = PoolingPlan.of(
            config.model, config.pooling, own, hf_config, made_for, indivisible=indivisible
        )
        max_model_len = resolve_max_model_len(config.max_model_len, hf_config, pooling.max_length)
        specs = [_within(max_model_len, spec) for spec in specs]
        if config.kv_cache_scales == "calibrate" and config.kv_cache_dtype != "float8_e4m3fn":
            raise ConfigError(
                "kv_cache_scales: calibrate: only K and V in fp8 have scales; set kv_cache_dtype: "
                "fp8 too, or leave it out"
            )
        cache_dtype = (
            None if config.kv_cache_dtype in ("auto", _name(dtype)) else config.kv_cache_dtype
        )
        states = arch.state_specs(hf_config, group)
        state_dtype = getattr(torch, config.state_dtype)
        plan = cls(
            arch,
            hf_config,
            quantization,
            dtype,
            max_model_len,
            specs,
            cache_dtype,
            states,
            state_dtype,
            pooling,
        )
        if group.rank == 0:
            log.debug("model: %s", plan)
        return plan

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def dtype_name(self) -> str:
        """Such as "bfloat16"."""
        return _name(self.dtype)

    @property
    def quantization_name(self) -> str:
        return "none" if self.quantization is None else str(self.quantization)

    def __str__(self) -> str:
        states = (
            f"{len(self.states)} recurrent layers, states in {_name(self.state_dtype)}, "
            if self.states
            else ""
        )
        return (
            f"{type(self.arch).__name__} in {self.dtype_name}, quantization "
            f"{self.quantization_name}, {len(self.specs)} attention layers, K and V in "
            f"{self.cache_dtype or self.dtype_name}, {states}up to {self.max_model_len} tokens"
        )


class ReadingWeights:
    """Reads weights in a thread, while kernels that need only their shapes are compiled. As a
    context it waits for them at the end, and raises what reading them raised."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dovetail-weights")
        self._read: Future[None] | None = None

    def begin(self, read: Callable[[], None], device: torch.device) -> None:
        """Call `read`, which fills parameters on `device`."""

        def run() -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # the current device is per thread
            read()

        self._read = self._pool.submit(run)

    def wait(self) -> None:
        """Wait until the weights are there. Raises what `load_weights` raises."""
        if self._read is not None:
            self._read.result()

    def __enter__(self) -> ReadingWeights:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(wait=True)
        if kind is None:
            self.wait()


def forecast(context: ExecutorContext) -> str:
    """Return how a model would be served by one rank, by its config and the headers of its weights.
    Raises as `ModelPlan.of` and `stored_bytes` do."""
    config = context.config
    plan = ModelPlan.of(config, context.models, SINGLE, torch.device("cpu"), context.quantizations)
    size = stored_bytes(config.model)
    weights = f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
    served = f"{type(plan.arch).__name__}, up to {plan.max_model_len} tokens, weights of {weights}"
    return served if plan.quantization is None else f"{served} ({plan.quantization_name})"


_KNOWN: Mapping[str, tuple[str, ...]] = {
    "load_format": ("auto", "safetensors", "dummy"),
    "kv_cache_scales": ("auto", "calibrate"),
    "state_dtype": ("float32", "bfloat16"),
}


def _require_known(config: ExecutorConfig) -> None:
    """Raise `ConfigError` for a setting that `engine.yaml` can't have."""
    for name, values in _KNOWN.items():
        if (value := getattr(config, name)) not in values:
            raise ConfigError(f"{name}: {shown(value)}: expected {', '.join(values)}")
    if config.block_size is not None and config.block_size < 1:
        raise ConfigError(f"block_size: {config.block_size}: expected 1 or more")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _within(max_len: int, spec: LayerSpec) -> LayerSpec:
    """Return `spec` without a window that no sequence of up to `max_len` tokens leaves: such layers
    need no block table of their own."""
    return (
        replace(spec, window=None) if spec.window is not None and spec.window >= max_len else spec
    )


def load_model(
    plan: ModelPlan,
    config: ExecutorConfig,
    make_attention: Callable[[LayerSpec], AttentionLayer],
    parallel: ParallelGroup,
    device: torch.device,
    progress: Progress | None = None,
    environment: str = "",
    make_state: Callable[[StateSpec], StateLayer] | None = None,
    reading: ReadingWeights | None = None,
) -> torch.nn.Module:
    """Build the model that `plan` describes, a `dovetail.api.model.CausalLM`, and load its weights
    from `config.model` (random ones for `load_format: dummy`). `environment`: see
    `RuntimeContext`; the quantization is added. `make_state`: None if no states are kept.
    `reading`: as of `load_into`.

    Raises `ModelLoadError` for unusable files, and `UnsupportedError` if the architecture can't
    serve the config here.
    """
    later = plan.quantization is not None
    built_for = f"{environment}, {'plain' if plan.quantization is None else plan.quantization}"

    def make_layer(spec: LayerSpec) -> AttentionLayer:
        return make_attention(_within(plan.max_model_len, spec))

    context = RuntimeContext(
        parallel=parallel,
        dtype=plan.dtype,
        device=device,
        make_attention=make_layer,
        max_len=plan.max_model_len,
        weights_later=later,
        weights_stored=getattr(plan.quantization, "config", None) is not None,
        adapters=config.max_adapters > 0,
        environment=built_for,
    )
    if make_state is not None:
        context = replace(context, make_state=make_state)
    model = plan.arch.build(plan.config, context)
    return load_into(
        model,
        plan.quantization,
        config,
        device,
        progress,
        elsewhere=plan.pooling.owns,
        ranks=parallel.size,
        dtype=plan.dtype,
        reading=reading,
    )


def load_into(
    module: torch.nn.Module,
    quantization: Quantization | None,
    config: ExecutorConfig,
    device: torch.device,
    progress: Progress | None = None,
    *,
    partly: bool = False,
    elsewhere: Callable[[str], bool] = lambda _: False,
    ranks: int = 1,
    dtype: torch.dtype | None = None,
    reading: ReadingWeights | None = None,
) -> torch.nn.Module:
    """Load the weights of `module`, a `CausalLM` or a draft head, as `load_model` does, and return
    it. `quantization`: the format of those that were left for later. `partly`, `elsewhere`: as of
    `load_weights`. `dtype`: in which a module that loads itself keeps its weights. `reading`: reads
    weights that need no work after they are read; None: all are there on return.

    Raises `ConfigError` if the weights don't fit the memory available to a CPU.
    """
    if quantization is not None:
        place_weights(module, quantization, device)
    if (
        device.type == "cpu"
    ):  # its memory is virtual until it is written: the kernel would kill the process halfway
        kept_in = "" if dtype is None or quantization is not None else f" in {_name(dtype)}"
        require_ram(
            _weight_bytes(module, config, dtype), f"{config.model}: the weights{kept_in}", ranks
        )
    if isinstance(module, LoadsItself):
        module.load_checkpoint(
            None if config.load_format == "dummy" else Path(config.model), config.seed
        )
    elif config.load_format == "dummy":
        dummy_weights(module, config.seed)
    else:
        read = partial(
            load_weights,
            module,
            config.model,
            progress,
            partly=partly,
            elsewhere=elsewhere,
            ranks=ranks,
        )
        if reading is None or quantization is not None:
            read()
        else:
            reading.begin(read, device)
    return module.eval()


def _weight_bytes(
    module: torch.nn.Module, config: ExecutorConfig, dtype: torch.dtype | None
) -> int:
    """Return the size of the weights that are about to be loaded: of those that the module has, or
    of the files' if it makes its own."""
    if isinstance(module, LoadsItself) and config.load_format != "dummy":
        return stored_bytes(config.model, dtype)
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def num_parameters(model: torch.nn.Module) -> int:
    return sum(map(_numbers, model.parameters()))


def parameters_of_a_token(model: torch.nn.Module) -> int:
    """Return the number of parameters used per token: for a mixture, those of a few experts."""
    mixtures = [module for module in model.modules() if isinstance(module, Experts)]
    left_out = sum(
        (1 - mixture.share_per_token) * sum(map(_numbers, mixture.placed_weights()))
        for mixture in mixtures
    )
    return num_parameters(model) - round(left_out)


def _numbers(parameter: Any) -> int:
    numbers: int = getattr(parameter, "numbers", parameter.numel())
    return numbers
