"""`RequestMeter`: measures one request for the server's metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from dovetail.end_reason import FinishReason
from dovetail.request.lora import LoRARequest
from dovetail.request.outputs import RequestMetrics, RequestOutput
from dovetail.request.pooling import PoolingRequestOutput
from dovetail_server.metric_parts import Histogram


class Finish(NamedTuple):
    """Figures of a finished request. Times are in seconds; None: it never got that far."""

    reason: FinishReason
    client: str | None
    prompt_tokens: int
    generated_tokens: int
    latency_s: float  # from arrival at the server to the end
    per_token_s: float | None  # mean inter-token latency; None with fewer than two tokens
    # on the engine's clock; without an end if the engine didn't finish it
    engine: RequestMetrics | None
    adapter: str | None = None


class Totals(Protocol):
    """Totals of all requests, to which each `RequestMeter` adds its own. `ServerMetrics` has them."""

    gap: Histogram
    generated_tokens: int

    def request_began(
        self, first_token_s: float, prompt_tokens: int, cached_tokens: int, client: str | None
    ) -> None: ...

    def request_finished(self, finish: Finish) -> None: ...


class RequestMeter:
    """Figures of a running request. Its listener calls `saw` with each output, and `ended` or
    `refused` if there is no last output."""

    __slots__ = (
        "_adapter",
        "_arrived",
        "_client",
        "_clock",
        "_ended",
        "_first",
        "_last",
        "_metrics",
        "_prompt_tokens",
        "_samples",
        "_times",
        "_tokens",
    )

    def __init__(
        self,
        metrics: Totals,
        client: str | None,
        samples: int,
        clock: Callable[[], float],
        arrived: float,
        adapter: LoRARequest | None = None,
    ) -> None:
        self._metrics = metrics
        self._client = client
        self._samples = samples
        self._clock = clock
        self._arrived = arrived
        self._adapter = None if adapter is None else adapter.lora_name
        self._first = self._last = 0.0  # times of its first and latest tokens
        self._tokens = self._prompt_tokens = 0
        self._times: RequestMetrics | None = None
        self._ended = False

    def saw(self, output: RequestOutput) -> None:
        """Count an output, which holds deltas."""
        tokens = samples = 0
        for sample in output.outputs:
            if new := len(sample.token_ids):
                tokens += new
                samples += 1
        if tokens:
            now = self._clock()
            if self._tokens:
                self._metrics.gap.add(now - self._last, samples)
            else:
                self._first = now
                self._prompt_tokens = len(output.prompt_token_ids)
                self._metrics.request_began(
                    now - self._arrived, self._prompt_tokens, output.num_cached_tokens, self._client
                )
            self._last = now
            self._tokens += tokens
            self._metrics.generated_tokens += tokens
        self._times = output.metrics
        if output.finished:
            self._prompt_tokens = len(output.prompt_token_ids)
            self.ended(
                next(
                    (sample.finish_reason for sample in output.outputs if sample.finish_reason),
                    "stop",
                )
            )

    def saw_pooled(self, output: PoolingRequestOutput[Any]) -> None:
        """Count the one output of a request that pools: it ends with its prompt, and has no
        tokens."""
        self._prompt_tokens = len(output.prompt_token_ids)
        self._times = output.metrics
        if output.outputs is not None:
            self._metrics.request_began(
                self._clock() - self._arrived,
                self._prompt_tokens,
                output.num_cached_tokens,
                self._client,
            )
        self.ended(output.finish_reason or "stop")

    def saw_tokens(self, tokens: int) -> None:
        """Count an output of one sample that isn't the first: the fast path of `saw`."""
        metrics = self._metrics
        now = self._clock()
        gap = now - self._last
        gaps = metrics.gap
        gaps.counts[bisect_left(gaps.bounds, gap)] += 1
        gaps.total += gap
        self._last = now
        self._tokens += tokens
        metrics.generated_tokens += tokens

    def refused(self) -> None:
        """Stop counting: the engine rejected the request."""
        self._ended = True

    def ended(self, reason: FinishReason) -> None:
        """Count the request's end. Idempotent."""
        if self._ended:
            return
        self._ended = True
        gaps = self._tokens / self._samples - 1  # per sample of mean length
        per_token = (self._last - self._first) / gaps if gaps > 0 else None
        latency = self._clock() - self._arrived
        self._metrics.request_finished(
            Finish(
                reason,
                self._client,
                self._prompt_tokens,
                self._tokens,
                latency,
                per_token,
                self._times,
                self._adapter,
            )
        )
