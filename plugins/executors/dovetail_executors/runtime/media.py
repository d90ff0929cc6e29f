"""Images in a step: a tower encodes items, and their rows replace embeddings of placeholders.

The loop decides which items a step encodes, and in which slots of the cache their rows are
(`dovetail.engine.media`). Steps with placeholders are launched, not replayed; decodes have none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dovetail.api.executor import Batch, ExecutorConfig
from dovetail.api.media import MediaCapacity, MediaPlace, MediaRows
from dovetail.errors import DovetailError
from dovetail.nn.transfer import to_device
from dovetail.request.media import MediaItem
from dovetail_executors.runtime.attention_choice import ChosenAttention
from dovetail_executors.runtime.features import FeaturePlan, Loaded, StepFeature, Wanted
from dovetail_executors.runtime.graphs import Graphs
from dovetail_executors.runtime.loading import ModelPlan
from dovetail_executors.runtime.media_positions import POSITION_OFFSET, AxesOfRows, offsets_of
from dovetail_executors.runtime.memory import require_ram
from dovetail_executors.runtime.row_state import Column, RowState
from dovetail_executors.runtime.step import Step
from dovetail_executors.runtime.step_inputs import HostInputs
from dovetail_executors.runtime.towers import Tower, TowerPlan, find_tower

log = logging.getLogger("dovetail")

NO_TOKENS = np.zeros(0, np.int64)
NO_ROWS = MediaRows((), NO_TOKENS.astype(np.int32), NO_TOKENS.astype(np.int32))
# Runs of placeholders that attend in both directions, in a step. Each divides its row of attention,
# and buffers are sized by rows.
MOST_RUNS = 32


@dataclass
class ReadRows:
    """The placeholders of one step."""

    part: MediaRows
    failed: dict[int, str] = field(default_factory=dict)  # index in the batch -> reason


class EncodesMedia(StepFeature[ReadRows]):
    """Encodes items into the cache, and gives the model the rows of a step's placeholders. If the
    model's positions have three axes, also those of a step with tokens before the end of a row's
    last image."""

    part = MediaRows
    reads_states = True  # a step with a note isn't replayed

    def __init__(
        self,
        tower: Tower,
        capacity: MediaCapacity,
        dtype: torch.dtype,
        rows: RowState,
    ) -> None:
        """`dtype`: of rows, as the model has it."""
        self._tower = tower
        # the tokens of an image attend to each other in both directions in some layers
        self._both_ways = tower.plan.whole
        self.more_rows = 2 * capacity.step_runs if self._both_ways else 0
        self._rows = rows
        self._axes = AxesOfRows(rows.max_rows) if tower.plan.media_type.axes else None
        # batches with placeholders have the part
        self.asking = () if self._axes is None else self._axes.rows
        self._capacity = capacity
        shape = tower.plan.levels, capacity.cache_rows, tower.plan.hidden_size
        self._cache = torch.zeros(shape, dtype=dtype, device=rows.device)
        self._stream: torch.cuda.Stream | None = None
        if rows.device.type == "cuda":
            self._stream = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]
        self._wrong: dict[int, str] = {}  # slot -> why its item couldn't be encoded

    def begin(self, step: Step) -> ReadRows | None:
        part = step.batch.part(MediaRows) or NO_ROWS
        for slots in (part.slots, *(one.slots for one in part.encode)):
            if len(slots) and not 0 <= slots.min() <= slots.max() < self._capacity.cache_rows:
                raise DovetailError(
                    f"step {step.number} uses a slot of images' rows that isn't one of "
                    f"{self._capacity.cache_rows}"
                )
        has_early = self._axes is not None and self._has_early(step.batch, self._axes)
        return ReadRows(part) if len(part.tokens) or part.encode or has_early else None

    def _has_early(self, batch: Batch, axes: AxesOfRows) -> bool:
        """Take note of the batch, and return True if the model needs positions on three axes."""
        axes.update(batch)
        return axes.are_needed(batch.rows, self._rows.computed[batch.rows])

    def before_inputs(self, step: Step, note: ReadRows, graphs: Graphs | None) -> None:
        for one in note.part.encode:
            try:
                rows = self._encode(one.item)
            except DovetailError as error:
                self._wrong.update(dict.fromkeys(one.slots.tolist(), str(error)))
            else:
                slots = to_device(one.slots.astype(np.int64), self._cache.device)
                self._cache.index_copy_(1, slots, rows)
                if self._wrong:
                    for slot in one.slots.tolist():
                        self._wrong.pop(slot, None)
        if self._wrong:
            self._fail(step, note)

    def _encode(self, item: MediaItem) -> torch.Tensor:
        """Return the rows of an item. A tower has a stream of its own: its code waits for numbers
        from the device, but not for the steps before, beside which it runs."""
        if self._stream is None:
            return self._tower.encode(item)
        steps = torch.cuda.current_stream(self._cache.device)
        with torch.cuda.stream(self._stream):
            rows = self._tower.encode(item)
        steps.wait_stream(self._stream)
        rows.record_stream(steps)
        return rows

    def _fail(self, step: Step, note: ReadRows) -> None:
        """Note the rows of the batch that read an item which couldn't be encoded."""
        ends = np.cumsum(step.batch.num_tokens)
        rows = np.searchsorted(ends, note.part.tokens, side="right")
        for row, slot in zip(rows.tolist(), note.part.slots.tolist(), strict=True):
            if slot in self._wrong:
                note.failed[row] = self._wrong[slot]

    def wants(self, step: Step, note: ReadRows, host: HostInputs) -> Wanted:
        device = self._cache.device
        inputs: dict[str, torch.Tensor] = {}
        both_ways = None
        if len(note.part.tokens):
            total = len(host.token_indices)
            is_row = np.zeros(total, np.bool_)
            is_row[note.part.tokens] = True
            slots = np.zeros(total, np.int64)
            slots[note.part.tokens] = note.part.slots
            inputs["rows"] = self._cache.index_select(1, to_device(slots, device))
            inputs["is_row"] = to_device(is_row, device)
            both_ways = is_row if self._both_ways else None
        if self._axes is not None:
            inputs["axes"] = to_device(self._axes.of_step(host), device)
        return Wanted(NO_TOKENS, inputs=inputs, both_ways=both_ways)

    def collect(self, step: Step, note: ReadRows, failed: dict[int, str]) -> None:
        failed.update(note.failed)

    def biggest(self, batch: Batch) -> Iterator[Batch]:
        """Encode the largest picture, and yield a step all of whose tokens are placeholders. That
        doesn't encode it again: an encoder runs before the model of its step, and has freed its
        memory."""
        if self._tower.encode_largest(self._capacity.cache_rows):
            tokens = np.arange(batch.num_tokens.sum(), dtype=np.int32)
            places = {new.row: (MediaPlace(0, (1, 1, len(new.token_ids))),) for new in batch.added}
            part = MediaRows((), tokens, np.zeros(len(tokens), np.int32), places)
            yield replace(batch, parts=(part,))

    @property
    def capacity(self) -> Mapping[str, Any]:
        return {"media": self._capacity}

    @property
    def details(self) -> Mapping[str, str]:
        name = self._tower.plan.media_type.model_type
        return {"images": f"{name}, {self._capacity.cache_rows} rows are kept"}


