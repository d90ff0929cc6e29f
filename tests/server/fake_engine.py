"""`FakeEngine`: a `ServedEngine` with scripted answers, for tests of routes and for measuring only
the HTTP side."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.config.limits import Limits
from dovetail.end_reason import EndReason, FinishReason
from dovetail.errors import DovetailError, EngineDeadError, RequestError
from dovetail.front.chat import ChatFrontEnd
from dovetail.front.generation_config import GenerationDefaults
from dovetail.front.intake import Intake
from dovetail.front.intake_facts import IntakeFacts
from dovetail.front.media.facts import MediaFacts
from dovetail.front.media.prompts import ImagePrompt, MediaPrompt
from dovetail.front.pooling import PoolingIntake
from dovetail.front.prompts import Prompt, PromptSource, content_of
from dovetail.front.tokenizer import TokenizedText, Tokenizer
from dovetail.request.outputs import CompletionOutput, RequestOutput
from dovetail.request.request import RequestFields
from dovetail.request.sampling_params import SamplingParams
from dovetail_server.engine import EngineInfo, Listener, Load


@dataclass(slots=True)
class FakeRequest:
    """A request under way in a `FakeEngine`."""

    id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    listener: Listener
    fields: dict[str, Any]
    left: Iterator[str]
    sent: int = 0
    ended: set[int] = field(default_factory=set)  # samples
    digests: list[bytes] = field(default_factory=list)  # of its images

    def send(
        self,
        text: str,
        finish: FinishReason | None = None,
        *,
        sample: int = 0,
        stop_reason: str | int | None = None,
    ) -> None:
        """Give a sample one more token."""
        if finish is not None:
            self.ended.add(sample)
        self.sent += 1
        output = CompletionOutput(
            sample,
            text,
            (self.sent,),
            finish_reason=finish,
            stop_reason=stop_reason,
            end_reason=None if finish is None else EndReason(finish),
        )
        finished = len(self.ended) == self.params.n
        self.listener.on_output(
            RequestOutput(self.id, self.prompt, self.prompt_token_ids, [output], finished)
        )


class FakeEngine:
    """Answers each request with the same pieces of text, a token each: by itself
    (`paced=False`), or one for each call of `step`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        pieces: Sequence[str] = ("Hello", ",", " world"),
        *,
        paced: bool = False,
        finish: FinishReason = "stop",
        media: MediaFacts | None = None,
        max_model_len: int = 4096,
    ):
        self.pieces, self.paced, self.finish = pieces, paced, finish
        intake = IntakeFacts(
            Limits(),
            max_model_len,
            tokenizer.vocab_size,
            GenerationDefaults(),
            "fake",
            "fake",
            has_logprobs=False,
            has_masks=True,
            media=media,
        )
        self.info = EngineInfo("fake", intake, 16, 256)
        self._intake = Intake(intake, lambda: tokenizer, random.Random(0))
        self.tokenizer = tokenizer
        self.chat = ChatFrontEnd(
            tokenizer, Limits(), intake.max_model_len, images=self._intake.images
        )
        self.load = Load()
        self.requests: dict[str, FakeRequest] = {}  # under way
        self.submitted: list[FakeRequest] = []
        self.aborted: list[str] = []
        self.resets = 0
        self.failure: DovetailError | None = None
        self.adapters: dict[str, str] = {}
        self.refusal: DovetailError | None = None  # of the next requests
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pooling(self) -> PoolingIntake:
        raise RequestError("the fake can't pool")

    def source(self, prompts: Sequence[Prompt], *, cut: bool = False) -> PromptSource:
        contents = [content_of(prompt) for prompt in prompts]
        chars = [len(content) if isinstance(content, str) else 0 for content in contents]
        return PromptSource(
            chars, lambda part: [self.tokenized(prompt) for prompt in prompts[part]]
        )

    def with_images(
        self, prompt: ImagePrompt, *, cut: bool, wanted: Callable[[], bool]
    ) -> MediaPrompt:
        return self._intake.prompts.with_images(prompt, cut=cut, wanted=wanted)

    def tokenized(self, prompt: Prompt) -> Prompt:
        text, ids = _read(prompt, self.tokenizer)
        return prompt if text is None else TokenizedText(text, ids)

    async def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        listener: Listener,
        *,
        owner: int = 0,
        **fields: Any,
    ) -> None:
        self.check_health()
        if self.refusal is not None:
            raise self.refusal
        extra = fields.get("extra")
        given = {name: value for name, value in fields.items() if name != "extra"}
        self._intake.check(request_id, prompt, params, RequestFields(**given), extra)
        text, ids = _read(prompt, self.tokenizer)
        request = FakeRequest(request_id, text, ids, params, listener, fields, iter(self.pieces))
        if isinstance(prompt, MediaPrompt):
            request.digests = [item.digest for item in prompt.media]
        self.requests[request_id] = request
        self.submitted.append(request)
        self._notify()
        if not self.paced:
            task = asyncio.create_task(self._run(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """End the processes that prepare prompts."""
        self.chat.close()
        self._intake.close()

    def abort(self, request_id: str) -> None:
        if self.requests.pop(request_id, None) is not None:
            self.aborted.append(request_id)
            self._notify()

    async def load_adapter(self, name: str, path: str | None, within: str | None = None) -> None:
        self.check_health()
        if path is None:
            self.adapters.pop(name, None)
        else:
            self.adapters[name] = path

    async def reset_prefix_cache(self) -> None:
        self.check_health()
        self.resets += 1

    def now(self) -> float:
        return time.monotonic()

    def decisions(self) -> None:
        """Nothing: there is no scheduler."""

    def check_health(self) -> None:
        if self.failure is not None:
            raise self.failure

    def step(self) -> None:
        """Give every request its next token."""
        for request in list(self.requests.values()):
            self._advance(request)

    def die(self, reason: str = "a step failed") -> None:
        """Fail as an engine does whose process has ended."""
        self.failure = EngineDeadError(reason)
        requests, self.requests = self.requests, {}
        for request in requests.values():
            request.listener.on_error(EngineDeadError(reason))

    async def until_requests(self, number: int) -> None:
        """Wait until this many requests are active."""
        await self._until(lambda: len(self.requests) == number)

    async def until_aborted(self, number: int) -> None:
        """Wait until this many have been aborted."""
        await self._until(lambda: len(self.aborted) >= number)

    async def _until(self, condition: Any) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()

    async def _run(self, request: FakeRequest) -> None:
        while request.id in self.requests:
            await asyncio.sleep(0)
            self._advance(request)

    def _advance(self, request: FakeRequest) -> None:
        piece = next(request.left, None)
        for sample in range(request.params.n):
            if request.id not in self.requests:
                return
            if piece is None:
                request.send("", self.finish, sample=sample)
            else:
                limit = request.params.max_tokens
                done = limit is not None and request.sent // request.params.n + 1 >= limit
                request.send(piece, "length" if done else None, sample=sample)
        if len(request.ended) == request.params.n:
            self.requests.pop(request.id, None)
            self._notify()


def _read(prompt: Prompt, tokenizer: Tokenizer) -> tuple[str | None, Sequence[int]]:
    if isinstance(prompt, TokenizedText | MediaPrompt):
        return prompt.text, prompt.token_ids
    content = content_of(prompt)
    return (content, tokenizer.encode(content)) if isinstance(content, str) else (None, content)
