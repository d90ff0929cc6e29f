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

These routes have the server's authentication, request ids and log, and what they generate counts
against its limits on waiting requests. If a handler raises an unexpected error, the client gets
status 500, and the log names the plugin; other routes aren't affected. Handlers run in the event
loop of a front end and must not block it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from dovetail.front.chat import ChatOptions
    from dovetail.front.prompts import Prompt
    from dovetail.front.tokenizer import Tokenizer
    from dovetail.request.outputs import RequestOutput
    from dovetail.request.sampling_params import SamplingParams


class RouteContext(Protocol):
    """The interface of the server for a plugin's routes. Its engine can be used in handlers, but
    not while the routes are created."""

    @property
    def models(self) -> tuple[str, ...]:
        """Names that requests may use as `model`."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    def generate(
        self, prompt: Prompt, params: SamplingParams, **fields: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate, and yield what is new (`outputs[0].text`, `token_ids`) until an output has
        `finished`. `fields`: those of `LLMEngine.add_request`, such as `priority` and `client`.

        Closing the generator, or cancelling its task, aborts the request. Raises `RequestError` for
        an invalid request (status 400), `EngineDeadError` if the engine has failed (503), and
        another `DovetailError` while the server is busy (429). A handler need not catch them: the
        server then answers with these statuses."""

    async def answer(self, prompt: Prompt, params: SamplingParams, **fields: Any) -> RequestOutput:
        """Generate, and return all of it at the end. Raises as `generate` does."""

    async def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions | None = None
    ) -> Prompt:
        """Return a conversation as a prompt, by the model's chat template. Raises
        `RequestError`."""

    def check_health(self) -> None:
        """Raise `DovetailError` if the engine is dead or hangs."""
