"""`ObserverSuite`: checks that an observer conforms to the contract of `dovetail.api.observer`.

Each check runs the real engine core over a fake executor, with a policy that preempts and rejects,
and with late arrivals and aborts, and compares it with the same run without the observer. Needs no
torch.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from dovetail.api.component import NoOptions
from dovetail.api.observer import (
    EngineStarted,
    Observer,
    ObserverCapabilities,
    ObserverContext,
    StepFinished,
)
from dovetail.api.scheduler import Scheduler, SchedulerCapabilities, SchedulerContext, Step
from dovetail.engine.live_request import LiveRequest
from dovetail.engine.stats import ObserverHub
from dovetail.errors import describe
from dovetail.request import Request
from dovetail.testing.checks import check, fail, require
from dovetail.testing.suite import Suite
from dovetail.testing.suites.footprint import Footprint, temporary_folder
from dovetail.testing.suites.holding import reachable, require_bounded
from dovetail.testing.suites.process_state import (
    process_state,
    require_untouched_by_first_use,
)
from dovetail.testing.suites.scheduler_world import Abort, Act, Arrive, Run, Shape, World

SHAPE = Shape(num_pages=16)
REUSING = replace(SHAPE, reuse=True)
# too short for the clock to move
STILL = replace(SHAPE, seconds_per_step=1e-30, seconds_per_token=0.0)
# with what few engines have: drafts, windows, recurrent states, adapters
RICH = replace(
    SHAPE, drafts=3, groups=((2, None, 1), (4, 6, 2)), state_pages=1, adapters=1, num_pages=64
)
# fields of events that differ between runs, or by observers
UNEVEN = (
    "core_s",
    "decisions",
    "error",
)
STATE = (
    *(
        "num_computed",
        "preemptions",
        "cached_tokens",
        "recomputed_tokens",
        "prefill_left",
        "output_left",
    ),
    *("first_scheduled_time", "first_token_time", "last_token_time"),
)
SLOW_S = 0.1  # longer calls are noted
SLOW_STOP_S = 1.0  # an `on_stopped` that took longer is left out of runs that don't need it
METHODS = (
    "on_started",
    "on_arrived",
    "on_admitted",
    "on_preempted",
    "on_finished",
    "on_step",
    "on_stopped",
)
BUSY: tuple[Act, ...] = (
    Arrive((1, 2, 3, 4, 5, 6, 7), max_tokens=10),
    Arrive((8, 9), max_tokens=12, n=3),
    Arrive((3, 2, 1), max_tokens=8, client="slow", priority=2, as_array=True),
    Arrive((4,), client="unwanted"),
    Arrive((5, 5, 5, 5), max_tokens=9, stops_after=4),
    Arrive((5, 5), max_tokens=5, stops_after=2, stop_reason=None),
    Arrive((6, 5), max_tokens=5, stops_after=1, stop_reason=5),
    Run(4),
    Arrive((6, 6), max_tokens=4, delay=0.5),
    Abort(5),
    Abort(0),
    Run(2),
    Arrive((7,) * 20, max_tokens=12, deadline=3.0),
)
AGAIN: tuple[Act, ...] = (
    Run(200),
    Arrive((1, 2, 3), max_tokens=3, id="r0"),
    Arrive((4,), client="unwanted", id="r1"),
    Run(1),
    Abort(-1),
    *[Arrive((9, 9))] * 6,
    Run(1),
    Abort(-1),
)
FAILING: tuple[Act, ...] = (*BUSY[:5], Run(30))
ADAPTED: tuple[Act, ...] = (
    *(Arrive((number, 3, 5), max_tokens=9, adapter="ab"[number % 2]) for number in range(4)),
    Run(3),
    Abort(1),
)
# whatever a user may send
ODD_TEXTS = (
    '"',
    "\\",
    "a\nb",
    "{}",
    "%s %",
    "\0",
    "a,b;c=d",
    "<b>",
    "\u2028",
    "\U0001f600",
    " ",
    "",
)
ODD: tuple[Act, ...] = (
    *(
        Arrive(
            (2**31 - 1, 0),
            max_tokens=2 + index % 3,
            id=text or "x" * 5_000,
            client=text,
            priority=(-1) ** index * (2**63 - 1),
            deadline=(None, 1e-9, 1e15)[index % 3],
            n=1 + index % 2,
            stops_after=1 + index % 2,
            stop_reason=text,
        )
        for index, text in enumerate(ODD_TEXTS)
    ),
    Run(2),
    Abort(3),
)
LOST: tuple[Act, ...] = (  # requests that are rejected or aborted after a preemption
    *(
        Arrive((number,) * 9, max_tokens=16, client="fickle" if number == 2 else None)
        for number in range(4)
    ),
    Run(9),
    Abort(3),
    Run(9),
    Abort(1),
)


LONG = 50  # times that `LONG_ACTS` are done before an observer's size is taken
LONG_ACTS: tuple[Act, ...] = (*BUSY, Run(9), Abort(-1))

# observer -> seconds that `on_stopped` took in this process, if it is slow
_slow_stops: dict[type, float] = {}


class ObserverSuite(Suite):
    """Runs with preemptions, rejections, aborts, parallel samples and late arrivals; without
    requests; and with an error at the end."""

    kind = "observer"

    # First, since process-wide changes by an observer happen only once.
    @check("observer.process_untouched", since="1.0")
    def test_what_belongs_to_the_whole_process_is_left_alone(self) -> None:
        """The observer changed process-wide state: the seeds of `random` or numpy, the environment,
        the working directory, the import path, standard output, signal handlers, exception hooks,
        warnings, garbage collection, the umask, the locale, tracing, timers, blocked signals,
        limits and priorities of the process, sockets' timeout, numpy's errors or its print options,
        decimals, built-in functions or those of the standard library, the engine's classes, the
        logging module, the root of all loggers, or the engine's loggers. Observers run inside a
        server; they may only configure their own logger."""
        before = self._process_state()
        for when, acts, policy in (
            ("a busy run", BUSY, _Harsh),
            ("a run that an error ended", FAILING, _Fails),
            ("a run without requests", (), _Harsh),
            ("a run of one request that was aborted", (Arrive((1, 2, 3)), Abort(0)), _Harsh),
        ):
            if self._stops_slowly:
                break
            spy = self._play(acts, policy=policy, before=before, process=self._process_state)
            for name, value in self._process_state().items():
                require(value == before[name], f"{name} isn't what it was before {when}")
            require(
                not spy.changed,
                f"{spy.changed} was changed during {when}, for all who run in the meantime",
            )

    @check("observer.first_use", since="1.1")
    def test_first_use(self) -> None:
        """The first use of the observer in a process changed a setting of the whole process, such as
        warnings or the recursion limit; or each use registered a function at exit."""
        if not self._stops_slowly:
            require_untouched_by_first_use(self, {})

    def use_once(self) -> None:
        self._play(BUSY)

    @check("observer.no_effect", since="1.0")
    def test_an_observer_changes_nothing(self) -> None:
        """With the observer, a request ended differently, or another step was planned, or another
        observer got other events, than without it; or an event, or an object in it, was changed.
        Events are read-only: copy before modifying, and don't touch requests, block counts, errors
        or the clock."""
        for acts, shape, decisions, policy in (
            (BUSY, SHAPE, False, _Harsh),
            (BUSY, SHAPE, True, _Harsh),
            (ADAPTED, RICH, True, _Harsh),
            (FAILING, SHAPE, False, _Fails),
        ):
            spy = self._play(acts, shape=shape, decisions=decisions, policy=policy, stopped=True)
            require(not spy.changed_event, spy.changed_event)
            with_it = _story(spy.world)
            expected = _story(_play(None, acts, shape=shape, decisions=decisions, policy=policy))
            for what, found in with_it.items():
                require(
                    found == expected.get(what),
                    f"{what} with the observer: {found}; without: {expected.get(what)}",
                )

    @check("observer.raises_nothing", since="1.0")
    def test_no_event_makes_it_raise(self) -> None:
        """A method raised. The engine continues, but drops an observer after repeated errors. Any
        event may occur at any time: a request may end without having been admitted, an id may be
        reused once its request has ended, a step may have no tokens and no decisions, and simulated
        times may stand still."""
        for decisions in (False, True):
            spy = self._play(BUSY, decisions=decisions)
            spy.require_quiet("a busy run")
        for acts in (BUSY, ADAPTED):
            self._play(acts, shape=RICH, decisions=True).require_quiet(
                "a run with drafts, adapters and several cache groups"
            )
        self._play(ODD, decisions=True).require_quiet("a run with odd ids, clients and numbers")
        self._play(BUSY, shape=STILL).require_quiet("a run in which time stands still")
        self._play((*BUSY, *AGAIN)).require_quiet("a run in which ids come again")
        self._play(LOST).require_quiet("a run in which preempted requests are rejected and aborted")
        self._play(BUSY, shape=REUSING).require_quiet(
            "a run with a prefix cache, in which a request finds tokens that it had generated"
        )
        self._play(BUSY, decisions=True, sometimes=True).require_quiet(
            "a run whose steps have decisions only sometimes"
        )
        self.note(f"its own time a step: {1e6 * spy.own_s / max(1, spy.steps):.0f} µs (not judged)")
        if self._stops_slowly:
            took_s = _slow_stops[self.component_class]
            self.note(
                f"a call of on_stopped took {took_s:.1f} s: the engine waits for it; it was left "
                f"out of all runs but four (not judged)"
            )
        elif spy.longest[0] > SLOW_S:
            self.note(
                f"a call of {spy.longest[1]} took {spy.longest[0]:.1f} s: the engine waits for it, "
                f"and the whole suite took long (not judged)"
            )

    @check("observer.empty_run", since="1.0")
    def test_it_survives_a_run_without_requests(self) -> None:
        """A method raised when the engine started and stopped without requests: there may be no
        step to divide by."""
        self._play((), stopped=True).require_quiet("a run without requests")

    @check("observer.failed_run", since="1.0")
    def test_it_survives_a_run_that_fails(self) -> None:
        """A method raised an exception after an error had ended the engine. The engine then calls
        `on_finished` for each request, with the finish reason "error", and `on_stopped` with the
        exception. Log the exception instead of raising one."""
        spy = self._play(FAILING, policy=_Fails, stopped=True)
        require(spy.world.dead is not None, "the suite's failing policy didn't end the engine")
        spy.require_quiet("a run that an error ended")

    @check("observer.request_untouched", since="1.0")
    def test_requests_are_only_read(self) -> None:
        """The observer modified a request of an event, its `params` or its prompt, if only for a
        while. Keep state about requests in your own dict, by id."""
        for acts in (BUSY, LOST):
            world = self._play(acts, guarded=True).world
            for request in world.requests:
                changed = {name: getattr(request, name) for name in world.changed(request)}
                require(
                    not changed,
                    f"{request} was given another {', '.join(changed)}; it has now {changed}",
                )

    @check("observer.forgets", since="1.0")
    def test_requests_that_ended_are_forgotten(self) -> None:
        """The observer keeps requests that have ended, or their ids, so that a server's memory
        grows forever. Drop them in `on_finished`, including aborted and rejected ones, or in the
        next step if `more_steps` is true."""
        for acts, policy in ((BUSY, _Harsh), (LOST, _Harsh), (FAILING, _Fails)):
            spy = self._play(acts, policy=policy)
            ids = {
                name
                for request in spy.world.requests
                for name in (request.id, request.parent)
                if name
            }
            for path, value in reachable(spy.observer):
                require(not isinstance(value, LiveRequest), f"{path} holds {value!r} after its end")
                require(
                    not (isinstance(value, str) and value in ids),
                    f"{path} holds the id {value!r} after its request's end",
                )

    @check("observer.reused_ids", since="1.1")
    def test_an_id_is_free_once_its_request_has_ended(self) -> None:
        """A request was aborted during its last step, another with its id arrived before the
        `on_step` of that step, and a method raised. Drop the ended request by itself, not by its
        id, which is another's by then."""
        again: tuple[Act, ...] = (
            *(Arrive((number, 5), max_tokens=20, id=f"r{number}") for number in range(3)),
            Run(3),
            Abort(1),
            Arrive((9, 9), max_tokens=4, id="r1"),
        )
        spy = self._play(again)
        spy.require_quiet("a run in which an id comes again before the step of its abort has ended")

    @check("observer.forgets_bytes", since="1.1")
    def test_ids_are_forgotten_in_any_form(self) -> None:
        """The observer keeps the id of a request that has ended as bytes. Drop it in `on_finished`,
        or in the next step if `more_steps` is true."""
        spy = self._play(BUSY)
        ids = {request.id.encode() for request in spy.world.requests}
        for path, value in reachable(spy.observer, bytes):
            require(value not in ids, f"{path} holds the id {value!r} after its request's end")

    @check("observer.long_run", since="1.0")
    def test_long_run(self) -> None:
        """After many requests the observer raised, or kept more than before. Bound what you keep of
        steps and of requests that have ended: a server runs for months."""
        spy = self._begin()

        def serve(times: int) -> None:
            for _ in range(times):
                spy.world.play(LONG_ACTS)
            spy.require_quiet(f"a run of {len(spy.world.requests)} requests")

        require_bounded(spy.observer, serve, LONG, LONG * 2 * len(LONG_ACTS), "repeated requests")
        spy.world.core.stop()

    @check("observer.leaves_nothing", since="1.0")
    def test_nothing_is_left_behind(self) -> None:
        """After `on_stopped` there are threads, processes, open files or temporary files that
        weren't there before. Close everything (an exporter's thread, a file) in `on_stopped`.
        (Resources that only the very first run creates are excluded.)"""
        if not self._stops_slowly:
            self._play(BUSY, stopped=True)
        for when, acts, policy in (
            ("a run that an error ended", FAILING, _Fails),
            ("a busy run", BUSY, _Harsh),
            ("a run without requests", (), _Harsh),
        ):
            if self._stops_slowly and acts is not FAILING:
                break
            before = Footprint.now()
            with temporary_folder() as folder:
                self._play(acts, policy=policy, stopped=True)
                left = [f"temporary file {path.name}" for path in folder.iterdir()]
            left = before.left_behind() + left
            require(not left, f"after on_stopped of {when} there is still: {', '.join(left)}")

    def _play(
        self,
        acts: tuple[Act, ...],
        *,
        shape: Shape = SHAPE,
        decisions: bool = False,
        sometimes: bool = False,
        policy: type[Scheduler] | None = None,
        before: dict[str, object] | None = None,
        process: Callable[[], dict[str, object]] = dict,
        guarded: bool = False,
        stopped: bool = False,
    ) -> Spy:
        """`decisions`: another observer requests them, so that every step's event has them; with
        `sometimes`, every other step's. `before`: state of the process to compare with after every
        call, as `process` returns it. `stopped`: calls `on_stopped` even if it is slow."""
        observer = self.make(ObserverContext(SHAPE.max_num_seqs, SHAPE.num_pages))
        spy = Spy(
            observer,
            sometimes=sometimes,
            before=before,
            process=process,
            stops=stopped or not self._stops_slowly,
        )
        spy.world = _play(
            spy, acts, shape=shape, decisions=decisions, policy=policy or _Harsh, guarded=guarded
        )
        if spy.stop_s >= SLOW_STOP_S:
            _slow_stops[self.component_class] = spy.stop_s
        return spy

    def _begin(self) -> Spy:
        """Start an engine with the observer, for acts of the caller's."""
        spy = Spy(
            self.make(ObserverContext(SHAPE.max_num_seqs, SHAPE.num_pages)),
            stops=not self._stops_slowly,
        )
        spy.world = _start(spy)
        return spy

    def _process_state(self) -> dict[str, object]:
        return process_state(self.component_class)

    @property
    def _stops_slowly(self) -> bool:
        return self.component_class in _slow_stops


