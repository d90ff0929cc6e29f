"""Bank of LoRA adapters: memory for a fixed number of them, bound to a model's linear layers, and
written from the files that batches name.

All of a slot is one piece of memory, so that one copy replaces it. The copy is enqueued like the
steps: those in flight read what the slot held before, and the step that brings an adapter reads
that one.

      slot      layer 0: A of q, k and v [3 * rank, in] | B [out, rank] | A of o | B | A of gate and up | B | …   layer 1: …
      0         zeros
      1         an adapter, 0 beyond its own rank and in modules that it lacks
      …
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from dovetail.api.executor import AdapterCapacity, AdapterLoad, AdapterRows, Batch
from dovetail.errors import DovetailError, UnsupportedError
from dovetail.nn.adapters import LayerAdapters, Outputs, StepAdapters
from dovetail.nn.embedding import LMHead
from dovetail.nn.linear import LinearLayer
from dovetail.nn.parameter import Part
from dovetail_executors.runtime.device_work import DeviceWork
from dovetail_executors.runtime.features import FeaturePlan, Loaded, StepFeature
from dovetail_executors.runtime.memory import readable_bytes
from dovetail_executors.runtime.model_io import StepTokens
from dovetail_executors.runtime.row_state import RowState
from dovetail_executors.runtime.step import Step

HEAD = "lm_head"  # the output layer's name in checkpoints
RANK_MULTIPLE = 16  # ranks are padded to it: the least that matrix units multiply


@dataclass(frozen=True, slots=True)
class Target:
    """A module of the checkpoint that adapters may change: this rank's parts of its weight, and
    where in a slot its A and B are."""

    parts: tuple[Part, ...]
    a: tuple[int, tuple[int, int]]  # offset and shape [modules * rank, in] of its layer's A
    b: tuple[int, tuple[int, int]]  # likewise [out, rank]
    row: int  # of A, where the module's begins

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the whole module."""
        out, inputs = self.parts[0].source_shape
        return out, inputs

    def fill(self, slot: torch.Tensor, a: Any, b: Any, max_rank: int) -> None:
        """Write this rank's shares of A [rank, in] and B [out, rank], safetensors slices, to a
        slot's memory. Raises `DovetailError` if their shapes are wrong."""
        (out, inputs), rank = self.shape, a.get_shape()[0]
        if a.get_shape() != [rank, inputs] or b.get_shape() != [out, rank] or rank > max_rank:
            raise DovetailError(
                f"expected A [r, {inputs}] and B [{out}, r] for r up to {max_rank}, found "
                f"{a.get_shape()} and {b.get_shape()}"
            )
        (at, shape), (b_at, b_shape) = self.a, self.b
        own_a = slot[at : at + math.prod(shape)].view(shape)[self.row : self.row + rank]
        own_b = slot[b_at : b_at + math.prod(b_shape)].view(b_shape)[:, :rank]
        for part in self.parts:
            if part.dim == 1:
                own_a.copy_(replace(part, source_shape=(rank, inputs), transposed=False).read(a))
                own_b.copy_(b[:])
            else:
                own_a.copy_(a[:])
                part.place(own_b).copy_(
                    replace(part, source_shape=(out, rank), transposed=False).read(b)
                )


