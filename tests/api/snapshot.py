"""Text of what plugin authors and users rely on: every public signature of `dovetail.api`, and the
values of a request.

`python -m tests.api.snapshot > tests/api/signatures.txt` writes it anew.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any, ForwardRef

import dovetail.api
from dovetail import end_reason
from dovetail.request import outputs, request, sampling_params

OF_END_REASON = ("EndReason", "FinishReason")
OF_REQUEST = ("Request",)
OF_OUTPUTS = ("CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput")
OF_SAMPLING_PARAMS = ("BeamSearchParams", "OutputKind", "SamplingParams")


def lines() -> Iterator[str]:
    """The snapshot: a section a module, a paragraph a name, in alphabetical order."""
    for module in [
        dovetail.api,
        *(
            import_module(info.name)
            for info in pkgutil.iter_modules(dovetail.api.__path__, "dovetail.api.")
            if not info.ispkg  # internal
        ),
    ]:
        yield from _module(module, _public(module))
    yield from _module(end_reason, OF_END_REASON)
    yield from _module(request, OF_REQUEST)
    yield from _module(outputs, OF_OUTPUTS)
    yield from _module(sampling_params, OF_SAMPLING_PARAMS)


def _public(module: ModuleType) -> list[str]:
    """Return what the module itself defines: classes, functions, constants, aliases; not its
    imports."""
    if module is dovetail.api:
        return []
    names = [name for name in vars(module) if not name.startswith("_") and name != "annotations"]
    return sorted(name for name in names if _is_home(module, vars(module)[name], name))


def _is_home(module: ModuleType, value: Any, name: str) -> bool:
    if inspect.isclass(value) or inspect.isfunction(value):
        return bool(value.__module__ == module.__name__)
    return re.search(rf"^{name}(:.*)? = ", inspect.getsource(module), re.MULTILINE) is not None


def _module(module: ModuleType, names: Any) -> Iterator[str]:
    yield f"## {module.__name__}"
    if hasattr(module, "__all__"):
        yield f"__all__ = {', '.join(sorted(module.__all__))}"
    for name in names:
        value = getattr(module, name)
        yield ""
        if inspect.isclass(value):
            yield from _class(value)
        elif inspect.isfunction(value):
            yield f"def {name}{_signature(value)}"
        else:
            yield f"{name} = {_value(value)}"
    yield ""


def _value(value: Any) -> str:
    if inspect.isfunction(value):
        return value.__name__
    return f"{type(value).__name__}(…)" if " object at " in repr(value) else repr(value)


def _class(cls: type) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in cls.__bases__ if base is not object)
    frozen = dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    yield f"{'frozen ' if frozen else ''}class {cls.__name__}" + (f"({bases})" if bases else "")
    for line in _members(cls):
        yield f"    {line}"


def _members(cls: type) -> Iterator[str]:
    if issubclass(cls, enum.Enum):
        yield from (f"{member.name} = {member.value!r}" for member in cls)
        return
    if dataclasses.is_dataclass(cls):
        yield from (
            f"{field.name}: {_text(field.type)}{_default(field)}"
            for field in dataclasses.fields(cls)
        )
    elif hasattr(cls, "_fields"):  # a named tuple
        yield from (f"{name}: {_text(cls.__annotations__[name])}" for name in cls._fields)
    else:
        yield from (
            f"{name}: {_text(kind)}"
            for name, kind in vars(cls).get("__annotations__", {}).items()
            if not name.startswith("_")
        )
        yield from (
            f"{name} (attribute)"
            for name in vars(cls).get("__slots__", ())
            if not name.startswith("_")
        )
        if "__init__" in vars(cls) and not getattr(cls, "_is_protocol", False):
            yield f"def __init__{_signature(cls.__init__)}"
    yield from _methods(cls)


def _methods(cls: type) -> Iterator[str]:
    for name, value in sorted(vars(cls).items()):
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            yield f"{_abstract(value.fget)}property {name}{_signature(value.fget).replace('(self)', '')}"
        elif inspect.isfunction(value):
            yield f"{_abstract(value)}def {name}{_signature(value)}"
        elif name == "capabilities":
            yield f"{name} = {value!r}"


def _abstract(function: Any) -> str:
    return "abstract " if getattr(function, "__isabstractmethod__", False) else ""


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [
        p.replace(annotation=_Plain(p.annotation)) if p.annotation is not p.empty else p
        for p in signature.parameters.values()
    ]
    returned = signature.return_annotation
    plain = signature.replace(
        parameters=parameters,
        return_annotation=_Plain(returned) if returned is not inspect.Signature.empty else returned,
    )
    return str(plain)


class _Plain:
    """An annotation that prints as written in the source."""

    def __init__(self, annotation: Any) -> None:
        self.annotation = annotation

    def __repr__(self) -> str:
        return _text(self.annotation)


def _text(annotation: Any) -> str:
    if isinstance(annotation, ForwardRef):
        return annotation.__forward_arg__
    return (
        annotation
        if isinstance(annotation, str)
        else getattr(annotation, "__name__", repr(annotation))
    )


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f" = {_value(field.default)}"
    return " = …" if field.default_factory is not dataclasses.MISSING else ""


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()))
