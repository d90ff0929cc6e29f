"""Documented behaviour of `LLM` and `LLMEngine`, tested from outside on the demo model."""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import pickle
import signal
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tqdm.auto
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

import dovetail_models
from dovetail import LLM, CompletionOutput, LLMEngine, OutputKind, RequestOutput, SamplingParams
from dovetail.api.clock import VirtualClock
from dovetail.errors import EngineDeadError, RequestError
from dovetail.front import llm as llm_module
from dovetail.front.tokenizer import Tokenizer
from dovetail.request import Request
from dovetail.request.outputs import TokenLogprobMap
from tests.rounding import rounded, roundings_of_demo
from tests.small_model import small_demo
from tests.support import examples

torch.set_num_threads(1)

DEMO = Path(dovetail_models.__file__).parent / "demo"
CONFIG: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64}
EOS = 0
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PLAY = "ROMEO:\nWhat lady is that, which doth enrich the hand\nOf yonder knight?\n\nJULIET:\n"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(small_demo(), **CONFIG) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_stays_behind(llm: LLM) -> Iterator[None]:
    yield
    assert llm.engine.core.dead is None
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.get_num_unfinished_requests() == 0
    assert llm.engine.stats().pages.held == 0


def complete(
    llm: LLM, prompt: Any, params: SamplingParams = GREEDY, **fields: Any
) -> CompletionOutput:
    """The one sample of one request."""
    return generate(llm, prompt, dataclasses.replace(params, **fields)).outputs[0]


