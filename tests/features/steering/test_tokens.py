"""A request with a vector generates what the model does with a hook, whatever is around it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import LLMEngine, LoRARequest, RequestOutput, SamplingParams, Structured
from dovetail.api.clock import VirtualClock
from tests.adapters import config_of, weights_of, write_adapter
from tests.executors.rank_threads import ranks_as_threads
from tests.features.steering.conftest import Oracle
from tests.features.steering.parts import DISTRIBUTION
from tests.features.steering.slots import SteeringSlots

torch.set_num_threads(1)

COUNT = 18
SCALE = 8 / 4  # of adapters: `lora_alpha` / `r`
PROMPTS = ([5, 17, 200, 31, 8], [9, 12, 400, 3, 77, 5, 17, 200, 31, 8, 64, 64, 2, 7, 1, 90, 91])
ASKED = [(prompt, vector) for prompt in PROMPTS for vector in ("calm", None, "grim", "loud")]
FREE: dict[str, Any] = {"executor": {"name": "steered-free"}, "clock": VirtualClock()}
NGRAM = {"name": "ngram", "min_match": 1}  # drafts often, and is wrong often
DRAFTING: dict[str, Any] = {"speculation": {"drafter": NGRAM, "max_drafts": 4, "timeout_s": 30.0}}

Engine = Callable[..., LLMEngine]


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> list[list[int]]:
    tokens = [oracle.generated(prompt, vector, COUNT) for prompt, vector in ASKED]
    assert len({tuple(own) for own in tokens}) == len(tokens), "each vector makes a difference"
    return tokens


def greedy(**fields: Any) -> SamplingParams:
    fixed: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": COUNT,
        "ignore_eos": True,
        "output_kind": "final",
    }
    return SamplingParams(**(fixed | fields))


def add(engine: LLMEngine, name: str, prompt: Any, vector: str | None, **fields: Any) -> None:
    extra = None if vector is None else {DISTRIBUTION: {"vector": vector}}
    engine.add_request(name, prompt, greedy(**fields), extra=extra)


def finished(engine: LLMEngine) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    assert engine.core.dead is None
    slots = next(one for one in engine.core.features if isinstance(one, SteeringSlots))
    assert slots.free == slots.count
    return outputs


def tokens_of(
    engine: LLMEngine, asked: Sequence[tuple[list[int], str | None]], count: int = COUNT
) -> list[list[int]]:
    for index, (prompt, vector) in enumerate(asked):
        add(engine, f"{index}", prompt, vector, detokenize=False, max_tokens=count)
    outputs = finished(engine)
    return [list(outputs[f"{index}"].outputs[0].token_ids) for index in range(len(asked))]


AROUND: dict[str, dict[str, Any]] = {
    "one after the other": {"executor": {"slots": 1}, "max_num_seqs": 1},
    "two slots": {"executor": {"max_in_flight": 2}},
    "chunks": {"executor": {"slots": 8}, "max_num_batched_tokens": 8},
    "scarce memory": {
        "executor": {"slots": 3, "num_pages": 8, "max_in_flight": 2},
        "block_size": 8,
    },
    "drafts": {**FREE, **DRAFTING},
}
RANKS = "steered-ranks"
OVER_RANKS: dict[str, tuple[slice, dict[str, Any]]] = {  # of `ASKED`, and the engine's settings
    "plain": (slice(5, 7), {"executor": {"name": RANKS}}),
    "scarce memory": (
        slice(4, 7),
        {"executor": {"name": RANKS, "num_pages": 8, "max_in_flight": 2}, "block_size": 8},
    ),
    "drafts": (slice(0, 2), {**FREE, **DRAFTING, "executor": {"name": "steered-free-ranks"}}),
}


@pytest.mark.parametrize("way", AROUND)
def test_tokens_are_those_of_a_hook(way: str, engine: Engine, expected: list[list[int]]) -> None:
    made = engine(**AROUND[way])
    assert tokens_of(made, ASKED) == expected
    stats = made.stats()
    assert stats.preemptions > 0 or way != "scarce memory"
    assert stats.draft_tokens > sum(stats.accepted_drafts) > 0 or way != "drafts"


AGAIN = pytest.mark.slow("two ranks compute again what was preempted, in step with each other")


@pytest.mark.parametrize(
    ("way", "ranks"),
    [
        ("plain", ranks_as_threads),
        ("drafts", ranks_as_threads),
        pytest.param("scarce memory", ranks_as_threads, marks=AGAIN),
        # tests/executors shows that ranks in processes compute the same
        pytest.param("plain", nullcontext, marks=pytest.mark.full),
    ],
    ids=["plain", "drafts", "scarce memory", "processes"],
)
def test_tokens_over_two_ranks_are_those_of_a_hook(
    way: str,
    ranks: Callable[[], AbstractContextManager[None]],
    engine: Engine,
    expected: list[list[int]],
) -> None:
    some, own = OVER_RANKS[way]
    with ranks():
        made = engine(**own)
        assert tokens_of(made, ASKED[some]) == expected[some]
        stats = made.stats()
    assert stats.preemptions > 0 or way != "scarce memory"
    assert sum(stats.accepted_drafts) > 0 or way != "drafts"


def test_a_prefix_is_shared_by_requests_with_the_same_vector_only(
    engine: Engine, expected: list[list[int]]
) -> None:
    made = engine(block_size=8, executor={"slots": 1})
    for _ in range(2):
        assert tokens_of(made, ASKED[4:7], 6) == [tokens[:6] for tokens in expected[4:7]]
    assert made.stats().cached_tokens == 3 * 16


@pytest.mark.slow("makes several engines")
def test_rules_are_obeyed_beside_vectors_with_drafts_as_without(
    engine: Engine, trusted_rules: None, expected: list[list[int]]
) -> None:
    rule = Structured(regex="(the |a |king |lord |my |of ){8}!")
    texts = []
    for made in (engine(), engine(**FREE, **DRAFTING)):
        for name, vector in (("plain", None), ("calm", "calm"), ("grim", "grim")):
            add(made, name, "O, she ", vector, structured=rule, ignore_eos=False, max_tokens=40)
        add(made, "free", ASKED[0][0], "calm")
        outputs = finished(made)
        assert list(outputs.pop("free").outputs[0].token_ids) == expected[0]
        texts.append({name: output.outputs[0].text for name, output in outputs.items()})
    assert sum(made.stats().accepted_drafts) > 0
    assert texts[0] == texts[1]
    assert all(re.fullmatch(rule.regex or "", text) for text in texts[0].values())
    assert len({*texts[0].values()}) == 3


def test_samples_of_one_prompt_take_slots_one_after_the_other(
    engine: Engine, expected: list[list[int]]
) -> None:
    made = engine(executor={"slots": 1})
    add(made, "three", ASKED[4][0], "calm", n=3, detokenize=False)
    samples = finished(made)["three"].outputs
    assert [list(sample.token_ids) for sample in samples] == [expected[4]] * 3


@pytest.mark.slow("makes several engines")
def test_an_adapter_and_a_vector_of_one_request_apply_together(
    engine: Engine, oracle: Oracle, tmp_path: Path
) -> None:
    layers = dict(oracle.model.named_modules())
    names = [name for name in layers if name.endswith("down_proj")]
    shapes = {name: (layers[name].in_features, layers[name].out_features) for name in names}
    weights = {name: 0.1 * value for name, value in weights_of(shapes).items()}
    adapted = Oracle(copy.deepcopy(oracle.model), oracle.vectors)
    for name in names:
        a, b = (torch.from_numpy(weights[f"base_model.model.{name}.lora_{x}.weight"]) for x in "AB")
        adapted.model.get_submodule(name).weight.data += SCALE * b @ a
    folder = write_adapter(tmp_path / "adapter", config_of(target_modules=["down_proj"]), weights)
    lora = LoRARequest("one", 1, str(folder))
    made = engine(adapters={"slots": 2})
    params, extra = greedy(detokenize=False, max_tokens=8), {DISTRIBUTION: {"vector": "calm"}}
    made.add_request("both", PROMPTS[1], params, lora_request=lora, extra=extra)
    made.add_request("vector", PROMPTS[1], params, extra=extra)
    made.add_request("adapter", PROMPTS[1], params, lora_request=lora)
    outputs = finished(made)
    tokens = {name: list(output.outputs[0].token_ids) for name, output in outputs.items()}
    assert tokens == {
        "both": adapted.generated(PROMPTS[1], "calm", 8),
        "vector": oracle.generated(PROMPTS[1], "calm", 8),
        "adapter": adapted.generated(PROMPTS[1], None, 8),
    }
    assert len({*map(tuple, tokens.values())}) == 3
