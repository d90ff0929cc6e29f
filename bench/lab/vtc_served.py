"""The step times and the host's own times of the server that the VTC paper measured, fitted
together on single batches and on what its clients saw.

A batch measured alone says what the device takes. A served request's answer, from its first token
to its last, took its decode steps and what came in between: prompts that were admitted meanwhile.
Who was in the batch at each moment is known from the same file. So each request gives one equation:

    last - first = decode steps x (device at the rows and the context of the time + host a step + host a row x rows)
                   + decode steps whose slots of the pool aren't neighbours x what copying takes
                   + prompts admitted meanwhile (device) + host an admission x admissions + host a
                     request x requests admitted

Which decode steps these are is found by replaying the run's admissions and ends through the pool.

Requests that ran when the server was full and those that ran alone at its end tell a row's share
from a step's. Rows and context are means over steps, not over time: a moment counts as much as
decode steps fit into it, by single batches alone, and not at all while prompts are computed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.lab.vtc_pool import TokenPool
from dovetail_lab.fitting import (
    Measurement,
    fit_piecewise,
    fitted_weights,
    knot_weights,
    relative_errors,
)
from dovetail_lab.step_profile import StepTimeProfile
from dovetail_lab.step_time import PiecewiseStepTime, StepShape
from dovetail_lab.traces import Trace
from dovetail_lab.traces.request import TraceRequest

Floats = NDArray[np.float64]

# token that the server puts before each prompt: 11 prompts of 256 fit its 3,072 tokens, and 12
# don't
BEGINNING = 1
KNOTS = (1, 64, 256, 10_000)  # tokens: up to 64 rows share a tile of the products
HOST = ("core_s", "core_per_row_s", "admission_s", "per_admitted_s")
GRID_S = 0.01  # the batch is looked at so often
TOGETHER_S = 0.005  # first tokens that come within this were admitted together
FEWEST = 30  # tokens of an answer: of shorter ones the ends matter too much
POOL_TOKENS = 10_000


@dataclass(frozen=True, slots=True)
class Served:
    """A request as its client saw it. Seconds since the run began."""

    client: str
    arrival_s: float
    first_s: float
    last_s: float
    prompt_tokens: int  # as the file counts them: `BEGINNING` fewer than the server computes
    output_tokens: int


@dataclass(frozen=True, slots=True)
class ServedRun:
    """A measured run of the artifact."""

    name: str
    requests: tuple[Served, ...]
    total_s: float

    @classmethod
    def load(cls, path: Path) -> ServedRun:
        """Read a file of the artifact. Raises `ValueError` if a request was aborted, which the
        simulation can't tell."""
        result = json.loads(path.read_text())["result"]
        if result["num_abort"]:
            raise ValueError(
                f"{path}: {result['num_abort']} requests were aborted, which isn't simulated"
            )
        found = []
        for one in result["responses"]:
            arrival = one["req_time"]
            first = arrival + one["first_token_latency"]
            last = arrival + one["request_latency"]
            found.append(
                Served(
                    one["adapter_dir"], arrival, first, last, one["prompt_len"], one["output_len"]
                )
            )
        return cls(
            path.stem, tuple(sorted(found, key=lambda one: one.arrival_s)), result["total_time"]
        )

    @property
    def trace(self) -> Trace:
        """The same requests, to be simulated."""
        requests = [
            TraceRequest(
                f"r{at}",
                one.arrival_s,
                one.prompt_tokens + BEGINNING,
                one.output_tokens,
                client=one.client,
            )
            for at, one in enumerate(self.requests)
        ]
        return Trace(self.name, "VTC-artifact", tuple(requests))


def single_batches(path: Path) -> list[Measurement]:
    """Return two measurements of each (input, output): `batch` prompts at once, and `output`
    decodes of them. The file has seconds a request."""
    found = []
    for prompt, outputs in json.loads(path.read_text()).items():
        for output, (batch, prefill_s, decode_s) in outputs.items():
            ones = np.ones(batch, np.int64)
            had = np.zeros(batch, np.int64)
            found.append(Measurement((StepShape.of(ones * int(prompt), had),), batch * prefill_s))
            decodes = tuple(
                StepShape.of(ones, had + int(prompt) + done) for done in range(int(output))
            )
            found.append(Measurement(decodes, batch * decode_s))
    return found


