"""`SchedulerSuite`: checks that a scheduling policy conforms to the contract of
`dovetail.api.scheduler`. Doesn't need torch.

The core's step raises on misuse, so most checks cover what no single step can see: whether all
requests end, whether any starves, whether a run is reproducible. Each runs the real engine core
(`scheduler_world`) through its own scenarios (`scheduler_scenarios`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis.strategies import SearchStrategy

from dovetail.api.observer import Act
from dovetail.api.scheduler import Refusal, SchedulerCapabilities, SchedulerContext
from dovetail.engine.live_request import LiveRequest, Status
from dovetail.engine.stats import EngineStats
from dovetail.errors import PolicyError, SchedulerStalled
from dovetail.request import Request
from dovetail.testing.checks import check, fail, require
from dovetail.testing.elsewhere import HASH_SEEDS
from dovetail.testing.suite import Suite
from dovetail.testing.suites.holding import reachable, require_bounded
from dovetail.testing.suites.repeatable import for_all
from dovetail.testing.suites.scheduler_loads import (
    BEFORE_VICTIM,
    CROWDED,
    LONG_BATCH,
    LONG_BATCHES,
    RETURNED_STEPS,
    THREE_GROUPS,
    VICTIMS,
    adapted,
    alike,
    begun_without_memory,
    crowd,
    crowded,
    drafted,
    flooded,
    flooded_by,
    held_back,
    indivisible,
    pressed,
    ranked,
    returning,
    same_time,
    streamed,
)
from dovetail.testing.suites.scheduler_replay import blocking_calls, plans, plans_elsewhere
from dovetail.testing.suites.scheduler_scenarios import scenarios, smaller
from dovetail.testing.suites.scheduler_world import Scenario, Shape, Shown, World

EXEMPTIONS = {
    "no_starvation": "starves",
    "no_idling": "idles",
    "no_rejection": "rejects",
    "no_stalls": "stalls_decodes",
}  # what a check needs -> the capability that takes it away
PASSED_OVER = 100  # maximum number of later arrivals that may end before a request
ORDERS: dict[
    str, Callable[[Request], tuple[float, float]]
] = {  # `SchedulerCapabilities.order` -> sort key
    "arrival": lambda request: (0, request.arrival_time),
    "priority": lambda request: (request.priority, request.arrival_time),
    "deadline": lambda request: (
        math.inf if request.deadline is None else request.deadline,
        request.arrival_time,
    ),
}
_ANY_CONTEXT = SchedulerContext(
    token_budget=64, max_num_seqs=8, total_pages=64, block_size=4, seed=0
)


class SchedulerSuite(Suite):
    """Suite of scheduling policies. `SchedulerCapabilities` determine the checks: `order` adds one,
    each exemption removes one."""

    kind = "scheduler"

    @property
    def capabilities(self) -> SchedulerCapabilities:
        """The capabilities of a policy that is constructed with `options`, which may change them."""
        capabilities: SchedulerCapabilities = self.make(_ANY_CONTEXT).capabilities
        return capabilities

    def declares(self, capability: str) -> bool:
        if capability == "prefill_limited":
            return self.capabilities.is_prefill_limited
        if capability in EXEMPTIONS:
            return not getattr(self.capabilities, EXEMPTIONS[capability])
        return super().declares(capability)

    # Accounting

    @check("scheduler.sound", since="1.0")
    def test_sound(self) -> None:
        """The policy raised, or misused a step, which ends the engine. The message names the method
        and the rule. Use requests only while they are shown, and a step only inside `schedule`. Where
        requests check drafts, a step yields several tokens of one."""
        _require_alive(self._played(drafted()))
        self._in_all(scenarios(), 40, lambda world: None)

    @check("scheduler.aborts", since="1.0")
    def test_aborts(self) -> None:
        """The policy raised after a client had disconnected. A request can end at any time, waiting
        or running: `on_finished` is called exactly once, and nothing of the request may be used
        afterwards. An early end has no token, possibly not even a grant."""
        self._in_all(scenarios(aborts=True), 40, lambda world: None)

    @check("scheduler.budget", since="1.0")
    def test_budget(self) -> None:
        """A step computes more tokens than `SchedulerContext.token_budget`. Use only the step's
        methods, and don't modify its fields."""

        def within(world: World) -> None:
            most = world.watch.most_tokens
            limit = world.watch.context.token_budget
            require(most <= limit, f"a step of {most} tokens, where {limit} are allowed")

        within(self._played(drafted()))
        self._in_all(scenarios(), 12, within)

    @check("scheduler.seqs", since="1.0")
    def test_seqs(self) -> None:
        """More than `SchedulerContext.max_num_seqs` requests run in a step. Use only the step's
        methods, and don't modify its fields."""

        def within(world: World) -> None:
            most = world.watch.most_seqs
            limit = world.watch.context.max_num_seqs
            require(most <= limit, f"a step of {most} requests, where {limit} are allowed")

        self._in_all(scenarios(), 12, within)

    @check("scheduler.memory", since="1.0")
    def test_memory(self) -> None:
        """The policy corrupted the KV-cache manager's state: pages leak, belong to two requests,
        or are missing. Only the step and the core may use the KV-cache manager and modify a
        request."""

        def in_order(world: World) -> None:
            if world.dead is not None and not isinstance(
                world.dead, PolicyError | SchedulerStalled
            ):
                fail(f"the books are in disorder: {world.dead}")
            held = world.kv.counts.held
            require(
                held == 0 or world.dead or world.unfinished,
                f"{held} pages are held although all requests have ended",
            )

        self._in_all(scenarios(aborts=True), 25, in_order, check_books=True)

    @check("scheduler.read_only", since="1.0")
    def test_read_only(self) -> None:
        """The policy modified a request, or its prompt, if only for a while. Keep state in your own
        dict, by request, until `on_finished`."""

        def untouched(world: World) -> None:
            for request in world.requests:
                require(
                    not (changed := world.changed(request)),
                    f"{request!r} was given another {', '.join(changed)}",
                )

        for scenario in (pressed(overlap=True), crowd(scarce=True)):  # where many are preempted
            untouched(self._world(scenario.shape, guarded=True).play(scenario.acts))
        self._in_all(scenarios(), 12, untouched, guarded=True)

    @check("scheduler.forgets", since="1.0")
    def test_forgets(self) -> None:
        """The policy keeps requests that have ended, or values by their ids, so that a server's
        memory grows forever, and a request with a reused id finds another's values. In
        `on_finished`, drop a request from every list and dict, including aborted and rejected ones;
        don't keep a step."""

        def forgotten(world: World) -> None:
            ended = {
                name
                for request in world.requests
                if request.status is Status.FINISHED
                for name in (request.id, request.parent)
            }
            ended -= {name for request in world.unfinished for name in (request.id, request.parent)}
            for path, value in (
                reachable(world.policy) if world.dead is None else ()
            ):  # a dead engine tells its policy nothing more
                if isinstance(value, LiveRequest):
                    require(
                        value.status is not Status.FINISHED, f"{path} holds {value!r} after its end"
                    )
                elif isinstance(value, str):
                    require(
                        value not in ended, f"{path} holds the id {value!r} after its request's end"
                    )

        for scenario in (*held_back(), crowd(scarce=True), drafted()):
            forgotten(self._played(scenario))
        self._in_all(scenarios(aborts=True), 25, forgotten)

    @check("scheduler.ids", since="1.0")
    def test_ids(self) -> None:
        """Requests whose ids are equal in part, or but for case, were taken for one another, or the
        policy reads something from ids. Keep values by the whole id, as it is."""
        for overlap in (True, False):
            self._played_to_the_end(alike(overlap))

    @check("scheduler.long_run", since="1.0")
    def test_long_run(self) -> None:
        """After many requests the policy raised, served the same requests in far more steps than at
        first, or kept more than before. Bound what you keep of steps and of requests that have
        ended."""
        shape = Shape(num_pages=24, token_budget=32, max_num_seqs=8)
        world = self._world(shape)
        steps = list[int]()

        def serve(batches: int) -> None:
            for _ in range(batches):
                before = world.steps
                world.play(LONG_BATCH)
                _require_alive(world)
                told = f"after {len(world.requests)} requests and {world.steps} steps"
                require(not world.unfinished, f"unfinished {told}: {world.unfinished}")
                steps.append(world.steps - before)

        served = LONG_BATCHES * len(LONG_BATCH)
        require_bounded(
            world.policy, serve, LONG_BATCHES, 4 * served, f"batches of {len(LONG_BATCH)} requests"
        )
        first = sum(steps[:10])
        last = sum(steps[-10:])
        require(
            last <= 2 * first,
            f"the first 10 of {len(steps)} equal batches of requests took {first} steps, the last "
            f"10 took {last}",
        )

    # Capabilities

    @check("scheduler.finishes", since="1.0")
    def test_finishes(self) -> None:
        """Requests stay unfinished although no more arrive: the policy grants nothing and sets no
        `wake_at`, or evicts in circles. A prompt may be longer than a step's budget, so grant it in
        chunks; a request that needs memory may have to evict others, the last in your order first.
        A token may need several pages."""

        def all_ended(world: World) -> None:
            require(
                not isinstance(world.dead, SchedulerStalled), f"the engine stalled: {world.dead}"
            )
            _require_finished(world)
            times.append(world.watch.own_s / max(1, len(world.watch.planned)))

        times: list[float] = []
        for overlap in (True, False):
            for groups in ((), THREE_GROUPS):
                all_ended(self._played(pressed(overlap, groups=groups)))
        all_ended(self._played(drafted()))
        self._in_all(scenarios(), 40, all_ended)
        self.note(
            f"the policy's own time a step: {sorted(times)[len(times) // 2] * 1e6:.0f} µs (not "
            f"judged)"
        )

    @check("scheduler.adapters", since="1.0")
    def test_adapters(self) -> None:
        """Requests stay unfinished that wait for a slot for their adapter, or that waited beside
        such ones, or the policy misused a step. A grant that is refused with ADAPTERS may be
        repeated in the next step that shows the request; those in `held_back` will be shown
        again."""
        for overlap in (True, False):
            self._played_to_the_end(adapted(overlap))

    @check("scheduler.indivisible", since="1.0")
    def test_indivisible(self) -> None:
        """Prompts that can't be divided (an encoder's, `Request.indivisible`) stay unfinished.
        `Step.grant` grants them whole or refuses with BUDGET, whatever `max_tokens` says: try the
        next step again, where more tokens are left, and don't count with the tokens asked for, but
        with `Grant.tokens`."""
        for overlap in (True, False):
            for prefill_limit in (None, 2.0):
                world = self._played_to_the_end(indivisible(overlap, prefill_limit))
                tokens = {request.id: request.prompt_tokens for request in world.requests}
                parts = [
                    (name, count)
                    for plan in world.watch.planned
                    for name, count in plan.granted
                    if count != tokens[name]
                ]
                require(not parts, f"granted in part: {parts}")

    @check("scheduler.no_starvation", since="1.0", capability="no_starvation")
    def test_no_starvation(self) -> None:
        """A request starves while later arrivals are served. Let waiting count (age, a limit, order
        of arrival), don't let small requests overtake a large one that lacks memory forever, or
        declare `starves`."""
        for overlap in (True, False):
            for who, victim in VICTIMS.items():
                self._require_patience(
                    who, flooded(victim, overlap), range(BEFORE_VICTIM, BEFORE_VICTIM + 1)
                )
            self._require_patience(
                "one that may have been preempted", crowded(overlap), range(CROWDED)
            )

    @check("scheduler.no_idling", since="1.0", capability="no_idling")
    def test_no_idling(self) -> None:
        """The policy left tokens, sequences and memory of a step unused although a request could have
        run, no grant had been refused, and nothing was evicted. Keep granting, including prefills,
        until a grant is refused, or declare `idles`."""
        scenario = crowd(scarce=False)
        _require_alive(
            self._world(scenario.shape, inspect=_try_to_grant_more, decisions=True).play(
                scenario.acts
            )
        )
        self._in_all(
            scenarios(), 40, lambda world: None, inspect=_try_to_grant_more, decisions=True
        )

    @check("scheduler.no_rejection", since="1.0", capability="no_rejection")
    def test_no_rejection(self) -> None:
        """The policy rejected a request without declaring `rejects`. Declare it, so that
        users know."""

        def none_rejected(world: World) -> None:
            rejected = [plan for plan in world.watch.planned if plan.rejected]
            require(
                not rejected,
                f"rejected in step {rejected[0].index if rejected else 0}: "
                f"{rejected[0].rejected if rejected else ()}",
            )

        scenario = crowd(scarce=True)
        none_rejected(self._world(scenario.shape).play(scenario.acts))
        self._in_all(scenarios(), 15, none_rejected)

    @check("scheduler.no_stalls", since="1.0", capability="no_stalls")
    def test_no_stalls(self) -> None:
        """Streamed answers stalled while a prompt was computed, although there were sequences and
        memory for all. Grant every decode in a step that computes prompts, decodes first; or declare
        `stalls_decodes`."""
        for overlap in (True, False):
            scenario = streamed(overlap)
            _require_alive(self._world(scenario.shape, inspect=_see_stall).play(scenario.acts))

    @check("scheduler.prefill_limit", since="1.0", capability="prefill_limited")
    def test_prefill_limit(self) -> None:
        """A prompt that the engine's `prefill_limit` cut into chunks never finished. Continue running
        requests with `prefill_left`; or declare `prefill_limited=False`, and cap the prompts of a
        step yourself."""
        for overlap in (True, False):
            self._played_to_the_end(streamed(overlap))

    @check("scheduler.order", since="1.0", capability="order")
    def test_order(self) -> None:
        """A request was admitted before one that precedes it in the declared order, or kept running
        at its expense. Sort by the declared key, ties by arrival; stop admitting at the first
        refusal; evict the last first. Or don't declare `order`."""
        key = ORDERS[str(self.capabilities.order)]
        inspect = partial(_see_order, key)
        for scenario in (*begun_without_memory(), ranked()):
            _require_alive(
                self._world(scenario.shape, inspect=inspect, decisions=True).play(scenario.acts)
            )
        self._in_all(
            scenarios(plain=True, reuse=False),
            40,
            lambda world: None,
            inspect=inspect,
            decisions=True,
        )

    @check("scheduler.no_starvation_beside", since="1.1", capability="no_starvation")
    def test_no_starvation_beside_others(self) -> None:
        """A request starves while later arrivals are served that have a `tbt_s`, or each another
        client. Let waiting count for all, or declare `starves`."""
        for which in ("tbt_s", "client"):
            scenario = flooded_by(which)
            self._require_patience(
                f"one beside others that differ in {which}",
                scenario,
                range(BEFORE_VICTIM, BEFORE_VICTIM + 1),
            )

    @check("scheduler.order_ties", since="1.1", capability="order")
    def test_equal_arrivals_keep_their_order(self) -> None:
        """Requests that arrived at the same time, equal in everything else, weren't served in the
        order in which they were added. Sort with a stable sort, by the declared key alone: ids
        don't count."""
        world = self._world(Shape(max_num_seqs=1)).play(same_time())
        _require_alive(world)
        served = [request.id for request in world.finished]
        added = [request.id for request in world.requests]
        require(served == added, f"added in the order {added}, served in the order {served}")

    @check("scheduler.reused_ids", since="1.1")
    def test_an_id_says_nothing(self) -> None:
        """A request was planned otherwise because its id had been that of another, which had
        ended. Drop all values by its id in `on_finished`, in whatever form."""
        served = {
            earlier: self._world(Shape(token_budget=12)).play(returning(earlier))
            for earlier in ("again", "before")
        }
        found, expected = (
            [plan.granted for plan in world.watch.planned][-RETURNED_STEPS:]
            for world in served.values()
        )
        require(
            found == expected,
            f"with ids of requests that had ended, {found} was granted; with ids that are new, "
            f"{expected}",
        )

    @check("scheduler.recompute", since="1.0")
    def test_recompute(self) -> None:
        """More tokens were recomputed than computed once: the policy preempts so much that the
        device does little else. Evict for running requests rather than for waiting ones, the last
        in your order first, and don't admit requests that the next step must evict."""
        for overlap in (True, False):
            stats = self._pressed(pressed(overlap))
            again = stats.recomputed_tokens
            once = stats.prefill_tokens + stats.decode_tokens - stats.recomputed_tokens
            require(
                again < once,
                f"{again} tokens were recomputed, and {once} computed for the first time; "
                f"{stats.preemptions} preemptions",
            )

    @check("scheduler.replay", since="1.0")
    def test_replay(self) -> None:
        """The same requests gave another schedule in a second engine of the same process, or in
        another process, where every other clock jumps and strings have another hash. Use `random.Random(context.seed)` for
        randomness and `step.now` for time; don't iterate over sets; keep no state in the class or
        module."""
        first = plans(self.make)
        require(
            plans(self.make) == first,
            "a second policy, made the same way, planned the same requests otherwise",
        )
        for hash_seed in HASH_SEEDS:
            require(
                plans_elsewhere(self, hash_seed=hash_seed) == [first],
                f"another process, with PYTHONHASHSEED={hash_seed}, planned the same requests "
                f"otherwise",
            )

    @check("scheduler.blocks", since="1.0")
    def test_it_does_not_block(self) -> None:
        """The policy slept, started a process, or used the network, and the engine waits for it in
        every step. Use `step.wake_at` to be called again later, and prepare the rest in the
        constructor."""
        found = blocking_calls(self.make)
        require(not found, f"while requests were served, it called {', '.join(found)}")

    # Running scenarios

    def _played_to_the_end(self, scenario: Scenario) -> World:
        """Play a scenario, after which all requests have ended."""
        world = self._world(scenario.shape).play(scenario.acts)
        require(world.dead is None, f"the engine ended: {world.dead}")
        _require_finished(world)
        return world

    def _require_patience(self, who: str, scenario: Scenario, victims: range) -> None:
        """Check that not too many later requests end before the victims of a flood, which are given
        by the order of arrival."""

        def passed_over() -> bool:
            return any(
                sum(other.arrival_time > victim.arrival_time for other in world.finished)
                > PASSED_OVER
                for victim in left()
            )

        def left() -> list[Request]:
            return [
                world.requests[index]
                for index in victims
                if world.requests[index] not in world.finished
            ]

        world = self._world(scenario.shape)
        world.perform(scenario.acts)
        world.run(until=lambda: not left() or passed_over())
        _require_alive(world)
        require(
            not passed_over(),
            f"{who} still waits, and over {PASSED_OVER} requests that came later have ended: "
            f"{left()[:1]}",
        )

    def _played(self, scenario: Scenario) -> World:
        return self._world(scenario.shape).play(scenario.acts)

    def _world(self, shape: Shape, **watching: Any) -> World:
        return World(self.make, shape, **watching)

    def _pressed(self, scenario: Scenario) -> EngineStats:
        """Return the counts of a run, which ends early once as many tokens were recomputed as there
        are to compute."""
        world = self._world(scenario.shape)
        world.perform(scenario.acts)
        tokens = sum(request.prompt_tokens + request.max_tokens for request in world.requests)
        world.run(until=lambda: world.core.stats.recomputed_tokens > tokens)
        _require_alive(world)
        return world.core.stats

    def _in_all(
        self,
        among: SearchStrategy[Scenario],
        examples: int,
        holds: Callable[[World], None],
        **watching: Any,
    ) -> None:
        """Check that `holds` accepts the world after each of `examples` scenarios."""

        def in_any(scenario: Scenario) -> None:
            world = self._world(scenario.shape, **watching).play(scenario.acts)
            holds(world)
            _require_alive(world)

        for_all(among, examples, in_any, smaller)


