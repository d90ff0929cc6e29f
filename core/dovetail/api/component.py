"""Declarations of what a plugin provides: `ComponentSpec`, `CommandSpec`, `RoutesSpec`,
`RouterSpec`, `BundledModel`, `QuantizationSpec`, the `hookimpl` marker and the kinds.

A plugin is a module named by an entry point in the group `dovetail.plugins`; see
`dovetail.registry.hookspecs` for its hooks. Declarations hold only strings and small values, so
that declaring a component imports nothing heavy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import pluggy
from pydantic import BaseModel, ConfigDict

from dovetail.errors import PluginError

ENTRY_POINT_GROUP = "dovetail.plugins"

Kind = Literal[
    "scheduler",
    "kv_cache",
    "attention",
    "model",
    "sampler",
    "grammar",
    "executor",
    "observer",
    "drafter",
    "tokenizer",
    "logits_processor",
    "parser",
    "kv_tier",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

API_VERSIONS: dict[Kind, str] = {  # interface versions of this release
    "scheduler": "1.1",
    "kv_cache": "1.1",
    "attention": "1.1",
    "model": "1.1",
    "sampler": "1.0",
    "grammar": "1.1",
    "executor": "1.1",
    "observer": "1.1",
    "drafter": "1.1",
    "tokenizer": "1.0",
    "logits_processor": "1.0",
    "parser": "1.0",
    "kv_tier": "1.0",
}

# versions of the other interfaces for plugins: the hooks with what they declare, and routes
EXTENSION_VERSIONS: dict[str, str] = {"hooks": "1.0", "routes": "1.0"}

# version of the conformance suites of this release: each check names the first that has it
SUITE_VERSION = "1.1"

hookimpl = pluggy.HookimplMarker("dovetail")

_NAME = re.compile(r"[a-z0-9]+([_-][a-z0-9]+)*")
_VERSION = re.compile(r"\d+\.\d+")
# a check's id, the reason and the url of an issue, which may be in parentheses
WAIVER = re.compile(r"\s*([\w.]+)\s*=\s*(\S.*?)\s*\(?(https?://[^\s()]+)\)?\s*", re.DOTALL)
TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class NoOptions(BaseModel):
    """Options model of a component without options: any key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class ComponentSpec:
    """One component that a plugin provides. Raises `PluginError` if a field is malformed.

    `target` and `options` are imported only when the component is used
    (`options` also to validate a config). `requires`: PEP 508 requirements of the target beyond its
    distribution's dependencies; if one is missing when the component is used, the error names
    it.

    `suite`: the version of the conformance suites that it is tested with. Checks of later versions
    run, but failing them doesn't count. `waivers`: checks that it can't pass, each as
    "id=reason https://…", with the issue that tracks it. Verdicts show them.
    """

    kind: Kind
    name: str  # lower case letters, digits, "-" and "_"
    target: str  # "package.module:Class", instantiated as Class(options, context)
    api: str  # the interface version that it was written for, "major.minor"
    options: str | None = None  # "package.module:Model", a pydantic model; None: no options
    summary: str = ""  # one line for `dovetail plugins list`
    requires: tuple[str, ...] = ()
    # kind model: Hugging Face `architectures`; "*": any that no other component names
    architectures: tuple[str, ...] = ()
    # "package.module:Model", a pydantic model that validates this distribution's part of a
    # request's `extra`
    request_extra: str | None = None
    suite: str = "1.0"
    waivers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field, is_right, expected in _RULES:
            value = getattr(self, field)
            if not is_right(value):
                raise PluginError(
                    f"ComponentSpec {self.name!r}: {field} is {value!r}, expected {expected}"
                )
        if self.architectures and self.kind != "model":
            raise PluginError(
                f"ComponentSpec {self.name!r}: architectures is {self.architectures!r}, "
                "expected (): only kind 'model' has architectures"
            )


def _is_name(value: object) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def _is_target(value: object) -> bool:
    return isinstance(value, str) and TARGET.fullmatch(value) is not None


def _is_target_or_none(value: object) -> bool:
    return value is None or _is_target(value)


def _is_version(value: object) -> bool:
    return isinstance(value, str) and _VERSION.fullmatch(value) is not None


def _is_line(value: object) -> bool:
    return isinstance(value, str) and "\n" not in value


def _are_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(one, str) for one in value)


def _are_waivers(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(one, str) and WAIVER.fullmatch(one) is not None for one in value
    )


