"""Logits processors in recorded graphs: the tokens are those of steps that are launched kernel by
kernel, and steps in which nobody asks replay what they did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import LLMEngine, RequestOutput, SamplingParams, Structured
from dovetail_executors.runtime.graphs import Graph, Graphs
from tests.e2e import drafting, processing
from tests.e2e.reference import checkpoint
from tests.gpu.device import make_drafts_pay, on_a_gpu, settings_for
from tests.gpu.test_sampling import PROMPTS, SMALL, steps
from tests.registry.fakes import Site
from tests.registry.site import site

pytestmark = on_a_gpu

__all__ = ["site"]  # a fixture

SHUN = {"shun": {"amount": 100.0, "window": 16}}  # no token comes again within so many
CLIP = {"clip": {"width": 1.5}}
ASKED: list[dict[str, Any]] = [
    {"logits_processors": {**CLIP, **SHUN}, "logprobs": 2},
    {},
    {"logits_processors": SHUN, "temperature": 0.0},
    {"logits_processors": CLIP, "temperature": 2.0, "logprobs": 1},
    {"presence_penalty": 0.5, "logprobs": 1},
    {
        "logits_processors": {"clip": {"width": 3.0}, "shun": {"amount": 2.0}},
        "repetition_penalty": 1.2,
        "n": 2,
    },
    {"temperature": 0.0},
]
PROCESSORS = {"logits_processors": ["shun", "clip"]}
GRAPHS: list[dict[str, Any]] = [
    {},
    {"overlap": True},
    {
        "max_num_batched_tokens": 33,
        "executor": {"name": "local", "device": "cuda", "num_pages": 24},
    },
    {
        "speculation": {
            "drafter": {"name": "dovetail-drafting:alternating"},
            "max_drafts": 4,
            "timeout_s": 1.0,
        }
    },
]


def params(index: int, **asked: Any) -> SamplingParams:
    wanted = {
        "temperature": 0.8,
        "seed": index,
        "max_tokens": 40,
        "detokenize": False,
        "output_kind": "final",
        "ignore_eos": True,
    }
    return SamplingParams(**{**wanted, **asked})


def answers(engine: LLMEngine, asked: list[dict[str, Any]]) -> list[RequestOutput]:
    for index, (prompt, own) in enumerate(zip(PROMPTS, asked, strict=True)):
        engine.add_request(str(index), prompt, params(index, **own))
    done = {output.request_id: output for output in steps(engine) if output.finished}
    assert all(
        sample.finish_reason != "error" for output in done.values() for sample in output.outputs
    )
    return [done[str(index)] for index in range(len(asked))]


def generated(
    directory: Path, dtype: str, asked: list[dict[str, Any]], **settings: Any
) -> list[RequestOutput]:
    plain = settings_for(
        "triton",
        overlap=False,
        cuda_graphs=True,
        max_model_len=256,
        max_num_seqs=12,
        generation_config="none",
    )
    with LLMEngine.from_config({**plain, **settings}, model=str(directory), dtype=dtype) as engine:
        return answers(engine, asked)


def tokens(outputs: list[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[tuple(sample.token_ids) for sample in output.outputs] for output in outputs]


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of graphs that are replayed, in order."""
    replayed, replay = list[str](), Graphs.replay

    def noted(graphs: Graphs, graph: Graph, *batch: Any) -> Any:
        replayed.append(str(graph.key))
        return replay(graphs, graph, *batch)

    monkeypatch.setattr(Graphs, "replay", noted)
    return replayed


