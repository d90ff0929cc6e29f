"""`Contract`: the content of `contract.json`, by module and by kind.

Entries without `since` are of the first version. The contract of an older version is the file
without the entries of later ones: see `Contract.at`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from dovetail.errors import ConfigError

FIRST = "1.0"
FILE = "contract.json"
INLINE = 96  # JSON of at most so many characters is written on one line
INLINE_TEXT = 700  # likewise for objects that hold only texts

Form = Literal["interface", "protocol", "value", "enum", "class"]
Call = Literal["method", "property", "class method", "static method", "function"]
Entry = TypeVar("Entry", bound="_Entry")


class _Model(BaseModel):
    # a file of a later Dovetail may hold more
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Entry(_Model):
    since: str = FIRST  # the version that added it


class Parameter(_Entry):
    """Parameter of a method, without `self`. `name` has the stars of `*args` and `**kwargs`."""

    name: str
    type: str = ""
    default: str | None = None  # its source; None: required
    keyword: bool = False  # keyword-only


class Method(_Entry):
    """Signature of a method, property or function."""

    form: Call = "method"
    parameters: tuple[Parameter, ...] = ()
    returns: str = ""
    abstract: bool = False
    asynchronous: bool = False


class Field(_Entry):
    """Field of a value, or attribute of a class."""

    type: str = ""
    default: str | None = None  # its source; None: required
    keyword: bool = False  # keyword-only in the constructor


class Member(_Entry):
    """Member of an enum."""

    value: str


class Constant(_Entry):
    """Constant or type alias of a module."""

    value: str | None = None  # its source, if it is short


class Type(_Entry):
    """Class of a module. `given`: Dovetail provides its instances; components only call them."""

    form: Form
    bases: tuple[str, ...] = ()
    given: bool = False
    fields: dict[str, Field] = {}
    methods: dict[str, Method] = {}
    members: dict[str, Member] = {}


class Module(_Model):
    """Public names of one module."""

    types: dict[str, Type] = {}
    functions: dict[str, Method] = {}
    constants: dict[str, Constant] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of types, functions and constants."""
        return (*self.types, *self.functions, *self.constants)


class Clause(_Model):
    """Sentence that requires something of a component, or promises something to it. `tests`:
    Dovetail's own tests of it. `unchecked`: the part that nothing verifies, with the reason."""

    place: str
    text: str
    checks: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    unchecked: str = ""


class Check(_Model):
    """Check of a suite. With a `capability`, it applies to components that declare it."""

    since: str
    capability: str | None = None
    help: str


class Feature(_Model):
    """Optional methods of a capability. Only components that declare it override `methods`, and
    those override at least `required`. "Class.method" is a method of a part that a component
    makes."""

    methods: tuple[str, ...]
    required: tuple[str, ...] = ()


class KindContract(_Model):
    """Contract of one kind. `uses`: names of other modules that its interface mentions,
    "module:name". `features`: by capability. `capabilities`:
    the class of its capabilities; None if it has none."""

    version: str
    base: str
    capabilities: str | None = None
    features: dict[str, Feature] = {}
    uses: tuple[str, ...] = ()
    clauses: dict[str, Clause] = {}
    checks: dict[str, Check] = {}


class Extension(_Model):
    """Interface for plugins that isn't one of components, such as that of routes."""

    version: str
    modules: tuple[str, ...]


