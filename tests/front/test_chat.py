"""Conversations become prompts: every form of messages and options, with templates in the styles of
those that models come with."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

import dovetail_models
from dovetail.config.limits import Limits
from dovetail.errors import RequestError
from dovetail.front.chat import CHECKED_NAMES, ChatFrontEnd, ChatOptions
from dovetail.front.tokenizer import Tokenizer, TransformersTokenizer
from tests.support import examples

DEMO = Path(dovetail_models.__file__).parent / "demo"

PLAIN = """{{- bos_token }}
{%- for message in messages %}
    {{- '<' + message['role'] + '>' + message['content'] | trim + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""  # as Llama 3's

PRINTING = PLAIN.replace(
    "message['content'] | trim", "message['content'] | string"
)  # a list comes out as Python prints it

READING_PARTS = """{%- for message in messages %}<{{ message.role }}>
    {%- if message.content is string %}{{ message.content }}
    {%- else %}{% for part in message.content %}{% if part.type == 'text' %}[{{ part.text }}]{% endif %}{% endfor %}
    {%- endif %}{{ '\n' }}
{%- endfor %}"""  # as those of models that see images

ONLY_PARTS = """{%- for message in messages %}<{{ message.role }}>
    {%- for part in message.content if part['type'] == 'text' %}{{ part['text'] }};{% endfor %}{{ '\n' }}
{%- endfor %}"""

TOOLS = """{%- for tool in tools or [] %}{{ tool | tojson + '\n' }}{% endfor %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
    {%- for call in message.tool_calls %}
        {{- '{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}}
    {%- endfor %}{{ '\n' }}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}<no thoughts>{% endif %}"""  # as Qwen's

CALLS_OF_TEXT = """{%- for message in messages %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {%- for call in message['tool_calls'] %}{{ '<call>' + call['function']['name'] + ' ' + call['function']['arguments'] + '\n' }}{% endfor %}
    {%- else %}{{ '<' + message['role'] + '>' + message['content'] + '\n' }}{% endif %}
{%- endfor %}"""  # as DeepSeek V3's

STRICT = """{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must take turns') }}{% endif %}
    {{- '[' + message['role'] + ']' + message['content'] }}
{%- endfor %}"""  # as Mistral's

THOUGHTS = (
    "{% for m in messages %}{% if m.reasoning_content is string %}({{ m.reasoning_content "
    "}}){% endif %}{{ m.content }}{% endfor %}"
)

USER: dict[str, Any] = {"role": "user", "content": "Hello"}
ASSISTANT: dict[str, Any] = {"role": "assistant", "content": "Good "}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "<of a city>", "parameters": {"type": "object"}},
}
CALLING: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
        }
    ],
}
ANSWER = {"role": "tool", "content": "12 °C", "tool_call_id": "call00001"}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def tokenizer(template: str | dict[str, str] | None) -> Tokenizer:
    return TransformersTokenizer(
        transformers.ByT5Tokenizer(bos_token="<s>", chat_template=template)
    )


@pytest.fixture(scope="module")
def fronts() -> Iterator[dict[str, ChatFrontEnd]]:
    """One for each template that was used in this file, so that each process is started once."""
    made: dict[str, ChatFrontEnd] = {}
    yield made
    for front in made.values():
        front.close()


@pytest.fixture
def rendered(fronts: dict[str, ChatFrontEnd]) -> Any:
    def render(template: str, messages: Any, **options: Any) -> str:
        front = fronts.setdefault("any", ChatFrontEnd(tokenizer("{{ messages }}"), Limits()))
        return front.render(messages, ChatOptions(chat_template=template, **options))

    return render


# Equal to transformers


_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_turns = st.lists(st.tuples(_texts, _texts), min_size=1, max_size=3)


