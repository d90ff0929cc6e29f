"""Expected answer lengths: the request's prediction, otherwise its `max_tokens`."""

from __future__ import annotations

from dovetail.request import Request


def expected_tokens(request: Request) -> int:
    """Return the expected number of tokens of the whole answer: at most the allowed number, more
    than generated so far."""
    guess = (
        request.max_tokens
        if request.predicted_tokens is None
        else min(request.predicted_tokens, request.max_tokens)
    )
    return max(guess, generated_tokens(request) + 1)


def generated_tokens(request: Request) -> int:
    """Return the number of generated tokens, including those in flight."""
    return request.max_tokens - request.output_left
