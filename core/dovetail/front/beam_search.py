"""Beam search: the most probable answers to prompts, found by requests of one token each.
`LLM.beam_search` is the call.

A *beam* is a prompt with the beginning of an answer. In each round, every beam is a request that
returns the log-probabilities of its likeliest next tokens; the prefix cache holds the K and V of
all but its last tokens. The continuations of a prompt's beams are ranked together, by the rules of
transformers' `generate(num_beams=…)` with its default, `early_stopping=False`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dovetail.base.checks import plain_integer
from dovetail.end_reason import FinishReason
from dovetail.errors import RequestError, shown
from dovetail.front.llm_engine import LLMEngine
from dovetail.front.prompts import Prompt
from dovetail.front.tokenizer import Tokenizer
from dovetail.request.lora import LoRARequest
from dovetail.request.outputs import CompletionOutput, RequestOutput, TokenLogprobMap
from dovetail.request.sampling_params import BeamSearchParams, OutputKind, SamplingParams


@dataclass(slots=True)
class BeamSearchSequence:
    """A prompt with an answer to it. `text` is that of `tokens`."""

    tokens: list[int]  # of prompt and answer; EOS included
    # one map for each token of the answer, of the likeliest tokens at its place
    logprobs: list[TokenLogprobMap]
    cum_logprob: float = 0.0  # of the answer: the sum of its tokens' log-probabilities
    text: str | None = None  # None with detokenize=False
    finish_reason: FinishReason | None = None  # "stop": by EOS
    # the EOS token's id, or the reason of a rejection or failure
    stop_reason: int | str | None = None
    # cum_logprob / (tokens of the answer) ** length_penalty: sequences are sorted by it
    score: float = -math.inf


@dataclass(slots=True)
class BeamSearchOutput:
    """The answers to one prompt: as many as `beam_width`, the best first. Fewer if so few are
    possible."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The search for the answers to one prompt: while beams are `running`, call `advance` with the
    outputs of requests for one more token."""

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        params: BeamSearchParams,
        max_tokens: int,
        stop_ids: Sequence[int],
        adapter: LoRARequest | None = None,
    ) -> None:
        """`max_tokens`: of an answer. `stop_ids`: tokens that end one."""
        self.adapter = adapter
        self._params = params
        self._max_tokens = max_tokens
        self._stop_ids = frozenset(stop_ids)
        self._length = 0  # tokens of the answers begun
        self.running = [BeamSearchSequence(list(prompt_token_ids), [])]  # the most probable first
        self.finished: list[BeamSearchSequence] = []  # the best first, at most `beam_width`

    def advance(self, outputs: Sequence[CompletionOutput]) -> None:
        """Take the outputs of the running beams, in order."""
        for output in outputs:
            if not output.logprobs:  # rejected by the policy, or no room for it in the KV cache
                self._end(output)
                return
        width = self._params.beam_width
        beams = self.running
        self.running = []
        self._length += 1
        maps = [output.logprobs[0] for output in outputs if output.logprobs]
        candidates = [
            (beam.cum_logprob + entry.logprob, place, token)
            for place, (beam, entries) in enumerate(zip(beams, maps, strict=True))
            for token, entry in entries.items()
            if entry.logprob > -math.inf
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        for rank, (cum_logprob, place, token) in enumerate(candidates):
            ends = token in self._stop_ids or self._length == self._max_tokens
            if rank >= width if ends else len(self.running) == width:
                continue
            beam = beams[place]
            grown = BeamSearchSequence(
                [*beam.tokens, token], [*beam.logprobs, maps[place]], cum_logprob
            )
            if ends:
                self._finish(
                    grown, *(("stop", token) if token in self._stop_ids else ("length", None))
                )
            else:
                self.running.append(grown)
        if (
            len(self.finished) == width
            and self.running
            and self._score(self.running[0]) <= self.finished[-1].score
        ):
            # unlikely to improve: with a length penalty above 0 the scores of longer answers may
            # still rise
            self.running = []

    def _finish(
        self, beam: BeamSearchSequence, reason: FinishReason, stop_reason: int | str | None
    ) -> None:
        beam.finish_reason, beam.stop_reason, beam.score = reason, stop_reason, self._score(beam)
        self.finished.append(beam)
        self.finished.sort(key=lambda one: -one.score)
        del self.finished[self._params.beam_width :]

    def _end(self, output: CompletionOutput) -> None:
        """End the search with the beams as they are, for the reason for which one wasn't
        computed."""
        beams = self.running
        self.running = []
        for beam in beams:
            self._finish(beam, output.finish_reason or "error", output.stop_reason)

    def _score(self, beam: BeamSearchSequence) -> float:
        return beam.cum_logprob / math.pow(max(1, self._length), self._params.length_penalty)


def beam_search(
    engine: LLMEngine,
    generate: Callable[
        [list[Prompt], SamplingParams, list[LoRARequest | None]], list[RequestOutput]
    ],
    prompts: Sequence[Prompt],
    adapters: Sequence[LoRARequest | None],
    params: BeamSearchParams,
    limit: int | None,
    ended: Callable[[int], object],
) -> list[BeamSearchOutput]:
    """Search for the answers to all prompts, to at most `limit` at a time; None: as many as the
    engine runs at once.

    `adapters`: one for each prompt. `generate` returns the outputs of token ids, each computed with
    its adapter; `ended` is called with the number of searches that ended in a round. Raises
    `RequestError` before anything is computed, and what `generate` raises.
    """
    if not isinstance(params, BeamSearchParams):
        raise RequestError(f"params must be BeamSearchParams, got {shown(params)}")
    if limit is None:
        limit = max(1, engine.config.max_num_seqs // params.beam_width)
    elif plain_integer(limit) is None or limit < 1:
        raise RequestError(f"concurrency_limit must be an integer >= 1 or None, got {shown(limit)}")
    tokenizer = engine.tokenizer if params.detokenize else None
    stop_ids = () if params.ignore_eos else engine.eos_token_ids
    # With an alternative for each token that may end a beam, enough others are left to go on with.
    needed = params.beam_width + len(stop_ids)
    most = engine.config.limits.max_logprobs
    if needed > most:
        raise RequestError(
            f"beam_width must be at most {most - len(stop_ids)}, got {params.beam_width}: a beam "
            f"needs as many log-probabilities, and "
            f"{len(stop_ids)} for EOS, and there are at most {most} (limits.max_logprobs)"
        )
    one = SamplingParams(
        temperature=0,
        repetition_penalty=1.0,
        max_tokens=1,
        logprobs=min(needed, engine.capacity.vocab_size),
        detokenize=False,
        output_kind=OutputKind.FINAL,
    )
    token_ids = engine.checked_prompts(engine.all_tokenized(prompts), one)
    max_len = engine.capacity.max_model_len
    searches = [
        BeamSearch(ids, params, min(params.max_tokens, max_len - len(ids)), stop_ids, adapter)
        for ids, adapter in zip(token_ids, adapters, strict=True)
    ]
    waiting = deque(searches)
    active = list[BeamSearch]()
    while waiting or active:
        active += [waiting.popleft() for _ in range(min(len(waiting), limit - len(active)))]
        beams = [(beam.tokens, search.adapter) for search in active for beam in search.running]
        outputs = iter(
            generate([tokens for tokens, _ in beams], one, [adapter for _, adapter in beams])
        )
        for search in active:
            search.advance([next(outputs).outputs[0] for _ in search.running])
        before = len(active)
        active = [search for search in active if search.running]
        ended(before - len(active))
    if tokenizer is not None:
        for search in searches:
            for sequence in search.finished:
                sequence.text = _text(sequence, params, tokenizer)
    return [BeamSearchOutput(search.finished) for search in searches]


def _text(sequence: BeamSearchSequence, params: BeamSearchParams, tokenizer: Tokenizer) -> str:
    ends = len(sequence.tokens) - (sequence.finish_reason == "stop")  # without EOS
    text = tokenizer.decode(sequence.tokens[:ends], params.skip_special_tokens)
    return (
        text + tokenizer.decode(sequence.tokens[ends:])
        if params.include_stop_str_in_output
        else text
    )
