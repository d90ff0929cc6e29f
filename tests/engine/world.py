"""An engine core over the fakes, a watch kept on all that its policy and its client see, and an
oracle for both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from pydantic import BaseModel

from dovetail.api.blocks.hash_chain import HashName
from dovetail.api.clock import Clock, VirtualClock
from dovetail.api.component import NoOptions
from dovetail.api.drafter import Drafter, DrafterContext
from dovetail.api.executor import Batch, Capacity, ExecutorConfig, ExecutorContext
from dovetail.api.kv_cache import KVContext
from dovetail.api.observer import Observer, ObserverCapabilities, ObserverContext, StepFinished
from dovetail.api.prefix_cache import PrefixCache, PrefixOptions
from dovetail.api.sampler import RowSampling
from dovetail.api.scheduler import Scheduler, SchedulerContext, Step, StepDone
from dovetail.end_reason import EndReason
from dovetail.engine.adapters import AdapterSlots
from dovetail.engine.core import CoreSettings, EngineCore
from dovetail.engine.feature import EngineFeature
from dovetail.engine.features import features_of
from dovetail.engine.finish import Finish
from dovetail.engine.flight import Delivery
from dovetail.engine.live_request import LiveRequest, Status
from dovetail.engine.siblings import make_siblings
from dovetail.engine.speculation import Speculation
from dovetail.engine.stats import ObserverHub
from dovetail.engine.step_times import PlanTiming, StepTimeFit
from dovetail.request import Request
from dovetail.request.media import MediaItem
from dovetail.request.sampling_params import SamplingParams
from dovetail.testing import FakeExecutor, FakeExecutorOptions
from dovetail.testing.fake_executor import expected_tokens
from tests.engine.drafters import DRAFTERS, Oracle
from tests.engine.policies import FCFS
from tests.engine.rules import constraint, expected_by_rule


@dataclass(frozen=True)
class Shape:
    """The engine's constants."""

    num_pages: int = 64
    block_size: int = 4
    window: int | None = None
    # as `FakeExecutorOptions` has them, instead of `block_size` and `window`
    groups: tuple[tuple[int, int | None, int], ...] = ()
    state_pages: int = 0
    max_in_flight: int = 2
    overlap: bool = True
    token_budget: int = 64  # of a step
    max_num_seqs: int = 8
    max_model_len: int = 128
    vocab_size: int = 97
    prefill_limit: float | None = None
    reuse: bool = True
    hash: HashName = "xxh3"  # of the prefix cache
    seed: int = 0
    events: bool = True  # an observer is told
    seconds_per_step: float = 0.01
    seconds_per_token: float = 0.001
    drafter: str | None = None  # of `DRAFTERS`
    max_drafts: int = 4
    max_lines: int = 64
    adapters: int = 0  # slots
    slot_wait_s: float = 1.0
    prompt_rate: float | None = None
    strict: bool = False
    deterministic_window: int = 0
    wrong_provisional: bool = True
    changes_rows: bool = True


