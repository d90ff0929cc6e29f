"""Foundations of the core: checks of values, errors with places, bounded files. Not for plugins.

`lazy_names` is here because every import of Dovetail needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str], within: str = "") -> Callable[[str], Any]:
    """Return the `__getattr__` of a package (PEP 562), which imports a name from its home.

    `homes`: name -> its module, below `within` if that is given. `__getattr__` raises
    `AttributeError` for any other name.
    """
    prefix = f"{within}." if within else ""

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(prefix + homes[name]), name)

    return load
