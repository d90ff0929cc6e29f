"""`RemoteEngine`: a front end's engine.

It validates and tokenizes requests, and converts the frames of the engine's host to text.

Outputs come from the same `OutputBuilder` as offline, so that a request's text is the same.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dovetail.api.executor import HostLogprobs
from dovetail.end_reason import EndReason
from dovetail.errors import DovetailError, EngineDeadError, RequestError, UnsupportedError, describe
from dovetail.request.pooling import PoolingParams
from dovetail.request.request import RequestFields
from dovetail.request.sampling_params import OutputKind, SamplingParams, changed_unchecked
from dovetail.serving import (
    ChatFrontEnd,
    ComponentTokenizer,
    EngineOutput,
    Entered,
    Finish,
    ImagePrompt,
    ImagePrompts,
    IncrementalText,
    Intake,
    MediaPrompt,
    OutputBuilder,
    PoolingIntake,
    Prompt,
    PromptSource,
    RequestGroup,
    Tokenizer,
    TokenWatcher,
    by_sample,
    byte_pieces,
    check_name,
    image_of_base64,
)
from dovetail_server.engine import Decisions, Listener, Load
from dovetail_server.frames import (
    Abort,
    Accepted,
    Adapters,
    Ask,
    Decided,
    Dropped,
    Extra,
    Finished,
    First,
    Hello,
    LoadAdapter,
    Refused,
    Reset,
    StepFrame,
    ToFrontEnd,
    Welcome,
    add_of,
    unpack_numbers,
    unpack_tokens,
)
from dovetail_server.links import Line
from dovetail_server.protocol.pooling import HTTP_CALLS

logger = logging.getLogger("dovetail")

ASK_S = 0.5  # between requests for decisions
# a red square of 16 x 16 pixels, as PNG
_PICTURE = (
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAFklEQVR42mO4YKBAEmIY1TCqYfhqAADM5yAQMiJu"
    "6gAAAABJRU5ErkJggg=="
)
_importing = threading.Lock()
T = TypeVar("T")
_FIELDS = RequestFields.__match_args__


class Sample:
    """State of one sample in the engine: a `SampleState`."""

    __slots__ = (
        "arrival_time",
        "cached_tokens",
        "entry",
        "first_scheduled_time",
        "first_token_time",
        "listener",
        "number",
        "output",
        "pauses",
        "preemptions",
        "restored_tokens",
        "text",
        "watcher",
    )

    def __init__(self, number: int, arrival_time: float, watcher: TokenWatcher | None) -> None:
        self.number = number
        self.arrival_time = arrival_time
        self.watcher = watcher
        self.output: array[int] = array("q")  # without those passed to `Listener.on_text`
        self.text: IncrementalText | None = None  # set once `listener` receives plain text
        self.listener: Listener | None = None
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.preemptions = 0
        self.pauses: Sequence[float] = ()
        self.cached_tokens = 0
        self.restored_tokens = 0
        self.entry: _Open | None = None


@dataclass(slots=True)
class FrameNews:
    """A frame with numbers resolved to samples: `News`."""

    requests: list[Sample] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finished: dict[Sample, Finish] = field(default_factory=dict)
    logprobs: list[tuple[Sample, HostLogprobs, int]] = field(default_factory=list)
    prompt_logprobs: list[tuple[Sample, HostLogprobs]] = field(default_factory=list)
    pooled: list[tuple[Sample, NDArray[np.float32]]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Open:
    """An unfinished request."""

    group: RequestGroup[Sample]
    listener: Listener
    # set once the engine has accepted it; None if nobody waits for that
    confirmed: asyncio.Future[None] | None

    def confirm(self) -> None:
        if self.confirmed is not None and not self.confirmed.done():
            self.confirmed.set_result(None)


class RemoteEngine:
    """`ServedEngine` at the other end of a line."""

    def __init__(
        self,
        line: Line,
        welcome: Welcome,
        tokenizer: Tokenizer,
        name: str,
        failed: Callable[[str], None] | None,
    ) -> None:
        """Use `connect`."""
        self._line = line
        self._failed = failed or self.fail
        self._wall_clock = welcome.wall_clock
        self.tokenizer = tokenizer
        self.info = info = welcome.info
        can = info.intake.pooling
        facts = replace(
            info.intake, pooling=None if can is None else replace(can, call_of=HTTP_CALLS)
        )
        self._intake = Intake(facts, lambda: tokenizer, random.Random(f"{welcome.seed} {name}"))
        self.chat = ChatFrontEnd(
            tokenizer,
            info.intake.limits,
            info.intake.max_model_len,
            images=self._intake.images,
        )
        self.load = Load(free_pages=info.num_pages)
        self.adapters: Mapping[str, str] = {}
        self._builder = OutputBuilder(tokenizer)
        self._open: dict[str, _Open] = {}  # by request id
        self._samples: dict[int, Sample] = {}  # unfinished, by number
        self._asks: dict[int, asyncio.Future[None]] = {}  # that aren't about requests, by number
        self._next_number = 1
        self._time = 0.0  # of the last frame
        self._failure: str | None = None
        self._decisions: Decisions | None = None
        self._asked = 0.0  # seconds of `time.monotonic`
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    async def connect(
        cls, line: Line, name: str, failed: Callable[[str], None] | None = None
    ) -> RemoteEngine:
        """Wait for the engine, load the tokenizer, and warm up.

        `name`: the front end's, which makes default seeds differ between front ends. `failed`:
        called instead of `fail` if a message of the engine can't be decoded. Raises
        `ModelLoadError` if the model has no tokenizer.
        """
        answer: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        engine: RemoteEngine | None = None
        early: list[ToFrontEnd] = []

        def take(message: ToFrontEnd) -> None:
            if isinstance(message, Welcome):
                if not answer.done():
                    answer.set_result(message)
            elif engine is not None:
                engine._take(message)
            elif isinstance(message, Adapters):
                early.append(message)

        line.open(take)
        line.send(Hello())
        welcome = await answer
        tokenizer = await asyncio.to_thread(_one_at_a_time, partial(_load_tokenizer, welcome))
        engine = cls(line, welcome, tokenizer, name, failed)
        for message in early:
            engine._take(message)
        await asyncio.to_thread(_one_at_a_time, engine._warm_up)
        return engine

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished requests; samples of n > 1 count once."""
        return len(self._open)

    async def wait_until_idle(self) -> None:
        """Wait until no request is unfinished."""
        await self._idle.wait()

    def now(self) -> float:
        # the engine's clock on the same host
        return time.perf_counter() if self._wall_clock else self._time

    async def reset_prefix_cache(self) -> None:
        await self._ask(Reset)

    async def load_adapter(self, name: str, path: str | None, within: str | None = None) -> None:
        check_name("lora_name", name, self.info.intake.limits)
        await self._ask(lambda number: LoadAdapter(number, name, path, within))

    async def _ask(self, message: Callable[[int], Reset | LoadAdapter]) -> None:
        """Send the engine a message with a number of its own, and wait for the answer."""
        self.check_health()
        number = self._next_number
        self._next_number += 1
        done = self._asks[number] = asyncio.get_running_loop().create_future()
        self._line.send(message(number))
        await done

    def decisions(self) -> Decisions | None:
        now = time.monotonic()
        if now - self._asked >= ASK_S and self._failure is None:
            self._asked = now
            self._line.send(Ask())
        return self._decisions

    def check_health(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(self._failure)

    def fail(self, reason: str) -> None:
        """Fail all requests because the engine is dead, and reject new ones."""
        if self._failure is not None:
            return
        self._failure = reason
        for done in self._asks.values():
            if not done.done():
                done.set_exception(EngineDeadError(reason))
        self._asks.clear()
        for entry in list(self._open.values()):
            self._end(entry, EngineDeadError(reason))

    def end_all(self, reason: str) -> None:
        """Abort all requests with an error for their listeners."""
        for request_id, entry in list(self._open.items()):
            self.abort(request_id)
            self._tell(entry, DovetailError(reason))

    def close(self) -> None:
        """Close the line and stop the processes that prepare prompts, without notifying
        listeners."""
        self._line.close()
        self.chat.close()
        self._intake.close()

    def source(self, prompts: Sequence[Prompt], *, cut: bool = False) -> PromptSource:
        return self._intake.prompts.source(prompts, cut=cut)

    def with_images(
        self, prompt: ImagePrompt, *, cut: bool, wanted: Callable[[], bool]
    ) -> MediaPrompt:
        return self._intake.prompts.with_images(prompt, cut=cut, wanted=wanted)

    @property
    def pooling(self) -> PoolingIntake:
        return self._intake.pooling

    async def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        listener: Listener,
        *,
        owner: int = 0,
        **fields: Any,
    ) -> None:
        self.check_health()
        extra = fields.pop("extra", None)
        if unknown := sorted(set(fields) - set(_FIELDS)):
            raise RequestError(
                f"{unknown[0]}: unknown field of a request; valid fields are "
                f"{', '.join((*_FIELDS, 'extra'))}"
            )
        if fields.get("arrival_time") is None and self._wall_clock:
            fields["arrival_time"] = self.now()
        self._check_free(request_id)
        if isinstance(params, SamplingParams) and params.output_kind is not OutputKind.DELTA:
            params = changed_unchecked(params, output_kind=OutputKind.DELTA)
        entered = self._intake.check(request_id, prompt, params, RequestFields(**fields), extra)
        entry = self._give(entered, listener, owner)
        if entry.confirmed is not None:
            try:
                await entry.confirmed
            except asyncio.CancelledError:
                self.abort(request_id)
                raise

    def abort(self, request_id: str) -> None:
        if (entry := self._open.get(request_id)) is None:
            return
        left = [sample.number for sample in entry.group.samples if sample.number in self._samples]
        self._forget(entry)
        if left:
            self._line.send(Abort(left))
        entry.confirm()

    # On its way in

    def _warm_up(self) -> None:
        """Do slow first-time work: tokenize a text, search the vocabulary for its longest token,
        start a rendering process, probe the chat template, and prepare an image."""
        self.tokenizer.encode("Hello")
        _ = self.tokenizer.longest_token
        with suppress(DovetailError):  # no template, or it rejects this conversation
            self.chat.prompt([{"role": "user", "content": "Hello"}])
        if self._intake.images is not None:
            self._warm_up_images(self._intake.images)

    def _warm_up_images(self, images: ImagePrompts) -> None:
        """Prepare an image: the first takes a second. An image processor that can't be used is
        logged now, and refused with each request."""
        image = image_of_base64(_PICTURE, "a picture")
        try:
            images.prepared(ImagePrompt(None, [images.token_id], (image,), (0,)))
        except DovetailError as error:
            logger.warning("images can't be prepared: %s", error)

    def _check_free(self, request_id: Any) -> None:
        if isinstance(request_id, str) and request_id in self._open:
            raise RequestError(f"request_id {request_id!r} is in use by an unfinished request")

    def _give(self, entered: Entered, listener: Listener, owner: int) -> _Open:
        """Send the engine a request. If it raises `RequestError`, nothing has changed."""
        request = entered.request
        params = entered.params
        texts = self._intake.texts(entered)
        number = self._next_number
        came = request.fields.arrival_time
        self._line.send(add_of(number, request, owner))
        self._next_number += params.n
        samples = [
            Sample(
                number + index, self._time if came is None else came, text if params.stop else None
            )
            for index, text in enumerate(texts)
        ]
        prompt = entered.prompt
        ids = entered.prompt_token_ids
        group = RequestGroup(
            request.request_id,
            prompt,
            ids,
            params,
            samples,
            reading=entered.reading,
            media=request.media,
        )
        self._builder.expect(group, texts)
        confirmed = asyncio.get_running_loop().create_future() if request.extra else None
        entry = self._open[request.request_id] = _Open(group, listener, confirmed)
        for sample in samples:
            self._samples[sample.number] = sample
            sample.entry = entry
        self._idle.clear()
        return entry

    # On its way out

    def _take(self, message: ToFrontEnd) -> None:
        if self._failure is not None:
            return
        try:
            self._heed(message)
        except Exception as error:  # tokens are lost: running requests can't be completed
            logger.exception("failed to process a message of the engine")
            self._failed(f"the front end couldn't read a message of the engine: {describe(error)}")

    def _heed(self, message: ToFrontEnd) -> None:
        match message:
            case StepFrame():
                self._take_frame(message)
            case Decided():
                self._decisions = message.decisions
            case Adapters():
                self.adapters = message.paths
            case Refused():
                self._take_refusal(message)
            case Accepted():
                self._take_acceptance(message)
            case Dropped():
                dropped = [
                    entry
                    for entry in self._open.values()
                    if entry.group.samples[0].number < message.below
                ]
                for entry in dropped:
                    self._end(entry, DovetailError(_DROPPED))

    def _take_refusal(self, message: Refused) -> None:
        done = self._asks.pop(message.number, None)
        if done is not None:
            if not done.done():  # otherwise its caller is gone
                done.set_exception(_error_of(message))
        elif (entry := self._entry_of(message.number)) is not None:
            self._end(entry, _error_of(message))

    def _take_acceptance(self, message: Accepted) -> None:
        done = self._asks.pop(message.number, None)
        if done is not None:
            if not done.done():  # otherwise its caller is gone
                done.set_result(None)
        elif (entry := self._entry_of(message.number)) is not None:
            entry.confirm()

    def _take_frame(self, frame: StepFrame) -> None:
        self.load = frame.load
        self._time = frame.time
        if not frame.numbers and not frame.finished and frame.extra is None:
            return
        news = self._read(frame)
        builder = self._builder
        outputs = [
            (self._open[output.request_id], output) for output in builder.build(news, frame.time)
        ]
        if news.finished:
            for sample in news.finished:
                self._samples.pop(sample.number, None)
            for group in builder.take_ended(news):
                self._forget(self._open[group.request_id])
        for entry, output in outputs:
            if (
                output.finished or self._open.get(output.request_id) is entry
            ):  # otherwise a listener has just aborted it
                self._hand_out(entry, output)

    def _hand_out(self, entry: _Open, output: EngineOutput) -> None:
        listener = entry.listener
        try:
            listener.on_output(output)
            if listener.is_plain and not output.finished:
                sample = entry.group.samples[0]
                if (
                    sample.number in self._samples
                    and (text := self._builder.text_of(sample)) is not None
                ):
                    sample.text = text
                    sample.listener = listener
        except Exception:  # must not affect other requests
            self._break_off(entry)

    def _break_off(self, entry: _Open) -> None:
        """Abort a request whose listener has just failed, and tell it: whoever waits for its
        outputs would wait forever."""
        logger.exception("a listener failed")
        self.abort(entry.group.request_id)
        self._tell(
            entry,
            DovetailError(
                "the server failed to process an output of this request; its log says why"
            ),
        )

    def _read(self, frame: StepFrame) -> FrameNews:
        """Return a frame's results for unfinished samples, except plain tokens, which are passed on
        at once."""
        news = FrameNews()
        samples = self._samples
        self._note_first(frame.first)
        ends = {finish.number: finish for finish in frame.finished}
        stopped: list[int] = []  # samples that a stop string ended, and the engine goes on with
        found = [samples.get(number) for number in unpack_numbers(frame.numbers)]
        for sample, tokens in by_sample(found, unpack_tokens(frame.token_ids)):
            if sample is None or sample.number not in samples:
                continue  # aborted, perhaps by a listener just now, or ended by a stop string
            end = ends.get(sample.number)
            if sample.text is not None and end is None:  # fast path without an output
                self._tell_text(sample, sample.text, tokens)
                continue
            is_stopped = self._read_tokens(sample, tokens, end, news)
            if is_stopped and ends.pop(sample.number, None) is None:
                stopped.append(sample.number)
        self._note_ends(ends.values(), news)
        if stopped:
            self._line.send(Abort(stopped))
        if frame.extra is not None:
            self._read_extra(frame.extra, news)
        return news

    def _note_first(self, first_results: Iterable[First]) -> None:
        for first in first_results:
            if (sample := self._samples.get(first.number)) is not None:
                sample.cached_tokens = first.cached_tokens
                sample.restored_tokens = first.restored_tokens
                sample.first_scheduled_time = first.scheduled
                sample.first_token_time = first.token

    def _note_ends(self, ends: Iterable[Finished], news: FrameNews) -> None:
        for end in ends:
            if (sample := self._samples.get(end.number)) is not None:
                sample.preemptions = end.preemptions
                sample.pauses = end.pauses
                news.finished[sample] = Finish(end.reason, end.stop_reason, end.keeps_token)

    def _read_tokens(
        self, sample: Sample, tokens: Sequence[int], end: Finished | None, news: FrameNews
    ) -> bool:
        """Add a sample's tokens to the results. Return True if a stop string ends it."""
        for place, token in enumerate(tokens, 1):
            sample.output.append(token)
            news.requests.append(sample)
            news.token_ids.append(token)
            if sample.watcher is None:
                continue
            finish = self._watched(sample.watcher, token, end if place == len(tokens) else None)
            if finish is not None:
                news.finished[sample] = finish
                return True
        return False

    def _tell_text(self, sample: Sample, text: IncrementalText, token_ids: Sequence[int]) -> None:
        try:
            # the listener is set together with `text`
            sample.listener.on_text(text.delta_of(token_ids), len(token_ids))  # type: ignore[union-attr]
        except Exception:
            if sample.entry is not None:
                self._break_off(sample.entry)

    def _watched(self, watcher: TokenWatcher, token: int, finish: Finished | None) -> Finish | None:
        """Check a token for stop strings, as the core would: stop tokens are excluded."""
        if finish is not None and finish.reason is EndReason.STOP and not finish.keeps_token:
            return None
        return watcher.see(token)

    def _read_extra(self, extra: Extra, news: FrameNews) -> None:
        if extra.logprobs is not None:
            # not of tokens after a stop string
            hosts = extra.logprobs.hosts()
            left = Counter(news.requests)
            for row, number in enumerate(unpack_numbers(extra.logprobs.numbers)):
                if (sample := self._samples.get(number)) is not None and left[sample]:
                    left[sample] -= 1
                    news.logprobs.append((sample, hosts, row))
        for number, packed in extra.prompt_logprobs:
            if (sample := self._samples.get(number)) is not None:
                news.prompt_logprobs.append((sample, packed.hosts()))
        for result in extra.pooled:
            if (sample := self._samples.get(result.number)) is not None:
                news.pooled.append((sample, result.array()))

    # Ends

    def _entry_of(self, number: int) -> _Open | None:
        sample = self._samples.get(number)
        return None if sample is None else sample.entry

    def _forget(self, entry: _Open) -> None:
        """Release the state of a request that has ended."""
        self._open.pop(entry.group.request_id, None)
        for sample in entry.group.samples:
            self._samples.pop(sample.number, None)
            sample.entry = None  # break reference cycles
        self._builder.forget(entry.group)
        if not self._open:
            self._idle.set()

    def _end(self, entry: _Open, error: DovetailError) -> None:
        """Fail a request that the engine no longer has."""
        self._forget(entry)
        self._tell(entry, error)

    def _tell(self, entry: _Open, error: DovetailError) -> None:
        if entry.confirmed is not None and not entry.confirmed.done():
            entry.confirmed.set_exception(error)
            return
        try:
            entry.listener.on_error(error)
        except Exception:
            logger.exception("a listener failed")


_DROPPED = "the server couldn't keep up with the engine, which aborted the request"


def _error_of(refused: Refused) -> DovetailError:
    if refused.reason is EndReason.UNSUPPORTED:
        return UnsupportedError(refused.text)
    return RequestError(refused.text, refused.reason)


def _one_at_a_time(work: Callable[[], T]) -> T:
    """Return the result of `work`, which imports modules that threads can't import at once."""
    with _importing:
        return work()


def _load_tokenizer(welcome: Welcome) -> Tokenizer:
    own = welcome.tokenizer
    directory = welcome.tokenizer_dir
    tokenizer = Tokenizer.load(directory) if own is None else ComponentTokenizer(own, directory)
    # for the default of skipping special tokens: computed now, since it holds the vocabulary
    byte_pieces(tokenizer, True)
    return tokenizer
