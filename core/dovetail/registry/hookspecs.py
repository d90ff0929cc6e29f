"""The hooks of a plugin. A plugin is a module (or an object) that an entry point in the group
`dovetail.plugins` names:

    [project.entry-points."dovetail.plugins"]
    fair = "dovetail_fair"

It implements at least one of these functions, marked with `dovetail.api.hookimpl`. They only
declare, in strings, what there is, and import nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from dovetail.api.component import (
    BundledModel,
    CommandSpec,
    ComponentSpec,
    QuantizationSpec,
    RouterSpec,
    RoutesSpec,
)

hookspec = pluggy.HookspecMarker("dovetail")


@hookspec
def dovetail_components() -> Iterable[ComponentSpec]:
    """Return the components that this plugin offers. That activates none of them: `engine.yaml`
    names the ones that run.

    Example:
        ```python
        from dovetail.api import ComponentSpec, hookimpl

        @hookimpl
        def dovetail_components():
            yield ComponentSpec(
                kind="scheduler",
                name="fair",
                target="dovetail_fair.policy:Fair",
                api="1.0",
                options="dovetail_fair.policy:FairOptions",
            )
        ```
    """
    raise NotImplementedError


@hookspec
def dovetail_commands() -> Iterable[CommandSpec]:
    """Return subcommands for the `dovetail` command; each is imported when it is called.

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
    """Return model directories that this plugin's distribution ships.

    Example:
        ```python
        from dovetail.api import BundledModel, hookimpl

        @hookimpl
        def dovetail_models():
            yield BundledModel(name="tiny", package="dovetail_fair", path="models/tiny")
        ```
    """
    raise NotImplementedError


@hookspec
def dovetail_quantizations() -> Iterable[QuantizationSpec]:
    """Return the ways of storing weights that this plugin knows. A checkpoint's `quant_method`
    names the one that it needs.

    Example:
        ```python
        from dovetail.api import QuantizationSpec, hookimpl

        @hookimpl
        def dovetail_quantizations():
            yield QuantizationSpec(name="tiny-bits", target="dovetail_fair.bits:TinyBits", summary="Weights of three bits")
        ```
    """
    raise NotImplementedError


@hookspec
def dovetail_routes() -> Iterable[RoutesSpec]:
    """Return routes and middleware for the server. `dovetail serve --route NAME` adds those of one
    name; others are never imported.

    Example:
        ```python
        from dovetail.api import RoutesSpec, hookimpl

        @hookimpl
        def dovetail_routes():
            yield RoutesSpec(name="haiku", target="dovetail_haiku.routes:make", summary="POST /haiku")
        ```
    """
    raise NotImplementedError


@hookspec
def dovetail_routers() -> Iterable[RouterSpec]:
    """Return routers of replicas for the lab. `--router NAME` selects one; others are never
    imported.

    Example:
        ```python
        from dovetail.api import RouterSpec, hookimpl

        @hookimpl
        def dovetail_routers():
            yield RouterSpec(name="by-client", target="dovetail_fair.router:ByClient", summary="A replica per client")
        ```
    """
    raise NotImplementedError
