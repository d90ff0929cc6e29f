"""Conversations made into prompts: `ChatFrontEnd` takes messages and `ChatOptions`, and gives what
the model reads.

For `LLM.chat`, the command line and servers. It knows a tokenizer and limits, and no engine.
Templates are rendered by `chat_rendering`; a tokenizer of a plugin may encode conversations
itself.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from dovetail.api.tokenizer import Chat
from dovetail.base.checks import unicode_error
from dovetail.config.limits import Limits
from dovetail.errors import RequestError, shown
from dovetail.front import request_checks
from dovetail.front.chat_messages import (
    IMAGE,
    ImageParts,
    Message,
    read_conversation,
    read_tools,
    without_images,
    without_other_names,
)
from dovetail.front.chat_rendering import ChatTemplate, TemplateRenderer
from dovetail.front.media.prompts import ImagePrompt, ImagePrompts
from dovetail.front.media.sources import ImageSource, check_count
from dovetail.front.media.typed import Typed
from dovetail.front.tokenizer import TokenizedText, Tokenizer

CHECKED_NAMES = 50  # of called functions, which a rendered conversation must have
_OWN_ARGUMENTS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options that say how a conversation becomes a prompt. Raises `RequestError` for options that
    contradict each other."""

    tools: Sequence[Mapping[str, Any]] | None = None
    """Functions that the model may call: `{"type": "function", "function": {"name": …,
    "description": …, "parameters": JSON schema}}`. The template has to look at them."""

    chat_template: str | None = None
    """A Jinja template instead of the model's own; or the name of one of the model's, if it has
    several."""

    chat_template_kwargs: Mapping[str, Any] | None = None
    """Variables of the template, such as `enable_thinking`. The template has to look at each."""

    add_generation_prompt: bool | None = None
    """End with the head of an assistant's message, so that the model answers. None: unless
    `continue_final_message`."""

    continue_final_message: bool = False
    """End amidst the last message, so that the model goes on with it."""

    def __post_init__(self) -> None:
        for name in ("add_generation_prompt", "continue_final_message"):
            if not isinstance(value := getattr(self, name), bool | None):
                raise RequestError(f"{name} must be True or False, got {shown(value)}")
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt contradict each other: the first "
                "goes on with the last message, "
                "the second begins another"
            )
        if not isinstance(self.chat_template, str | None):
            raise RequestError(
                f"chat_template must be the text of a Jinja template, got "
                f"{shown(self.chat_template)}"
            )
        variables = {} if self.chat_template_kwargs is None else self.chat_template_kwargs
        if not isinstance(variables, Mapping) or not all(
            isinstance(name, str) for name in variables
        ):
            raise RequestError(
                f'chat_template_kwargs must be a mapping like {{"enable_thinking": False}}, got '
                f"{shown(variables)}"
            )
        if wrong := [name for name in variables if name in _OWN_ARGUMENTS]:
            raise RequestError(f"chat_template_kwargs: {wrong[0]} is an argument of its own")

    @property
    def begins_answer(self) -> bool:
        """`add_generation_prompt`, resolved."""
        return (
            not self.continue_final_message
            if self.add_generation_prompt is None
            else self.add_generation_prompt
        )


class _Reads(NamedTuple):
    """The way in which a template reads the contents of one role's messages."""

    text: bool
    parts: bool  # a list of text parts, each rendered as its text
    images: bool  # among those parts, each rendered as the placeholder of an image


class _Rendered(NamedTuple):
    """The text of a prompt with its images."""

    text: str
    images: tuple[ImageSource, ...] = ()
    # of each image, which placeholder of the text it is; the others are text
    occurrences: tuple[int, ...] = ()
    placeholders: int = 0  # in the text


class _CallForm(NamedTuple):
    """The form in which a template wants an assistant's message with tool calls."""

    content: str | None  # if there is none
    arguments_as_text: bool  # as JSON; else as a mapping

    def applied(self, message: dict[str, Any]) -> dict[str, Any]:
        calls = (
            [_with_arguments_as_text(call) for call in message["tool_calls"]]
            if self.arguments_as_text
            else message["tool_calls"]
        )
        return {"content": self.content, **message, "tool_calls": calls}


_CALL_FORMS = tuple(
    _CallForm(content, as_text) for as_text in (False, True) for content in ("", None)
)


