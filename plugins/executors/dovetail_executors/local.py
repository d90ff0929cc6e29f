"""The executor `local`: the whole model on one device, in the engine's process.

On a CPU `submit` computes and `collect` returns the result; more than one step in flight would only
delay results there.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.executor import (
    Batch,
    Capacity,
    Executor,
    ExecutorCapabilities,
    ExecutorContext,
    Masks,
    Result,
)
from dovetail.api.start_phases import phase
from dovetail.nn.parallel import SINGLE
from dovetail_executors.options import LocalOptions
from dovetail_executors.runtime.device_choice import choose_device
from dovetail_executors.runtime.loading import forecast
from dovetail_executors.runtime.recording import ALONE
from dovetail_executors.runtime.step import Step
from dovetail_executors.runtime.transfers import LocalTransfers
from dovetail_executors.runtime.worker import Worker


class LocalExecutor(Executor):
    """One device. A failed step ends it: the device's state is undefined then."""

    capabilities = ExecutorCapabilities(
        logprobs=True,
        masks=True,
        samples=True,
        draft_model=True,
        draft_head=True,
        logits_processors=True,
    )
    options: LocalOptions

    def __init__(self, options: LocalOptions, context: ExecutorContext) -> None:
        super().__init__(options, context)
        self.worker = Worker(context, SINGLE, "local")

    @classmethod
    def forecast(cls, context: ExecutorContext) -> str:
        return forecast(context)

    def start(self) -> Capacity:
        options = self.options
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        with phase("device"):
            device = choose_device(options.device, "executor.device")
        with ALONE:
            capacity = self.worker.load(device, options.num_pages)
            self.worker.allocate(capacity.num_pages)
        return replace(
            capacity,
            max_in_flight=options.max_in_flight or capacity.max_in_flight,
            line_costs=self.worker.line_costs,
            draft_costs=self.worker.draft_costs,
        )

    def submit(self, batch: Batch) -> Step:
        return self.worker.submit(batch)

    def mask_words(self, count: int, width: int) -> NDArray[np.uint32]:
        return self.worker.mask_words(count)

    def sample(self, handle: Step, masks: Masks) -> None:
        self.worker.sample(handle, masks)

    def collect(self, handle: Step) -> Result:
        return self.worker.collect(handle)

    def transfers(self) -> LocalTransfers | None:
        copies = self.worker.page_copies()
        return None if copies is None else LocalTransfers(copies, self.worker.name_of_bytes())

    def check(self) -> None:
        self.worker.check()

    def finish_start(self) -> bool:
        return self.worker.finish_start()

    def stop(self) -> None:
        self.worker.stop()