@dataclass(frozen=True)
class Spec:
    """A request to be made; `n` samples of one prompt."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int = 8
    n: int = 1
    delay: float = 0.0  # after now, until it arrives
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    client: str | None = None
    priority: int = 0
    deadline: float | None = None
    predicted_tokens: int | None = None
    cache_keys: tuple[str, ...] = ()
    prompt_logprobs: int | None = None
    logprobs: int | None = None
    rule: int | None = None  # modulus of the `RuleMatcher` that it follows
    rule_length: int = 0
    max_drafts: int | None = None
    adapter: str | None = None  # its digest
    indivisible: bool = False
    items: tuple[MediaItem, ...] = ()
    deterministic: bool = False


class FakeAdapter:
    """An adapter that is looked at a number of times before it is loaded, or has failed."""

    def __init__(self, digest: str, looks: int = 0, why: str | None = None) -> None:
        self.name, self.digest, self.path = f"name of {digest}", digest, f"{digest}.safetensors"
        self.looks, self.why = looks, why

    def closed(self) -> bool:
        self.looks -= 1
        return self.looks >= 0

    def failed(self) -> Finish | None:
        return None if self.why is None else Finish(EndReason.ADAPTER, self.why)


class RecordingExecutor(FakeExecutor):
    """Keeps the batches."""

    def __init__(self, options: FakeExecutorOptions, context: ExecutorContext) -> None:
        super().__init__(options, context)
        self.sent: list[Batch] = []

    def submit(self, batch: Batch) -> int:
        self.sent.append(batch)
        written: set[int] = set()
        # they run in this order: a block may be read, freed by a preemption, and then be another
        # copy's target
        for copy in batch.copies:
            assert copy.src not in written, "no copy reads what one before it has written"
            written.add(copy.dst)
        return super().submit(batch)


class RecordingObserver(Observer):
    """Keeps the events."""

    capabilities = ObserverCapabilities(decisions=False)

    def __init__(self) -> None:
        super().__init__(NoOptions(), ObserverContext(1, 1))
        self.events: list[object] = []

    def on_arrived(self, event: object) -> None:
        self.events.append(event)

    on_started = on_admitted = on_preempted = on_finished = on_step = on_stopped = on_arrived


@dataclass
class Heard:
    """Records what a policy was told and shown, and checks it on arrival."""

    # in order, comparable between runs
    calls: list[tuple[object, ...]] = field(default_factory=list)
    arrived: dict[str, tuple[float, int]] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    computed: Counter[str] = field(default_factory=Counter)
    generated: Counter[str] = field(default_factory=Counter)
    planning: bool = False


def watched(policy: type[Scheduler]) -> type[Scheduler]:
    """The same policy, which checks what it hears."""

    class Watched(policy):  # type: ignore[misc, valid-type]
        def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
            self.heard = Heard()
            super().__init__(options, context)

        def schedule(self, step: Step) -> None:
            heard = self.heard
            heard.calls.append(
                ("schedule", step.index, step.now, _ids(step.waiting), _ids(step.running))
            )
            for group in (step.waiting, step.running):
                keys = [heard.arrived[r.id] for r in group]
                assert keys == sorted(keys), "the lists are ordered by arrival"
                assert all(r.arrival_time <= step.now for r in group), (
                    "nobody is seen before their time"
                )
            assert not {*step.waiting} & {*step.running}
            assert {*step.decoding} == {r for r in step.running if r.prefill_left == 0}
            assert not {*heard.finished} & {*_ids(step.waiting), *_ids(step.running)}, (
                "the finished are forgotten"
            )
            heard.planning = True
            super().schedule(step)
            heard.planning = False

        def on_arrived(self, request: Request) -> None:
            self._hear("arrival", request)
            assert isinstance(request, LiveRequest)
            key = (request.arrival_time, request.order)
            assert request.id not in self.heard.arrived, "arrivals are told once"
            ordered = all(key > other for other in self.heard.arrived.values())
            assert ordered or request.preparations, (
                "arrivals are told in order, but for those that weren't ready"
            )
            self.heard.arrived[request.id] = key
            super().on_arrived(request)

        def on_preempted(self, request: Request) -> None:
            self._hear("preempted", request)
            super().on_preempted(request)

        def on_finished(self, request: Request) -> None:
            self._hear("finished", request)
            self.heard.finished.append(request.id)
            super().on_finished(request)

        def on_step(self, done: StepDone) -> None:
            assert done.started <= done.ended
            for ran in done.ran:
                self._hear("ran", ran.request)
                assert ran.computed >= 1
                assert 0 <= ran.generated <= ran.computed
                self.heard.computed[ran.request.id] += ran.computed
                self.heard.generated[ran.request.id] += ran.generated
            super().on_step(done)

        def _hear(self, what: str, request: Request) -> None:
            assert not self.heard.planning, "no callback inside schedule()"
            assert request.id not in self.heard.finished, "nothing is told of the finished"
            assert what == "arrival" or request.id in self.heard.arrived, (
                "nothing is told before the arrival"
            )
            self.heard.calls.append((what, request.id))

    Watched.__name__ = policy.__name__
    return Watched


def _ids(requests: Sequence[Request]) -> tuple[str, ...]:
    return tuple(request.id for request in requests)


class World:
    """An engine core, its client, and what should be true of both."""

    def __init__(
        self,
        policy: type[Scheduler] = FCFS,
        shape: Shape | None = None,
        options: BaseModel | None = None,
        observers: Sequence[tuple[str, Observer]] = (),
        executor: type[RecordingExecutor] = RecordingExecutor,
        drafter: Callable[[DrafterContext], Drafter] | None = None,
        timeout_s: float = 60.0,
        features: Sequence[EngineFeature] = (),
    ) -> None:
        """`features`: besides those of every engine."""
        self.shape = shape = shape or Shape()
        self.clock = VirtualClock()
        fake = FakeExecutorOptions(
            num_pages=shape.num_pages,
            block_size=shape.block_size,
            window=shape.window,
            groups=shape.groups,
            state_pages=shape.state_pages,
            max_in_flight=shape.max_in_flight,
            vocab_size=shape.vocab_size,
            max_model_len=shape.max_model_len,
            seconds_per_step=shape.seconds_per_step,
            seconds_per_token=shape.seconds_per_token,
            max_lines=shape.max_lines if shape.drafter or drafter else 0,
            deterministic_window=shape.deterministic_window,
            wrong_provisional=shape.wrong_provisional,
            changes_rows=shape.changes_rows,
        )
        limits = shape.max_num_seqs, shape.token_budget
        config = ExecutorConfig(
            "",
            "auto",
            "dummy",
            None,
            *limits,
            0.9,
            None,
            None,
            False,
            shape.overlap,
            0,
            max_adapters=shape.adapters,
        )
        self.executor = executor(fake, ExecutorContext(config, self.clock))
        capacity = replace(self.executor.start(), prompt_rate=shape.prompt_rate)
        self.kv = PrefixCache(
            PrefixOptions(reuse=shape.reuse, hash=shape.hash),
            KVContext(capacity.layout, capacity.num_pages),
        )
        context = SchedulerContext(
            shape.token_budget,
            shape.max_num_seqs,
            capacity.num_pages,
            capacity.layout.block_size,
            shape.seed,
        )
        self.policy = watched(policy)(options or NoOptions(), context)
        self.observer = RecordingObserver()
        hub = ObserverHub(
            [("recorder", self.observer), *observers] if shape.events else list(observers)
        )
        settings = CoreSettings(
            shape.max_num_seqs,
            shape.token_budget,
            shape.overlap,
            policy.__name__,
            shape.prefill_limit,
            shape.strict,
        )
        self.drafter: Drafter | None = None
        if drafter is not None or shape.drafter is not None:
            make = drafter or DRAFTERS[shape.drafter or ""]
            self.drafter = make(
                DrafterContext(
                    vocab_size=shape.vocab_size,
                    max_drafts=shape.max_drafts,
                    max_model_len=shape.max_model_len,
                )
            )
            if isinstance(self.drafter, Oracle):
                self.drafter.answers = lambda id: self.expected(id)[0]
        timing: Callable[[Clock, StepTimeFit, Capacity, int], PlanTiming] = PlanTiming
        if self.drafter is not None:
            bounds = shape.max_drafts, timeout_s
            timing = partial(Speculation, self.drafter, "tests:drafter", *bounds)
        features = [*features_of(capacity, shape.slot_wait_s), *features]
        self.slots = next((one for one in features if isinstance(one, AdapterSlots)), None)
        self.core = EngineCore(
            self.policy,
            self.kv,
            self.executor,
            capacity,
            self.clock,
            settings,
            hub,
            features,
            timing,
        )
        self.requests: dict[str, LiveRequest] = {}
        self.seeds: dict[str, int] = {}
        # modulus and length, of requests that follow one
        self.rules: dict[str, tuple[int, int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, Finish] = {}
        self.aborted: set[str] = set()
        self.may_keep = False  # a feature may keep the blocks of ended requests for a while

    # A client's acts

    @property
    def heard(self) -> Heard:
        heard: Heard = self.policy.heard  # type: ignore[attr-defined]
        return heard

    def add(self, spec: Spec, adapter: FakeAdapter | None = None) -> list[LiveRequest]:
        """Add a request; its adapter is the given one, or one that is loaded, of the spec's
        digest."""
        samples = []
        if adapter is None and spec.adapter is not None:
            adapter = FakeAdapter(spec.adapter)
        for index in range(spec.n):
            id = spec.id if spec.n == 1 else f"{spec.id}#{index}"
            request = LiveRequest(
                id,
                spec.prompt,
                SamplingParams(
                    max_tokens=spec.max_tokens,
                    min_tokens=min(spec.min_tokens, spec.max_tokens),
                    prompt_logprobs=spec.prompt_logprobs,
                    logprobs=spec.logprobs,
                    max_drafts=spec.max_drafts,
                ),
                max_tokens=spec.max_tokens,
                arrival_time=self.clock.now() + spec.delay,
                client=spec.client,
                priority=spec.priority,
                deadline=spec.deadline,
                predicted_tokens=spec.predicted_tokens,
                parent=spec.id if spec.n > 1 else None,
                cache_keys=(*spec.cache_keys, *(("deterministic",) * spec.deterministic)),
                indivisible=spec.indivisible,
                sampling=RowSampling(seed=index, deterministic=spec.deterministic),
                stop_ids=spec.stop_ids,
                constraint=None
                if spec.rule is None
                else constraint(spec.rule, spec.rule_length, vocab_size=self.shape.vocab_size),
                adapter=adapter,
                media=tuple(item.span for item in spec.items),
                items=spec.items,
            )
            if spec.rule is not None:
                self.rules[id] = spec.rule, spec.rule_length
            self.requests[id], self.seeds[id], self.tokens[id] = request, index, []
            samples.append(request)
        if spec.n > 1:
            make_siblings(samples)
        for request in samples:
            self.core.add(request)
        return samples

    def abort(self, id: str) -> None:
        if id not in self.finished:
            self.aborted.add(id)
        self.core.abort(self.requests[id])

    def step(self) -> Delivery:
        delivery = self.core.step()
        for request, token in zip(delivery.requests, delivery.token_ids, strict=True):
            assert request.id not in self.finished, f"{request.id} got a token after its end"
            assert request.id not in self.aborted, f"{request.id} got a token after it was aborted"
            self.tokens[request.id].append(token)
        for request, finish in delivery.finished.items():
            assert request.id not in self.finished, f"{request.id} was answered twice"
            assert request.id not in self.aborted, f"{request.id} was aborted, and answered"
            self.finished[request.id] = finish
        return delivery

    def drain(self, limit: int = 2_000, *, check: bool = False) -> None:
        """Steps until nothing is unfinished."""
        for _ in range(limit):
            if not self.core.has_unfinished():
                break
            self.step()
            if check:
                self.check()
        else:
            raise AssertionError(
                f"unfinished after {limit} steps: "
                f"{[r for r in self.requests.values() if r.status is not Status.FINISHED]}"
            )
        if self.core.dead is not None:
            raise self.core.dead
        self.core.plan_timing.stop()  # its thread; the next call starts another
        self.check_end()

    # What should be true

    def expected(self, id: str) -> tuple[list[int], str]:
        """Return all tokens of a request that isn't aborted, and its finish reason."""
        request, rule, ruled = self.requests[id], self.rules.get(id), False
        given = (
            list(request.prompt_token_ids),
            request.max_tokens,
            self.seeds[id],
            self.shape.vocab_size,
        )
        digest = "" if request.adapter is None else request.adapter.digest
        if rule is None:
            tokens = expected_tokens(*given, digest)
        else:
            tokens, ruled = expected_by_rule(*given, *rule, digest=digest)
        for position, token in enumerate(tokens):
            if token in request.stop_ids and position >= request.params.min_tokens:
                return tokens[: position + 1], "stop"
        return tokens, "stop" if ruled else "length"

    def check(self) -> None:
        """After any act."""
        if self.core.dead is not None:
            raise self.core.dead
        self.kv.check_integrity()
        counts = self.kv.counts
        assert counts.empty + counts.held + counts.cached == self.shape.num_pages
        self._check_requests()
        self._check_rows()
        self._check_slots()
        for id, tokens in self.tokens.items():
            assert tokens == self.expected(id)[0][: len(tokens)], (
                f"{id} generated what it should not"
            )

    def check_end(self) -> None:
        """After all requests have ended and everything in flight was dropped or delivered."""
        self.check()
        assert self.may_keep or not self.kv.counts.held, "pages are held by nobody"
        assert {*self.finished} | self.aborted == {*self.requests}, "a request was lost"
        assert sorted(self.heard.finished) == sorted(self.heard.arrived), "once per arrival"
        for id, finish in self.finished.items():
            expected, reason = self.expected(id)
            if finish.reason != "rejected":
                assert (self.tokens[id], finish.reason) == (expected, reason), id
        self._check_counts()

    def _check_requests(self) -> None:
        books, live = (
            self.core.books,
            [r for r in self.requests.values() if r.status is not Status.FINISHED],
        )
        assert {r.id for r in live} == {*self.core._requests}, (
            "the core and its requests disagree on who is unfinished"
        )
        dead = sum(arrival[2].status is Status.FINISHED for arrival in self.core._arrivals._heap)
        assert dead == self.core._arrivals._aborted
        assert 2 * dead <= len(self.core._arrivals), "aborted before their time, and kept"
        in_flight = Counter(
            request
            for flight in self.core._flights
            for index, request in enumerate(flight.requests)
            if flight.batch.yields_token[index]
        )
        for request in live:
            in_flight[request] += self.core.windows.held_back(request)
        for request in self.requests.values():
            assert request.granted == 0
            assert (request in books.waiting.as_tuple()) == (request.status is Status.WAITING), (
                request
            )
            assert (request in books.gated) == (request.status is Status.GATED), request
            assert (request in books.running.as_tuple()) == (request.status is Status.RUNNING), (
                request
            )
            assert (request in books.known) == (
                request.status in (Status.GATED, Status.WAITING, Status.RUNNING, Status.DRAINING)
            ), request
            assert request.num_computed <= request.capacity
            if request.capacity:
                groups = self.core.books.layout.groups
                tables = zip(groups, self.kv.tables(request), strict=True)
                assert request.capacity == min(
                    len(pages) // group.pages_per_block * group.block_tokens
                    for group, pages in tables
                    if not group.recurrent
                )
            if request.status in (Status.RUNNING, Status.DRAINING):
                assert request.capacity
            elif request not in books.lingering:
                kept = self.may_keep and request.status is Status.FINISHED
                assert kept or not request.capacity
                assert request.row == -1
            if request.status is not Status.FINISHED:
                assert request.in_flight == in_flight[request], request
                assert 0 <= request.output_left <= request.max_tokens
                assert self.tokens[request.id] == list(request.output_token_ids)
            if (
                self.drafter is not None
                and request.status is Status.RUNNING
                and request.generated
                and not request.preemptions
            ):
                assert request.num_computed + 1 == request.num_tokens + request.in_flight, (
                    "the books know all tokens, whatever the drafts"
                )

    def _check_rows(self) -> None:
        rows = self.core.books.rows
        for row, holder in enumerate(rows._holders):
            assert (holder is None) == (row in rows._free)
            assert holder is None or holder.row == row
        assert len(rows._free) == len(set(rows._free))
        for request in self.requests.values():
            assert request.row < 0 or rows._holders[request.row] is request

    def _check_slots(self) -> None:
        """Each adapter in use has a slot of its own, and no more are used than there are."""
        if self.slots is None:
            return
        slots = {
            r.adapter.digest: self.slots.slot_of(r)
            for r in self.requests.values()
            if r.adapter is not None and r.status in (Status.RUNNING, Status.DRAINING)
        }
        assert len({*slots.values()}) == len(slots) == self.slots.used
        assert all(1 <= slot <= self.shape.adapters for slot in slots.values())

    def _check_counts(self) -> None:
        """Statistics, events and the policy's `on_step` tell the same story; wasted rows are in
        none."""
        stats, heard = self.core.update_stats(), self.heard
        assert stats.waiting == stats.running == 0
        assert (
            stats.generated_tokens == heard.generated.total() == sum(map(len, self.tokens.values()))
        )
        assert stats.prefill_tokens + stats.decode_tokens == heard.computed.total()
        assert 0 <= stats.recomputed_tokens <= stats.prefill_tokens
        assert stats.arrived == stats.finished == len(heard.arrived)
        steps = [event for event in self.observer.events if isinstance(event, StepFinished)]
        if self.shape.events:
            assert stats.steps == len(steps)
            for name in (
                "prefill_tokens",
                "decode_tokens",
                "generated_tokens",
                "recomputed_tokens",
            ):
                assert getattr(stats, name) == sum(getattr(event, name) for event in steps), name
        for id, request in self.requests.items():
            if (
                id in self.finished
                and not request.preemptions
                and self.finished[id].reason in ("stop", "length")
            ):
                assert heard.computed[id] == request.num_tokens - 1 - request.cached_tokens, id
                assert heard.generated[id] == len(self.tokens[id])

    def story(self) -> list[object]:
        """All that a policy saw and all that was sent to the executor: equal in equal runs."""
        batches = [
            (
                b.step,
                b.rows.tolist(),
                b.num_tokens.tolist(),
                b.yields_token.tolist(),
                b.new_pages.tolist(),
                b.copies,
            )
            for b in self.executor.sent
        ]
        return [self.heard.calls, batches, self.tokens, self.finished, self.clock.now()]


def rows_of(world: World, request: LiveRequest) -> int:
    """In how many batches a request that never lost its row ran."""
    rows = {
        new.row
        for batch in world.executor.sent
        for new in batch.added
        if new.request_id == request.id
    }
    assert len(rows) == 1
    return sum(int(np.isin(batch.rows, list(rows)).sum()) for batch in world.executor.sent)