def generate(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    [output] = llm.generate([prompt], params, use_tqdm=False)
    return output


def stream(
    engine: LLMEngine, prompt: Any, params: SamplingParams, **fields: Any
) -> list[RequestOutput]:
    """All that `step` returns of one request."""
    engine.add_request("one", prompt, params, **fields)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert all(output.request_id == "one" for output in outputs)
    return outputs


# Lists


def test_outputs_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [
        PLAY,
        "JULIET:",
        [500, 12, 7],
        "A",
        np.array([9, 10]),
        ("ROMEO",),
        {"prompt": "O"},
        {"prompt_token_ids": [3]},
    ]
    prompts[5] = (11, 12)
    params = [dataclasses.replace(GREEDY, max_tokens=1 + 5 * (7 - i) % 13) for i in range(8)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    alone = [generate(llm, prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    assert [output.outputs[0].token_ids for output in outputs] == [
        output.outputs[0].token_ids for output in alone
    ]
    assert [output.prompt for output in outputs] == [
        PLAY,
        "JULIET:",
        None,
        "A",
        None,
        None,
        "O",
        None,
    ]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [
        one.max_tokens for one in params
    ]
    assert all(output.finished for output in outputs)


@pytest.mark.parametrize(
    "prompt",
    ["JULIET:", [44, 50, 4], (44, 50, 4), np.array([44, 50, 4]), {"prompt": "JULIET:"}],
    ids=str,
)
def test_one_prompt_needs_no_list(llm: LLM, prompt: Any) -> None:
    [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == complete(llm, prompt).token_ids


def test_without_prompts_there_are_no_outputs(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []
    assert llm.generate([], [], use_tqdm=False) == []


def test_generate_returns_whole_outputs_whatever_the_kind(llm: LLM) -> None:
    texts = {complete(llm, PLAY, output_kind=kind).text for kind in OutputKind}
    assert len(texts) == 1


def test_the_bar_shows_the_speed_of_prefill_and_decode(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["A", "B"], GREEDY)
    bar = capsys.readouterr().err
    assert "2/2" in bar
    assert "prefill" in bar
    assert "decode" in bar
    assert "tok/s" in bar


def test_in_a_notebook_the_bar_is_a_widget() -> None:
    assert llm_module.tqdm is tqdm.auto.tqdm, "which chooses"


def test_without_the_bar_nothing_is_printed(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["A", "B"], GREEDY, use_tqdm=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow("makes several engines")
def test_a_second_bos_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.load(DEMO).own
    tokenizer.bos_token = bos = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, 0)]
    )
    tokenizer.save_pretrained(tmp_path)
    with LLM("demo", tokenizer=str(tmp_path), **CONFIG) as llm:

        def told() -> int:
            return sum("two BOS tokens" in record.message for record in caplog.records)

        fine = generate(llm, "ROMEO:", GREEDY)
        llm.chat(
            [{"role": "user", "content": "ROMEO:"}],
            GREEDY,
            use_tqdm=False,
            chat_template="{{ bos_token }}{{ messages[0].content }}",
        )
        generate(llm, [0, 0, 5], GREEDY)
        assert told() == 0
        doubled = llm.generate(["ROMEO:", f"{bos}ROMEO:"], GREEDY, use_tqdm=False)[1]
        assert doubled.prompt_token_ids == (0, *fine.prompt_token_ids), "it is told, not changed"
        generate(llm, f"{bos}ROMEO:", GREEDY)
        assert told() == 1


def test_a_chat_is_its_template_completed(llm: LLM) -> None:
    conversations = [
        [{"role": "user", "content": "Who art thou?"}],
        [{"role": "user", "content": "Speak!"}],
    ]
    answers = llm.chat(conversations, GREEDY, use_tqdm=False)
    prompts = [f"JULIET:\n{content}\n\nROMEO:\n" for content in ("Who art thou?", "Speak!")]
    assert [answer.prompt for answer in answers] == prompts
    assert [answer.outputs for answer in answers] == [
        output.outputs for output in llm.generate(prompts, GREEDY, use_tqdm=False)
    ]
    [single] = llm.chat(conversations[0], GREEDY, use_tqdm=False)
    assert single.outputs == answers[0].outputs


@pytest.mark.usefixtures("own_template_processes")
def test_closing_ends_the_processes_that_render_chats() -> None:
    with LLM("demo", max_model_len=64) as llm:
        llm.chat([{"role": "user", "content": "a"}], GREEDY, use_tqdm=False)
        [process] = llm._chat._renderer._own._idle
        assert process.alive
    assert not process.alive


def test_the_options_of_a_chat_reach_its_template(llm: LLM) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ ending }}{% if "
        "add_generation_prompt %}?{% endif %}{{ tools[0].name }}"
    )
    how: dict[str, Any] = {
        "tools": [{"name": "t"}],
        "chat_template": template,
        "chat_template_kwargs": {"ending": "!"},
        "use_tqdm": False,
    }
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
    ]
    assert llm.chat(messages, GREEDY, **how)[0].prompt == "ab!?t"
    assert llm.chat(messages, GREEDY, **how, add_generation_prompt=False)[0].prompt == "ab!t"
    assert llm.chat(messages, GREEDY, **how, continue_final_message=True)[0].prompt == "ab"


def test_requests_of_others_in_the_same_engine_are_left_alone(llm: LLM) -> None:
    llm.engine.add_request("theirs", "A", dataclasses.replace(GREEDY, max_tokens=60))
    llm.engine.add_request("also theirs", "B", dataclasses.replace(GREEDY, max_tokens=1))
    outputs = llm.generate(["A", "B"], GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["A", "B"]
    assert llm.engine.get_num_unfinished_requests() == 1
    assert {output.request_id for output in llm.engine.step()} == {"theirs", "also theirs"}
    llm.engine.abort_request("theirs")


# Kinds of output

few_texts = st.lists(
    st.sampled_from(["the", "\n", "e", " th", "you", "JULIET:", "\nR", "zzz", "ou,"]), max_size=3
)


@st.composite
def any_params(draw: st.DrawFn) -> SamplingParams:
    detokenize = draw(st.booleans())
    return SamplingParams(
        n=draw(st.sampled_from([1, 1, 2, 3])),
        temperature=draw(st.sampled_from([0.0, 0.8, 3.0])),
        seed=draw(st.integers(0, 50)),
        max_tokens=draw(st.integers(1, 14)),
        stop=draw(few_texts) if detokenize else None,
        stop_token_ids=draw(st.lists(st.integers(0, 1023), max_size=40)),
        include_stop_str_in_output=draw(st.booleans()),
        ignore_eos=draw(st.booleans()),
        logit_bias=draw(st.sampled_from([None, {EOS: 6.0}])),
        logprobs=draw(st.sampled_from([None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, 1])),
        detokenize=detokenize,
        skip_special_tokens=draw(st.booleans()),
    )


@examples(quick=25, full=1000)
@given(params=any_params())
@example(params=SamplingParams(seed=1, detokenize=False, prompt_logprobs=1, max_tokens=3))
@example(params=SamplingParams(seed=1, ignore_eos=True, max_tokens=70))
@pytest.mark.slow("makes several engines or many tokens")
def test_deltas_add_up_to_what_is_cumulative_and_final(llm: LLM, params: SamplingParams) -> None:
    streams = {
        kind: stream(llm.engine, PLAY, dataclasses.replace(params, output_kind=kind))
        for kind in OutputKind
    }
    [final] = streams[OutputKind.FINAL]
    assert [sample.index for sample in final.outputs] == list(range(params.n))
    for output in streams.values():
        assert output[-1].finished
        assert not any(before.finished for before in output[:-1])
        for step in output:
            assert_same_logprobs(step.prompt_logprobs, final.prompt_logprobs)
    for sample in final.outputs:
        check_cumulative(
            sample, [output.outputs[sample.index] for output in streams[OutputKind.CUMULATIVE]]
        )
        check_deltas(
            sample,
            [
                delta
                for output in streams[OutputKind.DELTA]
                for delta in output.outputs
                if delta.index == sample.index
            ],
        )


def check_cumulative(final: CompletionOutput, versions: Sequence[CompletionOutput]) -> None:
    check_deltas(final, versions[-1:])
    for earlier, later in pairwise(versions):
        assert later.text.startswith(earlier.text), "text that was shown is never taken back"
        assert later.token_ids[: len(earlier.token_ids)] == earlier.token_ids
        assert (
            earlier.logprobs is None or later.logprobs[: len(earlier.logprobs)] == earlier.logprobs
        )  # type: ignore[index]


def check_deltas(final: CompletionOutput, deltas: Sequence[CompletionOutput]) -> None:
    assert "".join(delta.text for delta in deltas) == final.text
    assert [token for delta in deltas for token in delta.token_ids] == list(final.token_ids)
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [
        final.finish_reason
    ]
    assert deltas[-1].stop_reason == final.stop_reason
    assert (deltas[-1].cumulative_logprob is None) == (final.cumulative_logprob is None)
    if final.cumulative_logprob is not None:
        assert deltas[-1].cumulative_logprob == rounded(
            final.cumulative_logprob, len(final.token_ids) * roundings_of_demo()
        )
    assert all((delta.logprobs is None) == (final.logprobs is None) for delta in deltas)
    assert_same_logprobs(
        [entries for delta in deltas for entries in delta.logprobs or ()], final.logprobs
    )


def assert_same_logprobs(
    ours: Sequence[TokenLogprobMap | None] | None, theirs: Sequence[TokenLogprobMap | None] | None
) -> None:
    """Up to rounding: what is found in the prefix cache was computed in another batch."""
    for our, their in zip(ours or (), theirs or (), strict=True):
        entries = [(our or {}).items(), (their or {}).items()]
        assert [(token, entry.decoded_token) for token, entry in entries[0]] == [
            (token, entry.decoded_token) for token, entry in entries[1]
        ]
        assert [entry.logprob for _, entry in entries[0]] == rounded(
            [entry.logprob for _, entry in entries[1]], roundings_of_demo()
        )


def test_text_is_what_the_tokenizer_makes_of_all_token_ids(llm: LLM) -> None:
    # bytes of broken characters too
    hot = SamplingParams(temperature=3.0, max_tokens=40, ignore_eos=True)
    for output in llm.generate(
        [PLAY] * 8, [dataclasses.replace(hot, seed=seed) for seed in range(8)], use_tqdm=False
    ):
        [sample] = output.outputs
        assert sample.text == llm.engine.tokenizer.decode(
            sample.token_ids, skip_special_tokens=True
        )


def test_without_detokenizing_there_is_no_text(llm: LLM) -> None:
    sample = complete(llm, PLAY, detokenize=False, logprobs=1)
    assert sample.text == ""
    assert sample.token_ids == complete(llm, PLAY).token_ids
    assert {
        entry.decoded_token for position in sample.logprobs or () for entry in position.values()
    } == {None}


# Samples and seeds


def test_a_seed_decides_all_samples_whatever_else_runs(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=5, max_tokens=10)
    alone = generate(llm, PLAY, params)
    crowd = llm.generate(
        [PLAY, "A", PLAY, "B"],
        [params, GREEDY, dataclasses.replace(params, seed=6), params],
        use_tqdm=False,
    )
    assert crowd[0].outputs == alone.outputs
    assert len({tuple(sample.token_ids) for output in crowd[::2] for sample in output.outputs}) == 8


@pytest.mark.slow("makes several engines or many tokens")
def test_without_a_seed_every_request_is_different_but_every_engine_the_same(llm: LLM) -> None:
    wild = SamplingParams(temperature=1.0, max_tokens=10)
    texts = []
    for seed in (1, 1, 2):
        with LLM(small_demo(), seed=seed, **CONFIG) as other:
            texts.append(
                [
                    output.outputs[0].text
                    for output in other.generate([PLAY] * 3, wild, use_tqdm=False)
                ]
            )
    assert len(set(texts[0])) == 3
    assert texts[0] == texts[1]
    assert not set(texts[0]) & set(texts[2])


# Ends


def test_a_request_ends_by_length(llm: LLM) -> None:
    sample = complete(llm, PLAY, max_tokens=5)
    assert (len(sample.token_ids), sample.finish_reason, sample.stop_reason) == (5, "length", None)
    unlimited = generate(
        llm, [9] * 230, SamplingParams(max_tokens=None, ignore_eos=True, temperature=0)
    )
    assert (
        len(unlimited.prompt_token_ids) + len(unlimited.outputs[0].token_ids)
        == CONFIG["max_model_len"]
    )


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text_before_it_or_behind_it(llm: LLM, include: bool) -> None:
    whole = complete(llm, PLAY, max_tokens=40)
    stop = whole.text[20:26]
    before = whole.text[: whole.text.index(stop)]
    sample = complete(
        llm, PLAY, max_tokens=40, stop=["never", stop], include_stop_str_in_output=include
    )
    assert sample.text == (before + stop if include else before)
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
    assert list(sample.token_ids) == list(whole.token_ids[: len(sample.token_ids)])
    assert stop in llm.engine.tokenizer.decode(sample.token_ids), (
        "the tokens that completed it are reported"
    )


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_ends_it_and_shows_only_on_demand(llm: LLM, include: bool) -> None:
    whole = complete(llm, PLAY)
    stop = whole.token_ids[6]
    sample = complete(llm, PLAY, stop_token_ids=[1, stop], include_stop_str_in_output=include)
    end = whole.token_ids.index(stop)
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
    assert list(sample.token_ids) == list(whole.token_ids[: end + 1])
    assert sample.text == llm.engine.tokenizer.decode(whole.token_ids[: end + include])


def test_eos_ends_it_without_a_stop_reason_unless_ignored(llm: LLM) -> None:
    eager = {"logit_bias": {EOS: 100.0}}
    sample = complete(llm, PLAY, **eager)
    assert (sample.text, list(sample.token_ids), sample.finish_reason, sample.stop_reason) == (
        "",
        [EOS],
        "stop",
        None,
    )
    ignored = complete(llm, PLAY, ignore_eos=True, **eager)
    assert (ignored.text, list(ignored.token_ids), ignored.finish_reason) == (
        "",
        [EOS] * 12,
        "length",
    )
    asked_for = complete(llm, PLAY, ignore_eos=True, stop_token_ids=[EOS], **eager)
    assert (list(asked_for.token_ids), asked_for.finish_reason, asked_for.stop_reason) == (
        [EOS],
        "stop",
        EOS,
    )
    shown = complete(llm, PLAY, ignore_eos=True, skip_special_tokens=False, max_tokens=2, **eager)
    assert shown.text == llm.engine.tokenizer.decode([EOS, EOS]) != ""


def test_nothing_stops_it_before_min_tokens(llm: LLM) -> None:
    eager = complete(llm, PLAY, logit_bias={EOS: 100.0}, min_tokens=5)
    assert len(eager.token_ids) == 6
    assert list(eager.token_ids).index(EOS) == 5
    whole = complete(llm, PLAY)
    stop = complete(llm, PLAY, stop_token_ids=[whole.token_ids[0]], min_tokens=4)
    assert len(stop.token_ids) >= 5
    early, late = whole.text[0], llm.engine.tokenizer.decode(whole.token_ids[9:10])
    text = complete(llm, PLAY, stop=[early, late], min_tokens=9)
    assert text.text.startswith(early)
    assert len(text.token_ids) >= 9
    assert text.finish_reason == "stop"


def test_parameters_can_be_copied_and_pickled() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, extra_args={"key": [1]})
    assert (
        copy.copy(params) == copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
    )
    assert copy.copy(params) is not params
    assert SamplingParams(**dataclasses.asdict(params)) == params


# Which tokens


def test_a_bad_word_of_one_token_is_never_said(llm: LLM) -> None:
    whole = complete(llm, PLAY, max_tokens=40)
    tokens = llm.engine.tokenizer
    word = next(
        tokens.decode([t])
        for t in whole.token_ids
        if tokens.decode([t]).strip().isalpha() and tokens.decode([t]).startswith(" ")
    )
    sample = complete(llm, PLAY, max_tokens=40, bad_words=[word.strip()])
    assert sample.token_ids != whole.token_ids
    assert not set(tokens.encode(word)) & set(sample.token_ids)


def test_a_bad_word_of_several_tokens_is_never_completed(llm: LLM) -> None:
    whole = complete(llm, PLAY, max_tokens=40)
    pair = list(whole.token_ids[4:6])
    text = llm.engine.tokenizer.decode(pair)
    if llm.engine.tokenizer.encode(text) != pair:
        pytest.skip("the greedy text isn't tokenized as it was generated")
    sample = complete(llm, PLAY, max_tokens=40, bad_words=[text])
    pairs = list(pairwise(sample.token_ids))
    assert tuple(pair) not in pairs
    assert list(sample.token_ids[:5]) == list(whole.token_ids[:5]), "its beginning may be said"


def test_a_bias_decides_and_excludes(llm: LLM) -> None:
    first = complete(llm, PLAY).token_ids[0]
    assert set(complete(llm, PLAY, logit_bias={77: 100.0}, max_tokens=4).token_ids) == {77}
    assert first not in complete(llm, PLAY, logit_bias={first: -100.0}).token_ids


def test_only_allowed_tokens_are_sampled(llm: LLM) -> None:
    allowed = {5, 77, 200}
    sample = complete(
        llm, PLAY, allowed_token_ids=sorted(allowed), temperature=2.0, seed=1, max_tokens=30
    )
    assert set(sample.token_ids) <= allowed
    assert len(set(sample.token_ids)) > 1


@pytest.mark.parametrize(
    "penalty",
    [{"repetition_penalty": 3.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}],
    ids=str,
)
def test_a_penalty_makes_repetition_rarer(llm: LLM, penalty: dict[str, float]) -> None:
    def variety(sample: CompletionOutput) -> int:
        return len(set(sample.token_ids))

    plain, penalised = (
        complete(llm, PLAY, temperature=0.4, seed=2, max_tokens=40, **fields)
        for fields in ({}, penalty)
    )
    assert variety(penalised) > variety(plain)


# Log-probabilities


def test_log_probabilities_come_with_ranks_and_texts(llm: LLM) -> None:
    output = generate(llm, PLAY, dataclasses.replace(GREEDY, logprobs=3, prompt_logprobs=2))
    [sample] = output.outputs
    assert sample.logprobs is not None
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for token, entries in [
        *zip(sample.token_ids, sample.logprobs, strict=True),
        *zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True),
    ]:
        assert entries is not None
        assert next(iter(entries)) == token, "the token itself comes first"
        assert all(
            entry.decoded_token == llm.engine.tokenizer.decode([t]) for t, entry in entries.items()
        )
        ranked = sorted(entries.values(), key=lambda entry: entry.rank or 0)
        assert [entry.logprob for entry in ranked] == sorted(
            (entry.logprob for entry in ranked), reverse=True
        )
    assert all(
        entries[token].rank == 1
        for token, entries in zip(sample.token_ids, sample.logprobs, strict=True)
    ), "greedy takes the likeliest"
    assert sample.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(sample.token_ids, sample.logprobs, strict=True))
    )


