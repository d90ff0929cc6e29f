"""Answers as plain values, the form in which they go from an engine's process to the files of a job.

    {"id": "a", "row": 1, "error": null, "prompt_tokens": 5, "outputs": [{"text": …, "token_ids": […], "finish_reason": "stop", …}]}

A row that failed has an `error`, and no outputs. `form` tells whether the row was a prompt, messages or token ids, for OpenAI's format.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from dovetail.request import CompletionOutput, RequestOutput, TokenLogprobMap
from dovetail_batch.rows import Row

Answer = dict[str, Any]
FAILED = ("error", "rejected")  # finish reasons of samples that have no answer


def answer_of(row: Row, output: RequestOutput) -> Answer:
    """Return the answer of a row whose request has finished."""
    for sample in output.outputs:
        if sample.finish_reason in FAILED:
            return failure_of(row.number, row.id, f"{sample.finish_reason}: {sample.stop_reason}", row.form)
    answer: Answer = {
        "id": row.id,
        "row": row.number,
        "error": None,
        "prompt_tokens": len(output.prompt_token_ids),
        "outputs": [_sample(sample) for sample in output.outputs],
        "form": row.form,
    }
    if output.prompt_logprobs is not None:
        answer["prompt_logprobs"] = [None if position is None else _logprobs(position) for position in output.prompt_logprobs]
    return answer


def failure_of(number: int, id: str | None, why: str, form: str = "prompt") -> Answer:
    """Return the answer of a row that failed."""
    return {"id": id, "row": number, "error": why, "prompt_tokens": 0, "outputs": [], "form": form}


KEYS = frozenset({"id", "row", "error", "prompt_tokens", "outputs"})  # that every answer has


def output_tokens(answer: Answer) -> int:
    """Return the number of tokens that were generated."""
    return sum(len(sample["token_ids"]) for sample in answer["outputs"])


def _sample(sample: CompletionOutput) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "text": sample.text,
        "token_ids": list(sample.token_ids),
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
    if sample.logprobs is not None:
        plain |= {"cumulative_logprob": sample.cumulative_logprob, "logprobs": [_logprobs(position) for position in sample.logprobs]}
    return plain


def _logprobs(position: TokenLogprobMap) -> dict[str, Any]:
    return {str(token): dataclasses.asdict(logprob) for token, logprob in position.items()}
