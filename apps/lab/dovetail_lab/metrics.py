"""Latencies and throughput from a run's records, as defined by vLLM's `bench serve`, with all
latencies measured from arrival.

`docs/lab/metrics.md` has the formulas. Only completed requests have latencies; a request that was
rejected, failed or aborted misses every objective.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from dovetail_lab.records import RequestRecord, RunResult

Floats = NDArray[np.float64]

PERCENTILES = (50, 90, 95, 99)


def ttft_s(record: RequestRecord) -> float:
    """Return the time to the first token. NaN if none came."""
    return float(record.token_times_s[0]) - record.arrival_s if record.output_tokens else np.nan


def tpot_s(record: RequestRecord) -> float:
    """Return the time per output token after the first. NaN for fewer than two tokens."""
    tokens = record.output_tokens
    return (
        float(record.token_times_s[-1] - record.token_times_s[0]) / (tokens - 1)
        if tokens > 1
        else np.nan
    )


def e2e_s(record: RequestRecord) -> float:
    """Return the time from arrival to the last token. NaN if none came."""
    return float(record.token_times_s[-1]) - record.arrival_s if record.output_tokens else np.nan


def queue_s(record: RequestRecord) -> float:
    """Return the time from arrival to the planning of its first step: the scheduling delay. NaN if
    it never ran."""
    return (
        np.nan if record.first_scheduled_s is None else record.first_scheduled_s - record.arrival_s
    )


def itl_s(records: Iterable[RequestRecord]) -> Floats:
    """Return the inter-token latencies of all requests in one array. A request of many tokens has
    more weight than in `tpot`."""
    return np.concatenate([np.empty(0), *(np.diff(record.token_times_s) for record in records)])


def session_s(records: Iterable[RequestRecord]) -> dict[str, float]:
    """Return the duration of each session, from its first arrival to its last token. NaN if a
    request of it didn't complete."""
    of_session: dict[str, list[RequestRecord]] = {}
    for record in records:
        if record.session is not None:
            of_session.setdefault(record.session, []).append(record)
    return {
        session: max(float(record.token_times_s[-1]) for record in own)
        - min(record.arrival_s for record in own)
        if all(record.completed for record in own)
        else np.nan
        for session, own in of_session.items()
    }


def itl_by_request(records: Iterable[RequestRecord]) -> list[Floats]:
    """Return the inter-token latencies of each record, in order; none for requests that didn't
    complete."""
    return [
        np.diff(record.token_times_s) if record.completed else np.empty(0) for record in records
    ]


