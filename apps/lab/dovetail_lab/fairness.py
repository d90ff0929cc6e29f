"""Service of each client over time, and its inequality: the measures of Sheng et al., Fairness in
Serving Large Language Models (OSDI '24, arXiv:2401.00588), as the paper's artifact computes
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail_lab.records import RunResult

Floats = NDArray[np.float64]

# weights of a prompt token and a generated one
INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
SHORTEST_S = 1e-5  # the time of service is unknown for requests whose tokens arrived in less


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Service that a request demanded, and when it was received: spread evenly from its first token
    to its last."""

    client: str | None
    arrival_s: float
    first_token_s: float
    last_token_s: float
    service: float


def work_of(result: RunResult) -> list[Work]:
    """Return the work of the requests that completed."""
    return [
        Work(
            record.client,
            record.arrival_s,
            float(record.token_times_s[0]),
            float(record.token_times_s[-1]),
            INPUT_WEIGHT * record.prompt_tokens + OUTPUT_WEIGHT * record.output_tokens,
        )
        for record in result
        if record.completed
    ]


@dataclass(frozen=True, slots=True, eq=False)
class ServiceOverTime:
    """Service per second of each client (rows) in windows around `centres_s` (columns)."""

    clients: tuple[str | None, ...]
    centres_s: Floats  # [windows]
    served: Floats  # [clients, windows] service received
    asked: Floats  # [clients, windows] service of the requests that arrived in the window


def service_over_time(work: Sequence[Work], centres_s: Floats, window_s: float) -> ServiceOverTime:
    """Return the service that each client demanded and received in windows of `window_s` around
    `centres_s` [windows]."""
    clients = tuple(
        sorted({one.client for one in work}, key=lambda client: (client is None, client or ""))
    )
    served = np.zeros((len(clients), len(centres_s)))
    asked = np.zeros((len(clients), len(centres_s)))
    low = centres_s - window_s / 2
    high = centres_s + window_s / 2
    row_of = {client: row for row, client in enumerate(clients)}
    for one in work:
        row = row_of[one.client]
        asked[row] += one.service / window_s * ((low <= one.arrival_s) & (one.arrival_s <= high))
        span = one.last_token_s - one.first_token_s
        if span >= SHORTEST_S:
            overlap = np.minimum(high, one.last_token_s) - np.maximum(low, one.first_token_s)
            served[row] += one.service / window_s * np.maximum(overlap, 0.0) / span
    return ServiceOverTime(clients, centres_s, served, asked)


def service_difference(service: ServiceOverTime) -> Floats:
    """Return for each window [windows] the sum over clients of the difference to the most-served
    client, capped at the difference between the client's demand and its service. A client without
    demand adds nothing."""
    behind = service.served.max(axis=0, initial=0.0) - service.served
    return np.asarray(
        np.minimum(behind, np.abs(service.asked - service.served)).sum(axis=0), np.float64
    )


def arena_centres(duration_s: float = 600.0, windows: int = 20, warmup_s: float = 30.0) -> Floats:
    """Return the centres of the artifact's windows over its ten-minute trace: 19 windows, none in
    the first half minute."""
    return np.asarray(
        warmup_s + (duration_s - warmup_s) / windows * np.arange(1, windows), np.float64
    )
