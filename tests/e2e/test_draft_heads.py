"""The drafters `mtp` and `eagle3`: heads that must be right are, which shows that states and tokens
are aligned, and no token changes."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import LLMEngine, SamplingParams
from dovetail.api.attention import LayerSpec
from dovetail.api.clock import VirtualClock
from dovetail.api.draft_head import HeadArch, HeadContext
from dovetail.api.model import BuildContext, ParallelGroup, Tapped
from dovetail.engine.stats import EngineStats
from dovetail.errors import ConfigError, UnsupportedError
from dovetail.nn.model_files import read_config
from dovetail_drafters.heads import Eagle3Drafter
from dovetail_executors.runtime.draft_head import RunningHead
from tests.e2e import drafting
from tests.e2e.reference import checkpoint
from tests.e2e.test_draft_model import SEEDS, drafting_engine
from tests.e2e.test_speculation import MODEL, answers_of, require_same
from tests.e2e.test_speculation import WAYS as ALL_WAYS
from tests.models.heads import (
    CHAINED,
    add_tensors,
    chained,
    eagle3_fields,
    eagle3_tensors,
    glm4_moe,
    glm4_moe_lite,
    mtp_model,
    mtp_tensors,
    target_config,
    write_chained_eagle3,
    write_eagle3,
)
from tests.models.hybrids import qwen3_5, qwen3_next
from tests.registry.fakes import Site
from tests.registry.site import site  # noqa: F401
from tests.runtime.demo import DEMO
from tests.support import FULL


@pytest.fixture(autouse=True)
def _installed(site: Site) -> None:  # noqa: F811
    drafting.install(site)


def engine(directory: Path, drafter: Any, max_drafts: int = 4, **changes: Any) -> LLMEngine:
    config = {
        "model": str(directory),
        "max_model_len": 96,
        "dtype": "float32",
        "generation_config": "none",
        "executor": "free",
        **changes,
    }
    speculation = None if drafter is None else {"drafter": drafter, "max_drafts": max_drafts}
    return LLMEngine.from_config(config, clock=VirtualClock(), speculation=speculation)


def answers(
    running: LLMEngine, prompts: list[list[int]], count: int = 40, **params: Any
) -> list[list[list[int]]]:
    outputs = {}
    for index, prompt in enumerate(prompts):
        given = {
            "temperature": 0.0,
            "seed": index,
            "max_tokens": count,
            "ignore_eos": True,
            "detokenize": False,
            "output_kind": "final",
            **params,
        }
        running.add_request(str(index), prompt, SamplingParams(**given))
    while running.has_unfinished_requests():
        outputs |= {output.request_id: output for output in running.step()}
    assert running.core.dead is None
    running.core.kv.check_integrity()
    return [
        [list(sample.token_ids) for sample in outputs[str(index)].outputs]
        for index in range(len(prompts))
    ]


def shares(stats: EngineStats) -> tuple[int, int]:
    return stats.draft_tokens, sum(stats.accepted_drafts)


PROMPTS = [[1, 2, 3], [7], [9, 9, 4, 1, 30, 2, 8, 5, 11, 6, 3, 20, 17, 1, 1, 2, 19, 4, 25, 26]]


SMALL = {"block_size": 8, "executor": {"name": "free", "num_pages": 14}}


LIMITS = [{}, {"max_num_batched_tokens": 8, "max_num_seqs": 2}, SMALL]


@pytest.mark.parametrize(
    ("family", "limits"),
    [*((glm4_moe, limits) for limits in LIMITS), (qwen3_5, LIMITS[1]), (qwen3_next, LIMITS[0])],
)
def test_an_mtp_head_that_reads_the_token_after_the_state_is_always_right(
    family: Any, limits: dict[str, Any]
) -> None:
    """It passes the embedding through, of which the model's own output layer makes the token after
    it: any other token would be wrong."""
    with (
        chained(family(**CHAINED, tie_word_embeddings=False), mtp=True) as directory,
        engine(directory, "mtp", **limits) as running,
    ):
        got = answers(running, PROMPTS)
        drafts, accepted = shares(running.stats())
        assert running.stats().preemptions > 0 or "block_size" not in limits
    for prompt, [tokens] in zip(PROMPTS, got, strict=True):
        for before, token in zip([prompt[-1], *tokens], tokens, strict=False):
            assert token == (5 * before + 3) % 32
    assert drafts == accepted > 60


class Refusing(HeadArch):
    """Says what it was made with."""

    def __init__(self, options: Any, context: HeadContext) -> None:
        raise UnsupportedError(f"made with {options!r} for {context.target.model_type}")

    def layer_specs(self, parallel: ParallelGroup) -> list[LayerSpec]:
        raise NotImplementedError

    def build(self, context: BuildContext, target: Tapped) -> torch.nn.Module:
        raise NotImplementedError


def test_a_head_is_made_with_its_drafters_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Eagle3Drafter, "head", f"{__name__}:Refusing")
    with pytest.raises(UnsupportedError, match=rf"made with .*'{tmp_path}'.* for qwen3"):
        engine(DEMO, {"name": "eagle3", "model": str(tmp_path)})


@pytest.mark.parametrize("tap", [0, 1])
def test_an_eagle3_head_that_reads_the_right_state_is_always_right(
    tap: int, tmp_path: Path
) -> None:
    """It makes its first draft of the state alone: two tokens after the state's own. So the state
    of any other token would be wrong."""
    with chained(config := glm4_moe(**CHAINED)) as directory:
        write_chained_eagle3(tmp_path / "head", config, tap)
        with engine(
            directory, {"name": "eagle3", "model": str(tmp_path / "head")}, max_drafts=1
        ) as running:
            answers(running, PROMPTS)
            drafts, accepted = shares(running.stats())
    assert drafts == accepted > 40


WAYS: dict[str, dict[str, Any]] = {
    "overlap": {"executor": {"name": "free", "max_in_flight": 3}},
    "small memory": {
        "block_size": 8,
        "executor": {"name": "free", "num_pages": 12, "max_in_flight": 2},
    },
    "small steps": {"max_num_batched_tokens": 12, "max_num_seqs": 4},
}
TARGETS = {"mtp": glm4_moe, "mtp of latents": glm4_moe_lite, "eagle3": target_config}
PAIRS = list(product(TARGETS, WAYS)) if FULL else list(zip(TARGETS, WAYS, strict=True))
COUNT = 24 if FULL else 12  # tokens of an answer
PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "n": 3},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 2},
)


@pytest.mark.parametrize(("drafter", "way"), PAIRS)
@pytest.mark.slow("makes several engines or many tokens")
def test_answers_are_those_without_drafts(drafter: str, way: str, tmp_path: Path) -> None:
    """Random weights, so that most drafts are wrong. The second time prefixes are found."""
    config = TARGETS[drafter](max_position_embeddings=128)
    prompts = [
        [(7 * i * i + s) % 61 for i in range(n)]
        for s, n in ((0, 3), (1, 30), (2, 1), (1, 37), (3, 17))
    ]
    with checkpoint(config) as (directory, model):
        chosen: Any = "mtp"
        if drafter == "eagle3":
            fields = eagle3_fields(config)
            chosen = {
                "name": "eagle3",
                "model": str(write_eagle3(tmp_path / "head", fields, eagle3_tensors(fields))),
            }
        else:
            add_tensors(directory, mtp_tensors(mtp_model(model)))
        with engine(directory, None) as running:
            expected = [answers(running, prompts, COUNT, **params) for params in PARAMS]
        with engine(directory, chosen, **WAYS[way]) as running:
            for params, right in zip((*PARAMS, PARAMS[0]), (*expected, expected[0]), strict=True):
                assert answers(running, prompts, COUNT, **params) == right, params
            stats = running.stats()
    assert stats.draft_tokens > 0
    assert stats.preemptions > 0 or way != "small memory"


@pytest.mark.parametrize("way", ALL_WAYS if FULL else ["small memory"])
@pytest.mark.slow("makes several engines or many tokens")
def test_random_requests_get_the_answers_that_they_get_without_drafts(
    way: str, tmp_path: Path
) -> None:
    """Filters, penalties, stop strings, grammars, several samples: those of `test_draft_model`."""
    fields, seeds = eagle3_fields(read_config(DEMO)), SEEDS if FULL else SEEDS[:2]
    head = write_eagle3(tmp_path / "head", fields, eagle3_tensors(fields))
    with LLMEngine.from_config(MODEL) as plain:
        expected = answers_of(plain, seeds)
    with drafting_engine(way, {"name": "eagle3", "model": str(head)}) as running:
        for _ in range(2):  # the second time it finds prefixes that it has computed
            for seed, output, right in zip(
                seeds, answers_of(running, seeds), expected, strict=True
            ):
                require_same(output, right, f"request {seed}")
        assert running.stats().draft_tokens > 0


@pytest.mark.slow("makes several engines or many tokens")
def test_as_many_drafts_are_accepted_after_a_prefix_hit(tmp_path: Path) -> None:
    config, prompt = glm4_moe(max_position_embeddings=128), [(11 * i + 5) % 61 for i in range(33)]
    with checkpoint(config) as (directory, model):
        tensors = mtp_tensors(mtp_model(model))
        tensors["model.layers.2.shared_head.norm.weight"].mul_(0)  # then all logits are 0
        add_tensors(directory, tensors)
        params = {
            "temperature": 1.0,
            "logit_bias": dict.fromkeys(range(10), 30.0),
            "top_k": 10,
        }  # the same ten tokens are likely to both
        with engine(directory, "mtp", block_size=8) as running:
            first = answers(running, [prompt], **params), shares(running.stats())
            again = answers(running, [prompt], **params), shares(running.stats())
            cached = running.stats().cached_tokens
    assert first[0] == again[0]
    assert [two - one for one, two in zip(first[1], again[1], strict=True)] == list(first[1])
    assert cached > 0 < first[1][1]


@pytest.mark.parametrize("differ", [15, 16, 17])
@pytest.mark.slow("makes several engines or many tokens")
def test_drafts_after_a_prefix_hit_are_those_after_a_miss(
    differ: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if prompts part at the end of a block: the head's K and V of its last token are made of
    the next one, too."""
    drafts: list[list[int]] = []
    propose = RunningHead.propose

    def recorded(head: Any, asked: Any, rows: Any, graphs: Any) -> None:
        propose(head, asked, rows, graphs)
        state = head_rows[0]
        drafts.append(state.token_ids[rows[0], state.known[rows[0]] :][: asked.counts[0]].tolist())

    head_rows: list[Any] = []
    made = RunningHead.__init__
    monkeypatch.setattr(
        RunningHead,
        "__init__",
        lambda head, *args: (made(head, *args), head_rows.insert(0, args[4].rows))[0],
    )
    monkeypatch.setattr(RunningHead, "propose", recorded)
    one = [(11 * i + 5) % 61 for i in range(30)]
    other = [*one[:differ], 60, *one[differ + 1 :]]
    with checkpoint(config := target_config(max_position_embeddings=128)) as (directory, _):
        fields = eagle3_fields(config)
        head = {
            "name": "eagle3",
            "model": str(write_eagle3(tmp_path / "head", fields, eagle3_tensors(fields))),
        }
        found = []
        for prompts in ([other], [one, other]):
            with engine(directory, head, block_size=8) as running:
                for prompt in prompts:
                    drafts.clear()
                    answers(running, [prompt], 12)
                found.append(([*drafts], running.stats().cached_tokens))
    assert found[0][0] == found[1][0], "drafts after a hit"
    assert found[1][1] == (8 if differ <= 16 else 16)


