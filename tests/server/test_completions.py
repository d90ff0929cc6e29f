"""`/v1/completions`, driven by the openai package."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from tests.server.serving import demo_tokenizer

PROMPT = "ROMEO: But soft"


def ask(api: openai.OpenAI, prompt: Any = PROMPT, /, **options: Any) -> Any:
    further = {name: options.pop(name) for name in FURTHER if name in options}
    return api.completions.create(
        model="demo", prompt=prompt, **{"seed": 1, "max_tokens": 8, **options}, extra_body=further
    )


FURTHER = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "min_tokens",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "max_drafts",
    "priority",
    "client",
    "deadline_s",
    "ttft_deadline_s",
    "tbt_s",
    "cache_salt",
    "return_token_ids",
    "use_beam_search",
)


def test_prompts_times_n_are_bounded(openai_client: openai.OpenAI) -> None:
    with pytest.raises(
        openai.BadRequestError,
        match=r"^.*n: the samples of all prompts together must be at most 4096 "
        r"\(limits.max_samples\), got 6000",
    ):
        ask(openai_client, ["a"] * 1000, n=6)


def texts(stream: Any) -> dict[int, str]:
    """The texts of a stream's choices."""
    joined: dict[int, str] = {}
    for chunk in stream:
        for choice in chunk.choices:
            joined[choice.index] = joined.get(choice.index, "") + choice.text
    return joined