class ChatFrontEnd:
    """Makes prompts of conversations, for one model. Several threads may call it.

    Messages are those of OpenAI's API: a role, and a content that is text or a list of parts of
    text. Where a template knows no parts, their texts are joined by a newline. An assistant's
    `tool_calls` may have their arguments as JSON or as mappings: the template gets what it
    wants. With `images`, parts may be images, which a template writes as a placeholder, or else the
    placeholder is a part of text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: Limits,
        max_model_len: int | None = None,
        *,
        images: ImagePrompts | None = None,
        local: bool = False,
    ) -> None:
        """`max_model_len`: of the model, in tokens; None if there is no model, and prompts may be
        of any length. `images`: `Intake.images`; None if the model reads none. `local`: messages
        are a program's, which may name local files and hold images of Pillow."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._max_model_len = max_model_len
        self._images = images
        self._local = local
        self._renderer = TemplateRenderer(limits)
        self._reads = lru_cache(maxsize=64)(self._find_reads)
        self._call_form = lru_cache(maxsize=16)(self._find_call_form)

    def render(
        self, messages: Sequence[Message], options: ChatOptions | None = None, *, cut: bool = False
    ) -> str:
        """The text of a prompt, in which each image is a placeholder. `cut`: the request's
        parameters truncate it, so it may be longer.

        Raises `RequestError` if the model has no chat template, something is wrong with the
        messages or the options, the template refuses them, or a limit is passed."""
        options = options or ChatOptions()
        if self._tokenizer.encodes_chats:
            return self._encoded(messages, options, cut=cut).text
        return self._rendered(messages, options, cut=cut).text

    def _rendered(
        self, messages: Sequence[Message], options: ChatOptions, *, cut: bool
    ) -> _Rendered:
        self._check_chars(messages, options, cut=cut)
        length = self._max_model_len
        template = self._template(options)
        parts = None if self._images is None else ImageParts(self._local)
        conversation = read_conversation(messages, template.text, parts)
        given = options.chat_template_kwargs or {}
        must_read = [*given, *(["tools"] if options.tools else [])]
        mark = secrets.token_hex(16)
        if options.continue_final_message:
            _append_to_last(conversation, f"{mark} ")
        written: dict[str, Any] = {
            **given,
            "messages": conversation,
            "tools": read_tools(options.tools) if options.tools else None,
        }
        typed = None
        if self._images is not None and parts is not None and parts.images:
            check_count(parts.images, self._limits)
            typed = Typed(self._images.text, self._images.written)
            written = typed.hidden(written)
        conversation = written["messages"]
        variables = {
            **self._tokenizer.special_tokens,
            **written,
            "messages": self._as_read(template, conversation),
            "add_generation_prompt": options.begins_answer,
        }
        text = self._renderer.render(template, variables, must_read)
        if length is not None:
            request_checks.check_prompt_chars(
                len(text), self._limits, length, self._tokenizer, cut=cut
            )
        _check_calls(conversation, text)
        if options.continue_final_message:
            text = _until(text, mark)
        if typed is None or parts is None:
            return _Rendered(text)
        shown_again, occurrences, placeholders = typed.shown_again(text, len(parts.images))
        return _Rendered(shown_again, tuple(parts.images), occurrences, placeholders)

    def prompt(
        self, messages: Sequence[Message], options: ChatOptions | None = None, *, cut: bool = False
    ) -> TokenizedText | ImagePrompt:
        """Render one conversation as `render` does, and return its text with the token ids; if it
        has images, with these, which `ImagePrompts.prepared` prepares."""
        return self.prompts([messages], options, cut=cut)[0]

    def prompts(
        self,
        conversations: Sequence[Sequence[Message]],
        options: ChatOptions | None = None,
        *,
        cut: bool = False,
    ) -> list[TokenizedText | ImagePrompt]:
        """Do the same as `prompt` for each conversation. Errors say which of several is wrong."""
        made: list[_Rendered | TokenizedText] = []
        for index, messages in enumerate(conversations):
            try:
                if self._tokenizer.encodes_chats:
                    made.append(self._encoded(messages, options or ChatOptions(), cut=cut))
                else:
                    made.append(self._rendered(messages, options or ChatOptions(), cut=cut))
            except RequestError as error:
                raise RequestError(
                    f"conversation {index}: {error}" if len(conversations) > 1 else str(error)
                ) from None
        # the template writes those
        ids = iter(
            self._tokenizer.encode_all(
                [one.text for one in made if isinstance(one, _Rendered)], special_tokens=False
            )
        )
        return [
            self._tokenized(one, next(ids)) if isinstance(one, _Rendered) else one for one in made
        ]

    def _tokenized(self, one: _Rendered, ids: list[int]) -> TokenizedText | ImagePrompt:
        if self._images is None or not one.images:
            return TokenizedText(one.text, ids)
        if ids.count(self._images.token_id) != one.placeholders:
            raise RequestError(
                f"the tokenizer reads {self._images.text!r} in the conversation otherwise than as "
                f"its token"
            )
        return ImagePrompt(one.text, ids, one.images, one.occurrences)

    def _encoded(
        self, messages: Sequence[Message], options: ChatOptions, *, cut: bool
    ) -> TokenizedText:
        """Return a prompt that the tokenizer makes, without a template."""
        if options.chat_template is not None:
            raise RequestError(f"chat_template: {self._tokenizer.no_template}")
        self._check_chars(messages, options, cut=cut)
        conversation = [without_other_names(message) for message in read_conversation(messages, "")]
        tools = read_tools(options.tools) if options.tools else []
        variables = options.chat_template_kwargs or {}
        if unicode_error(
            json.dumps([conversation, tools, variables], ensure_ascii=False, default=repr)
        ):
            raise RequestError("the conversation isn't valid Unicode: it has half a surrogate pair")
        chat = Chat(
            conversation, tools, options.begins_answer, options.continue_final_message, variables
        )
        ids = self._tokenizer.encode_chat(chat)
        text = self._tokenizer.decode(ids)
        _check_calls(conversation, text)
        return TokenizedText(text, ids)

    def _check_chars(self, messages: Sequence[Message], options: ChatOptions, *, cut: bool) -> None:
        if self._max_model_len is not None:
            counted = messages if self._images is None else without_images(messages)
            source = [counted, options.tools, options.chat_template_kwargs]
            request_checks.check_conversation_chars(
                source, self._limits, self._max_model_len, self._tokenizer, cut=cut
            )

    def close(self) -> None:
        """End the processes that render; another conversation starts new ones."""
        self._renderer.close()

    def _template(self, options: ChatOptions) -> ChatTemplate:
        """The one that the options say, or the model's own; of several, the one for tools if there
        are some."""
        own = self._tokenizer.chat_templates
        given = options.chat_template
        refused = self._tokenizer.no_template
        if given is not None and refused is not None:
            raise RequestError(f"chat_template: {refused}")
        if given is not None and given not in own:
            if "{{" not in given and "{%" not in given:
                names = f" or one of {', '.join(own)}" if len(own) > 1 else ""
                raise RequestError(
                    f"chat_template must be the text of a Jinja template{names}, got "
                    f"{shown(given)}, which reads no message"
                )
            return ChatTemplate(given, given=True)
        if given is None:
            given = "tool_use" if options.tools and "tool_use" in own else "default"
        if not own:
            raise RequestError(
                "this model has no chat template: it completes text; use generate()"
                + ", or give a chat_template" * (refused is None)
            )
        if given not in own:
            raise RequestError(
                f"this model has several chat templates and none is the default: give "
                f"chat_template one of {', '.join(own)}"
            )
        return ChatTemplate(own[given])

    def _as_read(
        self, template: ChatTemplate, conversation: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """The messages with their contents and tool calls in a form that the template can read."""
        return [
            {
                **(
                    self._call_form(template).applied(message)
                    if message.get("tool_calls")
                    else message
                ),
                **(
                    {"content": self._content_as_read(template, message)}
                    if "content" in message
                    else {}
                ),
            }
            for message in conversation
        ]

    def _content_as_read(
        self, template: ChatTemplate, message: dict[str, Any]
    ) -> str | list[dict[str, Any]]:
        content: str | list[dict[str, Any]] = message["content"]
        reads = self._reads(template, message["role"])
        if isinstance(content, str):
            return content if reads.text or not reads.parts else [{"type": "text", "text": content}]
        if reads.images if IMAGE in content else reads.parts:
            return content
        texts = [self._placeholder if part == IMAGE else part["text"] for part in content]
        joined = "\n".join(texts)
        return joined if reads.text or not reads.parts else [{"type": "text", "text": joined}]

    @property
    def _placeholder(self) -> str:
        return "" if self._images is None else self._images.written

    def _find_reads(self, template: ChatTemplate, role: str) -> _Reads:
        """Found by rendering two words, as a text and as parts: a template that doesn't know parts
        fails, or writes their keys between the words."""
        first = secrets.token_hex(8)
        second = secrets.token_hex(8)
        parts = [{"type": "text", "text": first}, {"type": "text", "text": second}]
        with_image = [parts[0], IMAGE, parts[1]]
        contents = [f"{first} {second}", parts, *([with_image] if self._placeholder else [])]
        variables = [self._probe(_probe_of_content(role, content)) for content in contents]
        of_text, of_parts, *of_image = self._renderer.try_all(template, variables)
        begin = (of_parts or "").rfind(first)
        end = (of_parts or "").rfind(second)
        between = of_parts[begin:end] if of_parts is not None and 0 <= begin < end else None
        return _Reads(
            text=first in (of_text or ""),
            parts=between is not None
            and not any(quote in between for quote in ("'text'", '"text"')),
            images=any(
                text is not None and text.count(self._placeholder) == 1 and second in text
                for text in of_image
            ),
        )

    def _find_call_form(self, template: ChatTemplate) -> _CallForm:
        """Found by rendering a call in each form, the usual ones first: in the right one the
        argument comes out, and not as Python would print it."""
        word = secrets.token_hex(8)
        rendered = self._renderer.try_all(
            template, [self._probe(_probe_of_call({word: word}, form)) for form in _CALL_FORMS]
        )
        for form, text in zip(_CALL_FORMS, rendered, strict=True):
            if text is not None and word in text and f"'{word}'" not in text:
                return form
        return _CALL_FORMS[0]

    def _probe(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Variables that render a conversation."""
        return {
            **self._tokenizer.special_tokens,
            "messages": messages,
            "tools": None,
            "add_generation_prompt": False,
        }


def _probe_of_content(role: str, content: Any) -> list[dict[str, Any]]:
    """A conversation in which a message of this role has this content, and the other roles are as
    templates want them."""
    message = {"role": role, "content": content}
    user = {"role": "user", "content": "x"}
    if role == "user":
        return [message]
    if role in ("system", "developer"):
        return [message, user]
    if role == "assistant":
        return [user, message, user]
    return [
        *_probe_of_call({}, _CALL_FORMS[0])[:2],
        {**message, "name": "x", "tool_call_id": "call00001"},
    ]


def _probe_of_call(arguments: dict[str, Any], form: _CallForm) -> list[dict[str, Any]]:
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": "x", "arguments": arguments},
    }
    answer = {"role": "tool", "content": "x", "name": "x", "tool_call_id": "call00001"}
    return [
        {"role": "user", "content": "x"},
        form.applied({"role": "assistant", "tool_calls": [call]}),
        answer,
    ]


def _with_arguments_as_text(call: dict[str, Any]) -> dict[str, Any]:
    return {
        **call,
        "function": {
            **call["function"],
            "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
        },
    }


def _check_calls(conversation: list[dict[str, Any]], text: str) -> None:
    """Raises `RequestError` if calls are missing from the text: many templates know nothing of
    tools. Looks for `CHECKED_NAMES` functions at most, since each search may read all of the text.
    """
    checked: set[str] = set()
    for index, message in enumerate(conversation):
        for call in message.get("tool_calls", ()):
            name = call["function"]["name"]
            if name in checked:
                continue
            if len(checked) == CHECKED_NAMES:
                return
            checked.add(name)
            if name not in text:
                raise RequestError(
                    f"messages[{index}].tool_calls: the chat template leaves out the call of "
                    f"{shown(name)}"
                )


def _append_to_last(conversation: list[dict[str, Any]], text: str) -> None:
    last = conversation[-1]
    content = last.get("content")
    if content is None:
        raise RequestError("continue_final_message: the last message has no content to go on with")
    if isinstance(content, str):
        last["content"] = content + text
    elif content[-1] == IMAGE:
        raise RequestError("continue_final_message: the last message ends with an image")
    else:
        content[-1]["text"] += text


def _until(text: str, mark: str) -> str:
    """The text before the mark that ends the last message; as stripped at its end as the template
    stripped the mark's."""
    at = text.rfind(mark)
    if at < 0:
        raise RequestError("continue_final_message: the chat template leaves out the last message")
    return text[:at] if text.startswith(f"{mark} ", at) else text[:at].rstrip()
