"""`ExecutorProcessors`: a check of executors that apply logits processors, with two of its own.

Torch is imported by the executor only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from dovetail.api.executor import ComponentRef
from dovetail.api.logits_processor import LogitsProcessor, ProcessedRow
from dovetail.testing.checks import check, require
from dovetail.testing.suites.executor_bench import Bench
from dovetail.testing.suites.executor_subject import (
    LENGTHS,
    MOST_DRAFTS,
    ExecutorSubject,
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
        next one in its place, or in another order than `ExecutorContext.logits_processors` has; or
        lost when the request returned to a row after a preemption. Make them from their refs, tell
        them the rows that come and go, and let the sampler apply them (`SampleInputs.process`)."""
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
            self._return(bench, {"b": {FIRST: one}, "c": {FIRST: one, LAST: two}})
            row = bench.requests["b"].row
            bench.remove("a", "b", "c")
            bench.tokens["a"] = []
            self._add(bench, "a", rows={"a": row})
            self._run(bench, "a")
            require_same(bench, "a", alone, "in the row of one that asked for logits processors")

    def _return(self, bench: Bench, asked: dict[str, dict[str, int]]) -> None:
        """Preempt these requests, and require that they get the same processors in other rows."""
        rows = [bench.requests[name].row for name in asked]
        tokens = {name: list(bench.requests[name].tokens) for name in asked}
        bench.remove(*asked)
        bench.decode("a")
        for (name, processors), row in zip(asked.items(), rows[::-1], strict=True):
            self._ask(bench, name, processors, tokens[name], row=row, prompt_len=LENGTHS[name])
        bench.prefill(*asked)
        bench.decode(*asked)
        for name in asked:
            expected = [tokens[name][-1]] * (STEPS + 2)
            require(
                bench.tokens[name] == expected,
                f"a row whose processors leave it token {expected[0]} generated "
                f"{bench.tokens[name]}, the last two after a preemption",
            )

    @check("executor.drafts_processors", since="1.0", capability="drafts")
    def test_processors_apply_to_all_lines(self) -> None:
        """With drafts, a row with a logits processor generated tokens that this forbids, or a row
        beside it other tokens than without drafts. Processors change the logits of every line."""
        if not self.declares("logits_processors"):
            return
        with self._processing() as bench:
            count = STEPS + MOST_DRAFTS
            alone = bench.alone("a", self._prompt(bench, "a"), count, room=count)
            token = (alone[0] + 1) % bench.capacity.vocab_size
            self._add(bench, "a", room=2 * count)
            self._ask(bench, "b", {FIRST: token}, room=2 * count)
            bench.prefill("a", "b")
            for drafts in ([token] * MOST_DRAFTS, [token, alone[0], token]):
                done = len(bench.tokens["a"])
                bench.check({"b": drafts, "a": alone[done : done + 1]})
            require_same(bench, "a", alone, "with drafts, beside a row with a logits processor")
            expected = [token] * (1 + MOST_DRAFTS + 1 + 2)
            require(
                bench.tokens["b"] == expected,
                f"a row whose processor leaves it token {token} generated {bench.tokens['b']} with "
                f"drafts, expected {expected}",
            )

    def _processing(self) -> AbstractContextManager[Bench]:
        """One bench for all checks: of executors that check drafts, one that does."""
        drafts = MOST_DRAFTS if self.declares("drafts") else 0
        return self._shared_bench(logits_processors=REFS, max_drafts=drafts)

    def _ask(
        self,
        bench: Bench,
        name: str,
        tokens: dict[str, int],
        known: Sequence[int] | None = None,
        **fields: Any,
    ) -> None:
        """Add a request with processors, with its prompt or the `known` tokens."""
        asked: dict[str, Any] = {one: {"token": token} for one, token in tokens.items()}
        known = self._prompt(bench, name) if known is None else known
        bench.add(name, known, logits_processors=asked, **fields)

    def _run(self, bench: Bench, *names: str) -> None:
        """Compute the prompts, then a token of each in each step."""
        bench.submit({name: LENGTHS[name] for name in names})
        bench.collect()
        for _ in range(STEPS - 1):
            bench.submit(dict.fromkeys(names, 1))
            bench.collect()