class AdapterBank:
    """Slots for the adapters of one model's layers, on its device; of this rank's shares. Slot 0
    stays empty."""

    def __init__(
        self, model: Any, slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`model`: a `CausalLM` whose weights have memory. Raises `UnsupportedError` if no layer of
        it can be adapted."""
        self.step = StepAdapters()
        self.slots = slots
        self.max_rank = max_rank
        rank = -(-max_rank // RANK_MULTIPLE) * RANK_MULTIPLE
        self.targets: dict[str, Target] = {}
        views = []
        at = 0
        adapted: list[tuple[LinearLayer | LMHead, dict[str, tuple[Part, ...]]]] = [*_layers(model)]
        if adapted:
            adapted += _heads(model)
        for layer, modules in adapted:
            out, inputs = _own_shape(modules)
            a = (len(modules) * rank, inputs)
            b = (out, rank)
            places = (at, a), (at + math.prod(a), b)
            for index, (name, parts) in enumerate(modules.items()):
                self.targets[name] = Target(parts, *places, index * rank)
            at += math.prod(a) + math.prod(b)
            views.append((layer, places, _outputs(modules)))
        if not self.targets:
            raise UnsupportedError(
                f"adapters: {type(model).__name__} has no layer that LoRA adapters can change: "
                f"these are layers of `dovetail.nn.linear`, which "
                "experts and models through transformers don't consist of"
            )
        self._all = torch.zeros(slots + 1, at, dtype=dtype, device=device)
        self.held: dict[int, str] = {}  # slot -> digest
        self.heads = set[int]()  # slots whose adapters change the output layer
        for layer, places, outputs in views:
            own_a, own_b = (
                self._all[:, at : at + math.prod(shape)].view(slots + 1, *shape)
                for at, shape in places
            )
            pieces = torch.tensor(
                [piece for own in outputs for piece in own.pieces()],
                dtype=torch.int32,
                device=device,
            )
            layer.adapters = LayerAdapters(self.step, own_a, own_b, outputs, pieces)

    @property
    def capacity(self) -> AdapterCapacity:
        modules = {
            name: (target.shape[1], target.shape[0]) for name, target in self.targets.items()
        }
        return AdapterCapacity(self.slots, self.max_rank, modules)

    def __str__(self) -> str:
        return f"{self.slots} of rank up to {self.max_rank}, {readable_bytes(self._all.nbytes)}"

    def load(self, load: AdapterLoad) -> None:
        """Enqueue the copy of an adapter to its slot. Raises `DovetailError` if there is no such
        slot, or the file isn't one of an adapter for this model."""
        if not 1 <= load.slot <= self.slots:
            raise DovetailError(
                f"adapter {load.path} is to be written to slot {load.slot}; there are slots 1 to "
                f"{self.slots}"
            )
        own = torch.zeros(self._all.shape[1], dtype=self._all.dtype, pin_memory=self._all.is_cuda)
        self.heads.discard(load.slot)
        try:
            with safe_open(load.path, framework="pt") as file:
                for name in _modules_in(file.keys()):
                    if name not in self.targets:
                        raise DovetailError(f"module {name} of the model can't have adapters")
                    a, b = (file.get_slice(f"{name}.lora_{which}") for which in "AB")
                    self.targets[name].fill(own, a, b, self.max_rank)
                    if name.endswith(HEAD):
                        self.heads.add(load.slot)
        except (OSError, SafetensorError, DovetailError) as error:
            raise DovetailError(f"adapter {load.path}: {error}") from error
        # torch keeps the memory until the copy has run
        self._all[load.slot].copy_(own, non_blocking=True)
        self.held[load.slot] = load.digest

    def check(self, slot: int) -> None:
        """Raise `DovetailError` if a slot that a row names is empty."""
        if slot and slot not in self.held:
            raise DovetailError(f"slot {slot} holds no adapter")


NONE = AdapterRows((), {})
COLUMN = "adapter"  # of `RowState`: the slots of the rows' adapters


class AdapterWork(DeviceWork):
    """Lets layers add what adapters compute to the tokens of rows that have one."""

    axis = "adapted"

    def __init__(self, step: StepAdapters, slots: torch.Tensor) -> None:
        """`slots` [max_rows + 1] int32: of the rows."""
        self._step = step
        self._slots = slots

    def around(self, tokens: StepTokens) -> AbstractContextManager[None]:
        slots = self._slots.index_select(0, tokens.rows)
        return self._step.of_tokens(slots, tokens.inputs.wanted)


class Adapters(StepFeature[Literal[True]]):
    """Adapters of the rows, in a bank. Steps without any don't notice it."""

    part = AdapterRows
    axis = AdapterWork.axis

    def __init__(self, bank: AdapterBank, rows: RowState) -> None:
        """The rows have a column `COLUMN`."""
        self.bank = bank
        self.work = AdapterWork(bank.step, rows.columns[COLUMN])
        self.asking = self._slots = dict[int, int]()  # of rows that have one: as the column

    def begin(self, step: Step) -> Literal[True] | None:
        part = step.batch.part(AdapterRows) or NONE
        for load in part.loads:
            self.bank.load(load)
        for row in step.batch.removed.tolist():
            self._slots.pop(row, None)
        for row, slot in part.slots.items():
            self.bank.check(slot)
            self._slots[row] = slot
        return None if self._slots.keys().isdisjoint(step.batch.rows.tolist()) else True

    def changes_logits(self, rows: NDArray[Any]) -> bool:
        if not self.bank.heads:
            return False
        return any(self._slots.get(row) in self.bank.heads for row in rows.tolist())

    def biggest(self, batch: Batch) -> Iterator[Batch]:
        """Yield the step with an adapter in each row: layers keep what they don't fuse."""
        self.bank.held[1] = ""
        yield replace(batch, parts=(AdapterRows((), {new.row: 1 for new in batch.added}),))
        self.bank.held.clear()

    @property
    def capacity(self) -> Mapping[str, AdapterCapacity]:
        return {"adapters": self.bank.capacity}

    @property
    def details(self) -> Mapping[str, str]:
        return {"adapters": str(self.bank)}


def _slots_of(batch: Batch) -> list[int]:
    slots = (batch.part(AdapterRows) or NONE).slots
    return [slots.get(new.row, 0) for new in batch.added]


@dataclass(frozen=True)
class AdapterPlan(FeaturePlan):
    """A bank of `slots`, for adapters of ranks up to `max_rank`."""

    slots: int
    max_rank: int
    columns = {COLUMN: _slots_of}  # noqa: RUF012

    def build(self, loaded: Loaded) -> Adapters:
        dtype = loaded.plan.dtype
        device = loaded.device
        bank = AdapterBank(loaded.model, self.slots, self.max_rank, dtype, device)
        return Adapters(bank, loaded.rows)


def _modules_in(tensors: Iterator[str]) -> list[str]:
    return list(
        dict.fromkeys(name.removesuffix(".lora_A").removesuffix(".lora_B") for name in tensors)
    )


def _layers(model: Any) -> Iterator[tuple[LinearLayer, dict[str, tuple[Part, ...]]]]:
    """Yield each linear layer that adapters can change with its modules: name in a checkpoint ->
    parts. All parts must have one name each."""
    names: dict[tuple[int, str | None], list[str]] = {}
    transformed = set[int]()
    for rule in model.weights():
        if rule.parameter is not None and rule.source.endswith(".weight"):
            names.setdefault((id(rule.parameter), rule.shard_id), []).append(
                rule.source.removesuffix(".weight")
            )
            if rule.transform is not None:
                transformed.add(id(rule.parameter))
    for layer in model.modules():
        parts: Mapping[str | None, Part] = (
            getattr(layer.weight, "parts", {}) if isinstance(layer, LinearLayer) else {}
        )
        own = [names.get((id(layer.weight), shard_id), []) for shard_id in parts]
        if (
            not parts
            or any(len(each) != 1 for each in own)
            or id(layer.weight) in transformed
            or not _adds_adapters(layer)
        ):
            continue
        modules: dict[str, tuple[Part, ...]] = {}
        for (name,), part in zip(own, parts.values(), strict=True):
            modules[name] = (*modules.get(name, ()), part)
        yield layer, modules


def _heads(model: Any) -> Iterator[tuple[LMHead, dict[str, tuple[Part, ...]]]]:
    """Yield the output layer with its module. A tied one has the embedding's tensor, but its
    adapters have its own name."""
    for layer in model.modules():
        if isinstance(layer, LMHead):
            names = [
                rule.source.removesuffix(".weight")
                for rule in model.weights()
                if rule.parameter is layer.weight
            ]
            yield (
                layer,
                {
                    next((name for name in names if name.endswith(HEAD)), HEAD): tuple(
                        layer.weight.parts.values()
                    )
                },
            )


def _adds_adapters(layer: LinearLayer) -> bool:
    """Return False for a layer whose class computes the product by itself."""
    return type(layer).forward.__module__ == LinearLayer.__module__


def _own_shape(modules: Mapping[str, tuple[Part, ...]]) -> tuple[int, int]:
    """Return this rank's [out, in] of a layer with these modules."""
    parts = [part for own in modules.values() for part in own]
    if parts[0].dim == 1:
        return parts[0].source_shape[0], parts[0].size
    return sum(part.size * part.copies for part in parts), parts[0].source_shape[1]


def _outputs(modules: Mapping[str, tuple[Part, ...]]) -> tuple[Outputs, ...]:
    """Return which outputs of a layer belong to which module, neighbours of the same one
    together."""
    found: list[Outputs] = []
    each = [
        Outputs(0, part.source_shape[0], index)
        if part.dim == 1
        else Outputs(part.at, part.at + part.size * part.copies, index)
        for index, parts in enumerate(modules.values())
        for part in parts
    ]
    for one in sorted(each, key=lambda one: one.start):
        if found and found[-1].module == one.module:
            found[-1] = replace(found[-1], end=one.end)
        else:
            found.append(one)
    return tuple(found)