def _require_alive(world: World) -> None:
    """Require that the engine is alive. Stalls are left to the check `scheduler.finishes`;
    everything else must hold until then."""
    if world.dead is not None and not isinstance(world.dead, SchedulerStalled):
        fail(f"the engine ended: {world.dead}", world.dead)


def _require_finished(world: World) -> None:
    """Require that no request is unfinished."""
    require(
        not world.unfinished,
        f"unfinished after {world.steps} steps: {', '.join(map(repr, world.unfinished))}",
    )


def _try_to_grant_more(shown: Shown) -> None:
    """Require that, if the policy was refused nothing for lack of space and evicted nothing, no
    other request fits. An evicted request can't be granted its own freed space before the next
    step, and a policy that keeps an order admits nothing after it until then."""
    step = shown.step
    lacked = bool(step.preempted) or any(
        d.act is Act.REFUSED and d.reason != Refusal.NOT_NOW.name for d in step.decisions or ()
    )
    if lacked or step.tokens_left < 1 or step.seqs_left < 1:
        return
    left = f"{step.tokens_left} tokens, {step.seqs_left} sequences and {step.free_pages} pages"
    for request in (*step.running, *step.waiting):
        if step.grant(request):
            fail(
                f"step {step.index} left {left} unused, and {request!r} could have run; it granted "
                f"{len(step.granted) - 1}"
            )


