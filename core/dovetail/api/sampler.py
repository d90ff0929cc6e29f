"""The sampler: it turns logits into token ids, each row by its own parameters.

Noise is counter-based: a function of (seed, output position, vocabulary id) alone, never a stateful generator, so that neither row, batch,
preemption nor rank changes a seeded request's tokens. The history that penalties need lives in the executor's row state, on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from dovetail.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The sampling parameters of one request, with all defaults filled in. `dovetail.sampling_params.SamplingParams` says what each means.

    They are applied in this order: logit_bias; -inf for tokens outside allowed_token_ids, bad words and (before min_tokens) stop tokens;
    repetition, presence and frequency penalty; temperature; then top_k, top_p and min_p, each over the tokens that the one before kept.
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
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences whose last token is never sampled after the others
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # all tokens that end it (EOS included, unless ignored); never sampled before min_tokens
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # the keys that the request gives, all among `SamplerCapabilities.extra_args`, with the values of `extra_args_model`; lists have become tuples
    extra_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowHistory:
    """The tokens of all rows, on the device. A sampler only reads them; the executor updates them in place. Row indices are the core's."""

    token_ids: torch.Tensor  # [max_rows, max_len] int32: prompt, then generated tokens
    num_tokens: torch.Tensor  # [max_rows] int32: tokens known to the executor
    prompt_lens: torch.Tensor  # [max_rows] int32


@dataclass(frozen=True, slots=True)
class SamplerContext:
    """Constants that a sampler receives when it is made."""

    device: str
    vocab_size: int
    history: RowHistory


@dataclass(frozen=True, slots=True)
class SamplerCapabilities:
    """The features that a sampler declares. `cuda_graph`: it has `sample_captured`; without it no step is replayed as a CUDA graph.
    `cuda_graph_full`: it has `sample_fully_captured` as well. `extra_args_model`: a pydantic model that validates the values of a request's
    `extra_args` when it arrives, so that a wrong one is that request's error. It is asked only about requests that give some."""

    cuda_graph: bool = False
    logprobs: bool = True
    extra_args: tuple[str, ...] = ()  # keys of `SamplingParams.extra_args` that it understands: by default those of `extra_args_model`
    cuda_graph_full: bool = False
    extra_args_model: type[BaseModel] | None = None  # None: any plain value of a declared key reaches the sampler

    def __post_init__(self) -> None:
        if self.extra_args_model is not None and not self.extra_args:
            keys = tuple(field.alias or name for name, field in self.extra_args_model.model_fields.items())
            object.__setattr__(self, "extra_args", keys)


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Log-probabilities at n positions under the raw distribution. Column 0 is the token itself; the k likeliest follow, best first."""

    token_ids: torch.Tensor  # [n, 1 + k] int64
    logprobs: torch.Tensor  # [n, 1 + k] float32
    ranks: torch.Tensor  # [n] int64, rank of the token itself; 1 is the likeliest


@dataclass(frozen=True, slots=True)
class SampledTokens:
    token_ids: torch.Tensor  # [n] int64, on the device
    logprobs: TopLogprobs | None = None  # when a row asks for them, k = the most that one asks


class Sampler(ABC):
    """Made once an executor; `prepare`, then each step `update` and `sample`."""

    capabilities = SamplerCapabilities()
    options: BaseModel

    def __init__(self, options: BaseModel, context: SamplerContext) -> None:
        self.options, self.context = options, context

    @abstractmethod
    def prepare(self, max_rows: int) -> None:
        """Make all buffers, for `max_rows` rows."""

    @abstractmethod
    def update(self, removed: Sequence[int], added: Sequence[tuple[int, RowSampling]]) -> None:
        """Forget the rows `removed`, then let each row in `added` begin with its parameters (a row may be in both).

        If it raises, the executor calls it again for each row alone. A row that it refuses then begins with default parameters instead, and the
        row's request ends with the error. Only if that raises too does the engine end.
        """

    @abstractmethod
    def sample(self, logits: torch.Tensor, rows: torch.Tensor, host_rows: np.ndarray) -> SampledTokens:
        """Sample one token for each of `rows` [n] int64 (distinct; `host_rows` holds the same numbers) from logits [n, vocab_size] of any float
        dtype, which it may overwrite; nothing else that it is given. The result is the executor's until the sampler is called again.
        `context.history` has the rows' tokens, not yet those sampled here. The output position is num_tokens - prompt_lens."""

    def capturable(self, host_rows: np.ndarray) -> bool:
        """Return True if `sample_captured` gives each of these rows [n] all that `sample` would: its token and nothing more. By default False."""
        return False

    def sample_captured(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the token ids [n] int64 of `rows` [n] int64 in a way that a CUDA graph can record and replay for other rows: on the device alone,
        without the host looking at a result. Each replay reads the parameters where `update` put them, and the history as it is then.

        Some of `rows` may be `max_rows`, an index beyond all rows: padding, which gets any valid id. Raises `UnsupportedError` unless
        `capabilities.cuda_graph`.
        """
        raise UnsupportedError(f"sampler {type(self).__name__} can't be captured in a CUDA graph")

    def fully_capturable(self, host_rows: np.ndarray) -> bool:
        """Return True if `sample_fully_captured` gives each of these rows [n] all that `sample` would. Asked if `capturable` is False."""
        return False

    def sample_fully_captured(self, logits: torch.Tensor, rows: torch.Tensor) -> SampledTokens:
        """Do as `sample_captured` does, in separate, slower graphs, also with penalties and log-probabilities, say. The latter may have any number
        of columns; a row's columns beyond its own `RowSampling.logprobs` are undefined. Raises `UnsupportedError` unless
        `capabilities.cuda_graph_full`, and if the device lacks something that it needs: then `sample` samples such rows.
        """
        raise UnsupportedError(f"sampler {type(self).__name__} can't be captured in full in a CUDA graph")
