"""Whether it keeps the contract of its kind."""

import shutil
import tempfile
from importlib.resources import as_file, files

from dovetail.testing import TokenizerSuite

FOLDER = tempfile.TemporaryDirectory()
with as_file(files("mistral_common") / "data" / "tekken_240911.json") as path:
    shutil.copy(path, f"{FOLDER.name}/tekken.json")


class TestTekken(TokenizerSuite):
    component = "tekken"
    directory = FOLDER.name
