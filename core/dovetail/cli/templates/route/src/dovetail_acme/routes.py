"""POST /acme answers {"text": ...} with a summary of the text."""

from collections.abc import Sequence

from dovetail import SamplingParams
from dovetail.api.routes import RouteContext
from dovetail.errors import RequestError
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route


def make(context: RouteContext) -> Sequence[BaseRoute]:
    async def summarize(request: Request) -> JSONResponse:
        text = text_of(await request.json())
        prompt = f"{text}\n\nIn one sentence:"
        answer = await context.answer(prompt, SamplingParams(temperature=0.0, max_tokens=60))
        return JSONResponse({"summary": answer.outputs[0].text.strip()})

    return [Route("/acme", summarize, methods=["POST"])]


def text_of(body: object) -> str:
    """The text of a request's body. Raises `RequestError`, which the server answers with status 400."""
    text = body.get("text") if isinstance(body, dict) else None
    if not isinstance(text, str) or not text:
        raise RequestError("text: expected a text that isn't empty")
    return text
