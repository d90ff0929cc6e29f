"""Spec of a synthetic workload: `arrivals=poisson(4) requests=1000 prompt=lognormal(900, 1.1)
output=uniform(16, 512)`, or the same as YAML.

Several streams with separate settings are joined by semicolons:
`chat: arrivals=… ; batch: arrivals=…`; their names are the names of their clients.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

import yaml
from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from dovetail.errors import shown
from dovetail_lab.calls import Value, parse_call
from dovetail_lab.traces.reading import TraceError
from dovetail_lab.workloads.arrivals import ARRIVALS, MOST_ARRIVALS, Arrivals, AtOnce
from dovetail_lab.workloads.lengths import DISTRIBUTIONS, Distribution, Fixed

_PAIR = re.compile(r"(\w+)\s*=\s*([^\s()=]+(?:\s*\([^()]*\))?)(?:\s+|$)")
_NAME = re.compile(r"\s*(\w[\w-]*)\s*:\s*")


class Clients(Value):
    """`count` clients, or adapters; the k-th sends in proportion to 1 / k^skew (Zipf's law); skew
    0: uniform."""

    count: PositiveInt
    skew: float = Field(default=0.0, ge=0, le=10)


def _arrivals(value: Any) -> Any:
    return parse_call(value, ARRIVALS, "arrivals") if isinstance(value, str) else value


def _distribution(value: Any) -> Any:
    if isinstance(value, Distribution):
        return value
    text = str(value)
    try:
        float(text)
    except ValueError:
        return parse_call(text, DISTRIBUTIONS, "distribution")
    return parse_call(f"fixed({text})", DISTRIBUTIONS, "distribution")


def _clients(value: Any) -> Any:
    if isinstance(value, Clients):
        return value
    text = str(value)
    return (
        Clients(count=int(text))
        if text.isdecimal()
        else parse_call(text, {"zipf": Clients}, "clients")
    )


Lengths = Annotated[Distribution, BeforeValidator(_distribution)]


class Stream(Value):
    """One stream of requests. A chat of several turns is one arrival; each turn's prompt is the
    chat so far plus `prompt` new tokens."""

    arrivals: Annotated[Arrivals, BeforeValidator(_arrivals)]
    requests: PositiveInt | None = Field(
        default=None,
        le=MOST_ARRIVALS,
        description="Number of arrivals; a chat of several turns counts once.",
    )
    duration: PositiveFloat | None = Field(
        default=None, description="Seconds after which arrivals end."
    )
    lengths: str | None = Field(
        default=None,
        description="Trace to draw pairs of prompt and output lengths from, instead of `prompt` "
        "and `output`.",
    )
    prompt: Lengths | None = Field(default=None, description="New prompt tokens of a turn.")
    output: Lengths | None = Field(default=None, description="Tokens of an answer.")
    system: NonNegativeInt = Field(
        default=0, description="Length of a prompt prefix shared by all requests of the stream."
    )
    client_prefix: Lengths | None = Field(
        default=None,
        description="Length of a prompt prefix, after `system`, shared by all requests of a client; "
        "drawn once per client.",
    )
    turns: Lengths = Field(default=Fixed(value=1), description="Turns of a chat.")
    think: Lengths = Field(
        default=Fixed(value=30),
        description="Seconds between the arrivals of successive turns; in a closed loop from an "
        "answer's end.",
    )
    closed_loop: bool = Field(
        default=False,
        description="True: a turn waits for the answer before, and then `think` or `tool` seconds.",
    )
    tool: Lengths | None = Field(
        default=None,
        description="Seconds that a tool called by an answer runs, in place of `think`.",
    )
    tool_share: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of answers that call a tool, if `tool` is given.",
    )
    clients: Annotated[Clients, BeforeValidator(_clients)] | None = Field(
        default=None, description="A number, or zipf(count, skew)."
    )
    priority: int = Field(default=0, description="Smaller is more important.")
    deadline: Lengths | None = Field(
        default=None, description="Seconds after arrival by which the last token is due."
    )
    ttft_deadline: Lengths | None = Field(
        default=None, description="Seconds after arrival by which the first token is due."
    )
    tbt: Lengths | None = Field(default=None, description="Maximum seconds between two tokens.")
    image_share: float = Field(
        default=0.0, ge=0, le=1, description="Share of turns whose new tokens begin with an image."
    )
    image_rows: Lengths = Field(
        default=Fixed(value=1024), description="Tokens of an image, added to `prompt`."
    )
    pictures: PositiveInt | None = Field(
        default=None,
        le=MOST_ARRIVALS,
        description="Number of distinct pictures, of which images are drawn. Unset: no picture "
        "comes twice, but in the history of its chat.",
    )
    grammar_share: float = Field(
        default=0.0, ge=0, le=1, description="Share of requests with a grammar."
    )

    adapters: Annotated[Clients, BeforeValidator(_clients)] | None = Field(
        default=None,
        description="LoRA adapters that arrivals use: a number, or zipf(count, skew).",
    )
    pooling_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of requests that end with their prompt, and yield a vector.",
    )

    @model_validator(mode="after")
    def _has_an_end_and_lengths(self) -> Self:
        if self.requests is None and (self.duration is None or isinstance(self.arrivals, AtOnce)):
            raise ValueError(
                "the number of arrivals is missing: requests=1000"
                + ("" if isinstance(self.arrivals, AtOnce) else ", or duration=600")
            )
        has_both = self.prompt is not None and self.output is not None
        has_none = self.prompt is None and self.output is None
        if not (has_both if self.lengths is None else has_none):
            raise ValueError("lengths are missing: prompt=… and output=…, or lengths=<a trace>")
        if self.client_prefix is not None and self.clients is None:
            raise ValueError("client_prefix needs clients=<a number>")
        return self


class WorkloadSpec(Value):
    """Streams by name. A single stream may have the name ""; then it has no client either."""

    streams: dict[str, Stream]


def parse_spec(text: str, name: str = "workload") -> WorkloadSpec:
    """Parse the short syntax. Raises `TraceError`, which begins with `name`."""
    streams: dict[str, dict[str, str]] = {}
    for part in text.split(";"):
        named = _NAME.match(part)
        stream = named[1] if named else ""
        if stream in streams:
            raise TraceError(
                f"{name}: two streams have {f'the name {stream}' if stream else 'no name'}; write "
                f"`name: key=value …; name: key=value …`"
            )
        streams[stream] = _pairs(part[named.end() if named else 0 :], name)
    return _spec(streams, name)


def _pairs(text: str, name: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    position = len(text) - len(text.lstrip())
    while position < len(text):
        match = _PAIR.match(text, position)
        if match is None:
            raise TraceError(
                f"{name}: expected key=value, such as arrivals=poisson(4), at {text[position:]!r}"
            )
        if match[1] in pairs:
            raise TraceError(f"{name}: {match[1]} is given twice")
        pairs[match[1]] = match[2]
        position = match.end()
    return pairs


def parse_yaml_spec(text: str, name: str) -> WorkloadSpec:
    """Parse the same keys and values as YAML: one stream, or a mapping of names to streams. Raises
    `TraceError`."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise TraceError(f"{name}: expected YAML: {error}") from None
    if not isinstance(document, dict) or not document:
        raise TraceError(
            f"{name}: expected keys such as `arrivals: poisson(4)`, got {shown(document)}"
        )
    return _spec({"": document} if "arrivals" in document else document, name)


def _spec(streams: Mapping[Any, Any], name: str) -> WorkloadSpec:
    made = {}
    for stream, fields in streams.items():
        if not isinstance(fields, dict):
            raise TraceError(
                f"{name}: {stream}: expected keys such as `arrivals: poisson(4)`, got "
                f"{shown(fields)}"
            )
        try:
            made[str(stream)] = Stream(**{str(key): value for key, value in fields.items()})
        except ValidationError as error:
            raise TraceError(
                "\n".join(
                    _explained(name, str(stream), detail)
                    for detail in error.errors(include_url=False)
                )
            ) from None
    return WorkloadSpec(streams=made)


def _explained(name: str, stream: str, detail: Any) -> str:
    key = ".".join(map(str, detail["loc"]))
    unknown = detail["type"] == "extra_forbidden"
    message = (
        f"unknown key; there are {', '.join(Stream.model_fields)}"
        if unknown
        else detail["msg"].removeprefix("Value error, ")
    )
    return ": ".join(
        filter(None, (name, stream, "" if message.startswith(f"{key}:") else key, message))
    )