@given(
    template=st.sampled_from([PLAIN, TOOLS, STRICT, READING_PARTS, THOUGHTS]),
    turns=_turns,
    begin=st.booleans(),
    data=st.data(),
)
@examples(quick=30, full=500)
def test_a_conversation_becomes_what_transformers_makes_of_it(
    template: str, turns: Any, begin: bool, data: Any, fronts: Any
) -> None:
    ours = tokenizer(template)
    messages = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    if (
        continues := data.draw(st.booleans())
        and messages[-1]["content"].strip() != ""
        and template is not THOUGHTS
    ):
        begin = False
    front = fronts.setdefault(template, ChatFrontEnd(ours, Limits()))
    prompt = front.prompt(
        messages, ChatOptions(add_generation_prompt=begin, continue_final_message=continues)
    )
    how: dict[str, Any] = {"add_generation_prompt": begin, "continue_final_message": continues}
    assert prompt.text == ours.own.apply_chat_template(messages, tokenize=False, **how)
    assert list(prompt.token_ids) == ours.own.apply_chat_template(
        messages, tokenize=True, return_dict=False, **how
    )


def test_what_templates_call_is_there_as_in_transformers(rendered: Any) -> None:
    template = """{%- set ns = namespace(n=0) %}
{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}
{% generation %}{{ messages | length }}{% endgeneration %} {{ strftime_now('%Y') | length }} {{ {'a': '<é>'} | tojson(indent=1) }} {{ dict(a=1) }}"""
    theirs = tokenizer(template).own.apply_chat_template([USER], tokenize=False)
    assert rendered(template, [USER]) == theirs
    assert '"<é>"' in theirs


# Contents


@pytest.mark.parametrize("template", [PLAIN, PRINTING, STRICT, TOOLS])
def test_text_parts_are_their_text_where_a_template_knows_no_parts(
    rendered: Any, template: str
) -> None:
    assert rendered(template, [{"role": "user", "content": parts("one", "two")}]) == rendered(
        template, [{"role": "user", "content": "one\ntwo"}]
    )


def test_a_template_that_reads_parts_joins_them_itself(rendered: Any) -> None:
    assert (
        rendered(READING_PARTS, [{"role": "user", "content": parts("one", "two")}])
        == "<user>[one][two]\n"
    )
    assert rendered(READING_PARTS, [USER]) == "<user>Hello\n"


def test_a_template_that_reads_parts_alone_is_given_parts(rendered: Any) -> None:
    assert (
        rendered(ONLY_PARTS, [USER, {"role": "assistant", "content": parts("one", "two")}])
        == "<user>Hello;\n<assistant>one;two;\n"
    )


def test_a_template_that_reads_parts_of_one_role_gets_the_text_of_others(rendered: Any) -> None:
    template = (
        "{{ messages[0].content }}{% for part in messages[1].content %}({{ part.text }}){% "
        "endfor %}"
    )
    conversation = [
        {"role": "system", "content": parts("one", "two")},
        {"role": "user", "content": parts("three", "four")},
    ]
    assert (
        rendered(
            "{% if messages | length == 1 %}{% set messages = ['', messages[0]] %}{% endif %}"
            + template,
            conversation,
        )
        == "one\ntwo(three)(four)"
    )


@pytest.mark.parametrize("kind", ["file", None, 5])
def test_parts_of_another_type_are_refused_by_name(rendered: Any, kind: Any) -> None:
    with pytest.raises(
        RequestError,
        match=rf"messages\[1\].content\[1\] is of type '?{kind}'?; only parts of type 'text'",
    ):
        rendered(PLAIN, [USER, {"role": "user", "content": [*parts("see"), {"type": kind}]}])


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("image_url", "this engine takes no images"),
        ("input_audio", 'input_audio: audio: Dovetail can\'t do that yet: see "Audio and video"'),
        ("video", 'video: Dovetail can\'t do that yet: see "Audio and video"'),
    ],
)
def test_parts_of_other_media_are_refused_with_where_they_stand(
    rendered: Any, kind: str, why: str
) -> None:
    with pytest.raises(RequestError, match=rf"messages\[0\].content\[1\]: {why}"):
        rendered(PLAIN, [{"role": "user", "content": [*parts("see"), {"type": kind}]}])


def test_thoughts_are_read_under_any_of_their_names(rendered: Any) -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert rendered(THOUGHTS, [USER, {**ASSISTANT, name: "hm"}]) == "Hello(hm)Good "


# Tools


