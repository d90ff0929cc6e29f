"""`Exchange`: one HTTP request to the engine and its answer, and `Endpoint`, which makes a route of a function that takes one.

However an exchange ends (answered, refused, its client gone, its task cancelled), nothing of it stays in the engine.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import orjson
from starlette.types import Receive, Scope, Send

from dovetail.errors import DovetailError, RequestError
from dovetail.front.prompts import Prompt, content_of, is_text
from dovetail.front.request_checks import check_counts, check_params
from dovetail.front.tokenizer import TokenizedText
from dovetail.request import CompletionOutput, RequestMetrics, RequestOutput
from dovetail.sampling_params import SamplingParams
from dovetail_server.admission import Admission, Ticket
from dovetail_server.answer_parsing import AnswerParsing
from dovetail_server.batches.store import BatchStore
from dovetail_server.bodies import receive_body
from dovetail_server.engine import ServedEngine
from dovetail_server.errors import ErrorShape, HttpError, http_error, openai_shape
from dovetail_server.metrics import RequestMeter, ServerMetrics
from dovetail_server.outbox import Outbox
from dovetail_server.preparing import Preparing
from dovetail_server.protocol.decoding import decode
from dovetail_server.settings import ServerSettings
from dovetail_server.streams import ClientGone, EventStream, SlowReaderError, until_disconnected

T = TypeVar("T")

_FAILURES = ("rejected", "error", "abort")
_CHARS_A_TOKEN = 4  # guessed, of a text that isn't tokenized yet
_SHORT = 2000  # characters that the engine tokenizes in the event loop: a thread would take longer


@dataclass(slots=True)
class Record:
    """Numbers of one request, for its log line. Times are seconds of `time.monotonic`."""

    began: float = field(default_factory=time.monotonic)
    first_output: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    model: str | None = None
    error: str | None = None
    gone: bool = False  # the client went away before the end


@dataclass(frozen=True)
class Server:
    """The objects that all routes share; `app.state.server`."""

    engine: ServedEngine
    settings: ServerSettings
    admission: Admission
    parsing: AnswerParsing
    preparing: Preparing
    metrics: ServerMetrics
    models: tuple[str, ...]  # the names that a request may give; the first is the model's own
    tracing: ExchangeTracer | None = None
    batches: BatchStore | None = None  # None: this server keeps no files
    outbox: Outbox = field(default_factory=Outbox)
    started_at: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970

    def check_health(self) -> None:
        """Raises `DovetailError` if the engine, or a part of this front end, is dead or hangs."""
        self.engine.check_health()
        self.outbox.check_health()

    def model_named(self, name: str | None) -> str:
        """Return the name that the answer tells. Raises `HttpError` 404 for an unknown one."""
        if name is None or name in self.models:
            return name or self.models[0]
        raise HttpError(404, f"the model {name[:200]!r} isn't served here; served is {', '.join(self.models)}", param="model", code="model_not_found")


class ExchangeTracer(Protocol):
    """Exports a span for each request that has ended: `tracing.Tracing`."""

    def export(self, exchange: Exchange) -> None: ...

    def close(self) -> None: ...


class Part:
    """A `Listener` for one of the engine's requests that belong to an exchange. Subclasses have `take`."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.ticket: Ticket | None = None
        self.meter: RequestMeter | None = None
        self.begun = self.ended = False
        self.times: RequestMetrics | None = None  # of the engine's events, which grow with them
        self.finish_reasons: list[str] = []
        self.is_plain = False
        self._around = b"", b""  # a token's text, if `is_plain`
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0

    def take(self, output: RequestOutput) -> None:
        """Take what is new. An error ends the exchange, and the engine's requests with it."""
        raise NotImplementedError

    def on_output(self, output: RequestOutput) -> None:
        if self.meter is not None:
            self.meter.saw(output)
        if not self.begun:
            self._begin(output)
        self.ended = output.finished
        for sample in output.outputs:
            self.completion_tokens += len(sample.token_ids)
            if sample.finish_reason is not None:
                self.finish_reasons.append(sample.finish_reason)
                if sample.finish_reason in _FAILURES:
                    self.exchange.fail(_failure(sample))
                    return
        try:
            self.take(output)
        except Exception as error:  # it is this request's alone
            self.exchange.fail(http_error(error))
            return
        if output.finished:
            self.exchange.part_ended()

    def tell_plainly(self, before: bytes, behind: bytes) -> None:
        """From now on, write a token that brings nothing but text as this text in JSON, between two pieces. Of a stream with one sample."""
        self._around = before, behind
        self.is_plain = True

    def on_text(self, text: str) -> None:
        self.completion_tokens += 1
        if self.meter is not None:
            self.meter.saw_token()
        if text and (stream := self.exchange.stream) is not None:
            before, behind = self._around
            stream.write(b"%b%b%b" % (before, orjson.dumps(text), behind))

    def on_error(self, error: DovetailError) -> None:
        self.ended = True
        if self.meter is not None:
            self.meter.ended("error")
        self.exchange.fail(error)

    def _begin(self, output: RequestOutput) -> None:
        self.begun = True
        self.times = output.metrics
        self.prompt_tokens, self.cached_tokens = len(output.prompt_token_ids), output.num_cached_tokens
        if self.exchange.record.first_output is None:
            self.exchange.record.first_output = time.monotonic()
        if self.ticket is not None:
            self.ticket.leave(begun=True)


