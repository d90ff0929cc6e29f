"""`ServerSettings`: all options of `dovetail serve`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

API_KEYS_VARIABLE = "DOVETAIL_API_KEYS"

Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]

Finds = Literal["calls", "reasoning"]  # what a parser may find, as fields of its capabilities
PARSER_SETTINGS: Mapping[Finds, str] = {"calls": "tool_parser", "reasoning": "reasoning_parser"}


def _keys_of_environment() -> tuple[str, ...]:
    """Return the keys of the variable.

    A variable without any key yields an empty key, which is rejected: otherwise the server would
    have no authentication.
    """
    text = os.environ.get(API_KEYS_VARIABLE, "")
    keys = tuple(key.strip() for key in text.split(",") if key.strip())
    return keys or (("",) if text else ())


def _is_template(text: str) -> bool:
    return "{{" in text or "{%" in text


class ServerSettings(BaseModel):
    """The options of `dovetail serve`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """The address to listen on. `0.0.0.0`: all addresses of the machine; set API keys first."""

    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """The TCP port to listen on; 0: a free port, which is printed."""

    uds: str | None = None
    """The path of a Unix socket to listen on instead of a host and a port."""

    api_keys: tuple[str, ...] = Field(default_factory=_keys_of_environment, repr=False)
    """API keys: each request must send one of them as `Authorization: Bearer KEY` or `x-api-key:
    KEY`. Empty: no authentication. The default is the environment variable DOVETAIL_API_KEYS,
    separated by commas. /health, /ping and /ready need no key."""

    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may call the server, such as `https://example.com`; `*`: all."""

    allowed_hosts: tuple[str, ...] = ()
    """Host names by which clients may call a server that listens on loopback and has no API keys,
    such as a proxy's; `*`: all. IP addresses and `localhost` are always allowed."""

    tls_cert: str | None = None
    """PEM file with the server's certificate chain; enables HTTPS."""

    tls_key: str | None = None
    """PEM file with the certificate's private key."""

    root_path: str = ""
    """Path prefix under which a proxy publishes the server, such as `/llm`."""

    served_model_name: tuple[str, ...] = ()
    """Names that requests may use as `model`; answers contain the first by default. Empty: the
    model's name in `engine.yaml`. Several models have one name each, in their order."""

    max_queued_requests: Count | None = 2048
    """Maximum number of requests that wait for their first token; others get 429 with
    `Retry-After`. `null`: only the engine's limit."""

    max_queued_tokens: Count | None = None
    """Maximum number of prompt tokens of requests that wait for their first token; text that isn't
    tokenized yet counts as one token per four characters. A request is always admitted if no other
    is waiting. `null`: no limit."""

    request_timeout_s: Seconds | None = 3600.0
    """Timeout of a request in seconds, from the end of its body to the last byte of the answer.
    `null`: no limit."""

    body_timeout_s: Seconds | None = 30.0
    """Timeout for receiving a request's body in seconds, plus one second per 64 KiB. `null`: no
    limit."""

    max_body_bytes: Count = 32 * 2**20
    """Maximum size of a request body, in bytes; the default has room for four images of 5 MiB, as
    base64. It also limits the total of one client's bodies above 16 KiB that wait to be tokenized
    or rendered; others get 429. Clients are identified by API key, address and the `client` of
    their requests."""

    max_received_bytes: Count = 512 * 2**20
    """Maximum number of bytes of all bodies that a front end is receiving or converting to prompts;
    others get 429 with `Retry-After`. Bodies up to 64 KiB are always accepted. One client's images
    may have half of it."""

    max_held_image_bytes: Count = 8 * 2**30
    """Maximum number of bytes of the prepared images of a front end's unfinished requests, which
    the engine's process holds in memory: 3 to 25 MB for an image of 1,024 x 1,024. A request whose
    images exceed it together with those of others gets 429 with `Retry-After`: by 6 MiB an image
    before they are prepared, and by their size afterwards."""

    max_backlog_bytes: Count = 2**20
    """Maximum number of unread bytes of a stream. A client that falls further behind gets an error
    and is disconnected."""

    drain_timeout_s: Seconds = 30.0
    """Timeout for running requests after SIGTERM, in seconds."""

    step_timeout_s: Seconds = 60.0
    """Timeout of an engine step, in seconds; a slower engine is considered hung. On a CPU it
    restarts with each layer."""

    page: bool = True
    """Serve a live dashboard at `/`."""

    log_requests: bool = True
    """Log each request as a line of JSON: path, status, tokens and times, but never the prompt."""

    batch_directory: str | None = None
    """The folder for /v1/files and /v1/batches; it is created for this user only. `null`:
    disabled."""

    max_file_bytes: Count = 200 * 2**20
    """Maximum size of an uploaded file, in bytes."""

    max_stored_bytes: Count = 10 * 2**30
    """Maximum number of bytes of all stored files, including answers; beyond that, uploads and new
    batches are rejected."""

    batch_requests: Count = 64
    """Maximum number of concurrent requests of batches. They compete with other clients'
    requests."""

    batch_keep_days: Annotated[float, Field(gt=0, le=36_500)] | None = 30.0
    """Retention of uploaded files, and of finished batches with their answers, in days. `null`:
    until deleted."""

    otlp_traces_endpoint: Annotated[str, Field(pattern="^https?://")] | None = None
    """The URL for OpenTelemetry spans, one per request, by OTLP over HTTP, such as
    `http://127.0.0.1:4318/v1/traces`. Requires the extra `tracing`."""

    front_ends: Count = 1
    """Number of HTTP processes."""

    tool_parser: str | None = "auto"
    """The parser of tool calls, by name, or with options as `{name: dovetail-acme:acme, option:
    1}`; `auto`: detected from the model's chat template; `null`: none."""

    reasoning_parser: str | None = "auto"
    """The parser that separates reasoning from content; values as for `tool_parser`."""

    chat_template: str | None = None
    """A Jinja template that replaces the model's for all conversations, or the path of a file with
    one. Requests may still contain their own."""

    prefix_cache_reset: bool = False
    """Serve POST /reset_prefix_cache, which empties the prefix cache: only if you trust all
    clients."""

    lora_modules: tuple[str, ...] = ()
    """Adapters to serve, as NAME=PATH with a directory in PEFT's format: requests select one by its
    name as `model`. Requires `--enable-lora` (`adapters` in `engine.yaml`). Of several models, the
    first with `adapters` has them."""

    adapter_directory: str | None = None
    """A folder from below which clients may load adapters by POST /v1/load_lora_adapter, and unload
    them by /v1/unload_lora_adapter: only if you trust all clients. `null`: both are disabled."""

    advisory_fields: Literal["ignore", "refuse"] = "ignore"
    """Fields of requests that don't change the meaning of an answer, such as `text.verbosity`:
    `ignore` them and list them in the header `x-dovetail-ignored`, or `refuse` them with a 400."""

    routes: tuple[str, ...] = ()
    """Routes and middleware of installed plugins to add, by name, such as `haiku` or
    `dovetail-haiku:haiku`; `dovetail plugins list` shows them."""

    @field_validator("chat_template")
    @classmethod
    def _template_read(cls, given: str | None) -> str | None:
        if given is None or _is_template(given):
            return given
        try:
            text = Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"must be a Jinja template, or a file with one: {error}") from None
        if not _is_template(text):
            raise ValueError("the file has no Jinja template: it never reads a message")
        return text

    @field_validator("lora_modules")
    @classmethod
    def _named_paths(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for one in given:
            name, _, path = one.partition("=")
            if not name or not path:
                raise ValueError(f"expected NAME=PATH, got {one!r}")
        return given

    @property
    def named_parsers(self) -> dict[Finds, str]:
        """The parsers that are named, rather than chosen by a chat template."""
        return {
            finds: name
            for finds, setting in PARSER_SETTINGS.items()
            if (name := getattr(self, setting)) not in (None, "auto")
        }

    @model_validator(mode="after")
    def _consistent(self) -> ServerSettings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be given together")
        if any(not key for key in self.api_keys):
            raise ValueError(f"api_keys ({API_KEYS_VARIABLE}): a key can't be empty")
        return self
