"""Siblings: the samples of a request with n > 1.

The first computes the prompt while the others are held back; then they fork its blocks.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from dovetail.engine.live_request import LiveRequest, Status


def make_siblings(samples: list[LiveRequest]) -> None:
    """Link `samples`, which aren't in an engine yet, so that their prompt is computed once."""
    gate = PromptGate(samples)
    for sample in samples:
        sample.siblings = samples
        sample.gates.append(gate)


class PromptGate:
    """A gate that holds samples back while one of them, which the policy sees, computes their
    prompt."""

    __slots__ = ("_samples",)

    def __init__(self, samples: Sequence[LiveRequest]) -> None:
        self._samples = samples

    def closed(self) -> bool:
        computed = any(
            s.num_computed - s.granted >= s.prompt_tokens or s.generated for s in self._samples
        )
        return not computed and any(
            s.status in (Status.WAITING, Status.RUNNING) for s in self._samples
        )


def fork_source(sample: LiveRequest, admitted: Container[LiveRequest]) -> LiveRequest | None:
    """Return a sibling that holds the prompt's K and V (the last token's may be missing), written
    by steps already submitted. So it is none of the requests `admitted` in the step being planned,
    whose own copies may still have to run. None: there is no such sibling."""
    if sample.prompt_tokens < 2 or sample.generated or sample.params.prompt_logprobs is not None:
        return None
    for sibling in sample.siblings:
        if sibling is not sample and sibling not in admitted and _holds_prompt(sibling):
            return sibling
    return None


def has_fresh(samples: Sequence[LiveRequest]) -> bool:
    """Return True if a sample has yet to begin, and could fork another's blocks."""
    return any(
        s.status in (Status.NEW, Status.GATED, Status.WAITING) and not s.generated for s in samples
    )


def is_awaited(finished: LiveRequest) -> bool:
    """Return True if a sibling has yet to begin that could fork the blocks of the request
    `finished`."""
    return _holds_prompt(finished) and has_fresh(finished.siblings)


def _holds_prompt(sample: LiveRequest) -> bool:
    return (
        sample.capacity > 0
        and sample.num_computed - sample.granted >= sample.prompt_tokens - 1
        and not sample.trimmed
    )