class Spy(Observer):
    """Wraps an observer: records its errors and re-raises them to the engine, which must survive
    them."""

    world: World

    def __init__(
        self,
        observer: Observer,
        *,
        sometimes: bool = False,
        before: dict[str, object] | None = None,
        process: Callable[[], dict[str, object]] = dict,
        stops: bool = True,
    ) -> None:
        """`sometimes`: every other step's event has no decisions. `before`: what `changed` names a
        difference of `process` from. `stops`: passes `on_stopped` on."""
        super().__init__(NoOptions(), observer.context)
        self.sometimes = sometimes
        self.before = before
        self.process = process
        self.changed = ""
        self.changed_event = ""  # what was changed in an event
        self.observer = observer
        self.capabilities = observer.capabilities
        self.raised: list[tuple[str, BaseException]] = []
        self.own_s = 0.0
        self.steps = 0
        self.longest = (0.0, "")
        self.stop_s = 0.0
        for method in METHODS if stops else METHODS[:-1]:
            setattr(self, method, self._passing_on(method))

    def require_quiet(self, when: str) -> None:
        if self.raised:
            fail(f"in {when}, {'; '.join(text for text, _ in self.raised[:3])}", self.raised[0][1])

    def _passing_on(self, method: str) -> Callable[[Any], None]:
        def tell(event: Any) -> None:
            if self.sometimes and isinstance(event, StepFinished) and event.index % 2:
                event = replace(event, decisions=())
            given = _snapshot(event)
            begun = time.perf_counter()
            try:
                getattr(self.observer, method)(event)
            except BaseException as error:
                text = f"{method} raised {describe(error)}"
                self.raised.append((text, error))
                raise RuntimeError(text) from error
            finally:
                took_s = time.perf_counter() - begun
                self.own_s += took_s
                self.longest = max(self.longest, (took_s, method))
                self.steps += method == "on_step"
                self.stop_s = took_s if method == "on_stopped" else self.stop_s
                if self.before is not None and not self.changed:
                    self.changed = next(
                        (
                            name
                            for name, value in self.process().items()
                            if value != self.before[name]
                        ),
                        "",
                    )
                self._compare(method, given, _snapshot(event))

        return tell

    def _compare(self, method: str, given: dict[str, object], left: dict[str, object]) -> None:
        for name, value in given.items():
            if left[name] != value and not self.changed_event:
                self.changed_event = (
                    f"{method} changed {name} of the event from {value!r:.200} to "
                    f"{left[name]!r:.200}"
                )


