"""The server's OpenAPI document, generated from the structs of `OPERATIONS`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import orjson
from msgspec import Struct

from dovetail_server.protocol import chat, completions, messages, pooling, responses
from dovetail_server.protocol.adapters import LoadBody, UnloadBody
from dovetail_server.protocol.batches import Batch, CreateBatchRequest, FileObject
from dovetail_server.protocol.chat import ChatRequest
from dovetail_server.protocol.completions import CompletionRequest
from dovetail_server.protocol.decoding import Only
from dovetail_server.protocol.messages import (
    CountTokensRequest,
    ErrorAnswer,
    MessageAnswer,
    MessagesRequest,
    TokenCount,
    Tool,
)
from dovetail_server.protocol.openai_common import GenerationFields
from dovetail_server.protocol.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from dovetail_server.protocol.response_answer import ResponseAnswer
from dovetail_server.protocol.response_items import ITEMS
from dovetail_server.protocol.response_tools import KINDS
from dovetail_server.protocol.responses import ResponsesRequest
from dovetail_server.protocol.tokenize import DetokenizeRequest, TokenizeRequest

_REASONS = {
    200: "The answer",
    400: "The request is invalid; the message says why",
    401: "The API key is missing or invalid",
    403: "Not allowed: sent by a page of another site, or to an unknown host name: for servers "
    "without API keys",
    404: "The model isn't served here",
    408: "The body took too long",
    409: "The object is in use, or has ended",
    413: "The body is too large",
    429: "Too many requests are waiting, or too many bodies are being received; see `Retry-After`",
    500: "The server failed",
    501: "The server lacks a capability, such as a grammar backend",
    503: "The engine is dead or hangs, or the server is shutting down or out of resources",
    504: "The request took too long",
    507: "The storage is full",
}
# parameters of which only some values are supported
ONLY: Mapping[type[Struct], Sequence[Only]] = {
    ChatRequest: chat.ONLY,
    CompletionRequest: completions.ONLY,
    ResponsesRequest: responses.ONLY,
    MessagesRequest: messages.ONLY,
    CountTokensRequest: messages.ONLY,
    RerankRequest: pooling.ONLY,
}
_IN_PATH = re.compile(r"{(\w+)}")  # path parameters
_TAKES_BODY = (400, 404, 408, 413, 429, 500, 503)
_GENERATES = (*_TAKES_BODY, 501, 504)
_UPLOADS = (400, 404, 408, 413, 429, 503, 507)


class OpenAIErrorDetail(Struct):
    """An error. `param`: the invalid parameter; `code`: machine-readable."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(Struct):
    """An error in OpenAI's format."""

    error: OpenAIErrorDetail


@dataclass(frozen=True)
class Operation:
    """One endpoint. `answer` None: an object without schema; `errors`: statuses besides 200, 401
    and 403."""

    method: str
    path: str
    summary: str
    tag: str
    request: type[Struct] | None = None
    answer: type[Struct] | str | None = None  # a string: a media type other than JSON
    errors: tuple[int, ...] = ()
    streams: bool = False
    error_shape: type[Struct] = OpenAIError
    needs_key: bool = True


