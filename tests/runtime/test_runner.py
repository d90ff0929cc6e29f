"""The runner: a request gets the same tokens as alone, for any division into steps and any row."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.executor import PromptLogprobs
from dovetail.api.kv_cache import PageCopy
from dovetail.api.model import ModelInputs
from dovetail.api.sampler import RowSampling
from dovetail.errors import DovetailError
from dovetail.nn.logprobs import top_logprobs
from dovetail_executors.runtime import prompt_logprobs, runner
from tests.rounding import assert_rounded
from tests.runtime.fakes import NAN_TOKEN, ROUNDINGS, VOCAB, Bench, generate
from tests.support import examples

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7], [1, 8, 2, 8, 1, 8]]
tokens_of_a_prompt = st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=20)


def decode(bench: Bench, rows: list[int], count: int) -> dict[int, list[int]]:
    """`count` steps of one token for each row."""
    out: dict[int, list[int]] = {row: [] for row in rows}
    for _ in range(count):
        for row, token in zip(
            rows, bench.run(dict.fromkeys(rows, 1)).token_ids.tolist(), strict=True
        ):
            out[row].append(token)
    return out


@given(
    st.lists(tokens_of_a_prompt, min_size=1, max_size=4),
    st.integers(1, 7),
    st.sampled_from([1, 3, 4, 16]),
)
@examples(quick=20, full=400)
def test_chunked_and_batched_is_what_whole_and_alone_is(
    prompts: list[list[int]], chunk: int, block_size: int
) -> None:
    bench = Bench(block_size=block_size, num_blocks=200)
    added = [bench.new(row, prompt) for row, prompt in enumerate(prompts)]
    generated: dict[int, list[int]] = {row: [] for row in range(len(prompts))}
    for _ in range(20 + 3):  # enough for the longest prompt, a token a step, and three more
        left = {
            row: int(bench.rows.known[row] - bench.rows.computed[row])
            if not added
            else len(prompts[row])
            for row in generated
        }
        work = {row: min(count, chunk) for row, count in left.items()}
        for row, token in zip(work, bench.run(work, added).token_ids.tolist(), strict=True):
            generated[row] += [token] if token >= 0 else []
        added = []
    for row, prompt in enumerate(prompts):
        assert generated[row][:3] == generate(prompt, 3)


def logits_after(tokens: list[int]) -> torch.Tensor:
    """Return [1, vocab] logits of the tokens in one step without other requests."""
    bench = Bench(max_rows=1, block_size=64, num_blocks=1)
    bench.run({0: len(tokens)}, [bench.new(0, tokens)])
    return bench.sampler.last_logits


def test_a_row_that_does_not_sample_yields_minus_one() -> None:
    bench = Bench()
    result = bench.run({0: 4, 1: 2}, [bench.new(0, PROMPTS[0]), bench.new(1, PROMPTS[1])])
    assert result.token_ids[0] == -1
    assert result.token_ids[1] == generate(PROMPTS[1], 1)[0]


def test_steps_in_flight_need_no_ids_on_the_host_and_come_back_in_order() -> None:
    bench = Bench()
    pending = [
        bench.submit({0: 9}, [bench.new(0, PROMPTS[0])]),
        bench.submit({0: 1}),
        bench.submit({0: 1}),
    ]
    results = [bench.runner.collect(step) for step in pending]
    assert [result.step for result in results] == [1, 2, 3]
    assert [int(result.token_ids[0]) for result in results] == generate(PROMPTS[0], 3)


def test_collecting_out_of_order_is_an_error_that_names_the_oldest() -> None:
    bench = Bench()
    first, second = bench.submit({0: 9}, [bench.new(0, PROMPTS[0])]), bench.submit({0: 1})
    with pytest.raises(DovetailError, match="step 2 was collected, but step 1 is the oldest"):
        bench.runner.collect(second)
    bench.runner.collect(first)
    bench.runner.collect(second)
    with pytest.raises(DovetailError, match="none is in flight"):
        bench.runner.collect(second)


def test_a_row_given_to_another_request_remembers_nothing() -> None:
    bench = Bench()
    bench.run({0: 9}, [bench.new(0, PROMPTS[0], RowSampling(prompt_logprobs=1))])
    decode(bench, [0], 5)
    result = bench.run({0: 2}, [bench.new(0, PROMPTS[1])], removed=[0])
    assert [int(result.token_ids[0]), *decode(bench, [0], 3)[0]] == generate(PROMPTS[1], 4)
    assert result.values(PromptLogprobs) == {}


def test_a_preempted_request_continues_with_the_same_tokens() -> None:
    bench = Bench()
    first = [
        int(bench.run({0: 9}, [bench.new(0, PROMPTS[0])]).token_ids[0]),
        *decode(bench, [0], 2)[0],
    ]
    bench.run({1: 2}, [bench.new(1, PROMPTS[1])], removed=[0])
    known = PROMPTS[0] + first
    again = bench.run({2: len(known), 1: 1}, [bench.new(2, known, prompt_len=9)])
    rest = [int(again.token_ids[0]), *decode(bench, [2], 2)[2]]
    assert first + rest == generate(PROMPTS[0], 6)
    assert bench.rows.prompt_lens[2] == 9


def test_a_request_that_finds_its_prefix_computed_computes_only_the_rest() -> None:
    bench = Bench()
    bench.run({0: 9}, [bench.new(0, PROMPTS[0])])
    bench.blocks[1] = bench.blocks[0][:2]
    result = bench.run({1: 1}, [bench.new(1, PROMPTS[0], computed=8)])
    assert result.token_ids.tolist() == generate(PROMPTS[0], 1)
    assert_rounded(bench.sampler.last_logits, logits_after(PROMPTS[0]), ROUNDINGS)


def test_copies_run_before_the_step_that_carries_them() -> None:
    bench = Bench()
    bench.run({0: 9}, [bench.new(0, PROMPTS[0])])
    own = bench.free_blocks.pop()
    # a fork: full blocks shared, the partial one copied
    bench.blocks[1] = [
        *bench.blocks[0][:2],
        own,
    ]
    longer = [*PROMPTS[0], 7, 7]
    result = bench.run(
        {1: 2}, [bench.new(1, longer, computed=9)], copies=[PageCopy(bench.blocks[0][2], own)]
    )
    assert result.token_ids.tolist() == generate(longer, 1)
    assert_rounded(bench.sampler.last_logits, logits_after(longer), ROUNDINGS)
    assert decode(bench, [0], 1)[0] == generate(PROMPTS[0], 2)[1:]


def test_sampled_ids_become_history_on_the_device() -> None:
    bench = Bench()
    bench.run({2: 9}, [bench.new(2, PROMPTS[0])])
    decode(bench, [2], 2)
    history = bench.rows.history
    assert history.num_tokens[2] == 12
    assert history.prompt_lens[2] == 9
    assert history.token_ids[2, :12].tolist() == PROMPTS[0] + generate(PROMPTS[0], 3)


def test_logprobs_are_of_the_rows_that_sample_in_order() -> None:
    bench = Bench()
    asks = RowSampling(logprobs=3)
    added = [
        bench.new(0, PROMPTS[0], asks),
        bench.new(1, PROMPTS[1], asks),
        bench.new(2, PROMPTS[2]),
    ]
    result = bench.run({0: 4, 1: 2, 2: 6}, added)
    assert result.logprobs is not None
    expected = top_logprobs(bench.sampler.last_logits, torch.from_numpy(result.token_ids[1:]), 3)
    np.testing.assert_array_equal(result.logprobs.token_ids, expected.token_ids.numpy())
    assert_rounded(result.logprobs.logprobs, expected.logprobs, ROUNDINGS)
    np.testing.assert_array_equal(result.logprobs.ranks, expected.ranks.numpy())


@pytest.mark.parametrize("chunk", [1, 4, 9])
@pytest.mark.parametrize("logits_at_once", [1, 2 * VOCAB, 1 << 24])
def test_prompt_logprobs_are_those_of_the_prompt_however_it_is_cut(
    chunk: int, logits_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "LOGITS_AT_ONCE", logits_at_once)
    bench, prompt = Bench(), PROMPTS[0]
    added = [bench.new(0, prompt, RowSampling(prompt_logprobs=2)), bench.new(1, PROMPTS[1])]
    parts = []
    for start in range(0, len(prompt), chunk):
        result = bench.run({**({1: 2} if added else {}), 0: min(chunk, len(prompt) - start)}, added)
        parts += [
            logprobs
            for index, logprobs in result.values(PromptLogprobs).items()
            if index == len(result.token_ids) - 1
        ]
        assert len(result.values(PromptLogprobs)) <= 1
        added = []
    whole = Bench()
    whole.run({0: len(prompt)}, [whole.new(0, prompt)])
    inputs = ModelInputs(token_ids=torch.tensor(prompt), positions=torch.arange(len(prompt)))
    hidden = whole.model(inputs)
    expected = top_logprobs(whole.model.logits(hidden[:-1]), torch.tensor(prompt[1:]), 2)
    np.testing.assert_array_equal(
        np.concatenate([part.token_ids for part in parts]), expected.token_ids.numpy()
    )
    assert_rounded(np.concatenate([part.logprobs for part in parts]), expected.logprobs, ROUNDINGS)
    np.testing.assert_array_equal(
        np.concatenate([part.ranks for part in parts]), expected.ranks.numpy()
    )


def test_a_row_with_nan_fails_alone_and_its_blocks_can_be_reused() -> None:
    bench = Bench()
    result = bench.run({0: 3, 1: 2}, [bench.new(0, [1, NAN_TOKEN, 2]), bench.new(1, PROMPTS[1])])
    assert list(result.failed) == [0]
    assert "NaN" in result.failed[0]
    assert result.token_ids[1] == generate(PROMPTS[1], 1)[0]
    poisoned = bench.blocks[0][0]
    bench.run({1: 1}, removed=[0])
    bench.free_blocks.remove(poisoned)
    bench.free_blocks.append(poisoned)  # the next to be handed out
    after = bench.run({0: 2}, [bench.new(0, PROMPTS[1])])
    assert bench.blocks[0] == [poisoned]
    assert after.failed == {}
    assert after.token_ids.tolist() == generate(PROMPTS[1], 1)


@pytest.mark.parametrize(
    ("count", "reason"),
    [(2, "can't compute 2 tokens after 2: 3 are known"), (0, "can't compute 0 tokens")],
)
def test_a_batch_that_does_not_fit_the_row_is_rejected_by_name(count: int, reason: str) -> None:
    bench = Bench()
    bench.run({0: 2}, [bench.new(0, PROMPTS[1])])
    with pytest.raises(DovetailError, match=f"request 'request-0'.*{reason}"):
        bench.run({0: count})


def test_a_token_without_a_block_is_refused() -> None:
    bench = Bench(block_size=4)
    bench.run({0: 2}, [bench.new(0, PROMPTS[1])])
    bench.rows.num_pages[:, 0] = 0
    with pytest.raises(DovetailError, match="its blocks hold 0"):
        bench.run({0: 1})


def test_a_step_that_samples_nothing_tells_the_sampler_too_and_the_model_does_not_wait_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, happened = Bench(), []
    forward, update = bench.model.forward, bench.sampler.update
    monkeypatch.setattr(
        bench.model,
        "forward",
        lambda inputs: happened.append("model") or forward(inputs),
    )
    monkeypatch.setattr(
        bench.sampler,
        "update",
        lambda removed, added: happened.append("told") or update(removed, added),
    )
    bench.run({0: 3}, [bench.new(0, [1, 2, 3, 4])])
    bench.run({0: 1})
    bench.run({1: 2}, [bench.new(1, [5, 6])], removed=[0])
    assert happened == ["model", "told", "model", "model", "told"]
    assert set(bench.sampler.rows) == {1}


def test_the_runner_names_no_feature() -> None:
    """What only some steps need is in the files of the features."""
    source = inspect.getsource(runner)
    named = re.findall(
        r"(?i)adapter|lora|pooled|pooler|pooling|prompt_?logprobs|draft_?model\(", source
    )
    assert named == []