def test_a_model_whose_states_cannot_be_read_is_refused(tmp_path: Path) -> None:
    from transformers import GPTNeoXConfig

    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 40,
    }
    with checkpoint(config := GPTNeoXConfig(**sizes, max_position_embeddings=128)) as (
        directory,
        _,
    ):
        fields = eagle3_fields(config)
        head = write_eagle3(tmp_path / "head", fields, eagle3_tensors(fields))
        with pytest.raises(
            UnsupportedError,
            match=f"draft head {head}: states of the model can't be read: Transformers lacks the "
            f"capability `taps`",
        ):
            engine(directory, {"name": "eagle3", "model": str(head)})


def test_a_checkpoint_without_a_head_is_refused() -> None:
    with (
        checkpoint(glm4_moe(max_position_embeddings=96)) as (directory, _),
        pytest.raises(UnsupportedError, match="has no multi-token-prediction head"),
    ):
        engine(directory, "mtp")


@pytest.mark.parametrize(
    ("drafter", "says"),
    [
        ({"name": "eagle3"}, "speculation.drafter.*model"),
        (
            {"name": "eagle3", "model": "no such head"},
            "speculation.drafter: sought where models are",
        ),
        ({"name": "mtp", "model": "x"}, "speculation.drafter.model"),
    ],
)
def test_options_of_heads(drafter: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLMEngine.from_config({"model": "demo"}, speculation={"drafter": drafter})


def test_a_head_is_no_model(tmp_path: Path) -> None:
    fields = eagle3_fields(glm4_moe())
    head = write_eagle3(tmp_path / "head", fields, eagle3_tensors(fields))
    with pytest.raises(UnsupportedError, match=r"is a draft head .*speculation"):
        engine(head, None)
    (head / "config.json").write_text(json.dumps({**fields, "model_type": "llama"}))
    with pytest.raises(UnsupportedError, match=r"is a draft head .*speculation"):
        engine(head, None)
