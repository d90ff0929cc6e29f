"""Routes that a plugin adds to the server (`dovetail.api.component.RoutesSpec`).

Example:
    ```python
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from dovetail import SamplingParams


    def make(context):
        async def haiku(request):
            topic = (await request.json())["topic"]
            answer = await context.answer(f"A haiku about {topic}:", SamplingParams(max_tokens=40))
            return JSONResponse({"haiku": answer.outputs[0].text})

        return [Route("/haiku", haiku, methods=["POST"])]
    ```

The server's authentication, request ids and log cover these routes as its own, and its limits on waiting requests what they generate. An error in a
handler is answered with 500, and named in the log with the plugin; other routes don't notice. A handler runs in the event loop of a front end, which
it must not block.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from dovetail.front.chat import ChatOptions
    from dovetail.front.request_checks import Prompt
    from dovetail.front.tokenizer import Tokenizer
    from dovetail.request import RequestOutput
    from dovetail.sampling_params import SamplingParams


class RouteContext(Protocol):
    """What routes may use of the server. The engine is there once the first request comes, not while routes are made."""

    @property
    def models(self) -> tuple[str, ...]:
        """Names that requests may use as `model`."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    def generate(self, prompt: Prompt, params: SamplingParams, **fields: Any) -> AsyncGenerator[RequestOutput, None]:
        """Generate, and yield what is new (`outputs[0].text`, `token_ids`) until an output has `finished`. `fields`: those of
        `LLMEngine.add_request`, such as `priority` and `client`.

        Closing the generator, or cancelling its task, aborts the request. Raises `RequestError` for an invalid one, answered with 400; an error that
        is answered with 429 while the server is busy; and `EngineDeadError`, with 503."""

    async def answer(self, prompt: Prompt, params: SamplingParams, **fields: Any) -> RequestOutput:
        """Generate, and return all of it at the end. Raises as `generate` does."""

    async def chat_prompt(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions | None = None) -> Prompt:
        """Return a conversation as a prompt, by the model's chat template. Raises `RequestError`."""

    def check_health(self) -> None:
        """Raise `DovetailError` if the engine is dead or hangs."""
