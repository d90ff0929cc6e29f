"""An engine whose answers a test writes, for the APIs that tell of thoughts and calls: its chat
template knows both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import transformers

from dovetail.errors import EngineDeadError
from dovetail.front.tokenizer import Tokenizer, TransformersTokenizer
from dovetail.request.outputs import CompletionOutput, RequestOutput
from tests.server.fake_engine import FakeEngine, FakeRequest

TEMPLATE = """{%- for tool in tools or [] %}{{ tool | tojson + '\n' }}{% endfor %}
{%- for message in messages %}<{{ message.role }}>
    {%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
    {%- for call in message.tool_calls %}
        {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}}</tool_call>
    {%- endfor %}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""
CACHED_TOKENS = 2  # of each prompt
_PIECE = 3  # characters of each output


@dataclass(frozen=True)
class Script:
    """An answer."""

    text: str
    stop_reason: str | None = None
    fails: bool = False  # the engine dies before the last piece


class ScriptedEngine(FakeEngine):
    """Answers every request with `script`, a token a character, up to its `max_tokens`."""

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """`tokenizer`: one with a template like `TEMPLATE`. `options`: of `FakeEngine`."""
        if tokenizer is None:
            own = transformers.ByT5Tokenizer(bos_token="<s>", chat_template=TEMPLATE)
            tokenizer = TransformersTokenizer(own)
        super().__init__(tokenizer, **options)
        self.script = Script("Hello!")

    @property
    def last(self) -> FakeRequest:
        """The last request."""
        return self.submitted[-1]

    @property
    def last_prompt(self) -> str:
        """Its prompt."""
        return self.last.prompt or ""

    async def _run(self, request: FakeRequest) -> None:
        script = self.script
        room = request.params.max_tokens or self.info.intake.max_model_len
        text, cut = script.text[:room], len(script.text) > room
        pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)] or [""]
        for place, piece in enumerate(pieces):
            sample = CompletionOutput(0, piece, [65] * len(piece))
            if finished := place == len(pieces) - 1:
                if script.fails:
                    request.listener.on_error(EngineDeadError("the engine died"))
                    return
                sample.finish_reason, sample.stop_reason = (
                    ("length", None) if cut else ("stop", script.stop_reason)
                )
            output = RequestOutput(
                request.id,
                request.prompt,
                request.prompt_token_ids,
                [sample],
                finished,
                num_cached_tokens=CACHED_TOKENS,
            )
            request.listener.on_output(output)
        self.requests.pop(request.id, None)