def test_no_alternatives_means_the_token_alone(llm: LLM) -> None:
    sample = complete(llm, PLAY, logprobs=0)
    assert [list(entries) for entries in sample.logprobs or ()] == [
        [token] for token in sample.token_ids
    ]
    assert complete(llm, PLAY).logprobs is None


# The prefix cache


def test_a_repeated_prompt_is_found_in_the_cache_of_its_salt(llm: LLM) -> None:
    llm.engine.reset_prefix_cache()

    def cached(salt: str | None) -> int:
        [output] = stream(
            llm.engine,
            PLAY,
            dataclasses.replace(GREEDY, max_tokens=1, output_kind="final"),
            cache_salt=salt,
        )  # type: ignore[arg-type]
        return output.num_cached_tokens

    length = len(llm.engine.tokenizer.encode(PLAY))
    full = (length - 1) // 16 * 16
    assert [cached(None), cached(None), cached("a"), cached("a"), cached("b"), cached(None)] == [
        0,
        full,
        0,
        full,
        0,
        full,
    ]
    llm.engine.reset_prefix_cache()
    assert [cached(None), cached("a")] == [0, 0]


# Statistics and times


def test_statistics_add_up(llm: LLM) -> None:
    before = llm.engine.stats()
    outputs = llm.generate(
        [PLAY, "A", [9] * 20], dataclasses.replace(GREEDY, ignore_eos=True), use_tqdm=False
    )
    after = llm.engine.stats()
    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    assert after.arrived - before.arrived == after.finished - before.finished == 3
    assert after.generated_tokens - before.generated_tokens == 3 * 12
    assert (
        after.prefill_tokens - before.prefill_tokens + after.cached_tokens - before.cached_tokens
        == prompts
    )
    assert after.decode_tokens - before.decode_tokens == 3 * 11
    assert (after.waiting, after.running, after.pages.held) == (0, 0, 0)
    assert before.steps < after.steps, "stats() is a snapshot"


