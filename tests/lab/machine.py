"""A GPU to calibrate on, kernel by kernel, on a virtual clock: an oracle that shares none of the
lab's rules of what launching does to a step."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from dovetail import LLMEngine
from dovetail.api.clock import VirtualClock
from dovetail.api.executor import Batch, ExecutorContext, Result
from dovetail_lab.simulated import SimulatedExecutor
from dovetail_lab.simulated_options import SimulatedOptions
from dovetail_lab.step_time import StepShape

LAYERS = 28
SAMPLING_S = 1.2e-4  # of a step with prefills
RESULTS_S = 1e-4
# of launching a step with prefills that is one graph: when that begins, sampling is left to be
# launched
GRAPH_SHARE = 0.6
ROW_GRAPHS = (1, 2, 4, *range(8, 129, 8))
JUMP = 16
# tokens that a graph is recorded for
GRAPHS = (
    *range(32, 257, 32),
    *range(320, 513, 64),
    *range(640, 1025, 128),
    *range(1280, 2049, 256),
)


@dataclass(frozen=True)
class Jitter:
    """Probabilities and factors of slow launches."""

    shares: tuple[float, ...] = (1.0,)
    times: tuple[float, ...] = (1.0,)

    @property
    def mean(self) -> float:
        return float(np.dot(self.shares, self.times))


@dataclass(frozen=True)
class Submitted:
    step: int
    token_ids: Any
    shape: StepShape
    yields_token: bool
    begun: float
    launched: float


class Machine(SimulatedExecutor):
    """Takes the tokens from the simulated executor, and its own time."""

    jitter = Jitter()
    graphs: tuple[int, ...] = GRAPHS
    # rows that a graph of decodes is recorded for; none: one for each number
    row_graphs: tuple[int, ...] = ()
    decode_launch_s: float = 3e-4
    # of launching a step with prefills: what is for requests that take a row
    joining_s: float = 0.0
    copying: float = 0.0  # of launching decodes: what is left when their graph begins
    jump_s: float = 0.0  # what decodes take longer above `JUMP` rows: other kernels
    # times as long the host takes for a step, and `request_s` for a request, while others than a
    # grid's come and go
    busy: float = 1.0
    request_s: float = 0.0
    setup_s: float = 0.0  # what the device does meanwhile, before the graph of a step with prefills
    # what each token of the longest prefill row adds: its few queries go over it one after the
    # other
    length_s: float = 0.0

    def __init__(self, options: SimulatedOptions, context: ExecutorContext) -> None:
        super().__init__(options, context)
        self._random = np.random.default_rng(context.config.seed + 7)
        self._submitted: deque[Submitted] = deque()
        self._free = 0.0  # when the device has nothing more to do
        self._busy, self._setup_s = 1.0, 0.0

    def take_in(self) -> bool:
        self.clock.wait_until(self.clock.now() + self.request_s)
        return super().take_in()

    def submit(self, batch: Batch) -> int:
        if batch.added:
            of_grid = all(_of_grid(new.request_id) for new in batch.added)
            self._busy, self._setup_s = (1.0, 0.0) if of_grid else (self.busy, self.setup_s)
        begun, plan_s = self.clock.now(), self.plan_s
        super().submit(batch)
        pending = self._pending.pop()
        yields_token = bool(batch.yields_token.any())
        launch_s = self._launch_s(pending.shape, yields_token) + (
            self.joining_s if batch.added else 0.0
        )
        launch_s *= self._busy * self._random.choice(self.jitter.times, p=self.jitter.shares)
        self.plan_s = plan_s + 0.1 * (launch_s - plan_s)
        self.clock.wait_until(begun + launch_s)
        self._submitted.append(
            Submitted(
                batch.step, pending.token_ids, pending.shape, yields_token, begun, begun + launch_s
            )
        )
        return batch.step

    def collect(self, handle: int) -> Result:
        one = self._submitted.popleft()
        assert one.step == handle
        started = max(one.begun, self._free)
        self._free = self._end(one)
        seen = max(self._free, self.clock.now())
        self.clock.wait_until(seen + self._busy * RESULTS_S)
        return Result(one.step, one.token_ids, seen - (self._free - started), seen)

    def _end(self, one: Submitted) -> float:
        """When the last kernel has ended, the device being free at `_free`."""
        if not one.shape.prefill_rows:
            begins = one.launched - self.copying * (one.launched - one.begun)
            return max(max(begins, self._free) + self._decode_s(one.shape), one.launched)
        launch_s, padded = one.launched - one.begun, self._padded(one.shape.tokens)
        if padded is not None:
            begins = max(
                one.begun + (GRAPH_SHARE if one.yields_token else 1.0) * launch_s,
                self._free + self._setup_s,
            )
            model = begins + self._prefill_s(one.shape, padded)
        else:
            model, kernel_s = self._free, self._prefill_s(one.shape, one.shape.tokens) / LAYERS
            for layer in range(1, LAYERS + 1):
                model = max(model, one.begun + 0.9 * launch_s * layer / LAYERS) + kernel_s
        return max(model, one.launched) + SAMPLING_S if one.yields_token else model

    def _padded(self, tokens: int) -> int | None:
        return (
            self.graphs[bisect_left(self.graphs, tokens)]
            if self.graphs and tokens <= self.graphs[-1]
            else None
        )

    def _launch_s(self, shape: StepShape, yields_token: bool) -> float:
        if not shape.prefill_rows:
            return self.decode_launch_s + 5e-7 * shape.rows
        if self._padded(shape.tokens) is None:
            return 5e-3
        return 9e-4 * (1.0 if yields_token else GRAPH_SHARE)

    def _decode_s(self, shape: StepShape) -> float:
        rows = (
            shape.rows
            if not self.row_graphs
            else self.row_graphs[bisect_left(self.row_graphs, shape.rows)]
        )
        return (
            1.3e-3
            + 3e-6 * rows
            + (self.jump_s if rows > JUMP else 0.0)
            + 2.6e-8 * shape.context_tokens
        )

    def _prefill_s(self, shape: StepShape, tokens: int) -> float:
        """A few tokens more cost nothing, then each costs the same."""
        attention = (
            2.6e-8 * shape.context_tokens
            + 5e-10 * shape.prefill_pairs
            + self.length_s * shape.prefill_length
        )
        return max(1.9e-3, 1.2e-3 + 2.4e-6 * tokens) + attention


def _of_grid(request_id: str) -> bool:
    return request_id.startswith("calibration-")


@contextmanager
def machine(**attributes: Any) -> Iterator[None]:
    """The executor `simulated` is one, with these attributes of its class."""
    made, add_request = type("Made", (Machine,), attributes), LLMEngine.add_request

    def take_in(engine: LLMEngine, request_id: str, *args: Any, **rest: Any) -> None:
        add_request(engine, request_id, *args, **rest)
        clock = engine.core.clock
        if type(clock) is VirtualClock and not _of_grid(
            request_id
        ):  # a run's own clock is moved by `Machine.take_in`
            clock.wait_until(clock.now() + made.request_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dovetail_lab.simulated.SimulatedExecutor", made)
        patch.setattr(LLMEngine, "add_request", take_in)
        yield
