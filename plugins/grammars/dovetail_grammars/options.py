"""`GrammarOptions`: the options that both backends take."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class GrammarOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    whitespace: Literal["compact", "flexible"] = "compact"
    """White space between the tokens of JSON. compact: none. flexible: up to 20 characters at each place, so that no answer runs on in it."""

    threads: Annotated[int, Field(ge=1, le=256)] | None = None
    """Threads that fill the masks of a step's requests. null: up to four with `llguidance`, as many as the library thinks best with `xgrammar`."""


WHITESPACE_AT_MOST = 20  # characters in a row, with `whitespace: flexible`
