"""Reads the public names of a module from its source, by `ast`, so that nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dovetail.registry.contract.document import (
    Constant,
    Field,
    Form,
    Member,
    Method,
    Module,
    Parameter,
    Type,
)

LONGEST_VALUE = 300  # characters of a constant's source that are part of the contract
# special methods that a component may be called by
CALLED = ("__init__", "__call__", "__len__", "__iter__", "__getitem__", "__contains__")
OWN_FORM = {  # decorators -> form of what they decorate
    "property": "property",
    "cached_property": "property",
    "classmethod": "class method",
    "staticmethod": "static method",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_of(source: str) -> Module:
    """Return the public names that a module defines, in source order: classes, functions, constants
    and aliases, not its imports. A private base class is merged into its subclasses."""
    body = ast.parse(source).body
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    types = {
        name: _type(node, classes) for name, node in classes.items() if not name.startswith("_")
    }
    functions = {
        node.name: method_of(node, "function")
        for node in body
        if isinstance(node, Function) and not node.name.startswith("_")
    }
    constants = {}
    aliases = [  # under `if TYPE_CHECKING`
        part
        for node in body
        if isinstance(node, ast.If) and last_name(node.test) == "TYPE_CHECKING"
        for part in node.body
    ]
    for node in [*aliases, *body]:
        for name, value in assigned(node):
            if not name.startswith("_") and not _is_tool(value):
                constants[name] = Constant(value=_short(value))
    return Module(types=types, functions=functions, constants=constants)


def assigned(node: ast.stmt) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the plain names that a statement assigns to, with their value."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    for target in targets:
        if isinstance(target, ast.Name) and isinstance(node, ast.Assign | ast.AnnAssign):
            yield target.id, node.value


def _is_tool(value: ast.expr | None) -> bool:
    """Return True for what a module makes for itself: type variables and loggers."""
    return isinstance(value, ast.Call) and last_name(value.func) in ("TypeVar", "getLogger")


def _short(value: ast.expr | None) -> str | None:
    text = "" if value is None else ast.unparse(value)
    return text if 0 < len(text) <= LONGEST_VALUE else None


def last_name(node: ast.expr) -> str:
    """Return "c" for the expressions `c`, `a.b.c`, `c(…)` and `c[…]`; "" for others."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _type(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Type:
    fields: dict[str, Field] = {}
    methods: dict[str, Method] = {}
    bases: list[str] = []
    for base in node.bases:
        name = last_name(base)
        if name.startswith("_") and name in classes:
            merged = _type(classes[name], classes)
            fields |= merged.fields
            methods |= merged.methods
            bases += merged.bases
        else:
            bases.append(ast.unparse(base))
    form = _form(node, bases)
    if form == "enum":
        members = {
            name: Member(value=ast.unparse(value))
            for part in node.body
            for name, value in assigned(part)
            if value is not None
        }
        return Type(form=form, bases=tuple(bases), members=members, methods=_methods(node))
    fields |= _fields(node)
    methods |= _methods(node)
    if form == "value":
        methods.pop("__init__", None)
    if form == "class" and any(method.abstract for method in methods.values()):
        form = "interface"
    return Type(form=form, bases=tuple(bases), fields=fields, methods=methods)


def _form(node: ast.ClassDef, bases: list[str]) -> Form:
    names = {last_name(ast.parse(base, mode="eval").body) for base in bases}
    if any(name.endswith(("Enum", "Flag")) for name in names):
        return "enum"
    if _dataclass(node) is not None or names & {"NamedTuple", "TypedDict", "BaseModel"}:
        return "value"
    if "Protocol" in names:
        return "protocol"
    return "interface" if "ABC" in names else "class"


def _dataclass(node: ast.ClassDef) -> ast.expr | None:
    return next((one for one in node.decorator_list if last_name(one) == "dataclass"), None)


def _fields(node: ast.ClassDef) -> dict[str, Field]:
    decorator = _dataclass(node)
    keyword = isinstance(decorator, ast.Call) and any(
        option.arg == "kw_only" and ast.unparse(option.value) == "True"
        for option in decorator.keywords
    )
    fields = {}
    for part in node.body:
        kind = ast.unparse(part.annotation) if isinstance(part, ast.AnnAssign) else ""
        if kind.endswith("KW_ONLY"):
            keyword = True
            continue
        for name, value in assigned(part):
            if not name.startswith("_") and name != "model_config":
                fields[name] = Field(type=kind, default=_default(value), keyword=keyword)
    return fields


def _default(value: ast.expr | None) -> str | None:
    if value is None:
        return None
    if isinstance(value, ast.Call) and last_name(value.func) in ("field", "Field"):
        given = {option.arg: option.value for option in value.keywords}
        if "default_factory" in given:
            return f"{ast.unparse(given['default_factory'])}()"
        return ast.unparse(given["default"]) if "default" in given else None
    return ast.unparse(value)


def _methods(node: ast.ClassDef) -> dict[str, Method]:
    return {
        part.name: method_of(part, "method")
        for part in node.body
        if isinstance(part, Function)
        and (not part.name.startswith("_") or part.name in CALLED)
        and not any(last_name(one) == "overload" for one in part.decorator_list)
    }


def method_of(node: Function, form: str) -> Method:
    """Return the signature of a method ("method") or a function ("function")."""
    decorators = [last_name(one) for one in node.decorator_list]
    form = next((OWN_FORM[name] for name in decorators if name in OWN_FORM), form)
    parameters = list(_parameters(node.args))
    if form not in ("function", "static method"):
        del parameters[:1]  # self or cls
    return Method.model_validate(
        {
            "form": form,
            "parameters": tuple(parameters),
            "returns": "" if node.returns is None else ast.unparse(node.returns),
            "abstract": "abstractmethod" in decorators,
            "asynchronous": isinstance(node, ast.AsyncFunctionDef),
        }
    )


def _parameters(args: ast.arguments) -> Iterator[Parameter]:
    positional = [*args.posonlyargs, *args.args]
    missing = [None] * (len(positional) - len(args.defaults))
    for arg, default in zip(positional, [*missing, *args.defaults], strict=True):
        yield _parameter(arg, default)
    if args.vararg is not None:
        yield _parameter(args.vararg, None, stars="*")
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield _parameter(arg, default, keyword=True)
    if args.kwarg is not None:
        yield _parameter(args.kwarg, None, stars="**")


def _parameter(
    arg: ast.arg, default: ast.expr | None, *, keyword: bool = False, stars: str = ""
) -> Parameter:
    return Parameter(
        name=stars + arg.arg,
        type="" if arg.annotation is None else ast.unparse(arg.annotation),
        default=None if default is None else ast.unparse(default),
        keyword=keyword,
    )
