"""`HttpError`, the mapping of exceptions to HTTP statuses, and the error formats of OpenAI's and
Anthropic's APIs."""

from __future__ import annotations

import errno
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from dovetail.end_reason import EndReason
from dovetail.errors import DovetailError, RequestError, describe
from dovetail.request.outputs import CompletionOutput
from dovetail.request.pooling import PoolingRequestOutput

logger = logging.getLogger("dovetail.server")

_TYPES = {  # status -> type in OpenAI's shape, in Anthropic's
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout_error", "timeout_error"),
    409: ("invalid_request_error", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    503: ("service_unavailable_error", "overloaded_error"),
    504: ("timeout_error", "timeout_error"),
}
STATUSES: Mapping[EndReason, tuple[int, str | None]] = {  # HTTP status and `code`
    EndReason.INVALID: (400, None),
    EndReason.GRAMMAR: (400, None),
    EndReason.GRAMMAR_LIMIT: (400, None),
    EndReason.ADAPTER: (400, "adapter_failed"),
    EndReason.QUEUE_FULL: (429, "too_many_requests"),
    EndReason.ERROR: (500, "request_failed"),
    EndReason.UNSUPPORTED: (501, "unsupported"),
    EndReason.ABORT: (503, "aborted"),
    EndReason.REJECTED: (503, "rejected"),
    EndReason.ENGINE_DEAD: (503, "engine_dead"),
}  # the other reasons are those of an answer
_END_TEXTS = {  # what a client is told of such an end
    EndReason.ABORT: "the request was aborted by the server",
    EndReason.ADAPTER: "model: {}",
    EndReason.REJECTED: "the scheduler rejected the request: {}",
    EndReason.ERROR: "the request failed: {}",
}
_RETRY = {"Retry-After": "1"}
# out of files, processes or memory, perhaps temporarily
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
# at the beginning of a message: the engine's name of structured-output parameters
RULE = re.compile(r"structured\b(\.[a-z_]+)?(?=:)")
# but its last name
_PATH = re.compile(
    r"(?<![\w#/.$…-])(?!//|/v\d/)/(?:[^\s/'\"`,;:()\[\]{}<>|]+/)+(?=([^\s/'\"`,;:()\[\]{}<>|]*))"
)
_NAME = re.compile(r"[a-z][a-z0-9_]*(?:\[\d+\]|\.[a-zA-Z0-9_-]+)*")


class HttpError(DovetailError):
    """An error with an HTTP status. `param`: the invalid parameter; `code`: machine-readable."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def told(self) -> str:
        """The message as clients get it: without paths of the server."""
        return without_paths(self.message)

    def response(self, path: str) -> Response:
        """Return the response in the format of the API at a path."""
        return Response(self.body(shape_for(path)), self.status, self.headers, "application/json")

    def body(self, shape: ErrorShape) -> bytes:
        return json.dumps(shape(self)).encode()  # ASCII, since a message may quote a lone surrogate


def without_paths(text: str) -> str:
    """Return a text with each absolute path of several names shortened to the last one.

    A client's paths are shortened, too, so the result doesn't reveal which exist. Paths of this
    server's API, which begin with /v1, stay.
    """
    return _PATH.sub("…/", text)


ErrorShape = Callable[[HttpError], dict[str, Any]]


def openai_shape(error: HttpError) -> dict[str, Any]:
    """Return the error in OpenAI's format."""
    kind = _TYPES.get(error.status, ("server_error", ""))[0]
    return {
        "error": {"message": error.told, "type": kind, "param": error.param, "code": error.code}
    }


def anthropic_shape(error: HttpError) -> dict[str, Any]:
    """Return the error in Anthropic's format."""
    kind = _TYPES.get(error.status, ("", "api_error"))[1]
    return {"type": "error", "error": {"type": kind, "message": error.told}}


def shape_for(path: str) -> ErrorShape:
    """Return the error format of the API at a path below the server's `root_path`."""
    return anthropic_shape if speaks_anthropic(path) else openai_shape


def speaks_anthropic(path: str) -> bool:
    """Return True for paths of Anthropic's API."""
    return "/v1/messages" in path


def http_error(
    error: BaseException, fields: Sequence[str] = (), renamed: Mapping[str, str] | None = None
) -> HttpError:
    """Convert any error to an `HttpError`.

    Unexpected ones are logged, and their text isn't disclosed.

    `fields`: names of the request's parameters, which a `RequestError` may mention. `renamed`:
    engine name -> API name of parameters that differ.
    """
    if isinstance(error, HttpError):
        return error
    if (lack := lack_of(error)) is not None:
        return HttpError(
            503,
            f"the server is out of resources ({lack}): try again in a moment",
            code="overloaded",
            headers=_RETRY,
        )
    if not isinstance(error, DovetailError):
        logger.error("unexpected error in a request: %s", describe(error), exc_info=error)
        return HttpError(
            500, "the server failed to answer this request; its log says why", code="internal_error"
        )
    status, code = STATUSES[error.reason]
    message = str(error).partition("; install with: ")[0]  # clients can't
    param = None
    if status in (400, 501):  # it is about the request
        param = _param_of(message, fields, renamed or {})
    if RULE.match(message) and param is not None:  # the APIs have several names for it
        message = RULE.sub(lambda _: param, message, count=1)
    headers = _RETRY if status == 429 else None
    return HttpError(status, message, param=param, code=code, headers=headers)


def error_of_end(end: CompletionOutput | PoolingRequestOutput[Any]) -> DovetailError | None:
    """Return the error of what ended without its answer; None for an end with one."""
    if (reason := end.end_reason) is None or reason not in STATUSES:
        return None
    return RequestError(_END_TEXTS.get(reason, "{}").format(end.stop_reason), reason)


def lack_of(error: BaseException) -> str | None:
    """Return the operating system's message if an error or its cause means that it is out of files,
    processes or memory."""
    for one in (error, error.__cause__):
        if isinstance(one, OSError) and one.errno in _EXHAUSTED:
            return one.strerror
    return None


def _param_of(message: str, fields: Sequence[str], renamed: Mapping[str, str]) -> str | None:
    """Return the parameter that a message begins with; messages about the prompt contain "prompt"
    before a colon."""
    named = _NAME.match(message)
    if named:
        head = re.split(r"[.\[]", named[0], maxsplit=1)[0]
        if head in renamed:
            return renamed[head]
        if head in fields:
            return named[0]
    return renamed.get("prompt", "prompt") if "prompt" in message.split(":")[0][:60] else None
