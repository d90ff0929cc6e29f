"""`SchedulerSuite`: it checks that a scheduling policy keeps the contract of `dovetail.api.scheduler`. It doesn't need torch.

The core's step refuses what a policy may not do, so most checks ask what no step can see: does everybody end, is nobody passed over, is the same
run the same again. Each runs the real engine core (`scheduler_world`) through scenarios of its own (`scheduler_scenarios`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis.strategies import SearchStrategy

from dovetail.api.scheduler import Claims, Refusal, SchedulerContext
from dovetail.engine.live_request import LiveRequest, Status
from dovetail.engine.stats import EngineStats
from dovetail.errors import PolicyError, SchedulerStalled
from dovetail.request import Request
from dovetail.testing.checks import check, fail, require
from dovetail.testing.suite import Suite
from dovetail.testing.suites.holding import reachable
from dovetail.testing.suites.repeatable import for_all
from dovetail.testing.suites.scheduler_loads import (
    BEFORE_VICTIM,
    CROWDED,
    VICTIMS,
    begun_without_memory,
    crowded,
    flooded,
    held_back,
    pressed,
    streamed,
)
from dovetail.testing.suites.scheduler_replay import plans, plans_elsewhere
from dovetail.testing.suites.scheduler_scenarios import scenarios, smaller
from dovetail.testing.suites.scheduler_world import Scenario, Shape, Shown, World

EXEMPTIONS = {
    "no_starvation": "starves",
    "no_idling": "idles",
    "no_rejection": "rejects",
    "no_stalls": "stalls",
}  # capability -> the claim that takes it away
PASSED_OVER = 100  # later arrivals that may end before one request does
ORDERS: dict[str, Callable[[Request], tuple[float, float]]] = {  # the claim -> what it sorts by
    "arrival": lambda request: (0, request.arrival_time),
    "priority": lambda request: (request.priority, request.arrival_time),
    "deadline": lambda request: (math.inf if request.deadline is None else request.deadline, request.arrival_time),
}
_ANY_CONTEXT = SchedulerContext(max_tokens=64, max_seqs=8, total_blocks=64, block_size=4, seed=0)


class SchedulerSuite(Suite):
    """Conformance of a scheduling policy. What it claims decides what is wanted: `Claims.order` adds a check, the exemptions take one away each."""

    kind = "scheduler"

    @property
    def capabilities(self) -> Claims:
        """The claims of a policy made with `options`, which may change them."""
        claims: Claims = self.make(_ANY_CONTEXT).claims
        return claims

    def declares(self, capability: str) -> bool:
        if capability == "paced":
            return self.capabilities.is_paced
        if capability in EXEMPTIONS:
            return not getattr(self.capabilities, EXEMPTIONS[capability])
        return super().declares(capability)

    # The books

    @check("scheduler.sound", since="0.1")
    def test_sound(self) -> None:
        """The policy raised, or misused a step, which ends the engine. The message names the method and the rule. Use requests only while they
        are shown, and a step only inside `schedule`."""
        self._in_all(scenarios(), 40, lambda world: None)

    @check("scheduler.aborts", since="0.1")
    def test_aborts(self) -> None:
        """The policy raised once a client had gone away. A request can end at any time, waiting or running: `on_finished` comes exactly once,
        and nothing of the request may be used after it. An early end has no token, and perhaps was never granted one."""
        self._in_all(scenarios(aborts=True), 40, lambda world: None)

    @check("scheduler.budget", since="0.1")
    def test_budget(self) -> None:
        """A step computes more tokens than `SchedulerContext.max_tokens`. Grant through the step's methods alone, and leave its fields be."""

        def within(world: World) -> None:
            most, limit = world.watch.most_tokens, world.watch.context.max_tokens
            require(most <= limit, f"a step of {most} tokens, where {limit} are allowed")

        self._in_all(scenarios(), 12, within)

    @check("scheduler.seats", since="0.1")
    def test_seats(self) -> None:
        """More than `SchedulerContext.max_seqs` requests run in a step. Grant through the step's methods alone, and leave its fields be."""

        def within(world: World) -> None:
            most, limit = world.watch.most_seqs, world.watch.context.max_seqs
            require(most <= limit, f"a step of {most} requests, where {limit} are allowed")

        self._in_all(scenarios(), 12, within)

    @check("scheduler.memory", since="0.1")
    def test_memory(self) -> None:
        """The policy brought the memory's books into disorder: blocks leak, belong to two requests, or are too few. Only the step and the core
        may touch the KV-cache manager and the fields of a request."""

        def in_order(world: World) -> None:
            if world.dead is not None and not isinstance(world.dead, PolicyError | SchedulerStalled):
                fail(f"the books are in disorder: {world.dead}")
            held = world.kv.counts.held
            require(held == 0 or world.dead or world.unfinished, f"{held} blocks are held by nobody when all requests have ended")

        self._in_all(scenarios(aborts=True), 25, in_order, check_books=True)

    @check("scheduler.read_only", since="0.1")
    def test_read_only(self) -> None:
        """The policy wrote to a request. What it wants to remember goes in a dict of its own, by the request, until `on_finished`."""

        def untouched(world: World) -> None:
            for request in world.requests:
                changed = [name for name, value in world.given[request].items() if getattr(request, name) != value]
                require(not changed, f"{request!r} was given another {', '.join(changed)}")

        scenario = pressed(overlap=True)  # where many are preempted
        untouched(self._world(scenario.shape).play(scenario.acts))
        self._in_all(scenarios(), 12, untouched)

    @check("scheduler.forgets", since="0.1")
    def test_forgets(self) -> None:
        """The policy holds on to requests that have ended, or to numbers by their ids, so a server's memory grows for ever, and a request whose id
        comes again finds another's. Drop a request in `on_finished`, from every list and dict, aborted and rejected ones too; don't keep a step."""

        def forgotten(world: World) -> None:
            ended = {name for request in world.requests if request.status is Status.FINISHED for name in (request.id, request.parent)}
            ended -= {name for request in world.unfinished for name in (request.id, request.parent)}
            for path, value in reachable(world.policy) if world.dead is None else ():  # a dead engine tells its policy nothing more
                if isinstance(value, LiveRequest):
                    require(value.status is not Status.FINISHED, f"{path} holds {value!r} after its end")
                elif isinstance(value, str):
                    require(value not in ended, f"{path} holds the id {value!r} after its request's end")

        for scenario in held_back():
            forgotten(self._world(scenario.shape).play(scenario.acts))
        self._in_all(scenarios(aborts=True), 25, forgotten)

    # Promises

    @check("scheduler.finishes", since="0.1")
    def test_finishes(self) -> None:
        """Requests are left unfinished though nobody arrives any more: the policy grants nothing and sets no `wake_at`, or evicts in circles. A
        prompt may be longer than a step's budget, so it comes in chunks; a request that needs memory may have to evict others, the last in
        your order first."""

        def all_ended(world: World) -> None:
            require(not isinstance(world.dead, SchedulerStalled), f"the engine stalled: {world.dead}")
            require(not world.unfinished, f"unfinished after {world.steps} steps: {', '.join(map(repr, world.unfinished))}")
            times.append(world.watch.own_s / max(1, len(world.watch.planned)))

        times: list[float] = []
        for overlap in (True, False):
            scenario = pressed(overlap)
            all_ended(self._world(scenario.shape).play(scenario.acts))
        self._in_all(scenarios(), 40, all_ended)
        self.note(f"the policy's own time a step: {sorted(times)[len(times) // 2] * 1e6:.0f} µs (not judged)")

    @check("scheduler.no_starvation", since="0.1", capability="no_starvation")
    def test_no_starvation(self) -> None:
        """A request is passed over for ever while others that came later are served. Let waiting count for something (age, a limit, order of
        arrival), don't let small ones pass a large one that lacks memory for ever, or claim `starves`."""
        for overlap in (True, False):
            for who, victim in VICTIMS.items():
                self._require_patience(who, flooded(victim, overlap), range(BEFORE_VICTIM, BEFORE_VICTIM + 1))
            self._require_patience("one that may have been preempted", crowded(overlap), range(CROWDED))

    @check("scheduler.no_idling", since="0.1", capability="no_idling")
    def test_no_idling(self) -> None:
        """The policy left tokens, a seat and memory of a step unused while somebody could have run, had asked for nothing in vain and evicted
        nobody. Go on granting, prefills too, until a grant is refused, or claim `idles`."""
        self._in_all(scenarios(), 40, lambda world: None, look=_try_to_grant_more, decisions=True)

    @check("scheduler.no_rejection", since="0.1", capability="no_rejection")
    def test_no_rejection(self) -> None:
        """The policy rejected a request without claiming that it may. Claim `rejects`, so that users know."""

        def none_rejected(world: World) -> None:
            rejected = [plan for plan in world.watch.planned if plan.rejected]
            require(not rejected, f"rejected in step {rejected[0].index if rejected else 0}: {rejected[0].rejected if rejected else ()}")

        self._in_all(scenarios(), 15, none_rejected)

    @check("scheduler.no_stalls", since="0.3", capability="no_stalls")
    def test_no_stalls(self) -> None:
        """Streamed answers stood still while a prompt was computed, though there were seats and memory for all. Grant every decode in a step that
        computes prompts, decodes first; or claim `stalls`."""
        for overlap in (True, False):
            scenario = streamed(overlap)
            _require_alive(self._world(scenario.shape, look=_see_stall).play(scenario.acts))

    @check("scheduler.paced", since="0.3", capability="paced")
    def test_paced(self) -> None:
        """A prompt that the engine's pace cuts into chunks never came to its end. Go on with running requests that have `prefill_left`; or claim
        `paced=False`, and bound the prompts of a step yourself."""
        for overlap in (True, False):
            scenario = streamed(overlap)
            world = self._world(scenario.shape).play(scenario.acts)
            require(world.dead is None, f"the engine ended: {world.dead}")
            require(not world.unfinished, f"unfinished after {world.steps} steps: {', '.join(map(repr, world.unfinished))}")

    @check("scheduler.order", since="0.1", capability="order")
    def test_order(self) -> None:
        """Somebody was admitted before, or kept running at the cost of, one who comes first in the claimed order. Sort by the claimed key, of
        equals by arrival; stop admitting at the first that can't be; evict the last first. Or don't claim `order`."""
        key = ORDERS[str(self.capabilities.order)]
        look = partial(_see_order, key)
        for scenario in begun_without_memory():
            _require_alive(self._world(scenario.shape, look=look, decisions=True).play(scenario.acts))
        self._in_all(scenarios(plain=True, reuse=False), 40, lambda world: None, look=look, decisions=True)

    @check("scheduler.recompute", since="0.1")
    def test_recompute(self) -> None:
        """More tokens were computed twice than once: the policy preempts so much that the device does little else. Evict for those who run
        rather than for those who wait, the last in your order first, and don't admit whom the next step must evict."""
        for overlap in (True, False):
            stats = self._pressed(pressed(overlap))
            again, once = stats.recomputed_tokens, stats.prefill_tokens + stats.decode_tokens - stats.recomputed_tokens
            require(again < once, f"{again} tokens were recomputed, and {once} computed for the first time; {stats.preemptions} preemptions")

    @check("scheduler.replay", since="0.1")
    def test_replay(self) -> None:
        """The same requests gave another schedule: in a second engine of the same process, or in another process. Draw chance from
        `random.Random(context.seed)`, time from `step.now`; don't iterate over sets; keep nothing in the class or its module."""
        first = plans(self.make)
        require(plans(self.make) == first, "a second policy, made the same way, planned the same requests otherwise")
        require(plans_elsewhere(self) == [first], "another process planned the same requests otherwise")

    # How scenarios are run

    def _require_patience(self, who: str, scenario: Scenario, victims: range) -> None:
        """Check that not too many later requests end before the victims of a flood, which are given by the order of arrival."""

        def passed_over() -> bool:
            return any(sum(other.arrival_time > victim.arrival_time for other in world.finished) > PASSED_OVER for victim in left())

        def left() -> list[Request]:
            return [world.requests[index] for index in victims if world.requests[index] not in world.finished]

        world = self._world(scenario.shape)
        world.perform(scenario.acts)
        world.run(until=lambda: not left() or passed_over())
        _require_alive(world)
        require(not passed_over(), f"{who} still waits, and over {PASSED_OVER} requests that came later have ended: {left()[:1]}")

    def _world(self, shape: Shape, **watching: Any) -> World:
        return World(self.make, shape, **watching)

    def _pressed(self, scenario: Scenario) -> EngineStats:
        """Return the counts of a run, which ends early once as many tokens were recomputed as there are to compute."""
        world = self._world(scenario.shape)
        world.perform(scenario.acts)
        tokens = sum(request.prompt_tokens + request.max_tokens for request in world.requests)
        world.run(until=lambda: world.core.stats.recomputed_tokens > tokens)
        _require_alive(world)
        return world.core.stats

    def _in_all(self, among: SearchStrategy[Scenario], examples: int, holds: Callable[[World], None], **watching: Any) -> None:
        """Check that `holds` accepts the world after each of `examples` scenarios."""

        def in_any(scenario: Scenario) -> None:
            world = self._world(scenario.shape, **watching).play(scenario.acts)
            holds(world)
            _require_alive(world)

        for_all(among, examples, in_any, smaller)


