"""Logits processors: requests get what a plain twin computes, whatever else runs and however steps
are cut; what goes wrong ends its own request."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dovetail import LLM, LLMEngine, SamplingParams, Structured
from dovetail.api.clock import VirtualClock
from dovetail.api.sampler import SamplerCapabilities
from dovetail.errors import ConfigError, DovetailError, PluginError, RequestError, UnsupportedError
from dovetail.front.outputs import RequestOutput
from dovetail.registry.models import resolve_model
from dovetail.registry.registry import Registry
from dovetail_executors.local import LocalExecutor
from dovetail_samplers.default import DefaultSampler
from tests.e2e import processing
from tests.registry.fakes import Site, components, modules_forgotten
from tests.registry.site import site
from tests.rounding import rounded, roundings_of_demo

pytestmark = pytest.mark.usefixtures("trusted_rules")

__all__ = ["site"]  # a fixture

torch.set_num_threads(1)

PAIR = {"shun": {"amount": 3.0, "window": 12}, "clip": {"width": 0.75}}
MODEL: dict[str, Any] = {
    "model": "demo",
    "max_model_len": 96,
    "logits_processors": ["shun", "clip", "faulty"],
}
WAYS: dict[str, dict[str, Any]] = {
    "overlap": {"executor": {"name": "local", "max_in_flight": 2}},
    "preempted": {
        "block_size": 8,
        "executor": {"name": "local", "num_pages": 13, "max_in_flight": 2},
    },
    "chunks": {"max_num_batched_tokens": 12, "max_num_seqs": 4},
    "ngram": {
        "speculation": {
            "drafter": {"name": "ngram", "min_match": 1},
            "max_drafts": 4,
            "timeout_s": 30.0,
        }
    },
    "suffix": {
        "speculation": {"drafter": "suffix", "max_drafts": 4, "timeout_s": 30.0},
        "max_num_batched_tokens": 24,
    },
    "two ranks": {"executor": {"name": "tensor", "size": 2, "device": "cpu"}, "max_num_seqs": 4},
}
TEXT = "the king and the queen and the king and"
ASKED: list[dict[str, Any]] = [  # other parameters of the requests
    {"temperature": 0.0, "logits_processors": PAIR},
    {"temperature": 0.0},
    {
        "temperature": 0.0,
        "logits_processors": {"dovetail-processing:shun": {}},
        "repetition_penalty": 1.2,
        "logprobs": 2,
    },
    {
        "temperature": 1.0,
        "logits_processors": {"clip": {"width": 3.0}, "shun": {"window": 3, "spare": ["e", " "]}},
        "n": 2,
    },
    {"temperature": 1.0, "top_k": 20, "logprobs": 0},
    {
        "temperature": 0.0,
        "logits_processors": PAIR,
        "structured": Structured(regex="(the |a |king ){3,8}!"),
        "logprobs": 1,
    },
    {
        "temperature": 1.0,
        "structured": Structured(choice=["the lord", "a lady"]),
        "bad_words": ["lord"],
    },
    {
        "temperature": 0.7,
        "logits_processors": {"shun": {"amount": 50.0}},
        "presence_penalty": 1.0,
        "stop": ["th"],
        "min_p": 0.02,
    },
]


def params(index: int) -> SamplingParams:
    return SamplingParams(seed=index, max_tokens=16, output_kind="final", **ASKED[index])


def answers(engine: LLMEngine, indices: list[int]) -> list[RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    for index in indices:
        engine.add_request(str(index), TEXT * (1 + index % 2), params(index))
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    assert engine.core.dead is None
    return [outputs[str(index)] for index in indices]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[RequestOutput]:
    """Each request by itself."""
    folder = tmp_path_factory.mktemp("processors")
    with pytest.MonkeyPatch.context() as patch, modules_forgotten(folder):
        patch.syspath_prepend(str(folder))
        processing.install(Site(folder))
        return answered_alone()


def answered_alone() -> list[RequestOutput]:
    with LLMEngine.from_config(MODEL) as engine:
        return [answers(engine, [index])[0] for index in range(len(ASKED))]


def seen(output: RequestOutput) -> list[Any]:
    """Everything about an answer but the last digits of log-probabilities."""
    return [
        (
            list(sample.token_ids),
            sample.text,
            sample.finish_reason,
            [list(position) for position in sample.logprobs or ()],
        )
        for sample in output.outputs
    ]


def values(output: RequestOutput) -> list[float]:
    return [
        entry.logprob
        for sample in output.outputs
        for position in sample.logprobs or ()
        for entry in position.values()
    ]


@torch.inference_mode()
@pytest.mark.slow("makes several engines or many tokens")
def test_tokens_are_those_of_a_plain_twin(alone: list[RequestOutput], site: Site) -> None:
    processing.install(site)
    model: Any = AutoModelForCausalLM.from_pretrained(
        resolve_model("demo", Registry.discover()), dtype=torch.float32
    ).eval()
    output = alone[0]
    history = list(output.prompt_token_ids)
    for token in output.outputs[0].token_ids:
        raw = model(torch.tensor([history])).logits[0, -1]
        processed = processing.after(raw, history, PAIR)
        assert processed[token] >= processed.max() - 1e-4
        history.append(token)
    assert list(output.outputs[0].token_ids) != list(alone[1].outputs[0].token_ids), (
        "which didn't ask"
    )


@pytest.mark.slow("makes several engines")
def test_an_engine_without_processors_gives_the_others_the_same_to_the_bit(
    alone: list[RequestOutput], site: Site
) -> None:
    processing.install(site)
    plain = [index for index, asked in enumerate(ASKED) if "logits_processors" not in asked]
    found = []
    for processors in (MODEL["logits_processors"], []):
        config = {
            **MODEL,
            "logits_processors": processors,
            "max_num_batched_tokens": 16,
        }  # no measured speed makes fewer: the same steps
        with LLMEngine.from_config(config, clock=VirtualClock()) as engine:
            found.append([(seen(output), values(output)) for output in answers(engine, plain)])
    assert found[0] == found[1]
    assert [tokens for tokens, _ in found[0]] == [seen(alone[index]) for index in plain]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("ranks_in_threads")
def test_tokens_are_the_same_together_cut_preempted_or_drafted(
    alone: list[RequestOutput], way: str, site: Site
) -> None:
    processing.install(site)
    expected, clock = alone, VirtualClock() if way != "two ranks" else None
    with LLMEngine.from_config({**MODEL, **WAYS[way]}, clock=clock) as engine:
        indices = list(range(len(ASKED)))
        for again in (
            (indices, indices[::-2]) if way == "chunks" else (indices,)
        ):  # the second time it finds prefixes
            for index, output in zip(again, answers(engine, again), strict=True):
                assert seen(output) == seen(expected[index]), ASKED[index]
                assert values(output) == rounded(values(expected[index]), roundings_of_demo())
        stats = engine.stats()
    assert stats.preemptions > 0 or way != "preempted"
    assert sum(stats.accepted_drafts) > 0 or way not in ("ngram", "suffix")


def test_a_grammar_holds_though_a_processor_forbids_all_that_it_allows(site: Site) -> None:
    """Processors see which tokens a grammar forbids: the most probable of the others stays."""
    processing.install(site)
    with LLM("demo", logits_processors=["clip"]) as llm:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=8,
            structured=Structured(choice=["zzz", "qqq"]),
            logits_processors={"clip": {"width": 0.01}},
        )
        (output,) = llm.generate("ROMEO:", params)
    assert output.outputs[0].text in ("zzz", "qqq")


@pytest.mark.parametrize(
    ("way", "at", "says"),
    [
        (
            "overlap",
            "update",
            r"logits processor dovetail-processing:faulty raised in update\(\): RuntimeError: no "
            r"such row",
        ),
        (
            "ngram",
            "apply",
            r"logits processor dovetail-processing:faulty raised in apply\(\): ZeroDivisionError: "
            r"nothing left",
        ),
        (
            "overlap",
            "nan",
            "logits are NaN.* after the logits processors that it asks for: "
            "dovetail-processing:clip, dovetail-processing:faulty",
        ),
        ("overlap", "inf", "logits are NaN, infinite"),
        ("ngram", "nothing", "logits are NaN, infinite or all -inf"),
    ],
)
def test_a_processor_that_fails_ends_the_request_and_no_other(
    alone: list[RequestOutput], way: str, at: str, says: str, site: Site
) -> None:
    processing.install(site)
    expected = alone
    with LLMEngine.from_config(
        {**MODEL, **WAYS[way], "max_num_seqs": 4}, clock=VirtualClock()
    ) as engine:
        for index, length in enumerate((0, 30)):
            asked = {"faulty": {"at": at, "length": length}, "clip": {"width": 9.0}}
            engine.add_request(
                f"bad {index}",
                TEXT,
                SamplingParams(temperature=0.0, max_tokens=24, logits_processors=asked),
            )
        ended: dict[str, str] = {}
        for index in (0, 1):
            engine.add_request(str(index), TEXT * (1 + index % 2), params(index))
        outputs = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id] = output
                if output.request_id.startswith("bad") and output.finished:
                    assert output.outputs[0].finish_reason == "error"
                    ended[output.request_id] = str(output.outputs[0].stop_reason)
        for index in (0, 1):
            assert seen(outputs[str(index)]) == seen(expected[index])
        assert engine.core.dead is None
        assert [seen(output) for output in answers(engine, [3, 4])] == [
            seen(expected[index]) for index in (3, 4)
        ], "whose rows are reused"
    assert len(ended) == 2
    for error in ended.values():
        assert re.search(says, error), error


def test_a_processor_that_cannot_forget_a_row_is_used_no_more(
    alone: list[RequestOutput], site: Site
) -> None:
    processing.install(site)
    expected = alone
    with LLMEngine.from_config({**MODEL, "max_num_seqs": 1}) as engine:
        asked = {
            "logits_processors": {"faulty": {"at": "removal"}},
            "max_tokens": 2,
            "output_kind": "final",
        }
        engine.add_request("first", TEXT, SamplingParams(**asked))
        while engine.has_unfinished_requests():
            engine.step()
        assert seen(answers(engine, [0])[0]) == seen(expected[0])
        engine.add_request("late", TEXT, SamplingParams(**asked))
        (output,) = [output for _ in range(2) for output in engine.step()]
        says = (
            "is no longer used: it raised in update() when a row was removed: KeyError: 'never "
            "forgets'"
        )
        assert says in str(output.outputs[0].stop_reason)


def test_rows_of_requests_that_a_lost_processor_ended_serve_others(
    alone: list[RequestOutput], site: Site
) -> None:
    processing.install(site)
    expected = alone
    with LLMEngine.from_config({**MODEL, "max_num_seqs": 2}) as engine:
        for name, length in (("short", 2), ("long", 40)):
            asked = {
                "logits_processors": {"faulty": {"at": "removal"}},
                "max_tokens": length,
                "output_kind": "final",
            }
            engine.add_request(name, TEXT, SamplingParams(**asked))
        reasons = {}
        while engine.has_unfinished_requests():
            reasons |= {
                output.request_id: output.outputs[0].finish_reason
                for output in engine.step()
                if output.finished
            }
        assert (reasons["short"], len(reasons)) == ("length", 2)
        plain = [1, 4]  # which ask for none
        assert [seen(output) for output in answers(engine, plain)] == [
            seen(expected[index]) for index in plain
        ]


# ---- requests that are refused

MANY = {f"p{index}": {} for index in range(100)}
WRONG: list[tuple[Any, str]] = [
    (
        {"shunn": {}},
        "logits_processors: this engine has no 'shunn'; it has: dovetail-processing:shun, "
        "dovetail-processing:clip",
    ),
    (
        {"dovetail-other:shun": {}},
        "logits_processors: this engine has no 'dovetail-other:shun'; it has",
    ),
    (MANY, "logits_processors: this engine has no 'p0'"),
    (
        {"shun": {}, "dovetail-processing:shun": {}},
        "logits_processors: dovetail-processing:shun is named twice, by its full and its short "
        "name",
    ),
    ({"shun": {"amount": "1"}}, "logits_processors.shun.amount: expected a valid number, got '1'"),
    ({"shun": {"amount": float("nan")}}, "logits_processors.shun.amount must be a finite number"),
    ({"shun": {"amount": float("inf")}}, "logits_processors.shun.amount must be a finite number"),
    (
        {"shun": {"spare": [[float("nan")]]}},
        "logits_processors.shun.spare.0.0 must be a finite number",
    ),
    ({"shun": {"amont": 1.0}}, "logits_processors.shun.amont: unknown key, did you mean amount?"),
    ({"shun": {"spare": [{}]}}, "logits_processors.shun.spare"),
    ({"clip": {}}, "logits_processors.clip.width: "),
    ({"faulty": {"own": "x"}}, "logits_processors.faulty.own: "),
    ({"faulty": {"own": "unplain"}}, "logits_processors.faulty: it can't be sent to the ranks: "),
    (
        {"shun": {"spare": frozenset({float("inf")})}},
        "logits_processors.shun.spare.0 must be a finite number",
    ),
    (
        {"shun": {"spare": ["x" * 70_000]}},
        "logits_processors: all items and characters in it must be at most 65536",
    ),
    ("shun", "logits_processors must map names"),
    (["shun"], "logits_processors must map names"),
    ({"shun": 3}, "logits_processors must map names"),
    ({"shun": None}, "logits_processors must map names"),
    ({3: {}}, "logits_processors must map names"),
    (
        [lambda ids, logits: logits],
        "logits_processors must map names of the engine's, which are plugins",
    ),
    ({"shun": {"spare": object()}}, "logits_processors: expected a plain value"),
]


def test_wrong_requests_are_refused_by_name(site: Site) -> None:
    processing.install(site)
    with LLM("demo", max_model_len=64, logits_processors=["shun", "clip", "faulty"]) as llm:
        for asked, says in WRONG:
            with pytest.raises(RequestError) as caught:
                llm.generate("A", SamplingParams(logits_processors=asked))
            assert str(caught.value).startswith(says), str(caught.value)
        for nothing in (None, {}):
            (output,) = llm.generate("A", SamplingParams(max_tokens=1, logits_processors=nothing))
            assert output.outputs[0].token_ids
    with (
        LLM("demo", max_model_len=64) as llm,
        pytest.raises(
            RequestError, match="no 'shun'; it has none: list them in `logits_processors`"
        ),
    ):
        llm.generate("A", SamplingParams(logits_processors={"shun": {}}))


# ---- engines that are refused


@pytest.mark.parametrize(
    ("settings", "kind", "says"),
    [
        (
            {"logits_processors": ["shun", {"name": "dovetail-processing:shun"}]},
            ConfigError,
            r"logits_processors\.1.*shun is listed twice",
        ),
        (
            {"logits_processors": ["shunn"]},
            PluginError,
            r"logits_processors\.0.*unknown logits_processor 'shunn', did you mean shun\?",
        ),
        (
            {"logits_processors": [{"name": "shun", "amount": 1}]},
            ConfigError,
            r"logits_processors\.0\.amount",
        ),
        (
            {"logits_processors": "shun"},
            ConfigError,
            "logits_processors: expected a list of components, got 'shun'",
        ),
        (
            {"logits_processors": ["unready"]},
            PluginError,
            r"dovetail-processing:unready raised in prepare\(\): MemoryError: too many rows",
        ),
        (
            {"logits_processors": ["shun"], "sampler": "bare"},
            UnsupportedError,
            "sampler dovetail-bare:bare can't apply them",
        ),
        (
            {"logits_processors": ["shun"], "executor": "bare"},
            UnsupportedError,
            "executor dovetail-bare:bare can't apply them",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_at_load(
    settings: dict[str, Any], kind: type[DovetailError], says: str, site: Site
) -> None:
    processing.install(site)
    of = "tests.e2e.test_logits_processors"
    bare = (
        f'kind="sampler", name="bare", target="{of}:BareSampler"',
        f'kind="executor", name="bare", target="{of}:BareExecutor", '
        f'options="dovetail_executors.options:LocalOptions"',
    )
    site.install("dovetail-bare", modules={"bare_plugin": components(*bare)})
    with pytest.raises(kind, match=says):
        LLMEngine.from_config({"model": "demo", "max_model_len": 64, **settings})


class BareSampler(DefaultSampler):
    capabilities = SamplerCapabilities()


class BareExecutor(LocalExecutor):
    capabilities = type(LocalExecutor.capabilities)(masks=True)
