"""The samples of one user request with n > 1. Their prompt is computed once: the first computes it while the others are held back, then they
fork its blocks."""

from __future__ import annotations

from collections.abc import Container

from dovetail.request import Request, Status


class Family:
    """Made by the front end; the core asks it who may wait and whose blocks can be forked."""

    def __init__(self, samples: list[Request]) -> None:
        self.samples = samples
        self.held: dict[Request, None] = {}  # arrived, but not shown to the policy yet: a set in order
        self.trimmed: set[Request] = set()  # running, and blocks of the prompt that a sibling would need are gone
        for sample in samples:
            sample._family = self

    def may_wait(self, sample: Request) -> bool:
        """Whether an arriving sample is shown to the policy now: the first of those unfinished, or any once the prompt is computed."""
        return self._prompt_is_computed() or not any(
            s._status in (Status.WAITING, Status.RUNNING) and s is not sample and s not in self.held for s in self.samples
        )

    def release(self) -> list[Request]:
        """Those held back that may be shown now, in order; called whenever a sample was planned or has finished."""
        released = []
        for sample in list(self.held):
            if not self.may_wait(sample):
                break
            del self.held[sample]
            released.append(sample)
        return released

    def source_for(self, sample: Request, admitted: Container[Request]) -> Request | None:
        """A sibling that holds the prompt's K and V, all but the last token's at least, written by steps already submitted: hence none of
        those `admitted` in the step being planned, whose own copies may be still to come."""
        if sample.prompt_tokens < 2 or sample.generated or sample.params.prompt_logprobs is not None:
            return None
        for sibling in self.samples:
            if sibling is not sample and sibling not in admitted and self._holds_prompt(sibling):
                return sibling
        return None

    def has_fresh(self) -> bool:
        """Whether a sample has yet to begin, and could fork another's blocks."""
        return any(s._status in (Status.NEW, Status.WAITING) and not s.generated for s in self.samples)

    def wants_blocks_of(self, finished: Request) -> bool:
        """Whether a sample has yet to begin that could fork the blocks of one that has finished."""
        return self._holds_prompt(finished) and self.has_fresh()

    def _holds_prompt(self, sample: Request) -> bool:
        return bool(sample._blocks) and sample._computed - sample._granted >= sample.prompt_tokens - 1 and sample not in self.trimmed

    def _prompt_is_computed(self) -> bool:
        return any(s._computed - s._granted >= s.prompt_tokens or s.generated for s in self.samples)
