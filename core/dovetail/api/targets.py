"""Importing what a spec names, "package.module:name", and making components of it: in the engine's
process for `dovetail.registry`, in workers for `dovetail.api.executor`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from dovetail.api.start_phases import phase
from dovetail.base.checks import did_you_mean
from dovetail.errors import DovetailError, PluginError, describe_raised

# makes the error from a text, with the name of the component before it
Wrong = Callable[[str], PluginError]


def import_target(target: str, wrong: Wrong) -> Any:
    """Import and return the object "package.module:name". Raises what `wrong` makes of any error,
    with the line of the package that raised it."""
    module, _, name = target.partition(":")
    try:
        with phase("imports"):
            imported = import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too
        raise wrong(
            f"importing {module} failed: {describe_raised(error, package_of(target))}"
        ) from error
    try:
        return getattr(imported, name)
    except Exception as error:  # a module's own __getattr__ can raise anything
        raise wrong(
            f"{target}: {describe_raised(error, package_of(target))}{did_you_mean(name, vars(imported))}"
        ) from error


def make_component(
    cls: Callable[[Any, Any], Any], options: Any, context: Any, target: str, wrong: Wrong
) -> Any:
    """Return `cls(options, context)`. An error that isn't a `DovetailError` becomes what `wrong`
    makes of it."""
    try:
        return cls(options, context)
    except DovetailError:
        raise
    except Exception as error:
        raise wrong(f"making it failed: {describe_raised(error, package_of(target))}") from error


def package_of(target: str) -> str:
    """Return the top-level package of "package.module:name"."""
    return target.partition(":")[0].partition(".")[0]