@dataclass(frozen=True, slots=True)
class Server:
    """The fitted server. `scattered_s`: see `vtc_pool.py`."""

    profile: StepTimeProfile
    scattered_s: float

    def times(self, factor: float) -> Server:
        """Return the same with the host's times, and that of copying, `factor` times as long."""
        host = {name: factor * getattr(self.profile, name) for name in HOST}
        return Server(self.profile.model_copy(update=host), factor * self.scattered_s)

    @property
    def weights(self) -> Floats:
        """The coefficients of the equations [knots + 1 + host + 1]."""
        model = PiecewiseStepTime.model_validate(self.profile.step_time)
        host = [getattr(self.profile, name) for name in HOST]
        return np.array(
            [*(knot_s for _, knot_s in model.points), model.per_context_s, *host, self.scattered_s]
        )


def fit_server(batches: Sequence[Measurement], runs: Sequence[ServedRun]) -> Server:
    """Fit device and host together: non-negative least squares of relative errors, in which each
    run counts as much as all `batches`."""
    model = fit_piecewise(batches, KNOTS, terms=("per_context_s",))
    alone = np.stack(
        [np.concatenate([_device(one.shapes), np.zeros(len(HOST) + 1)]) for one in batches]
    )
    rows = [alone]
    seconds = [np.array([one.seconds for one in batches])]
    shares = [np.ones(len(batches))]
    for run in runs:
        equations, took = _equations(run, model)
        rows.append(equations)
        seconds.append(took)
        shares.append(np.full(len(took), np.sqrt(len(batches) / len(took))))
    weights = fitted_weights(np.concatenate(rows), np.concatenate(seconds), np.concatenate(shares))
    points = tuple(zip(KNOTS, weights[: len(KNOTS)], strict=True))
    model = PiecewiseStepTime(points=points, per_context_s=weights[len(KNOTS)])
    host: dict[str, Any] = dict(zip(HOST, weights[len(KNOTS) + 1 : -1], strict=True))
    profile = StepTimeProfile(
        name="a10g-llama-2-7b",
        step_time=model.model_dump(mode="json"),
        error=float(np.abs(relative_errors(model, batches)).mean()),
        judged_on=f"the {len(batches)} timings of single batches, which it was fitted on beside "
        f"{', '.join(run.name for run in runs)}",
        kv_tokens=POOL_TOKENS,
        machine="NVIDIA A10G",
        model="Llama-2-7B",
        engine="S-LoRA (VTC's artifact)",
        source="cost_profile.json and served runs of github.com/Ying1123/VTC-artifact, Apache-2.0",
        **host,
    )
    return Server(profile, float(weights[-1]))


def answers_off_by(server: Server, run: ServedRun) -> float:
    """Return the mean of |predicted - measured| / measured over the times from first to last token,
    by the equations that `fit_server` solves."""
    model = PiecewiseStepTime.model_validate(server.profile.step_time)
    equations, seconds = _equations(run, model)
    return float(np.abs(equations @ server.weights / seconds - 1.0).mean())


def _device(shapes: Sequence[StepShape]) -> Floats:
    """Return the factors of the device's coefficients [knots + 1], summed over the steps."""
    return np.append(
        knot_weights([shape.tokens for shape in shapes], KNOTS).sum(axis=0),
        sum(shape.context_tokens for shape in shapes),
    )


