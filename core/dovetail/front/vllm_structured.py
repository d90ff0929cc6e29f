"""Structured output in vLLM's words, for its programs and for requests over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from dovetail.errors import RequestError, shown
from dovetail.request.structured import Structured


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """vLLM's name and spelling of `Structured`; `GuidedDecodingParams` is its older one.

    `SamplingParams(structured_outputs=…)` takes it.
    """

    json: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_fallback: bool = False  # there is no fallback
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    backend: str | None = None

    def structured(self) -> Structured:
        """Return the equivalent `Structured`.

        Raises `RequestError`, also for an unsupported option.
        """
        for name in (
            "disable_any_whitespace",
            "disable_additional_properties",
            "whitespace_pattern",
        ):
            if getattr(self, name):
                raise RequestError(
                    f"structured_outputs.{name}: it isn't supported; say it in the schema, or in a "
                    "grammar"
                )
        if self.backend not in (None, "auto"):
            raise RequestError(
                "structured_outputs.backend: the engine's config chooses it (grammar), got "
                f"{shown(self.backend)}"
            )
        return Structured(
            self.json,
            self.regex,
            self.grammar,
            self.choice,
            bool(self.json_object),
            self.structural_tag,
        )


GuidedDecodingParams = StructuredOutputsParams


def structured_of_vllm(value: Any) -> Structured:
    """Parse `structured_outputs` or `guided_decoding`. Raises `RequestError`."""
    if isinstance(value, Mapping):
        known = [field.name for field in fields(StructuredOutputsParams)]
        for key in value:
            if key not in known:
                raise RequestError(
                    f"structured_outputs.{key[:80] if isinstance(key, str) else shown(key)}: there "
                    f"is no such field; there are {', '.join(known)}"
                )
        value = StructuredOutputsParams(**value)
    if not isinstance(value, StructuredOutputsParams):
        raise RequestError(
            "structured_outputs must be StructuredOutputsParams, or a mapping of its fields, got "
            f"{shown(value)}"
        )
    return value.structured()