def _require_alive(world: World) -> None:
    """Require that the engine is alive. A stall is left to the check `scheduler.finishes`; all else must hold until then."""
    if world.dead is not None and not isinstance(world.dead, SchedulerStalled):
        fail(f"the engine ended: {world.dead}", world.dead)


def _try_to_grant_more(shown: Shown) -> None:
    """Once the policy is done, was refused nothing for lack of room and evicted nobody, nobody else may fit. Who was evicted can't be granted what
    it left before the next step, and a policy that keeps an order admits nobody past it until then."""
    step = shown.step
    lacked = bool(step.preempted) or any(d.act == "refused" and d.why != Refusal.NOT_NOW.name for d in step.decisions or ())
    if lacked or step.tokens_left < 1 or step.seqs_left < 1:
        return
    left = f"{step.tokens_left} tokens, {step.seqs_left} seats and {step.free_blocks} blocks"
    for request in (*step.running, *step.waiting):
        if step.grant(request):
            fail(f"step {step.index} left {left} unused, and {request!r} could have run; it granted {len(step.granted) - 1}")


def _see_stall(shown: Shown) -> None:
    """No request that decodes is left out of a step that computes a prompt."""
    step = shown.step
    still = [request for request in step.decoding if request not in step.granted] if step.prefill_tokens else []
    require(not still, f"step {step.index} computed {step.prefill_tokens} tokens of prompts, and none of {still}")


def _see_order(key: Callable[[Request], tuple[float, float]], shown: Shown) -> None:
    """Check that no request is admitted ahead of an earlier one that waits or lacks memory for the rest of its prompt, and that none runs at the
    cost of an earlier one."""
    step = shown.step
    passed = [r for r in shown.waiting if r not in step.admitted and r not in step.rejected and not r.in_flight]
    lacking = {d.request for d in step.decisions or () if d.act == "refused" and d.why == Refusal.MEMORY.name}
    passed += [r for r in step.running if r in lacking and r.prefill_left and r not in step.granted]
    for request in step.admitted:
        for other in passed:
            require(key(request) <= key(other), f"step {step.index} admitted {request!r} before {other!r}")
    for victim in step.preempted:
        for request in step.granted:
            require(key(request) <= key(victim), f"step {step.index} preempted {victim!r} and ran {request!r}")
