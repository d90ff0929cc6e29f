"""Sampler: turns logits into token ids, each row by its own parameters.

Noise is counter-based: a function of (seed, output position, vocabulary id) only, never a stateful
generator. So a seeded request's tokens don't depend on its row, batch or rank, or on preemption.
The history that penalties need is in the executor's row state, on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from dovetail.api.graphs import GraphSupport
from dovetail.base.members import require_member

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """Sampling parameters of one request, with all defaults filled in.
    `dovetail.request.sampling_params.SamplingParams` documents each.

    They are applied in this order: logit_bias; -inf for tokens outside allowed_token_ids, bad words
    and (before min_tokens) stop tokens; repetition, presence and frequency penalty; logits
    processors; temperature; then top_k, top_p and min_p, each over the tokens that the previous one
    kept.
    """

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 64 bits
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    # token sequences; the last token is never sampled after the others
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    # tokens that end the output, including EOS unless ignored; never sampled before min_tokens
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # for the executor: see `Capacity.not_deterministic`
    deterministic: bool = False
    # keys that the request sets, all in `SamplerCapabilities.extra_args`, with values parsed by
    # `extra_args_model`; lists become tuples
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    # full names of the logits processors that the request asks for -> plain values of each one's
    # `Arguments`; not for the sampler
    logits_processors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRow:
    """A row to sample from, with the parameters of its request."""

    row: int
    sampling: RowSampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Positions at which a sampler samples one token each: line i is a row, after `ahead` drafts,
    which count as its tokens. Without drafts a row has one line, with `ahead` 0; with d drafts it
    has 1 + d neighbouring ones, with `ahead` 0, 1, ... d (see `dovetail.api.executor.Batch`)."""

    rows: torch.Tensor  # [n] int64; `max_rows`, an index beyond all rows, is padding
    ahead: torch.Tensor  # [n] int32

    def take(self, index: torch.Tensor | slice) -> Lines:
        """Return the lines at `index`, which selects from tensors [n]."""
        return Lines(rows=self.rows[index], ahead=self.ahead[index])


@dataclass(frozen=True, slots=True)
class RowHistory:
    """Tokens of all rows, on the device. A sampler only reads them; the executor updates them in
    place. Row indices are the core's."""

    # [max_rows + 1, max_len] int32: prompt, then generated tokens, then drafts
    token_ids: torch.Tensor
    # [max_rows + 1] int32: tokens known to the executor; the last row is padding
    num_tokens: torch.Tensor
    prompt_lens: torch.Tensor  # [max_rows + 1] int32

    def lengths(self, lines: Lines) -> torch.Tensor:
        """Return how many of its row's `token_ids` each line follows: [n] int32."""
        return self.num_tokens[lines.rows] + lines.ahead


