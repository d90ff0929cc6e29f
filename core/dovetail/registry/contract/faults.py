"""`faults_of`: where a component's source differs from the contract of its kind. Nothing is
imported: classes and their bases are read by `ast`.

A base class whose source isn't found may define anything, so nothing is then reported as missing.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from dovetail.api.component import Kind
from dovetail.base.checks import did_you_mean
from dovetail.registry.contract.diff import parameter_texts
from dovetail.registry.contract.document import (
    Contract,
    Feature,
    KindContract,
    Method,
    Parameter,
    Type,
)
from dovetail.registry.contract.modules import Api, Lineage, Modules, Own
from dovetail.registry.contract.source import Function, assigned, last_name, method_of

NEAR = 0.85  # similarity of names from which one is taken for a misspelt other
SIGNED = (
    "property",
    "cached_property",
    "classmethod",
    "staticmethod",
    "abstractmethod",
    "override",
)
UNKNOWN = object()  # a capability whose value isn't in the source
UNKNOWABLE = ast.Name("…")  # capabilities that aren't in the source


@dataclass(frozen=True, slots=True)
class Fault:
    """One difference from the contract. `place`: "Class.method"."""

    place: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what}; {self.remedy}"


def faults_of(
    contract: Contract, kind: Kind, target: str, modules: Modules | None = None
) -> list[Fault]:
    """Return the faults of a component, "package.module:Class", and of the other classes in its
    module that implement an interface; none if its source isn't found. `modules`: the sources to
    read; None: those installed."""
    modules = modules or Modules(contract)
    module, _, name = target.partition(":")
    found = modules.find(module, name)
    if not isinstance(found, Own):
        return []
    wanted = contract.kinds[kind]
    component = _Class(found, modules.lineage(found))
    faults = [*_of_imports(found.module, contract, modules), *_of_kind(component, wanted)]
    faults += _of_methods(component, must_be_complete=True)
    classes = [_Class(own, modules.lineage(own)) for own in modules.classes_of(found.module)]
    parts = [one for one in classes if one.api and not one.is_given and not one.is_a(wanted.base)]
    faults += _of_capabilities(component, parts, wanted, contract)
    for part in parts:
        faults += _of_methods(part, must_be_complete=part.is_concrete)
    return list(dict.fromkeys(faults))


class _Class:
    """A class of a component's package, with what it and its bases define."""

    def __init__(self, own: Own, lineage: Lineage) -> None:
        self.own = own
        self.name = own.node.name
        self.lineage = lineage
        self.api: list[Api] = [one for one in lineage.classes if isinstance(one, Api)]
        self.is_given = any(one.type.given for one in self.api)

    def is_a(self, base: str) -> bool:
        return any(one.name == base for one in self.api)

    def has(self, method: str) -> bool:
        """Return True if it, or a class of the contract below the interface, defines a method."""
        below = [one for one in self.api if one.type.form == "class"]
        return method in self.defined or any(method in one.type.methods for one in below)

    @cached_property
    def wanted(self) -> dict[str, tuple[str, Method]]:
        """Methods of the contract: name -> its class, and its signature there."""
        found: dict[str, tuple[str, Method]] = {}
        for one in self.api:
            for name, method in one.type.methods.items():
                found.setdefault(name, (one.name, method))
        return found

    @cached_property
    def defined(self) -> dict[str, tuple[str, ast.stmt]]:
        """Names that the package's classes define before those of the contract: each with its class
        and the statement that defines it."""
        found: dict[str, tuple[str, ast.stmt]] = {}
        hidden: set[str] = set()
        for one in self.lineage.classes:
            if isinstance(one, Api):
                hidden |= {name for name, method in one.type.methods.items() if not method.abstract}
                continue
            for name, statement in _names(one.node.body):
                if name not in hidden:
                    found.setdefault(name, (one.node.name, statement))
        return found

    @cached_property
    def declared_capabilities(self) -> ast.expr | None:
        """The value that the nearest class assigns to `capabilities`; `UNKNOWABLE` for a
        property."""
        for one in self.lineage.classes:
            if isinstance(one, Api):
                field = one.type.fields.get("capabilities")
                if field is not None and field.default is not None:
                    return _parsed(field.default)
            else:
                statement = dict(_names(one.node.body)).get("capabilities")
                if statement is not None:
                    values = (value for _, value in assigned(statement) if value is not None)
                    return next(values, UNKNOWABLE)
        return None

    @property
    def is_concrete(self) -> bool:
        """Whether its name and body suggest that it is instantiated."""
        bases = {last_name(base) for base in self.own.node.bases}
        return not (
            self.name.startswith("_")
            or bases & {"ABC", "Protocol"}
            or any(
                last_name(decorator) == "abstractmethod"
                for part in self.own.node.body
                if isinstance(part, Function)
                for decorator in part.decorator_list
            )
        )