def test_tokens_are_those_without_graphs(
    site: Site, kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_drafts_pay(monkeypatch)
    processing.install(site)
    drafting.install(site)
    torch.backends.cuda.matmul.allow_tf32 = False
    with checkpoint(SMALL) as (directory, _):
        expected = tokens(generated(directory, "float32", ASKED, **PROCESSORS, cuda_graphs=False))
        answers_by_prompt = {
            tuple(prompt): samples for prompt, samples in zip(PROMPTS, expected, strict=True)
        }
        monkeypatch.setattr(drafting, "ANSWERS", answers_by_prompt)
        assert not kinds
        for settings in GRAPHS:
            kinds.clear()
            assert (
                tokens(generated(directory, "float32", ASKED, **PROCESSORS, **settings)) == expected
            ), settings
            assert "decode_processed" in kinds, settings
        plain = [own for own in ASKED if "logits_processors" not in own]
        without = [
            {name: value for name, value in own.items() if name != "logits_processors"}
            for own in ASKED
        ]
        for own, ours, theirs in zip(
            ASKED, expected, tokens(generated(directory, "float32", without)), strict=True
        ):
            assert (ours == theirs) == (own in plain), own


def test_steps_in_which_nobody_asks_replay_the_same_graphs(site: Site, kinds: list[str]) -> None:
    processing.install(site)
    asked = [
        {name: value for name, value in own.items() if name != "logits_processors"} for own in ASKED
    ]
    with checkpoint(SMALL) as (directory, _):
        found = []
        for processors in (PROCESSORS, {}):
            kinds.clear()
            found.append(
                (tokens(generated(directory, "bfloat16", asked, **processors)), list(kinds))
            )
    assert found[0] == found[1]
    assert found[0][1]


@pytest.mark.parametrize(
    "speculation", [None, {"drafter": {"name": "ngram", "min_match": 1}, "max_drafts": 4}]
)
def test_in_bfloat16_tokens_are_among_those_that_processors_left(
    speculation: dict[str, Any] | None,
    site: Site,
    kinds: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_drafts_pay(monkeypatch)
    processing.install(site)
    with checkpoint(SMALL) as (directory, _):
        outputs = generated(directory, "bfloat16", ASKED, **PROCESSORS, speculation=speculation)
    assert "decode_processed" in kinds
    for own, prompt, output in zip(ASKED, PROMPTS, outputs, strict=True):
        asked = own.get("logits_processors", {})
        for sample in output.outputs:
            if asked.get("shun") == SHUN["shun"]:
                history = list(prompt)
                for token in sample.token_ids:
                    assert token not in history[-16:], own
                    history.append(token)
            if asked == CLIP:
                for token, entries in zip(sample.token_ids, sample.logprobs or (), strict=True):
                    assert (
                        entries[token].logprob
                        >= max(entry.logprob for entry in entries.values()) - 1.5 - 1e-3
                    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masks_hold_in_graphs_after_processors(dtype: str, site: Site, kinds: list[str]) -> None:
    pytest.importorskip("llguidance")
    processing.install(site)
    settings = settings_for("triton", max_model_len=256, max_num_seqs=12, **PROCESSORS)
    found = []
    for graphs in (True, False):
        with LLMEngine.from_config(
            {**settings, "model": "demo", "dtype": dtype, "cuda_graphs": graphs}
        ) as engine:
            for index in range(6):
                asked = (
                    {}
                    if index % 3 == 2
                    else {"logits_processors": {**SHUN, "clip": {"width": 0.3}}}
                )
                rule = Structured(regex="(the |a |king ){3,8}!") if index % 2 else None
                fields = {
                    "seed": index,
                    "temperature": 0.7 * (index % 2),
                    "max_tokens": 40,
                    "output_kind": "final",
                    "structured": rule,
                }
                engine.add_request(str(index), "the king and", SamplingParams(**fields, **asked))
            done = {
                output.request_id: output.outputs[0] for output in steps(engine) if output.finished
            }
        assert all(sample.finish_reason != "error" for sample in done.values()), done
        for index in (1, 3, 5):
            assert set(done[str(index)].text.rstrip("!").split()) <= {"the", "a", "king"}
        found.append([done[str(index)].text for index in range(6)])
    assert "sampling_processed" in kinds
    assert found[0] == found[1] or dtype == "bfloat16"
