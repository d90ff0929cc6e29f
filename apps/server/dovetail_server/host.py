"""`EngineHost`: the loop around an engine core that serves front ends, in its own process (`engine_process`) or in a thread (`--in-process`).

It receives requests, steps the core, and sends each front end one frame per step. It produces no text and never waits for a front end.

`DecisionWatch` counts the scheduler's latest decisions, for the page; the counts contain nothing of individual requests. Recording decisions makes a
step several times as expensive for the core, so only a few steps are recorded after each request for them.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

from dovetail.api.clock import VirtualClock, WallClock
from dovetail.api.observer import Observer, ObserverCapabilities, StepFinished
from dovetail.api.process_watch import PULSE, ProcessWatch
from dovetail.end_reason import EndReason
from dovetail.errors import (
    DovetailError,
    EngineDeadError,
    RequestError,
    UnsupportedError,
    describe,
)
from dovetail.request.lora import LoRARequest
from dovetail.serving import (
    ENABLE,
    Admission,
    AnswerRule,
    Assembly,
    Constraint,
    Delivery,
    EngineCore,
    Finish,
    LiveRequest,
    RequestedAdapter,
)
from dovetail_server.engine import DecidedStep, Decisions, EngineInfo, Load
from dovetail_server.frames import (
    Abort,
    Accepted,
    Adapters,
    Add,
    Ask,
    Decided,
    Dropped,
    Extra,
    Finished,
    First,
    Hello,
    LoadAdapter,
    PackedLogprobs,
    PackedResult,
    Refused,
    Reset,
    StepFrame,
    ToEngine,
    ToFrontEnd,
    Welcome,
    pack_numbers,
    pack_tokens,
    request_of,
)
from dovetail_server.links import ZmqPost

NOTED_STEPS = 12  # recorded after a request, and returned
REST_S = 0.5  # between two requests that start recording
LOADING_S = 0.01  # interval at which an idle engine looks whether an adapter is loaded
IDLE_CHECK_S = (
    1.0  # interval at which an idle engine checks its executor, of which a rank may have died
)


class DecisionLog(Observer):
    """Keeps the counts of the latest steps."""

    capabilities = ObserverCapabilities(decisions=True)

    def __init__(self) -> None:
        self.steps: deque[DecidedStep] = deque(maxlen=NOTED_STEPS)
        self.left = 0  # steps to record

    def on_step(self, event: StepFinished) -> None:
        if not event.decisions:  # planned before recording began
            return
        self.left -= 1
        acts = Counter(decision.act for decision in event.decisions)
        self.steps.append(
            DecidedStep(
                event.index,
                granted=acts["granted"],
                prefill_tokens=event.prefill_tokens,
                decode_tokens=event.decode_tokens,
                refused=acts["refused"],
                preempted=acts["preempted"],
                rejected=acts["rejected"],
                running=event.running,
                waiting=event.waiting,
            )
        )


class DecisionWatch:
    """Records the decisions of a core's next steps on request. Called in the engine's thread, between steps."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._log = DecisionLog()
        self._noting = False
        self._asked = -math.inf

    def ask(self) -> Decisions:
        """Return the known decisions, and start recording newer ones."""
        now = time.monotonic()
        if now - self._asked >= REST_S:
            self._asked = now
            self._log.left = NOTED_STEPS
            if not self._noting:
                self._noting = True
                self._core.observers.add("of the page", self._log)
        return Decisions(self._core.settings.scheduler_name, tuple(self._log.steps))

    def rest(self) -> None:
        """Stop recording once enough steps are recorded."""
        if self._noting and self._log.left <= 0:
            self._noting = False
            self._core.observers.remove(self._log)


logger = logging.getLogger("dovetail")


class _FrontEnd:
    """Unfinished samples of a front end."""

    __slots__ = ("live", "lost_below", "name", "top")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.live: dict[int, LiveRequest] = {}  # by number
        self.top = 0  # above all its numbers
        self.lost_below = 0  # aborted samples of which it must be told; 0: none


