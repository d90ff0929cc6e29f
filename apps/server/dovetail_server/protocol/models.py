"""Answers of `/v1/models`: the served models and adapters, in OpenAI's shape, or in Anthropic's for
clients of its API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from dovetail_server.errors import HttpError

# models of one page in Anthropic's API
_MOST = 1000
_DEFAULT = 20


class ServedModel(NamedTuple):
    """A model, or an adapter."""

    id: str
    root: str  # its path or name on disk
    parent: str | None  # the model that an adapter belongs to
    created: int
    max_model_len: int
    reads_images: bool = False


def openai_model(model: ServedModel) -> dict[str, Any]:
    """Return a model in OpenAI's shape, with additions of vLLM and OpenRouter (`architecture`)."""
    inputs = ["text", "image"] if model.reads_images else ["text"]
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "dovetail",
        "root": model.root,
        "parent": model.parent,
        "max_model_len": model.max_model_len,
        "architecture": {"input_modalities": inputs, "output_modalities": ["text"]},
    }


def openai_list(models: Sequence[ServedModel]) -> dict[str, Any]:
    """Return all models in OpenAI's shape."""
    return {"object": "list", "data": [openai_model(model) for model in models]}


def anthropic_model(model: ServedModel) -> dict[str, Any]:
    """Return a model in Anthropic's shape."""
    return {
        "type": "model",
        "id": model.id,
        "display_name": model.id,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len,
        "max_tokens": model.max_model_len,
    }


def anthropic_list(models: Sequence[ServedModel], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of models in Anthropic's shape. `query`: `limit`, `after_id` or `before_id`.
    Raises `HttpError`."""
    for name in query:
        if name not in ("limit", "after_id", "before_id"):
            raise HttpError(
                400, f"{name[:80]}: unknown parameter", param=name[:80], code="unknown_parameter"
            )
    if "after_id" in query and "before_id" in query:
        raise HttpError(
            400, "after_id and before_id contradict each other: give one of them", param="after_id"
        )
    limit = _limit(query.get("limit", str(_DEFAULT)))
    ids = [model.id for model in models]
    begin = 0
    end = len(models)
    if "after_id" in query:
        begin = _index(ids, "after_id", query) + 1
    elif "before_id" in query:
        end = _index(ids, "before_id", query)
        begin = max(0, end - limit)
    page = models[begin : min(end, begin + limit)]
    more = begin > 0 if "before_id" in query else begin + limit < end
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return {
        "data": [anthropic_model(model) for model in page],
        "has_more": more,
        "first_id": first,
        "last_id": last,
    }


def _limit(text: str) -> int:
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 5 else 0
    if not 1 <= limit <= _MOST:
        raise HttpError(
            400,
            f"limit: it must be a whole number from 1 to {_MOST}, got {text[:80]!r}",
            param="limit",
        )
    return limit


def _index(ids: Sequence[str], name: str, query: Mapping[str, str]) -> int:
    if query[name] not in ids:
        raise HttpError(400, f"{name}: there is no model {query[name][:80]!r}", param=name)
    return ids.index(query[name])
