"""Versions that must be the same on all hosts of an engine."""

from __future__ import annotations

import sys
from importlib.metadata import version


def versions() -> dict[str, str]:
    """Return the versions of what ranks compute with, by name."""
    return {"python": ".".join(map(str, sys.version_info[:2])), **{name: version(name) for name in ("dovetail-llm", "torch")}}
