"""A bound on the prompt tokens beside the decodes of a step, so that readers of streamed answers don't wait long for the next token.

Sarathi-Serve (Agrawal et al., OSDI '24, arXiv:2403.02310) bounds a step by a fixed number of tokens, profiled for model and device. Here the bound
follows from the engine's own running fit to finished steps.
"""

from __future__ import annotations

from dovetail.api.scheduler import Step
from dovetail.sampling_params import OutputKind

LEAST = 256  # tokens: with fewer, most of the time goes into reading the weights


def prefill_within(step: Step, max_stretch: float, budget: int) -> int:
    """Return how many prompt tokens, at most `budget`, make the step last at most `max_stretch` times as long as its decodes alone. It is `LEAST` in
    any case, so that prompts make progress; no more than that while finished steps don't show the cost of a prompt token; and all of `budget` while
    nobody streams, or nothing is known of the device yet."""
    decoding = step.decoding
    if all(request.params.output_kind is OutputKind.FINAL for request in decoding):
        return budget
    context = sum(request.num_tokens for request in decoding)
    alone_s = step.estimate_s(0, len(decoding), context)
    token_s = (step.estimate_s(budget, len(decoding), context + budget) - alone_s) / budget
    if token_s <= 0:
        return budget if alone_s <= 0 else min(budget, LEAST)
    return min(budget, max(LEAST, int((max_stretch - 1) * alone_s / token_s)))
