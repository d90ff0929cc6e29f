"""The formats of answers' files: a `Writer` writes those of one shard, in the order of its rows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from dovetail_batch.answers import Answer, output_tokens

Writer = Callable[[Sequence[Answer], Path], None]
SUFFIXES: Mapping[str, str] = MappingProxyType({"jsonl": "jsonl", "parquet": "parquet", "openai": "jsonl"})  # by format


def writer_of(format: Literal["jsonl", "parquet", "openai"], model: str) -> Writer:
    """Return the writer of a format; `model` is the name that answers in OpenAI's format give. Raises `MissingExtraError`."""
    if format == "parquet":
        from dovetail_batch.parquet import check_installed, write_parquet

        check_installed()
        return write_parquet
    return partial(_write_lines, _as_it_is if format == "jsonl" else partial(_as_openai, model))


def _write_lines(convert: Callable[[Answer], Mapping[str, Any]], answers: Sequence[Answer], path: Path) -> None:
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for answer in answers:
            file.write(json.dumps(convert(answer), ensure_ascii=False) + "\n")


def _as_it_is(answer: Answer) -> Mapping[str, Any]:
    return {key: value for key, value in answer.items() if key != "form"}


def _as_openai(model: str, answer: Answer) -> Mapping[str, Any]:
    """Return the line of OpenAI's batch API (https://platform.openai.com/docs/guides/batch) for an answer."""
    line = {"id": f"batch_req_{answer['row']}", "custom_id": answer["id"], "response": None, "error": None}
    if answer["error"] is not None:
        return {**line, "error": {"code": "request_failed", "message": answer["error"]}}
    chat, made = answer.get("form") == "messages", output_tokens(answer)
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{answer['row']}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(index, sample, chat) for index, sample in enumerate(answer["outputs"])],
        "usage": {"prompt_tokens": answer["prompt_tokens"], "completion_tokens": made, "total_tokens": answer["prompt_tokens"] + made},
    }
    return {**line, "response": {"status_code": 200, "request_id": line["id"], "body": body}}


def _choice(index: int, sample: Mapping[str, Any], chat: bool) -> Mapping[str, Any]:
    content = {"message": {"role": "assistant", "content": sample["text"]}} if chat else {"text": sample["text"]}
    return {"index": index, **content, "logprobs": None, "finish_reason": sample["finish_reason"]}
