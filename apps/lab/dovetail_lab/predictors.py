"""Predicted answer lengths, computed when a trace is loaded, so that all compared policies see the
same ones.

A prediction depends only on (trace, seed, request id), and on the number of generated tokens if it
is updated: neither on the order of requests nor on other requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import xxhash
from pydantic import Field

from dovetail_lab.calls import Value, parse_call
from dovetail_lab.traces.request import Trace, TraceRequest


class Predictor(Value):
    """Predicts from the true length and the request's two random numbers between 0 and 1."""

    def guess(self, tokens: int, first: float, second: float) -> int:
        raise NotImplementedError


class Oracle(Predictor):
    """Predicts the true length."""

    def guess(self, tokens: int, first: float, second: float) -> int:
        return tokens


class Noisy(Predictor):
    """True length times a lognormal error with median 1: two of three predictions are within a
    factor of exp(sigma)."""

    sigma: float = Field(default=0.5, ge=0, le=10)

    def guess(self, tokens: int, first: float, second: float) -> int:
        return max(1, round(tokens * math.exp(self.sigma * NormalDist().inv_cdf(first))))


class Bucket(Predictor):
    """Classifier over lengths: predicts the geometric middle of the class [growth^k, growth^(k+1))
    of the true length, or, with probability 1 - accuracy, of a neighboring class. An example is S3
    (Jin et al., NeurIPS '23, arXiv:2306.06000)."""

    growth: float = Field(default=2.0, gt=1, le=1e6)
    accuracy: float = Field(default=1.0, ge=0, le=1)

    def guess(self, tokens: int, first: float, second: float) -> int:
        index = math.floor(math.log(tokens, self.growth) + 1e-9)  # powers of growth start a class
        if first >= self.accuracy:
            index += 1 if second < 0.5 or index == 0 else -1
        middle: float = self.growth ** (index + 0.5)
        return max(1, round(middle))


class Refined(Noisy):
    """Starts like `noisy`. After each `every` generated tokens, the remaining tokens are estimated
    again with an independent error, and the errors so far are averaged: the error falls as the
    answer grows. An example is TRAIL (Shahout et al., ICLR '25, arXiv:2410.01035)."""

    every: int = Field(default=16, ge=1)

    def renewed(self, tokens: int, generated: int, errors: Sequence[float]) -> int:
        """Return the prediction after `generated` tokens. `errors`: standard normal, one for each
        estimate so far."""
        left = max(1, tokens - generated) * math.exp(self.sigma * sum(errors) / len(errors))
        return generated + max(1, round(left))


@dataclass(frozen=True, slots=True)
class _Updates:
    """Updates of a `Refined`. Random draws depend only on the trace's name, the seed, the request
    and the number of the estimate."""

    predictor: Refined
    trace: str
    seed: int

    def after(self, request: TraceRequest, generated: int) -> int | None:
        number, rest = divmod(generated, self.predictor.every)
        if rest or not number:
            return None
        names = (request.id, *(f"{request.id}\x1f{index}" for index in range(1, number + 1)))
        errors = [NormalDist().inv_cdf(_draws(self.trace, self.seed, name)[0]) for name in names]
        return self.predictor.renewed(request.output_tokens, generated, errors)


PREDICTORS: dict[str, type[Predictor]] = {
    "oracle": Oracle,
    "noisy": Noisy,
    "bucket": Bucket,
    "refined": Refined,
}


def parse_predictor(text: str) -> Predictor:
    """Parse `oracle`, `noisy(0.5)`, `bucket(2, 0.8)` or `refined(0.5, 16)`. Raises `TraceError`."""
    return parse_call(text, PREDICTORS, "predictor")


def predict(trace: Trace, predictor: Predictor, seed: int = 0) -> Trace:
    """Return the trace with `predicted_tokens` set, replacing existing ones."""

    def predicted(request: TraceRequest) -> TraceRequest:
        first, second = _draws(trace.name, seed, request.id)
        return replace(
            request, predicted_tokens=predictor.guess(request.output_tokens, first, second)
        )

    name = type(predictor).__name__.lower()
    options = ", ".join(f"{field}={value:g}" for field, value in predictor.model_dump().items())
    note = f"lengths predicted by {name}({options})" + (
        "" if isinstance(predictor, Oracle) else f", seed {seed}"
    )
    updates = _Updates(predictor, trace.name, seed) if isinstance(predictor, Refined) else None
    return replace(
        trace,
        requests=tuple(map(predicted, trace)),
        notes=(*trace.notes, note),
        length_updates=updates,
    )


def _draws(trace: str, seed: int, id: str) -> tuple[float, float]:
    """Return two random numbers, 0 < number < 1."""
    bits = xxhash.xxh128_intdigest("\x1f".join((trace, str(seed), id)).encode())
    return ((bits & (2**52 - 1)) + 0.5) / 2**52, ((bits >> 64 & (2**52 - 1)) + 0.5) / 2**52
