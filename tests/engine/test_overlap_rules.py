"""Effects of overlap on a request, rule by rule; (a) to (h) as in the design."""

from __future__ import annotations

import numpy as np
import pytest

from dovetail.api.executor import Batch, HostLogprobs, PromptLogprobs, Result
from dovetail.api.observer import StepFinished
from dovetail.api.scheduler import Refusal, Step
from tests.engine.policies import always, fcfs, named, scripted
from tests.engine.world import RecordingExecutor, Shape, Spec, World, rows_of

PROMPT = (5, 6, 7, 8, 9)
IN_FLIGHT = pytest.mark.parametrize("max_in_flight", [1, 2, 3, 4])


def first_token(prompt: tuple[int, ...] = PROMPT) -> int:
    world = World()
    world.add(Spec("oracle", prompt, max_tokens=1))
    return world.expected("oracle")[0][0]


# (a) tokens in flight count towards max_tokens


@IN_FLIGHT
def test_a_stop_by_length_wastes_no_row(max_in_flight: int) -> None:
    world = World(shape=Shape(max_in_flight=max_in_flight))
    (request,) = world.add(Spec("a", PROMPT, max_tokens=6))
    world.drain()
    assert rows_of(world, request) == 6  # the prefill samples the first, five decodes the others


def test_a_request_whose_last_token_is_in_flight_is_not_shown() -> None:
    shown = []
    world = World(always(lambda step: (shown.append(set(named(step))), fcfs(step))))
    world.add(Spec("short", PROMPT, max_tokens=1))
    world.add(Spec("long", PROMPT, max_tokens=3))
    world.drain()
    assert shown[:2] == [{"short", "long"}, {"long"}]


# (b) preempting frees blocks at once; the token in flight is kept


def test_preempting_frees_blocks_while_the_step_is_in_flight_and_keeps_its_token() -> None:
    def preempt(step: Step) -> None:
        request = named(step)["a"]
        assert request.generated == 0
        step.preempt(request)
        assert step.free_pages == 64
        assert request.prefill_left == len(PROMPT)
        assert step.grant(request).refused is Refusal.NOT_NOW

    def next_plan(step: Step) -> None:
        request = named(step)["a"]
        assert request.generated == 1, "the token that was in flight has come"
        assert request.prefill_left == len(PROMPT) + 1
        assert request in step.waiting
        assert step.cost(request).tokens + step.cost(request).cached == len(PROMPT) + 1
        fcfs(step)

    world = World(scripted(fcfs, preempt, next_plan))
    world.add(Spec("a", PROMPT, max_tokens=4))
    world.drain()


def test_a_preempted_request_is_refused_until_all_its_tokens_have_come() -> None:
    refused: list[Refusal | None] = []

    def retry(step: Step) -> None:
        refused.append(step.grant(named(step)["a"]).refused)

    world = World(
        scripted(fcfs, fcfs, lambda step: step.preempt(named(step)["a"]), retry, retry),
        Shape(max_in_flight=3),
    )
    world.add(Spec("a", PROMPT, max_tokens=5))
    world.drain()
    assert refused == [Refusal.NOT_NOW, None]


def test_a_preempted_request_that_stops_by_its_token_in_flight_runs_no_more() -> None:
    world = World(scripted(fcfs, lambda step: step.preempt(named(step)["a"])))
    (request,) = world.add(Spec("a", PROMPT, stop_ids=frozenset([first_token()])))
    world.drain()
    assert world.finished["a"].reason == "stop"
    assert len(world.executor.sent) == 1
    assert request.preemptions == 1


def test_all_tokens_of_a_preempted_request_are_to_be_prefilled() -> None:
    def preempt(step: Step) -> None:
        (request,) = step.decoding
        assert (request.prefill_left, request.generated) == (0, 3)
        step.preempt(request)
        assert request.prefill_left == len(PROMPT) + 3

    world = World(scripted(fcfs, fcfs, fcfs, preempt), Shape(overlap=False))
    world.add(Spec("a", PROMPT))
    world.drain()


# (c) abort drops what is in flight


@IN_FLIGHT
def test_nothing_is_delivered_or_told_of_an_aborted_request(max_in_flight: int) -> None:
    world = World(shape=Shape(max_in_flight=max_in_flight))
    world.add(Spec("gone", PROMPT))
    world.add(Spec("stays", PROMPT))
    for _ in range(3):
        world.step()
    world.abort("gone")
    told = world.heard.computed["gone"], world.heard.generated["gone"]
    world.drain()
    assert (world.heard.computed["gone"], world.heard.generated["gone"]) == told
    assert world.heard.finished[0] == "gone"


# (d) the row of N + 1 after a stop found in N


def test_the_row_after_a_stop_shows_nowhere() -> None:
    world = World()
    (request,) = world.add(Spec("a", PROMPT, stop_ids=frozenset([first_token()])))
    world.drain()
    assert rows_of(world, request) == 2, "one row is wasted, or this test shows nothing"
    while world.core.is_computing:  # nobody waits for its results, but a later request may
        world.step()
    assert (
        world.core.stats.prefill_tokens,
        world.core.stats.decode_tokens,
        world.core.stats.generated_tokens,
    ) == (5, 0, 1)
    assert world.heard.computed["a"] == 5
    wasted = world.observer.events[-1]
    assert isinstance(wasted, StepFinished)
    assert (wasted.decode_tokens, wasted.generated_tokens) == (0, 0)