def _see_stall(shown: Shown) -> None:
    """Require that a step that computes a prompt includes all decoding requests."""
    step = shown.step
    still = (
        [request for request in step.decoding if request not in step.granted]
        if step.prefill_tokens
        else []
    )
    require(
        not still,
        f"step {step.index} computed {step.prefill_tokens} tokens of prompts, and none of {still}",
    )


def _see_order(key: Callable[[Request], tuple[float, float]], shown: Shown) -> None:
    """Require that no request is admitted before an earlier one that waits or lacks memory for the
    rest of its prompt, and that none runs at the expense of an earlier one."""
    step = shown.step
    passed = [
        r
        for r in shown.waiting
        if r not in step.admitted and r not in step.rejected and not r.in_flight
    ]
    lacking = {
        d.request
        for d in step.decisions or ()
        if d.act is Act.REFUSED and d.reason == Refusal.MEMORY.name
    }
    passed += [r for r in step.running if r in lacking and r.prefill_left and r not in step.granted]
    for request in step.admitted:
        for other in passed:
            require(
                key(request) <= key(other),
                f"step {step.index} admitted {request!r} before {other!r}",
            )
    for victim in step.preempted:
        for request in step.granted:
            require(
                key(request) <= key(victim),
                f"step {step.index} preempted {victim!r} and ran {request!r}",
            )
