"""Cached verdicts of the checks of models through transformers, so that restarts of the same model
skip them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers

import dovetail
from dovetail.api.component import ENTRY_POINT_GROUP
from dovetail.api.whole_files import user_cache, write_whole

log = logging.getLogger("dovetail")

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def folder() -> Path:
    """Return the folder of verdicts. Raises `FileNotFoundError` without a home directory."""
    return user_cache("transformers")


class Verdict:
    """Verdict file of one model in one environment. Only passed checks are stored: rejected models
    are checked again."""

    def __init__(self, config: Any, environment: Mapping[str, Any]) -> None:
        """`config`: transformers' config. `environment`: other dependencies of the numbers; the
        versions of packages, including all plugins, are added."""
        versions = {
            package.__name__: str(package.__version__)
            for package in (dovetail, transformers, torch)
        } | {"triton": _version("triton")}
        versions |= {
            point.dist.name: point.dist.version
            for point in metadata.entry_points(group=ENTRY_POINT_GROUP)
            if point.dist is not None
        }
        key = {"config": config.to_dict(), "versions": versions, "environment": environment}
        self._key = json.loads(_ADDRESS.sub("", json.dumps(key, sort_keys=True, default=str)))
        digest = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()
        self._name = f"{digest[:32]}.json"

    @property
    def path(self) -> Path:
        """The file. Raises as `folder`."""
        return folder() / self._name

    def read(self) -> bool | None:
        """Return whether a passed model may use Dovetail's layers; None: not checked yet. A file
        that is unreadable or belongs to another model is ignored with a warning."""
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
        """Store that the model passed. If the file can't be written, this is logged, and the next
        start checks again."""
        stored = json.dumps({"key": self._key, "replaced": replaced}, indent=1)
        try:
            path = self.path
            # per process: another one may be writing, too
            own = path.with_name(f"{path.name}.{os.getpid()}")
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(own, lambda path: path.write_text(stored, encoding="utf-8"))
            os.replace(own, path)
        except OSError as error:
            log.info("the next start checks the model again: %s", error)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"
