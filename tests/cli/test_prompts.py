"""Prompt files: every line is read and checked before anything runs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.cli.prompts import Prompt, as_chat, read_plain, read_prompts
from dovetail.errors import RequestError
from dovetail.request.sampling_params import OutputKind
from tests.support import examples


def read(*lines: str, **defaults: object) -> list[Prompt]:
    return read_prompts(lines, "f.jsonl", defaults)


def test_strings_and_objects_and_empty_lines() -> None:
    text, blank_skipped, chat, ids = read(
        '"ROMEO:"',
        "",
        '{"prompt": "JULIET:", "max_tokens": 3, "id": "j"}',
        '{"messages": [{"role": "user", "content": "hi"}], "temperature": 0}',
        '{"prompt_token_ids": [1, 2], "id": 7, "stop": ["x"]}',
        max_tokens=9,
    )
    assert (text.id, text.prompt, text.params.max_tokens) == ("1", "ROMEO:", 9)
    assert (blank_skipped.id, blank_skipped.params.max_tokens) == ("j", 3)
    assert chat.messages == [{"role": "user", "content": "hi"}]
    assert (ids.id, ids.prompt, ids.params.stop) == ("7", {"prompt_token_ids": [1, 2]}, ("x",))
    assert text.params.output_kind is OutputKind.FINAL


def test_json_keys_of_a_logit_bias_are_token_ids() -> None:
    assert read('{"prompt": "a", "logit_bias": {"5": 1}}')[0].params.logit_bias == {5: 1.0}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "f.jsonl:2: not valid JSON"),
        ("3", "f.jsonl:2: expected a string or an object, got 3"),
        ('{"promt": "x"}', "f.jsonl:2: promt: unknown key, did you mean prompt?"),
        (
            '{"prompt": "x", "temprature": 1}',
            "f.jsonl:2: temprature: unknown key, did you mean temperature?",
        ),
        (
            '{"id": "a"}',
            "f.jsonl:2: expected exactly one of prompt, messages, prompt_token_ids, got none",
        ),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "got prompt and prompt_token_ids"),
        ('{"prompt": 3}', "f.jsonl:2: prompt must be a string, got 3"),
        (
            '{"prompt_token_ids": []}',
            "f.jsonl:2: prompt_token_ids must be a list with something in it",
        ),
        ('{"messages": ["hi"]}', "f.jsonl:2: messages must be objects"),
        ('{"prompt": "x", "max_tokens": 0}', "f.jsonl:2: max_tokens must be an integer >= 1"),
        ('{"prompt": "x", "id": 1}', "f.jsonl:2: id '1' is taken by f.jsonl:1"),
        ('{"prompt": "x", "id": [1]}', "f.jsonl:2: id must be a string or an integer"),
        (
            '{"prompt": "x", "logit_bias": {"a": 1}}',
            "f.jsonl:2: logit_bias: token id must be an integer",
        ),
        ('{"prompt": "x", "extra_args": 3}', "f.jsonl:2: extra_args must be an object"),
        (
            '{"prompt": "x", "extra": [1]}',
            "f.jsonl:2: extra must be an object of distributions and their values, got [1]",
        ),
        (
            '{"prompt": "x", "extra": ' + '{"a":' * 60 + "1" + "}" * 61,
            "f.jsonl:2: extra: more than 50 lists and objects in one another",
        ),
        (
            '{"prompt": "x", "predicted_tokens": "5"}',
            "f.jsonl:2: predicted_tokens must be an integer from 0 to ",
        ),
        (
            '{"prompt": "x", "use_beam_search": true}',
            "f.jsonl:2: use_beam_search: use LLM.beam_search(",
        ),
        (
            '{"prompt": "x", "logit_bias": {"--5": 1}}',
            "f.jsonl:2: logit_bias: token id must be an integer",
        ),
        (
            '{"prompt": "x", "logit_bias": {"05": 1, "5": 2}}',
            "f.jsonl:2: logit_bias: token id must be an integer",
        ),
        (
            f'{{"prompt": "x", "logit_bias": {{"{"9" * 5000}": 1}}}}',
            "f.jsonl:2: logit_bias: token id must be an integer",
        ),
        (f'{{"prompt": "x", "n": {"9" * 5000}}}', "f.jsonl:2: a number of more than 100 digits"),
        ('{"prompt": "x", "prompt": "y"}', "f.jsonl:2: key 'prompt' is given twice"),
        (
            '{"prompt": ' + "[" * 200_000,
            "f.jsonl:2: more than 128 lists and objects in one another",
        ),
        ('{"prompt": ' + "[" * 100 + "]" * 100 + "}", "f.jsonl:2: prompt must be a string, got "),
        ("[" * 200_000, "f.jsonl:2: more than 128 lists and objects in one another"),
        (
            "ROMEO: hi",
            "not valid JSON: Expecting value: line 1 column 1 (char 0); quote each line, or use "
            "--plain",
        ),
        (
            "true",
            "f.jsonl:2: expected a string or an object, got True; quote each line, or use --plain",
        ),
        ('{"prompt": "x", "output_kind": "delta"}', "f.jsonl:2: output_kind: unknown key"),
    ],
)
def test_bad_line_is_reported_with_file_and_line(line: str, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        read('"fine"', line)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 510, (
        "the names of all parameters, and no value of thousands of characters"
    )


def test_lines_of_a_plain_file_are_prompts_as_they_stand() -> None:
    prompts = read_plain(['"quoted"', "", " {ROMEO: "], "f.txt", {"max_tokens": 3})
    assert [(prompt.id, prompt.prompt, prompt.params.max_tokens) for prompt in prompts] == [
        ("1", '"quoted"', 3),
        ("3", " {ROMEO: ", 3),
    ]
    with pytest.raises(RequestError, match="no prompts in it"):
        read_plain([" "], "f.txt", {})


def test_chat_makes_messages_of_texts_and_refuses_token_ids() -> None:
    text, messages, ids = read(
        '"hi"', '{"messages": [{"role": "system", "content": "x"}]}', '{"prompt_token_ids": [1]}'
    )
    assert as_chat(text)[2:4] == ("", [{"role": "user", "content": "hi"}])
    assert as_chat(messages) == messages
    with pytest.raises(RequestError, match="request '3': --chat makes a message of a text"):
        as_chat(ids)


def test_file_without_prompts_is_an_error() -> None:
    with pytest.raises(RequestError, match="no prompts"):
        read("", " ")


VALUE: st.SearchStrategy[object] = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(st.text("-+05_ ٥", max_size=3), st.integers(), max_size=2)
)
KEYS = st.sampled_from(
    [
        "prompt",
        "messages",
        "prompt_token_ids",
        "id",
        "n",
        "stop",
        "seed",
        "logit_bias",
        "extra_args",
        "bad_words",
        "detokenize",
    ]
)


@examples(quick=150, full=10000)
@given(st.dictionaries(KEYS, VALUE, max_size=4))
def test_any_line_is_a_prompt_or_a_request_error(line: dict[str, object]) -> None:
    try:
        assert len(read(json.dumps(line))) == 1
    except RequestError as error:
        assert str(error).startswith("f.jsonl:1: ")  # noqa: PT017
