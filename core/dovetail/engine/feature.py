"""`EngineFeature`: interface of features that only some requests use, such as adapters and pooling.

`dovetail.engine.features` lists those of an engine. Their calls come from where requests change
their state (`Books`, `PlannedStep`), from `BatchBuilder`, and from `EngineCore`; none of these
names a feature. A request without any costs none of these calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dovetail.api.executor import Batch
from dovetail.api.observer import StepFinished
from dovetail.api.scheduler import Refusal
from dovetail.engine.flight import Delivery, InFlightStep
from dovetail.engine.live_request import LiveRequest


class EngineFeature:
    """The host's side of a feature. Each method does nothing by default.

    It is notified of the requests that ask for it, and of the steps that are planned while the
    engine has such requests.
    """

    # What a request asks of this feature, looked up once, when it arrives; None: nothing. By
    # default each request concerns it.
    asked_by: Callable[[LiveRequest], Any] = staticmethod(lambda request: True)
    limit = Refusal.NOT_NOW  # why a grant is refused of which `most` allows too little

    def arrived(self, request: LiveRequest) -> None:
        """`request` is prepared, and the policy is about to see it."""

    def open_step(self, now: float, waiting: Iterable[LiveRequest]) -> bool:
        """A step is about to be planned. Return True if it hides some of the `waiting` requests.

        `waiting`: all of them. The last call before a pause follows the end of the last request.
        """
        return False

    def refuses(self, request: LiveRequest) -> Refusal | None:
        """Return why the waiting `request` can't be admitted now; None if it can.

        `Refusal.NOT_NOW` also hides it from the policy. So that this doesn't change within a step,
        `open_step` decides it.
        """
        return None

    def delays(self, request: LiveRequest, num_tokens: int) -> bool:
        """Return True if the waiting `request`, which could be admitted now with the blocks of
        `num_tokens` tokens if there are as many, should be admitted some steps later. The policy's
        grant is refused with `Refusal.NOT_NOW`."""
        return False

    def most(self, request: LiveRequest, start: int, tokens: int, least: int) -> int:
        """Return how many of the request's tokens from number `start` on may be granted: at most
        `tokens`, 0 for none; fewer than `least` are refused. Asked while its prompt is computed.
        Changes nothing."""
        return tokens

    def least(self, request: LiveRequest, start: int, tokens: int, budget: int) -> int:
        """Return `tokens`, or the next number of the request's tokens from number `start` on that
        divides nothing which is computed in one step: a larger one, or a smaller one if a whole step
        of `budget` tokens has no room for that. The policy's and the prefill limit give way to it.
        Asked while its prompt is computed."""
        return tokens

    def granted(self, request: LiveRequest, start: int, tokens: int) -> None:
        """The step being planned computes these tokens of a prompt, as `most` has allowed."""

    def taken_back(self, request: LiveRequest, start: int, tokens: int) -> None:
        """The step doesn't compute these tokens, which were granted in it."""

    def admitted(self, request: LiveRequest) -> None:
        """`request` runs from now on; its step is being planned."""

    def left(self, request: LiveRequest) -> None:
        """`request`, which was admitted, runs no more: taken back, preempted or finished."""

    def keeps(self, request: LiveRequest) -> bool:
        """`request` is about to finish, and its K and V are sound. Return True to keep its blocks:
        this feature frees them then, before a request with the same id arrives, and as soon as
        others may need them. `left` and `removed` follow."""
        return False

    def removed(self, request: LiveRequest) -> None:
        """`request`, which was told as arrived, has finished or was aborted. Follows `left`."""

    def fill(
        self, batch: Batch, requests: Sequence[LiveRequest], added: Sequence[LiveRequest]
    ) -> Batch:
        """Return `batch` with what it carries for this feature.

        `requests`: those of `batch.rows`. `added`: those of `batch.added`.
        """
        return batch

    def submitted(self, step: int) -> None:
        """The step of this index was submitted; `fill` has seen its batch."""

    def collected(self, flight: InFlightStep, delivery: Delivery) -> None:
        """The tokens of a step were delivered; deliver what this feature reads of `flight.result`.

        Requests whose status is `FINISHED` ended before, and those in `delivery.finished` end with
        this step. Raises `DovetailError` if the result lacks something.
        """

    def observed(self, flight: InFlightStep, event: StepFinished) -> StepFinished:
        """Return `event`, what observers are told of a step, with what is this feature's."""
        return event

    def next_look(self, now: float) -> float:
        """Return the time at which an engine with nothing to compute should plan again for this
        feature; infinity: it waits for nothing."""
        return math.inf

    def idle(self) -> bool:
        """Do a piece of what is left while the engine has no request, within some 10 ms. Returns
        True if more is left."""
        return False

    def reset(self) -> None:
        """All K and V are worthless from now on: see `KVCacheManager.reset`."""

    def stop(self) -> None:
        """The executor is about to stop. Nothing is called afterwards."""

    def check_forget(self) -> None:
        """Raise `DovetailError` if this feature depends on the engine's executor, so that no other
        can replace it."""

    def forget(self) -> None:
        """Another executor computes from now on; no request is unfinished."""