def test_tools_and_calls_are_rendered(rendered: Any) -> None:
    for arguments in ('{"city": "Paris"}', {"city": "Paris"}):
        call = {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}],
        }
        first, *others = rendered(TOOLS, [USER, call, ANSWER], tools=[WEATHER]).splitlines()
        assert json.loads(first) == WEATHER
        assert others == [
            "<user>Hello",
            '<assistant>{"name": "weather", "arguments": {"city": "Paris"}}',
            "<tool>12 °C",
        ]


def test_a_template_that_wants_arguments_as_text_gets_them(rendered: Any) -> None:
    for arguments in ('{"city": "Paris"}', {"city": "Paris"}):
        call = {
            **CALLING,
            "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}],
        }
        assert (
            rendered(CALLS_OF_TEXT, [USER, call])
            == '<user>Hello\n<call>weather {"city": "Paris"}\n'
        )


@pytest.mark.parametrize("arguments", ['{"city": "Par', "[1]", "5", "no JSON", "[" * 9999])
def test_arguments_that_are_no_json_object_are_replayed(rendered: Any, arguments: str) -> None:
    call = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}],
    }
    shown = json.dumps({"INVALID_JSON": arguments})
    assert f'"arguments": {shown}}}' in rendered(TOOLS, [USER, call, ANSWER])
    assert f"<call>weather {shown}\n" in rendered(CALLS_OF_TEXT, [USER, call])


def test_an_empty_list_of_calls_is_none(rendered: Any) -> None:
    for content in ({"content": None}, {}, {"content": ""}):
        assert rendered(
            TOOLS, [USER, {"role": "assistant", **content, "tool_calls": []}]
        ) == rendered(TOOLS, [USER, {**ASSISTANT, "content": ""}])
    seen = (
        "{% for message in messages %}{{ message.content }}{{ message.tool_calls is defined "
        "}}{% endfor %}"
    )
    assert rendered(seen, [USER, {**ASSISTANT, "tool_calls": []}]).count("True") == 0


def test_a_call_without_arguments_has_an_empty_mapping(rendered: Any) -> None:
    for function in (
        {"name": "now"},
        {"name": "now", "arguments": ""},
        {"name": "now", "arguments": None},
    ):
        assert '"arguments": {}}' in rendered(
            TOOLS, [USER, {"role": "assistant", "tool_calls": [{"function": function}]}]
        )


def test_what_a_template_would_ignore_is_refused(rendered: Any) -> None:
    with pytest.raises(RequestError, match="doesn't look at 'tools': it would be ignored"):
        rendered(PLAIN, [USER], tools=[WEATHER])
    with pytest.raises(RequestError, match="doesn't look at 'enable_thinking' and 'x'"):
        rendered(PLAIN, [USER], chat_template_kwargs={"enable_thinking": False, "x": 1})
    with pytest.raises(
        RequestError,
        match=r"messages\[1\].tool_calls: the chat template leaves out the call of 'weather'",
    ):
        rendered("{% for m in messages %}{{ m.content }}{% endfor %}", [USER, CALLING])


def test_a_few_names_of_calls_are_looked_for_in_the_text(rendered: Any) -> None:
    """Each search may read all of it, and a conversation may have thousands of calls."""
    template = "{% for call in messages[1].tool_calls %}{{ call.function.name }}{% endfor %}"
    names = [f"f{number:02}" for number in range(CHECKED_NAMES)]

    def calling(*names: str) -> list[dict[str, Any]]:
        calls = [{"function": {"name": name}} for name in names]
        return [USER, {"role": "assistant", "tool_calls": calls}]

    assert rendered(template, calling(*names, *names, "another"))
    first = f"{{{{ messages[1].tool_calls[:{CHECKED_NAMES}] }}}}"
    assert rendered(first, calling(*names, *names, "another"))
    with pytest.raises(RequestError, match="leaves out the call of 'another'"):
        rendered(first, calling(*[names[0]] * CHECKED_NAMES, "another"))


def test_variables_reach_the_template(rendered: Any) -> None:
    assert (
        rendered(TOOLS, [USER], chat_template_kwargs={"enable_thinking": False})
        == "<user>Hello\n<no thoughts>"
    )
    assert rendered("{{ context }}", [USER], chat_template_kwargs={"context": 1}) == "1"
    assert rendered(TOOLS, [USER], chat_template_kwargs={"enable_thinking": True}) == rendered(
        TOOLS, [USER]
    )


