"""Partners of `dovetail chat`: a local model or a server, both behind `Partner`."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from dovetail.errors import ConfigError, DovetailError, shown

if TYPE_CHECKING:
    from dovetail import EngineConfig

TIMEOUT_S = 600.0  # without data from the server
MAX_LINE = 2**24  # bytes of one line of a response
MAX_ERROR = 2**16  # bytes of an error response

Messages = Sequence[Mapping[str, Any]]  # in OpenAI's chat format
HEADERS = {"Content-Type": "application/json", "Accept": "text/event-stream"}


class ServerError(DovetailError):
    """A server is unreachable, rejected a request, or broke off an answer."""


class Piece(NamedTuple):
    """A piece of an answer."""

    text: str
    finish_reason: str | None = None  # of the last one


class Partner(Protocol):
    """A source of answers."""

    name: str

    def answer(self, messages: Messages) -> Generator[Piece]:
        """Yield an answer as it arrives. Closing the generator stops it. Raises `DovetailError`;
        `RequestError` and `ServerError` concern only this answer."""

    def close(self) -> None: ...


class LocalModel:
    """A local model."""

    def __init__(
        self, config: EngineConfig, params: Mapping[str, Any], chat_template: str | None
    ) -> None:
        """`params`: sampling parameters. Raises `ConfigError` if there is no chat template."""
        from dovetail import LLM
        from dovetail.request.sampling_params import SamplingParams
        from dovetail.serving import ChatFrontEnd, ChatOptions

        self.name = config.model.path
        given = {name: value for name, value in params.items() if value is not None}
        self._params = SamplingParams(**{"max_tokens": None, **given})
        self._options = ChatOptions(chat_template=chat_template)
        self._llm = LLM(**{key: getattr(config, key) for key in config.model_fields_set})
        if chat_template is None and not self._llm.engine.tokenizer.has_chats:
            self._llm.close()
            raise ConfigError(
                f"{config.model} has no chat template, so it can only complete text; "
                f"try `dovetail generate {config.model} TEXT`, or provide a template: "
                f"--chat-template FILE"
            )
        engine = self._llm.engine
        self._chat = ChatFrontEnd(
            engine.tokenizer,
            engine.config.limits,
            engine.capacity.max_model_len,
            images=engine.images,
        )

    def answer(self, messages: Messages) -> Generator[Piece]:
        with self._llm.stream(
            [self._chat.prompt(messages, self._options)], self._params
        ) as outputs:
            for output in outputs:
                sample = output.outputs[0]
                if sample.finish_reason in ("error", "rejected"):
                    raise DovetailError(f"the answer failed: {sample.stop_reason}")
                yield Piece(sample.text, sample.finish_reason)

    def close(self) -> None:
        self._chat.close()
        self._llm.close()


class _Told(BaseModel):
    """Base class of a server's JSON answers. It uses pydantic, since `dovetail chat` also runs
    without the server's packages, msgspec among them."""

    model_config = ConfigDict(strict=True)


class _Model(_Told):
    id: str


class _Models(_Told):
    """The part of a server's list of models that is used."""

    data: list[_Model] = []


class _Delta(_Told):
    content: str | None = None


class _Choice(_Told):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(_Told):
    """The part of a stream's event that is used."""

    choices: list[_Choice] | None = None
    error: Any = None


T = TypeVar("T", bound=_Told)


class ServerModel:
    """A server with OpenAI's API."""

    def __init__(
        self, url: str, model: str | None, params: Mapping[str, Any], api_key: str | None
    ) -> None:
        """`params`: fields of each request. Raises `ConfigError` for an invalid URL, `ServerError`
        if no server answers."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url}: {error}") from None
        if not parts.hostname:
            raise ConfigError(f"{url}: expected the URL of a server, like http://127.0.0.1:8000")
        self._address = (parts.hostname, port)
        self._secure = parts.scheme == "https"
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
        """Yield the pieces of a stream of server-sent events."""
        while line := response.readline(MAX_LINE):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = self._decoded(data, _Event)
            if error := event.error:
                raise ServerError(
                    f"{self._url}: {error.get('message') if isinstance(error, dict) else error}"
                )
            for choice in (event.choices or ())[:1]:
                text = (choice.delta and choice.delta.content) or ""
                yield Piece(text, choice.finish_reason)
        raise ServerError(f"{self._url} broke off during the answer")

    def _first_model(self) -> str:
        with closing(self._connection()) as connection, self._told("doesn't answer"):
            answer = self._asked(connection, "GET", "/models").read(MAX_LINE)
        models = self._decoded(answer, _Models).data
        if not models:
            raise ServerError(f"{self._url} serves no model")
        return models[0].id

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Convert connection errors to `ServerError`."""
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(
                f"{self._url} {what}: "
                f"{getattr(error, 'strerror', None) or str(error) or type(error).__name__}"
            ) from None

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(*self._address, timeout=TIMEOUT_S)

    def _asked(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any = None
    ) -> http.client.HTTPResponse:
        """Send a request, and return the response if it is successful. Raises `ServerError` with
        the server's message."""
        connection.request(
            method, self._path + path, None if body is None else json.dumps(body), self._headers
        )
        response = connection.getresponse()
        if response.status == 200:
            return response
        text = response.read(MAX_ERROR).decode("utf-8", "replace")
        try:
            told = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError, RecursionError):
            told = " ".join(text.split())[:300] or response.reason
        hint = "; pass the server's key with --api-key" if response.status == 401 else ""
        raise ServerError(f"{self._url} answers {response.status}: {told}{hint}")

    def _decoded(self, data: bytes, kind: type[T]) -> T:
        try:
            return kind.model_validate_json(data)
        except ValidationError:
            raise ServerError(
                f"{self._url} doesn't have OpenAI's API: "
                f"it answered {shown(data[:MAX_ERROR].decode('utf-8', 'replace'))}"
            ) from None
