"""A measured run of vLLM as LLMServingSim's authors record it
(`HARDWARE__MODEL__meta.json`, `__config.json`, `__requests.jsonl`): what was sent, and how the
engine was set up. What can't be simulated is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError
from dovetail_lab.model_sizes import ModelSizes
from dovetail_lab.traces import Trace, load_trace

BLOCK_SIZE = 16  # vLLM's, where nothing else is recorded
MEMORY_SHARE = 0.9
# of a GPU, that neither weights nor K and V get: a step's activations, graphs, the CUDA context
ACTIVATIONS_BYTES = 1.6e9
LONGEST = 40_960  # tokens of a request: more than any run here has
WEIGHT_BYTES = 2
KV_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
READ = {  # arguments of the engine that the simulation follows
    "model",
    "tensor_parallel_size",
    "data_parallel_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "kv_cache_dtype",
    "enable_prefix_caching",
    "block_size",
    "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
}
IN_STEP_TIMES = {  # those that change how long steps take, which is fitted, or nothing
    "enable_expert_parallel",
    "seed",
    "load_format",
    "skip_tokenizer_init",
    "enforce_eager",
    "disable_custom_all_reduce",
    "compilation_config",
    "tokenizer",
    "trust_remote_code",
    "disable_log_stats",
    "async_scheduling",
    "attention_backend",
    "distributed_executor_backend",
}
SIMULATED: Mapping[str, tuple[Any, ...]] = {  # the only values that are
    "dtype": ("auto", "bfloat16", "float16", "half"),
    "pipeline_parallel_size": (1,),
    "scheduling_policy": ("fcfs",),
    "enable_chunked_prefill": (True,),
}
_QWEN3_30B = {
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151_936,
}
MODELS: Mapping[str, Mapping[str, Any]] = {  # of their config.json
    "meta-llama/Llama-3.1-8B": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "vocab_size": 128_256,
    },
    "Qwen/Qwen3-32B": {
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 25_600,
        "vocab_size": 151_936,
    },
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": _QWEN3_30B,
}


@dataclass(frozen=True, slots=True)
class VLLMRun:
    """One measured run."""

    name: str
    trace: Trace
    model: str
    sizes: ModelSizes | None  # None: nobody knows them
    gpus: int  # that share each layer of a replica
    replicas: int
    max_num_seqs: int  # of a replica
    budget: int  # tokens of a step of a replica
    longest: int  # tokens that a request may have
    block_size: int
    num_blocks: int  # of a replica
    pool_is_recorded: bool  # False: estimated from the memory of the GPU
    reuse: bool  # of computed prefixes: requests that were preempted find what is left of theirs
    kv_bytes: int  # of a number of K or V
    bytes_per_s: float  # of one GPU's memory

    @classmethod
    def load(cls, folder: Path, name: str, model_config: Path | None = None) -> VLLMRun:
        """Read the three files of a run. `model_config`: the config.json of a model that isn't
        among `MODELS`.

        Raises `ConfigError` that names each setting that isn't simulated, a model of unknown sizes
        where they are needed, and files that don't fit together.
        """
        meta, config = (
            json.loads((folder / f"{name}__{what}.json").read_text()) for what in ("meta", "config")
        )
        settings = meta["engine_kwargs"]
        instances = [instance for node in config["nodes"] for instance in node["instances"]]
        if problems := [*_not_simulated(settings), *_unlike(instances, settings)]:
            raise ConfigError(
                f"{name}: this run can't be simulated:\n"
                + "\n".join(f"  {problem}" for problem in problems)
            )
        trace = load_trace(folder / f"{name}__requests.jsonl")
        if len(trace) != meta.get("num_requests", len(trace)):
            raise ConfigError(
                f"{name}: meta.json says {meta['num_requests']} requests, and {len(trace)} have "
                f"times"
            )
        memory = instances[0]["npu_mem"]
        gpus = settings["tensor_parallel_size"]
        kv_bytes = KV_BYTES[settings.get("kv_cache_dtype") or "auto"]
        described = model_config if model_config is not None else MODELS.get(settings["model"])
        sizes = (
            None
            if described is None
            else ModelSizes.of(described if isinstance(described, Mapping) else str(described))
        )
        block_size = _recorded(meta, "block_size") or BLOCK_SIZE
        recorded = settings.get("num_gpu_blocks_override") or _recorded(meta, "num_gpu_blocks")
        if recorded is None and sizes is None:
            raise ConfigError(
                f"{name}: meta.json doesn't record num_gpu_blocks, and the sizes of "
                f"{settings['model']} aren't known: give its config.json"
            )
        caching = _recorded(meta, "enable_prefix_caching")
        return cls(
            name=name,
            trace=trace,
            model=settings["model"],
            sizes=sizes,
            gpus=gpus,
            replicas=settings.get("data_parallel_size") or 1,
            max_num_seqs=settings["max_num_seqs"],
            budget=settings["max_num_batched_tokens"],
            longest=settings.get("max_model_len") or LONGEST,
            block_size=block_size,
            # vLLM never allocates block 0.
            num_blocks=recorded - 1
            if recorded
            else _estimated_blocks(sizes, memory, settings, block_size * kv_bytes),
            pool_is_recorded=recorded is not None,
            reuse=True if caching is None else caching,
            kv_bytes=kv_bytes,
            bytes_per_s=1e9 * memory["mem_bw"],
        )

    @property
    def in_step(self) -> bool:
        """True if replicas begin each step together: those of a mixture, since a token's experts
        are on the GPUs of all."""
        return self.replicas > 1 and self.sizes is not None and self.sizes.experts > 0

    def __str__(self) -> str:
        pool = (
            f"{self.num_blocks:,} blocks of {self.block_size}, "
            f"{'as recorded' if self.pool_is_recorded else 'estimated from the memory'}"
        )
        shared = (
            f"{self.replicas} x {self.gpus} GPUs, {self.max_num_seqs} sequences, "
            f"{self.budget:,} tokens a step, reuse {'on' if self.reuse else 'off'}"
        )
        return f"{self.name}: {shared}, {pool}"


def _not_simulated(settings: Mapping[str, Any]) -> Iterator[str]:
    for key, value in settings.items():
        allowed = SIMULATED.get(key)
        if key in READ | IN_STEP_TIMES or value is None or value is False:
            continue
        if allowed is None:
            yield f"engine_kwargs.{key} is {value!r}: nothing is known of it here"
        elif value not in allowed:
            yield f"engine_kwargs.{key} is {value!r}: expected {' or '.join(map(repr, allowed))}"
    if settings.get("enable_chunked_prefill") is False:
        yield "engine_kwargs.enable_chunked_prefill is False: prompts are always cut into chunks here"
    kv_dtype = settings.get("kv_cache_dtype") or "auto"
    if kv_dtype not in KV_BYTES:
        yield f"engine_kwargs.kv_cache_dtype is {kv_dtype!r}: expected one of {', '.join(KV_BYTES)}"


def _unlike(instances: list[Mapping[str, Any]], settings: Mapping[str, Any]) -> Iterator[str]:
    """Name what config.json says that isn't simulated: several kinds of GPU, prefills and decodes
    apart."""
    for key in ("hardware", "model_name"):
        if len(found := {str(instance[key]) for instance in instances}) > 1:
            yield f"config.json has instances of different {key}: {', '.join(sorted(found))}"
    for instance in instances:
        if instance.get("pd_type") is not None:
            yield f"config.json: pd_type is {instance['pd_type']!r}: prefills and decodes run in one engine here"
        if (
            instance.get("tp_size", settings["tensor_parallel_size"])
            != settings["tensor_parallel_size"]
        ):
            yield f"config.json: tp_size is {instance['tp_size']}, and tensor_parallel_size {settings['tensor_parallel_size']}"


def _recorded(meta: Mapping[str, Any], key: str) -> Any:
    """Return what vLLM resolved, by the run's own record: newer files have it in a section of its
    own, or in a copy of the whole config."""
    resolved = meta.get("resolved_config") or {}
    for section in (
        meta.get("kv_cache") or {},
        resolved.get("cache_config") or {},
        meta,
        meta["engine_kwargs"],
    ):
        if section.get(key) is not None:
            return section[key]
    return None


def _estimated_blocks(
    sizes: ModelSizes | None,
    memory: Mapping[str, Any],
    settings: Mapping[str, Any],
    bytes_per_number: int,
) -> int:
    """Return the blocks that fit beside weights and activations, or into what K and V were given;
    `bytes_per_number`: of a number of K or V, for all tokens of a block."""
    if sizes is None:
        raise ConfigError("the pool can't be estimated for a model of unknown sizes")
    gpus = settings["tensor_parallel_size"]
    given = settings.get("kv_cache_memory_bytes")
    taken = (
        (settings.get("gpu_memory_utilization") or memory.get("mem_util", MEMORY_SHARE))
        * memory["mem_size"]
        * 2**30
    )
    left = (
        gpus * given
        if given
        else gpus * (taken - ACTIVATIONS_BYTES) - WEIGHT_BYTES * sizes.parameters
    )
    blocks = int(left / (bytes_per_number * sizes.kv_numbers))
    if blocks < 1:
        raise ConfigError(
            f"{gpus} GPUs of {memory['mem_size']} GiB have no room for the model's weights"
        )
    return blocks
