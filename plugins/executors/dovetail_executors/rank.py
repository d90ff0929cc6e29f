"""`Rank`: a worker in a group, as each rank of the executor `tensor` has it, in the engine's
process or in its own."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from dovetail.api.executor import Capacity, ExecutorContext
from dovetail.api.token_sizes import most_lines
from dovetail_executors.runtime.architecture import find_architecture, resolve_dtype
from dovetail_executors.runtime.groups import LOOPBACK, TorchGroup
from dovetail_executors.runtime.worker import Worker

log = logging.getLogger("dovetail")

IDLE_S = 10.0  # that a GPU gets to finish, once nothing on it waits for another rank
IDLE_POLL_S = 0.001
# a CPU sum's timeout exceeds the step's: the watch, which knows the culprit, ends it first
CONNECTION_LEFT_S = 10.0


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Settings shared by all ranks of an engine. Picklable."""

    group: str  # the group's name, unique on this host
    size: int
    store: str  # see `TorchGroup`
    num_pages: int | None
    threads: int | None
    symmetric: bool
    step_timeout_s: float


_stuck: list[Rank] = []  # whose GPU never finished: they keep its memory


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
        self.device = device
        self._settings = settings
        self._context = context
        timeout_s = settings.step_timeout_s + CONNECTION_LEFT_S
        self.group = TorchGroup(
            rank,
            settings.size,
            device,
            settings.group,
            settings.store,
            timeout_s,
            before_join,
            store_fd,
            address,
        )
        self.worker = Worker(context, self.group, "tensor", self.group.agree)

    def load(self) -> Capacity:
        """Load this rank's part of the model, connect to the other ranks, and return this device's
        capacity. Raises as `Worker.load` and `TorchGroup.join` do."""
        settings = self._settings
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if settings.symmetric:
            self._reserve()
        capacity = self.worker.load(self.device, settings.num_pages)
        self.group.join()
        return capacity

    def close(self) -> None:
        """Release everything, without waiting for other ranks.

        If the GPU still computes `IDLE_S` after nothing on it waits for another rank, log an error
        and keep its memory, since releasing it would block. The process then exits by `os._exit`
        with status 1, so that nothing blocks at its exit: the system cleans up the GPU.
        """
        if not self._is_idle():
            self.group.abort()
        until = time.monotonic() + IDLE_S
        while not self._is_idle():
            if time.monotonic() > until:
                log.error(
                    "%s still computes %g s after the ranks were ended: its memory is released "
                    "when this process ends",
                    self.device,
                    IDLE_S,
                )
                _stuck.append(self)
                atexit.register(os._exit, 1)
                return
            time.sleep(IDLE_POLL_S)
        self.worker.stop()  # first its CUDA graphs: NCCL waits for those in which it is recorded
        self.group.close()

    def _is_idle(self) -> bool:
        """Return True if the GPU has finished all work. Never blocks."""
        if self.device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            with suppress(RuntimeError):  # a failed GPU computes nothing
                return torch.cuda.default_stream(self.device).query()
        return True

    def _reserve(self) -> None:
        """Allocate the ranks' shared memory, for the hidden states of the largest step and the
        logits of all lines."""
        config = self._context.config
        hf_config = find_architecture(config.model, self._context.models).config
        dtype = resolve_dtype(config.dtype, hf_config, self.device)
        lines = most_lines(config.max_num_seqs, config.max_drafts, config.max_num_batched_tokens)
        logits = lines * -(-int(hf_config.vocab_size) // self._settings.size)
        self.group.reserve(
            config.max_num_batched_tokens * int(hf_config.hidden_size), logits, dtype
        )
