"""`LLM.beam_search` finds what transformers' beam search finds, in any engine and beside other
work, and refuses what it can't honour."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from dovetail import LLM, BeamSearchParams, CompletionOutput, LoRARequest, SamplingParams
from dovetail.compat.vllm import BeamSearchParams as VllmBeamSearchParams
from dovetail.compat.vllm import SamplingParams as VllmSamplingParams
from dovetail.errors import EngineDeadError, RequestError
from dovetail.front.beam_search import BeamSearch, BeamSearchOutput
from dovetail.request.outputs import Logprob
from tests.adapters import config_of, weights_of, write_adapter
from tests.e2e.reference import checkpoint
from tests.e2e.test_equal_to_transformers import DEMO, random_prompts
from tests.rounding import rounded, roundings_of

SETTINGS: dict[str, Any] = {
    "model": "demo",
    "max_model_len": 128,
    "max_num_seqs": 8,
    "dtype": "float32",
}
PROMPTS = [
    "ROMEO:",
    "JULIET:\nO Romeo",
    "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\n",
]
PARAMS = BeamSearchParams(beam_width=3, max_tokens=6)
CONFIG = Qwen3Config(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
EOS = [3, 7]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**SETTINGS) as llm:
        yield llm
        assert llm.engine.stats().pages.held == 0
        assert not llm.engine.has_unfinished_requests()


def check_equal(
    output: BeamSearchOutput,
    model: Any,
    prompt: Sequence[int],
    params: BeamSearchParams,
    eos: Sequence[int] = (),
) -> None:
    """The sequences of one prompt, and their scores, are those of transformers."""
    ids = torch.tensor([list(prompt)])
    theirs = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=params.max_tokens,
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        length_penalty=params.length_penalty,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    answers = [
        row[: next((at for at in range(len(prompt), len(row)) if row[at] in eos), len(row)) + 1]
        for row in theirs.sequences.tolist()
    ]
    assert [sequence.tokens for sequence in output.sequences] == answers
    if params.beam_width > 1:  # otherwise it searches greedily, without scores
        roundings = params.max_tokens * roundings_of(model.config, theirs.sequences.shape[1])
        assert [sequence.score for sequence in output.sequences] == rounded(
            theirs.sequences_scores.tolist(), roundings
        )


@pytest.mark.slow("makes several engines or many tokens")
def test_beams_of_the_demo_model_are_those_of_transformers(llm: LLM) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    params = BeamSearchParams(beam_width=4, max_tokens=12)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        ids = llm.engine.tokenizer.encode(prompt)
        check_equal(output, model, ids, params, llm.engine.eos_token_ids)
        for sequence in output.sequences:
            assert sequence.text == llm.engine.tokenizer.decode(sequence.tokens)
            assert sequence.text.startswith(prompt)
            assert (sequence.finish_reason, len(sequence.logprobs)) == ("length", 12)
            own = [
                entries[token].logprob
                for token, entries in zip(
                    sequence.tokens[len(ids) :], sequence.logprobs, strict=True
                )
            ]
            assert sequence.cum_logprob == pytest.approx(sum(own))
            assert sequence.score == pytest.approx(sequence.cum_logprob / 12)


@pytest.mark.parametrize(("width", "penalty"), [(1, 1.0), (2, 1.0), (5, 0.0), (18, 2.0)])
def test_beams_end_at_any_eos_as_in_transformers(width: int, penalty: float) -> None:
    params = BeamSearchParams(
        beam_width=width, max_tokens=12, length_penalty=penalty, detokenize=False
    )
    prompts = random_prompts([1, 9, 33], 61, width)
    with checkpoint(CONFIG, seed=width) as (directory, model):
        model.generation_config.eos_token_id = EOS
        model.generation_config.save_pretrained(directory)
        with LLM(**SETTINGS | {"model": directory}) as llm:
            outputs = llm.beam_search(prompts, params)
            endless = llm.beam_search(
                prompts[0], BeamSearchParams(width, 12, ignore_eos=True, detokenize=False)
            )
    for prompt, output in zip(prompts, outputs, strict=True):
        check_equal(output, model, prompt, params, EOS)
        for sequence in output.sequences:
            assert sequence.text is None
            by_eos = sequence.tokens[-1] in EOS
            assert (sequence.finish_reason, sequence.stop_reason) == (
                ("stop", sequence.tokens[-1]) if by_eos else ("length", None)
            )
    if width > 1 and penalty <= 1:
        assert {sequence.finish_reason for output in outputs for sequence in output.sequences} >= {
            "stop"
        }, "or nothing was shown"
    assert all(len(sequence.tokens) == 13 for sequence in endless[0].sequences)


def found(
    llm: LLM, prompts: Any = PROMPTS, params: BeamSearchParams = PARAMS, **options: Any
) -> list[list[list[int]]]:
    return [
        [sequence.tokens for sequence in output.sequences]
        for output in llm.beam_search(prompts, params, **options)
    ]


# Beside other work, and with little room


@pytest.mark.slow("searches with several engines")
def test_beams_are_the_same_however_many_prompts_are_searched_at_a_time(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = [found(llm, prompt)[0] for prompt in PROMPTS]
    assert capsys.readouterr().err == ""
    assert found(llm, concurrency_limit=2) == found(llm, PROMPTS, use_tqdm=True) == alone
    assert "3/3" in capsys.readouterr().err
    assert found(llm, [], concurrency_limit=1) == []


@pytest.mark.parametrize(
    "config",
    [
        {"kv_cache": {"name": "prefix", "reuse": False}},
        {"executor.num_pages": 8, "max_num_batched_tokens": 24},
        {"max_num_seqs": 1, "scheduler": "priority"},
    ],
    ids=["no prefix cache", "preemption and chunks", "fewer sequences than beams"],
)
@pytest.mark.slow("makes several engines or many tokens")
def test_beams_are_the_same_in_any_engine(llm: LLM, config: dict[str, Any]) -> None:
    with LLM(**SETTINGS | config) as other:
        assert found(other) == found(llm)


@pytest.mark.slow("makes an engine with adapters, and models with merged ones")
def test_each_prompt_is_searched_with_its_own_adapter(llm: LLM, tmp_path: Path) -> None:
    modules = {f"model.layers.{layer}.self_attn.q_proj": (256, 256) for layer in range(4)}
    folder = write_adapter(tmp_path, config_of(target_modules=["q_proj"]), weights_of(modules))
    adapter = LoRARequest("one", 1, str(folder))
    with LLM(**SETTINGS, enable_lora=True) as adapted:
        each = adapted.beam_search(["ROMEO:"] * 3, PARAMS, lora_request=[None, adapter, None])
        each += adapted.beam_search("ROMEO:", PARAMS, lora_request=adapter)
    each += llm.beam_search("ROMEO:", PARAMS)
    first, second, third, alone, base = (
        [sequence.tokens for sequence in output.sequences] for output in each
    )
    assert first == third == base != second == alone


def test_rounds_reuse_the_prompt_from_the_prefix_cache(llm: LLM) -> None:
    prompt = list(range(2, 98))
    llm.engine.reset_prefix_cache()
    before = llm.engine.stats()
    found(llm, prompt)
    after = llm.engine.stats()
    assert after.prefill_tokens - before.prefill_tokens <= 96 + 5 * 3 * (6 + 16), (
        "of each beam, those after its last full block"
    )


@pytest.mark.slow("searches in several threads")
def test_searches_and_generation_in_threads_do_not_disturb_each_other(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    expected = (
        found(llm),
        [output.outputs[0].text for output in llm.generate(PROMPTS, greedy, use_tqdm=False)],
    )
    with ThreadPoolExecutor(4) as pool:
        searches = [pool.submit(found, llm) for _ in range(2)]
        others = [pool.submit(llm.generate, PROMPTS, greedy, False) for _ in range(2)]
    assert all(search.result() == expected[0] for search in searches)
    assert all(
        [output.outputs[0].text for output in other.result()] == expected[1] for other in others
    )


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """As in a terminal: a shell starts what runs in its background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def in_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, number: int, call: Callable[[], object]
) -> None:
    """Call it in the midst of the step of that number from now."""
    executor, steps = llm.engine.core.executor, itertools.count(1)
    submit = executor.submit

    def submits(batch: Any) -> Any:
        handle = submit(batch)
        if next(steps) == number:
            call()
        return handle

    monkeypatch.setattr(executor, "submit", submits)


