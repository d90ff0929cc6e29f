"""lm-eval: a task of choices, by log-probabilities, and one of answers; with the server's tokenizer
and with none."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from run import ASK, MODEL, plain, spoken

_DOCUMENTS = [{"question": "ROMEO:", "right": 0}, {"question": "JULIET:", "right": 1}]
_CHOICES = ["What", "love"]


def _evaluated(
    model: str, url: str, path: str, task: dict[str, Any], arguments: Any, **options: Any
) -> Any:
    """Return the results of a task and its samples."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "documents.json"
        data.write_text("\n".join(map(json.dumps, _DOCUMENTS)))
        common = {
            "task": "ours",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": str(data)},
            "test_split": "train",
        }
        server = {
            "model": MODEL,
            "base_url": url + path,
            "num_concurrent": 1,
            "max_retries": 1,
            **arguments,
        }
        found = lm_eval.simple_evaluate(
            model=model,
            model_args=server,
            tasks=[{**common, **task}],
            num_fewshot=0,
            bootstrap_iters=0,
            **options,
        )
        return found["results"]["ours"], found["samples"]["ours"]


def _choices(url: str, **arguments: Any) -> None:
    task = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": _CHOICES,
        "doc_to_target": "right",
    }
    results, samples = _evaluated(
        "local-completions", url, "/v1/completions", task, {"max_length": 256, **arguments}
    )
    assert 0 <= results["acc,none"] <= 1
    for sample in samples:
        for choice, (score, _) in zip(_CHOICES, sample["filtered_resps"], strict=True):
            assert abs(float(score) - _score(url, sample["doc"]["question"], " " + choice)) < 1e-3


def _score(url: str, text: str, continuation: str) -> float:
    """Return the log-probability of a continuation, without any client."""
    answer = plain(
        url, "/v1/completions", prompt=text + continuation, max_tokens=0, echo=True, logprobs=0
    )["choices"][0]["logprobs"]
    return sum(
        value
        for value, place in zip(answer["token_logprobs"], answer["text_offset"], strict=True)
        if place >= len(text)
    )


def remote_tokenizer(url: str) -> None:
    _choices(url, tokenizer_backend="remote")


def local_tokenizer(url: str) -> None:
    _choices(url, tokenizer_backend="huggingface", tokenizer=os.environ["DOVETAIL_TEST_TOKENIZER"])


def answers(url: str) -> None:
    task = {
        "output_type": "generate_until",
        "doc_to_text": ASK[0]["content"],
        "doc_to_target": "right",
        "generation_kwargs": {"until": ["\x00"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    }
    _, samples = _evaluated(
        "local-chat-completions", url, "/v1/chat/completions", task, {}, apply_chat_template=True
    )
    assert samples[0]["resps"][0][0] == spoken(url)
