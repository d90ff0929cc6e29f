"""The engine as the HTTP side of the server sees it: `ServedEngine`, and the `Listener` that each request has.

Everything here is called in the event loop's thread. What is behind it, an engine in a thread or in a process of its own, routes don't know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dovetail.errors import DovetailError
from dovetail.front.chat import ChatFrontEnd
from dovetail.front.intake import IntakeFacts
from dovetail.front.prompts import Prompt
from dovetail.front.tokenizer import Tokenizer
from dovetail.request import RequestOutput
from dovetail.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Description of a started engine. The engine's process sends it to front ends."""

    model: str  # as the config names it
    intake: IntakeFacts  # limits, lengths and capabilities, against which requests are validated
    block_size: int  # tokens
    num_blocks: int
    parts: Mapping[str, str] = field(default_factory=dict)  # kind -> "distribution:name" of the component in use
    details: Mapping[str, Any] = field(default_factory=dict)  # the executor's choices: device, dtype, attention …


@dataclass(frozen=True, slots=True)
class Load:
    """The engine's load after a step, for admission, metrics and the page."""

    running: int = 0  # requests that hold blocks
    waiting: int = 0  # requests that have arrived and hold none
    held_blocks: int = 0  # in the tables of requests
    free_blocks: int = 0  # without K and V that a lookup may find
    cached_blocks: int = 0  # in no table, with K and V that a lookup may find


@dataclass(frozen=True, slots=True)
class DecidedStep:
    """The scheduler's decisions in one step, as numbers of requests, and what was computed."""

    index: int
    granted: int  # requests that got tokens
    prefill_tokens: int
    decode_tokens: int
    refused: int  # grants that the engine refused: no tokens, seats or blocks were left
    preempted: int
    rejected: int
    running: int  # after the step, as `waiting`
    waiting: int


@dataclass(frozen=True, slots=True)
class Decisions:
    """The decisions of the last steps, the oldest first."""

    scheduler: str  # "distribution:name"
    steps: tuple[DecidedStep, ...]


class Listener(Protocol):
    """A listener to one request. No method may block or raise."""

    @property
    def is_plain(self) -> bool:
        """True if it would rather have a token's text by `on_text`, where that is all there is to tell. Asked with each output."""

    def on_text(self, text: str) -> None:
        """Take the text of one more token, perhaps none: instead of an output that has nothing else to tell, of a request for one sample. Called only
        after an output, and before the last one."""

    def on_output(self, output: RequestOutput) -> None:
        """Take what is new since the last call: `text`, `token_ids` and `logprobs` of the samples that changed (deltas, several steps perhaps in
        one). The last output has `finished` set."""

    def on_error(self, error: DovetailError) -> None:
        """Take notice that nothing more comes, and why: the engine died, say. Not called after an abort or a last output."""


class ServedEngine(Protocol):
    """An engine that several clients use at once."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat(self) -> ChatFrontEnd: ...

    @property
    def load(self) -> Load: ...

    @property
    def default_params(self) -> SamplingParams:
        """The parameters of a request that leaves everything open (the model's `generation_config.json`)."""

    def tokenized(self, prompt: Prompt) -> Prompt:
        """Return a prompt of text with its token ids, any other as it is. Any thread may call it. Raises `RequestError`."""

    async def submit(self, request_id: str, prompt: Prompt, params: SamplingParams, listener: Listener, **fields: Any) -> None:
        """Give the engine a request. `params.output_kind` is taken as delta whatever it is. `fields` are those of `RequestFields`, and
        `extra`. A text is tokenized at once: give a long one `tokenized`.

        Raises `RequestError` if something is wrong with the request, `EngineDeadError` if the engine is dead. Cancelled, it leaves nothing behind.
        """

    def abort(self, request_id: str) -> None:
        """End a request: its listener hears nothing more. Does nothing for an unknown id, and raises nothing."""

    def decisions(self) -> Decisions | None:
        """Return what the scheduler decided lately, as far as that is known here, and ask the engine for news of it, twice a second at most. None: it
        hasn't answered yet. The engine notes the decisions of a few steps after each question."""

    def now(self) -> float:
        """Return the time in seconds on the engine's clock."""

    def check_health(self) -> None:
        """Raises `EngineDeadError` if the engine is dead, or if a step takes longer than its limit."""