class _Other(Observer):
    """Another observer after the one under test, which records its events."""

    def __init__(self, decisions: bool) -> None:
        super().__init__(NoOptions(), ObserverContext(1, 1))
        self.capabilities = ObserverCapabilities(decisions=decisions)
        self.told: list[str] = []
        for method in METHODS:
            setattr(self, method, self._note)

    def _note(self, event: Any) -> None:
        fields = {
            field.name: getattr(event, field.name)
            for field in dataclasses.fields(event)
            if field.name not in UNEVEN
        }
        self.told.append(f"{type(event).__name__}({fields})")


class _Harsh(Scheduler):
    """First come, first served, preempting the last; rejects some requests."""

    capabilities = SchedulerCapabilities(rejects=True)

    def schedule(self, step: Step) -> None:
        for request in [*step.running, *step.waiting]:
            if request.client == "unwanted" or (
                request.client == "fickle" and request.preemptions and request in step.waiting
            ):
                step.reject(request, "unwanted")
            else:
                step.grant(request, evict=reversed(step.running))


class _Fails(_Harsh):
    def schedule(self, step: Step) -> None:
        if step.index == 6:
            raise ArithmeticError("this policy fails after some steps, on purpose")
        super().schedule(step)


def _play(
    spy: Spy | None,
    acts: tuple[Act, ...],
    *,
    shape: Shape = SHAPE,
    decisions: bool = False,
    policy: type[Scheduler] = _Harsh,
    guarded: bool = False,
) -> World:
    """Run an engine from start to stop."""
    world = _start(spy, shape=shape, decisions=decisions, policy=policy, guarded=guarded)
    world.play(acts)
    world.core.stop()
    return world


