"""`with_bounded_answer`: bounds the bytes of a generated answer before it is computed, by
`limits.max_answer_bytes`.

What multiplies is counted: prompts, samples, tokens, and the alternatives of each token.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.errors import RequestError
from dovetail.request.sampling_params import SamplingParams, changed_unchecked
from dovetail.serving import IntakeFacts, at_most

LOGPROB_BYTES = 128  # of a token with its log-probability, about
TOKEN_BYTES = 8  # of a token's text, or its id, about


def with_bounded_answer(
    params: SamplingParams,
    prompt_tokens: Sequence[int],
    facts: IntakeFacts,
    *,
    copies: int,
    streamed: bool,
) -> SamplingParams:
    """Return the parameters, with `max_tokens` of what an answer with log-probabilities has room
    for, if they name none.

    `prompt_tokens`: of each prompt. `copies`: how often the answer repeats a prompt. `streamed`:
    only the prompt's part of the answer is held in memory. Raises `RequestError` if the answer may
    be too large.
    """
    most = facts.limits.max_answer_bytes
    each = (
        TOKEN_BYTES
        if params.prompt_logprobs is None
        else (1 + params.prompt_logprobs) * LOGPROB_BYTES
    )
    cut = params.truncate_prompt_tokens or -1
    longest = facts.max_model_len if cut == -1 else cut
    of_prompts = copies * each * sum(min(tokens, longest) for tokens in prompt_tokens)
    at_most(
        "prompt: the bytes of the answer, which repeats it,",
        of_prompts,
        facts.limits,
        "max_answer_bytes",
    )
    if params.logprobs is None or streamed:
        return params
    of_token = len(prompt_tokens) * params.n * (1 + params.logprobs) * LOGPROB_BYTES
    room = (most - of_prompts) // of_token
    if room >= min(facts.max_model_len, params.max_tokens or facts.max_model_len):
        return params
    if params.max_tokens is None and room:
        return changed_unchecked(params, max_tokens=room)
    raise RequestError(
        f"logprobs: an answer of {params.n * len(prompt_tokens)} samples with {params.logprobs} "
        f"alternatives a token has room "
        f"for {room} tokens each (limits.max_answer_bytes is {most}), and max_tokens is "
        f"{params.max_tokens}: ask for less, or for a stream"
    )
