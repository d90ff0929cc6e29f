"""How long an answer will be, as far as a policy may know: the guess that came with the request, or else the most that its user allowed."""

from __future__ import annotations

from dovetail.request import Request


def expected_tokens(request: Request) -> int:
    """Tokens of the whole answer: never more than allowed, always more than there are."""
    guess = request.max_tokens if request.predicted_tokens is None else min(request.predicted_tokens, request.max_tokens)
    return max(guess, generated_tokens(request) + 1)


def generated_tokens(request: Request) -> int:
    """Those in flight count as done."""
    return request.max_tokens - request.output_left