def test_times_are_in_order(llm: LLM) -> None:
    begun = llm.engine.now()
    for output in llm.generate(
        [PLAY, "A"], [GREEDY, dataclasses.replace(GREEDY, n=3)], use_tqdm=False
    ):
        times = output.metrics
        assert times is not None
        moments = [
            begun,
            times.arrival_time,
            times.first_scheduled_time,
            times.first_token_time,
            times.finished_time,
            llm.engine.now(),
        ]
        assert None not in moments
        assert moments == sorted(moments)  # type: ignore[type-var]
        assert times.preemptions == 0


# Settings


@pytest.mark.slow("makes several engines")
@pytest.mark.parametrize(
    ("setting", "meant"),
    [("auto", {"temperature": 0.8, "top_p": 0.95}), ("none", {"temperature": 1.0, "top_p": 1.0})],
)
def test_the_models_own_sampling_is_the_default_unless_turned_off(
    llm: LLM, setting: str, meant: dict[str, float]
) -> None:
    params = SamplingParams(seed=4, max_tokens=40)
    with LLM("demo", generation_config=setting, **CONFIG) as other:
        implicit = complete(other, PLAY, params)
        explicit = complete(other, PLAY, params, **meant)
        assert implicit == explicit
        assert complete(other, PLAY, logit_bias={EOS: 100.0}).finish_reason == "stop", (
            "EOS is known from config.json too"
        )


