"""Layout of a model's K and V in blocks, and the number of blocks in the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dovetail.api.attention import AttentionBackend, LayerSpec
from dovetail.api.executor import ExecutorConfig
from dovetail.api.kv_cache import KVGroup, KVLayout
from dovetail.errors import ConfigError
from dovetail.runtime.memory import available_ram_bytes, readable_bytes

SHARE_OF_RAM = 4  # without `kv_cache_memory`, a CPU pool takes at most one part in so many of the free RAM …
SHARE_FOR_ONE = 2  # … and one in so many if a single sequence needs that
SHARE_OF_LENGTH = 4  # … and no more than every row needs at one part in so many of max_model_len


def kv_layout(backend: AttentionBackend, specs: Sequence[LayerSpec], block_size: int, dtype: str) -> KVLayout:
    """Group the layers by their window. `block_size`: in tokens. `dtype`: of the cache, a name ("bfloat16")."""
    windows = dict.fromkeys(spec.window for spec in specs)
    groups = []
    for window in windows:
        members = [spec for spec in specs if spec.window == window]
        groups.append(KVGroup(tuple(spec.index for spec in members), window, sum(backend.bytes_per_block(spec) for spec in members)))
    return KVLayout(tuple(groups), block_size, dtype)


def pool_blocks(
    config: ExecutorConfig,
    layout: KVLayout,
    max_model_len: int,
    num_blocks: int | None,
    device: torch.device,
    profile: Callable[[], int],
    ranks: int = 1,
) -> int:
    """Return the number of blocks in the pool on `device`, per rank; ranks on CPUs share the memory. `num_blocks` (the executor's option) and then
    `kv_cache_memory` take precedence. Otherwise, on a GPU: the rest of `gpu_memory_utilization` after `profile` (which runs the largest step and
    returns its peak in bytes). On a CPU: see the shares above.

    Raises `ConfigError` if the pool can't hold one sequence of `max_model_len` tokens, with the requested and available sizes and a remedy.
    """
    needed = -(-max_model_len // layout.block_size)
    if num_blocks is not None:
        blocks, source, remedy = num_blocks, f"num_blocks: {num_blocks}", f"raise num_blocks to {needed}"
    elif config.kv_cache_memory is not None:
        blocks = config.kv_cache_memory // layout.bytes_per_block
        source = f"kv_cache_memory: {readable_bytes(config.kv_cache_memory)}"
        remedy = f"raise kv_cache_memory to {readable_bytes(needed * layout.bytes_per_block)}"
    elif device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        peak = profile()
        blocks = max(0, int(config.gpu_memory_utilization * total) - peak) // layout.bytes_per_block
        source = f"gpu_memory_utilization: {config.gpu_memory_utilization:g} of {readable_bytes(total)}, less {readable_bytes(peak)} for the model,"
        remedy = "raise gpu_memory_utilization, lower max_num_batched_tokens"
    else:
        free = available_ram_bytes() // ranks
        blocks = _cpu_blocks(config, layout, max_model_len, free)
        source = f"one part in {SHARE_FOR_ONE} of {readable_bytes(free)} free RAM"
        remedy = f"set kv_cache_memory to {readable_bytes(needed * layout.bytes_per_block)}"
    if blocks < needed:
        change = f"Lower max_model_len to {blocks * layout.block_size} or less, or {remedy}" if blocks else f"{remedy[0].upper()}{remedy[1:]}"
        raise ConfigError(
            f"the KV pool can't hold one sequence of max_model_len: {max_model_len} tokens need {needed} blocks of {layout.block_size} "
            f"({readable_bytes(layout.bytes_per_block)} each), and {source} gives {blocks}. {change}."
        )
    return blocks


def _cpu_blocks(config: ExecutorConfig, layout: KVLayout, max_model_len: int, free: int) -> int:
    one = -(-max_model_len // layout.block_size)
    wanted = config.max_num_seqs * -(-max_model_len // (SHARE_OF_LENGTH * layout.block_size))
    within = free // SHARE_OF_RAM // layout.bytes_per_block
    within_for_one = free // SHARE_FOR_ONE // layout.bytes_per_block
    return max(min(wanted, within), min(one, within_for_one))
