"""`XGrammarOptions`: apart from the backend, whose library takes a second to import."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class XGrammarOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    threads: Annotated[int, Field(ge=1, le=256)] | None = None
    """Number of threads that fill the masks of a step. null: the library's default."""
