"""Several ranks generate the same tokens as one: with any other requests, any model sizes that can
be split, and third-party components."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dovetail.api.executor import ComponentRef, Result
from dovetail.errors import DovetailError
from dovetail_executors.local import LocalExecutor
from dovetail_executors.options import LocalOptions, TensorOptions
from dovetail_executors.tensor import TensorExecutor
from tests.e2e import test_same_tokens as spine
from tests.e2e.reference import Comparison, checkpoint, compare_greedy, greedy, run, tokens_of
from tests.executors.rank_threads import ranks_as_threads
from tests.models.configs import MAX_LEN, configs
from tests.runtime.demo import check, context, decode, prefill
from tests.support import examples

ORDER = spine.TRIED


def over(size: int, **options: Any) -> dict[str, Any]:
    return {"name": "tensor", "size": size, "device": "cpu", **options}


def assert_tokens_are_those_of_one_rank(
    config: dict[str, Any], size: int, order: Sequence[int]
) -> None:
    """The model has two heads for K and V, so that of four ranks two hold the same; and an odd
    vocabulary, which is padded."""
    options = {name: value for name, value in config["executor"].items() if name != "name"}
    outputs = run(
        spine.model_dir(),
        [spine.PROMPTS[i] for i in order],
        [spine.PARAMS[i] for i in order],
        **{**config, "executor": over(size, **options)},
    )
    assert tokens_of(outputs) == [spine.tokens_alone()[i] for i in order]


@pytest.fixture(autouse=True, scope="module")
def what_one_rank_generates() -> None:
    spine.tokens_alone()


PROCESSES = pytest.mark.slow("starts ranks: processes that import torch")
# 0.7 to 1.6 CPU s, as the threads that spin get processors
SPINNING = pytest.mark.slow("ranks that spin for each other while few processors are free")


@pytest.mark.parametrize(
    ("size", "around", "order"),
    [
        pytest.param(2, ranks_as_threads, (3, 4, 5, 6), marks=SPINNING),
        pytest.param(2, nullcontext, ORDER, marks=PROCESSES),
        pytest.param(4, nullcontext, ORDER, marks=pytest.mark.full),
    ],
    ids=["2 threads", "2", "4"],
)
def test_tokens_over_ranks_are_those_of_one_rank_when_memory_is_scarce(
    size: int, around: Callable[[], AbstractContextManager[None]], order: Sequence[int]
) -> None:
    scarce = {
        "block_size": 8,
        "executor": {"num_pages": 14, "max_in_flight": 2},
    }  # as `test_scarce_memory_really_preempts` has it
    with around():
        assert_tokens_are_those_of_one_rank(
            {**scarce, "max_num_batched_tokens": 16, "overlap": True}, size, order
        )


@pytest.mark.full
@examples(quick=2, full=40)
@given(
    config=spine.circumstances(policies=spine.POLICIES),
    size=st.sampled_from([2, 4]),
    order=st.permutations(ORDER),
)
def test_tokens_over_ranks_are_those_of_one_rank_whatever_is_around_them(
    config: dict[str, Any], size: int, order: list[int]
) -> None:
    assert_tokens_are_those_of_one_rank(config, size, order)


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_ranks_agree_on_how_many_drafts_are_right_without_being_told(
    threads_as_ranks: None, max_in_flight: int
) -> None:
    """Other ranks collect a step when the next comes; before and after one with drafts they must
    know all lengths in time."""
    prompts = [[5, 17, 200, 31, 8], [9, 12], [400, 3, 77]]
    alone = LocalExecutor(LocalOptions(device="cpu"), context())
    capacity = alone.start()
    results = [alone.collect(alone.submit(prefill(capacity, prompts)))] + [
        alone.collect(alone.submit(decode(3, 1))) for _ in range(11)
    ]
    expected = [[int(result.token_ids[row]) for result in results] for row in range(3)]
    alone.stop()
    got: list[list[int]] = [[], [], []]

    def take(result: Result) -> None:
        tokens, counts = (
            result.token_ids.tolist(),
            [1] * 3 if result.counts is None else result.counts.tolist(),
        )
        for own, count in zip(got, counts, strict=True):
            own += tokens[:count]
            del tokens[:count]

    executor = TensorExecutor(
        TensorOptions(device="cpu", max_in_flight=max_in_flight), context(max_drafts=3)
    )
    try:
        capacity = executor.start()
        assert capacity.max_lines == 4 * 4
        take(executor.collect(executor.submit(prefill(capacity, prompts))))
        for step, right in enumerate(([3, 0, 1], [1, 2, 0])):
            following = [tokens[len(own) :] for tokens, own in zip(expected, got, strict=True)]
            drafts = [
                tokens[:count] + [0] * (2 - count)
                for tokens, count in zip(following, right, strict=True)
            ]
            take(executor.collect(executor.submit(check(drafts, 3 * step + 1))))
            handles = [
                executor.submit(decode(3, 3 * step + 2 + more)) for more in range(max_in_flight)
            ]
            for handle in handles:
                take(executor.collect(handle))
        assert [own == tokens[: len(own)] for own, tokens in zip(got, expected, strict=True)] == [
            True
        ] * 3
        assert [len(own) for own in got] == [
            1 + 2 * (1 + max_in_flight) + sum(counts) for counts in ((3, 1), (0, 2), (1, 0))
        ]
    finally:
        executor.stop()


def divisible(config: Any, size: int) -> bool:
    kv = config.num_key_value_heads
    return (
        config.num_attention_heads % size == 0
        and config.intermediate_size % size == 0
        and (kv % size == 0 if size <= kv else size % kv == 0)
    )


@pytest.mark.full  # the suite of models splits each in one process
@examples(quick=1, full=40)
@given(config=configs(), size=st.sampled_from([2, 4]), data=st.data())
def test_models_of_all_shapes_that_can_be_split_choose_what_transformers_does(
    config: Any, size: int, data: st.DataObject
) -> None:
    assume(divisible(config, size))
    ids = st.lists(st.integers(0, config.vocab_size - 1), min_size=1, max_size=20)
    prompts, counts = data.draw(st.lists(ids, min_size=1, max_size=4)), Comparison()
    with checkpoint(config) as (directory, model):
        outputs = run(
            directory,
            prompts,
            [greedy(12)] * len(prompts),
            max_model_len=MAX_LEN,
            executor=over(size),
        )
        for prompt, tokens in zip(prompts, tokens_of(outputs), strict=True):
            compare_greedy(model, prompt, tokens, counts)
    assert counts.ties <= 1


@PROCESSES
def test_components_of_others_work_in_every_rank_without_being_searched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = context()
    (model,) = [ref for ref in plain.models if "Qwen3ForCausalLM" in ref.architectures]
    attention = next(ref for ref in plain.attention if ref.name.endswith(":torch"))
    assert plain.sampler is not None
    code = ["import os", "from pathlib import Path"]
    for kind, ref in (("model", model), ("attention", attention), ("sampler", plain.sampler)):
        module, _, name = ref.path.partition(":")
        code += [
            f"from {module} import {name} as {kind}_base",
            f"class {kind.title()}({kind}_base):",
            "    def __init__(self, *args):",
            "        super().__init__(*args)",
            f"        Path({str(tmp_path)!r}, f'{kind}-{{os.getpid()}}').touch()",
        ]
    (tmp_path / "somebody_elses.py").write_text("\n".join(code))
    monkeypatch.syspath_prepend(str(tmp_path))
    theirs = {
        kind: _theirs(ref, kind)
        for kind, ref in (("model", model), ("attention", attention), ("sampler", plain.sampler))
    }
    executor = TensorExecutor(
        TensorOptions(device="cpu"),
        context(
            models=(theirs["model"],), attention=(theirs["attention"],), sampler=theirs["sampler"]
        ),
    )
    try:
        capacity = executor.start()
        executor.collect(executor.submit(prefill(capacity, [[1, 2, 3]])))
        assert len(executor.collect(executor.submit(decode(1, 1))).token_ids) == 1
    finally:
        executor.stop()
    seen = {kind: {path.name for path in tmp_path.glob(f"{kind}-*")} for kind in theirs}
    assert all(
        len(processes) == 2 and f"{kind}-{os.getpid()}" in processes
        for kind, processes in seen.items()
    ), seen


@pytest.mark.full
def test_a_component_that_fails_in_one_rank_alone_is_named_with_what_it_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = context()
    assert plain.sampler is not None
    module, _, name = plain.sampler.path.partition(":")
    code = [
        "import os",
        f"from {module} import {name}",
        f"class Sampler({name}):",
        "    def sample(self, *args, **kwargs):",
        f"        if os.getpid() != {os.getpid()}:",
        "            raise MemoryError('all is full')",
        "        return super().sample(*args, **kwargs)",
    ]
    (tmp_path / "failing_elsewhere.py").write_text("\n".join(code))
    monkeypatch.syspath_prepend(str(tmp_path))
    sampler = ComponentRef(
        "sampler",
        "somebody-else:failing",
        "failing_elsewhere:Sampler",
        plain.sampler.options,
        plain.sampler.options_model,
    )
    executor = TensorExecutor(TensorOptions(device="cpu"), context(sampler=sampler))
    try:
        capacity = executor.start()
        executor.collect(executor.submit(prefill(capacity, [[1, 2, 3]])))
        with pytest.raises(
            DovetailError,
            match=r"^executor tensor: rank 1 \(cpu\), process \d+, ended with exit code 1: ",
        ) as caught:
            executor.collect(executor.submit(decode(1, 1)))
        assert "step 0 failed: MemoryError: all is full; requests in it: request-0" in str(
            caught.value
        )
    finally:
        executor.stop()


def _theirs(ref: ComponentRef, kind: str) -> ComponentRef:
    return ComponentRef(
        ref.kind,
        f"somebody-else:{kind}",
        f"somebody_elses:{kind.title()}",
        ref.options,
        ref.options_model,
        ref.architectures,
    )
