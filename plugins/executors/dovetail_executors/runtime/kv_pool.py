"""The pool of K and V: how a model's caches lie in pages, how many pages fit, and their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from dovetail.api.attention import AttentionBackend, AttentionLayer, LayerCache, LayerSpec
from dovetail.api.executor import ExecutorConfig
from dovetail.api.kv_cache import KVLayout, PageCopy
from dovetail.api.kv_layout import (
    CachedLayer,
    CachedState,
    PlannedLayout,
    layout_of_nothing,
    plan_layout,
)
from dovetail.errors import ConfigError, DovetailError
from dovetail.nn.state.states import States
from dovetail.nn.transfer import all_to_device
from dovetail_executors.runtime.memory import available_ram_bytes, readable_bytes

# without `kv_cache_memory`, a CPU pool takes at most `cpu_memory_utilization` of the free RAM, or so
# many times that if a single sequence needs it …
TIMES_FOR_ONE = 2
SHARE_OF_LENGTH = 4  # … and no more than every row needs at one part in so many of max_model_len
# bytes of pages that a round of copies holds in between: a state has some 100 MB, and many requests
# may start from one
COPIED_AT_ONCE = 1 << 28
WORD = 8  # bytes that a copy moves at once, if they divide a page


def kv_layout(
    backend: AttentionBackend,
    specs: Sequence[LayerSpec],
    dtype: str,
    states: Sequence[CachedState] = (),
    max_len: int = 1,
) -> PlannedLayout:
    """Place the caches of layers `specs` and the `states` in pages. `dtype`: of the cache, a name
    ("bfloat16"). If the layers store nothing, a page is for a sequence of up to `max_len`
    tokens."""
    if (
        specs
        and not states
        and not any(backend.tensor_bytes(spec, backend.context.block_size) for spec in specs)
    ):
        return layout_of_nothing([spec.index for spec in specs], max_len, dtype)

    def cached(spec: LayerSpec) -> CachedLayer:
        return CachedLayer(
            spec.index, spec.window, lambda tokens: backend.tensor_bytes(spec, tokens), spec.shares
        )

    return plan_layout(
        [cached(spec) for spec in specs],
        backend.context.block_size,
        dtype,
        backend.capabilities.supports_block_size,
        states,
    )


def pool_pages(
    config: ExecutorConfig,
    layout: KVLayout,
    max_model_len: int,
    num_pages: int | None,
    device: torch.device,
    profile: Callable[[], int],
    ranks: int = 1,
) -> int:
    """Return the number of pages in the pool on `device`, per rank; ranks on CPUs share the memory.
    `num_pages` (the executor's option) and then `kv_cache_memory` take precedence.
    Otherwise, on a GPU: the rest of `gpu_memory_utilization` after `profile` (which runs the
    largest step and returns its peak in bytes). On a CPU: see the shares above. Pages without bytes
    are as many as rows.

    Raises `ConfigError` if the pool can't hold one sequence of `max_model_len` tokens, with the
    requested and available sizes and a remedy.
    """
    needed = layout.most_pages(max_model_len, config.max_num_batched_tokens)
    if num_pages is not None:
        pages = num_pages
        source = f"num_pages: {num_pages}"
        remedy = f"raise num_pages to {needed}"
    elif not layout.page_bytes:
        return config.max_num_seqs
    elif config.kv_cache_memory is not None:
        pages = config.kv_cache_memory // layout.page_bytes
        source = f"kv_cache_memory: {readable_bytes(config.kv_cache_memory)}"
        remedy = f"raise kv_cache_memory to {readable_bytes(needed * layout.page_bytes)}"
    elif device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        peak = profile()
        pages = max(0, int(config.gpu_memory_utilization * total) - peak) // layout.page_bytes
        source = (
            f"gpu_memory_utilization: {config.gpu_memory_utilization:g} of "
            f"{readable_bytes(total)}, less {readable_bytes(peak)} for the model,"
        )
        remedy = "raise gpu_memory_utilization, lower max_num_batched_tokens"
    else:
        free = available_ram_bytes() // ranks
        pages = _cpu_pages(config, layout, max_model_len, needed, free)
        share = _share_for_one(config)
        source = f"{share:g} of {readable_bytes(free)} free RAM (twice cpu_memory_utilization)"
        remedy = f"set kv_cache_memory to {readable_bytes(needed * layout.page_bytes)}"
    if pages < needed:
        fits = _longest(layout, pages, config.max_num_batched_tokens, max_model_len)
        change = (
            f"Lower max_model_len to {fits} or less, or {remedy}"
            if fits
            else f"{remedy[0].upper()}{remedy[1:]}"
        )
        raise ConfigError(
            f"the KV pool can't hold one sequence of max_model_len: {max_model_len} tokens need "
            f"{needed} pages "
            f"({readable_bytes(layout.page_bytes)} each), and {source} gives {pages}. {change}."
        )
    return pages


def _share_for_one(config: ExecutorConfig) -> float:
    return min(1.0, TIMES_FOR_ONE * config.cpu_memory_utilization)


def _cpu_pages(
    config: ExecutorConfig, layout: KVLayout, max_model_len: int, one: int, free: int
) -> int:
    # and a checkpoint
    for_row = (
        layout.most_pages(-(-max_model_len // SHARE_OF_LENGTH), config.max_num_batched_tokens)
        + layout.state_pages
    )
    wanted = config.max_num_seqs * for_row
    within = int(free * config.cpu_memory_utilization) // layout.page_bytes
    within_for_one = int(free * _share_for_one(config)) // layout.page_bytes
    return max(min(wanted, within), min(one, within_for_one))


def _longest(layout: KVLayout, pages: int, chunk: int, most: int) -> int:
    """Return the most tokens, less than `most`, of which one sequence fits into `pages`."""
    least = 0
    while least + 1 < most:
        middle = (least + most) // 2
        least, most = (
            (middle, most) if layout.most_pages(middle, chunk) <= pages else (least, middle)
        )
    return least


class KVPool:
    """Memory of the caches of all layers: for each slot of a page one tensor, to which a layer of
    each group is bound."""

    def __init__(
        self, planned: PlannedLayout, device: torch.device, states: States | None = None
    ) -> None:
        """`states`: of the recurrent layers, if there are any."""
        self.planned = planned
        self.device = device
        self.states = states
        self.layers: dict[int, AttentionLayer] = {}  # of the backend, by index
        # by size of a slot: [slots of this size, num_pages + 1, bytes] uint8
        self._memory: list[torch.Tensor] = []

    def wrap(
        self, make_layer: Callable[[LayerSpec], AttentionLayer]
    ) -> Callable[[LayerSpec], AttentionLayer]:
        """Return a `make_layer` whose layers are bound by `allocate`."""

        def make(spec: LayerSpec) -> AttentionLayer:
            layer = self.layers[spec.index] = make_layer(spec)
            return layer

        return make

    def allocate(self, num_pages: int) -> None:
        """Allocate `num_pages` pages and the waste page, and bind all layers, which drop their
        earlier memory. Raises `DovetailError` for a layer that the layout doesn't have."""
        self._memory.clear()
        slots = self._allocate_slots(num_pages)
        for index, layer in self.layers.items():
            place = self.planned.places.get(index)
            if place is None:
                raise DovetailError(
                    f"the model has made attention layer {index}, which isn't among its layer_specs"
                )
            group = self.planned.layout.groups[place.group]
            layer.bind(
                LayerCache(
                    tuple(slots[slot] for slot in place.slots),
                    group.block_tokens,
                    place.group,
                    place.page,
                )
            )
        if self.states is not None:
            (memory,) = self._memory  # slots are equal
            self.states.bind(memory)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Enqueue `copies`, as if one after the other."""
        at_once = max(1, COPIED_AT_ONCE // self.page_bytes)
        for sources, targets in _rounds(copies, at_once):
            src, dst = all_to_device(
                [np.array(sources, np.int64), np.array(targets, np.int64)], self.device
            )
            for memory in self._in_words():
                memory.index_copy_(1, dst, memory.index_select(1, src))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all slots."""
        return self.planned.layout.page_bytes

    def gather(self, pages: torch.Tensor, target: torch.Tensor) -> None:
        """Enqueue: `target` [n, page_bytes] uint8 = the bytes of `pages` [n] int64, slots of equal
        size together, in the order in which sizes come first in `PlannedLayout.slot_bytes`."""
        for memory, part in self._with_parts(target):
            torch.index_select(memory, 0, pages, out=part)

    def scatter(self, pages: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue: the bytes of `pages` = `source`, as `gather` orders them. The page with the
        number of pages in the pool is the waste page, and may be given several times."""
        for memory, part in self._with_parts(source):
            memory.index_copy_(0, pages, part)

    @property
    def waste_page(self) -> int:
        """The page that is written in place of none."""
        return self._memory[0].shape[1] - 1

    def _with_parts(self, data: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the memory of each size of slots [pages, slots, n], and its part of `data`
        [n, page_bytes], both as of `_in_words`."""
        start = 0
        for memory in self._in_words():
            slots, _, count = memory.shape
            size = count * memory.itemsize
            part = data[:, start : start + slots * size].view(len(data), slots, size)
            yield memory.transpose(0, 1), part.view(memory.dtype)
            start += slots * size

    def _in_words(self) -> list[torch.Tensor]:
        """Return the memory of each size of slots [slots, pages, n], in words if all sizes are
        multiples of `WORD`, otherwise in bytes."""
        sizes = self.planned.slot_bytes
        dtype = torch.int64 if all(size % WORD == 0 for size in sizes) else torch.uint8
        return [memory.view(dtype) for memory in self._memory]

    def _allocate_slots(self, num_pages: int) -> list[torch.Tensor]:
        """Return the memory of each slot [num_pages + 1, bytes], as parts of one tensor for each
        size."""
        sizes = self.planned.slot_bytes
        memory = {
            size: self._zeros(sizes.count(size), num_pages + 1, size)
            for size in dict.fromkeys(sizes)
        }
        self._memory = [*memory.values()]
        left = {size: iter(slots) for size, slots in memory.items()}
        return [next(left[size]) for size in sizes]

    def _zeros(self, *shape: int) -> torch.Tensor:
        if self.device.type == "cpu":
            # which takes no memory until it is written
            return torch.from_numpy(np.zeros(shape, np.uint8))
        return torch.zeros(shape, dtype=torch.uint8, device=self.device)


def _rounds(copies: Sequence[PageCopy], most: int) -> list[tuple[list[int], list[int]]]:
    """Group sequential copies into rounds of at most `most` that can run in parallel: no page of a
    round is written twice, or read after being written."""
    rounds: list[tuple[list[int], list[int]]] = []
    written: set[int] = set()
    for copy in copies:
        if not rounds or copy.src in written or copy.dst in written or len(written) == most:
            rounds.append(([], []))
            written = set()
        rounds[-1][0].append(copy.src)
        rounds[-1][1].append(copy.dst)
        written.add(copy.dst)
    return rounds
