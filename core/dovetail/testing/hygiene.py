"""Checks for components of all kinds: they must be declared, constructed and sent to worker
processes correctly."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import pickle

from pydantic import ValidationError

from dovetail import api
from dovetail.errors import describe
from dovetail.registry.contract.faults import mismatch
from dovetail.registry.resolved import BASE_CLASSES
from dovetail.testing.binding import Binding
from dovetail.testing.checks import check, fail, require
from dovetail.testing.processes import run_python

UNKNOWN_KEY = "no_component_has_this_option"

# Loads a plugin's entry point and calls its hook; fails if torch is imported. argv: distribution,
# entry point.
_DECLARE = """
import importlib.abc, importlib.metadata, sys
tried = []
class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers"):
            tried.append(name)
            raise ImportError(name + " must not be imported while a plugin declares what it offers")
sys.meta_path.insert(0, Watch())
points = importlib.metadata.distribution(sys.argv[1]).entry_points.select(group="dovetail.plugins", name=sys.argv[2])
list(next(iter(points)).load().dovetail_components())
sys.exit("it imported " + ", ".join(tried) if tried else 0)
"""

# Start of a spawned worker: imports the class, and unpickles its options.
_SPAWN = """
import importlib, pickle, sys
module, path, options = pickle.load(sys.stdin.buffer)
value = importlib.import_module(module)
for name in path.split("."):
    value = getattr(value, name)
pickle.loads(options)
"""


class Hygiene(Binding):
    """Checks that a component can be found, configured and started in another process."""

    @check("hygiene.declaration", since="1.0", capability="declared")
    def test_declaration(self) -> None:
        """Declaring components raised, or imported torch or transformers. The entry point's module
        should hold only strings and small values: move imports of torch to the modules that
        `target` and `options` name."""
        origin = self.resolved.origin
        run_python(
            _DECLARE,
            b"",
            f"declaring what plugin {origin.id} offers failed",
            origin.distribution,
            origin.entry_point,
        )

    @check("hygiene.capabilities", since="1.0")
    def test_capabilities(self) -> None:
        """The component doesn't declare its capabilities in its kind's terms. Give the class
        `capabilities`, an instance of the dataclass in `dovetail.api` for its kind."""
        base = getattr(api, BASE_CLASSES[self.kind])
        if not hasattr(base, "capabilities"):
            return  # a drafter has none
        wanted = type(base.capabilities)
        value = getattr(self.component_class, "capabilities", None)
        require(
            isinstance(value, wanted),
            f"{self.component_class.__name__}.capabilities is {value!r}, expected "
            f"{wanted.__name__}(…)",
        )
        declared = (
            f"{field.name}={getattr(self.capabilities, field.name)!r}"
            for field in dataclasses.fields(wanted)
        )
        self.note(f"capabilities: {', '.join(declared)}")

    @check("hygiene.options", since="1.0")
    def test_options(self) -> None:
        """The options accept an unknown key, so a misspelled one would be ignored. Give the model
        `model_config = ConfigDict(extra="forbid")`."""
        self.make_options()
        try:
            self.options_model.model_validate({**self.options, UNKNOWN_KEY: 1})
        except ValidationError as error:
            refused = any(UNKNOWN_KEY in problem["loc"] for problem in error.errors())
            require(
                refused,
                f"{self.options_model.__name__} refuses an unknown key without naming it: {error}",
            )
        else:
            fail(f"{self.options_model.__name__} took the unknown key {UNKNOWN_KEY!r}")

    @check("hygiene.options_pickle", since="1.0")
    def test_options_pickle(self) -> None:
        """The options changed or failed when pickled, as for worker processes. Use plain values and
        importable types."""
        options = self.make_options()
        try:
            again = pickle.loads(pickle.dumps(options))
        except Exception as error:
            fail(f"{options!r} can't be pickled: {describe(error)}")
        require(
            type(again) is type(options) and again == options,
            f"pickling turned {options!r} into {again!r}",
        )

    @check("hygiene.spawn", since="1.0")
    def test_spawn(self) -> None:
        """A new process can't import the class or unpickle its options. Define both at the top
        level of a module that can be imported anywhere, without depending on the state of this
        process."""
        require(
            "<" not in self.target,
            f"{self.target} is defined inside a function: no other process can import it",
        )
        run_python(_SPAWN, self.spawn_payload(), f"a new process can't import {self.target}")

    def spawn_payload(self) -> bytes:
        """Return what a new process gets to start the component from."""
        module, _, path = self.target.partition(":")
        return pickle.dumps((module, path, pickle.dumps(self.make_options())))

    @property
    def _contract(self) -> type:
        """The nearest class of `dovetail.api` that the component inherits: its kind's, or one that
        adds callbacks, such as `PrefixCache`."""
        for base in self.component_class.__mro__:
            if base.__module__.startswith("dovetail.api."):
                return base
        return getattr(api, BASE_CLASSES[self.kind])  # type: ignore[no-any-return]

    @check("hygiene.signatures", since="1.0")
    def test_signatures(self) -> None:
        """A method can't be called as its kind's api calls it. Keep the names and the order of
        parameters in `dovetail.api`; additional ones need defaults."""
        base = self._contract
        for name, method in inspect.getmembers(base, inspect.isfunction):
            if name.startswith("_") and name != "__init__":
                continue
            mine = getattr(self.component_class, name)
            require(
                callable(mine),
                f"{self.component_class.__name__}.{name} is {mine!r}, and should be a method",
            )
            if mine is not method and (
                problem := mismatch(inspect.signature(method), inspect.signature(mine))
            ):
                fail(
                    f"{self.component_class.__name__}.{name}{inspect.signature(mine)}: {problem}; "
                    f"the api has {inspect.signature(method)}"
                )

    @check("hygiene.callbacks", since="1.0")
    def test_callbacks(self) -> None:
        """A method is named like a callback, `on_…`, but the kind has no such callback, so it will
        never be called. Fix the spelling; begin the names of helpers with `_`."""
        base = self._contract
        for name in dir(self.component_class):
            if name.startswith("on_") and not hasattr(base, name):
                near = difflib.get_close_matches(
                    name, [known for known in dir(base) if known.startswith("on_")], 1
                )
                fail(
                    f"{self.component_class.__name__}.{name} is never "
                    f"called{f': did you mean {near[0]}?' if near else ''}"
                )
