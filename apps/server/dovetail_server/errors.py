"""Errors as HTTP answers: which status an error has, and how OpenAI's and Anthropic's clients want to read it. For routes and middleware."""

from __future__ import annotations

import errno
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dovetail.errors import DovetailError, EngineDeadError, MissingExtraError, ModelLoadError, RequestError, UnsupportedError, describe

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
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})  # files, processes or memory: there may be some again soon
RULE = re.compile(r"structured\b(\.[a-z_]+)?(?=:)")  # the name of an answer's rule, at the beginning of an error's text
_NAME = re.compile(r"[a-z][a-z0-9_]*(?:\[\d+\]|\.[a-z_]+)*")


class HttpError(DovetailError):
    """An error with its place in HTTP. `param` is the parameter that is wrong, `code` a word for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self, shape: ErrorShape) -> bytes:
        return json.dumps(shape(self)).encode()  # ASCII: a message may quote half a surrogate pair


ErrorShape = Callable[[HttpError], dict[str, Any]]


def openai_shape(error: HttpError) -> dict[str, Any]:
    """Return the error as OpenAI's API words it."""
    kind = _TYPES.get(error.status, ("server_error", ""))[0]
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def anthropic_shape(error: HttpError) -> dict[str, Any]:
    """Return the error as Anthropic's API words it."""
    kind = _TYPES.get(error.status, ("", "api_error"))[1]
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def speaks_anthropic(path: str) -> bool:
    """Return True if a path, which may begin with the server's `root_path`, is of Anthropic's API."""
    return "/v1/messages" in path


def http_error(error: BaseException, fields: Sequence[str] = (), renamed: Mapping[str, str] | None = None) -> HttpError:
    """Return any error as an `HttpError`. One that nobody expected is logged, and told without its text.

    `fields`: names of the request's parameters, of which a `RequestError` may speak. `renamed`: parameters that have another name in the API than in
    `SamplingParams` or the engine, by the engine's name.
    """
    if isinstance(error, HttpError):
        return error
    if (lack := lack_of(error)) is not None:
        return HttpError(503, f"the server is out of resources ({lack}): try again in a moment", code="overloaded", headers={"Retry-After": "1"})
    if isinstance(error, RequestError | UnsupportedError | MissingExtraError):
        message = str(error).partition("; install with: ")[0]  # clients can't
        param = _param_of(message, fields, renamed or {})
        if RULE.match(message) and param is not None:  # which clients have by many names
            message = RULE.sub(lambda _: param, message, count=1)
        refused = isinstance(error, RequestError)
        return HttpError(400 if refused else 501, message, param=param, code=None if refused else "unsupported")
    if isinstance(error, EngineDeadError):
        return HttpError(503, str(error), code="engine_dead")
    if isinstance(error, ModelLoadError):
        return HttpError(400, str(error), code="unsupported")
    if not isinstance(error, DovetailError):
        logger.error("an unexpected error in a request: %s", describe(error), exc_info=error)
        return HttpError(500, "the server failed to answer this request; its log says why", code="internal_error")
    return HttpError(500, str(error))


def lack_of(error: BaseException) -> str | None:
    """Return the operating system's words if an error, or its cause, says that it has no more files, processes or memory."""
    for one in (error, error.__cause__):
        if isinstance(one, OSError) and one.errno in _EXHAUSTED:
            return one.strerror
    return None


def _param_of(message: str, fields: Sequence[str], renamed: Mapping[str, str]) -> str | None:
    """The parameter that an error's text begins with; errors about the prompt say "prompt" somewhere in their first words."""
    named = _NAME.match(message)
    if named:
        head = re.split(r"[.\[]", named[0], maxsplit=1)[0]
        if head in renamed:
            return renamed[head]
        if head in fields:
            return named[0]
    return renamed.get("prompt", "prompt") if "prompt" in message.split(":")[0][:60] else None
