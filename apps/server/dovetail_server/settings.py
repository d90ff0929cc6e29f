"""`ServerSettings`: every option of `dovetail serve`. The command line reads them, the front ends honour them."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

API_KEYS_VARIABLE = "DOVETAIL_API_KEYS"

Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


def _keys_of_environment() -> tuple[str, ...]:
    return tuple(key.strip() for key in os.environ.get(API_KEYS_VARIABLE, "").split(",") if key.strip())


class ServerSettings(BaseModel):
    """The options of `dovetail serve`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """The address to listen on. `0.0.0.0` is every address of the machine: set API keys first."""

    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """The TCP port to listen on; 0 takes a free one, which is printed."""

    uds: str | None = None
    """The path of a Unix socket to listen on instead of a host and a port."""

    api_keys: tuple[str, ...] = Field(default_factory=_keys_of_environment, repr=False)
    """Keys, one of which each request must bring as `Authorization: Bearer KEY` or `x-api-key: KEY`; none: everybody is let in. Unless they are
    given, the environment variable DOVETAIL_API_KEYS has them, separated by commas. /health and /ready need none."""

    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may call the server, such as `https://example.com`; `*` is all."""

    allowed_hosts: tuple[str, ...] = ()
    """Names by which clients may call a server that listens on loopback and has no API keys, such as that of a proxy before it; `*` is all. Addresses
    and `localhost` are always known."""

    tls_cert: str | None = None
    """A file with the server's certificate chain, PEM: the server then speaks HTTPS."""

    tls_key: str | None = None
    """A file with the certificate's private key, PEM."""

    root_path: str = ""
    """The path under which a proxy publishes the server, such as `/llm`."""

    served_model_name: tuple[str, ...] = ()
    """The names that requests may give as `model`; the first is told in answers. None: the model as `engine.yaml` names it."""

    max_queued_requests: Count | None = 2048
    """The most requests that wait for their first token; more get 429 with `Retry-After`. `null`: as many as the engine takes."""

    max_queued_tokens: Count | None = None
    """The most tokens of prompts that wait for their first token; a text that isn't tokenized yet counts one for four characters. A request that
    finds nobody waiting is always let in. `null`: no limit."""

    request_timeout_s: Seconds | None = 3600.0
    """The longest that a request may take once its body has come, in seconds, until its last byte is sent; then its client gets an error. `null`: no
    limit."""

    body_timeout_s: Seconds | None = 30.0
    """The longest that a request's body may take to come, in seconds, and one second more for each 64 KiB of it. `null`: no limit."""

    max_body_bytes: Count = 16 * 2**20
    """The largest body of a request, in bytes. One client's requests of more than 16 KiB may have as many together while they wait to be tokenized or
    rendered; more get 429. Clients are told apart by API key, address and the `client` of their requests."""

    max_received_bytes: Count = 256 * 2**20
    """The most bytes of bodies that a front end holds of all requests that are being received or made prompts of; more get 429 with `Retry-After`. A
    body of up to 64 KiB is always let in."""

    max_backlog_bytes: Count = 2**20
    """The most bytes of a stream that may wait for a slow reader. With more it gets an error and is dropped."""

    drain_timeout_s: Seconds = 30.0
    """The longest that SIGTERM waits for requests under way, in seconds."""

    step_timeout_s: Seconds = 60.0
    """The longest that a step of the engine may take, in seconds, before /health says that it hangs."""

    page: bool = True
    """True for a page at `/` that shows the engine at work."""

    log_requests: bool = True
    """True for a log line a request: its path, status, tokens and times, as JSON. Never its prompt."""

    batch_directory: str | None = None
    """The folder in which files of /v1/files and the state of /v1/batches are kept; it is made, for this user alone. `null`: there are no batches."""

    max_file_bytes: Count = 200 * 2**20
    """The largest file that may be uploaded for batches, in bytes."""

    max_stored_bytes: Count = 10 * 2**30
    """The most bytes that all files of batches may have together, answers included: with more, nothing is uploaded and no batch is made."""

    batch_requests: Count = 64
    """The most requests of batches that are under way at once. They take seats beside those of other clients."""

    batch_keep_days: Annotated[float, Field(gt=0, le=36_500)] | None = 30.0
    """How many days an uploaded file is kept, and a batch that has ended with its answers. `null`: until they are deleted."""

    otlp_traces_endpoint: Annotated[str, Field(pattern="^https?://")] | None = None
    """The URL to which a span of OpenTelemetry is sent for each request, by OTLP over HTTP, such as `http://127.0.0.1:4318/v1/traces`. It needs the
    extra `tracing`."""

    front_ends: Count = 1
    """Number of processes that speak HTTP."""

    tool_parser: Literal["auto"] | str | None = "auto"
    """The parser that finds tool calls in an answer, by its name; `auto`: the one that the model's chat template asks for; `null`: none."""

    reasoning_parser: Literal["auto"] | str | None = "auto"
    """The parser that parts an answer's reasoning from its content, by its name; `auto` and `null` as for `tool_parser`."""

    @model_validator(mode="after")
    def _consistent(self) -> ServerSettings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: give both, or neither")
        if any(not key for key in self.api_keys):
            raise ValueError("api_keys: a key can't be empty")
        return self