OPTIONS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"temperature": 0},
    {"top_p": 0.5},
    {"stop": "\n"},
    {"stop": [" ", "\n"], "include_stop_str_in_output": True},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3},
    {"logit_bias": {"5": 100}},
    {"top_k": 3},
    {"min_p": 0.2},
    {"ignore_eos": True, "min_tokens": 8},
    {"allowed_token_ids": [70, 71, 72]},
    {"bad_words": [" the"]},
    {"stop_token_ids": [70]},
    {"truncate_prompt_tokens": 2, "max_drafts": 0},
    {
        "priority": 3,
        "client": "somebody",
        "deadline_s": 30.0,
        "ttft_deadline_s": 20.0,
        "tbt_s": 5.0,
        "cache_salt": "x",
    },
    {"skip_special_tokens": False},
    {"echo": True},
    {"logprobs": 2},
    {"logprobs": 2, "echo": True},
    {"n": 2, "best_of": 2},
    {"return_token_ids": True, "use_beam_search": False},
    {"user": "somebody"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_stream_adds_up_to_the_whole_answer(
    openai_client: openai.OpenAI, options: dict[str, Any]
) -> None:
    whole = ask(openai_client, **options)
    assert texts(ask(openai_client, stream=True, **options)) == {
        choice.index: choice.text for choice in whole.choices
    }
    assert len(whole.choices) == options.get("n", 1)


def test_the_text_is_that_of_the_engine(openai_client: openai.OpenAI) -> None:
    answer = ask(openai_client, temperature=0, extra_headers={"X-Request-Id": "mine"})
    assert answer.choices[0].finish_reason == "length"
    assert answer.model == "demo"
    usage = answer.usage
    assert usage.prompt_tokens == len(demo_tokenizer().encode(PROMPT))
    assert (usage.completion_tokens, usage.total_tokens) == (8, usage.prompt_tokens + 8)


def test_token_ids_are_prompts_too(openai_client: openai.OpenAI) -> None:
    ids = demo_tokenizer().encode(PROMPT)
    assert ask(openai_client, ids).choices[0].text == ask(openai_client, PROMPT).choices[0].text


@pytest.mark.slow("many answers")
def test_each_prompt_of_a_list_has_its_own_choices(openai_client: openai.OpenAI) -> None:
    prompts = [PROMPT, "JULIET:", "First Citizen:"]
    ids = [demo_tokenizer().encode(prompt) for prompt in prompts]
    alone = [
        choice.text for prompt in prompts for choice in ask(openai_client, prompt, n=2).choices
    ]
    assert [choice.text for choice in ask(openai_client, prompts, n=2).choices] == alone
    assert [choice.text for choice in ask(openai_client, ids, n=2).choices] == alone
    assert texts(ask(openai_client, prompts, n=2, stream=True)) == dict(enumerate(alone))


def test_max_tokens_is_16_unless_given(openai_client: openai.OpenAI) -> None:
    answer = openai_client.completions.create(
        model="demo", prompt=PROMPT, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_echo_puts_the_prompt_before_the_text_and_its_logprobs(
    openai_client: openai.OpenAI,
) -> None:
    choice = ask(openai_client, echo=True, logprobs=1).choices[0]
    assert choice.text.startswith(PROMPT)
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert all(
        choice.text[at:].startswith(token)
        for at, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)
    )


def text_of(tokens: Sequence[str]) -> str:
    """The text of tokens as this API names them: parts of a character are named by their bytes."""
    named = [re.fullmatch(r"bytes:((?:\\x[0-9a-f]{2})+)", token) for token in tokens]
    spelled = [
        bytes.fromhex(match[1].replace("\\x", "")) if match else token.encode()
        for match, token in zip(named, tokens, strict=True)
    ]
    return b"".join(spelled).decode(errors="replace")


@pytest.mark.parametrize("options", [{}, {"stream": True}, {"skip_special_tokens": False}])
@pytest.mark.parametrize(
    "prompt",
    ["é", "naïve 😀 x", "漢字", demo_tokenizer().encode("a é 漢", special_tokens=False)],
    ids=repr,
)
def test_tokens_are_the_texts_and_offsets_their_running_lengths(
    openai_client: openai.OpenAI, prompt: Any, options: Any
) -> None:
    asked: Any = {"echo": True, "logprobs": 5, "max_tokens": 24, "temperature": 1.8, **options}
    answer = ask(openai_client, prompt, **asked)
    choices = [chunk.choices[0] for chunk in answer] if options.get("stream") else answer.choices
    text = "".join(choice.text for choice in choices)
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    assert text_of(tokens) == text
    whole_characters = [text_of(tokens[:place]).rstrip("\ufffd") for place in range(len(tokens))]
    assert offsets == [len(before) for before in whole_characters]
    alternatives = [top for choice in choices for top in choice.logprobs.top_logprobs][1:]
    assert {len(top) for top in alternatives} == {5}


def test_offsets_of_a_character_of_two_tokens(openai_client: openai.OpenAI) -> None:
    logprobs = ask(openai_client, "é", echo=True, logprobs=0, max_tokens=1).choices[0].logprobs
    assert logprobs.tokens[:2] == [r"bytes:\xc3", r"bytes:\xa9"]
    assert logprobs.text_offset == [0, 0, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_without_an_answer(openai_client: openai.OpenAI, stream: bool) -> None:
    scored = ask(openai_client, max_tokens=0, echo=True, logprobs=1)
    [choice] = scored.choices
    answered = ask(openai_client, echo=True, logprobs=1).choices[0].logprobs
    length = scored.usage.prompt_tokens
    assert (choice.text, choice.finish_reason, scored.usage.completion_tokens) == (
        PROMPT,
        "length",
        0,
    )
    assert choice.logprobs.token_logprobs == answered.token_logprobs[:length]
    if stream:
        chunks = list(
            ask(
                openai_client,
                max_tokens=0,
                echo=True,
                logprobs=1,
                n=2,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert texts(chunks) == {0: PROMPT, 1: PROMPT}
        assert chunks[-1].usage.completion_tokens == 0


def test_logprobs_name_the_likeliest(openai_client: openai.OpenAI) -> None:
    logprobs = ask(openai_client, temperature=0, logprobs=3).choices[0].logprobs
    assert len(logprobs.tokens) == 8
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert len(top) == 3
        assert max(top, key=top.get) == token
        assert top[token] == value


def test_prompt_logprobs_have_one_map_a_token(openai_client: openai.OpenAI) -> None:
    answer = ask(openai_client, prompt_logprobs=1)
    known = answer.choices[0].prompt_logprobs
    assert known[0] is None
    assert len(known) == answer.usage.prompt_tokens


def test_usage_comes_in_a_stream_that_asks_for_it(openai_client: openai.OpenAI) -> None:
    chunks = list(ask(openai_client, stream=True, stream_options={"include_usage": True}))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage == ask(openai_client).usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_continuous_usage_counts_up(openai_client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk.usage.completion_tokens
        for chunk in ask(openai_client, stream=True, stream_options=options)
    ]
    assert counts == sorted(counts)
    assert counts[-1] == 8


def test_a_prompt_seen_before_is_reported_as_cached(openai_client: openai.OpenAI) -> None:
    prompt = (
        "Friends, Romans, countrymen, lend me your ears; I come to bury Caesar, not to praise him. "
        * 3
    )
    ask(openai_client, prompt)
    assert ask(openai_client, prompt).usage.prompt_tokens_details.cached_tokens > 0


def test_tokenize_and_detokenize_are_each_others_reverse(openai_client: openai.OpenAI) -> None:
    root = openai_client.with_options(base_url=str(openai_client.base_url).replace("/v1", ""))
    tokens: Any = root.post(
        "/tokenize", body={"prompt": PROMPT, "return_token_strs": True}, cast_to=dict[str, Any]
    )
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert root.post("/detokenize", body={"tokens": tokens["tokens"]}, cast_to=dict[str, Any]) == {
        "prompt": PROMPT
    }


def test_models_are_listed(openai_client: openai.OpenAI) -> None:
    assert [model.id for model in openai_client.models.list()] == ["demo"]
    assert openai_client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("other")
