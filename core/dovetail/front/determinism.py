"""Tries whether an engine keeps the promise of `SamplingParams.deterministic`: requests have the
same bits alone and in random company."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from dovetail.errors import UnsupportedError
from dovetail.front.llm_engine import LLMEngine
from dovetail.front.outputs import EngineOutput
from dovetail.request.outputs import RequestOutput
from dovetail.request.sampling_params import SamplingParams

REQUESTS = 8  # that schedules are made of
MOST_PROMPT = 150  # tokens
MOST_ANSWER = 24  # tokens

Bits = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of token ids."""

    prompt: tuple[int, ...]
    params: SamplingParams

    def unmarked(self) -> Asked:
        """Return the same request without the promise."""
        return replace(self, params=replace(self.params, deterministic=False))


@dataclass(frozen=True, slots=True)
class Trial:
    """A random schedule. `different`: requests whose bits differ from those that they have
    alone."""

    compared: int  # deterministic requests
    different: tuple[Asked, ...]


def trials(engine: LLMEngine, count: int, seed: int) -> Iterator[Trial]:
    """Compute random requests alone, then yield `count` schedules of them. Prompts are random
    tokens, some with a common prefix. Raises `UnsupportedError` if the engine makes no promise."""
    if reason := engine.capacity.not_deterministic:
        raise UnsupportedError(f"deterministic: this engine can't promise it: {reason}")
    chance = Random(seed)
    requests = drawn_requests(chance, engine.capacity.vocab_size, engine.capacity.max_model_len)
    alone = []
    for one in requests:
        engine.reset_prefix_cache()
        alone.extend(serve(engine, [one], chance))
    for _ in range(count):
        if chance.random() < 0.5:
            engine.reset_prefix_cache()
        chosen = chance.sample(range(len(requests)), chance.randint(2, len(requests)))
        marked = [chance.random() < 0.7 for _ in chosen]
        company = [
            requests[index] if mark else requests[index].unmarked()
            for index, mark in zip(chosen, marked, strict=True)
        ]
        found = serve(engine, company, chance)
        kept = [
            (index, bits) for index, bits, mark in zip(chosen, found, marked, strict=True) if mark
        ]
        different = [requests[index] for index, bits in kept if bits != alone[index]]
        yield Trial(len(kept), tuple(different))


def drawn_requests(chance: Random, vocab_size: int, max_len: int) -> list[Asked]:
    """Draw requests for an engine with this vocabulary and length of sequences."""
    longest = max(1, min(MOST_PROMPT, max_len // 2))
    shared = [chance.randrange(vocab_size) for _ in range(longest // 2)]
    requests = []
    for _ in range(REQUESTS):
        length = chance.randint(1, longest)
        own = [chance.randrange(vocab_size) for _ in range(length)]
        prompt = ([*shared, *own] if chance.random() < 0.4 else own)[:length]
        params = SamplingParams(
            max_tokens=chance.randint(1, max(1, min(MOST_ANSWER, max_len - longest))),
            temperature=chance.choice([0.0, 0.9]),
            top_p=chance.choice([1.0, 0.9]),
            seed=chance.randrange(2**32),
            logprobs=3,
            ignore_eos=True,
            detokenize=False,
            output_kind="final",
            deterministic=True,
        )
        requests.append(Asked(tuple(prompt), params))
    return requests


def serve(engine: LLMEngine, asked: Sequence[Asked], chance: Random) -> list[Bits]:
    """Return the bits of each request. They arrive in random steps, and the engine has no
    others."""
    outputs: dict[str, EngineOutput] = {}
    waiting = list(enumerate(asked))
    while waiting or engine.has_unfinished_requests():
        while waiting and (chance.random() < 0.5 or not engine.has_unfinished_requests()):
            index, one = waiting.pop(0)
            engine.add_request(str(index), {"prompt_token_ids": list(one.prompt)}, one.params)
        outputs |= {output.request_id: output for output in engine.step()}
    return [bits_of(outputs[str(index)]) for index in range(len(asked))]


def bits_of(output: EngineOutput) -> Bits:
    """Return the token ids of a generated output, and all log-probabilities and ranks as
    numbers of 32 bits."""
    assert isinstance(output, RequestOutput)
    rows = list(output.prompt_logprobs or ())
    for sample in output.outputs:
        rows += sample.logprobs or ()
    return (
        *[tuple(sample.token_ids) for sample in output.outputs],
        *[
            (token, one.rank, struct.pack("f", one.logprob))
            for row in rows
            for token, one in (row or {}).items()
        ],
    )
