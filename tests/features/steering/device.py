"""The device's side: a bank of vectors, and their addition to the output of a layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from dovetail.api.executor import Batch, ExecutorContext
from dovetail.api.model import ParallelGroup
from dovetail.errors import DovetailError, UnsupportedError
from dovetail.nn.residual import Residual
from dovetail_executors.runtime.device_work import DeviceWork
from dovetail_executors.runtime.features import FeaturePlan, Loaded, StepFeature
from dovetail_executors.runtime.loading import ModelPlan
from dovetail_executors.runtime.model_io import StepTokens
from dovetail_executors.runtime.row_state import RowState
from dovetail_executors.runtime.step import Step
from tests.features.steering.parts import SteeringCapacity, SteeringRows

COLUMN = "steering"  # of `RowState`: the slots of the rows' vectors
NONE = SteeringRows({})


class SteeringWork(DeviceWork):
    """Adds the rows' vectors to their tokens after one layer."""

    axis = "steered"

    def __init__(self, bank: torch.Tensor, slots: torch.Tensor, block: Any) -> None:
        """`bank` [slots + 1, hidden]; `slots` [max_rows + 1] int32, of the rows; 0: none.
        `block`: a layer of a `dovetail_models` decoder, whose `add_to` is replaced."""
        self._bank, self._slots = bank, slots
        self._vectors: torch.Tensor | None = None  # [tokens, hidden], of a step that has any
        plain = block.add_to

        def add_to(
            residual: Residual, rotations: Sequence[Any], wanted: torch.Tensor | None = None
        ) -> None:
            plain(residual, rotations, wanted)
            if (vectors := self._vectors) is not None:
                kept = vectors if wanted is None else vectors.index_select(0, wanted)
                residual.summed().add_(kept)

        block.add_to = add_to

    @contextmanager
    def around(self, tokens: StepTokens) -> Iterator[None]:
        slots = self._slots.index_select(0, tokens.rows)
        self._vectors = self._bank.index_select(0, slots)
        try:
            yield
        finally:
            self._vectors = None


class SteersRows(StepFeature[Literal[True]]):
    """Steers rows. Steps without any don't notice it."""

    part, axis = SteeringRows, SteeringWork.axis

    def __init__(
        self, vectors: Mapping[str, torch.Tensor], slots: int, rows: RowState, block: Any
    ) -> None:
        """`vectors`: [hidden] each, in the model's dtype, in memory that the device may copy from.
        The rows have a column `COLUMN`."""
        self._vectors, self._count = vectors, slots
        any_vector = next(iter(vectors.values()))
        self._bank = any_vector.new_zeros(slots + 1, len(any_vector), device=rows.device)
        self._of_rows = np.zeros(rows.max_rows, np.int32)  # equals the column
        self.work = SteeringWork(self._bank, rows.columns[COLUMN], block)

    def begin(self, step: Step) -> Literal[True] | None:
        part = step.batch.part(SteeringRows) or NONE
        for slot, name in part.rows.values():
            if not 1 <= slot <= self._count or name not in self._vectors:
                raise DovetailError(
                    f"step {step.number} writes vector {name!r} to slot {slot}; there are slots 1 "
                    f"to {self._count}, and vectors {', '.join(self._vectors)}"
                )
            self._bank[slot].copy_(self._vectors[name], non_blocking=True)
        for new, slot in zip(step.batch.added, slots_of(step.batch), strict=True):
            self._of_rows[new.row] = slot
        return True if self._of_rows[step.batch.rows].any() else None

    def biggest(self, batch: Batch) -> Iterator[Batch]:
        name = next(iter(self._vectors))
        yield replace(batch, parts=(SteeringRows({new.row: (1, name) for new in batch.added}),))

    @property
    def capacity(self) -> Mapping[str, Any]:
        return {"parts": (SteeringCapacity(self._count, frozenset(self._vectors)),)}

    @property
    def details(self) -> Mapping[str, str]:
        return {"steering": f"{len(self._vectors)} vectors, {self._count} slots"}


def slots_of(batch: Batch) -> list[int]:
    """Return the slots of a batch's new rows; 0: none."""
    rows = (batch.part(SteeringRows) or NONE).rows
    return [rows[new.row][0] if new.row in rows else 0 for new in batch.added]


@dataclass(frozen=True)
class SteeringPlan(FeaturePlan):
    """`slots` for vectors that are added after a layer."""

    vectors: Mapping[str, torch.Tensor]
    layer: int
    slots: int
    columns = {COLUMN: slots_of}  # noqa: RUF012

    def build(self, loaded: Loaded) -> SteersRows:
        blocks: Any = getattr(loaded.model, "blocks", None)
        if blocks is None:
            raise UnsupportedError(
                f"steering: the layers of {type(loaded.model).__name__} can't be reached"
            )
        return SteersRows(self.vectors, self.slots, loaded.rows, blocks[self.layer])


@dataclass(frozen=True)
class MakesSteeringPlan:
    """Reads the vectors on each rank, once the model is known and before its weights are read."""

    files: Mapping[str, str]
    layer: int
    slots: int

    def __call__(
        self, context: ExecutorContext, plan: ModelPlan, group: ParallelGroup, device: torch.device
    ) -> SteeringPlan:
        """Raises `UnsupportedError` for a layer or a vector that doesn't fit the model."""
        layers, hidden = plan.config.num_hidden_layers, plan.config.hidden_size
        if self.layer >= layers:
            raise UnsupportedError(
                f"executor.layer is {self.layer}; the model has layers 0 to {layers - 1}"
            )
        if not self.files:
            raise UnsupportedError("executor.vectors is empty: name at least one file")
        vectors = {}
        for name, path in self.files.items():
            vector = torch.from_numpy(_read(name, path, hidden)).to(plan.dtype)
            vectors[name] = vector.pin_memory() if device.type == "cuda" else vector
        return SteeringPlan(vectors, self.layer, self.slots)


def _read(name: str, path: str, hidden: int) -> Any:
    """Return the vector in a file, [hidden] float32."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UnsupportedError(f"executor.vectors.{name}: {path}: {error}") from error
    shape = getattr(found, "shape", None)
    if shape != (hidden,) or found.dtype.kind != "f":
        raise UnsupportedError(
            f"executor.vectors.{name}: {path}: expected {hidden} floating-point numbers, as the "
            f"model's hidden size is, found shape {shape}"
        )
    return np.array(found, np.float32)
