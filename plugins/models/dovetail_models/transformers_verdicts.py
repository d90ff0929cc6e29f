"""Verdicts of the checks of models through transformers, kept on disk so that a second start of the same model doesn't check again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dovetail.whole_files import write_whole

log = logging.getLogger("dovetail")

_PACKAGES = ("dovetail-llm", "transformers", "torch")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def folder() -> Path:
    """Return where verdicts are: `dovetail/transformers` in XDG_CACHE_HOME, which is ~/.cache if it isn't set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dovetail" / "transformers"


class Verdict:
    """The file of one model that passed its checks, in one environment. Only passed checks are kept: what was refused is checked again."""

    def __init__(self, config: Any, environment: Mapping[str, Any]) -> None:
        """`config`: transformers' config. `environment`: what else the numbers depend on, but the versions of packages, which are added."""
        versions = {name: version(name) for name in _PACKAGES}
        key = {"config": config.to_dict(), "versions": versions, "environment": environment}
        self._key = json.loads(_ADDRESS.sub("", json.dumps(key, sort_keys=True, default=str)))
        self.path = folder() / f"{hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()[:32]}.json"

    def read(self) -> bool | None:
        """Return whether layers may be replaced by ours in a model that passed; None: it wasn't checked yet. A file that can't be read, or is of
        something else, is ignored with a warning."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s: %s: the model is checked again", self.path, error.strerror or error)
            return None
        try:
            stored = json.loads(text)
            if stored["key"] == self._key and isinstance(stored["replaced"], bool):
                return bool(stored["replaced"])
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        log.warning("%s: isn't a verdict on this model: it is checked again", self.path)
        return None

    def write(self, *, replaced: bool) -> None:
        """Keep that the model passed. Where nothing can be written, the next start checks again, as a line in the log says."""
        stored = json.dumps({"key": self._key, "replaced": replaced}, indent=1)
        own = self.path.with_name(f"{self.path.name}.{os.getpid()}")  # of this process: another may be writing, too
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(own, lambda path: path.write_text(stored, encoding="utf-8"))
            os.replace(own, self.path)
        except OSError as error:
            log.info("%s: %s: the next start checks the model again", self.path, error.strerror or error)
