"""`ExecutorProcessors`: a check of executors that apply logits processors, with two of its own.

Torch is imported by the executor only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from dovetail.api.clock import WallClock
from dovetail.api.executor import ComponentRef
from dovetail.api.logits_processor import LogitsProcessor, ProcessedRow
from dovetail.testing.checks import check, require
from dovetail.testing.suites.executor_bench import Bench
from dovetail.testing.suites.executor_subject import (
    LENGTHS,
    ExecutorSubject,
    context_of,
    require_same,
)

if TYPE_CHECKING:
    import torch

    from dovetail.api.sampler import Lines

FIRST, LAST = "dovetail:suite-first", "dovetail:suite-last"
STEPS = 3


class OnlyToken(LogitsProcessor):
    """Logits processor that leaves a row one token."""

    class Arguments(BaseModel):
        token: int

    def prepare(self, max_rows: int) -> None:
        self._tokens: dict[int, int] = {}

    def update(self, removed: Sequence[int], added: Sequence[ProcessedRow]) -> None:
        for row in removed:
            self._tokens.pop(row, None)
        for one in added:
            self._tokens[one.row] = one.arguments.token  # type: ignore[attr-defined]

    def apply(self, logits: torch.Tensor, lines: Lines) -> None:
        for line, row in enumerate(lines.rows.tolist()):
            if row in self._tokens:
                logits[line] = float("-inf")
                logits[line, self._tokens[row]] = 0.0


REFS = tuple(
    ComponentRef("logits_processor", name, f"{__name__}:OnlyToken") for name in (FIRST, LAST)
)


class ExecutorProcessors(ExecutorSubject):
    """Checks of rows with logits processors, beside rows without."""

    @check("executor.processors", since="1.0", capability="logits_processors")
    def test_rows_get_the_processors_that_they_ask_for(self) -> None:
        """A row's `RowSampling.logits_processors` were ignored, or applied to another row, to the
        next one in its place, or in another order than `ExecutorContext.logits_processors` has.
        Make them from their refs, tell them the rows that come and go, and let the sampler apply
        them (`SampleInputs.process`)."""
        with self._processing() as bench:
            alone = bench.alone("a", self._prompt(bench, "a"), STEPS)
            one, two = ((alone[0] + more) % bench.capacity.vocab_size for more in (1, 2))
            self._add(bench, "a")
            self._ask(bench, "b", {FIRST: one})
            self._ask(bench, "c", {FIRST: one, LAST: two})
            self._run(bench, "a", "b", "c")
            require_same(bench, "a", alone, "beside rows that ask for logits processors")
            for name, token in (("b", one), ("c", two)):
                require(
                    bench.tokens[name] == [token] * STEPS,
                    f"a row whose processors leave it token {token} generated {bench.tokens[name]}",
                )
            row = bench.requests["b"].row
            bench.remove("a", "b", "c")
            bench.tokens["a"] = []
            self._add(bench, "a", rows={"a": row})
            self._run(bench, "a")
            require_same(bench, "a", alone, "in the row of one that asked for logits processors")

    @contextmanager
    def _processing(self) -> Iterator[Bench]:
        context = replace(context_of(self.model, WallClock(), None), logits_processors=REFS)
        executor = self.make(context)
        try:
            yield Bench(executor, executor.start())
        finally:
            executor.stop()

    def _ask(self, bench: Bench, name: str, tokens: dict[str, int]) -> None:
        asked: dict[str, Any] = {one: {"token": token} for one, token in tokens.items()}
        bench.add(name, self._prompt(bench, name), logits_processors=asked)

    def _run(self, bench: Bench, *names: str) -> None:
        """Compute the prompts, then a token of each in each step."""
        bench.submit({name: LENGTHS[name] for name in names})
        bench.collect()
        for _ in range(STEPS - 1):
            bench.submit(dict.fromkeys(names, 1))
            bench.collect()
