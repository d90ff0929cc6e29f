"""`Exchange`: one HTTP request and its answer; `Endpoint`: a route.

However an exchange ends (answered, rejected, client gone, task cancelled), it leaves nothing in the
engine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeVar

import orjson
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from dovetail.errors import DovetailError
from dovetail.request.outputs import RequestMetrics
from dovetail.request.pooling import PoolingParams
from dovetail.request.sampling_params import SamplingParams
from dovetail.request.structured import Structured
from dovetail.serving import (
    PROMPT_COST,
    ImagePrompt,
    MediaPrompt,
    Prompt,
    PromptSource,
    TokenizedText,
    at_most,
    check_counts,
    content_of,
)
from dovetail_server.admission import (
    BoundedReceive,
    HeldBody,
    HeldBytes,
    HeldImages,
    Ticket,
    body_too_large,
    receive_body,
)
from dovetail_server.answer_size import with_bounded_answer
from dovetail_server.batches.store import BatchStore
from dovetail_server.engine import Listener, ServedEngine
from dovetail_server.errors import (
    ErrorShape,
    HttpError,
    http_error,
    openai_shape,
)
from dovetail_server.json_parts import parts_of
from dovetail_server.models import Model, Models
from dovetail_server.preparing import SIZES, Preparing
from dovetail_server.protocol.advisory import HEADER, Advisory, ignored_fields
from dovetail_server.protocol.decoding import decode, unsupported
from dovetail_server.protocol.openai_common import GenerationFields, TokenCounts
from dovetail_server.request_meter import RequestMeter
from dovetail_server.settings import ServerSettings
from dovetail_server.streams import (
    ClientGone,
    EventStream,
    Outbox,
    SlowReaderError,
    until_disconnected,
)
from dovetail_server.tracing import RequestRecord, Tracing

logger = logging.getLogger("dovetail")

T = TypeVar("T")
G = TypeVar("G", bound=GenerationFields)

_IMAGE_CHARS = 2**16  # least cost of an image, in characters: one by URL has few of them
_CHARS_A_TOKEN = 4  # estimate for text that isn't tokenized yet
# characters that are tokenized in the event loop, where it is faster than in a thread
_SHORT = 2000
_TOKENS_A_TURN = 2**12  # of prompts that are submitted before the event loop serves others
SLICE = SIZES[0]  # characters that are tokenized at a time


@dataclass(frozen=True)
class Server:
    """Objects shared by all routes: `app.state.server`."""

    models: Models
    settings: ServerSettings
    preparing: Preparing
    bodies: HeldBytes
    images: HeldImages
    tracing: Tracing | None = None
    batches: BatchStore | None = None  # None: batches are disabled
    outbox: Outbox = field(default_factory=Outbox)
    # paths and advisory fields that the log has named
    ignored: set[tuple[str, str]] = field(default_factory=set)
    started_at: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970

    def check_health(self) -> None:
        """Raise `DovetailError` if all engines or a part of this front end are dead or hang."""
        self.models.check_health()
        self.outbox.check_health()


class CountingListener(Listener, Protocol):
    """A listener with the counts that an exchange records when it ends. `OutputListener` is one."""

    ticket: Ticket | None
    meter: RequestMeter | None
    ended: bool
    times: RequestMetrics | None  # updated as the request proceeds
    finish_reasons: list[str]

    @property
    def counts(self) -> TokenCounts: ...


class Exchange:
    """One HTTP request and its answer."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, shape: ErrorShape = openai_shape
    ) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.shape = shape
        self.server: Server = scope["app"].state.server
        self.served: Model = self.server.models.first  # until the body names another
        self.record: RequestRecord = scope.setdefault("dovetail.record", RequestRecord())
        self.fields: Sequence[str] = ()  # parameters of the body, which errors may name
        self.renamed: Mapping[str, str] = {}
        self.ignored: list[str] = []  # advisory fields of the body without effect
        self.started = False  # the response head has been sent
        self.stream: EventStream | None = None
        self._held = HeldBody(self.server.bodies)  # until the prompt is ready
        self._ticket: Ticket | None = None  # while the prompt is prepared
        self._body_bytes = 0
        self._image_bytes = 0  # of prepared images
        self._client: str | None = None  # from the body
        self._listeners: dict[str, CountingListener] = {}  # by the engine's request id
        # called after the last output, to write final events
        self.on_finished: Callable[[], None] = lambda: None
        self.prompt_copies = 1  # in the answer, if it repeats the prompt
        self._left = 0  # listeners that haven't ended
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def engine(self) -> ServedEngine:
        return self.served.engine

    @property
    def reads_images(self) -> bool:
        """True if prompts may have images."""
        return self.engine.info.intake.media is not None

    async def body(self, kind: type[T]) -> T:
        """Decode the body as a msgspec struct, and use the model that it names from here on.

        Raises `HttpError` 400, what `received` and `Models.named` raise, and `RequestError` for
        lists that are too long.
        """
        most = self.server.settings.max_body_bytes
        data = b"".join([part async for part in self.received(most, body_too_large(most))])
        self.fields = getattr(kind, "__struct_encode_fields__", ())
        self._body_bytes = len(data)
        body = await self.beside(partial(decode, data, kind, self.server.models.json_bounds))
        self.served = self.server.models.named(getattr(body, "model", None))
        check_counts(body, self.engine.info.intake.limits)
        self._client = getattr(body, "client", None)
        return body

    async def beside(self, work: Callable[[], T]) -> T:
        """Return the result of `work` on the body, beside the event loop if the body is large.

        Raises what `attended` and `work` raise.
        """
        if self._body_bytes <= SIZES[0]:
            return work()
        async with self.attended():
            return await self.server.preparing.decode(self.client, self._body_bytes, work)

    async def generation_body(self, kind: type[G]) -> tuple[G, str]:
        """Decode the body of a generating endpoint; return it and the model name for the answer.

        Raises what `body` and `ignore` do.
        """
        body = await self.body(kind)
        self.renamed = (
            body.renamed()
            if body.vllm_xargs is None
            else {**body.renamed(), "extra_args": "vllm_xargs"}
        )
        ignored = partial(ignored_fields, body, body.ADVISORY, images=self.reads_images)
        for one in await self.beside(ignored):
            self.ignore(one)
        return body, self.answering(body.model)

    def answering(self, name: str | None) -> str:
        """Return the model name for the answer, and note it. `name`: in the body."""
        model = self.record.model = name or self.served.names[0]
        return model

    def read_query(self) -> None:
        """Use the model that the query names. Raises as `Models.named` does."""
        name = QueryParams(self.scope["query_string"]).get("model")
        self.served = self.server.models.named(name)

    def ignore(self, one: Advisory) -> None:
        """Note an advisory field that has no effect.

        Raises `HttpError` 400 if the server's settings refuse it.
        """
        if one.hint and self.server.settings.advisory_fields == "refuse":
            raise unsupported(
                one.path,
                f"{one.reason}, so it has no effect, which this server refuses (advisory_fields: "
                "refuse)",
            )
        self.ignored.append(one.path)
        if (named := (self.scope["path"], one.path)) not in self.server.ignored:
            self.server.ignored.add(named)
            logger.warning("%s: %s has no effect: %s (said once)", *named, one.reason)

    def received(
        self, most: int, too_large: HttpError, most_held: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the body in chunks.

        `most_held`: the most bytes of it kept in memory, if not all. Raises `HttpError` 408 on
        timeout, 429 if the bodies of all requests exceed the limit, `too_large` if this one does,
        and `ClientGone`.
        """

        def hold(size: int) -> None:
            self._held.grow_to(size if most_held is None else min(size, most_held))

        timeout_s = self.server.settings.body_timeout_s
        return receive_body(
            BoundedReceive(self.scope, self.receive, most, too_large, timeout_s, hold)
        )

    @property
    def client(self) -> Hashable:
        """Key for fair sharing between clients: API key, address and the body's `client`."""
        address = self.scope.get("client") or (None,)
        return self.scope.get("dovetail.key"), address[0], self._client

    async def prepared(self, work: Callable[[], T], *, given_template: bool = False) -> T:
        """Admit the request, and return the result of `work`, run in a thread in its client's turn.

        `given_template`: it renders a chat template from the request. Raises `HttpError` 429, and
        503 while draining, what `attended` raises, and what `work` raises.
        """
        async with self._admitted(self._body_bytes):
            return await self.server.preparing.run(
                self.client, self._body_bytes, work, given_template=given_template
            )

    async def prompt_of(
        self,
        render: Callable[[], TokenizedText | ImagePrompt],
        image_chars: int,
        *,
        given_template: bool = False,
        cut: bool = False,
    ) -> TokenizedText | MediaPrompt:
        """Do the same as `prepared` with the function that renders a conversation, and prepare the
        images of its prompt.

        `image_chars`: how many characters of the body they are. `cut`: the request's parameters
        truncate the prompt.
        """
        preparing = self.server.preparing
        chars = max(0, self._body_bytes - image_chars)
        async with self._admitted(chars, image_chars):
            prompt = await preparing.run(self.client, chars, render, given_template=given_template)
            if isinstance(prompt, TokenizedText):
                return prompt
            count = len(prompt.images)
            gone = threading.Event()
            prepare = partial(
                self.engine.with_images, prompt, cut=cut, wanted=lambda: not gone.is_set()
            )
            with self.server.images.preparing(count):
                try:
                    cost = max(image_chars, _IMAGE_CHARS * count)
                    made = await preparing.with_images(self.client, cost, prepare)
                finally:
                    gone.set()
        self._hold_images(made)
        return made

    def _hold_images(self, prompt: MediaPrompt) -> None:
        """Account for the prepared images of a prompt until the exchange is closed. Raises
        `HttpError` 429."""
        size = sum(array.nbytes for item in prompt.media for array in item.tensors.values())
        self.server.images.take(size)
        self._image_bytes += size

    async def made(self, source: PromptSource) -> list[Prompt]:
        """Make prompts in slices, each in a thread in its client's turn; short ones are made here.

        The request is charged by the characters that are tokenized, however few its body has.
        Raises `RequestError` for more than one request may have, and what `prepared` raises.
        """
        limits = self.engine.info.intake.limits
        at_most(
            "the prompts: the characters of all together",
            source.total_chars,
            limits,
            "max_request_chars",
        )
        if source.cost <= _SHORT:
            return source.all()
        prompts: list[Prompt] = []
        async with self._admitted(source.cost):
            for part, cost in source.slices(SLICE):
                prompts += await self.server.preparing.run(
                    self.client, cost, partial(source.make, part)
                )
        return prompts

    @asynccontextmanager
    async def _admitted(self, size: int, image_size: int = 0) -> AsyncIterator[None]:
        """Admit the request while its prompt is prepared, which takes time and memory, too.

        `size` of its text, `image_size`: in bytes or characters.
        """
        self.check_open()
        tokens = size // _CHARS_A_TOKEN
        self.served.admission.check(1, tokens)
        self._ticket = self.served.admission.enter(tokens)
        with self.server.preparing.admitted(self.client, size, image_size):
            async with self.attended():
                yield

    def check_open(self) -> None:
        """Raise `HttpError` 503 while the server drains."""
        if self.scope["app"].state.draining:
            raise HttpError(
                503,
                "the server is shutting down: it finishes running requests, and takes no new ones",
                code="draining",
            )

    def _leave(self) -> None:
        self._held.release()
        if self._ticket is not None:
            self._ticket.leave(begun=False)

    def constrained(
        self, params: SamplingParams, param: str, rule: Structured | None
    ) -> SamplingParams:
        """Return the parameters with a rule, which the API's parameter `param` demands.

        Raises `RequestError`.
        """
        if rule is None:
            return params
        self.renamed = {**self.renamed, "structured": param}
        return replace(params, structured=rule)

    def check_samples(self, prompts: int, n: int) -> None:
        """Validate the number of samples before anything is allocated for each.

        Raises `RequestError`.
        """
        at_most(
            "n: the samples of all prompts together",
            prompts * n,
            self.engine.info.intake.limits,
            "max_samples",
        )

    @asynccontextmanager
    async def attended(self) -> AsyncIterator[None]:
        """Interrupt the block with `ClientGone` when the client disconnects, or `HttpError` 504 on
        timeout. The body must have been read."""
        timeout_s = self.server.settings.request_timeout_s
        watch = asyncio.create_task(until_disconnected(self.receive))
        try:
            async with asyncio.timeout(timeout_s) as scope:
                watch.add_done_callback(lambda _: None if scope.expired() else _expire(scope))
                yield
        except TimeoutError:
            if watch.done():
                raise ClientGone from None
            raise HttpError(
                504,
                f"the request took longer than {timeout_s:g} s (request_timeout_s)",
                code="timeout",
            ) from None
        finally:
            watch.cancel()

    def begin_stream(
        self, error_event: str | None = None, shape: ErrorShape | None = None
    ) -> EventStream:
        """Answer with server-sent events, which may be written before `run` and during it."""
        bound = self.server.settings.max_backlog_bytes
        self.stream = EventStream(
            self.scope, self._send, shape or self.shape, bound, self.server.outbox, error_event
        )
        return self.stream

    async def run(
        self,
        answer_id: str,
        params: SamplingParams | PoolingParams,
        fields: Mapping[str, Any],
        requests: list[tuple[Prompt, CountingListener]],
    ) -> None:
        """Submit a request for each prompt, and wait for their end; send a stream to its end.

        `answer_id` begins the request ids. `requests` is emptied: prompts with images are large.
        Raises what `attended` raises, and the error of the
        first request that fails before an event was written.
        """
        async with self.attended():
            tokens = [tokens_of(prompt) for prompt, _ in requests]
            if isinstance(params, SamplingParams):
                facts = self.engine.info.intake
                streamed = self.stream is not None
                params = with_bounded_answer(
                    params, tokens, facts, copies=self.prompt_copies, streamed=streamed
                )
            if self._ticket is None:  # otherwise it has been admitted already
                self.check_open()
            self._leave()
            self.served.admission.check(len(requests), sum(tokens))
            self._left = len(requests)
            self.record.answer_id, self.record.params = answer_id, params
            listeners = [listener for _, listener in requests]
            for index, (listener, count) in enumerate(zip(listeners, tokens, strict=True)):
                listener.ticket = self.served.admission.enter(count)
                listener.meter = self.served.metrics.meter(
                    fields.get("client"),
                    getattr(params, "n", 1),
                    self.record.began,
                    fields.get("lora_request"),
                )
                self._listeners[answer_id if len(requests) == 1 else f"{answer_id}-{index}"] = (
                    listener
                )
            submitting = asyncio.create_task(self._submit_all(requests, params, fields))
            try:
                if self.stream is not None:
                    await self.stream.serve()
                else:
                    await self._done
            finally:
                submitting.cancel()

    async def _submit_all(
        self,
        requests: list[tuple[Prompt, CountingListener]],
        params: SamplingParams | PoolingParams,
        fields: Mapping[str, Any],
    ) -> None:
        """Submit requests, a few in each turn of the event loop, which also serves others."""
        left = deque(requests)
        requests.clear()
        async with asyncio.TaskGroup() as group:
            cost = 0
            for request_id in list(self._listeners):
                prompt, listener = left.popleft()
                group.create_task(self._submit(request_id, prompt, params, listener, fields))
                cost += tokens_of(prompt) + PROMPT_COST
                if cost > _TOKENS_A_TURN:
                    cost = 0
                    await asyncio.sleep(0)

    async def _submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        listener: CountingListener,
        fields: Mapping[str, Any],
    ) -> None:
        try:
            await self.engine.submit(
                request_id, prompt, params, listener, owner=hash(self.client), **fields
            )
        except Exception as error:
            if listener.meter is not None:
                listener.meter.refused()
            listener.on_error(http_error(error, self.fields, self.renamed))

    def listener_ended(self) -> None:
        """Note that a listener has processed its last output."""
        self._left -= 1
        if not self._left:
            self.on_finished()
            if not self._done.done():
                self._done.set_result(None)
            if self.stream is not None:
                self.stream.end()

    def fail(self, error: DovetailError) -> None:
        """Fail the exchange, because one of its requests failed."""
        error = http_error(error, self.fields, self.renamed)
        self.record.error = self.record.error or str(error)
        if self.stream is not None:
            self.stream.fail(error)
        elif not self._done.done():
            self._done.set_exception(error)

    def close(self) -> None:
        """Abort unfinished requests in the engine, and update the record. Idempotent."""
        self._leave()
        self.server.images.release(self._image_bytes)
        self._image_bytes = 0
        if self.stream is not None:
            self.stream.stop_pings()
        record = self.record
        listeners = self._listeners
        self._listeners = {}
        for request_id, listener in listeners.items():
            if not listener.ended:
                self.engine.abort(request_id)
            if listener.ticket is not None:
                listener.ticket.leave(begun=False)
            if listener.meter is not None:
                listener.meter.ended("abort")
            record.add(listener.counts, listener.finish_reasons, listener.times)
        if self._done.done() and not self._done.cancelled():
            self._done.exception()  # marks it as retrieved

    async def reply(
        self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answer with JSON. Bytes are sent unchanged."""
        data = value if isinstance(value, bytes) else orjson.dumps(value)
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
        head += [(name.lower().encode(), text.encode()) for name, text in (headers or {}).items()]
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": data})

    async def reply_in_parts(self, value: Any) -> None:
        """Answer with JSON that is encoded part by part, at the pace of the reader.

        Other requests are served between parts. Raises what `attended` raises.
        """
        parts = parts_of(value)
        first = next(parts)
        second = next(parts, None)
        if second is None:
            await self.reply(first)
            return
        async with self.attended():
            await self._send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(b"content-type", b"application/json")],
                }
            )
            for part in chain((first, second), parts):
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
                await asyncio.sleep(0)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def refuse(self, error: BaseException) -> None:
        """Answer with an error; within a stream, as its last event."""
        told = http_error(error, self.fields, self.renamed)
        self.record.error = self.record.error or told.message
        self.served.metrics.request_refused(told.status)
        if not self.started:
            await self.reply(told.body(self.shape), told.status, told.headers)
        elif self.stream is not None:
            self.stream.fail(told)
            await self.stream.finish()

    async def _send(self, message: Any) -> None:
        if self.ignored and not self.started:
            message["headers"] = [*message["headers"], (HEADER, ", ".join(self.ignored).encode())]
        self.started = True
        await self.send(message)


def _expire(scope: asyncio.Timeout) -> None:
    try:
        scope.reschedule(asyncio.get_running_loop().time())
    except RuntimeError:  # it has ended
        return


def tokens_of(prompt: Prompt) -> int:
    """Return the number of a prompt's tokens, estimated for text that isn't tokenized."""
    if isinstance(prompt, TokenizedText | MediaPrompt):
        return len(prompt.token_ids)
    content = content_of(prompt)
    return len(content) // _CHARS_A_TOKEN + 1 if isinstance(content, str) else len(content)


def new_id(prefix: str) -> str:
    """Return a unique id."""
    return f"{prefix}-{uuid.uuid4().hex}"


class Endpoint:
    """ASGI app around a function that answers an `Exchange`. `shape`: the API's error format."""

    def __init__(
        self, handler: Callable[[Exchange], Awaitable[None]], shape: ErrorShape = openai_shape
    ) -> None:
        self._handler = handler
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._shape)
        try:
            await self._handler(exchange)
        except (ClientGone, SlowReaderError) as error:
            exchange.record.gone = True
            exchange.record.error = (
                "the reader was too slow" if isinstance(error, SlowReaderError) else None
            )
        except Exception as error:
            exchange.close()
            await exchange.refuse(error)
        finally:
            exchange.close()
            if (
                exchange.record.params is not None
                and (tracing := exchange.server.tracing) is not None
            ):
                tracing.export(exchange.scope, exchange.record, exchange.engine.now())
