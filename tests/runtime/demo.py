"""Arguments for a worker or an executor of the bundled demo model, and steps to drive it by
hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import dovetail_attention
import dovetail_models
import dovetail_samplers
from dovetail.api.clock import WallClock
from dovetail.api.component import ComponentSpec
from dovetail.api.executor import (
    Batch,
    Capacity,
    ComponentRef,
    Drafts,
    ExecutorConfig,
    ExecutorContext,
    NewRow,
)
from dovetail.api.sampler import RowSampling
from dovetail_executors.runtime.profiling import empty_batch

DEMO = str(Path(dovetail_models.__file__).parent / "demo")
DRAFT = f"{DEMO}-draft"
BLOCK_BYTES = 6 * 2 * 16 * 4 * 32 * 4  # of 16 tokens in float32: 6 layers' K and V of 4 heads of 32

CONFIG = ExecutorConfig(
    model=DEMO,
    dtype="auto",
    load_format="auto",
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=128,
    gpu_memory_utilization=0.9,
    kv_cache_memory=None,
    block_size=None,
    cuda_graphs=True,
    overlap=True,
    seed=0,
)


def targets(specs: Iterable[ComponentSpec]) -> tuple[ComponentRef, ...]:
    return tuple(
        ComponentRef(
            spec.kind, f"dovetail:{spec.name}", spec.target, {}, spec.options, spec.architectures
        )
        for spec in specs
    )


def context(**changes: Any) -> ExecutorContext:
    """With fields of `ExecutorConfig` changed, or of the context itself."""
    of_config = {
        name: value
        for name, value in changes.items()
        if name in ExecutorConfig.__dataclass_fields__
    }
    plain = ExecutorContext(
        config=replace(CONFIG, **of_config),
        clock=WallClock(),
        models=targets(dovetail_models.dovetail_components()),
        attention=targets(dovetail_attention.dovetail_components()),
        sampler=targets(dovetail_samplers.dovetail_components())[0],
    )
    return replace(
        plain, **{name: value for name, value in changes.items() if name not in of_config}
    )


def prefill(capacity: Capacity, prompts: list[list[int]], step: int = 0, **sampling: Any) -> Batch:
    """All prompts, each in its own row, with blocks for 16 tokens more."""
    size, added, next_block = capacity.layout.block_size, [], 0
    for row, prompt in enumerate(prompts):
        count = -(-(len(prompt) + 16) // size)
        blocks = np.arange(next_block, next_block + count, dtype=np.int32)
        next_block += count
        added.append(
            NewRow(
                row,
                f"request-{row}",
                np.array(prompt, np.int32),
                len(prompt),
                0,
                (blocks,),
                RowSampling(temperature=0.0, **sampling),
            )
        )
    rows = np.arange(len(prompts), dtype=np.int32)
    lens = np.array([len(prompt) for prompt in prompts], np.int32)
    return empty_batch(
        step=step,
        added=tuple(added),
        rows=rows,
        num_tokens=lens,
        yields_token=np.ones(len(prompts), np.bool_),
    )


def check(drafts: list[list[int]], step: int) -> Batch:
    """Decode each row, with these drafts."""
    counts = np.array([*map(len, drafts)], np.int32)
    own = Drafts(counts, np.array([token for ids in drafts for token in ids], np.int32))
    return replace(decode(len(drafts), step), num_tokens=1 + counts, drafts=own)


def decode(rows: int, step: int) -> Batch:
    ones = np.ones(rows, np.int32)
    return empty_batch(
        step=step,
        rows=np.arange(rows, dtype=np.int32),
        num_tokens=ones,
        yields_token=ones.astype(np.bool_),
    )