PER_REQUEST: Mapping[str, str] = MappingProxyType(
    {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E", "queue": "queue"}
)
_OF_REQUEST = {"ttft": ttft_s, "tpot": tpot_s, "e2e": e2e_s, "queue": queue_s}


def per_request(records: Iterable[RequestRecord], metric: str) -> Floats:
    """Return one of `PER_REQUEST` for each record, in order; NaN if it has none, and for requests
    that didn't complete."""
    measure = _OF_REQUEST[metric]
    return np.array(
        [measure(record) if record.completed else np.nan for record in records], np.float64
    )


@dataclass(frozen=True, slots=True)
class Summary:
    """A summary of a distribution, in its unit. Percentiles use linear interpolation, as in numpy
    and `bench serve`. NaN if there are no values."""

    count: int
    mean: float
    std: float
    percentiles: Mapping[int, float]

    @classmethod
    def of(cls, values: Floats) -> Summary:
        """Summarise the values that are not NaN."""
        present = values[~np.isnan(values)]
        if not len(present):
            return cls(0, np.nan, np.nan, dict.fromkeys(PERCENTILES, np.nan))
        points = np.percentile(present, PERCENTILES)
        return cls(
            len(present),
            float(present.mean()),
            float(present.std()),
            dict(zip(PERCENTILES, points.tolist(), strict=True)),
        )

    def named(self, statistic: str) -> float:
        """Return "mean", or a percentile by its name, such as "p99"."""
        return self.mean if statistic == "mean" else self.percentiles[int(statistic[1:])]


@dataclass(frozen=True, slots=True)
class Slo:
    """Service-level objectives of one request, in seconds; None: no objective."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def met_by(self, record: RequestRecord) -> bool:
        """Return True if a request meets all objectives. With one token its TPOT counts as 0.
        Incomplete requests meet none."""
        if not record.completed:
            return False
        tpot = tpot_s(record) if record.output_tokens > 1 else 0.0
        limits = ((self.ttft_s, ttft_s(record)), (self.tpot_s, tpot), (self.e2e_s, e2e_s(record)))
        return all(limit is None or value <= limit for limit, value in limits)


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """Metrics of a run. Rates are per second of `duration_s`, except goodput."""

    requests: int
    completed: int
    rejected: int
    failed: int  # "error" or "abort"
    duration_s: float  # of the window, or from the first arrival to the last token or arrival
    offered_s: (
        float  # of the window, or from the first to the last arrival: the same under every policy
    )
    prompt_tokens: int  # of completed requests
    output_tokens: int
    request_rate: float
    output_rate: float  # tokens
    total_rate: float  # tokens, prompt and output
    good_requests: int | None  # requests that met the objectives; None: no objectives
    latencies: Mapping[str, Summary]  # seconds: ttft, tpot, itl, e2e, queue
    cached_tokens: int  # prompt tokens found in the prefix cache, by completed requests
    restored_tokens: int  # of these, tokens that came from host memory or a KV tier
    preemptions: int
    recomputed_tokens: int
    device_share: float  # share of the duration in which the device was busy
    grammars: int  # number of requests with a grammar
    masks_s: float  # delay of steps by grammars
    masks_share: float  # `masks_s` as a share of the duration
    draft_rows: int  # number of times that a request checked drafts in a step
    draft_tokens: int  # drafts that they checked
    accepted_drafts: int
    acceptance_length: (
        float  # tokens that a request gets from a step in which it checks drafts; NaN without
    )
    tokens_per_step: float  # tokens that a decoding request gets from a step; NaN without decodes
    sessions: Summary  # durations of completed sessions in seconds
    all_sessions: int  # number of sessions

    @property
    def goodput(self) -> float | None:
        """Requests that met their objectives, per second in which requests arrived: the arrival
        rate times `attainment`."""
        return (
            None
            if self.good_requests is None
            else _rate(self.good_requests, self.offered_s or self.duration_s)
        )

    @property
    def attainment(self) -> float | None:
        """Share of all requests, including rejected and failed ones, that met their objectives."""
        return None if self.good_requests is None else self.good_requests / max(self.requests, 1)


def measure(result: RunResult, slo: Slo | None = None) -> RunMetrics:
    """Return all metrics of one run. With a window, requests count if they arrive in it, while
    rates and shares cover everything delivered in it, for any request."""
    begin, end = result.window or (-np.inf, np.inf)
    records = list(result)
    done = [record for record in records if record.completed]
    arrivals = [record.arrival_s for record in records] or [0.0]
    last = max(
        (float(record.token_times_s[-1]) for record in records if record.output_tokens), default=0.0
    )
    duration = max(last, *arrivals) - min(arrivals)
    offered = max(arrivals) - min(arrivals)
    if result.window is not None:
        duration = offered = end - begin

    delivered = [record for record in result.requests if record.completed]
    ends = sum(begin <= record.token_times_s[-1] < end for record in delivered)
    prompt = sum(
        record.prompt_tokens for record in delivered if begin <= record.token_times_s[0] < end
    )
    output = sum(
        int(np.searchsorted(record.token_times_s, (begin, end)) @ (-1, 1)) for record in delivered
    )
    timeline = result.timeline
    steps = (begin <= timeline.time_s) & (timeline.time_s < end)
    masks = float(timeline.masks_s[steps].sum())
    drafting, drafts, accepted, decodes = (
        int(column[steps].sum())
        for column in (
            timeline.draft_rows,
            timeline.draft_tokens,
            timeline.accepted_drafts,
            timeline.decode_tokens,
        )
    )
    sessions = session_s(records)
    rejected = sum(record.finish_reason == "rejected" for record in records)
    return RunMetrics(
        requests=len(records),
        completed=len(done),
        rejected=rejected,
        failed=len(records) - len(done) - rejected,
        duration_s=duration,
        offered_s=offered,
        prompt_tokens=sum(record.prompt_tokens for record in done),
        output_tokens=sum(record.output_tokens for record in done),
        request_rate=_rate(ends, duration),
        output_rate=_rate(output, duration),
        total_rate=_rate(prompt + output, duration),
        good_requests=None if slo is None else sum(slo.met_by(record) for record in records),
        latencies={
            "itl": Summary.of(itl_s(done)),
            **{name: Summary.of(per_request(done, name)) for name in PER_REQUEST},
        },
        cached_tokens=sum(record.cached_tokens for record in done),
        restored_tokens=sum(record.restored_tokens for record in done),
        preemptions=sum(record.preemptions for record in records),
        recomputed_tokens=sum(record.recomputed_tokens for record in records),
        device_share=_rate(float(timeline.device_s[steps].sum()), duration),
        grammars=sum(record.grammar for record in records),
        masks_s=masks,
        masks_share=_rate(masks, duration),
        draft_rows=drafting,
        draft_tokens=drafts,
        accepted_drafts=accepted,
        acceptance_length=1 + accepted / drafting if drafting else np.nan,
        tokens_per_step=decodes / (decodes - accepted) if decodes else np.nan,
        sessions=Summary.of(np.array(list(sessions.values()), np.float64)),
        all_sessions=len(sessions),
    )


def _rate(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0
