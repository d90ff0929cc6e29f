"""Logits processor: changes the logits of requests that ask for it, before a token is sampled.

`logits_processors` in `engine.yaml` lists those of an engine, in the order in which they are
applied. A request asks for some by name, with arguments for each:
`SamplingParams(logits_processors={"dry": {"multiplier": 0.8}})`. A step applies the masks of
grammars; the sampler's rules and penalties; the processors; the masks again; temperature and
filters; and then draws a token. So a processor sees -inf for tokens that can't be sampled, and
allows none of them. Log-probabilities are those of the unmodified logits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ValidationInfo

from dovetail.api.component import NoOptions
from dovetail.api.graphs import GraphSupport
from dovetail.api.sampler import Lines, RowHistory, RowSampling
from dovetail.base.members import require_member

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LogitsProcessorContext:
    """Constants passed to a processor's constructor."""

    device: str
    vocab_size: int
    history: RowHistory  # of all rows, on the device; only read
    max_drafts: int = 0  # most that `Lines.ahead` can be


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessorCapabilities:
    """Features that a processor supports. `cuda_graph`: with `ALL`, `apply` uses only operations
    that a CUDA graph can record and replay for other lines, with no synchronization with the host.
    Otherwise steps in which a row asks for the processor are sampled outside of graphs; `DECODE`
    adds none, since no processor is applied in its steps."""

    cuda_graph: GraphSupport = GraphSupport.NONE

    def __post_init__(self) -> None:
        require_member(self, "cuda_graph", GraphSupport)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedRow:
    """A row whose request asks for the processor."""

    row: int
    arguments: BaseModel  # of the processor's class `Arguments`
    # the request's other parameters: a processor that draws noise takes its `seed`
    sampling: RowSampling


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentContext:
    """Context that the engine passes to validators of `LogitsProcessor.Arguments`, as pydantic's
    `info.context`. With it they turn texts into ids, and compare ids with the vocabulary."""

    # a text -> its token ids, without special tokens; None: there is no tokenizer
    encode: Callable[[str], list[int]] | None
    vocab_size: int

    @classmethod
    def of(cls, info: ValidationInfo) -> ArgumentContext:
        """Return the context of a validator. Raises `ValueError` if there is none, which the engine
        never does."""
        if not isinstance(info.context, cls):
            raise ValueError("arguments are validated with context=ArgumentContext(...)")
        return info.context


class LogitsProcessor(ABC):
    """Created once per rank of the executor. `prepare` is called first; then in each step `update`
    if rows change, and `apply` if any row of the step asks for this processor."""

    Arguments: ClassVar[type[BaseModel]] = NoOptions
    """Model of a request's arguments. They are validated when the request arrives, with an
    `ArgumentContext` as the pydantic context; an error fails that request. The result is sent to
    the ranks as plain values (`model_dump`) and validated there again, without a tokenizer: a model
    must accept its own values."""

    capabilities: ClassVar[LogitsProcessorCapabilities] = LogitsProcessorCapabilities()
    options: BaseModel

    def __init__(self, options: BaseModel, context: LogitsProcessorContext) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def prepare(self, max_rows: int) -> None:
        """Allocate all buffers, for rows 0 to `max_rows` - 1 and `max_rows`, which is padding.
        Memory that `apply` allocates later is temporary."""

    @abstractmethod
    def update(self, removed: Sequence[int], added: Sequence[ProcessedRow]) -> None:
        """Forget the rows `removed`, which needn't be known, then start those in `added` (a row may
        be in both). Store what `apply` needs in fixed buffers on the device, such as a record per
        row.

        If it raises, it is called again for each row separately. A row that fails again is
        forgotten, and its request ends with the error.
        """

    @abstractmethod
    def apply(self, logits: torch.Tensor, lines: Lines) -> None:
        """Change logits [n, vocab_size] float32 of `lines` [n] in place.

        Lines of rows that didn't ask, and of padding, are among them, and must stay bitwise as they
        are. The history of a line is `context.history.token_ids[row, :length]`, where `length` is
        its entry of `context.history.lengths(lines)`; ignore what follows.

        What a line gets depends only on its logits, its row's arguments and sampling, and this
        history, not on other lines or earlier calls. So rejected drafts, preemption and replays
        need no undo.

        A request ends with an error if the largest logit of its line isn't finite after the last
        processor and the masks, or if this raises and the request asks for the processor.
        """
