"""Facts that an engine tells of itself, under the names that vLLM's users know: its model,
scheduler, cache and devices, and its counts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from dovetail.engine.stats import EngineStats
from dovetail.errors import ModelLoadError, describe

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from dovetail.api.executor import Capacity
    from dovetail.config.engine import EngineConfig
    from dovetail.registry.resolved import ResolvedComponent


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model that an engine serves."""

    model: str  # as it was named
    tokenizer: str  # likewise
    architecture: str | None  # its class in config.json; None: the executor doesn't say
    dtype: str | None  # of weights and activations, as chosen; None: the executor doesn't say
    max_model_len: int  # tokens of the longest sequence
    vocab_size: int
    seed: int
    directory: Path  # of its files

    @property
    def hf_config(self) -> PretrainedConfig:
        """The model's `config.json`, read by transformers. Raises `ModelLoadError` if it can't."""
        from transformers import AutoConfig  # takes seconds, and few programs ask

        try:
            return AutoConfig.from_pretrained(self.directory, trust_remote_code=False)
        except Exception as error:
            raise ModelLoadError(
                f"{self.directory}: transformers can't read config.json: {describe(error)}"
            ) from error

    def get_vocab_size(self) -> int:
        return self.vocab_size


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The policy, and how much one step may hold."""

    policy: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The pool of pages for K and V."""

    block_size: int  # tokens
    num_gpu_blocks: int  # wherever they are
    gpu_memory_utilization: float
    cache_dtype: str  # of K and V
    enable_prefix_caching: bool


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Number of devices: the ranks of one model."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    world_size: int = 1


@dataclass(frozen=True, slots=True)
class DecodingConfig:
    """The grammar backend of structured output."""

    backend: str | None  # None: none is installed

    @property
    def guided_decoding_backend(self) -> str | None:
        """The same as `backend`."""
        return self.backend


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """Settings of adapters."""

    max_lora_rank: int
    max_loras: int  # that requests of one step use
    max_cpu_loras: int  # kept ready on the host
    fully_sharded_loras: bool = False
    lora_dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of the engine."""

    name: str
    value: float
    kind: ClassVar[str]


class Counter(Metric):
    """A number that only grows."""

    __slots__ = ()
    kind = "counter"


class Gauge(Metric):
    """The present state."""

    __slots__ = ()
    kind = "gauge"


def model_config(config: EngineConfig, capacity: Capacity, directory: Path) -> ModelConfig:
    details = capacity.details
    return ModelConfig(
        model=config.model.path,
        tokenizer=config.tokenizer_name,
        architecture=details.get("model"),
        dtype=details.get("dtype"),
        max_model_len=capacity.max_model_len,
        vocab_size=capacity.vocab_size,
        seed=config.seed,
        directory=directory,
    )


def decoding_config(grammar: ResolvedComponent | None) -> DecodingConfig:
    return DecodingConfig(None if grammar is None else grammar.spec.name)


def lora_config(config: EngineConfig) -> LoRAConfig | None:
    if config.adapters is None:
        return None
    return LoRAConfig(config.adapters.max_rank, config.adapters.slots, config.adapters.copies)


def ranks_in_words(capacity: Capacity) -> str:
    """Return what a start-up message says of an executor with several ranks, " on 2 ranks (cuda:0,
    cuda:1; sums by nccl)"; empty for one."""
    details = capacity.details
    if int(details.get("ranks", 1)) == 1:
        return ""
    return (
        f" on {details['ranks']} ranks ({details.get('device')}; sums by "
        f"{details.get('all_reduce')})"
    )


def groups_in_words(capacity: Capacity) -> str:
    """Return what a start-up message says of a model with several cache groups, whole lines; empty
    for one."""
    groups, states = (capacity.details.get(key) for key in ("kv_groups", "states"))
    return "".join(
        (f"KV cache: {groups}\n" if groups else "", f"states: {states}\n" if states else "")
    )


def parallel_config(capacity: Capacity) -> ParallelConfig:
    ranks = int(capacity.details.get("ranks", 1))
    return ParallelConfig(tensor_parallel_size=ranks, world_size=ranks)


def scheduler_config(config: EngineConfig, capacity: Capacity) -> SchedulerConfig:
    return SchedulerConfig(
        config.scheduler.label,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        capacity.max_model_len,
    )


def cache_config(
    config: EngineConfig, capacity: Capacity, *, enable_prefix_caching: bool
) -> CacheConfig:
    return CacheConfig(
        block_size=capacity.layout.block_size,
        num_gpu_blocks=capacity.num_pages,
        gpu_memory_utilization=config.gpu_memory_utilization,
        cache_dtype=capacity.layout.dtype,
        enable_prefix_caching=enable_prefix_caching,
    )


def metrics(stats: EngineStats) -> list[Metric]:
    """The counts of an engine, one by one."""
    gauges = {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.waiting,
        "kv_cache_usage": _held_share(stats),
    }
    counters = {
        "requests_arrived": stats.arrived,
        "requests_finished": stats.finished,
        "steps": stats.steps,
        "prefill_tokens": stats.prefill_tokens,
        "generation_tokens": stats.generated_tokens,
        "prefix_cache_hits": stats.cached_tokens,
        "num_preemptions": stats.preemptions,
        "recomputed_tokens": stats.recomputed_tokens,
        "device_seconds": stats.device_s,
        "spec_decode_num_drafts": stats.draft_rows,
        "spec_decode_num_draft_tokens": stats.draft_tokens,
        "spec_decode_num_accepted_tokens": sum(stats.accepted_drafts),
    }
    return [
        *(Gauge(name, value) for name, value in gauges.items()),
        *(Counter(name, value) for name, value in counters.items()),
    ]


def line(stats: EngineStats) -> str:
    """The same for a log."""
    return (
        f"{stats.running} running, {stats.waiting} waiting, {stats.finished} finished; "
        f"{stats.prefill_tokens} tokens prefilled, "
        f"{stats.cached_tokens} found in the prefix cache, {stats.generated_tokens} generated; "
        f"{stats.preemptions} preemptions; "
        f"K and V in use: {_held_share(stats):.0%}"
    )


def _held_share(stats: EngineStats) -> float:
    """The share of all pages that are in some request's table."""
    pages = stats.pages
    return pages.held / max(1, pages.empty + pages.held + pages.cached)