class _Columns:
    """Results of a step for one front end."""

    __slots__ = ("extra", "finished", "first", "numbers", "tokens")

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.tokens: list[int] = []
        self.first: list[First] = []
        self.finished: list[Finished] = []
        self.extra: Extra | None = None


class EngineHost:
    """`run` is called once, in the thread that owns the engine from then on. `stop`, `busy_s` and `busy_since` are thread-safe."""

    def __init__(self, assembly: Assembly, post: ZmqPost) -> None:
        self._assembly = assembly
        self._core = assembly.core
        self._admission = Admission(assembly, self._constraints, self._adapter_of)
        self._post = post
        self._front_ends: dict[bytes, _FrontEnd] = {}
        self._gone: set[bytes] = (
            set()
        )  # front ends that have ended; late messages of theirs are ignored
        self._places: dict[LiveRequest, tuple[_FrontEnd, int]] = {}  # of unfinished samples
        self._new: set[LiveRequest] = set()  # without a token yet
        self._later: list[
            tuple[bytes, ToEngine]
        ] = []  # messages received during a step, to be processed after it
        self._changed = False  # the load has changed without a step
        self._adapters: dict[
            str, tuple[LoRARequest, Path | None]
        ] = {}  # served ones by name, and the folder in which their files must be
        self._loading: list[
            tuple[_FrontEnd, LoadAdapter, RequestedAdapter]
        ] = []  # to be served once they are loaded
        self._stopping = False
        self._watch = DecisionWatch(self._core)
        self.busy_since: float | None = (
            None  # start of the current turn, or end of its last wait (`time.monotonic`); None while waiting
        )
        self._core.plan_timing.expects_arrivals = True
        # How the core waits: only a wall clock lets messages come meanwhile
        self._wait = self._wait_until if type(self._core.clock) is WallClock else None

    def run(self) -> None:
        """Serve until `stop` is called. Raises `EngineDeadError` if the engine fails, after delivering earlier results."""
        core = self._core
        try:
            while not self._stopping:
                self.busy_since = time.monotonic()
                self._hear()
                if core.has_unfinished():
                    self._deliver(core.step(self._wait))
                if core.dead is not None:
                    raise EngineDeadError(f"{type(core.dead).__name__}: {core.dead}") from core.dead
                if not core.has_unfinished():
                    if self._changed:
                        self._tell_load()
                    self._rest(
                        LOADING_S if self._loading else IDLE_CHECK_S if not self._lost() else 0.1
                    )
                    core.check_executor()
        finally:
            self.busy_since = None
            self._assembly.close()
            core.stop()

    def stop(self) -> None:
        """Make `run` return after the current step. The caller must also wake the post."""
        self._stopping = True

    def busy_s(self) -> float:
        """Return for how many seconds the current turn of the loop has been running; 0 while it waits."""
        since = self.busy_since
        return 0.0 if since is None else time.monotonic() - since

    def _rest(self, seconds: float) -> None:
        """Wait for messages."""
        self.busy_since = None
        self._post.wait(seconds)
        self.busy_since = time.monotonic()

    # What comes in

    def _hear(self) -> None:
        """Process pending messages."""
        later, self._later = self._later, []
        for sender, message in later:
            self._heed(sender, message)
        for sender, message in self._post.take():
            self._heed(sender, message)
        for name in self._post.gone():
            self._gone.add(name)
            if (front_end := self._front_ends.pop(name, None)) is not None:
                self._end(front_end)
        for front_end in self._lost():
            if self._post.send(front_end.name, Dropped(front_end.lost_below)):
                front_end.lost_below = 0
        self._watch.rest()
        if self._loading:
            self._end_loading()

    def _heed(self, sender: bytes, message: ToEngine) -> None:
        if sender in self._gone:
            return
        front_end = self._front_ends.get(sender)
        if front_end is None:
            front_end = self._front_ends[sender] = _FrontEnd(sender)
        match message:
            case Add():
                self._add(front_end, message)
            case Abort():
                for number in message.numbers:
                    if (request := front_end.live.get(number)) is not None:
                        self._drop(request)
            case Hello():
                self._send(front_end, self.welcome())
                self._send(front_end, self._served_adapters())
            case LoadAdapter():
                front_end.top = max(front_end.top, message.number + 1)
                self._load_adapter(front_end, message)
            case Reset():
                front_end.top = max(front_end.top, message.number + 1)
                self._core.kv.reset()
                self._send(front_end, Accepted(message.number))
            case Ask():
                self._post.send(sender, Decided(self._watch.ask()))  # best effort

    def _add(self, front_end: _FrontEnd, add: Add) -> None:
        front_end.top = max(front_end.top, add.number + add.n)
        try:
            self._admit(front_end, add)
        except DovetailError as error:
            self._send(front_end, Refused(add.number, error.reason, str(error)))
        except Exception as error:  # must not affect other requests
            logger.exception("failed to add a request")
            self._send(front_end, Refused(add.number, EndReason.ERROR, describe(error)))
        else:
            if add.confirms:
                self._send(front_end, Accepted(add.number))

    def _admit(self, front_end: _FrontEnd, add: Add) -> None:
        """Add a request to the core. Raises as `Admission.admit`."""
        samples = self._admission.admit(request_of(add), client=add.owner)
        for index, sample in enumerate(samples):
            self._places[sample] = (front_end, add.number + index)
            front_end.live[add.number + index] = sample
        self._new.update(samples)

    def _adapter_of(self, request: LoRARequest) -> RequestedAdapter:
        """Return a served adapter. Raises `RequestError` if it isn't served any more."""
        name = request.lora_name
        if name not in self._adapters or self._assembly.adapters is None:
            raise RequestError(f"model: the adapter {name[:200]!r} was unloaded")
        return self._assembly.adapters.get(*self._adapters[name])

    def _load_adapter(self, front_end: _FrontEnd, message: LoadAdapter) -> None:
        store = self._assembly.adapters
        if store is None:
            why = f"this server takes no adapters: {ENABLE}"
            self._send(front_end, Refused(message.number, EndReason.INVALID, why))
        elif message.path is None:
            self._adapters.pop(message.name, None)
            self._tell_adapters(front_end, message)
        else:
            try:
                adapter = store.get(
                    LoRARequest(message.name, 1, message.path),
                    None if message.within is None else Path(message.within),
                )
            except RequestError as error:
                self._send(front_end, Refused(message.number, error.reason, str(error)))
            else:
                self._loading.append((front_end, message, adapter))

    def _end_loading(self) -> None:
        """Serve the adapters that have been loaded."""
        done = [one for one in self._loading if not one[2].closed()]
        self._loading = [one for one in self._loading if one not in done]
        for front_end, message, adapter in done:
            if (end := adapter.failed()) is not None:
                # the request that names it is wrong, and no other
                refused = Refused(message.number, EndReason.INVALID, str(end.stop_reason))
                self._send(front_end, refused)
            else:
                within = None if message.within is None else Path(message.within)
                self._adapters[message.name] = (
                    LoRARequest(message.name, 1, str(message.path)),
                    within,
                )
                self._tell_adapters(front_end, message)

    def _tell_adapters(self, asked: _FrontEnd, message: LoadAdapter) -> None:
        """Tell all front ends which adapters are served, then answer the one that has changed that."""
        for front_end in list(self._front_ends.values()):
            self._send(front_end, self._served_adapters())
        self._send(asked, Accepted(message.number))

    def _served_adapters(self) -> Adapters:
        return Adapters({name: request.lora_path for name, (request, _) in self._adapters.items()})

    def _constraints(self, rule: AnswerRule, n: int, owner: Hashable) -> Sequence[Constraint]:
        try:
            return self._assembly.constraints(rule, n, owner)
        except (RequestError, UnsupportedError):
            raise
        except DovetailError:  # `Assembly.prepare_grammars` has logged the cause
            raise UnsupportedError(
                "structured: this server has no working grammar backend, which structured output "
                "and demanded calls need"
            ) from None

    def _end(self, front_end: _FrontEnd) -> None:
        """Abort all samples of a front end."""
        for request in list(front_end.live.values()):
            self._drop(request)

    def _drop(self, request: LiveRequest) -> None:
        """Abort a sample."""
        self._forget(request)
        self._core.abort(request)
        self._changed = True

    def _forget(self, request: LiveRequest) -> None:
        front_end, number = self._places.pop(request)
        del front_end.live[number]
        self._new.discard(request)
        samples = request.siblings or (request,)
        if not any(sample in self._places for sample in samples):
            self._admission.ended(samples)

    def _wait_until(self, instant: float) -> None:
        """Wait on behalf of the core. New requests are added meanwhile, so that the next step includes them; if the core is idle they end the wait.
        Other messages are processed after the step."""
        core = self._core
        while (
            (remaining := instant - core.clock.now()) > 0 and not self._stopping and not self._later
        ):
            self._rest(remaining)
            messages = self._post.take()
            for place, (sender, message) in enumerate(messages):
                if not isinstance(message, Add) or sender not in self._front_ends:
                    self._later += messages[place:]
                    break
                self._add(self._front_ends[sender], message)
            if not core.is_computing:
                break

    # What goes out

    def welcome(self) -> Welcome:
        """Return what front ends must know of the engine."""
        assembly, capacity, config = self._assembly, self._assembly.capacity, self._assembly.config
        details = {
            key: value if isinstance(value, str | int | float | None) else str(value)
            for key, value in capacity.details.items()
        }
        layout, parts = capacity.layout, dict(assembly.parts)
        groups = tuple(group.name for group in layout.groups)
        admitted = config.plugins.allow, config.plugins.deny
        info = EngineInfo(
            config.model.path,
            assembly.intake_facts,
            layout.block_size,
            capacity.num_pages,
            parts,
            details,
            groups,
            *admitted,
        )
        own = None if assembly.own_tokenizer is None else assembly.own_tokenizer.ref
        return Welcome(
            info,
            str(assembly.tokenizer_dir),
            own,
            config.seed,
            not isinstance(self._core.clock, VirtualClock),
        )

    def _load(self) -> Load:
        stats = self._core.update_stats()
        blocks = stats.blocks
        drafts = (
            stats.draft_rows,
            stats.draft_tokens,
            tuple(stats.accepted_drafts),
            stats.drafting_s,
        )
        return Load(
            stats.running,
            stats.waiting,
            blocks.held,
            blocks.free,
            blocks.cached,
            blocks.held_by_group,
            *drafts,
        )

    def _tell_load(self) -> None:
        """Send all front ends a frame with the load only."""
        self._changed = False
        frame = StepFrame(self._core.stats.steps, self._core.clock.now(), b"", b"", self._load())
        for front_end in list(self._front_ends.values()):
            self._send(front_end, frame)

    def _deliver(self, delivery: Delivery) -> None:
        """Send each front end its results."""
        if not delivery.requests and not delivery.finished and not delivery.prompt_logprobs:
            return
        self._changed = False
        finished = {
            request: finish
            for request, finish in delivery.finished.items()
            if finish.reason is not EndReason.ENGINE_DEAD  # front ends learn of it otherwise
        }
        parts = self._parts(delivery, finished)
        for request in delivery.finished:
            if request in self._places:
                self._forget(request)
        load, step, now = self._load(), self._core.stats.steps, self._core.clock.now()
        for front_end, part in parts.items():
            numbers, token_ids = pack_numbers(part.numbers), pack_tokens(part.tokens)
            frame = StepFrame(
                step,
                now,
                numbers,
                token_ids,
                load,
                tuple(part.first),
                tuple(part.finished),
                part.extra,
            )
            self._send(front_end, frame)

    def _parts(
        self, delivery: Delivery, finished: dict[LiveRequest, Finish]
    ) -> dict[_FrontEnd, _Columns]:
        places = self._places
        parts: dict[_FrontEnd, _Columns] = {}

        def part_of(front_end: _FrontEnd) -> _Columns:
            part = parts.get(front_end)
            if part is None:
                part = parts[front_end] = _Columns()
            return part

        if len(self._front_ends) == 1:  # fast path
            [front_end] = self._front_ends.values()
            part = part_of(front_end)
            part.numbers, part.tokens = (
                [places[request][1] for request in delivery.requests],
                delivery.token_ids,
            )
        else:
            for request, token in zip(delivery.requests, delivery.token_ids, strict=True):
                front_end, number = places[request]
                part = part_of(front_end)
                part.numbers.append(number)
                part.tokens.append(token)
        if self._new:
            for request in self._new.intersection(
                [*delivery.requests, *(request for request, _ in delivery.pooled)]
            ):
                front_end, number = places[request]
                times = request.first_scheduled_time, request.first_token_time
                part_of(front_end).first.append(First(number, request.cached_tokens, *times))
                self._new.discard(request)
        for request, finish in finished.items():
            front_end, number = places[request]
            ended = Finished(
                number,
                finish.reason,
                finish.stop_reason,
                request.preemptions,
                finish.keeps_token,
                tuple(request.pauses),
            )
            part_of(front_end).finished.append(ended)
        if delivery.logprobs or delivery.prompt_logprobs or delivery.pooled:
            self._put_extra(delivery, part_of)
        return parts

    def _put_extra(self, delivery: Delivery, part_of: Callable[[_FrontEnd], _Columns]) -> None:
        rows: dict[_FrontEnd, list[tuple[int, int]]] = {}  # number, row
        prompts: dict[_FrontEnd, list[tuple[int, PackedLogprobs]]] = {}
        for request, _, row in delivery.logprobs:
            front_end, number = self._places[request]
            rows.setdefault(front_end, []).append((number, row))
        for request, hosts in delivery.prompt_logprobs:
            front_end, number = self._places[request]
            prompts.setdefault(front_end, []).append((number, PackedLogprobs.of(hosts)))
        pooled: dict[_FrontEnd, list[PackedResult]] = {}
        for request, data in delivery.pooled:
            front_end, number = self._places[request]
            pooled.setdefault(front_end, []).append(PackedResult.of(number, data))
        for front_end in {**rows, **prompts, **pooled}:
            packed = None
            if front_end in rows:
                numbers, kept = zip(*rows[front_end], strict=True)
                hosts = delivery.logprobs[0][1]  # all of one step
                packed = PackedLogprobs.of(hosts, pack_numbers(numbers), kept)
            part_of(front_end).extra = Extra(
                packed, tuple(prompts.get(front_end, ())), tuple(pooled.get(front_end, ()))
            )

    def _send(self, front_end: _FrontEnd, message: ToFrontEnd) -> None:
        """Send a message. If the front end doesn't read, abort its samples, and tell it once it reads again."""
        if front_end.lost_below or not self._post.send(front_end.name, message):
            front_end.lost_below = max(front_end.lost_below, front_end.top)
            self._end(front_end)

    def _lost(self) -> list[_FrontEnd]:
        return [front_end for front_end in self._front_ends.values() if front_end.lost_below]


class StepWatch:
    """Measures the time since the last progress in the current turn of a host's loop, usually a step, excluding time during which the process
    was suspended. On a CPU each layer of a step is progress."""

    def __init__(self, host: EngineHost) -> None:
        self._host, self._clock = host, ProcessWatch()
        self._step: float | None = (
            None  # its start, as reported by the host, or its latest progress
        )
        self._since = 0.0  # the same, on the watch's clock

    def busy_s(self) -> float:
        """Return the seconds; 0 while the host waits. Call it several times a second, from one thread."""
        now, step = self._clock.turn(), self._host.busy_since
        if step is not None:
            step = max(step, PULSE.last)
        if step != self._step:
            self._step, self._since = step, now
        return 0.0 if step is None else now - self._since
