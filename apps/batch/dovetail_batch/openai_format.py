"""The input format of OpenAI's batch API (https://platform.openai.com/docs/guides/batch), a line per row:

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "…", "messages": […], "max_tokens": 100}}

Fields of the body that are sampling parameters are used. Others that would change the answer fail the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.checks import shown
from dovetail.cli.prompts import PARAMS_KEYS
from dovetail.errors import RequestError
from dovetail_batch.sources import Fields, Jsonl

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEYS = ("custom_id", "method", "url", "body")
NO_EFFECT = ("model", "user", "metadata", "store", "stream", "stream_options", "service_tier", "safety_identifier", "prompt_cache_key")


class OpenAIBatch(Jsonl):
    """A file in this format."""

    id_key = "custom_id"

    def __init__(self, path: Path, *, limited: bool) -> None:
        """`limited`: the job sets `max_tokens`; otherwise chats are limited by the model's length only, as with OpenAI."""
        super().__init__(path, {})
        self._limited = limited

    def convert(self, fields: Fields) -> Fields:
        return fields_of(fields, self._limited)


def fields_of(line: Mapping[str, Any], limited: bool) -> Fields:
    """Convert the fields of a line to a row's; `limited` as for `OpenAIBatch`. Raises `RequestError`."""
    for key in line:
        if key not in KEYS:
            raise RequestError(f"{key}: unknown key; OpenAI's format has {', '.join(KEYS)}")
    if not isinstance(name := line.get("custom_id"), str) or not name:
        raise RequestError(f"custom_id must be a non-empty string, got {shown(name)}")
    if line.get("method", "POST") != "POST":
        raise RequestError(f"method must be POST, got {shown(line['method'])}")
    if (url := line.get("url")) not in (CHAT, COMPLETIONS):
        raise RequestError(f"url must be {CHAT} or {COMPLETIONS}, got {shown(url)}")
    if not isinstance(body := line.get("body"), Mapping):
        raise RequestError(f"body must be an object, got {shown(body)}")
    return {"id": name, **(_chat(body, limited) if url == CHAT else _completion(body))}


def _chat(body: Mapping[str, Any], limited: bool) -> Fields:
    sampling = _sampling(body, "messages")
    if body.get("max_completion_tokens") is not None:
        sampling["max_tokens"] = body["max_completion_tokens"]
    elif "max_tokens" not in sampling and not limited:
        sampling["max_tokens"] = None
    top = sampling.pop("top_logprobs", 0)
    if (asked := sampling.pop("logprobs", False)) is not False:
        if asked is not True:
            raise RequestError(f"logprobs must be true or false, got {shown(asked)}")
        sampling["logprobs"] = top
    return {"messages": body.get("messages"), "sampling": sampling}


def _completion(body: Mapping[str, Any]) -> Fields:
    sampling = _sampling(body, "prompt")
    if not isinstance(prompt := body.get("prompt"), str | list) or (isinstance(prompt, list) and any(isinstance(one, str | list) for one in prompt)):
        raise RequestError(f"prompt must be one text or one list of token ids, got {shown(prompt)}")
    return {"prompt" if isinstance(prompt, str) else "token_ids": prompt, "sampling": sampling}


def _sampling(body: Mapping[str, Any], content: str) -> dict[str, Any]:
    """Return the sampling parameters, including those of chats that the caller converts."""
    if body.get("stream"):
        raise RequestError("stream: a job writes whole answers")
    sampling = {}
    for key, value in body.items():
        if key in (content, "max_completion_tokens", *NO_EFFECT) or value is None:
            continue
        if key not in (*PARAMS_KEYS, "top_logprobs"):
            raise RequestError(f"{key}: `dovetail batch` doesn't read it, and it would change the answer; /v1/batches of `dovetail serve` does")
        sampling[key] = value
    return sampling
