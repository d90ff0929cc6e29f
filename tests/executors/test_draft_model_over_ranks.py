"""A draft model that is split over ranks, as the model is."""

from __future__ import annotations

from dovetail.api.executor import Result
from dovetail_executors.local import LocalExecutor
from dovetail_executors.options import LocalOptions, TensorOptions
from dovetail_executors.tensor import TensorExecutor
from tests.runtime.demo import DRAFT, check, context, prefill

PROMPTS = [[5, 17, 200, 31, 8], [9, 12], [400, 3, 77]]


def results(executor: LocalExecutor | TensorExecutor) -> list[tuple[list[int], list[int]]]:
    """Return tokens and counts of three steps with drafts after the prompts."""

    def told(result: Result) -> tuple[list[int], list[int]]:
        return result.token_ids.tolist(), [] if result.counts is None else result.counts.tolist()

    try:
        first = told(executor.collect(executor.submit(prefill(executor.start(), PROMPTS))))
        return [first, *(told(executor.collect(executor.submit(check([[-1, -1]] * 3, step)))) for step in (1, 2, 3))]
    finally:
        executor.stop()


def test_ranks_draft_as_one_does() -> None:
    config = context(max_drafts=3, draft_model=DRAFT)
    alone = results(LocalExecutor(LocalOptions(device="cpu"), config))
    assert results(TensorExecutor(TensorOptions(device="cpu"), config)) == alone
    assert sum(sum(counts) for _, counts in alone) > 9, "some drafts are right"