@pytest.mark.slow("searches until it is interrupted")
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_search_and_the_engine_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = found(llm)
    in_step(llm, monkeypatch, 5, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        llm.beam_search(PROMPTS, BeamSearchParams(3, 100))
    assert found(llm) == before


def test_a_search_in_an_engine_that_is_closed_or_fails_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for end in ("close", "fail"):
        with LLM(**SETTINGS) as llm, monkeypatch.context() as patch:
            if end == "fail":
                in_step(llm, patch, 5, lambda: 1 / 0)
            else:
                in_step(llm, patch, 5, threading.Thread(target=llm.close).start)
            with pytest.raises(EngineDeadError):
                llm.beam_search(PROMPTS, BeamSearchParams(3, 100))
            with pytest.raises(EngineDeadError):
                llm.beam_search(PROMPTS, PARAMS)


def test_requests_that_end_without_a_token_end_their_search_with_the_reason() -> None:
    search = BeamSearch([1, 2], PARAMS, 10, [0])
    search.advance(
        [
            CompletionOutput(
                0, "", [5], logprobs=[{5: Logprob(-1.0), 6: Logprob(-2.0), 7: Logprob(-math.inf)}]
            )
        ]
    )
    assert [beam.tokens for beam in search.running] == [[1, 2, 5], [1, 2, 6]], (
        "an impossible token is none"
    )
    search.advance(
        [
            CompletionOutput(0, "", [5], logprobs=[{5: Logprob(-1.0)}]),
            CompletionOutput(0, "", [], None, None, "rejected", "bad luck"),
        ]
    )
    assert not search.running
    assert [
        (beam.tokens, beam.finish_reason, beam.stop_reason, beam.score) for beam in search.finished
    ] == [
        ([1, 2, 5], "rejected", "bad luck", -1.0),
        ([1, 2, 6], "rejected", "bad luck", -2.0),
    ]


# Lengths and texts


def test_the_length_of_the_model_limits_answers(llm: LLM) -> None:
    [output] = llm.beam_search(list(range(2, 122)), BeamSearchParams(3, 100))
    assert [(len(sequence.tokens), sequence.finish_reason) for sequence in output.sequences] == [
        (128, "length")
    ] * 3
    [output] = llm.beam_search(list(range(1, 128)), BeamSearchParams(3, 100))
    assert [(len(sequence.tokens), len(sequence.logprobs)) for sequence in output.sequences] == [
        (128, 1)
    ] * 3


@pytest.mark.slow("makes several engines or many tokens")
def test_texts_are_those_of_all_tokens_but_special_ones_and_eos(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    with LLM(**SETTINGS) as llm:
        [newline] = llm.engine.tokenizer.encode("\n")
        decode = llm.engine.tokenizer.decode
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [newline, 0]}))
    with LLM(**SETTINGS | {"model": tmp_path}) as llm:
        prompt = [0, *llm.engine.tokenizer.encode("ROMEO:\nAy")]
        [short], [whole] = (
            llm.beam_search(prompt, BeamSearchParams(3, 12, include_stop_str_in_output=keeps))
            for keeps in (False, True)
        )
        [special] = llm.beam_search(prompt, BeamSearchParams(3, 12, skip_special_tokens=False))
    ended = [sequence for sequence in short.sequences if sequence.finish_reason == "stop"]
    assert {sequence.stop_reason for sequence in ended} == {newline}
    for sequence, kept, shown in zip(
        short.sequences, whole.sequences, special.sequences, strict=True
    ):
        tokens = sequence.tokens[:-1] if sequence in ended else sequence.tokens
        assert sequence.text == decode(tokens[1:])
        assert kept.text == decode(sequence.tokens[1:])
        assert shown.text == decode(tokens)
        assert shown.text.startswith("<|endoftext|>ROMEO:")


