"""`dovetail acme demo "To be"` prints the number of tokens of a text."""

from typing import Annotated

import typer
from dovetail import LLM


def count(
    model: Annotated[str, typer.Argument(help="A model, or an engine.yaml.")],
    text: Annotated[str, typer.Argument(help="The text.")],
    ids: Annotated[bool, typer.Option("--ids", help="Print the token ids, too.")] = False,
) -> None:
    """Count the tokens of a text, as a model's tokenizer divides it."""
    with LLM(model, max_model_len=64) as llm:
        tokens = llm.get_tokenizer().encode(text)
    typer.echo(len(tokens))
    if ids:
        typer.echo(" ".join(map(str, tokens)))