def test_the_more_important_request_goes_first() -> None:
    with LLMEngine.from_config(
        {"model": "demo", "scheduler": "priority", **CONFIG, "max_num_seqs": 1},
        clock=VirtualClock(),
    ) as engine:
        for request_id, priority in (("third", 5), ("first", -2), ("second", 0)):
            engine.add_request(
                request_id, "A", dataclasses.replace(GREEDY, output_kind="final"), priority=priority
            )  # type: ignore[arg-type]
        finished = []
        while engine.has_unfinished_requests():
            finished += [output.request_id for output in engine.step()]
    assert finished == ["first", "second", "third"]


# Lives


def test_two_engines_live_in_one_process(llm: LLM) -> None:
    expected = complete(llm, PLAY)
    with LLM(small_demo(), **CONFIG) as other:
        for engine in (llm.engine, other.engine):
            engine.add_request("same", PLAY, GREEDY)
        last = {}
        while llm.engine.has_unfinished_requests() or other.engine.has_unfinished_requests():
            last |= {
                id(engine): engine.step()
                for engine in (llm.engine, other.engine)
                if engine.has_unfinished_requests()
            }
    assert [output.outputs[0] for [output] in last.values()] == [expected] * 2


def test_an_engine_is_closed_by_its_context_and_twice_is_as_good_as_once() -> None:
    with LLM(small_demo(), **CONFIG) as llm:
        llm.engine.add_request("left behind", "A")
        llm.engine.step()
    llm.close()
    assert not llm.engine.has_unfinished_requests()
    for call in (
        llm.engine.step,
        lambda: llm.generate("A", use_tqdm=False),
        lambda: llm.engine.add_request("a", "A"),
    ):
        with pytest.raises(EngineDeadError, match="the engine was closed"):
            call()
    llm.engine.abort_request("left behind")
    assert llm.engine.stats().pages.held == 0


