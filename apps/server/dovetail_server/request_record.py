"""`RequestRecord`: the figures of one HTTP request, for its log line and its span."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dovetail.request import RequestMetrics
from dovetail.sampling_params import SamplingParams
from dovetail_server.protocol.openai_common import TokenCounts


@dataclass(slots=True)
class RequestRecord:
    """Times are seconds of `time.monotonic`."""

    began: float = field(default_factory=time.monotonic)
    first_output: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    model: str | None = None
    error: str | None = None
    gone: bool = False  # the client disconnected before the end
    params: SamplingParams | None = None  # None: nothing was submitted to the engine
    answer_id: str = ""
    prompts: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    times: RequestMetrics | None = None  # of the first prompt, on the engine's clock

    def add(self, counts: TokenCounts, finish_reasons: Sequence[str], times: RequestMetrics | None) -> None:
        """Add the figures of one prompt."""
        self.prompt_tokens += counts.prompt
        self.cached_tokens += counts.cached
        self.completion_tokens += counts.completion
        self.finish_reasons += finish_reasons
        self.times = times if not self.prompts else self.times
        self.prompts += 1
