"""A draft model, or a draft head, that is split over ranks, as the model is."""

from __future__ import annotations

import pytest

from dovetail.api.executor import ComponentRef, Result
from dovetail_executors.local import LocalExecutor
from dovetail_executors.options import LocalOptions, TensorOptions
from dovetail_executors.tensor import TensorExecutor
from tests.models.heads import CHAINED, chained, glm4_moe
from tests.runtime.demo import DRAFT, check, context, prefill

PROMPTS = [[5, 17, 200, 31, 8], [9, 12], [400, 3, 77]]
CHAIN = [[5, 17, 20, 31, 8], [9], [4, 3, 7]]


def results(
    executor: LocalExecutor | TensorExecutor, prompts: list[list[int]]
) -> list[tuple[list[int], list[int]]]:
    """Return tokens and counts of three steps with drafts after the prompts."""

    def told(result: Result) -> tuple[list[int], list[int]]:
        return result.token_ids.tolist(), [] if result.counts is None else result.counts.tolist()

    try:
        first = told(executor.collect(executor.submit(prefill(executor.start(), prompts))))
        return [
            first,
            *(
                told(executor.collect(executor.submit(check([[-1, -1]] * 3, step))))
                for step in (1, 2, 3)
            ),
        ]
    finally:
        executor.stop()


@pytest.mark.slow("drafts in several ranks")
def test_ranks_draft_as_one_does(threads_as_ranks: None) -> None:
    config = context(max_drafts=3, draft_model=DRAFT)
    alone = results(LocalExecutor(LocalOptions(device="cpu"), config), PROMPTS)
    assert results(TensorExecutor(TensorOptions(device="cpu"), config), PROMPTS) == alone
    assert sum(sum(counts) for _, counts in alone) > 9, "some drafts are right"


@pytest.mark.slow("drafts in several ranks")
def test_ranks_draft_with_their_shares_of_a_head_as_one_does(threads_as_ranks: None) -> None:
    """The head is always right, if all ranks read the same states, and the tokens after them."""
    with chained(glm4_moe(**CHAINED), mtp=True) as directory:
        config = context(
            model=str(directory),
            max_drafts=3,
            draft_model=str(directory),
            draft_head=ComponentRef("drafter", "dovetail:mtp", "dovetail_models.mtp:Mtp"),
        )
        alone = results(LocalExecutor(LocalOptions(device="cpu"), config), CHAIN)
        assert results(TensorExecutor(TensorOptions(device="cpu"), config), CHAIN) == alone
    assert [counts for _, counts in alone[1:]] == [[3, 3, 3]] * 3