def _names(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield what a class's body defines, the last definition of a name first."""
    for part in reversed(body):
        if isinstance(part, Function):
            yield part.name, part
        elif isinstance(part, ast.If):
            yield from _names([*part.body, *part.orelse])
        else:
            yield from ((name, part) for name, value in assigned(part) if value is not None)


def _of_imports(module: str, contract: Contract, modules: Modules) -> Iterator[Fault]:
    for home, name in modules.imports_of(module):
        known = contract.names_in(home) if home.startswith("dovetail.api") else None
        if known is not None and name not in known and not name.startswith("_"):
            what = f"{home} has no {name}{did_you_mean(name, known)}"
            yield Fault(module, what, "docs/plugins/upgrade.md lists what was renamed in 1.0")


def _of_kind(component: _Class, wanted: KindContract) -> Iterator[Fault]:
    if not component.is_a(wanted.base) and component.lineage.closed:
        yield Fault(
            component.name,
            f"it isn't a subclass of dovetail.api.{wanted.base}",
            "derive it from that class",
        )


def _of_methods(component: _Class, *, must_be_complete: bool) -> Iterator[Fault]:
    misspelt = set()
    for name, (owner, method) in component.wanted.items():
        if name in component.defined:
            place, statement = component.defined[name]
            yield from _of_method(f"{place}.{name}", statement, method, owner)
        elif method.abstract and must_be_complete and component.lineage.closed:
            near = get_close_matches(name, _unknown(component), 1, 0.6)
            misspelt.update(near)
            what = f"{owner}.{name}, which every {owner} implements, is missing"
            if near:
                what += f"; did you mean it by {near[0]}?"
            yield Fault(f"{component.name}.{name}", what, f"define {_shown(name, method)}")
    undefined = component.wanted.keys() - component.defined.keys()
    for name in _unknown(component):
        near = get_close_matches(name, undefined, 1, NEAR)
        if name not in misspelt and (near or name.startswith("on_")):
            owner = component.api[0].name if component.api else component.name
            remedy = f"did you mean {near[0]}?" if near else "begin names of helpers with _"
            yield Fault(f"{component.name}.{name}", f"{owner} has no such method", remedy)


def _unknown(component: _Class) -> list[str]:
    """Return the public methods of the package's classes that the contract doesn't have."""
    return [
        name
        for name, (_, statement) in component.defined.items()
        if isinstance(statement, Function)
        and not name.startswith("_")
        and name not in component.wanted
    ]


def _shown(name: str, method: Method) -> str:
    if method.form == "property":
        return f"the property {name}"
    first = () if method.form == "static method" else ("self",)
    return f"{name}({', '.join([*first, *parameter_texts(method, typed=False)])})"


def _of_method(place: str, statement: ast.stmt, method: Method, owner: str) -> Iterator[Fault]:
    name = place.rpartition(".")[2]
    if not isinstance(statement, Function):
        if method.form != "property":
            yield Fault(place, "it is an attribute, and should be a method", f"define {name}()")
        return
    if any(last_name(one) not in SIGNED for one in statement.decorator_list):
        return  # what a decorator makes of it isn't known
    mine = method_of(statement, "method")
    remedy = f"{owner} has {_shown(name, method)}"
    if mine.form != method.form:
        yield Fault(place, f"it is a {mine.form}, and should be a {method.form}", remedy)
    elif mine.asynchronous != method.asynchronous:
        is_async = "async" if mine.asynchronous else "not async"
        yield Fault(place, f"it is {is_async}, unlike the interface", remedy)
    elif method.form != "property":
        problem = mismatch(_signature(method), _signature(mine))
        if problem is not None:
            yield Fault(place, problem, remedy)


def _signature(method: Method) -> inspect.Signature:
    return inspect.Signature([_parameter(one) for one in method.parameters])


def _parameter(one: Parameter) -> inspect.Parameter:
    name = one.name.lstrip("*")
    if one.name.startswith("**"):
        return inspect.Parameter(name, inspect.Parameter.VAR_KEYWORD)
    if one.name.startswith("*"):
        return inspect.Parameter(name, inspect.Parameter.VAR_POSITIONAL)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY if one.keyword else inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=inspect.Parameter.empty if one.default is None else one.default,
    )