@dataclass(frozen=True)
class MediaPlan(FeaturePlan):
    """A tower beside the model, and a cache of rows."""

    tower: TowerPlan
    capacity: MediaCapacity
    columns: Mapping[str, Column] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ExecutorConfig, plan: ModelPlan) -> MediaPlan | None:
        """Return the plan; None if the checkpoint's images aren't served, which is logged if the
        type of model reads images. Raises `ModelLoadError` if its files are malformed."""
        if not config.media_cache_rows:
            return None
        tower = find_tower(config.model, dummy=config.load_format == "dummy")
        if tower is None:
            return None
        if lacks := _lacks(tower, plan):
            _log_only_text(config.model, lacks)
            return None
        runs = min(MOST_RUNS, config.max_num_batched_tokens)
        return cls(
            tower,
            MediaCapacity(config.media_cache_rows, config.media_step_rows, runs),
            {POSITION_OFFSET: offsets_of} if tower.media_type.axes else {},
        )

    def is_served_by(self, attention: ChosenAttention) -> bool:
        if not self.tower.whole or attention.backend.capabilities.both_ways:
            return True
        _log_only_text(
            self.tower.directory,
            f"attention backend {attention.name} can't attend in both directions "
            "(AttentionCapabilities.both_ways)",
        )
        return False

    def build(self, loaded: Loaded) -> EncodesMedia:
        """Raises `ConfigError` too, if a CPU's memory can't hold the encoder."""
        if loaded.device.type == "cpu":
            needed = self.tower.num_bytes(loaded.plan.dtype)
            require_ram(needed, f"{loaded.config.model}: its image encoder", loaded.group.size)
        tower = self.tower.build(loaded.plan.dtype, loaded.device, loaded.config.seed)
        return EncodesMedia(tower, self.capacity, loaded.plan.dtype, loaded.rows)


def _log_only_text(model: str | Path, reason: str) -> None:
    log.warning("%s: images aren't served, only text: %s", model, reason)


def _lacks(tower: TowerPlan, plan: ModelPlan) -> str:
    """Return why the language model can't use a tower's rows, as a clause, or ""."""
    can = plan.arch.capabilities
    needed = {
        "media": can.media,
        "levels": can.levels or tower.levels == 1,
        "axes": can.axes or not tower.media_type.axes,
    }
    lacking = [name for name, is_there in needed.items() if not is_there]
    if lacking:
        return f"{type(plan.arch).__name__} doesn't read them (ModelCapabilities.{lacking[0]})"
    if tower.whole and not any(spec.both_ways for spec in plan.specs):
        return (
            f"{type(plan.arch).__name__} has no layers in which an image's tokens attend in both "
            "directions (LayerSpec.both_ways)"
        )
    return ""
