"""Drives an executor by hand with LoRA adapters in its batches, and transformers' models with the
same adapters merged into their weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from dovetail.api.executor import (
    AdapterCapacity,
    AdapterLoad,
    AdapterRows,
    Batch,
    Capacity,
    Drafts,
    Executor,
    NewRow,
)
from dovetail.api.sampler import RowSampling
from dovetail_executors.runtime.profiling import empty_batch

Weights = dict[str, tuple[torch.Tensor, torch.Tensor]]  # module -> A [rank, in] and B [out, rank]


def random_adapter(
    capacity: AdapterCapacity, rank: int, seed: int, share: float = 1.0, size: float = 0.5
) -> Weights:
    """An adapter of some `share` of the modules, whose products are of about the `size` of their
    inputs."""
    generator, random = torch.Generator().manual_seed(seed), Random(seed)
    names = [name for name in capacity.modules if random.random() < share]
    weights = {}
    for name in names:
        inputs, out = capacity.modules[name]
        a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        weights[name] = a, torch.randn(out, rank, generator=generator) * size / max(1, rank) ** 0.5
    return weights


def save(weights: Weights, path: Path) -> str:
    """Write the file that an executor reads."""
    save_file(
        {
            f"{name}.lora_{which}": part
            for name, parts in weights.items()
            for which, part in zip("AB", parts, strict=True)
        },
        path,
    )
    return str(path)


def merged(model: Any, weights: Weights) -> Any:
    """A copy of transformers' model with an adapter merged into its weights."""
    own = copy.deepcopy(model)
    for name, (a, b) in weights.items():
        name = name.replace("backbone.", "model.")  # in checkpoints of Nemotron-H
        own.get_submodule(name).weight.data += b @ a
    return own


