"""`GrammarOptions`: apart from the backend, whose library takes long to import."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class GrammarOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    whitespace: Literal["compact", "flexible"] = "compact"
    """White space between JSON tokens. compact: none. flexible: up to 20 characters at each place,
    so that no answer gets stuck in it."""

    threads: Annotated[int, Field(ge=1, le=256)] | None = None
    """Number of threads that fill the masks of a step. null: up to four."""

    processes: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of processes that track constrained answers and fill their masks, up to 64 answers
    each. Useful for large batches if as many cores are idle. 0: the engine's process does it."""


WHITESPACE_AT_MOST = 20  # characters in a row, with `whitespace: flexible`
