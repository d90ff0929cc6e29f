"""A model named "demo" as the bundled one, with its tokenizer, and a third of its work per token:
the weights are those of the bundled draft model."""

from __future__ import annotations

import atexit
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import dovetail_models

BUNDLED = Path(dovetail_models.__file__).parent


@cache
def small_demo() -> str:
    """Return the model's directory, the same for all tests of this process."""
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    directory = Path(folder.name) / "demo"
    directory.mkdir()
    for file in (BUNDLED / "demo").iterdir():
        own = BUNDLED / "demo-draft" / file.name
        (directory / file.name).symlink_to(own if own.exists() else file)
    return str(directory)
