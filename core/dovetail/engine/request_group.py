"""`RequestGroup`: what one user asked for, and the samples that answer it. Of several samples the first computes the prompt while the others are held
back; then they fork its blocks."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from dovetail.engine.gates import PromptGate
from dovetail.engine.live_request import LiveRequest, Status
from dovetail.request import RequestMetrics
from dovetail.sampling_params import SamplingParams


class RequestGroup:
    """One user request. Made by the front end, which takes what it reports from here; the core asks it whose blocks can be forked."""

    __slots__ = ("metrics", "params", "request_id", "samples", "trimmed")

    def __init__(self, request_id: str, params: SamplingParams, samples: list[LiveRequest]) -> None:
        """`samples`: requests that aren't in an engine yet. Several are told of their group, and get a gate."""
        self.request_id = request_id
        self.params = params  # as the user gave them: `params.n` samples
        self.samples = samples
        self.trimmed: set[LiveRequest] = set()  # running, and blocks of the prompt that a sibling would need are gone
        self.metrics = RequestMetrics(samples[0].arrival_time)
        if len(samples) > 1:
            gate = PromptGate(self)
            for sample in samples:
                sample.group = self
                sample.gates.append(gate)

    def update_metrics(self) -> None:
        """Bring `metrics` up to date, but for the end, of which the front end knows."""
        metrics, samples = self.metrics, self.samples
        metrics.first_scheduled_time = _earliest(s.first_scheduled_time for s in samples)
        metrics.first_token_time = _earliest(s.first_token_time for s in samples)
        metrics.preemptions = sum(s.preemptions for s in samples)

    def is_shown(self) -> bool:
        """Whether the policy sees a sample that may be granted tokens."""
        return any(s.status in (Status.WAITING, Status.RUNNING) for s in self.samples)

    def prompt_is_computed(self) -> bool:
        """Whether a sample has its prompt's K and V, written by steps already submitted, or had them once."""
        return any(s.num_computed - s.granted >= s.prompt_tokens or s.generated for s in self.samples)

    def source_for(self, sample: LiveRequest, admitted: Container[LiveRequest]) -> LiveRequest | None:
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
        return any(s.status in (Status.NEW, Status.GATED, Status.WAITING) and not s.generated for s in self.samples)

    def wants_blocks_of(self, finished: LiveRequest) -> bool:
        """Whether a sample has yet to begin that could fork the blocks of one that has finished."""
        return self._holds_prompt(finished) and self.has_fresh()

    def take_apart(self) -> None:
        """It is over. Its samples and it refer to each other: so they would wait for the garbage collector, which looks through all of their
        tokens and lets a step wait meanwhile."""
        for sample in self.samples:
            sample.group = None
        self.samples = []

    def _holds_prompt(self, sample: LiveRequest) -> bool:
        return bool(sample.blocks) and sample.num_computed - sample.granted >= sample.prompt_tokens - 1 and sample not in self.trimmed


def _earliest(times: Iterable[Any]) -> float | None:
    return min((t for t in times if t is not None), default=None)
