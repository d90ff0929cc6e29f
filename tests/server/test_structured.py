"""Answers that follow a rule, and calls that are demanded, in every API, from a model that would
rather write Shakespeare."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict

from dovetail.request.structured import Structured
from dovetail_server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import PATIENCE_S, demo_tokenizer, serving, serving_in_threads
from tests.small_model import small_demo
from tests.support import FULL

HEAD = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{{ message.role "
    "}}: {{ message.content }}\n{% endfor %}"
)
TEMPLATES = {  # by the parser that reads their calls
    "hermes": HEAD + "{# <tool_call> #}assistant:",
    "llama3_json": HEAD + "{# <|python_tag|> #}assistant:",
    "mistral": HEAD + "{# [TOOL_CALLS] #}assistant:",
    "mistral, newer": HEAD + "{# [TOOL_CALLS] [ARGS] #}assistant:",
}
PLAIN = HEAD + "assistant:"
# A call is an object in JSON, or a name before its arguments. What the rule of each parser lets
# through, test_call_rules.py shows.
BOTH_WAYS = list(TEMPLATES) if FULL else ["hermes", "mistral, newer"]
MESSAGES: Any = [{"role": "user", "content": "Who are you?"}]


class Person(BaseModel):
    """The values are few, so that an answer of a small model ends."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Romeo", "Juliet"]
    age: Literal[14, 17]


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Verona"]}},
    "required": ["city"],
    "additionalProperties": False,
}
DAY = {
    "type": "object",
    "properties": {"day": {"$ref": "#/$defs/day"}},
    "required": ["day"],
    "$defs": {"day": {"enum": [1, 2]}},
}
DAY |= {"additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "calendar", "parameters": DAY}},
    {"type": "function", "function": {"name": "now"}},
]
AMBIGUOUS = "\n".join(
    [
        "start: r0",
        *(f'r{number}: r{number + 1} r{number + 1} | "a"' for number in range(800)),
        'r800: "z"',
    ]
)
ARGUMENTS: Mapping[str, Any] = {
    "weather": CITY,
    "calendar": DAY,
    "now": {"type": "object", "maxProperties": 0},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    config = {"model": small_demo(), "max_num_seqs": 16, "limits": {"max_grammar_chars": 20_000}}
    with serving_in_threads(
        config,
        ServerSettings(log_requests=False, served_model_name=("demo",)),
        chat_template=TEMPLATES["hermes"],
    ) as url:
        yield url


@pytest.fixture(scope="module")
def api(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


def ask(
    api: openai.OpenAI,
    template: str = PLAIN,
    further: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    given = {
        "model": "demo",
        "messages": MESSAGES,
        "seed": 1,
        "max_completion_tokens": 100,
        **options,
    }
    return api.chat.completions.create(
        **given, extra_body={"chat_template": template, **(further or {})}
    )


def follows(value: Any, schema: Mapping[str, Any]) -> bool:
    import jsonschema

    return jsonschema.Draft202012Validator(schema).is_valid(value)


# ---- formats


@pytest.mark.slow("imports pydantic's models of a client")
def test_a_pydantic_model_is_parsed_by_openais_client(api: openai.OpenAI) -> None:
    answer = api.chat.completions.parse(
        model="demo",
        messages=MESSAGES,
        response_format=Person,
        max_completion_tokens=100,
        extra_body={"chat_template": PLAIN},
    )
    assert isinstance(answer.choices[0].message.parsed, Person)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.slow("generates four long answers")
def test_a_stream_has_the_same_json_as_the_whole_answer(api: openai.OpenAI) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": Person.model_json_schema(), "strict": True},
    }
    whole = ask(api, response_format=form, n=2)
    streamed = {0: "", 1: ""}
    for chunk in ask(api, response_format=form, n=2, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == {choice.index: choice.message.content for choice in whole.choices}
    assert all(Person.model_validate_json(text) for text in streamed.values())


@pytest.mark.slow("answers many requests")
def test_a_json_object_is_one(api: openai.OpenAI) -> None:
    choices = ask(
        api, response_format={"type": "json_object"}, n=8, max_completion_tokens=200
    ).choices
    ended = [
        json.loads(choice.message.content) for choice in choices if choice.finish_reason == "stop"
    ]
    assert ended
    assert all(isinstance(value, dict) for value in ended)


def test_an_answer_that_is_cut_says_so(api: openai.OpenAI) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": Person.model_json_schema()},
    }
    choice = ask(api, response_format=form, max_completion_tokens=2).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.content.startswith("{")


RULES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "structured_outputs": ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
    "guided_regex": ({"guided_regex": "[ab]c"}, ("ac", "bc")),
    "guided_grammar": ({"guided_grammar": 'start: "x" | "y"'}, ("x", "y")),
    "guided_json": ({"guided_json": {"enum": ["x", 1]}}, ('"x"', "1")),
    "SGLang's regex": ({"regex": "[ab]c"}, ("ac", "bc")),
    "SGLang's ebnf": ({"ebnf": 'root ::= "x" | "y"'}, ("x", "y")),
    "SGLang's json_schema": ({"json_schema": '{"enum": ["x", 1]}'}, ('"x"', "1")),
    "its json_schema as an object": ({"json_schema": {"enum": ["x", 1]}}, ('"x"', "1")),
    "as JSON": ({"guided_json": '{"enum": ["x", 1]}'}, ('"x"', "1")),
    "structural_tag": (
        {
            "response_format": {
                "type": "structural_tag",
                "structures": [{"begin": "<f>", "schema": {"const": 1}, "end": "</f>"}],
                "triggers": ["<f>"],
                "at_least_one": True,
                "stop_after_first": True,
            }
        },
        ("<f>1</f>",),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_every_rule_in_others_words_is_followed_by_chat_and_completions(
    api: openai.OpenAI, name: str
) -> None:
    rule, texts = RULES[name]
    assert ask(api, further=rule).choices[0].message.content in texts
    answer = api.completions.create(
        model="demo", prompt=["ROMEO:", "JULIET:"], max_tokens=30, extra_body=rule
    )
    assert all(choice.text in texts and choice.finish_reason == "stop" for choice in answer.choices)


# ---- calls


MANY = pytest.mark.slow("answers many requests")


@pytest.mark.parametrize("n", [1, pytest.param(6, marks=MANY)])
@pytest.mark.parametrize("parser", TEMPLATES)
def test_a_call_that_is_required_comes_with_arguments_that_follow_its_schema(
    api: openai.OpenAI, parser: str, n: int
) -> None:
    answer = ask(
        api, TEMPLATES[parser], tools=TOOLS, tool_choice="required", n=n, parallel_tool_calls=False
    )
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        [call] = choice.message.tool_calls
        assert follows(json.loads(call.function.arguments), ARGUMENTS[call.function.name])


@pytest.mark.parametrize("parser", BOTH_WAYS)
@pytest.mark.slow("answers many requests")
def test_a_named_function_is_called_whole_and_streamed(api: openai.OpenAI, parser: str) -> None:
    options = {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "calendar"}},
        "parallel_tool_calls": False,
    }
    [call] = ask(api, TEMPLATES[parser], **options).choices[0].message.tool_calls
    assert call.function.name == "calendar"
    name = arguments = ""
    for chunk in ask(api, TEMPLATES[parser], **options, stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            name, arguments = (
                name + (part.function.name or ""),
                arguments + (part.function.arguments or ""),
            )
    assert (name, arguments) == ("calendar", call.function.arguments)
    assert follows(json.loads(arguments), DAY)
    assert chunk.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(("n", "limit"), [(1, 50), pytest.param(8, 150, marks=MANY)])
@pytest.mark.parametrize("parser", BOTH_WAYS)
def test_a_required_answer_is_calls_and_nothing_else(
    api: openai.OpenAI, parser: str, n: int, limit: int
) -> None:
    options = {"tools": TOOLS, "tool_choice": "required", "n": n, "max_completion_tokens": limit}
    for choice in ask(api, TEMPLATES[parser], **options, parallel_tool_calls=True).choices:
        calls = choice.message.tool_calls or []
        assert not choice.message.content, "not even the beginning of a call that was cut off"
        assert choice.finish_reason in ("length", "tool_calls")
        for call in calls[:-1] if choice.finish_reason == "length" else calls:
            assert follows(json.loads(call.function.arguments), ARGUMENTS[call.function.name])


@pytest.mark.parametrize("parser", BOTH_WAYS)
def test_a_required_answer_ends_after_its_first_call_unless_several_are_asked_for(
    api: openai.OpenAI, parser: str
) -> None:
    for choice in ask(api, TEMPLATES[parser], tools=TOOLS, tool_choice="required", n=2).choices:
        assert (choice.finish_reason, choice.message.content, len(choice.message.tool_calls)) == (
            "tool_calls",
            None,
            1,
        )


@pytest.mark.parametrize(
    "end",
    [{"stop": ["\n"]}, {"stop_token_ids": demo_tokenizer().encode("\n", special_tokens=False)}],
)
def test_a_call_can_be_required_where_a_line_break_ends_the_answer(
    api: openai.OpenAI, end: dict[str, Any]
) -> None:
    choice = ask(api, TEMPLATES["hermes"], end, tools=TOOLS, tool_choice="required").choices[0]
    assert choice.finish_reason == "tool_calls"
    assert follows(
        json.loads(choice.message.tool_calls[0].function.arguments),
        ARGUMENTS[choice.message.tool_calls[0].function.name],
    )


@pytest.mark.parametrize("limit", [1, 5])
def test_a_required_call_that_is_cut_off_before_its_name_shows_nothing_of_it(
    api: openai.OpenAI, limit: int
) -> None:
    options = {"tools": TOOLS, "tool_choice": "required", "max_completion_tokens": limit}
    [choice] = ask(api, TEMPLATES["hermes"], **options).choices
    assert (choice.finish_reason, choice.message.content) == (
        "length",
        None if choice.message.tool_calls else "",
    )
    streamed = [
        chunk.choices[0].delta.content or ""
        for chunk in ask(api, TEMPLATES["hermes"], **options, stream=True)
    ]
    assert "".join(streamed) == ""


@pytest.mark.parametrize("n", [1, pytest.param(8, marks=MANY)])
@pytest.mark.parametrize("parser", BOTH_WAYS)
def test_a_named_function_is_called_once(api: openai.OpenAI, parser: str, n: int) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ask(api, TEMPLATES[parser], tools=TOOLS, tool_choice=named, n=n).choices:
        assert (choice.finish_reason, choice.message.content, len(choice.message.tool_calls)) == (
            "tool_calls",
            None,
            1,
        )


CUT = ["om", "ron"]  # amidst Rome and Verona


@pytest.mark.parametrize("parser", BOTH_WAYS)
def test_a_call_that_a_stop_string_cuts_off_is_no_finished_call(
    api: openai.OpenAI, parser: str
) -> None:
    options = {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "stop": CUT,
    }
    whole = ask(api, TEMPLATES[parser], **options).choices[0]
    assert whole.message.tool_calls[0].function.arguments in ('{"city":"R', '{"city":"Ve')
    assert (whole.finish_reason, whole.stop_reason in CUT) == ("stop", True)


@pytest.mark.parametrize("parser", BOTH_WAYS)
def test_a_streamed_call_that_a_stop_string_cuts_off_is_no_finished_call(
    api: openai.OpenAI, parser: str
) -> None:
    options = {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "stop": CUT,
    }
    *_, last = ask(api, TEMPLATES[parser], **options, stream=True)
    assert last.choices[0].finish_reason == "stop"


def test_a_stop_string_behind_a_call_leaves_it_a_call(api: openai.OpenAI) -> None:
    choice = ask(
        api, TEMPLATES["hermes"], tools=TOOLS, tool_choice="required", stop=["</tool_call>"]
    ).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert follows(
        json.loads(choice.message.tool_calls[0].function.arguments),
        ARGUMENTS[choice.message.tool_calls[0].function.name],
    )


@pytest.mark.parametrize("stream", [False, True])
def test_responses_say_that_a_call_was_cut_off(api: openai.OpenAI, stream: bool) -> None:
    template = {"chat_template": TEMPLATES["hermes"]}
    tool: Any = {"type": "function", "name": "weather", "parameters": CITY}
    asked: Any = {
        "model": "demo",
        "input": "?",
        "tools": [tool],
        "tool_choice": {"type": "function", "name": "weather"},
    }
    made = api.responses.create(**asked, stream=stream, extra_body={**template, "stop": CUT})
    answer = list(made)[-1].response if stream else made
    assert (
        answer.status,
        answer.output[0].status,
        answer.incomplete_details,
        answer.completed_at,
    ) == ("incomplete", "incomplete", None, None)


@pytest.mark.parametrize("stream", [False, True])
def test_messages_say_that_a_call_was_cut_off(url: str, stream: bool) -> None:
    template = {"chat_template": TEMPLATES["hermes"]}
    body = {
        "model": "demo",
        "max_tokens": 100,
        "messages": MESSAGES,
        "stop_sequences": CUT,
        **template,
        "stream": stream,
    }
    body |= {
        "tools": [{"name": "weather", "input_schema": CITY}],
        "tool_choice": {"type": "tool", "name": "weather"},
    }
    assert (
        '"stop_reason":"stop_sequence"'
        in httpx.post(f"{url}/v1/messages", json=body, timeout=PATIENCE_S).text
    )


def test_a_call_goes_round(api: openai.OpenAI) -> None:
    """The conversation continues with the call and its result."""
    [call] = (
        ask(
            api, TEMPLATES["hermes"], tools=TOOLS, tool_choice="required", parallel_tool_calls=False
        )
        .choices[0]
        .message.tool_calls
    )
    messages = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    template = (
        "{% for message in messages %}{{ message.tool_calls }}{{ message.content }}{% endfor %}"
        + TEMPLATES["hermes"]
    )
    answer = ask(
        api,
        template,
        messages=messages,
        response_format={"type": "json_object"},
        max_completion_tokens=4,
    )
    assert answer.choices[0].message.content.startswith("{")


def test_an_answer_is_free_to_call_no_strict_tool(api: openai.OpenAI) -> None:
    strict = [
        {"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS
    ]
    answer = ask(api, TEMPLATES["hermes"], tools=strict, max_completion_tokens=8, temperature=0)
    assert answer.choices[0].message.content


RESPONSES: Any = {
    "model": "demo",
    "max_output_tokens": 100,
    "extra_body": {"chat_template": TEMPLATES["hermes"]},
}


def test_responses_follow_formats(api: openai.OpenAI) -> None:
    parsed = api.responses.parse(input="Who are you?", text_format=Person, **RESPONSES)
    assert isinstance(parsed.output_parsed, Person)
    assert parsed.text is not None
    assert parsed.text.format is not None
    assert parsed.text.format.type == "json_schema"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_responses_call_what_is_demanded(api: openai.OpenAI, choice: Any) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}]
    [call] = api.responses.create(
        input="Weather?", tools=tools, tool_choice=choice, parallel_tool_calls=False, **RESPONSES
    ).output
    assert call.type == "function_call"
    assert follows(json.loads(call.arguments), CITY)


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param({"type": "any"}, marks=MANY),
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "weather"},
    ],
)
def test_messages_call_what_is_demanded(anthropic: ModuleType, url: str, choice: Any) -> None:
    tools: Any = [{"name": "weather", "input_schema": CITY}]
    with anthropic.Anthropic(
        base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        options: Any = {
            "model": "demo",
            "max_tokens": 100,
            "messages": MESSAGES,
            "extra_body": {"chat_template": TEMPLATES["hermes"]},
        }
        told = client.messages.create(**options, tools=tools, tool_choice=choice)
    assert told.stop_reason in ("tool_use", "max_tokens")
    assert told.content[0].type == "tool_use"
    assert follows(told.content[0].input, CITY)


def test_messages_follow_formats(anthropic: ModuleType, url: str) -> None:
    with anthropic.Anthropic(
        base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        options: Any = {
            "model": "demo",
            "max_tokens": 100,
            "messages": MESSAGES,
            "extra_body": {"chat_template": TEMPLATES["hermes"]},
        }
        form = {"format": {"type": "json_schema", "schema": Person.model_json_schema()}}
        options["extra_body"] = {**options["extra_body"], "output_config": form}
        [text] = client.messages.create(**options).content
        assert text.type == "text"
        assert Person.model_validate_json(text.text)


# ---- thoughts

THINKS = (
    HEAD + "assistant:{% if enable_thinking is defined and not enable_thinking %}<think></think>{% "
    "endif %}"
)
ALWAYS = HEAD + "assistant:<think>\n{# </think> #}"


@pytest.mark.parametrize("template", [THINKS, ALWAYS])
def test_thoughts_come_first_and_are_free(api: openai.OpenAI, template: str) -> None:
    answer = ask(
        api,
        template,
        response_format={"type": "json_object"},
        max_completion_tokens=20,
        temperature=0,
    )
    assert answer.choices[0].message.content == ""
    assert answer.choices[0].message.reasoning.strip()
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("template", "further", "thinks"),
    [
        (ALWAYS, {}, True),
        (THINKS, {}, True),
        (THINKS, {"chat_template_kwargs": {"enable_thinking": False}}, False),
        (
            HEAD + "assistant:{# <think> #}",
            {},
            False,
        ),  # thoughts of earlier answers are all that it knows
        (PLAIN, {}, False),
    ],
)
async def test_the_rule_begins_behind_thoughts_where_the_model_has_some(
    fake: Callable[..., FakeEngine], template: str, further: dict[str, Any], thinks: bool
) -> None:
    engine = fake("<think>", "Hm.", "</think>", "yes")
    async with (
        serving(engine) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client,
    ):
        body = {"chat_template": template, "guided_choice": ["yes"], **further}
        await client.chat.completions.create(model="fake", messages=MESSAGES, extra_body=body)
    [request] = engine.submitted
    assert request.params.structured == Structured(
        choice=["yes"], after="</think>" if thinks else None
    )
    assert (request.prompt or "").endswith("<think>\n") == thinks, "so that it surely thinks"
    assert engine.tokenizer.decode(request.prompt_token_ids) == request.prompt


def test_thoughts_that_are_turned_off_leave_the_rule_alone(api: openai.OpenAI) -> None:
    further = {"chat_template_kwargs": {"enable_thinking": False}, "guided_choice": ["yes", "no"]}
    assert ask(api, THINKS, further).choices[0].message.content in ("yes", "no")


@pytest.mark.anyio
async def test_a_rule_may_be_given_twice_in_the_same_words(fake: Callable[..., FakeEngine]) -> None:
    engine = fake("yes")
    async with (
        serving(engine) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client,
    ):
        body = {
            "guided_choice": ["yes"],
            "structured_outputs": {"choice": ["yes"]},
            "guided_decoding_backend": "guidance",
        }  # as guidance sends
        await client.chat.completions.create(
            model="fake", messages=MESSAGES, extra_body={"chat_template": PLAIN, **body}
        )
    assert engine.submitted[0].params.structured == Structured(choice=["yes"])


# ---- refusals


def schema_of(schema: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    }


# what is asked, the parameter that the answer names, what it says
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a format that isn't there": (
        {"response_format": {"type": "xml"}},
        "response_format.type",
        "xml",
    ),
    "a feature of a schema": (
        schema_of({"type": "object", "if": {"required": ["a"]}}),
        "response_format",
        "if",
    ),
    "an integer beyond what is kept": (
        schema_of({"properties": {"id": {"const": 2**70}}}),
        "response_format",
        f"#/properties/id: const = {2**70}: ",
    ),
    "a set": (
        schema_of({"properties": {"tags": {"type": "array", "uniqueItems": True}}}),
        "response_format",
        "#/properties/tags: uniqueItems = true: ",
    ),
    "an integer of a tool": (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "weather",
                        "parameters": {"properties": {"id": {"const": 2**70}}},
                    },
                }
            ],
            "tool_choice": "required",
        },
        "tool_choice",
        f"#/properties/id: const = {2**70}: ",
    ),
    "a lookaround": ({"guided_regex": "(?=a)b"}, "guided_regex", "lookarounds"),
    "a grammar that is none": ({"guided_grammar": "start: ("}, "guided_grammar", ""),
    "a long schema": (
        schema_of({"enum": ["x" * 30_000]}),
        "response_format",
        "limits.max_grammar_chars",
    ),
    "a deep schema": (
        schema_of(json.loads('{"not":' * 110 + "{}" + "}" * 110)),
        "response_format",
        "limits.max_grammar_depth",
    ),
    "a grammar of too many alternatives": (
        {"guided_grammar": AMBIGUOUS},
        "guided_grammar",
        "more alternatives at one place",
    ),
    "no choice": ({"guided_choice": []}, "guided_choice", "one string or more"),
    "two rules": ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "guided_choice"),
    "two of SGLang's": (
        {"ebnf": 'root ::= "a"', "json_schema": "{}"},
        "ebnf",
        "json_schema contradict each other",
    ),
    "vLLM's and SGLang's": (
        {"guided_json": {}, "json_schema": {"type": "null"}},
        "guided_json",
        "json_schema contradict each other",
    ),
    "a format and SGLang's": (
        {"response_format": {"type": "json_object"}, "regex": "a"},
        "response_format",
        "regex contradict each other",
    ),
    "SGLang's beside tools": ({"regex": "a", "tools": TOOLS}, "regex", "can't call a tool"),
    "a schema that is no JSON": ({"json_schema": "{"}, "json_schema", ""),
    "a schema that is no object": (
        {"json_schema": "[1]"},
        "json_schema",
        "it must be a JSON object",
    ),
    "SGLang's regex with a lookaround": ({"regex": "(?=a)b"}, "regex", "lookarounds"),
    "an EBNF that is none": ({"ebnf": "root ::= ("}, "ebnf", ""),
    "a rule of another type": ({"regex": 5}, "regex", "expected `str | null`"),
    "what contradicts SGLang's": ({"regex": "a", "min_tokens": 2}, "min_tokens", "contradict"),
    "an unknown field": (
        {"structured_outputs": {"jsn": {}}},
        "structured_outputs.jsn",
        "there is no such field",
    ),
    "what contradicts it": ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "contradict"),
    "tools beside a format": (
        {"response_format": {"type": "json_object"}, "tools": TOOLS},
        "response_format",
        "tools",
    ),
    "a tool that isn't there": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
        "weather",
    ),
    "a demand without tools": ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    "another demand": (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}},
        "tool_choice",
        "are supported",
    ),
    "calls in no known format": (
        {"tools": TOOLS, "tool_choice": "required", "chat_template": PLAIN},
        "tool_choice",
        "no tool parser",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_a_400_by_name_before_anything_is_sent(
    url: str, name: str, stream: Literal[True, False]
) -> None:
    options, param, said = REFUSED[name]
    body = {
        "messages": MESSAGES,
        "chat_template": TEMPLATES["hermes"],
        "max_completion_tokens": 5,
        "stream": stream,
        **options,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert said in error["message"]
    assert not error["message"].startswith("structured.")


@pytest.mark.parametrize("number", ["1e400", "1e-400", "0.12345678901234567890123"])
def test_a_decimal_that_no_double_holds_is_refused_however_it_comes(url: str, number: str) -> None:
    schema = f'{{"const": {number}}}'
    rules = [
        f'"guided_json": {schema}',
        f'"guided_json": {json.dumps(schema)}',
        f'"structured_outputs": {{"json": {schema}}}',
    ]
    rules += [
        f'"response_format": {{"type": "json_schema", "json_schema": {{"name": "x", "schema": '
        f"{schema}}}}}"
    ]
    for rule in rules:
        body = f'{{"prompt": "x", {rule}}}'
        answer = httpx.post(
            f"{url}/v1/completions",
            content=body,
            headers={"content-type": "application/json"},
            timeout=PATIENCE_S,
        )
        assert answer.status_code == 400, rule
        assert f"{number} can't be kept exactly" in answer.json()["error"]["message"]


def test_integers_of_any_size_pass_where_no_rule_asks_for_them(url: str) -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"id": {"const": 2**70}}}},
    }
    body = {
        "messages": MESSAGES,
        "chat_template": TEMPLATES["hermes"],
        "max_tokens": 2,
        "tools": [tool],
    }
    assert (
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S).status_code == 200
    )
    flat = {
        "input": "x",
        "chat_template": TEMPLATES["hermes"],
        "max_output_tokens": 2,
        "tools": [{"type": "function", **tool["function"]}],
    }
    answer = httpx.post(f"{url}/v1/responses", json=flat, timeout=PATIENCE_S)
    assert answer.json()["tools"][0]["parameters"]["properties"]["id"]["const"] == 2**70


@pytest.mark.slow("answers many requests")
def test_who_is_refused_leaves_nothing_behind(url: str, api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        ask(api, **schema_of({"if": {}}))
    assert httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200
    assert ask(api, further={"guided_choice": ["a"]}).choices[0].message.content == "a"