def mismatch(wanted: inspect.Signature, mine: inspect.Signature) -> str | None:
    """Return the reason why a method with the signature `mine` can't be called as one with
    `wanted`; None if it can."""
    positional = [p for p in wanted.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = [p for p in wanted.parameters.values() if p.kind is p.KEYWORD_ONLY]
    for optional in (False, True):
        args = [p.name for p in positional if optional or p.default is p.empty]
        kwargs = {p.name: p.name for p in keywords if optional or p.default is p.empty}
        try:
            bound = mine.bind(*args, **kwargs)
        except TypeError as error:
            return str(error)
        moved = [
            f"{name!r} is where {value!r} should be"
            for name, value in bound.arguments.items()
            if isinstance(value, str) and name != value
        ]
        if moved:
            return moved[0]
    return None


def _of_capabilities(
    component: _Class, parts: list[_Class], wanted: KindContract, contract: Contract
) -> Iterator[Fault]:
    if wanted.capabilities is None:
        return
    known = contract.type_named(f"dovetail.api.{_kind_of(wanted, contract)}", wanted.capabilities)
    declared = component.declared_capabilities
    if known is None or (declared is None and not component.lineage.closed):
        return
    place = f"{component.name}.capabilities"
    values = _values(declared, wanted, known)
    if isinstance(values, str):
        yield Fault(place, values, f"set it to {wanted.capabilities}(…)")
        return
    for name, value in values.items():
        if name not in known.fields:
            what = f"{wanted.capabilities} has no {name}{did_you_mean(name, known.fields)}"
            yield Fault(place, what, f"it has {', '.join(known.fields)}")
        elif isinstance(value, bool) and _is_member(known.fields[name].default):
            kind = known.fields[name].type
            yield Fault(place, f"{name} is {value}, and should be a {kind}", f"use {kind}.…")
    for capability, feature in wanted.features.items():
        if values.get(capability) is not UNKNOWN:
            methods = _Methods(component, parts)
            yield from _of_feature(methods, place, capability, feature, values.get(capability))


def _is_member(default: str | None) -> bool:
    """Return True for the source of an enum's member."""
    return isinstance(_parsed(default), ast.Attribute)


def _kind_of(wanted: KindContract, contract: Contract) -> str:
    return next(name for name, kind in contract.kinds.items() if kind is wanted)


def _values(
    declared: ast.expr | None, wanted: KindContract, known: Type
) -> Mapping[str, Any] | str:
    """Return the capabilities that an expression declares: a literal's value, or `UNKNOWN`. A text
    says that it declares something else."""
    defaults = {name: _literal(_parsed(field.default)) for name, field in known.fields.items()}
    unknown = dict.fromkeys(known.fields, UNKNOWN)
    if declared is None:
        return defaults
    if not isinstance(declared, ast.Call):
        return unknown  # a name
    keywords = {one.arg: _literal(one.value) for one in declared.keywords if one.arg is not None}
    is_open = len(keywords) < len(declared.keywords) or bool(declared.args)  # **more, or in order
    called = last_name(declared)
    if called == wanted.capabilities:
        return {**(unknown if is_open else defaults), **keywords}
    if called.endswith("Capabilities"):
        return f"it is {called}(…)"
    return {**unknown, **keywords} if called == "replace" else unknown


def _parsed(text: str | None) -> ast.expr | None:
    return None if text is None else ast.parse(text, mode="eval").body


def _literal(node: ast.expr | None) -> Any:
    """Return the value of a literal, and the name of an enum's member, None for `NONE`."""
    if isinstance(node, ast.Attribute):
        return None if node.attr == "NONE" else node.attr
    try:
        return UNKNOWN if node is None else ast.literal_eval(node)
    except ValueError:
        return UNKNOWN


@dataclass(frozen=True, slots=True)
class _Methods:
    """Methods of a component and of the parts that its module defines, by "method" or
    "Class.method"."""

    component: _Class
    parts: list[_Class]

    def owners(self, name: str) -> list[_Class]:
        """Return the classes that may define a method. A part is only known if its class is in the
        component's module."""
        owner, dot, _ = name.rpartition(".")
        return [one for one in self.parts if one.is_a(owner)] if dot else [self.component]

    def overridden(self, name: str) -> str | None:
        """Return "Class.method" if the package defines a method; otherwise None."""
        method = name.rpartition(".")[2]
        owners = (one.name for one in self.owners(name) if method in one.defined)
        owner = next(owners, None)
        return None if owner is None else f"{owner}.{method}"

    def lacks(self, name: str) -> bool:
        """Return True if all classes that may define a method are known, and none does."""
        owners = self.owners(name)
        return bool(owners) and not any(
            one.has(name.rpartition(".")[2]) or not one.lineage.closed for one in owners
        )


def _of_feature(
    methods: _Methods, place: str, capability: str, feature: Feature, value: Any
) -> Iterator[Fault]:
    overridden = [name for one in feature.methods if (name := methods.overridden(one)) is not None]
    missing = [name for name in feature.required if methods.lacks(name)]
    if overridden and not value:
        yield Fault(
            overridden[0],
            f"it belongs to the capability {capability}, which isn't declared, so it is never used",
            f"declare {capability} in {place}, or drop the method",
        )
    if missing and value:
        names = ", ".join(missing)
        yield Fault(
            place,
            f"it declares {capability}, but the class doesn't define {names}",
            f"define {names}, or don't declare {capability}",
        )
