"""The partners of `dovetail chat`: a model in this process, or a server. `chat_command` talks to either through `Partner`."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from dovetail.checks import shown
from dovetail.errors import ConfigError, DovetailError

if TYPE_CHECKING:
    from dovetail.config import EngineConfig

TIMEOUT_S = 600.0  # until a server says something
MAX_LINE = 2**24  # bytes of one line of a server's answer
MAX_ERROR = 2**16  # bytes of a refusal

Messages = Sequence[Mapping[str, str]]
HEADERS = {"Content-Type": "application/json", "Accept": "text/event-stream"}


class ServerError(DovetailError):
    """A server can't be reached, refused a request, or broke off an answer."""


class Piece(NamedTuple):
    """A part of an answer."""

    text: str
    finish_reason: str | None = None  # of the last one


class Partner(Protocol):
    """The one who answers."""

    name: str

    def answer(self, messages: Messages) -> Generator[Piece]:
        """Yield an answer as it comes. Closing the iterator stops it. Raises `DovetailError`, of which a `RequestError` or `ServerError` concerns
        this answer alone."""

    def close(self) -> None: ...


class LocalModel:
    """A model in this process."""

    def __init__(self, config: EngineConfig, params: Mapping[str, Any], chat_template: str | None) -> None:
        """`params` are sampling parameters. Raises `ConfigError` if the model has no chat template and none is given."""
        from dovetail.front.chat import ChatFrontEnd, ChatOptions
        from dovetail.front.llm import LLM
        from dovetail.sampling_params import SamplingParams

        self.name = config.model.path
        self._params = SamplingParams.from_optional(**params)
        self._options = ChatOptions(chat_template=chat_template)
        self._llm = LLM(**{key: getattr(config, key) for key in config.model_fields_set})
        if chat_template is None and not self._llm.engine.tokenizer.chat_templates:
            self._llm.close()
            raise ConfigError(
                f"{config.model} has no chat template: it completes text and holds no conversation; "
                f"try `dovetail generate {config.model} TEXT`, or name a file with a template: --chat-template FILE"
            )
        self._chat = ChatFrontEnd(self._llm.engine.tokenizer, self._llm.engine.config.limits, self._llm.engine.capacity.max_model_len)

    def answer(self, messages: Messages) -> Generator[Piece]:
        with self._llm.stream([self._chat.prompt(messages, self._options)], self._params) as outputs:
            for output in outputs:
                sample = output.outputs[0]
                if sample.finish_reason in ("error", "rejected"):
                    raise DovetailError(f"the answer failed: {sample.stop_reason}")
                yield Piece(sample.text, sample.finish_reason)

    def close(self) -> None:
        self._chat.close()
        self._llm.close()


class Server:
    """A server that speaks OpenAI's API."""

    def __init__(self, url: str, model: str | None, params: Mapping[str, Any], api_key: str | None) -> None:
        """`params` are fields of each request. Raises `ConfigError` for a URL that is none, `ServerError` if no server answers there."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url}: {error}") from None
        if not parts.hostname:
            raise ConfigError(f"{url}: expected the URL of a server, like http://127.0.0.1:8000")
        self._address, self._secure = (parts.hostname, port), parts.scheme == "https"
        self._url = url.rstrip("/")
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._params = {key: value for key, value in params.items() if value is not None}
        self._headers = {**HEADERS, **({"Authorization": f"Bearer {api_key}"} if api_key else {})}
        self.name = model or self._first_model()

    def answer(self, messages: Messages) -> Generator[Piece]:
        body = {"model": self.name, "messages": list(messages), "stream": True, **self._params}
        connection = self._connection()
        with closing(connection), self._told("broke off"):
            yield from self._pieces(self._asked(connection, "POST", "/chat/completions", body))

    def close(self) -> None: ...

    def _pieces(self, response: http.client.HTTPResponse) -> Generator[Piece]:
        """Yield the parts of an answer that comes as server-sent events."""
        while line := response.readline(MAX_LINE):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = self._json(data)
            if error := event.get("error"):
                raise ServerError(f"{self._url}: {error.get('message') if isinstance(error, dict) else error}")
            for choice in event.get("choices", ())[:1]:
                yield Piece((choice.get("delta") or {}).get("content") or "", choice.get("finish_reason"))
        raise ServerError(f"{self._url} broke off amidst the answer")

    def _first_model(self) -> str:
        with closing(self._connection()) as connection, self._told("doesn't answer"):
            answer = self._json(self._asked(connection, "GET", "/models").read(MAX_LINE))
        models = answer.get("data")
        if not models:
            raise ServerError(f"{self._url} serves no model")
        return str(models[0]["id"])

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Raise what goes wrong with the connection as `ServerError`."""
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self._url} {what}: {getattr(error, 'strerror', None) or str(error) or type(error).__name__}") from None

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(*self._address, timeout=TIMEOUT_S)

    def _asked(self, connection: http.client.HTTPConnection, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        """Send a request, and return the response if it is a good one. Raises `ServerError` with what the server says."""
        connection.request(method, self._path + path, None if body is None else json.dumps(body), self._headers)
        response = connection.getresponse()
        if response.status == 200:
            return response
        text = response.read(MAX_ERROR).decode("utf-8", "replace")
        try:
            told = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            told = " ".join(text.split())[:300] or response.reason
        hint = "; give the server's key: --api-key" if response.status == 401 else ""
        raise ServerError(f"{self._url} answers {response.status}: {told}{hint}")

    def _json(self, data: bytes) -> dict[str, Any]:
        try:
            value = json.loads(data)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ServerError(f"{self._url} doesn't speak OpenAI's API: it said {shown(data.decode('utf-8', 'replace'))}")
        return value
