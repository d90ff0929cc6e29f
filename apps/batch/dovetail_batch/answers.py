"""Answers as plain values, as engines send them and as files have them.

    {"id": "a", "row": 1, "error": null, "prompt_tokens": 5, "outputs": [{"text": …, "token_ids": […], "finish_reason": "stop", …}]}

A failed row has an `error` and no outputs; an embedded one has an `embedding`, a list of numbers,
and no outputs. `form` ("prompt", "messages" or "token_ids") is the row's, for OpenAI's format.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from dovetail.request.outputs import CompletionOutput, TokenLogprobMap
from dovetail.request.pooling import PoolingOutput, PoolingRequestOutput
from dovetail_batch.rows import JobRow

Answer = dict[str, Any]
# writes the answers of one shard, in row order, to a file
Writer = Callable[[Sequence[Answer], Path], None]

KEYS = frozenset({"id", "row", "error", "prompt_tokens", "outputs"})  # that every answer has
FAILED = ("error", "rejected")  # finish reasons of samples without an answer
# of files, by format
SUFFIXES: Mapping[str, str] = MappingProxyType(
    {"jsonl": "jsonl", "parquet": "parquet", "openai": "jsonl"}
)


def answer_of(row: JobRow, output: Any) -> Answer:
    """Return the answer to a row whose request has finished."""
    if isinstance(output, PoolingRequestOutput):
        return _embedding(row, output)
    for sample in output.outputs:
        if sample.finish_reason in FAILED:
            return failure_of(
                row.number, row.id, f"{sample.finish_reason}: {sample.stop_reason}", row.form
            )
    answer: Answer = {
        "id": row.id,
        "row": row.number,
        "error": None,
        "prompt_tokens": len(output.prompt_token_ids),
        "outputs": [_sample(sample) for sample in output.outputs],
        "form": row.form,
    }
    if output.prompt_logprobs is not None:
        answer["prompt_logprobs"] = [
            None if position is None else _logprobs(position) for position in output.prompt_logprobs
        ]
    return answer


def _embedding(row: JobRow, output: PoolingRequestOutput[PoolingOutput]) -> Answer:
    if output.outputs is None:
        return failure_of(
            row.number, row.id, f"{output.finish_reason}: {output.stop_reason}", row.form
        )
    tokens = len(output.prompt_token_ids)
    embedding = output.outputs.data.tolist()
    return {
        "id": row.id,
        "row": row.number,
        "error": None,
        "prompt_tokens": tokens,
        "outputs": [],
        "embedding": embedding,
        "form": row.form,
    }


def failure_of(number: int, id: str | None, error: str, form: str = "prompt") -> Answer:
    """Return the answer to a row that failed."""
    return {
        "id": id,
        "row": number,
        "error": error,
        "prompt_tokens": 0,
        "outputs": [],
        "form": form,
    }


def output_tokens(answer: Answer) -> int:
    """Return the number of generated tokens."""
    return sum(len(sample["token_ids"]) for sample in answer["outputs"])


def writer_of(format: Literal["jsonl", "parquet", "openai"], model: str) -> Writer:
    """Return the writer of a format; `model` is the model's name in OpenAI's format. Raises
    `MissingExtraError`."""
    if format == "parquet":
        from dovetail_batch.parquet import check_installed, write_parquet

        check_installed()
        return write_parquet
    return partial(
        _write_lines, _without_form if format == "jsonl" else partial(_openai_line, model)
    )


def _sample(sample: CompletionOutput) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "text": sample.text,
        "token_ids": list(sample.token_ids),
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
    if sample.logprobs is not None:
        plain |= {
            "cumulative_logprob": sample.cumulative_logprob,
            "logprobs": [_logprobs(position) for position in sample.logprobs],
        }
    return plain


def _logprobs(position: TokenLogprobMap) -> dict[str, Any]:
    return {str(token): dataclasses.asdict(logprob) for token, logprob in position.items()}


def _write_lines(
    convert: Callable[[Answer], Mapping[str, Any]], answers: Sequence[Answer], path: Path
) -> None:
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for answer in answers:
            file.write(json.dumps(convert(answer), ensure_ascii=False) + "\n")


def _without_form(answer: Answer) -> Mapping[str, Any]:
    return {key: value for key, value in answer.items() if key != "form"}


def _openai_line(model: str, answer: Answer) -> Mapping[str, Any]:
    """Return an answer as a line of OpenAI's batch API
    (https://platform.openai.com/docs/guides/batch)."""
    line = {
        "id": f"batch_req_{answer['row']}",
        "custom_id": answer["id"],
        "response": None,
        "error": None,
    }
    if answer["error"] is not None:
        return {**line, "error": {"code": "request_failed", "message": answer["error"]}}
    if (embedding := answer.get("embedding")) is not None:
        tokens = answer["prompt_tokens"]
        data = [{"object": "embedding", "index": 0, "embedding": embedding}]
        told = {
            "object": "list",
            "data": data,
            "model": model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        return {**line, "response": {"status_code": 200, "request_id": line["id"], "body": told}}
    chat = answer.get("form") == "messages"
    made = output_tokens(answer)
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{answer['row']}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(index, sample, chat) for index, sample in enumerate(answer["outputs"])],
        "usage": {
            "prompt_tokens": answer["prompt_tokens"],
            "completion_tokens": made,
            "total_tokens": answer["prompt_tokens"] + made,
        },
    }
    return {**line, "response": {"status_code": 200, "request_id": line["id"], "body": body}}


def _choice(index: int, sample: Mapping[str, Any], chat: bool) -> Mapping[str, Any]:
    content = (
        {"message": {"role": "assistant", "content": sample["text"]}}
        if chat
        else {"text": sample["text"]}
    )
    return {"index": index, **content, "logprobs": None, "finish_reason": sample["finish_reason"]}