def _equations(run: ServedRun, device: PiecewiseStepTime) -> tuple[Floats, Floats]:
    """Return the factors of all coefficients [answers, knots + 1 + host + 1] and the seconds of each
    answer [answers]. What the steps of `device` take is a weight of moments only."""
    instants = np.arange(0.0, run.total_s + 2 * GRID_S, GRID_S)
    rows = np.zeros(len(instants))
    context = np.zeros(len(instants))
    for one in run.requests:
        low, high = np.searchsorted(instants, (one.first_s, one.last_s))
        rows[low:high] += 1
        context[low:high] += (
            BEGINNING + one.prompt_tokens + np.linspace(0, one.output_tokens, high - low)
        )
    admitted_s, tokens, requests = _admissions(run)
    prompts = np.column_stack([knot_weights(tokens, KNOTS), tokens])
    weights = np.append([seconds for _, seconds in device.points], device.per_context_s)
    decodes = np.column_stack([knot_weights(np.maximum(rows, 1), KNOTS), context])
    share = 1.0 / (decodes @ weights)  # decode steps in a second [instants]
    for end, took in zip(admitted_s, prompts @ weights, strict=True):
        share[np.searchsorted(instants, end - took) : np.searchsorted(instants, end)] = 0.0
    until = np.cumsum(
        np.column_stack([decodes, rows, np.ones(len(instants))]) * share[:, None], axis=0
    )
    begins, ends = (
        until[np.minimum(np.searchsorted(instants, times), len(until) - 1), -1]
        for times in zip(*((one.first_s, one.last_s) for one in run.requests), strict=True)
    )
    steps = np.array([one.output_tokens - 1 for one in run.requests])
    long = steps >= FEWEST
    # without the host a second has too many decode steps
    begins *= np.median(steps[long] / (ends - begins)[long])
    begins = begins.round().astype(np.int64)
    scattered = _scattered(run.requests, begins.tolist())
    factors = []
    seconds = []
    for one, begin in zip(run.requests, begins.tolist(), strict=True):
        low, high = np.searchsorted(instants, (one.first_s, one.last_s))
        total = until[high - 1] - until[low]
        if one.output_tokens < FEWEST or total[-1] <= 0.0:
            continue
        count = one.output_tokens - 1
        mean = total[:-1] / total[-1]
        meanwhile = (admitted_s > one.first_s + TOGETHER_S) & (admitted_s <= one.last_s)
        device = count * mean[:-1] + prompts[meanwhile].sum(axis=0)
        host = [count, count * mean[-1], int(meanwhile.sum()), int(requests[meanwhile].sum())]
        copied = scattered[begin + count] - scattered[begin]
        factors.append(np.concatenate([device, host, [copied]]))
        seconds.append(one.last_s - one.first_s)
    return np.stack(factors), np.array(seconds)


def _scattered(requests: Sequence[Served], begins: Sequence[int]) -> NDArray[np.int64]:
    """Return how many of the decode steps before each were scattered [steps + 1], if requests are
    admitted before decode step `begins`."""
    pool = TokenPool(POOL_TOKENS)
    ends = [begin + one.output_tokens - 1 for one, begin in zip(requests, begins, strict=True)]
    admitted: dict[int, list[int]] = defaultdict(list)
    ended: dict[int, list[int]] = defaultdict(list)
    for row, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        admitted[begin].append(row)
        ended[end].append(row)
    rows: dict[int, None] = {}
    scattered = np.zeros(max(ends) + 2, np.int64)
    for step in range(max(ends) + 1):
        for row in ended.get(step, ()):
            pool.release(row)
            rows.pop(row, None)
        for row in admitted.get(step, ()):
            pool.prefill(row, BEGINNING + requests[row].prompt_tokens)
            if ends[row] > step:
                rows[row] = None
        if rows:
            scattered[step] = not pool.decode(list(rows))
    return np.concatenate([[0], np.cumsum(scattered)[:-1]])


def _admissions(run: ServedRun) -> tuple[Floats, Floats, Floats]:
    """Return of each admission, requests whose first tokens came together, when it ended, its
    prompt tokens and its requests [admissions]."""
    admitted = sorted(run.requests, key=lambda one: one.first_s)
    first = np.array([one.first_s for one in admitted])
    starts = np.flatnonzero(np.diff(first, prepend=-np.inf) > TOGETHER_S)
    tokens = np.add.reduceat(
        np.array([BEGINNING + one.prompt_tokens for one in admitted], np.float64), starts
    )
    return first[starts], tokens, np.diff(starts, append=len(first)).astype(np.float64)
