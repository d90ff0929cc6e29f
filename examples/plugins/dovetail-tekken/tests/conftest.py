"""A folder with the tekken.json that mistral-common ships."""

import shutil
from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("model")
    with as_file(files("mistral_common") / "data" / "tekken_240911.json") as path:
        shutil.copy(path, folder / "tekken.json")
    yield folder