def _failure(sample: CompletionOutput) -> DovetailError:
    if sample.finish_reason == "rejected" and str(sample.stop_reason).startswith("structured"):  # its rule couldn't be compiled: see `front.grammars`
        return RequestError(str(sample.stop_reason))
    if sample.finish_reason == "rejected":
        return HttpError(503, f"the scheduler rejected the request: {sample.stop_reason}", code="rejected")
    if sample.finish_reason == "abort":
        return HttpError(503, "the request was aborted by the server", code="aborted")
    return HttpError(500, f"the request failed: {sample.stop_reason}", code="request_failed")


@dataclass(frozen=True, slots=True)
class Job:
    """One request for the engine."""

    prompt: Prompt
    params: SamplingParams
    part: Part
    fields: Mapping[str, Any] = field(default_factory=dict)


class Exchange:
    """One HTTP request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, shape: ErrorShape = openai_shape) -> None:
        self.scope, self.receive, self.send, self.shape = scope, receive, send, shape
        self.server: Server = scope["app"].state.server
        self.record: Record = scope.setdefault("dovetail.record", Record())
        self.fields: Sequence[str] = ()  # parameters that a `RequestError` may name
        self.renamed: Mapping[str, str] = {}
        self.started = False  # the answer's head is sent
        self.stream: EventStream | None = None
        self.jobs: Sequence[Job] = ()  # what the engine was given
        self.answer_id = ""
        self._held_bytes = 0  # of its body, until the prompt is made
        self._ticket: Ticket | None = None  # while the prompt is made
        self._body_bytes = 0
        self._client: str | None = None  # as the body names it
        self._parts: dict[str, Part] = {}  # by the engine's request id
        self.on_finished: Callable[[], None] = lambda: None  # called when the last part has ended, to write last events
        self._left = 0  # parts that haven't ended
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def engine(self) -> ServedEngine:
        return self.server.engine

    async def body(self, kind: type[T]) -> T:
        """Read the body as a msgspec struct. Raises `HttpError` 400 and what `received` does, and `RequestError` for lists that are too long."""
        most = self.server.settings.max_body_bytes
        too_large = HttpError(413, f"the body is larger than {most} bytes (max_body_bytes)", code="body_too_large")
        data = b"".join([part async for part in self.received(most, too_large)])
        self.fields = getattr(kind, "__struct_encode_fields__", ())
        body = decode(data, kind)
        check_counts(body, self.engine.facts.limits)
        self._body_bytes, self._client = len(data), getattr(body, "client", None)
        return body

    def received(self, most: int, too_large: HttpError, most_held: int | None = None) -> AsyncGenerator[bytes, None]:
        """Yield the body as it comes. `most_held`: the most bytes of it that stay in memory, if not all. Raises `HttpError` 408 if it takes too long,
        429 if bodies of all requests are too much, `too_large` if this one is, and `ClientGone`."""

        def hold(size: int) -> None:
            held = size if most_held is None else min(size, most_held)
            self.server.admission.bodies.take(held - self._held_bytes, self._held_bytes)
            self._held_bytes = held

        return receive_body(self.scope, self.receive, most, too_large, self.server.settings.body_timeout_s, hold)

    @property
    def client(self) -> Hashable:
        """The client whose share of what is prepared this request takes: told apart by API key, address and the body's `client`."""
        address = self.scope.get("client") or (None,)
        return self.scope.get("dovetail.key"), address[0], self._client

    async def prepared(self, work: Callable[[], T], *, given_template: bool = False) -> T:
        """Let the request in, and return what `work` makes of it in a thread, in its client's turn. `given_template`: it renders a chat template that
        came with the request. Raises `HttpError` 429, and 503 while the server drains; what `attended` raises; and what `work` does."""
        async with self._admitted():
            return await self.server.preparing.run(self.client, self._body_bytes, work, given_template=given_template)

    async def tokenized(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return prompts with texts tokenized one by one, unless they are short enough for the engine to do it. Raises what `prepared` does."""
        lengths = [len(content_of(prompt)) if is_text(prompt) else 0 for prompt in prompts]
        if sum(lengths) <= _SHORT:
            return list(prompts)
        async with self._admitted():
            preparing, engine = self.server.preparing, self.engine
            return [
                await preparing.run(self.client, length, partial(engine.tokenized, prompt)) if length else prompt
                for prompt, length in zip(prompts, lengths, strict=True)
            ]

    @asynccontextmanager
    async def _admitted(self) -> AsyncIterator[None]:
        """Let the request in, to wait for its prompt to be made: that takes time, too, and memory."""
        self.check_open()
        tokens = self._body_bytes // _CHARS_A_TOKEN
        self.server.admission.check(1, tokens)
        self._ticket = self.server.admission.enter(tokens)
        with self.server.preparing.admitted(self.client, self._body_bytes):
            async with self.attended():
                yield

    def check_open(self) -> None:
        """Raises `HttpError` 503 while the server drains."""
        if self.scope["app"].state.draining:
            raise HttpError(503, "the server is shutting down: it ends what is under way, and takes nothing new", code="draining")

    def _leave(self) -> None:
        self.server.admission.bodies.release(self._held_bytes)
        self._held_bytes = 0
        if self._ticket is not None:
            self._ticket.leave(begun=False)

    def check(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters, if they keep the engine's limits: before anything is made for each of `n` samples. Raises `RequestError`."""
        check_params(params, self.engine.facts.limits)
        return params

    @asynccontextmanager
    async def attended(self) -> AsyncIterator[None]:
        """Break off, with `ClientGone`, when the client goes away, and with `HttpError` 504 when the time is up. The body must have been read."""
        timeout_s = self.server.settings.request_timeout_s
        watch = asyncio.create_task(until_disconnected(self.receive))
        try:
            async with asyncio.timeout(timeout_s) as scope:
                watch.add_done_callback(lambda _: None if scope.expired() else _expire(scope))
                yield
        except TimeoutError:
            if watch.done():
                raise ClientGone from None
            raise HttpError(504, f"the request took longer than {timeout_s:g} s (request_timeout_s)", code="timeout") from None
        finally:
            watch.cancel()

    def begin_stream(self, error_event: str | None = None, shape: ErrorShape | None = None) -> EventStream:
        """Answer with events; give them to the stream before the jobs begin, or as their outputs come."""
        bound = self.server.settings.max_backlog_bytes
        self.stream = EventStream(self.scope, self._send, shape or self.shape, bound, self.server.outbox, error_event)
        return self.stream

    async def run(self, jobs: Sequence[Job], name: str) -> None:
        """Have the jobs done; of a stream, send it to its end. `name` begins their ids in the engine. Raises what `attended` does, and the error
        of the first job that fails before an event was written."""
        async with self.attended():
            tokens = [_tokens_of(job.prompt) for job in jobs]
            if self._ticket is None:  # else it was let in before
                self.check_open()
            self._leave()
            self.server.admission.check(len(jobs), sum(tokens))
            self._left = len(jobs)
            self.jobs, self.answer_id = jobs, name
            for index, (job, count) in enumerate(zip(jobs, tokens, strict=True)):
                job.part.ticket = self.server.admission.enter(count)
                job.part.meter = self.server.metrics.meter(job.fields.get("client"), job.params.n, self.record.began)
                self._parts[name if len(jobs) == 1 else f"{name}-{index}"] = job.part
            tasks = [asyncio.create_task(self._submit(request_id, job)) for request_id, job in zip(self._parts, jobs, strict=True)]
            try:
                if self.stream is not None:
                    await self.stream.serve()
                else:
                    await self._done
            finally:
                for task in tasks:
                    task.cancel()

    async def _submit(self, request_id: str, job: Job) -> None:
        try:
            await self.engine.submit(request_id, job.prompt, job.params, job.part, **job.fields)
        except Exception as error:
            if job.part.meter is not None:
                job.part.meter.refused()
            job.part.on_error(http_error(error, self.fields, self.renamed))

    def part_ended(self) -> None:
        """A part's last output has been taken."""
        self._left -= 1
        if not self._left:
            self.on_finished()
            if not self._done.done():
                self._done.set_result(None)
            if self.stream is not None:
                self.stream.end()

    def fail(self, error: DovetailError) -> None:
        """A part failed: so does the exchange."""
        error = http_error(error, self.fields, self.renamed)
        self.record.error = self.record.error or str(error)
        if self.stream is not None:
            self.stream.fail(error)
        elif not self._done.done():
            self._done.set_exception(error)

    def close(self) -> None:
        """Abort what is left in the engine, and note the numbers."""
        self._leave()
        if self.stream is not None:
            self.stream.stop_pings()
        parts, self._parts = self._parts, {}
        for request_id, part in parts.items():
            if not part.ended:
                self.engine.abort(request_id)
            if part.ticket is not None:
                part.ticket.leave(begun=False)
            if part.meter is not None:
                part.meter.ended("abort")
            self.record.prompt_tokens += part.prompt_tokens
            self.record.cached_tokens += part.cached_tokens
            self.record.completion_tokens += part.completion_tokens
        if self._done.done() and not self._done.cancelled():
            self._done.exception()  # seen

    async def reply(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Answer with JSON; bytes are JSON already."""
        data = value if isinstance(value, bytes) else orjson.dumps(value)
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
        head += [(name.lower().encode(), text.encode()) for name, text in (headers or {}).items()]
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": data})

    async def refuse(self, error: BaseException) -> None:
        """Answer with an error; amidst a stream, as its last event."""
        told = http_error(error, self.fields, self.renamed)
        self.record.error = self.record.error or told.message
        self.server.metrics.request_refused(told.status)
        if not self.started:
            await self.reply(told.body(self.shape), told.status, told.headers)
        elif self.stream is not None:
            self.stream.fail(told)
            await self.stream.finish()

    async def _send(self, message: Any) -> None:
        self.started = True
        await self.send(message)


def _expire(scope: asyncio.Timeout) -> None:
    try:
        scope.reschedule(asyncio.get_running_loop().time())
    except RuntimeError:  # it is over
        return


def _tokens_of(prompt: Prompt) -> int:
    """Number of a prompt's tokens, guessed from the length of a text that isn't tokenized."""
    if isinstance(prompt, TokenizedText):
        return len(prompt.token_ids)
    content = content_of(prompt)
    return len(content) // _CHARS_A_TOKEN + 1 if isinstance(content, str) else len(content)


def new_id(prefix: str) -> str:
    """Return an id that no other request has."""
    return f"{prefix}-{uuid.uuid4().hex}"


class Endpoint:
    """A route as a bare ASGI app around a function that answers an `Exchange`. `shape`: how the route's API words errors."""

    def __init__(self, handler: Callable[[Exchange], Awaitable[None]], shape: ErrorShape = openai_shape) -> None:
        self._handler, self._shape = handler, shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._shape)
        try:
            await self._handler(exchange)
        except (ClientGone, SlowReaderError) as error:
            exchange.record.gone = True
            exchange.record.error = "the reader was too slow" if isinstance(error, SlowReaderError) else None
        except Exception as error:
            exchange.close()
            await exchange.refuse(error)
        finally:
            exchange.close()
            if exchange.jobs and (tracing := exchange.server.tracing) is not None:
                tracing.export(exchange)
