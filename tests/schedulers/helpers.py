"""The built-in policies, as their package declares them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pydantic import BaseModel

from dovetail.api.component import ComponentSpec, NoOptions
from dovetail.api.scheduler import Scheduler
from dovetail_schedulers import dovetail_components


@dataclass(frozen=True)
class Policy:
    name: str
    cls: type[Scheduler]
    options: type[BaseModel]

    def __repr__(self) -> str:
        return self.name


def load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def _policy(spec: ComponentSpec) -> Policy:
    return Policy(spec.name, load(spec.target), load(spec.options) if spec.options else NoOptions)


POLICIES = [_policy(spec) for spec in dovetail_components()]
