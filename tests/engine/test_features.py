"""A feature lives in one place: the loop names none, and calls each in the same way."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from operator import attrgetter
from types import ModuleType

import numpy as np
import pytest

from dovetail.api.executor import Batch, Pooled, PoolingRows, Result, RowPooling
from dovetail.api.scheduler import Refusal, Step
from dovetail.end_reason import EndReason
from dovetail.engine import batch_builder, books, core, step
from dovetail.engine.feature import EngineFeature
from dovetail.engine.finish import Finish
from dovetail.engine.flight import Delivery, InFlightStep
from dovetail.engine.live_request import LiveRequest, Status
from dovetail.engine.pooling import Pooling
from dovetail.errors import DovetailError
from dovetail.request.sampling_params import SamplingParams
from tests.engine.policies import always, fcfs
from tests.engine.world import Shape, Spec, World

NAMES = re.compile(r"\w*(?:adapter|lora|pool|specul|draft)\w*", re.IGNORECASE)
CONTRACT = {"drafts"}
GEOMETRY = {"Drafts", "_drafts"}  # of a batch: rows with several lines
PROMPT = (1, 2, 3, 4, 5)


@pytest.mark.parametrize("module", [core, books, step, batch_builder], ids=lambda m: m.__name__)
def test_the_loop_names_no_feature(module: ModuleType) -> None:
    named = {*NAMES.findall(inspect.getsource(module))} - CONTRACT
    assert named <= (GEOMETRY if module is batch_builder else set())


class Noting(EngineFeature):
    """Notes its calls, and hides requests of the client "hidden" before a time."""

    def __init__(self, hidden_until: float = 0.0) -> None:
        self.calls: list[tuple[str, object]] = []
        self.running: list[str] = []
        self._hidden_until = hidden_until
        self._now = 0.0

    def arrived(self, request: LiveRequest) -> None:
        self.calls.append(("arrived", request.id))

    def open_step(self, now: float, waiting: Iterable[LiveRequest]) -> bool:
        self._now = now
        return any(self.refuses(request) for request in waiting)

    def refuses(self, request: LiveRequest) -> Refusal | None:
        hides = request.client == "hidden" and self._now < self._hidden_until
        return Refusal.NOT_NOW if hides else None

    def admitted(self, request: LiveRequest) -> None:
        self.running.append(request.id)

    def left(self, request: LiveRequest) -> None:
        self.running.remove(request.id)
        self.calls.append(("left", request.id))

    def fill(
        self, batch: Batch, requests: Sequence[LiveRequest], added: Sequence[LiveRequest]
    ) -> Batch:
        assert [request.row for request in requests] == batch.rows.tolist()
        assert [request.row for request in added] == [row.row for row in batch.added]
        assert {request.id for request in requests} <= {*self.running}
        return batch

    def submitted(self, step: int) -> None:
        self.calls.append(("submitted", step))

    def collected(self, flight: InFlightStep, delivery: Delivery) -> None:
        assert flight.result.step == flight.index
        self.calls.append(("collected", flight.index))

    def of(self, name: str) -> list[object]:
        return [value for call, value in self.calls if call == name]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_feature_hears_of_each_request_and_step_in_order(overlap: bool) -> None:
    noting = Noting()
    world = World(shape=Shape(overlap=overlap, num_pages=8), features=[noting])
    for index in range(6):
        world.add(Spec(f"{index}", (index, *PROMPT)))
    world.add(Spec("aborted", PROMPT, max_tokens=90))
    world.step()
    world.abort("aborted")
    world.drain(check=True)
    assert noting.of("arrived") == [*world.heard.arrived]
    assert noting.running == []
    assert sum(request.preemptions for request in world.requests.values()) > 0
    steps = [batch.step for batch in world.executor.sent]
    assert noting.of("submitted") == steps
    assert noting.of("collected") == steps[: len(noting.of("collected"))]


class OfClients(Noting):
    """Only requests of a client concern it."""

    asked_by = attrgetter("client")

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[int] = []  # how many requests waited when a step began

    def open_step(self, now: float, waiting: Iterable[LiveRequest]) -> bool:
        self.opened.append(len([*waiting]))
        return super().open_step(now, waiting)

    def fill(
        self, batch: Batch, requests: Sequence[LiveRequest], added: Sequence[LiveRequest]
    ) -> Batch:
        return batch


@pytest.mark.parametrize("overlap", [True, False])
def test_a_feature_hears_of_nothing_but_requests_that_ask_for_it_and_their_steps(
    overlap: bool,
) -> None:
    noting = OfClients()
    world = World(shape=Shape(overlap=overlap), features=[noting])
    world.add(Spec("before", PROMPT))
    world.drain(check=True)
    assert noting.calls == noting.opened == []
    first = len(world.executor.sent)
    world.add(Spec("asks", PROMPT, client="somebody", max_tokens=4))
    world.add(Spec("beside", PROMPT, max_tokens=9))
    world.drain(check=True)
    steps = [batch.step for batch in world.executor.sent[first : first + 4 + overlap]]
    assert noting.of("arrived") == noting.of("left") == ["asks"]
    assert noting.of("submitted") == noting.of("collected") == steps
    assert noting.opened[-1] == 0, "it saw that nobody waits any more"
    assert len(noting.opened) == len(steps) + 1


def test_a_request_that_a_feature_hides_is_held_back_and_others_are_not() -> None:
    seen: list[tuple[list[str], list[str]]] = []

    def look(step: Step) -> None:
        waiting, held_back = ([r.id for r in some] for some in (step.waiting, step.held_back))
        seen.append((waiting, held_back))
        for request in step.held_back:
            assert step.grant(request).refused is Refusal.NOT_NOW
        fcfs(step)

    world = World(always(look), Shape(overlap=False), features=[Noting(hidden_until=0.02)])
    world.add(Spec("hidden", PROMPT, client="hidden"))
    world.add(Spec("shown", PROMPT))
    world.drain(check=True)
    assert seen[0] == (["shown"], ["hidden"])
    assert seen[-1] == ([], [])


def pooled_flight(requests: Sequence[LiveRequest], result: Result) -> InFlightStep:
    """Return a step at whose end `requests` have computed their prompts, with its result."""
    none, rows = np.zeros(0, np.int32), np.arange(len(requests), dtype=np.int32)
    num_tokens = [len(PROMPT)] * len(requests)
    batch = Batch(
        *(result.step, none, (), none, (), rows, np.array(num_tokens, np.int32)),
        yields_token=np.zeros(len(requests), np.bool_),
        parts=(PoolingRows({}, rows),),
    )
    counts = dict.fromkeys(requests, 0)
    figures = sum(num_tokens), 0, 0, 0, 0, 0
    flight = InFlightStep(
        *(result.step, batch, 0.0, [*requests], num_tokens, counts, {}, *figures, (), {}),
        unsampled=False,
    )
    flight.take(result, 1.5)
    return flight


def pooling_request(id: str) -> LiveRequest:
    request = LiveRequest(
        id, PROMPT, SamplingParams(), max_tokens=1, pooling=RowPooling("embed"), arrival_time=0.0
    )
    request.in_flight = 1
    return request


def test_a_pooling_request_ends_with_its_result_and_one_that_failed_or_was_aborted_without() -> (
    None
):
    requests = [pooling_request(id) for id in ("good", "failed", "aborted")]
    good, failed, aborted = requests
    aborted.status = Status.FINISHED
    vector = np.ones(4, np.float32)
    no_tokens = np.full(3, -1, np.int64)
    parts = (Pooled({0: vector, 2: vector}),)
    result = Result(7, no_tokens, 0.0, 1.0, failed={1: "NaN"}, parts=parts)
    flight, delivery = pooled_flight(requests, result), Delivery()
    assert [*flight.tokens(delivery.finished)] == []
    Pooling().collected(flight, delivery)
    assert delivery.pooled == [(good, vector)]
    assert delivery.finished == {
        failed: Finish(EndReason.ERROR, "NaN"),
        good: Finish(EndReason.STOP),
    }
    assert good.first_token_time == 1.5
    assert flight.prefill_tokens == 2 * len(PROMPT), "what was aborted counts nowhere"


def test_a_pooled_result_that_is_missing_is_named() -> None:
    parts = (Pooled({0: np.ones(4, np.float32)}),)
    result = Result(7, np.full(2, -1, np.int64), 0.0, 1.0, parts=parts)
    flight = pooled_flight([pooling_request("a"), pooling_request("b")], result)
    with pytest.raises(DovetailError, match=r"step 7: .* no pooled result of rows \[1\]"):
        Pooling().collected(flight, Delivery())