@torch.inference_mode()
def generated(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that transformers' model would choose."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@dataclass
class Asked:
    """One request: its adapter, a key of the driver's (None: none), and what it should generate."""

    prompt: list[int]
    adapter: int | None
    expected: list[int]
    tokens: list[int] = field(default_factory=list)  # generated so far
    row: int = -1
    computed: int = 0
    pages: list[list[int]] = field(default_factory=list)

    @property
    def known(self) -> list[int]:
        return self.prompt + self.tokens

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= len(self.expected)


class Driver:
    """Runs requests on an executor in random steps: some prompts in chunks, some rows with drafts,
    some preempted or begun after cached blocks."""

    def __init__(
        self,
        executor: Executor,
        capacity: Capacity,
        files: Mapping[int, str],
        max_rows: int,
        random: Random,
    ) -> None:
        """`files`: of each adapter."""
        assert capacity.adapters is not None
        self.executor, self.capacity, self.files, self.random = executor, capacity, files, random
        self.slots: dict[int, int] = {}  # slot -> adapter
        self.free_rows, self.next_page, self.step = list(range(max_rows)), 0, 0
        self.live: list[Asked] = []
        self.saw_hits = self.saw_drafts = self.saw_preemptions = self.saw_loads = 0

    def run(self, requests: Sequence[Asked]) -> None:
        waiting = list(requests)
        while waiting or self.live:
            self._step(waiting)

    def _step(self, waiting: list[Asked]) -> None:
        removed, added, loads, slots = [], [], [], {}
        for one in list(self.live):
            preempt = not one.is_done and self.random.random() < 0.2
            if one.is_done or preempt:
                self.live.remove(one)
                removed.append(one.row)
                if preempt:
                    self.saw_preemptions += 1
                    waiting.insert(0, one)
        self.free_rows += removed
        while waiting and self.free_rows and self.random.random() < 0.7:
            slot, load = self._slot_for(waiting[0].adapter)
            if slot is None:
                break
            loads += load
            added.append(self._begin(waiting.pop(0), slot))
            if slot:
                slots[added[-1].row] = slot
        if not self.live:
            return
        rows = [one for one in self.live if self.random.random() < 0.8] or self.live
        drafted: list[list[int]] = []
        counts, yields = [], []
        for one in rows:
            left = len(one.known) - one.computed
            drafts = self._drafts(one) if left == 1 else []
            count = (
                left if left == 1 or self.random.random() < 0.5 else self.random.randint(1, left)
            )
            drafted.append(drafts)
            counts.append(count + len(drafts))
            yields.append(count == left)
        any_drafts = any(drafted)
        batch = empty_batch(
            step=self.step,
            removed=np.array(removed, np.int32),
            added=tuple(added),
            rows=np.array([one.row for one in rows], np.int32),
            num_tokens=np.array(counts, np.int32),
            yields_token=np.array(yields, np.bool_),
            drafts=Drafts(
                np.array([*map(len, drafted)], np.int32),
                np.array([token for own in drafted for token in own], np.int32),
            )
            if any_drafts
            else None,
            parts=(AdapterRows(tuple(loads), slots),),
        )
        self._take(batch, rows, drafted)

    def _take(self, batch: Batch, rows: list[Asked], drafted: list[list[int]]) -> None:
        self.step += 1
        result = self.executor.collect(self.executor.submit(batch))
        assert not result.failed, result.failed
        tokens, at = result.token_ids.tolist(), 0
        for index, (one, drafts) in enumerate(zip(rows, drafted, strict=True)):
            yields = bool(batch.yields_token[index])
            own = int(result.counts[index]) if result.counts is not None else 1
            new = tokens[at : at + own] if yields else []
            at += own
            one.computed += len(new) if drafts else int(batch.num_tokens[index])
            one.tokens += new
            self.saw_drafts += len(new) > 1

    def _slot_for(self, adapter: int | None) -> tuple[int | None, list[AdapterLoad]]:
        """Return the slot of an adapter, and what must be loaded for it; None if all slots are
        used."""
        if adapter is None:
            return 0, []
        used = {one.adapter for one in self.live}
        assert self.capacity.adapters is not None
        for slot in range(1, 1 + self.capacity.adapters.slots):
            if self.slots.get(slot) == adapter:
                return slot, []
        free = [
            slot
            for slot in range(1, 1 + self.capacity.adapters.slots)
            if self.slots.get(slot) not in used
        ]
        if not free:
            return None, []
        slot = self.random.choice(free)
        self.slots[slot] = adapter
        self.saw_loads += 1
        return slot, [AdapterLoad(slot, self.files[adapter], f"adapter {adapter}")]

    def _begin(self, one: Asked, slot: int) -> NewRow:
        """Give a request a row, with pages for all its tokens; begin after the blocks of another's
        that are the same."""
        one.row, one.pages, one.computed = (
            self.free_rows.pop(self.random.randrange(len(self.free_rows))),
            [],
            0,
        )
        most = len(one.prompt) + len(one.expected) + 8
        for group in self.capacity.layout.groups:
            count = group.blocks(most) * group.pages_per_block
            one.pages.append([*range(self.next_page, self.next_page + count)])
            self.next_page += count
        assert self.next_page <= self.capacity.num_pages
        for other in (
            self.live
            if len(self.capacity.layout.groups) == 1
            and self.capacity.layout.groups[0].window is None
            else ()
        ):
            size = self.capacity.layout.groups[0].block_tokens
            blocks = min(other.computed, len(one.known) - 1) // size
            if (
                other.adapter == one.adapter
                and blocks
                and other.known[: blocks * size] == one.known[: blocks * size]
            ):
                one.pages[0][:blocks] = other.pages[0][:blocks]
                one.computed, self.saw_hits = blocks * size, self.saw_hits + 1
                break
        self.live.append(one)
        pages, sampling = (
            tuple(np.array(own, np.int32) for own in one.pages),
            RowSampling(temperature=0.0),
        )
        return NewRow(
            one.row,
            f"r{id(one)}",
            np.array(one.known, np.int32),
            len(one.prompt),
            one.computed,
            pages,
            sampling,
        )

    def _drafts(self, one: Asked) -> list[int]:
        """The next tokens, most of them right."""
        if not self.capacity.max_lines or self.random.random() < 0.4:
            return []
        right = one.expected[len(one.tokens) : len(one.tokens) + 3][:-1]
        return [
            token if self.random.random() < 0.7 else self.random.randrange(self.capacity.vocab_size)
            for token in right
        ]
