"""Routes that a plugin adds to the server (`dovetail.api.component.RoutesSpec`).

The target of a `RoutesSpec` is a function. It gets a `RouteContext`, and returns Starlette's
`Route`, `Mount`, `WebSocketRoute` and `Middleware` objects.

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
against its limits on waiting requests. Handlers run in the event loop of a front end and must not
block it.

Errors that a handler doesn't catch are answered in the format of the server's API:

- `RequestError`, and a body that `request.json()` can't parse: status 400.
- Other errors of Dovetail: their status, such as 429 while the server is busy.
- Starlette's `HTTPException`: its status.
- Any other error: status 500 for that request. The log names the plugin; other requests and routes
  aren't affected.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, Unpack

if TYPE_CHECKING:
    from dovetail.request.lora import LoRARequest
    from dovetail.request.outputs import RequestOutput
    from dovetail.request.sampling_params import SamplingParams


class RoutePrompt(Protocol):
    """A prompt that has been tokenized, as `RouteContext.chat_prompt` returns it."""

    @property
    def text(self) -> str:
        """The text of the prompt."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The token ids of the prompt."""


class RouteTokenizer(Protocol):
    """The model's tokenizer, as routes see it."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. `special_tokens`: with those that the model expects around a
        text, such as BOS. Raises `RequestError` for text that isn't Unicode."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids. Unknown ids are left out."""


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of `RouteContext.generate` and `answer`. `LLMEngine.add_request` says what
    each means."""

    priority: int
    client: str | None
    cache_salt: str | None
    extra: Mapping[str, Any] | None
    predicted_tokens: int | None
    tbt_s: float | None
    lora_request: LoRARequest | None


class ChatPromptOptions(TypedDict, total=False):
    """Keyword arguments of `RouteContext.chat_prompt`."""

    # functions that the model may call, in OpenAI's format
    tools: Sequence[Mapping[str, Any]] | None
    # a Jinja template instead of the model's own, or the name of one of the model's
    chat_template: str | None
    # variables of the template
    chat_template_kwargs: Mapping[str, Any] | None
    # end with the head of an assistant's message; None: unless `continue_final_message`
    add_generation_prompt: bool | None
    # end within the last message, so that the model continues it
    continue_final_message: bool


class RouteContext(Protocol):
    """Interface of the server for a plugin's routes.

    Handlers use it; while the routes are created, every use raises `PluginError`.
    """

    @property
    def models(self) -> tuple[str, ...]:
        """Names that requests may use as `model`."""

    @property
    def tokenizer(self) -> RouteTokenizer:
        """The model's tokenizer."""

    def generate(
        self,
        prompt: str | Sequence[int] | RoutePrompt,
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate, and yield what is new (`outputs[0].text`, `token_ids`) until an output has
        `finished`. `prompt`: text, token ids, or what `chat_prompt` returned.

        Closing the generator, or cancelling its task, aborts the request. Raises `RequestError` for
        an invalid request (status 400), `EngineDeadError` if the engine has failed (503), and
        another `DovetailError` while the server is busy (429). A handler need not catch them: the
        server then answers with these statuses."""

    async def answer(
        self,
        prompt: str | Sequence[int] | RoutePrompt,
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Generate, and return all of it at the end. Raises as `generate` does."""

    async def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatPromptOptions]
    ) -> RoutePrompt:
        """Return a conversation as a prompt, by the model's chat template. Raises
        `RequestError`."""

    def check_health(self) -> None:
        """Raise `DovetailError` if the engine is dead or hangs."""
