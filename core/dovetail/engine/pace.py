"""The pace of a step: a bound on the prompt tokens beside its decodes, whatever the policy, so that readers of streamed answers don't wait long for
the next token. `PlannedStep` asks for it when a policy first grants a prompt.

Sarathi-Serve (Agrawal et al., OSDI '24, arXiv:2403.02310) bounds a step by a fixed number of tokens, profiled for model and device. Here the bound
follows from the engine's own running fit to finished steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.engine.estimator import StepTimeFit
from dovetail.request import Request
from dovetail.sampling_params import OutputKind

LEAST = 256  # tokens: with fewer, most of the time goes into reading the weights


def prompt_tokens_within(pace: float, decoding: Sequence[Request], fit: StepTimeFit, budget: int) -> int:
    """Return how many prompt tokens, at most `budget`, make a step last at most `pace` times as long as decoding the requests `decoding` alone.

    It is `LEAST` in any case, so that prompts make progress; no more than that while finished steps don't show the cost of a prompt token; and all of
    `budget` while nobody streams, or nothing is known of the device yet.
    """
    if budget <= LEAST or all(request.params.output_kind is OutputKind.FINAL for request in decoding):
        return budget
    context = sum(request.num_tokens for request in decoding)
    alone_s = fit.estimate_s(0, len(decoding), context)
    token_s = (fit.estimate_s(budget, len(decoding), context + budget) - alone_s) / budget
    if token_s <= 0:
        return budget if alone_s <= 0 else LEAST
    return min(budget, max(LEAST, int((pace - 1) * alone_s / token_s)))