@pytest.mark.slow("looks through all objects, several times")
def test_many_calls_leave_nothing_behind_not_even_for_the_garbage_collector(
    llm: LLM, request: pytest.FixtureRequest
) -> None:
    def requests_alive() -> int:
        return sum(type(thing) is Request for thing in gc.get_objects())

    gc.collect()
    before = requests_alive()
    gc.disable()
    request.addfinalizer(gc.enable)
    for i in range(15):
        llm.generate(
            ["A", PLAY[i:], [i + 1]],
            SamplingParams(n=1 + i % 3, max_tokens=3, stop=["x"], logprobs=i % 2),
            use_tqdm=False,
        )
        with pytest.raises(RequestError):
            llm.generate(["A", ""], use_tqdm=False)
        llm.engine.add_request("aborted", PLAY, SamplingParams(n=2, max_tokens=50))
        llm.engine.step()
        llm.engine.abort_request("aborted")
    assert requests_alive() <= before
    assert len(llm.engine.core.books.rows._free) == CONFIG["max_num_seqs"]
    assert not llm.engine.core.books.known
    llm.engine.core.kv.check_integrity()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_waits_until_the_first_step_and_is_then_as_it_was(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    states, step = list[bool](), llm.engine.core.step
    monkeypatch.setattr(
        llm.engine.core, "step", lambda wait: states.append(gc.isenabled()) or step(wait)
    )
    (gc.enable if enabled else gc.disable)()
    try:
        llm.generate(["A", PLAY], SamplingParams(max_tokens=3), use_tqdm=False)
        assert states == [False, *[enabled] * (len(states) - 1)]
        with pytest.raises(RequestError):
            llm.generate(["A", ""], use_tqdm=False)
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """As in a terminal: a shell starts what runs in its background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupting(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, times: int) -> threading.Event:
    """In the midst of the third step from now, Ctrl-C is pressed. Returns what is set after
    that."""
    executor, calls, pressed = engine.core.executor, [], threading.Event()
    submit = executor.submit

    def interrupted(batch: Any) -> Any:
        calls.append(batch)
        handle = submit(batch)
        if len(calls) == 3:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
            pressed.set()
        return handle

    monkeypatch.setattr(executor, "submit", interrupted)
    return pressed


def generate_until(pressed: threading.Event, llm: LLM) -> None:
    """Generate, and wait: a second interrupt may come when the first has been answered."""
    try:
        llm.generate([PLAY, "A"], dataclasses.replace(GREEDY, max_tokens=100), use_tqdm=False)
    finally:
        pressed.wait(60)
        assert pressed.is_set()


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_leaves_an_engine_that_can_be_used(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    expected = complete(llm, PLAY)
    llm.engine.reset_prefix_cache()
    pressed = interrupting(llm.engine, monkeypatch, times)
    with pytest.raises(KeyboardInterrupt):
        generate_until(pressed, llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert times > 1 or not llm.engine.has_unfinished_requests()
    assert complete(llm, PLAY) == expected


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_amidst_a_step_by_hand_ends_the_engine_rather_than_leaving_wrong_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LLMEngine.from_config(CONFIG) as engine:
        interrupting(engine, monkeypatch, times=1)
        engine.add_request("a", PLAY, dataclasses.replace(GREEDY, max_tokens=100))
        engine.step()
        engine.step()
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        with pytest.raises(EngineDeadError, match="a step was interrupted by KeyboardInterrupt"):
            engine.add_request("b", PLAY)
