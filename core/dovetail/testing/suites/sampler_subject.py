"""`SamplerSubject`: creates samplers for checks, and compares their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.graphs import GraphSupport
from dovetail.api.sampler import RowSampling
from dovetail.testing.checks import require
from dovetail.testing.suite import Suite
from dovetail.testing.suites.sampler_bench import Bench, Row, draws
from dovetail.testing.suites.sampler_oracle import changed_logits, distribution, p_value

ALPHA = 1e-5  # false-positive rate of a chi-square test
DRAWS = 5_000  # for a chi-square test with a known set of possible tokens
SUPPORT_DRAWS = 1_000
LOGITS = (np.random.default_rng(1).normal(size=40) * 1.5).tolist()


class SamplerSubject(Suite):
    """Runs on `device`: by default a GPU if available, otherwise the CPU. Samplers must support
    both."""

    kind = "sampler"
    settings = Suite.settings | {"device"}

    device: ClassVar[str | None] = None

    def declares(self, capability: str) -> bool:
        """`full_graph` is `GraphSupport.ALL`; `full_process` and `processed_logprobs` are
        `processors` with that, or with `logprobs`."""
        can = self.capabilities
        if capability == "full_graph":
            return bool(can.cuda_graph is GraphSupport.ALL)
        if capability == "full_process":
            return bool(can.processors and can.cuda_graph is GraphSupport.ALL)
        if capability == "processed_logprobs":
            return bool(can.processors and can.logprobs)
        return super().declares(capability)

    @property
    def place(self) -> str:
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    def bench(
        self,
        rows: Sequence[Row],
        places: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Bench:
        return Bench(self.make, rows, places, dtype=dtype, device=self.place)

    def draws(
        self, logits: Sequence[float], sampling: RowSampling, count: int, **fields: Any
    ) -> NDArray[np.int64]:
        return draws(self.make, logits, sampling, count, device=self.place, **fields)

    def assert_support(
        self, logits: Sequence[float], sampling: RowSampling, count: int = SUPPORT_DRAWS
    ) -> None:
        """Require that `count` draws give exactly the possible tokens; each must have a probability
        of at least about 20 / count."""
        came = set(np.flatnonzero(self.draws(logits, sampling, count)).tolist())
        may = set(np.flatnonzero(distribution(logits, sampling)).tolist())
        require(
            came == may,
            f"{said(sampling)}: the tokens {sorted(may)} may come; {sorted(came - may)} came "
            f"besides, {sorted(may - came)} never came",
        )

    def assert_drawn_in_proportion(
        self, sampling: RowSampling, logits: Sequence[float] = LOGITS, count: int = DRAWS
    ) -> None:
        p = p_value(self.draws(logits, sampling, count), distribution(logits, sampling))
        require(
            p > ALPHA,
            f"{said(sampling)}: {count:,} draws don't follow the distribution (chi-square test: p "
            f"= {p:.1e}, allowed from {ALPHA})",
        )

    def assert_greedy(self, rows: Sequence[Row], places: Sequence[int] | None = None) -> None:
        """Require that each row, or line, gets the best of its modified logits."""
        for row, token in zip(rows, self.bench(rows, places).tokens(), strict=True):
            output = (*row.output, *row.drafts)
            values = changed_logits(row.logits, row.sampling, row.prompt, output)
            require(
                token == int(values.argmax()),
                f"{said(row.sampling)} after the prompt {row.prompt}, the output {row.output} and "
                f"the drafts {row.drafts}: "
                f"token {token} came, but the logits "
                f"{np.round(row.logits, 3).tolist()} become {np.round(values, 3).tolist()}, so "
                f"that {int(values.argmax())} is right",
            )


def near(values: torch.Tensor, exact: torch.Tensor) -> bool:
    return bool(((values.double() - exact).abs() < 1e-5).all())


def said(sampling: RowSampling) -> str:
    """Return the parameters that aren't neutral, as text."""
    neutral = RowSampling()
    fields = {name: getattr(sampling, name) for name in RowSampling.__dataclass_fields__}
    changed = [
        f"{name}={value}" for name, value in fields.items() if value != getattr(neutral, name)
    ]
    return ", ".join(changed) or "temperature=1.0"