# What is refused


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"beam_width": 0}, "beam_width must be an integer >= 1"),
        ({"beam_width": True}, "beam_width must be an integer >= 1"),
        ({"beam_width": 2.0}, "beam_width must be an integer >= 1"),
        ({"max_tokens": 0}, "max_tokens must be an integer >= 1"),
        ({"max_tokens": None}, "max_tokens must be an integer >= 1"),
        ({"temperature": 0.5}, "temperature must be 0: beam search draws nothing"),
        ({"temperature": None}, "temperature must be 0"),
        ({"length_penalty": math.nan}, "length_penalty must be a finite number >= -10 and <= 10"),
        ({"length_penalty": 11}, "length_penalty must be a finite number >= -10 and <= 10"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
    ],
    ids=str,
)
def test_wrong_parameters_are_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=f"^{re.escape(said)}"):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4} | fields)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_new_tokens", "max_new_tokens: use the name max_tokens"),
        (
            "length_penality",
            "length_penality: unknown beam search parameter, did you mean length_penalty?",
        ),
        ("structured_outputs", "structured_outputs: beam search supports no structured output"),
        ("top_p", "top_p: unknown beam search parameter; valid are beam_width, max_tokens"),
    ],
)
def test_other_names_are_refused_with_what_to_do_instead(name: str, said: str) -> None:
    with pytest.raises(RequestError, match=f"^{re.escape(said)}"):
        VllmBeamSearchParams(2, 4, **{name: 0.5})


