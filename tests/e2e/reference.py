"""Definition of "equal to transformers", and its check.

In float32 a differing token is a failure, unless the float64 reference holds its two candidates to
be within 1e-4 of each other. Such ties are counted, and end the comparison of that request. One
forward pass of transformers over prompt and output checks every greedy step at once: if the
reference's choice after each prefix is our next token, its own `generate` would have produced the
same.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dovetail import LLMEngine, RequestOutput, SamplingParams
from tests.models.oracle import reference

TIE = 1e-4

torch.set_num_threads(1)


@dataclass
class Comparison:
    tokens: int = 0
    ties: int = 0


@contextmanager
def checkpoint(config: Any, seed: int = 0) -> Iterator[tuple[Path, Any]]:
    """A directory with a random model's files as transformers saves them, and transformers' model
    itself (float32)."""
    model = reference(config, seed).eval()
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        yield Path(directory), model


def run(
    directory: Path,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    **config: Any,
) -> list[RequestOutput]:
    """The final outputs, in order of the prompts; every request finished, and no block lost."""
    outputs: dict[str, RequestOutput] = {}
    with LLMEngine.from_config(
        {"model": str(directory), "dtype": "float32", "generation_config": "none"}, **config
    ) as engine:
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            engine.add_request(str(index), prompt, one)
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in engine.step()}
        if engine.core.dead is not None:
            raise engine.core.dead
        engine.core.kv.check_integrity()
        if engine.core.kv.counts.held:
            raise AssertionError(f"{engine.core.kv.counts.held} blocks are held by nobody")
    return [outputs[str(index)] for index in range(len(prompts))]


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind="final",
        **fields,
    )


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@torch.inference_mode()
def compare_greedy(
    model: Any, prompt: Sequence[int], tokens: Sequence[int], counts: Comparison
) -> None:
    """Raises `AssertionError` at the first token that transformers would not have chosen and that
    is no tie."""
    ids = torch.tensor([[*prompt, *tokens]])
    choices = model(ids).logits[0, len(prompt) - 1 : -1].argmax(dim=-1).tolist()
    for position, (ours, theirs) in enumerate(zip(tokens, choices, strict=True)):
        counts.tokens += 1
        if ours != theirs:
            exact = copy.deepcopy(model).double()(ids).logits[0, len(prompt) - 1 + position]
            if abs(exact[ours] - exact[theirs]) > TIE:
                raise AssertionError(
                    f"token {position} after a prompt of {len(prompt)} is {ours}, transformers "
                    f"chose {theirs}"
                )
            counts.ties += 1
            return