@dataclass(frozen=True, slots=True)
class SamplerContext:
    """Constants passed to a sampler's constructor."""

    device: str
    vocab_size: int
    history: RowHistory
    max_drafts: int = 0  # most that `Lines.ahead` is


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerCapabilities:
    """Features that a sampler supports. `cuda_graph`: with `DECODE`, `sample` takes
    `Capture.TOKENS`; with `ALL`, `Capture.FULL` as well; otherwise no sampling is replayed as a
    CUDA graph. `logprobs`: `sample` returns the log-probabilities that rows request; without it,
    such requests are refused. `drafts`: lines with `ahead` above 0; without it, speculation is
    refused at load. `extra_args_model`: a pydantic model that validates a request's `extra_args` on
    arrival, so that an invalid value fails that request. It is used only for requests that set
    some. `processors`: `sample` takes a `process`, and with `GraphSupport.ALL` also one with
    `Capture.FULL`; without it, an engine with logits processors is refused at load."""

    cuda_graph: GraphSupport = GraphSupport.NONE
    logprobs: bool = False
    # supported keys of `SamplingParams.extra_args`; default: the fields of `extra_args_model`
    extra_args: tuple[str, ...] = ()
    drafts: bool = False
    # None: any plain value of a declared key reaches the sampler
    extra_args_model: type[BaseModel] | None = None
    processors: bool = False

    def __post_init__(self) -> None:
        require_member(self, "cuda_graph", GraphSupport)
        if self.extra_args_model is not None and not self.extra_args:
            keys = tuple(
                field.alias or name for name, field in self.extra_args_model.model_fields.items()
            )
            object.__setattr__(self, "extra_args", keys)


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Log-probabilities at n positions under the unmodified distribution. Column 0 is the token
    itself; the k most likely follow, best first."""

    token_ids: torch.Tensor  # [n, 1 + k] int64
    logprobs: torch.Tensor  # [n, 1 + k] float32
    ranks: torch.Tensor  # [n] int64, rank of the token itself; 1 is the most likely


@dataclass(frozen=True, slots=True)
class SampledTokens:
    token_ids: torch.Tensor  # [n] int64, on the device
    # if any row requests them; k is the largest number requested
    logprobs: TopLogprobs | None = None


class Capture(Enum):
    """Features that a CUDA graph of sampling supports. The executor records separate graphs for
    each, so that no step pays for features that its rows don't need. Later minor versions may add
    members, which a sampler gets only if its capabilities declare them."""

    TOKENS = "tokens"  # token ids only, e.g. with temperature and filters
    FULL = "full"  # everything that a graph can do, e.g. penalties, rules and log-probabilities too


Process = Callable[["torch.Tensor", int], None]
"""The logits processors and grammar masks of a step, as a function that changes logits in place.
Its arguments are contiguous float32 logits [m, vocab_size] and the index of the first of their m
neighbouring lines, so that a sampler may pass all lines at once or in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleInputs:
    """Inputs of `Sampler.sample`. Only the logits may be overwritten."""

    logits: torch.Tensor  # [n, vocab_size], of any float dtype
    lines: Lines  # [n]
    host_rows: np.ndarray | None = None  # [n], the values of `lines.rows`; None with a `capture`
    process: Process | None = None  # None: no logits are processed
    capture: Capture | None = None  # None: the work is launched


class Sampler(ABC):
    """Created once per executor; called `prepare` first, then in each step `update` and
    `sample`."""

    capabilities = SamplerCapabilities()
    options: BaseModel

    def __init__(self, options: BaseModel, context: SamplerContext) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def prepare(self, max_rows: int) -> None:
        """Allocate all buffers, for `max_rows` rows."""

    @abstractmethod
    def update(self, removed: Sequence[int], added: Sequence[SampledRow]) -> None:
        """Forget the rows `removed`, then start each row in `added` with its parameters (a row may
        be in both).

        If it raises, the executor calls it again for each row separately. A row that fails again
        gets default parameters instead, and its request ends with the error. The engine ends only
        if that call raises too.
        """

    @abstractmethod
    def sample(self, inputs: SampleInputs) -> SampledTokens:
        """Sample one token for each of `inputs.lines` [n]. The result is valid until the sampler is
        called again.

        The history of a line is `context.history.token_ids[row, :length]`, with its
        `context.history.lengths(lines)`; what follows isn't known yet. The output position, which
        noise depends on, is length - prompt_lens. A line's result is a function of its logits, its
        row's parameters and this history: no other line, of its row or another, changes it.

        With a `capture`, which `capabilities` declares, a CUDA graph may record the work and replay
        it for other lines: it consists of device operations only, with no synchronization with the
        host, and `host_rows` is None. Each replay reads the parameters where `update` stored them,
        and the history as it is then. Some lines may be padding; any valid id may be returned for
        them. Log-probabilities may have any number of columns; a row's columns beyond its own
        `RowSampling.logprobs` are undefined. Raises `UnsupportedError` for `FULL` if the device
        lacks a required feature: then such rows are sampled without a capture.

        A `process` is called exactly once for each line, with its logits after rules and penalties
        and before temperature. Log-probabilities remain those of the given logits. It is given only
        if `SamplerCapabilities.processors` is declared: in launched steps in which a row asks for a
        logits processor, and with `FULL`, in a graph of its own. The executor replays that graph
        for rows for which `capture_for` returns any capture.
        """

    def capture_for(self, host_rows: np.ndarray) -> Capture | None:
        """Return the cheapest capture with which `sample` returns all that it does without one for
        each of these rows [n], which may differ in what they need. None, the default: no capture
        does."""
        return None
