"""A running fit of step times, for policies that ask `step.estimate_s` and for planning late. The same code in simulation."""

from __future__ import annotations

FORGETTING = 0.995  # weight of the past: about the last 200 steps count
MIN_SECONDS = 1e-6


class StepTimeFit:
    """Recursive least squares of seconds on (1, prefill tokens, decodes, context tokens), forgetting slowly.

    Haykin, Adaptive Filter Theory, ch. 10. Inputs are scaled to about one so that the update stays well conditioned; pure Python, since numpy
    would cost more than it saves at four coefficients.
    """

    SCALE = (1.0, 1e-3, 1e-2, 1e-5)

    def __init__(self) -> None:
        self._weights = [0.0, 0.0, 0.0, 0.0]
        self._inverse = [[1e3 if i == j else 0.0 for j in range(4)] for i in range(4)]
        self.steps = 0

    def update(self, seconds: float, prefill_tokens: int, decodes: int, context_tokens: int) -> None:
        """Learn from a finished step."""
        x = self._scaled(prefill_tokens, decodes, context_tokens)
        p = self._inverse
        px = [sum(row[j] * x[j] for j in range(4)) for row in p]
        denominator = FORGETTING + sum(x[i] * px[i] for i in range(4))
        gain = [value / denominator for value in px]
        error = seconds - sum(w * v for w, v in zip(self._weights, x, strict=True))
        self._weights = [w + g * error for w, g in zip(self._weights, gain, strict=True)]
        # Entries that no step excites would grow without bound: forget only while the matrix is small.
        forget = FORGETTING if max(p[i][i] for i in range(4)) < 1e6 else 1.0
        self._inverse = [[(p[i][j] - gain[i] * px[j]) / forget for j in range(4)] for i in range(4)]
        self.steps += 1

    def estimate_s(self, prefill_tokens: int, decodes: int, context_tokens: int) -> float:
        """Seconds that such a step takes; 0.0 before the first was seen."""
        if not self.steps:
            return 0.0
        x = self._scaled(prefill_tokens, decodes, context_tokens)
        return max(MIN_SECONDS, sum(w * v for w, v in zip(self._weights, x, strict=True)))

    def _scaled(self, prefill_tokens: int, decodes: int, context_tokens: int) -> tuple[float, float, float, float]:
        _, a, b, c = self.SCALE
        return (1.0, prefill_tokens * a, decodes * b, context_tokens * c)