_NAMES = "lower case letters and digits, joined by '-' or '_'"
_LINE = "one line of text"
_RULES: tuple[tuple[str, Callable[[object], bool], str], ...] = (  # of the fields of ComponentSpec
    ("kind", lambda value: value in KINDS, f"one of {', '.join(KINDS)}"),
    ("name", _is_name, _NAMES),
    ("target", _is_target, '"package.module:Class"'),
    ("options", _is_target_or_none, '"package.module:Class"'),
    ("request_extra", _is_target_or_none, '"package.module:Class"'),
    ("api", _is_version, '"major.minor", like "1.0"'),
    ("summary", _is_line, _LINE),
    ("requires", _are_texts, "a tuple of strings"),
    ("architectures", _are_texts, "a tuple of strings"),
    ("suite", _is_version, '"major.minor", like "1.0"'),
    ("waivers", _are_waivers, 'a tuple of texts like "scheduler.recompute=reason https://…"'),
)


@dataclass(frozen=True, slots=True)
class _Offer:
    name: str
    target: str  # "package.module:app"
    summary: str = ""

    def __post_init__(self) -> None:
        spec = type(self).__name__
        if not _is_name(self.name):
            raise PluginError(f"{spec}: name is {self.name!r}, expected {_NAMES}")
        if not _is_target(self.target):
            raise PluginError(
                f'{spec} {self.name!r}: target is {self.target!r}, expected "package.module:app"'
            )
        if not _is_line(self.summary):
            raise PluginError(
                f"{spec} {self.name!r}: summary is {self.summary!r}, expected {_LINE}"
            )


@dataclass(frozen=True, slots=True)
class CommandSpec(_Offer):
    """Subcommand that a plugin adds to `dovetail`. `target` is a `typer.Typer` app or a function,
    imported when called."""


@dataclass(frozen=True, slots=True)
class RoutesSpec(_Offer):
    """Routes and middleware that `dovetail serve --route NAME` adds to the server. `target` is a
    function, called once in each front end with a `dovetail.api.routes.RouteContext`. It returns
    Starlette's `Route`, `Mount`, `WebSocketRoute` and `Middleware` objects, in a list."""


@dataclass(frozen=True, slots=True)
class RouterSpec(_Offer):
    """Router of replicas, by which `dovetail lab --router NAME` distributes requests. `target` is a
    subclass of `dovetail_lab.routers.Router`, imported when a run names it."""


@dataclass(frozen=True, slots=True)
class BundledModel:
    """Model directory that a plugin ships at `path` inside `package`; resolved with
    importlib.resources on use.

    Only built-in models have a short name; others are called "distribution:name", so that
    installing a plugin never changes the meaning of a hub id or a directory.
    """

    name: str
    package: str  # "package.module"
    path: str  # relative, with "/"

    def __post_init__(self) -> None:
        if not _is_name(self.name):
            raise PluginError(f"BundledModel: name is {self.name!r}, expected {_NAMES}")
        if not _is_target(f"{self.package}:x"):
            raise PluginError(
                f"BundledModel {self.name!r}: package is {self.package!r}, "
                'expected "package.module"'
            )
        if (
            not isinstance(self.path, str)
            or self.path.startswith("/")
            or ".." in self.path.split("/")
        ):
            raise PluginError(
                f"BundledModel {self.name!r}: path is {self.path!r}, expected a path inside the "
                f"package"
            )


@dataclass(frozen=True, slots=True)
class QuantizationSpec:
    """Weight format of linear layers in checkpoints. `target` is imported when a checkpoint names
    it, and constructed from the checkpoint's `quantization_config`. Raises `PluginError` if a field
    is malformed.
    """

    name: str  # the checkpoint's `quant_method`
    # "package.module:Class", a subclass of `dovetail.nn.format.Quantization`, instantiated as
    # Class(quantization_config)
    target: str
    summary: str = ""  # one line for `dovetail plugins info`
    # can quantize a plain checkpoint while loading; instantiated as Class(None) for that
    quantizes: bool = False

    def __post_init__(self) -> None:
        if not _is_name(self.name):
            raise PluginError(f"QuantizationSpec: name is {self.name!r}, expected {_NAMES}")
        if not _is_target(self.target):
            raise PluginError(
                f"QuantizationSpec {self.name!r}: target is {self.target!r}, "
                'expected "package.module:Class"'
            )
        if not _is_line(self.summary):
            raise PluginError(
                f"QuantizationSpec {self.name!r}: summary is {self.summary!r}, expected {_LINE}"
            )
