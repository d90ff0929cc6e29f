"""`EngineHost`: the loop around an engine core that serves front ends, in its own process
(`engine_process`) or in a thread (`--in-process`).

It receives requests, steps the core, and sends each front end one frame per step. It produces no
text and never waits for a front end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterable, Sequence

from dovetail.api.clock import VirtualClock, WallClock
from dovetail.end_reason import EndReason
from dovetail.errors import (
    DovetailError,
    EngineDeadError,
    RequestError,
    UnsupportedError,
    describe,
)
from dovetail.serving import (
    Admission,
    AnswerRule,
    Assembly,
    Constraint,
    Delivery,
    LiveRequest,
)
from dovetail_server.decision_watch import DecisionWatch
from dovetail_server.engine import EngineInfo, Load
from dovetail_server.frames import (
    Abort,
    Accepted,
    Add,
    Ask,
    Decided,
    Dropped,
    Hello,
    LoadAdapter,
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
from dovetail_server.front_end_samples import FrontEnd, FrontEndSamples
from dovetail_server.links import ZmqPost
from dovetail_server.served_adapters import Answered, ServedAdapters

LOADING_S = 0.01  # interval at which an idle engine looks whether an adapter is loaded
LOST_S = 0.1  # interval at which front ends that didn't read are tried again
IDLE_CHECK_S = 1.0  # interval at which an idle engine checks its executor: a rank may have died


logger = logging.getLogger("dovetail")


class EngineHost:
    """`run` is called once, in the thread that owns the engine from then on.

    `stop`, `busy_s` and `busy_since` are thread-safe.
    """

    def __init__(self, assembly: Assembly, post: ZmqPost) -> None:
        self._assembly = assembly
        self._core = assembly.core
        self._adapters = ServedAdapters(assembly)
        self._admission = Admission(assembly, self._constraints, self._adapters.get)
        self._post = post
        self._samples = FrontEndSamples()
        self._front_ends = self._samples.front_ends
        self._gone: set[bytes] = set()  # ended front ends; late messages of theirs are ignored
        # messages received during a step, to be processed after it
        self._later: list[tuple[bytes, ToEngine]] = []
        self._changed = False  # the load has changed without a step
        self._stopping = False
        self._watch = DecisionWatch(self._core)
        # start of the current turn, or end of its last wait (`time.monotonic`); None while waiting
        self.busy_since: float | None = None
        self._core.plan_timing.expects_arrivals = True
        # Passed to `EngineCore.step`: with a wall clock, messages are received during a wait
        self._wait = self._wait_until if type(self._core.clock) is WallClock else None

    def run(self) -> None:
        """Serve until `stop` is called.

        Raises `EngineDeadError` if the engine fails, after delivering earlier results.
        """
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
                    self._rest(0.0 if core.idle(finish_start=True) else self._idle_s())
                    core.check_executor()
        finally:
            self.busy_since = None
            self._assembly.close()
            core.stop()

    def _idle_s(self) -> float:
        """Return for how long an idle engine may wait."""
        if self._adapters.loading:
            return LOADING_S
        return LOST_S if self._lost() else IDLE_CHECK_S

    def stop(self) -> None:
        """Make `run` return after the current step. The caller must also wake the post."""
        self._stopping = True

    def busy_s(self) -> float:
        """Return for how many seconds the current turn of the loop has been running; 0 while it
        waits."""
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
        later = self._later
        self._later = []
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
        if self._watch.is_noting:
            self._watch.rest()
        if self._adapters.loading:
            for answered in self._adapters.loaded():
                self._tell_adapters(answered)

    def _heed(self, sender: bytes, message: ToEngine) -> None:
        if sender in self._gone:
            return
        front_end = self._front_ends.get(sender)
        if front_end is None:
            front_end = self._front_ends[sender] = FrontEnd(sender)
        match message:
            case Add():
                self._add(front_end, message)
            case Abort():
                self._abort(front_end, message.numbers)
            case Hello():
                self._send(front_end, self.welcome())
                self._send(front_end, self._adapters.paths)
            case LoadAdapter():
                front_end.top = max(front_end.top, message.number + 1)
                self._tell_adapters(self._adapters.change(front_end, message))
            case Reset():
                front_end.top = max(front_end.top, message.number + 1)
                self._core.reset_cache()
                self._send(front_end, Accepted(message.number))
            case Ask():
                self._post.send(sender, Decided(self._watch.ask()))  # best effort

    def _abort(self, front_end: FrontEnd, numbers: Iterable[int]) -> None:
        for number in numbers:
            if (sample := front_end.live.get(number)) is not None:
                self._drop(sample)

    def _tell_adapters(self, answered: Answered | None) -> None:
        """Tell all front ends which adapters are served if that has changed, then answer the one
        that asked."""
        if answered is None:
            return
        if isinstance(answered.answer, Accepted):
            for front_end in list(self._front_ends.values()):
                self._send(front_end, self._adapters.paths)
        self._send(answered.front_end, answered.answer)

    def _add(self, front_end: FrontEnd, add: Add) -> None:
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

    def _admit(self, front_end: FrontEnd, add: Add) -> None:
        """Add a request to the core. Raises as `Admission.admit`."""
        samples = self._admission.admit(request_of(add), client=add.owner)
        self._samples.add(front_end, add.number, samples)

    def _constraints(self, rule: AnswerRule, n: int, owner: Hashable) -> Sequence[Constraint]:
        try:
            return self._assembly.rules.constraints(rule, n, owner)
        except (RequestError, UnsupportedError):
            raise
        except DovetailError:  # `Assembly.prepare_grammars` has logged the cause
            raise UnsupportedError(
                "structured: this server has no working grammar backend, which structured output "
                "and demanded calls need"
            ) from None

    def _end(self, front_end: FrontEnd) -> None:
        """Abort all samples of a front end."""
        for request in list(front_end.live.values()):
            self._drop(request)

    def _drop(self, request: LiveRequest) -> None:
        """Abort a sample."""
        self._forget(request)
        self._core.abort(request)
        self._changed = True

    def _forget(self, sample: LiveRequest) -> None:
        if self._samples.remove(sample):
            self._admission.ended(sample.siblings or (sample,))

    def _wait_until(self, instant: float) -> None:
        """Wait on behalf of the core.

        New requests are added meanwhile, so that the next step includes them; if the core is idle
        they end the wait. Other messages are processed after the step.
        """
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
        assembly = self._assembly
        capacity = self._assembly.capacity
        config = self._assembly.config
        details = {
            key: value if isinstance(value, str | int | float | None) else str(value)
            for key, value in capacity.details.items()
        }
        layout = capacity.layout
        parts = dict(assembly.parts)
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
        pages = stats.pages
        drafts = (
            stats.draft_rows,
            stats.draft_tokens,
            tuple(stats.accepted_drafts),
            stats.drafting_s,
        )
        return Load(
            stats.running,
            stats.waiting,
            pages.held,
            pages.empty,
            pages.cached,
            pages.held_by_group,
            *drafts,
            stats.tiers,
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
        shares = self._samples.shares(delivery, finished)
        for sample in delivery.finished:
            if sample in self._samples:
                self._forget(sample)
        load = self._load()
        step = self._core.stats.steps
        now = self._core.clock.now()
        for front_end, share in shares.items():
            frame = StepFrame(
                step,
                now,
                pack_numbers(share.numbers),
                pack_tokens(share.tokens),
                load,
                tuple(share.first),
                tuple(share.finished),
                share.extra,
            )
            self._send(front_end, frame)

    def _send(self, front_end: FrontEnd, message: ToFrontEnd) -> None:
        """Send a message.

        If the front end doesn't read, abort its samples, and tell it once it reads again.
        """
        if front_end.lost_below or not self._post.send(front_end.name, message):
            front_end.lost_below = max(front_end.lost_below, front_end.top)
            self._end(front_end)

    def _lost(self) -> list[FrontEnd]:
        return [front_end for front_end in self._front_ends.values() if front_end.lost_below]
