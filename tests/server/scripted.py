"""A server of answers that a test writes: a `ServedEngine` without a model behind it, over loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import transformers
import uvicorn
from starlette.applications import Starlette

from dovetail.errors import EngineDeadError
from dovetail.front.chat import ChatFrontEnd
from dovetail.front.prompts import Prompt
from dovetail.front.tokenizer import TokenizedText, Tokenizer
from dovetail.limits import Limits
from dovetail.request import CompletionOutput, RequestOutput
from dovetail.sampling_params import SamplingParams
from dovetail_server.engine import EngineFacts, Listener, Load
from dovetail_server.wire import DirectProtocol

TEMPLATE = """{%- for tool in tools or [] %}{{ tool | tojson + '\n' }}{% endfor %}
{%- for message in messages %}<{{ message.role }}>
    {%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
    {%- for call in message.tool_calls %}
        {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}}</tool_call>
    {%- endfor %}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""
MAX_MODEL_LEN = 2000
PATIENCE_S = 30  # a hang fails the test


@dataclass(frozen=True)
class Script:
    """An answer."""

    text: str
    stop_reason: str | None = None
    piece: int = 3  # characters of each output
    fails: bool = False  # the engine dies before its last piece


class ScriptedEngine:
    """Answers every request with `script`, a token a character, up to its `max_tokens`. `seen` holds what was asked."""

    default_params = SamplingParams()
    load = Load()

    def __init__(self) -> None:
        self.facts = EngineFacts("scripted", MAX_MODEL_LEN, 384, 16, 1000, 8, Limits(), has_logprobs=False)
        self.tokenizer = Tokenizer(transformers.ByT5Tokenizer(bos_token="<s>", chat_template=TEMPLATE))
        self.chat = ChatFrontEnd(self.tokenizer, Limits())
        self.script = Script("Hello!")
        self.seen: list[tuple[str, SamplingParams]] = []
        self.fields: dict[str, Any] = {}
        self._aborted: set[str] = set()

    async def submit(self, request_id: str, prompt: Prompt, params: SamplingParams, listener: Listener, **fields: Any) -> None:
        if isinstance(prompt, str):
            prompt = TokenizedText(prompt, self.tokenizer.encode(prompt))
        text, ids = (prompt.text, prompt.token_ids) if isinstance(prompt, TokenizedText) else ("", list(prompt))
        self.seen.append((text, params))
        self.fields = fields
        asyncio.get_running_loop().call_soon(self._answer, request_id, ids, params, listener)

    def _answer(self, request_id: str, ids: Any, params: SamplingParams, listener: Listener) -> None:
        script = self.script
        room = min(params.max_tokens or MAX_MODEL_LEN, MAX_MODEL_LEN)
        text, cut = script.text[:room], len(script.text) > room
        pieces = [text[at : at + script.piece] for at in range(0, len(text), script.piece)] or [""]
        for place, piece in enumerate(pieces):
            last = place == len(pieces) - 1
            if last and script.fails:
                listener.on_error(EngineDeadError("the engine died"))
                return
            for index in range(params.n):
                sample = CompletionOutput(index, piece, [65] * len(piece))
                if last:
                    sample.finish_reason = "length" if cut else "stop"
                    sample.stop_reason = None if cut else script.stop_reason
                finished = last and index == params.n - 1
                if request_id not in self._aborted:
                    listener.on_output(RequestOutput(request_id, None, ids, [sample], finished, num_cached_tokens=min(2, len(ids))))

    def abort(self, request_id: str) -> None:
        self._aborted.add(request_id)

    def now(self) -> float:
        return 0.0

    def check_health(self) -> None:
        """Always well."""

    def close(self) -> None:
        self.chat.close()


@contextlib.contextmanager
def served(app: Starlette) -> Iterator[str]:
    """Serve an app over loopback from a thread; gives its address."""
    server = uvicorn.Server(uvicorn.Config(app, http=DirectProtocol, log_level="warning", lifespan="off"))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()  # so that who comes before the server is ready waits
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
