"""`RequestRecord`: the figures of one HTTP request, for its log line and its span. `Tracing`: an
OpenTelemetry span for each request submitted to the engine, with one for each of its phases, if
enabled.

Attribute names are vLLM's; docs/serving/metrics.md lists them. The library comes with the extra
`tracing`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dovetail.api.spans import Spans, between, known, latencies, phases_of
from dovetail.request.outputs import RequestMetrics
from dovetail.request.pooling import PoolingParams
from dovetail.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from starlette.types import Scope

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
    # None: nothing was submitted to the engine
    params: SamplingParams | PoolingParams | None = None
    answer_id: str = ""
    prompts: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    times: RequestMetrics | None = None  # of the first prompt, on the engine's clock

    def add(
        self, counts: TokenCounts, finish_reasons: Sequence[str], times: RequestMetrics | None
    ) -> None:
        """Add the figures of one prompt."""
        self.prompt_tokens += counts.prompt
        self.cached_tokens += counts.cached
        self.completion_tokens += counts.completion
        self.finish_reasons += finish_reasons
        self.times = times if not self.prompts else self.times
        self.prompts += 1


class Tracing(Spans):
    """Exports a span for each HTTP request that was submitted to the engine."""

    def export(self, scope: Scope, record: RequestRecord, now: float) -> None:
        """Export the spans of a request that has ended. `now`: the time on the engine's clock."""
        took_s = time.monotonic() - record.began
        phases = () if record.times is None else phases_of(record.times, now)
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self.add(
            headers,
            took_s,
            attributes_of(scope, record, took_s),
            phases,
            now=now,
            error=record.error,
        )


def attributes_of(
    scope: Scope, record: RequestRecord, took_s: float
) -> dict[str, str | int | float | list[str]]:
    """Return the attributes of a request's span. Times are in seconds; unknown ones are omitted."""
    params = record.params
    times = record.times
    if not isinstance(params, SamplingParams):
        params = SamplingParams(max_tokens=None)
    attributes: dict[str, str | int | float | list[str] | None] = {
        "gen_ai.request.id": scope.get("dovetail.request_id"),
        "gen_ai.response.id": record.answer_id,
        "gen_ai.response.model": record.model,
        "gen_ai.response.finish_reasons": record.finish_reasons,
        "gen_ai.request.n": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.num_sequences": params.n * record.prompts,
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.cached_tokens": record.cached_tokens,
        "gen_ai.usage.completion_tokens": record.completion_tokens,
        "gen_ai.latency.e2e": took_s,
        "gen_ai.latency.time_to_first_token": between(record.began, record.first_output),
    }
    if times is not None:
        attributes |= latencies(times)
    return known(attributes)
