"""Service-level objectives of a run: "ttft_p99<0.5,tpot_p99<50ms", and presets with MLPerf's
numbers. `capacity` searches for the highest rate that meets them.

An objective applies to the distribution over all requests sent. A rejected, failed or aborted
request has infinite latency, so it counts as a miss: `ttft_p99<0.5` means that 99 % of all requests
got their first token within half a second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import ConfigError
from dovetail_lab.metrics import PER_REQUEST, Slo, itl_s, per_request
from dovetail_lab.nearest import suggest
from dovetail_lab.records import RequestRecord, RunResult

Floats = NDArray[np.float64]

METRICS = (*PER_REQUEST, "itl")
_LIMIT = r"\s*<=?\s*(?P<limit>[0-9.eE+-]+)\s*(?P<unit>ms|s)?"
_OBJECTIVE = re.compile(r"(?P<metric>[a-z0-9]+)_(?P<statistic>mean|p\d+(\.\d+)?)" + _LIMIT)
_SHAPE = "expected METRIC_STATISTIC<SECONDS, like ttft_p99<0.5 or tpot_mean<50ms"
_OF_REQUEST = re.compile(r"(?P<metric>[a-z0-9]+)" + _LIMIT)


@dataclass(frozen=True, slots=True)
class Preset:
    objectives: str
    source: str


_MLPERF = (
    "MLPerf Inference Rules, table of benchmarks, and 99th percentile in the server scenario "
    "(mlcommons/inference_policies at ac93e89)"
)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        f"mlperf-{name}": Preset(objectives, _MLPERF)
        for name, objectives in {
            "llama2-70b": "ttft_p99<2,tpot_p99<0.2",
            "llama2-70b-interactive": "ttft_p99<0.45,tpot_p99<0.04",
            "llama3.1-8b": "ttft_p99<2,tpot_p99<0.1",
            "llama3.1-8b-interactive": "ttft_p99<0.5,tpot_p99<0.03",
            "llama3.1-405b": "ttft_p99<6,tpot_p99<0.175",
            "llama3.1-405b-interactive": "ttft_p99<4.5,tpot_p99<0.08",
            "mixtral-8x7b": "ttft_p99<2,tpot_p99<0.2",
            "deepseek-r1": "ttft_p99<2,tpot_p99<0.08",
            "deepseek-r1-interactive": "ttft_p99<1.5,tpot_p99<0.015",
            "gpt-oss-120b": "ttft_p99<3,tpot_p99<0.08",
            "gpt-oss-120b-interactive": "ttft_p99<2,tpot_p99<0.02",
        }.items()
    }
)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Outcome of an objective. `value` in seconds: infinity if too many requests never got that
    far, NaN if there was nothing to evaluate, which counts as met. `share`: share of the evaluated
    values within the limit, NaN likewise."""

    value: float
    met: bool
    share: float


@dataclass(frozen=True, slots=True)
class Objective:
    """Upper limit on a statistic of a metric."""

    metric: str  # one of METRICS
    q: float | None  # 0 < q < 1, or None for the mean
    limit_s: float

    @property
    def name(self) -> str:
        return f"{self.metric}_" + ("mean" if self.q is None else f"p{100 * self.q:g}")

    def __str__(self) -> str:
        return f"{self.name}<{self.limit_s:g}"

    def judge(self, runs: Sequence[RunResult]) -> Judgement:
        """Evaluate the requests of all runs together. The quantile is the smallest value that a
        share `q` doesn't exceed."""
        values = np.concatenate([np.empty(0), *(_values(run, self.metric) for run in runs)])
        if not len(values):
            return Judgement(math.nan, True, math.nan)
        value = float(
            values.mean() if self.q is None else np.quantile(values, self.q, method="inverted_cdf")
        )
        return Judgement(value, value <= self.limit_s, float((values <= self.limit_s).mean()))


def _values(run: RunResult, metric: str) -> Floats:
    """Return seconds, infinite for incomplete requests; complete ones without the metric (one token
    has no TPOT) are excluded."""
    missed = [record for record in run if not record.completed]
    if metric == "itl":
        return np.concatenate(
            [
                itl_s(record for record in run if record.completed),
                np.full(sum(map(_gaps, missed)), math.inf),
            ]
        )
    values = per_request(run, metric)
    return np.concatenate([values[~np.isnan(values)], np.full(len(missed), math.inf)])


def _gaps(record: RequestRecord) -> int:
    """Return the number of gaps between the tokens that the request should have generated."""
    return max(1, record.true_tokens - 1)


def parse_slo(text: str) -> tuple[Objective, ...]:
    """Parse a preset's name, or objectives separated by commas. Raises `ConfigError`."""
    text = text.strip()
    if text in PRESETS:
        text = PRESETS[text].objectives
    elif text and not re.search("[<>=,]", text):
        raise ConfigError(
            f"--slo: {text!r} is neither an objective, like ttft_p99<0.5, nor a "
            f"preset{suggest(text, PRESETS)}"
        )
    objectives = tuple(_objective(part.strip()) for part in text.split(","))
    names = [objective.name for objective in objectives]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--slo: {name} is limited twice")
    return objectives


def _objective(text: str) -> Objective:
    match = _OBJECTIVE.fullmatch(text)
    if match is None:
        raise ConfigError(f"--slo: {text!r}: {_SHAPE}")
    metric = match["metric"]
    statistic = match["statistic"]
    if metric not in METRICS:
        raise ConfigError(f"--slo: {text!r}: unknown metric {metric!r}{suggest(metric, METRICS)}")
    limit = _limit(match, f"--slo: {text!r}")
    q = None if statistic == "mean" else float(statistic[1:]) / 100
    if q is not None and not 0 < q < 1:
        raise ConfigError(f"--slo: {text!r}: a percentile must be between 0 and 100, exclusive")
    return Objective(metric, q, limit)


def parse_goodput(text: str) -> Slo:
    """Parse `ttft<0.5,tpot<50ms`: the objectives of each request. Raises `ConfigError`."""
    limits: dict[str, float] = {}
    for part in map(str.strip, text.split(",")):
        match = _OF_REQUEST.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"--goodput: {part!r}: expected METRIC<SECONDS, like ttft<0.5 or tpot<50ms"
            )
        field = f"{match['metric']}_s"
        if field not in Slo.__slots__:
            raise ConfigError(
                f"--goodput: {part!r}: unknown metric "
                f"{match['metric']!r}{suggest(match['metric'], ('ttft', 'tpot', 'e2e'))}"
            )
        if field in limits:
            raise ConfigError(f"--goodput: {match['metric']} is limited twice")
        limits[field] = _limit(match, f"--goodput: {part!r}")
    return Slo(**limits)


def _limit(match: re.Match[str], where: str) -> float:
    """Return a limit in seconds."""
    try:
        limit = float(match["limit"]) * (1e-3 if match["unit"] == "ms" else 1.0)
    except ValueError:
        raise ConfigError(f"{where}: {match['limit']!r} is no number") from None
    if not 0 < limit < math.inf:
        raise ConfigError(f"{where}: the limit must be more than 0")
    return limit