def _start(
    spy: Spy | None,
    *,
    shape: Shape = SHAPE,
    decisions: bool = False,
    policy: type[Scheduler] = _Harsh,
    guarded: bool = False,
) -> World:
    """Start an engine with the observer, if there is one, and another after it."""

    def make(context: SchedulerContext) -> Scheduler:
        return policy(NoOptions(), context)

    world = World(make, shape, guarded=guarded)
    other = _Other(decisions)
    hub = world.core.observers = ObserverHub(
        [*([("observer", spy)] if spy is not None else []), ("other", other)]
    )
    details = {"device": "none", "dtype": "none"}
    # an engine may pass either
    given = MappingProxyType(details) if decisions else details
    world.told = other.told
    hub.start(
        EngineStarted(
            0.0,
            "harsh",
            "fake",
            "fake",
            shape.num_pages,
            shape.block_size,
            shape.max_in_flight,
            given,
            world.kv.context.layout.groups,
        )
    )
    return world


def _snapshot(event: Any) -> dict[str, object]:
    """Return the values of an event's fields, in a form that doesn't change with them."""
    return {field.name: _frozen(getattr(event, field.name)) for field in dataclasses.fields(event)}


def _frozen(value: Any) -> object:
    """Return a copy that compares as `value` does; a request stands for itself."""
    if isinstance(value, BaseException):
        return (
            type(value),
            value.args,
            [*traceback.walk_tb(value.__traceback__)],
            getattr(value, "__notes__", [])[:],
            value.__cause__,
            value.__context__,
        )
    if isinstance(value, Request):
        return value
    if dataclasses.is_dataclass(value):
        return type(value), _snapshot(value)
    if isinstance(value, Mapping):
        return [(key, _frozen(one)) for key, one in value.items()]
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_frozen(one) for one in value]
    return value


def _story(world: World) -> dict[str, object]:
    """Return the events of a run in a form that can be compared."""
    steps = {f"step {planned.index}": planned for planned in world.watch.planned}
    tokens = {
        f"tokens of {request.id}": list(request.output_token_ids) for request in world.requests
    }
    ends = {f"end of {request.id}": world.finished.get(request) for request in world.requests}
    states = {
        f"state of {request.id}": [getattr(request, name) for name in STATE]
        for request in world.requests
    }
    told = {f"event {index} of another observer": event for index, event in enumerate(world.told)}
    return {
        **steps,
        **tokens,
        **ends,
        **states,
        **told,
        "number of steps": len(steps),
        "time at the end": world.clock.now(),
    }