def test_what_a_wasted_row_computes_is_never_found_in_the_cache() -> None:
    world = World(shape=Shape(block_size=1))
    world.add(Spec("a", PROMPT, stop_ids=frozenset([first_token()])))
    world.drain()
    follow_up = (*PROMPT, first_token(), first_token((*PROMPT, first_token())), 1)
    (request,) = world.add(Spec("b", follow_up))
    assert (
        world.kv.lookup(request) == len(PROMPT) + 1
    )  # the stop token is known and computed; nothing after it


# (e) max_in_flight is the executor's to say


@pytest.mark.parametrize("overlap", [True, False])
@IN_FLIGHT
def test_as_many_steps_are_in_flight_as_the_executor_takes(
    max_in_flight: int, overlap: bool
) -> None:
    depths = []

    class Counting(RecordingExecutor):
        def submit(self, batch: Batch) -> int:
            step = super().submit(batch)
            depths.append(len(self._pending))
            return step

    world = World(shape=Shape(max_in_flight=max_in_flight, overlap=overlap), executor=Counting)
    world.add(Spec("a", PROMPT, max_tokens=20))
    world.drain()
    assert max(depths) == (max_in_flight if overlap else 1)


# (f) a re-prefill emits nothing again


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_a_preempted_request_resumes_with_the_same_tokens(after: int) -> None:
    world = World(
        scripted(*[fcfs] * after, lambda step: [step.preempt(r) for r in step.running]),
        Shape(reuse=False, token_budget=3),
    )
    (request,) = world.add(Spec("a", PROMPT, max_tokens=6))
    world.drain()
    assert request.preemptions == 1
    assert world.core.stats.recomputed_tokens > 0
    assert world.core.stats.generated_tokens == 6


class WithPromptLogprobs(RecordingExecutor):
    """For each row gives the ids of the known tokens after those it computes, as it should."""

    def submit(self, batch: Batch) -> int:
        self._change_rows_ahead(batch)
        return super().submit(batch)

    def _change_rows_ahead(self, batch: Batch) -> None:
        fresh = {new.row: (new.token_ids.tolist(), new.computed) for new in batch.added}
        self.following = getattr(self, "following", {})
        self.following[batch.step] = {}
        for index, (row, count) in enumerate(
            zip(batch.rows.tolist(), batch.num_tokens.tolist(), strict=True)
        ):
            tokens, computed = (
                fresh[row] if row in fresh else (self._rows[row].tokens, self._rows[row].computed)
            )
            after = np.array(tokens[computed + 1 : computed + count + 1], np.int64)
            self.following[batch.step][index] = HostLogprobs(
                after[:, None], np.zeros((len(after), 1), np.float32), np.ones(len(after), np.int64)
            )

    def collect(self, handle: int) -> Result:
        result = super().collect(handle)
        return Result(
            result.step,
            result.token_ids,
            result.started,
            result.ended,
            parts=(PromptLogprobs(self.following[handle]),),
        )


@pytest.mark.parametrize("after", [1, 2, 3, 4, 6])
def test_prompt_logprobs_are_given_once_whatever_is_prefilled_again(after: int) -> None:
    world = World(
        scripted(*[fcfs] * after, lambda step: [step.preempt(r) for r in step.running]),
        Shape(token_budget=4),
        executor=WithPromptLogprobs,
    )
    prompt = tuple(range(20, 33))
    world.add(Spec("a", prompt, prompt_logprobs=0))
    given: list[int] = []
    while world.core.has_unfinished():
        for _, logprobs in world.step().prompt_logprobs:
            given += logprobs.token_ids[:, 0].tolist()
    assert given == list(prompt[1:])


# (g) planned late, in a fixed order


def order_of(world: World) -> list[object]:
    """Return the policy's calls and what it was shown, without times."""
    return [(*call[:2], *call[3:]) if call[0] == "schedule" else call for call in world.heard.calls]


@IN_FLIGHT
def test_the_order_is_the_same_however_fast_the_device(max_in_flight: int) -> None:
    orders = []
    for seconds in (1e-6, 0.01, 10.0):
        world = World(
            shape=Shape(max_in_flight=max_in_flight, num_pages=32, seconds_per_step=seconds)
        )
        for index in range(6):
            world.add(
                Spec(
                    f"r{index}",
                    PROMPT * (index + 1),
                    max_tokens=3 + index,
                    stop_ids=frozenset(range(0, 97, 7)),
                )
            )
        world.drain()
        orders.append(order_of(world))
    assert orders[0] == orders[1] == orders[2]


def test_with_overlap_off_results_are_in_before_the_next_plan() -> None:
    def plan(step: Step) -> None:
        assert all(request.in_flight == 0 for request in step.running)
        fcfs(step)

    world = World(always(plan), Shape(overlap=False))
    world.add(Spec("a", PROMPT))
    world.drain()


def test_overlap_changes_no_token_and_no_policy_can_tell_it_from_what_it_sees() -> None:
    tokens = []
    for overlap in (True, False):
        world = World(shape=Shape(overlap=overlap, num_pages=20))
        for index in range(5):
            world.add(Spec(f"r{index}", PROMPT * (index + 1), stop_ids=frozenset(range(0, 97, 5))))
        world.drain()
        tokens.append((world.tokens, world.finished))
    assert tokens[0] == tokens[1]