# The end of a prompt


def test_the_prompt_ends_as_asked(rendered: Any) -> None:
    assert rendered(PLAIN, [USER]) == "<s><user>Hello\n<assistant>"
    assert rendered(PLAIN, [USER], add_generation_prompt=False) == "<s><user>Hello\n"
    assert (
        rendered(PLAIN, [USER, ASSISTANT], continue_final_message=True)
        == "<s><user>Hello\n<assistant>Good"
    )  # this template strips
    assert (
        rendered(STRICT, [USER, ASSISTANT], continue_final_message=True)
        == "[user]Hello[assistant]Good "
    )
    assert rendered(
        PRINTING,
        [USER, {"role": "assistant", "content": parts("a", "b")}],
        continue_final_message=True,
    ).endswith("<assistant>a\nb")


@pytest.mark.parametrize(
    ("template", "last", "said"),
    [
        (TOOLS, CALLING, "no content to go on with"),
        ("{{ messages[0].content }}", ASSISTANT, "leaves out the last message"),
    ],
)
def test_a_last_message_that_cannot_be_continued_is_refused(
    rendered: Any, template: str, last: Any, said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        rendered(template, [USER, last], continue_final_message=True)


# Which template


def test_a_given_template_goes_before_the_models_own() -> None:
    front = ChatFrontEnd(tokenizer(PLAIN), Limits())
    assert front.render([USER]).startswith("<s>")
    assert front.render([USER], ChatOptions(chat_template="{{ messages[0].content }}!")) == "Hello!"
    front.close()


def test_of_several_templates_one_is_chosen_by_name_or_for_tools() -> None:
    front = ChatFrontEnd(
        tokenizer({"default": PLAIN, "tool_use": TOOLS, "short": "{{ messages[0].content }}"}),
        Limits(),
    )
    assert front.render([USER]) == "<s><user>Hello\n<assistant>"
    assert front.render([USER], ChatOptions(tools=[WEATHER])).startswith('{"type"')
    assert front.render([USER], ChatOptions(chat_template="short")) == "Hello"
    front.close()


@pytest.mark.parametrize(
    ("own", "given", "said"),
    [
        (PLAIN, "{{ '\ud800' }}", "the chat_template fails|half a surrogate pair"),
        pytest.param(
            *(
                PLAIN,
                "{{ raise_exception('no' * 10**7) }}",
                "refuses this conversation: (no){150}$",
            ),
            marks=pytest.mark.slow("sends a large text"),
        ),
        (PLAIN, "{{ " + "x" * 9000 + "() }}", "^.{,600}$"),
        (PLAIN, "{% " + "x" * 9000 + " %}", "^.{,600}$"),
        (
            None,
            None,
            r"no chat template: it completes text; use generate\(\), or give a chat_template",
        ),
        (
            {"a": PLAIN, "b": PLAIN},
            None,
            "several chat templates and none is the default: give chat_template one of a, b",
        ),
        ({"a": PLAIN, "b": PLAIN}, "c", "or one of a, b, got 'c'"),
        (PLAIN, "templates/mine.jinja", "got 'templates/mine.jinja', which reads no message"),
        (PLAIN, "", "which reads no message"),
        (PLAIN, "{% if %}", "the chat_template is no valid Jinja: line 1: Expected an expression"),
        (
            PLAIN,
            "\n{{ messages[0].x.y }}",
            r"the chat_template fails on this conversation at its line 2, '{{ messages\[0\].x.y "
            r"}}': 'dict object' has no",
        ),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(own: Any, given: Any, said: str) -> None:
    front = ChatFrontEnd(tokenizer(own), Limits())
    with pytest.raises(RequestError, match=said):
        front.prompt([USER], ChatOptions(chat_template=given))
    front.close()


# Everything that can be wrong


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "a conversation must be a list of messages, one or more, got []"),
        ("hello", "a conversation must be a list of messages"),
        ([USER, "hello"], "messages[1]: a message must be a mapping"),
        (
            [{"content": "x"}],
            "messages[0].role must be one of system, developer, user, assistant, tool, function, "
            "got None",
        ),
        ([{**USER, "role": 5}], "messages[0].role must be one of"),
        ([{**USER, "role": ""}], "messages[0].role must be one of"),
        (
            [{**USER, "role": "usr"}],
            "messages[0].role must be one of system, developer, user, assistant, tool, function, "
            "or one that the chat template names",
        ),
        ([{"role": "user"}], "messages[0]: it needs a content"),
        ([{**USER, "content": None}], "messages[0]: it needs a content"),
        ([{"role": "assistant", "content": None}], "messages[0]: it needs a content"),
        ([{**USER, "content": None, "tool_calls": []}], "messages[0]: it needs a content"),
        ([{**USER, "content": 5}], "messages[0].content must be text, or a list of parts, got 5"),
        (
            [{**USER, "content": {"text": "x"}}],
            "messages[0].content must be text, or a list of parts",
        ),
        ([{**USER, "content": b"x"}], "messages[0].content must be text, or a list of parts"),
        ([{**USER, "content": []}], "messages[0].content must be text, or a list of parts, got []"),
        ([{**USER, "content": ["x"]}], "messages[0].content[0] must be a mapping like"),
        (
            [{**USER, "content": [{"type": "text", "text": 5}]}],
            "messages[0].content[0].text must be a string, got 5",
        ),
        ([{**CALLING, "tool_calls": "x"}], "messages[0].tool_calls must be a list"),
        ([{**CALLING, "tool_calls": [5]}], "messages[0].tool_calls[0] must be like"),
        (
            [{**CALLING, "tool_calls": [{"function": {"arguments": {}}}]}],
            "messages[0].tool_calls[0] must be like",
        ),
        (
            [{**CALLING, "tool_calls": [{"function": {"name": "x", "arguments": []}}]}],
            "must be a mapping, or the JSON text of one, got []",
        ),
        ([{**USER, "name": {1, 2}}], "must be plain JSON values"),
        ([USER, {**USER, "content": "x"}], "refuses this conversation: Roles must take turns"),
        ([{**USER, "content": "\ud800"}], "half a surrogate pair"),
    ],
)
def test_a_wrong_message_is_refused_by_its_place(
    fronts: dict[str, ChatFrontEnd], messages: Any, said: str
) -> None:
    front = fronts.setdefault(STRICT, ChatFrontEnd(tokenizer(STRICT), Limits()))
    with pytest.raises(RequestError) as caught:
        front.prompt(messages)
    assert said in str(caught.value)
    assert "jinja" not in str(caught.value).lower()


