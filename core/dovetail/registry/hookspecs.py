"""The hooks of a plugin. A plugin is a module (or an object) that an entry point in the group `dovetail.plugins` names:

    [project.entry-points."dovetail.plugins"]
    fair = "dovetail_fair"

It implements at least one of these functions, marked with `dovetail.api.hookimpl`. All of them only declare: they name what there is, as
strings, and import nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from dovetail.api.component import BundledModel, CommandSpec, ComponentSpec

hookspec = pluggy.HookspecMarker("dovetail")


@hookspec
def dovetail_components() -> Iterable[ComponentSpec]:
    """The components that this plugin offers. Offering one activates nothing: `engine.yaml` names what runs.

    Example:
        ```python
        from dovetail.api import ComponentSpec, hookimpl

        @hookimpl
        def dovetail_components():
            yield ComponentSpec(kind="scheduler", name="fair", target="dovetail_fair.policy:Fair", options="dovetail_fair.policy:FairOptions")
        ```
    """
    raise NotImplementedError


@hookspec
def dovetail_commands() -> Iterable[CommandSpec]:
    """Subcommands of the `dovetail` command, imported when called.

    Example:
        ```python
        from dovetail.api import CommandSpec, hookimpl

        @hookimpl
        def dovetail_commands():
            yield CommandSpec(name="fair-report", target="dovetail_fair.report:app", summary="Who got how much")
        ```
    """
    raise NotImplementedError


@hookspec
def dovetail_models() -> Iterable[BundledModel]:
    """Model directories that this plugin's distribution ships.

    Example:
        ```python
        from dovetail.api import BundledModel, hookimpl

        @hookimpl
        def dovetail_models():
            yield BundledModel(name="tiny", package="dovetail_fair", path="models/tiny")
        ```
    """
    raise NotImplementedError
