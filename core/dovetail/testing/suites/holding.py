"""Finds everything reachable from a component, for checks that it drops requests that have
ended, and doesn't grow."""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType

from dovetail.engine.live_request import LiveRequest


def reachable(component: object) -> Iterator[tuple[str, object]]:
    """Yield the requests and strings reachable from a component, each with the attribute path.
    Requests aren't searched further, since they belong to the engine."""
    for path, value in _objects(component):
        if isinstance(value, LiveRequest | str):
            yield path, value


def size_of(component: object) -> int:
    """Return the bytes of all objects that are reachable from a component. Containers count with
    their entries, since small numbers are one object wherever they are."""
    return sum(sys.getsizeof(value, 0) for _, value in _objects(component))


def _objects(component: object) -> Iterator[tuple[str, object]]:
    """Yield the objects reachable from a component, each with the attribute path."""
    code = (type, ModuleType, BuiltinFunctionType)
    held = [(f"self.{name}", value) for name, value in vars(component).items()]
    held += [
        (f"{cls.__name__}.{name}", value)
        for cls in type(component).__mro__
        for name, value in vars(cls).items()
    ]
    seen = {id(component)}
    queue = deque(held)
    while queue:
        path, value = queue.popleft()
        if id(value) in seen or isinstance(value, code):
            continue
        seen.add(id(value))
        yield path, value
        if isinstance(value, LiveRequest | str):
            continue
        if isinstance(value, FunctionType):  # not the module that it is in
            queue.extend(
                (path, part) for part in (value.__closure__, value.__defaults__, value.__dict__)
            )
        else:
            if isinstance(value, dict):
                # not reported by the garbage collector
                queue.extend((path, key) for key in value if isinstance(key, str))
            queue.extend((path, part) for part in gc.get_referents(value))