def test_a_models_template_that_fails_says_where_without_jinjas_words() -> None:
    front = ChatFrontEnd(tokenizer("{{ messages[0].content.nothing.more }}"), Limits())
    with pytest.raises(
        RequestError,
        match=r"at its line 1, .*; something there is missing, or of another type than it expects$",
    ):
        front.render([USER])
    front.close()


_keys = st.sampled_from(
    [
        "role",
        "content",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "type",
        "text",
        "reasoning",
        "x",
    ]
)
_leaves = st.sampled_from(
    [
        None,
        True,
        5,
        0.5,
        "",
        "user",
        "assistant",
        "system",
        "tool",
        "text",
        "{}",
        '{"a": 1}',
        "\ud800",
        b"x",
        object(),
        {1},
    ]
)
_anything = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=5),
    max_leaves=20,
)
_nearly_messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"])},
        optional={"content": _anything, "tool_calls": _anything},
    ),
    max_size=3,
)


@given(
    messages=_anything | _nearly_messages,
    template=st.sampled_from([STRICT, TOOLS, READING_PARTS, CALLS_OF_TEXT]),
    kwargs=st.none() | _anything,
)
@examples(quick=60, full=2000)
def test_whatever_is_given_is_a_prompt_or_a_request_error(
    fronts: dict[str, ChatFrontEnd], messages: Any, template: str, kwargs: Any
) -> None:
    front = fronts.setdefault(template, ChatFrontEnd(tokenizer(template), Limits()))
    with contextlib.suppress(RequestError):
        assert front.prompt(messages, ChatOptions(chat_template_kwargs=kwargs)).text is not None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "contradict each other"),
        (
            {"continue_final_message": "content"},
            "continue_final_message must be True or False, got 'content'",
        ),
        ({"add_generation_prompt": 1}, "add_generation_prompt must be True or False, got 1"),
        ({"chat_template": 5}, "chat_template must be the text of a Jinja template, got 5"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be a mapping"),
        ({"chat_template_kwargs": {1: 2}}, "chat_template_kwargs must be a mapping"),
        (
            {"chat_template_kwargs": {"tools": []}},
            "chat_template_kwargs: tools is an argument of its own",
        ),
        ({"tools": {"name": "x"}}, "tools must be a list"),
        ({"tools": [5]}, r"tools\[0\] must be like"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\] must be like"),
        ({"tools": [WEATHER, len]}, r"tools\[1\] is a Python function: .*get_json_schema"),
    ],
)
def test_a_wrong_option_is_refused(rendered: Any, options: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        rendered(options.pop("chat_template", TOOLS), [USER], **options)


def test_the_wrong_one_of_several_conversations_is_named(fronts: dict[str, ChatFrontEnd]) -> None:
    front = fronts.setdefault(PLAIN, ChatFrontEnd(tokenizer(PLAIN), Limits()))
    with pytest.raises(RequestError, match=r"^conversation 1: messages\[0\]"):
        front.prompts([[USER], [{"role": "user"}]])


def test_a_conversation_that_is_too_long_is_refused_before_it_is_rendered() -> None:
    length = 100
    ours = tokenizer("{{ raise_exception('it was rendered') }}")
    front = ChatFrontEnd(ours, Limits(), length)
    text = "a" * (2 * length * ours.longest_token)
    with pytest.raises(RequestError, match="it was rendered"):
        front.render([{"role": "user", "content": text[:-100]}])
    for message in (
        {"content": text},
        {"content": [{"type": "text", "text": text[:700]}] * 4},
        {"content": "a", "reasoning": text},
    ):
        with pytest.raises(RequestError, match=r"limits.max_prompt_chars"):
            front.render([{"role": "user", **message}])
    front.close()


def test_a_template_that_makes_too_long_a_text_is_refused() -> None:
    front = ChatFrontEnd(tokenizer(PLAIN), Limits(max_prompt_chars=1000), 10_000)
    assert len(front.render([{"role": "user", "content": "a" * 900}])) > 900
    with pytest.raises(
        RequestError,
        match=r"^the prompt has 3000 characters: at most 1000 are tokenized "
        r"\(limits.max_prompt_chars\)$",
    ):
        front.render(
            [{"role": "user", "content": "a"}],
            ChatOptions(chat_template="{{ messages[0].content * 3000 }}"),
        )
    front.close()


@pytest.mark.parametrize("content", [" CORIOLANUS", "a", [{"type": "text", "text": "a"}]])
def test_a_conversation_that_fits_the_model_is_never_too_long(content: Any) -> None:
    length = 100
    front = ChatFrontEnd(Tokenizer.load(DEMO), Limits(), length)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    messages = [{"role": "assistant", "content": content}] * (length - 1)
    assert front.prompt(messages, ChatOptions(chat_template=template)).token_ids
    front.close()


@pytest.mark.slow("renders in many threads")
def test_several_threads_make_the_prompts_that_one_makes() -> None:
    front = ChatFrontEnd(Tokenizer.load(DEMO), Limits())
    conversations = [[{"role": "user", "content": f"{i}" * (i + 1)}] for i in range(40)]
    alone = [front.prompt(conversation) for conversation in conversations]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(front.prompt, conversations)) == alone
    front.close()


def test_a_conversation_that_is_truncated_may_be_longer_than_what_fits() -> None:
    front = ChatFrontEnd(tokenizer(PLAIN), Limits(), 64)
    long = [{"role": "user", "content": "To be or not. " * 500}]
    with pytest.raises(RequestError, match=r"limits.max_prompt_chars"):
        front.prompt(long)
    assert len(front.prompt(long, cut=True).token_ids) > 64
    with pytest.raises(RequestError, match=r"limits.max_prompt_chars"):
        front.prompt([{"role": "user", "content": "a" * 2_000_001}], cut=True)