OPERATIONS = (
    Operation(
        "post",
        "/v1/completions",
        "Continue a text",
        "OpenAI",
        CompletionRequest,
        errors=_GENERATES,
        streams=True,
    ),
    Operation(
        "post",
        "/v1/chat/completions",
        "Continue a conversation",
        "OpenAI",
        ChatRequest,
        errors=_GENERATES,
        streams=True,
    ),
    Operation(
        "post",
        "/v1/responses",
        "Continue a conversation of items",
        "OpenAI",
        ResponsesRequest,
        ResponseAnswer,
        _GENERATES,
        streams=True,
    ),
    Operation(
        "post", "/v1/embeddings", "Embed texts", "OpenAI", EmbeddingRequest, errors=_GENERATES
    ),
    *(
        Operation("post", path, "Score pairs of texts", "Scores", ScoreRequest, errors=_GENERATES)
        for path in ("/v1/score", "/score")
    ),
    *(
        Operation(
            "post",
            path,
            "Rank documents by their relevance to a query",
            "Scores",
            RerankRequest,
            errors=_GENERATES,
        )
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    ),
    Operation("post", "/classify", "Classify texts", "Scores", ClassifyRequest, errors=_GENERATES),
    Operation(
        "post",
        "/v1/classify",
        "Another name of /classify",
        "Scores",
        ClassifyRequest,
        errors=_GENERATES,
    ),
    Operation(
        "post", "/pooling", "Pool the states of texts", "Scores", PoolingRequest, errors=_GENERATES
    ),
    Operation("get", "/v1/models", "List the models", "OpenAI"),
    Operation("get", "/v1/models/{model}", "Describe a model", "OpenAI", errors=(404,)),
    Operation(
        "post",
        "/v1/messages",
        "Continue a conversation",
        "Anthropic",
        MessagesRequest,
        MessageAnswer,
        _GENERATES,
        True,
        ErrorAnswer,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count a conversation's tokens",
        "Anthropic",
        CountTokensRequest,
        TokenCount,
        _TAKES_BODY,
        error_shape=ErrorAnswer,
    ),
    Operation(
        "post",
        "/v1/files",
        "Upload a file of requests (a form with `purpose` and `file`)",
        "Batches",
        answer=FileObject,
        errors=_UPLOADS,
    ),
    Operation("get", "/v1/files", "List the files", "Batches", errors=(400, 404)),
    Operation(
        "get", "/v1/files/{file}", "Describe a file", "Batches", answer=FileObject, errors=(404,)
    ),
    Operation("delete", "/v1/files/{file}", "Delete a file", "Batches", errors=(404, 409)),
    Operation(
        "get",
        "/v1/files/{file}/content",
        "Get a file",
        "Batches",
        answer="application/octet-stream",
        errors=(404,),
    ),
    Operation(
        "post",
        "/v1/batches",
        "Create a batch of requests",
        "Batches",
        CreateBatchRequest,
        Batch,
        (*_TAKES_BODY, 507),
    ),
    Operation("get", "/v1/batches", "List the batches", "Batches", errors=(400, 404)),
    Operation(
        "get", "/v1/batches/{batch}", "Describe a batch", "Batches", answer=Batch, errors=(404,)
    ),
    Operation(
        "delete",
        "/v1/batches/{batch}",
        "Delete a finished batch and its answers",
        "Batches",
        errors=(404, 409),
    ),
    Operation(
        "post",
        "/v1/batches/{batch}/cancel",
        "Cancel a batch",
        "Batches",
        answer=Batch,
        errors=(404, 409, 507),
    ),
    Operation(
        "post",
        "/tokenize",
        "Tokenize a text or a conversation",
        "Tokens",
        TokenizeRequest,
        errors=_TAKES_BODY,
    ),
    Operation(
        "post", "/detokenize", "Decode tokens", "Tokens", DetokenizeRequest, errors=_TAKES_BODY
    ),
    Operation("get", "/tokenizer_info", "Describe the tokenizer", "Tokens"),
    Operation(
        "get",
        "/health",
        "Check whether the server works",
        "Service",
        errors=(503,),
        needs_key=False,
    ),
    Operation(
        "get", "/ping", "Check whether the server works", "Service", errors=(503,), needs_key=False
    ),
    Operation(
        "post", "/reset_prefix_cache", "Empty the prefix cache", "Service", errors=(400, 403, 503)
    ),
    Operation(
        "post",
        "/v1/load_lora_adapter",
        "Serve an adapter",
        "Service",
        LoadBody,
        errors=(400, 403, 503),
    ),
    Operation(
        "post",
        "/v1/unload_lora_adapter",
        "Serve an adapter no longer",
        "Service",
        UnloadBody,
        errors=(400, 403, 404, 503),
    ),
    Operation("get", "/load", "Count the requests that run or wait", "Service"),
    Operation(
        "get",
        "/ready",
        "Check whether requests are accepted",
        "Service",
        errors=(503,),
        needs_key=False,
    ),
    Operation("get", "/version", "Describe the server and its components", "Service"),
    Operation("get", "/openapi.json", "Describe the endpoints", "Service"),
)


