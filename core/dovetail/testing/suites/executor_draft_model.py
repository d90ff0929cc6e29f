"""`ExecutorDraftModel`: a check of executors that run a draft model."""

from __future__ import annotations

from dovetail.testing.checks import check, require
from dovetail.testing.suites.executor_subject import (
    MOST_DRAFTS,
    ExecutorSubject,
    model_directory,
    require_same,
)

STEPS = 3
ASKED = -1  # the id of a draft that the executor proposes
TOKENS = 1 + STEPS * (1 + MOST_DRAFTS)


class ExecutorDraftModel(ExecutorSubject):
    """A model that is its own draft model, so that its greedy drafts are right."""

    @check("executor.draft_model", since="1.0", capability="draft_model")
    def test_a_model_that_drafts_for_itself_is_right(self) -> None:
        """`draft_model` was the model itself, rows asked for drafts (-1), and most weren't those
        that the model generates; or the tokens were others than without drafts. Load
        `ExecutorConfig.draft_model`, keep its K and V for all tokens of a row, and put its tokens in
        place of -1 before the step that checks them."""
        directory = str(model_directory(self.model))
        with self._bench(draft_model=directory, max_drafts=MOST_DRAFTS) as bench:
            names = ("a", "b")
            expected = {
                name: bench.alone(name, self._prompt(bench, name), TOKENS, room=TOKENS)
                for name in names
            }
            for name in names:
                bench.add(name, self._prompt(bench, name), room=TOKENS + MOST_DRAFTS)
            bench.prefill(*names)
            kept = 0
            for _ in range(STEPS):
                asked = {name: [ASKED] * MOST_DRAFTS for name in names}
                counts = bench.check(asked).counts
                kept += 0 if counts is None else int(counts.sum()) - len(names)
            possible = STEPS * MOST_DRAFTS * len(names)
            require(
                2 * kept > possible,
                f"of {possible} drafts of the model for itself, {kept} were right",
            )
            for name in names:
                require_same(bench, name, expected[name], "with drafts of the model itself")