@pytest.mark.parametrize(
    ("prompts", "params", "options", "said"),
    [
        (
            "A",
            BeamSearchParams(20, 4),
            {},
            "beam_width must be at most 19, got 20: a beam needs as many log-probabilities, and 1 "
            "for EOS",
        ),
        ("A", BeamSearchParams(2**62, 4), {}, "beam_width must be at most 19"),
        ("A", BeamSearchParams(21, 4, ignore_eos=True), {}, "beam_width must be at most 20"),
        ("A", SamplingParams(), {}, "params must be BeamSearchParams, got SamplingParams"),
        ("A", None, {}, "params must be BeamSearchParams, got None"),
        (["A", ""], PARAMS, {"concurrency_limit": 1}, "the prompt is empty"),
        (
            ["A", [1.5]],
            PARAMS,
            {"concurrency_limit": 1},
            "the prompt's token ids must be integers, got 1.5",
        ),
        (["A", [1024]], PARAMS, {}, "prompt token id 1024 is out of the vocabulary"),
        (
            ["A", [1] * 128],
            PARAMS,
            {},
            "the prompt has 128 tokens; with max_model_len 128 at most 127 leave room",
        ),
        (3, PARAMS, {}, "prompts must be text, token ids, or a list of these"),
        (
            "A",
            PARAMS,
            {"concurrency_limit": 0},
            "concurrency_limit must be an integer >= 1 or None, got 0",
        ),
        (
            "A",
            PARAMS,
            {"concurrency_limit": True},
            "concurrency_limit must be an integer >= 1 or None, got True",
        ),
        (
            "A",
            PARAMS,
            {"prompt_adapter_request": 1},
            "beam_search(): prompt_adapter_request=1: prompt adapters (soft prompts) aren't "
            "supported",
        ),
        (
            ["A", "B"],
            PARAMS,
            {"lora_request": [None]},
            "lora_request must be one or one for each prompt: got 1 for 2 prompts",
        ),
        ("A", PARAMS, {"beam_width": 2}, "beam_search(): beam_width: unknown argument"),
    ],
    ids=str,
)
def test_what_cannot_be_searched_is_refused_before_anything_is_computed(
    llm: LLM, prompts: Any, params: Any, options: dict[str, Any], said: str
) -> None:
    steps = llm.engine.stats().steps
    with pytest.raises(RequestError, match=f"^{re.escape(said)}"):
        llm.beam_search(prompts, params, **options)
    assert llm.engine.stats().steps == steps


def test_a_request_for_beams_is_answered_with_their_call(llm: LLM) -> None:
    call = re.escape(
        "use_beam_search: use LLM.beam_search(prompts, BeamSearchParams(beam_width=…, "
        "max_tokens=…))"
    )
    with pytest.raises(RequestError, match=f"^{call}$"):
        VllmSamplingParams(use_beam_search=True)
    with pytest.raises(RequestError, match=call.replace("search:", "search=True:")):
        llm.generate("A", use_beam_search=True)
    with pytest.raises(RequestError, match=r"^length_penalty: use LLM.beam_search"):
        SamplingParams.of({"length_penalty": 2.0})