@lru_cache(maxsize=8)
def document(*, paths: frozenset[str], version: str, root_path: str, has_keys: bool) -> bytes:
    """Return the OpenAPI document of the operations at `paths` as JSON. It is made once, since that
    takes as long as many requests. `has_keys`: the server requires API keys."""
    operations = [operation for operation in OPERATIONS if operation.path in paths]
    schemas, components = _schemas(operations)
    described: dict[str, dict[str, Any]] = {}
    for operation in operations:
        described.setdefault(operation.path, {})[operation.method] = _described(
            operation, schemas, has_keys
        )
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Dovetail", "version": version},
        "servers": [{"url": root_path or "/"}],
        "paths": described,
        "components": {"schemas": components},
    }
    if has_keys:
        bearer = {"type": "http", "scheme": "bearer"}
        header = {"type": "apiKey", "in": "header", "name": "x-api-key"}
        made["components"]["securitySchemes"] = {"bearer": bearer, "x_api_key": header}
    return orjson.dumps(made)


def _schemas(
    operations: Sequence[Operation],
) -> tuple[Mapping[type[Struct], Any], Mapping[str, Any]]:
    """Return references to the operations' structs, and the components that they refer to."""
    # which requests reference by name
    structs: dict[type[Struct], None] = dict.fromkeys((*ITEMS.values(), *KINDS.values(), Tool))
    for operation in operations:
        used = (operation.request, operation.answer, operation.error_shape)
        structs |= dict.fromkeys(kind for kind in used if isinstance(kind, type))
    references, components = msgspec.json.schema_components(
        structs, ref_template="#/components/schemas/{name}"
    )
    for kind in structs:
        if issubclass(kind, GenerationFields | PoolingFields):
            properties = components[kind.__name__]["properties"]
            ignored = {
                field.path: field.reason
                for field in kind.ADVISORY
                if field.path in properties and not field.steers
            }
            properties |= {
                name: {**properties[name], "description": f"Without effect: {reason}"}
                for name, reason in ignored.items()
            }
    for kind, table in ONLY.items():
        if kind in structs:
            components[kind.__name__]["properties"] |= {
                name: _only(values, reason) for name, values, reason in table
            }
    return dict(zip(structs, references, strict=True)), components


def _only(values: Sequence[Any], reason: str) -> dict[str, Any]:
    """Return the schema of a parameter with a limited set of supported values."""
    return {
        "enum": [None, *values],
        "default": None,
        "description": reason[:1].upper() + reason[1:],
    }


def _described(
    operation: Operation, schemas: Mapping[type[Struct], Any], has_keys: bool
) -> dict[str, Any]:
    turned_away = 401 if operation.needs_key else 200
    statuses = sorted({200, *operation.errors, turned_away if has_keys else 403})
    described: dict[str, Any] = {
        "summary": operation.summary,
        "tags": [operation.tag],
        "operationId": f"{operation.method}{operation.path}".replace("/", "_")
        .replace("{", "")
        .replace("}", "")
        .replace(".", "_"),
        "responses": {str(status): _response(operation, status, schemas) for status in statuses},
    }
    if operation.request is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schemas[operation.request]}},
        }
    if named := _IN_PATH.findall(operation.path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in named
        ]
    if has_keys and operation.needs_key:
        described["security"] = [{"bearer": []}, {"x_api_key": []}]
    return described


def _response(
    operation: Operation, status: int, schemas: Mapping[type[Struct], Any]
) -> dict[str, Any]:
    answer = operation.answer if status == 200 else operation.error_shape
    content: dict[str, Any]
    if isinstance(answer, str):
        content = {answer: {"schema": {"type": "string"}}}
    else:
        content = {
            "application/json": {
                "schema": {"type": "object"} if answer is None else schemas[answer]
            }
        }
    if status == 200 and operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"description": _REASONS[status], "content": content}
