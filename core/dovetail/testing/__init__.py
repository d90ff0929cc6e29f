"""For authors of components and their tests: fakes that keep books of their own, and `plan` to run one step of a policy.

The names are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.testing.fake_executor import FakeExecutor, FakeExecutorOptions
    from dovetail.testing.fake_kv import FakeKVCache
    from dovetail.testing.planning import Plan, make_request, plan

_HOMES = {
    "FakeExecutor": "fake_executor",
    "FakeExecutorOptions": "fake_executor",
    "FakeKVCache": "fake_kv",
    "Plan": "planning",
    "make_request": "planning",
    "plan": "planning",
}

__all__ = ["FakeExecutor", "FakeExecutorOptions", "FakeKVCache", "Plan", "make_request", "plan"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dovetail.testing' has no attribute {name!r}")
    return getattr(import_module(f"dovetail.testing.{_HOMES[name]}"), name)
