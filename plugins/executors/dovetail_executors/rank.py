"""`Rank`: what each rank of the executor `tensor` does alike, in the engine's process or in one of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dovetail.api.executor import Capacity, ExecutorContext
from dovetail.runtime.groups import LOOPBACK, TorchGroup
from dovetail.runtime.model_files import find_architecture, resolve_dtype
from dovetail.runtime.worker import Worker

CONNECTION_LEFT_S = 10.0  # a sum between CPUs waits for longer than a step may take: the watch is to end it first, which knows whose fault it is


@dataclass(frozen=True, slots=True)
class RankSettings:
    """The settings that the ranks of an engine have in common. Picklable."""

    executor: str  # its name, for errors
    group: str  # the group's name, which no other has on this host
    size: int
    store: str  # see `TorchGroup`
    num_blocks: int | None
    threads: int | None
    symmetric: bool
    step_timeout_s: float


class Rank:
    """A worker in a group: `load`, `allocate`, then the worker's steps, `close` at the end."""

    def __init__(
        self,
        rank: int,
        device: torch.device,
        settings: RankSettings,
        context: ExecutorContext,
        before_join: Callable[[], None] = lambda: None,
        store_fd: int | None = None,
        address: str = LOOPBACK,
    ) -> None:
        """`before_join`, `store_fd` and `address` are as for `TorchGroup`."""
        self.device, self._settings, self._context = device, settings, context
        timeout_s = settings.step_timeout_s + CONNECTION_LEFT_S
        self.group = TorchGroup(rank, settings.size, device, settings.group, settings.store, timeout_s, before_join, store_fd, address)
        self.worker = Worker(context, self.group, settings.executor)

    def load(self) -> Capacity:
        """Load this rank's part of the model, connect to the other ranks, and tell what fits here. Raises as `Worker.load` and `TorchGroup.join`
        do."""
        settings = self._settings
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if settings.symmetric:
            self._reserve()
        capacity = self.worker.load(self.device, settings.num_blocks)
        self.group.join()
        return capacity

    def close(self) -> None:
        """Release everything, without waiting for other ranks."""
        self.group.abort()
        self.worker.stop()

    def _reserve(self) -> None:
        """Make the symmetric memory: for the hidden states of the largest step, before anything is recorded."""
        config = self._context.config
        _, hf_config = find_architecture(config.model, self._context.models)
        dtype = resolve_dtype(config.dtype, hf_config, self.device)
        self.group.reserve(config.max_num_batched_tokens * int(hf_config.hidden_size), dtype)
