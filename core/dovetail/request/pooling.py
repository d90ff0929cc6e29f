"""`PoolingParams`: what to make of the states of a prompt; and the results of requests that have
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

from dovetail.base.checks import plain_integer
from dovetail.errors import RequestError, shown
from dovetail.request.sampling_params import check_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from dovetail.end_reason import EndReason, FinishReason
    from dovetail.request.outputs import RequestMetrics

Task = Literal["embed", "classify", "score", "token_embed", "token_classify", "embed_sparse"]
TASKS = ("embed", "classify", "score", "token_embed", "token_classify", "embed_sparse")


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Parameters of a request that ends with its prompt.

    Checked when made: a wrong value raises `RequestError`.
    """

    task: Task | None = None  # None: what the model is made for
    dimensions: int | None = None  # of an embedding: that many leading numbers, then normalized
    # False: neither normalize an embedding nor turn scores into probabilities; None: True
    use_activation: bool | None = None
    # keep the prompt's first k tokens, with the special ones at its end; -1: as many as fit
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in TASKS:
            raise RequestError(
                f"task must be one of {', '.join(TASKS)}, or None, got {shown(self.task)}"
            )
        for name, low in (("dimensions", 1), ("truncate_prompt_tokens", -1)):
            value: Any = getattr(self, name)
            number = 1 if value is None else plain_integer(value)
            if number is None or number < low or number == 0:
                raise RequestError(
                    f"{name} must be an integer of 1 or more, or "
                    f"{'-1 or ' if low < 0 else ''}None, got {shown(value)}"
                )
        if self.use_activation is not None and type(self.use_activation) is not bool:
            raise RequestError(
                f"use_activation must be true, false or None, got {shown(self.use_activation)}"
            )

    @classmethod
    def of(cls, named: Mapping[str, Any]) -> PoolingParams:
        """Make parameters of names and values from outside.

        Raises `RequestError` for an unknown name, too, with the one that may be meant.
        """
        check_names(named, cls.__match_args__, "pooling")
        return cls(**named)


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """A result as it is: `data` [size], or [tokens, size] of tasks for each token, or [n] of the
    task "embed_sparse"."""

    data: NDArray[np.float32]
    # [tokens] int32: the tokens that `data` is of, if they aren't all of the prompt, in order; [n]
    # of "embed_sparse": those with a weight, ascending
    token_ids: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(frozen=True, slots=True)
class SparseEmbeddingOutput:
    # a token's id -> its weight, more than 0; all others have 0
    weights: dict[int, float]


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    probs: list[float]  # of each label


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    score: float


Output = TypeVar("Output")


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Output]):
    """The result of one request that pools, given once.

    `outputs` is None if it failed, was rejected or aborted: `finish_reason` says which.
    """

    request_id: str
    outputs: Output | None
    prompt_token_ids: Sequence[int]
    finished: bool = True
    num_cached_tokens: int = 0
    prompt: str | None = None
    finish_reason: FinishReason | None = None  # "stop": it is complete
    stop_reason: int | str | None = None  # why it failed or was rejected
    metrics: RequestMetrics | None = None
    prompt_index: int = 0  # index of its prompt in the list that `LLM` was given
    end_reason: EndReason | None = None  # `finish_reason` in detail

    @classmethod
    def from_base(cls, base: PoolingRequestOutput[PoolingOutput]) -> Self:
        """Return the output of a request that pooled one vector, with that as this class has it."""
        shared = {name: getattr(base, name) for name in _NAMES}
        return cls(
            **{**shared, "outputs": None if base.outputs is None else cls._read(base.outputs)}
        )

    @classmethod
    def _read(cls, output: PoolingOutput) -> Any:
        return output


_NAMES = tuple(one.name for one in fields(PoolingRequestOutput))


@dataclass(slots=True)
class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The embedding of a prompt."""

    @classmethod
    def _read(cls, output: PoolingOutput) -> EmbeddingOutput:
        return EmbeddingOutput(output.data.tolist())


@dataclass(slots=True)
class SparseEmbeddingRequestOutput(PoolingRequestOutput[SparseEmbeddingOutput]):
    """The lexical weights of a prompt."""

    @classmethod
    def _read(cls, output: PoolingOutput) -> SparseEmbeddingOutput:
        ids = () if output.token_ids is None else output.token_ids.tolist()
        return SparseEmbeddingOutput(dict(zip(ids, output.data.tolist(), strict=True)))


@dataclass(slots=True)
class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The probabilities of a classifier's labels."""

    @classmethod
    def _read(cls, output: PoolingOutput) -> ClassificationOutput:
        return ClassificationOutput(output.data.tolist())


@dataclass(slots=True)
class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The score of a pair of texts."""

    @classmethod
    def _read(cls, output: PoolingOutput) -> ScoringOutput:
        return ScoringOutput(float(output.data[0]))
