"""vLLM's engine arguments without a counterpart, with vLLM's defaults, grouped by reason.

`dovetail.front.vllm_args` adds them to its table: the default is accepted, and any other value is
rejected with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.base.roadmap import planned

MACHINES = planned("Several machines")
IMAGES = "images are read without it: see docs/images.md"


@dataclass(frozen=True, slots=True)
class Group:
    """Arguments that share a reason."""

    reason: str  # why other values are rejected or ignored, and what to use instead
    defaults: Mapping[str, Any]  # argument -> vLLM's default
    advisory: bool = False  # no value affects outputs: all are accepted


def _off(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, False)


def _unset(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names)


OLDER = {  # argument -> its default in vLLM 0.25
    "dcp_comm_backend": "ag_rs",
    "cp_kv_cache_interleave_size": 1,
    "mamba_cache_mode": "none",
}

GROUPS = (
    Group(
        MACHINES,
        {
            "nnodes": 1,
            "node_rank": 0,
            "master_addr": "127.0.0.1",
            "master_port": 29501,
            "data_parallel_backend": "mp",
            "prefill_context_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "dcp_kv_cache_interleave_size": 1,
            **_unset("dcp_comm_backend", "dcp_q_replicate", "cp_kv_cache_interleave_size"),
            **_unset("data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local"),
            **_unset("data_parallel_address", "data_parallel_rpc_port"),
            **_off("data_parallel_hybrid_lb", "data_parallel_external_lb"),
            **_off("data_parallel_multi_port_external_lb", "enable_elastic_ep"),
            "elastic_ep_max_dp_size": None,
            "dp_sync_interval": 16,
            "disable_nccl_for_dp_synchronization": None,
            **_off("ray_workers_use_nsight", "enable_fault_tolerance"),
            "fault_tolerance_config": {},
        },
    ),
    Group(
        "every rank has all experts, or a part of each: leave it out",
        {
            **_off("enable_hc_sp", "enable_ep_weight_filter", "enable_eplb"),
            "eplb_config": {},
            "expert_placement_strategy": "linear",
            "all2all_backend": "allgather_reducescatter",
            "enable_batch_sharded_sampling": None,
        },
    ),
    Group(
        "steps aren't split: the scheduler and `prefill_limit` decide what a step computes",
        {
            "enable_dbo": False,
            "ubatch_size": 0,
            "dbo_decode_token_threshold": 32,
            "dbo_prefill_token_threshold": 512,
        },
    ),
    Group(
        "CPU binding is left to the system: start the program with numactl or taskset",
        {"numa_bind": False, **_unset("numa_bind_nodes", "numa_bind_cpus")},
    ),
    Group(
        "set CUDA_VISIBLE_DEVICES, and the executor's size and device",
        _unset("device_ids"),
    ),
    Group(
        "set the timeouts of the executor `tensor`",
        _unset("distributed_timeout_seconds", "cpu_distributed_timeout_seconds"),
    ),
    Group(
        "kernels are chosen automatically: leave it out",
        {
            **dict.fromkeys(
                ("moe_backend", "linear_backend", "sparse_indexer_topk_backend"), "auto"
            ),
            "mamba_backend": "triton",
            **_unset("mamba_ssu_algorithm", "gdn_prefill_backend"),
            **_unset("kda_prefill_backend", "kda_decode_backend", "enable_flashinfer_autotune"),
            "ir_op_priority": {},
            "kernel_config": {},
            "mamba_config": {},
            **_off("monokernel", "enable_shm_tensor_arena"),
        },
    ),
    Group(
        "set attention to the name of a backend",
        {"attention_config": {}, "override_attention_dtype": None},
    ),
    Group(
        "max_num_seqs and max_num_batched_tokens determine the sizes of CUDA graphs",
        _unset("cudagraph_capture_sizes", "max_cudagraph_capture_size"),
    ),
    Group(
        "CUDA graphs and kernels are the same at every level",
        {"optimization_level": 2},
        advisory=True,
    ),
    Group(
        "the scheduler decides this: choose one (scheduler), and set `prefill_limit`",
        {
            "performance_mode": "balanced",
            "max_num_scheduled_tokens": None,
            "max_num_active_seqs": None,
            "long_prefill_token_threshold_adaptive": False,
            "scheduler_reserve_full_isl": True,
            "prefill_schedule_interval": 1,
            "watermark": 0.0,
        },
    ),
    Group(
        "limits.max_waiting bounds unfinished requests, and the server has --max-queued-requests "
        "and --max-queued-tokens",
        _unset("max_num_queued_reqs", "max_num_queued_tokens"),
    ),
    Group(
        "shared prefixes are read once where that is faster",
        _unset("disable_cascade_attn"),
        advisory=True,
    ),
    Group(
        "layers with windows always release memory",
        _unset("disable_hybrid_kv_cache_manager"),
        advisory=True,
    ),
    Group(
        "the model's cache groups determine how K, V and states are stored: leave it out",
        {
            "prefix_cache_retention_interval": 0,
            "kv_sharing_fast_prefill": False,
            "swa_bounded_replay": True,
            "kv_cache_dtype_skip_layers": [],
            "mamba_cache_dtype": "auto",
            **_unset("mamba_block_size", "prefix_match_unit", "mamba_cache_mode"),
            "enable_mamba_shared_prefix_checkpoint": False,
            "replayssm_buffer_len": 16,
            "use_replayssm": False,
            "enable_mamba_cache_stochastic_rounding": False,
            "mamba_cache_philox_rounds": 0,
        },
    ),
    Group(
        "K, V and weights stay on the device: choose a smaller model or dtype",
        {
            "kv_offloading_size": None,
            "kv_offloading_backend": "native",
            "offload_backend": "auto",
            "cpu_offload_params": [],
            "offload_group_size": 0,
            "offload_num_in_group": 1,
            "offload_prefetch_step": 1,
            "offload_params": [],
        },
    ),
    Group(
        "`close()` releases the device's memory; then create a new engine",
        {
            "sleep_mode_backend": "cumem",
            **_off("sleep_mode_offload_cudagraph", "enable_cumem_allocator"),
            "enable_nccl_comm_suspend": False,
            "sleep_preserve_parameter_names": [],
        },
    ),
    Group(
        "weights are loaded once: close the engine, and create one with the new checkpoint",
        _unset("weight_transfer_config"),
    ),
    Group(
        "safetensors files are mapped into memory, and copied to the device in pieces",
        {
            **_unset("safetensors_load_strategy", "safetensors_prefetch_num_threads"),
            **_unset("safetensors_prefetch_block_size", "max_parallel_loading_workers"),
            "pt_load_map_location": "cpu",
        },
        advisory=True,
    ),
    Group(
        "pass a local directory as the model: `hf download` fetches the chosen files",
        {"model_weights": "", "hf_config_path": None, "ignore_patterns": None},
    ),
    Group(
        "choose the component: model={'path': …, 'component': …}",
        {"model_class_overrides": {}, "worker_cls": "auto"},
    ),
    Group(
        "the checkpoint's quantization_config applies; quantization='fp8' quantizes a plain "
        "checkpoint",
        {"quantization_config": None},
    ),
    Group(
        "no supported weight format is deprecated",
        _off("allow_deprecated_quantization"),
        advisory=True,
    ),
    Group(
        IMAGES,
        {
            "allowed_local_media_path": "",
            **_off("enable_mm_embeds", "mm_encoder_only", "enable_tower_connector_lora"),
            "default_mm_loras": None,
            "io_processor_plugin": None,
            "video_pruning_rate": None,
        },
    ),
    Group(
        IMAGES,
        {
            **_off("interleave_mm_strings", "skip_mm_profiling"),
            "media_io_kwargs": {},
            "mm_processor_cache_gb": 4,
            "mm_processor_cache_type": "lru",
            "mm_hasher_algorithm": "blake3",
            "mm_shm_cache_max_object_size_mb": 128,
            "mm_encoder_tp_mode": "weights",
            **_unset("mm_encoder_attn_backend", "mm_encoder_attn_dtype"),
            **_unset("mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_path"),
            "mm_encoder_fp8_scale_save_margin": 1.5,
            "video_pruning_method": "evs",
            "mm_tensor_ipc": "direct_rpc",
            "mm_processor_device": "auto",
            "mm_ipc_gpu_memory_gb": 0,
            "mm_device_do_normalize": True,
            "disable_chunked_mm_input": False,
            "ec_manager_config": {},
            "enable_mm_processor_stats": False,
        },
        advisory=True,
    ),
    Group(
        "all adapter slots have the same size: set adapters.slots and adapters.max_rank",
        {
            **_off("specialize_active_lora", "enable_mixed_moe_lora_format"),
            "enable_moe_shared_loras": False,
            "max_lora_cls_labels": None,
        },
    ),
    Group(
        "set all fields in one argument: speculative_config={'method': …, 'model': …, "
        "'num_speculative_tokens': …}",
        _unset("spec_method", "spec_model", "spec_tokens"),
    ),
    Group("diffusion models aren't supported", _unset("diffusion_config", "engram_config")),
    Group("watermarks aren't supported: leave it out", _unset("watermark_config")),
    Group(
        "limit reasoning per request: structured={'after': …, 'after_tokens': …}",
        {"reasoning_config": None},
    ),
    Group(
        "a parser is a plugin: see docs/plugins/parser.md",
        _unset("reasoning_parser_plugin"),
    ),
    Group(
        "outputs contain tokens and their log-probabilities",
        {
            **_off("return_sampling_mask", "enable_trace_replay", "tokens_only"),
            "aux_output_config": {},
        },
    ),
    Group("samplers draw in float32: set a seed for reproducible outputs", _off("use_fp64_gumbel")),
    Group(
        "use LLM.get_metrics(), the server's /metrics, or an observer",
        {
            "show_hidden_metrics_for_version": None,
            "collect_detailed_traces": None,
            "per_request_spec_decode_metrics": "none",
            "kv_cache_metrics": False,
            "kv_cache_metrics_sample": 0.01,
            "custom_histogram_buckets": None,
            **_off("cudagraph_metrics", "enable_layerwise_nvtx_tracing", "enable_mfu_metrics"),
            **_off("enable_logging_iteration_details", "jit_monitor_verbose"),
            "jit_monitor_mode": "warn",
        },
    ),
    Group(
        "configure Python's logger `dovetail`, or set its level in the environment variable "
        "DOVETAIL_LOG",
        {
            "aggregate_engine_logging": False,
            **_unset("logging_config", "log_level", "log_config_file"),
        },
    ),
    Group(
        "`dovetail serve` manages its own threads and processes: leave it out",
        {"renderer_num_workers": 1, "watchdog_config": {}},
    ),
    Group(
        "outputs are coalesced while their consumer is slow",
        {"stream_interval": 1},
        advisory=True,
    ),
    Group("set drain_timeout_s of `dovetail serve`", {"shutdown_timeout": 0}),
    Group(
        "vLLM's environment variables aren't read",
        _off("fail_on_environ_validation"),
        advisory=True,
    ),
)
