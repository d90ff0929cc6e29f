"""The engine as seen by the HTTP side: `ServedEngine`, and the `Listener` of each request.

Everything here is called by the event loop's thread. Routes don't know whether the engine runs in a
thread or in another process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dovetail.errors import DovetailError
from dovetail.request.pooling import PoolingParams
from dovetail.request.sampling_params import SamplingParams
from dovetail.serving import (
    ChatFrontEnd,
    ImagePrompt,
    IntakeFacts,
    MediaPrompt,
    PoolingIntake,
    Prompt,
    PromptSource,
    TierStats,
    Tokenizer,
)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Description of a started engine. The engine's process sends it to front ends."""

    model: str  # as the config names it
    intake: IntakeFacts  # limits, lengths and capabilities, against which requests are validated
    block_size: int  # tokens of the smallest block
    num_pages: int  # pages of the KV pool
    # kind -> "distribution:name" of the component in use
    parts: Mapping[str, str] = field(default_factory=dict)
    # the executor's choices: device, dtype, attention …
    details: Mapping[str, Any] = field(default_factory=dict)
    cache_groups: tuple[str, ...] = ()  # names: "full", "window 1024"
    allowed_plugins: tuple[str, ...] | None = None  # as in the config's `plugins`
    denied_plugins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """Load of the engine after a step, for admission, metrics and the page."""

    running: int = 0  # requests that hold blocks
    waiting: int = 0  # requests that have arrived and hold none
    held_pages: int = 0  # in the tables of requests
    free_pages: int = 0  # without reusable K and V
    cached_pages: int = 0  # in no table, with reusable K and V
    held_by_group: tuple[int, ...] = ()  # `held_pages` by cache group; empty: not told apart
    # since the engine's start, as all that follows: rows of steps that checked drafts
    draft_rows: int = 0
    draft_tokens: int = 0  # drafts that they checked
    accepted_drafts: tuple[int, ...] = ()  # accepted ones by position
    drafting_s: float = 0.0  # time that steps waited for the drafter
    tiers: TierStats | None = None  # of K and V beyond the device; None: there are none


@dataclass(frozen=True, slots=True)
class DecidedStep:
    """Counts of one step: the scheduler's decisions in requests, and computed tokens."""

    index: int
    granted: int  # requests granted tokens
    prefill_tokens: int
    decode_tokens: int
    refused: int  # grants refused for lack of tokens, sequences or pages
    preempted: int
    rejected: int
    running: int  # after the step, as `waiting`
    waiting: int


@dataclass(frozen=True, slots=True)
class Decisions:
    """Decisions of the latest steps, oldest first."""

    scheduler: str  # "distribution:name"
    steps: tuple[DecidedStep, ...]


class Listener(Protocol):
    """Listener to one request. Methods must not block or raise."""

    @property
    def is_plain(self) -> bool:
        """True to receive plain tokens through `on_text`. Read after each output."""

    def on_text(self, text: str, tokens: int) -> None:
        """Take the `text` of `tokens` new tokens, which may be empty. Called instead of `on_output`
        for a request of one sample if only its text has changed; never for the first output or the
        last."""

    def on_output(self, output: Any) -> None:
        """Take a `RequestOutput` with the deltas since the last call, perhaps of several steps:
        `text`, `token_ids` and `logprobs` of changed samples. The last output has `finished` set. A
        request that pools has one output, a `PoolingRequestOutput`."""

    def on_error(self, error: DovetailError) -> None:
        """Take the reason why no more output follows, such as the engine's death. Not called after
        an abort or the last output."""


class ServedEngine(Protocol):
    """An engine shared by concurrent clients."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat(self) -> ChatFrontEnd: ...

    @property
    def load(self) -> Load: ...

    @property
    def adapters(self) -> Mapping[str, str]:
        """The adapters that requests may name as their model: name -> path."""

    def source(self, prompts: Sequence[Prompt], *, cut: bool = False) -> PromptSource:
        """Return the source of the same prompts, tokenized, with their images prepared. `cut`:
        their parameters truncate them. Thread-safe. Raises `RequestError`."""

    def with_images(
        self, prompt: ImagePrompt, *, cut: bool, wanted: Callable[[], bool]
    ) -> MediaPrompt:
        """Return a prompt of `chat` with its images prepared. Blocks; thread-safe. `cut`: its
        parameters truncate it. `wanted`: False ends the work with a `RequestError`, as does what
        is wrong with an image."""

    @property
    def pooling(self) -> PoolingIntake:
        """Return the object that prepares prompts of pooling requests. Raises `RequestError` if the
        engine can't pool."""

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
        """Submit a request. Outputs are deltas, whatever `params.output_kind`. `owner`: hash of the
        client that sent it. `fields`: those of `RequestFields`, and `extra`. Text is tokenized in
        the calling thread: make long texts by `source` first.

        Raises `RequestError` for an invalid request, `EngineDeadError` if the engine is dead.
        Cancellation aborts the request.
        """

    def abort(self, request_id: str) -> None:
        """Abort a request; its listener isn't called again. Unknown ids are ignored. Raises
        nothing."""

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. Raises `EngineDeadError` if the engine is dead."""

    async def load_adapter(self, name: str, path: str | None, within: str | None = None) -> None:
        """Serve the adapter in the directory `path` under a name, or with None no longer; running
        requests keep theirs. `within`: the folder in which its files must be. Raises `RequestError`
        if it can't be used, `EngineDeadError` if the engine is dead."""

    def decisions(self) -> Decisions | None:
        """Return the scheduler's latest known decisions, and request newer ones, at most twice a
        second. None until the first response. The engine records the decisions of a few steps per
        request."""

    def now(self) -> float:
        """Return the engine clock's time in seconds."""

    def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine is dead or a step exceeds its time limit."""
