"""Finds everything reachable from a component, for checks that it drops requests that have
ended, and doesn't grow."""

from __future__ import annotations

import gc
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, ModuleType, UnionType

from dovetail.engine.live_request import LiveRequest
from dovetail.testing.checks import fail

DOUBLINGS = 3  # of the use, for a component whose size still grows


def reachable(
    component: object, kinds: type | UnionType = LiveRequest | str
) -> Iterator[tuple[str, object]]:
    """Yield the objects of these kinds, by default requests and strings, that are reachable from a
    component, each with the attribute path. Requests aren't searched further, since they belong to
    the engine."""
    for path, value in _objects(component):
        if isinstance(value, kinds):
            yield path, value


def size_of(component: object) -> int:
    """Return the bytes of all objects that are reachable from a component. Containers count with
    their entries, since small numbers are one object wherever they are."""
    return sum(sys.getsizeof(value, 0) for _, value in _objects(component))


def require_bounded(
    component: object, use: Callable[[int], None], times: int, bytes_allowed: int, what: str
) -> None:
    """Require that the size of a component is bounded. `use` uses it a number of times: at first
    `times`, and again as often. If it has grown by more than `bytes_allowed` in that, it may be
    filling a buffer of fixed size, so the use is doubled some times. Raises `CheckFailed` if it
    still grows as before then. `what`: it was used for.
    """
    use(times)
    used = times
    sizes = [size_of(component)]
    for _ in range(1 + DOUBLINGS):
        use(used)
        used *= 2
        sizes.append(size_of(component))
        if sizes[-1] - sizes[-2] <= bytes_allowed:
            return
    fail(f"{what}: after {times} times, and each time twice as many, it keeps {sizes} bytes")


def _objects(component: object) -> Iterator[tuple[str, object]]:
    """Yield the objects reachable from a component, each with the attribute path. Of its module,
    that is what its functions refer to."""
    # a logger leads to everybody's handlers, and their records
    others = (type, ModuleType, BuiltinFunctionType, logging.Logger)
    own_module = type(component).__module__
    seen = {id(component)}
    queue = deque(_attributes(component))
    while queue:
        path, value = queue.popleft()
        if id(value) in seen or isinstance(value, others):
            continue
        seen.add(id(value))
        yield path, value
        if isinstance(value, LiveRequest | str):
            continue
        if isinstance(value, FunctionType):  # not the module that it is in
            held = (value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__)
            queue.extend((path, part) for part in held)
            if value.__module__ == own_module:
                queue.extend(_globals(value))
        else:
            if isinstance(value, dict):
                # not reported by the garbage collector
                queue.extend((path, key) for key in value if isinstance(key, str | bytes))
            queue.extend((path, part) for part in gc.get_referents(value))


def _attributes(component: object) -> Iterator[tuple[str, object]]:
    """Yield the attributes of a component, in its slots too, and those of its classes."""
    for name, value in vars(component).items():
        yield f"self.{name}", value
    for cls in type(component).__mro__:
        for name, value in vars(cls).items():
            if isinstance(value, MemberDescriptorType):
                yield f"self.{name}", getattr(component, name, None)
            else:
                yield f"{cls.__name__}.{name}", value


def _globals(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the variables of its module that a function names."""
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield f"{function.__module__}.{name}", function.__globals__[name]