class Contract(_Model):
    """All interfaces. `suite`: the version of the conformance suites. `exports`: names of
    `dovetail.api` -> their modules. `clauses` and `checks` are those for components of all
    kinds."""

    format: Literal[1] = 1
    version: str
    suite: str = ""
    exports: dict[str, str] = {}
    kinds: dict[str, KindContract] = {}
    extensions: dict[str, Extension] = {}
    modules: dict[str, Module] = {}
    clauses: dict[str, Clause] = {}
    checks: dict[str, Check] = {}

    @property
    def versions(self) -> dict[str, str]:
        """Return the versions of the interfaces: kinds, then extensions."""
        found = {name: kind.version for name, kind in self.kinds.items()}
        return found | {name: one.version for name, one in self.extensions.items()}

    @property
    def all_checks(self) -> dict[str, Check]:
        """Return the checks of all kinds, by id."""
        found = dict(self.checks)
        for kind in self.kinds.values():
            found |= kind.checks
        return found

    def type_named(self, module: str, name: str) -> Type | None:
        """Return a class by the module and name that it is imported by; None if it isn't here."""
        home = self.exports.get(name, module) if module == "dovetail.api" else module
        return self.modules[home].types.get(name) if home in self.modules else None

    def names_in(self, module: str) -> set[str] | None:
        """Return the names that can be imported from a module; None if it isn't here."""
        if module == "dovetail.api":
            return {*self.exports, *(name.rpartition(".")[2] for name in self.modules)}
        return set(self.modules[module].names) if module in self.modules else None

    def at(self, version: str) -> Contract:
        """Return the contract as of an older version. Raises `ConfigError` for a version that this
        one doesn't contain."""
        if not number(FIRST) <= number(version) <= number(self.version):
            raise ConfigError(
                f"there is no contract {version}: this Dovetail has {FIRST} to {self.version}"
            )
        modules = {}
        for name, module in self.modules.items():
            older = _module_at(module, version)
            if older.types or older.functions or older.constants:
                modules[name] = older
        kinds = {
            name: kind.model_copy(update={"version": min(kind.version, version, key=number)})
            for name, kind in self.kinds.items()
        }
        extensions = {
            name: one.model_copy(update={"version": min(one.version, version, key=number)})
            for name, one in self.extensions.items()
        }
        parts = {"modules": modules, "kinds": kinds, "extensions": extensions}
        return self.model_copy(update={"version": version, **parts})

    def to_json(self) -> str:
        """Return the text of the file."""
        return _dumped(self.model_dump(exclude_defaults=True) | {"format": self.format}) + "\n"


def number(version: str) -> tuple[int, int]:
    """Return "1.10" as (1, 10). Raises `ConfigError` for another form."""
    major, _, minor = version.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise ConfigError(f"{version!r} is no version, expected one like {FIRST}")
    return int(major), int(minor)


@cache
def shipped() -> Contract:
    """Return the contract of this Dovetail."""
    return Contract.model_validate_json(
        resources.files("dovetail").joinpath(FILE).read_text(encoding="utf-8")
    )


def read(path: Path) -> Contract:
    """Return the contract in a file. Raises `ConfigError` if it isn't one."""
    try:
        return Contract.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{path} is no contract: {error}") from error


def _known(entries: Mapping[str, Entry], version: str) -> dict[str, Entry]:
    return {
        name: entry for name, entry in entries.items() if number(entry.since) <= number(version)
    }


def _module_at(module: Module, version: str) -> Module:
    return Module(
        types={
            name: _type_at(entry, version) for name, entry in _known(module.types, version).items()
        },
        functions=_methods_at(module.functions, version),
        constants=_known(module.constants, version),
    )


def _type_at(entry: Type, version: str) -> Type:
    older = {
        "fields": _known(entry.fields, version),
        "methods": _methods_at(entry.methods, version),
        "members": _known(entry.members, version),
    }
    return entry.model_copy(update=older)


def _methods_at(methods: Mapping[str, Method], version: str) -> dict[str, Method]:
    return {
        name: method.model_copy(
            update={
                "parameters": tuple(
                    one for one in method.parameters if number(one.since) <= number(version)
                )
            }
        )
        for name, method in _known(methods, version).items()
    }


def _dumped(value: Any, indent: str = "") -> str:
    """Return JSON in which short objects and lists have a line of their own, so that differences
    are readable."""
    line = json.dumps(value, ensure_ascii=False)
    is_text = isinstance(value, dict) and not any(isinstance(one, dict) for one in value.values())
    if not isinstance(value, dict | list | tuple) or len(line) <= (
        INLINE_TEXT if is_text and "parameters" not in value else INLINE
    ):
        return line
    inner = indent + " "
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {_dumped(item, inner)}" for key, item in value.items()]
        opening, closing = "{", "}"
    else:
        items = [_dumped(item, inner) for item in value]
        opening, closing = "[", "]"
    body = ",\n".join(f"{inner}{item}" for item in items)
    return f"{opening}\n{body}\n{indent}{closing}"
