"""`dovetail pull`: fetch a model's files from the Hugging Face hub."""

from __future__ import annotations

from typing import Annotated

import typer

from dovetail.cli import completion

Name = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help='A hub id, such as "Qwen/Qwen3-0.6B"; "@" and a branch, tag or commit may follow.',
        autocompletion=completion.sources,
    ),
]


def pull(model: Name) -> None:
    """Fetch a model's config, weights and tokenizer from the Hugging Face hub into its cache.

    Existing files are kept, and an interrupted download resumes. Code of a repository isn't
    fetched. Prints the directory.
    """
    from dovetail.registry.models import locate_model, resolve_model
    from dovetail.registry.registry import Registry

    registry = Registry.discover(enforce_require=False)
    if locate_model(model, registry).kind != "hub":
        typer.echo(f"{model} is on this machine", err=True)
    typer.echo(resolve_model(model, registry))
