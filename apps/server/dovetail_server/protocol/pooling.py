"""Bodies of the endpoints that embed, classify and score: OpenAI's, vLLM's, and those of Jina and
Cohere to rank documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from dovetail.request.pooling import PoolingParams, Task
from dovetail.serving import Limits, Prompt, at_most, paired
from dovetail_server.engine import ServedEngine
from dovetail_server.errors import HttpError
from dovetail_server.protocol import advisory
from dovetail_server.protocol.advisory import Advisory
from dovetail_server.protocol.decoding import Only, given
from dovetail_server.protocol.openai_common import adapter_of

Texts = str | list[str]

HTTP_CALLS = {  # of clients, for each task: as `dovetail.front.pooling.PYTHON_CALLS`
    "embed": "/v1/embeddings makes embeddings",
    "token_embed": '/pooling with the task "token_embed" makes one for each token',
    "classify": "/classify returns the probabilities of its labels",
    "token_classify": '/pooling with the task "token_classify" returns them for each token',
    "score": "/v1/score compares texts",
    "embed_sparse": '/pooling with the task "embed_sparse" returns lexical weights',
}


class PoolingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters of all these endpoints."""

    ADVISORY: ClassVar[Sequence[Advisory]] = advisory.POOLING

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None
    priority: int | None = None
    client: str | None = None
    deadline_s: float | None = None
    cache_salt: str | None = None
    extra: dict[str, Any] | None = None

    # Without effect: see `advisory`
    user: str | None = None

    def params(self, **own: Any) -> PoolingParams:
        """Return the parameters of each request. `own`: those of one endpoint. Raises
        `RequestError`."""
        return PoolingParams(
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            use_activation=self.use_activation,
            **own,
        )

    def engine_fields(self, engine: ServedEngine) -> Mapping[str, Any]:
        """Return the keyword arguments of `ServedEngine.submit`."""
        deadline = None if self.deadline_s is None else engine.now() + self.deadline_s
        adapter = adapter_of(self.model, engine)
        return given(
            priority=self.priority,
            client=self.client,
            cache_salt=self.cache_salt,
            deadline=deadline,
            extra=self.extra,
            lora_request=adapter,
        )


class ClassifyRequest(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """Texts, or lists of token ids, to classify."""

    input: str | list[str | int | list[int]]

    def prompts(self, limits: Limits) -> list[Prompt]:
        """Return the prompts. Raises `HttpError`, and `RequestError` if there are too many."""
        if isinstance(self.input, str):
            return [self.input]
        kinds = set(map(type, self.input))
        if kinds == {int}:
            return [{"prompt_token_ids": self.input}]
        if len(kinds) != 1:
            raise HttpError(
                400,
                "input: it must be a text, token ids, or a non-empty list of one kind of these",
                param="input",
            )
        at_most("input: the number of texts", len(self.input), limits, "max_inputs")
        return [one if isinstance(one, str) else {"prompt_token_ids": one} for one in self.input]


class EmbeddingRequest(ClassifyRequest, kw_only=True, forbid_unknown_fields=True):
    """Texts, or lists of token ids, to embed."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    prompt_name: str | None = None


class PoolingRequest(EmbeddingRequest, kw_only=True, forbid_unknown_fields=True):
    """Texts, or lists of token ids, to do any of the model's tasks with."""

    task: Task | None = None


class ScoreRequest(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """Pairs of texts to score, under one of vLLM's names for the two sides."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    template: str | None = None

    def pairs(self, limits: Limits) -> list[tuple[str, str]]:
        """Return the pairs. Raises `HttpError` and `RequestError`."""
        sides = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"))
        named = [names for names in sides if any(getattr(self, name) is not None for name in names)]
        if len(named) != 1 or any(getattr(self, name) is None for name in named[0]):
            raise HttpError(
                400,
                "text_1: give text_1 and text_2, or queries and documents: a text, or a list of "
                "texts",
                param="text_1",
            )
        first, second = (getattr(self, name) for name in named[0])
        for name, side in zip(named[0], (first, second), strict=True):
            if isinstance(side, list):
                at_most(f"{name}: the number of texts", len(side), limits, "max_inputs")
        return paired(first, second, named[0])


class DocumentText(msgspec.Struct, forbid_unknown_fields=True):
    """A document as an object."""

    text: str


class RerankRequest(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """Documents to rank by their relevance to a query."""

    query: str
    documents: list[str | DocumentText]
    top_n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    return_documents: bool | None = None
    template: str | None = None

    # Only some values are supported
    max_tokens_per_doc: int | None = None
    max_chunks_per_doc: int | None = None
    rank_fields: list[str] | None = None

    def texts(self, limits: Limits) -> list[str]:
        """Return the documents. Raises `HttpError`, and `RequestError` if there are too many."""
        if not self.documents:
            raise HttpError(400, "documents: it must be a non-empty list", param="documents")
        at_most("documents: their number", len(self.documents), limits, "max_inputs")
        return [one if isinstance(one, str) else one.text for one in self.documents]


_WHOLE = "documents are scored whole; truncate_prompt_tokens cuts those that are too long"
ONLY = (
    Only("max_tokens_per_doc", (), _WHOLE),
    Only("max_chunks_per_doc", (1,), _WHOLE),
    Only("rank_fields", (["text"],), "a document is its text"),
)
