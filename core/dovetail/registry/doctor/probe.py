"""Load one plugin and write a report: `python -m dovetail.registry.doctor.probe ID REPORT LEVEL`.

It runs in its own process, since the plugin may exit, hang or flood its output. The report is a
file of JSON lines, flushed one by one: the phase that begins, a problem, offers, or the end.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NoReturn

from dovetail.api.component import KINDS
from dovetail.base.where import did_you_mean
from dovetail.errors import DovetailError, MissingExtraError, PluginError
from dovetail.registry.contract.document import shipped
from dovetail.registry.contract.faults import faults_of
from dovetail.registry.doctor.metadata import Problem
from dovetail.registry.doctor.process import limit_files
from dovetail.registry.loader import HOOKS, find_plugins, load_plugin
from dovetail.registry.plugin import FoundPlugin, LoadedPlugin, PluginFailure
from dovetail.registry.requirements import missing_requirements, pip_line
from dovetail.registry.resolved import (
    ResolvedCommand,
    ResolvedComponent,
    ResolvedQuantization,
    ResolvedRouter,
    ResolvedRoutes,
)
from dovetail.registry.route_making import NotServing, check_paths, make_routes, paths_of

# whether to import only the declarations, or also all that is declared
Level = Literal["declare", "use"]

HEAVY = ("torch", "transformers", "triton")


def main() -> NoReturn:
    """Run the probe and exit immediately, without waiting for a plugin's threads or exit
    handlers."""
    plugin_id, report, level = sys.argv[1:]
    limit_files()
    with Path(report).open("a", encoding="utf-8", buffering=1) as file:

        def write(**fields: Any) -> None:
            file.write(json.dumps(fields) + "\n")

        found = next(plugin for plugin in find_plugins().plugins if plugin.origin.id == plugin_id)
        write(phase="declaring")
        already = set(sys.modules)
        threads = threading.active_count()
        result = load_plugin(found)
        problems = list(_while_declaring(found, result, already, threads))
        for problem in problems:
            write(problem=problem)
        if isinstance(result, LoadedPlugin):
            write(offers=list(offers_of(result)))
            if level == "use":
                for problem in _of_what_it_offers(result, write):
                    write(problem=problem)
        write(end=True)
    os._exit(0)


def _while_declaring(
    found: FoundPlugin, result: LoadedPlugin | PluginFailure, already: set[str], threads: int
) -> Iterator[Problem]:
    new = sys.modules.keys() - already
    if isinstance(result, PluginFailure):
        yield _of_failure(found, result)
    else:
        yield from _unmarked_hooks(sys.modules.get(found.entry_point.module))
    heavy = [name for name in HEAVY if name in new]
    if heavy:
        guilty = sorted(
            name
            for name in new
            if _is_below(name, found.entry_point.module)
            and any(one in vars(sys.modules[name]) for one in heavy)
        )
        where = f", in {', '.join(guilty)}" if guilty else ""
        remedy = (
            "import it in the module that a ComponentSpec's target names, which is loaded "
            "when it is used"
        )
        yield "imports-torch", f"it imports {' and '.join(heavy)} while it declares{where}", remedy
    if result.output:
        yield (
            "prints",
            f"it prints while it declares: {short(result.output)}",
            "log with the logging module, and only once something of it runs",
        )
    if threading.active_count() > threads:
        names = ", ".join(thread.name for thread in threading.enumerate()[threads:])
        yield (
            "leaves-threads",
            f"it has started threads while it declares: {names}",
            "start them when a component is made, and end them with it",
        )


def _of_failure(found: FoundPlugin, failure: PluginFailure) -> Problem:
    error = failure.error
    point = found.entry_point
    if failure.phase == "import":
        return _of_failed_import(found, error, failure.reason)
    if failure.phase == "hooks":
        if type(error).__name__ == "PluginValidationError":
            return (
                "hook-unknown",
                f"{failure.reason}",
                f"hooks are {', '.join(HOOKS)}{_nearest_hook(str(error))}",
            )
        return (
            "hook-missing",
            failure.reason,
            f"define one in {point.value}, marked with @hookimpl from dovetail.api",
        )
    if isinstance(error, SystemExit):
        return (
            "exits",
            f"a hook ended the process: {failure.reason}",
            "a hook only returns what there is",
        )
    return (
        "declaration-wrong",
        failure.reason,
        "see the fields of ComponentSpec, CommandSpec and the other declarations in the reference "
        "of dovetail.api.component",
    )


def _of_failed_import(found: FoundPlugin, error: BaseException, text: str) -> Problem:
    point = found.entry_point
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and f"{point.module}.".startswith(f"{missing}."):
        return (
            "points-nowhere",
            f"its entry point names the module {point.module}, which isn't installed",
            _remedy_for_nowhere(found),
        )
    if isinstance(error, AttributeError) and point.attr and point.module in sys.modules:
        return (
            "points-nowhere",
            f"its entry point names {point.value}: {error}",
            _remedy_for_nowhere(found),
        )
    if isinstance(error, SystemExit):
        return (
            "exits",
            f"importing {point.module} ended the process: {text}",
            "guard what is meant for the command line with if __name__ == '__main__'",
        )
    if isinstance(error, ModuleNotFoundError):
        return (
            "import-fails",
            f"importing {point.module} failed: {text}",
            f"install {error.name}, and name it in the dependencies in pyproject.toml",
        )
    return (
        "import-fails",
        f"importing {point.module} failed: {text}",
        f"python -c 'import {point.module}' shows where",
    )


def _remedy_for_nowhere(found: FoundPlugin) -> str:
    return (
        f"correct the entry point in pyproject.toml, see that the wheel holds the module, and "
        f"reinstall {found.origin.distribution}"
    )


def _nearest_hook(text: str) -> str:
    """Return a hint naming the hook that pluggy's message probably means."""
    words = [word.strip("'\".,:()") for word in text.split()]
    return next(
        (
            near
            for word in words
            if word.startswith("dovetail")
            and word not in HOOKS
            and (near := did_you_mean(word, HOOKS))
        ),
        "",
    )


def _unmarked_hooks(module: Any) -> Iterator[Problem]:
    """Yield a problem for each function that is named (almost) like a hook and isn't marked as one,
    in a module that has marked hooks."""
    for name, value in vars(module).items() if module is not None else ():
        if (
            not callable(value)
            or not name.startswith("dovetail_")
            or getattr(value, "__module__", None) != module.__name__
        ):
            continue
        if name not in HOOKS and (near := did_you_mean(name, HOOKS)):
            yield (
                "hook-unknown",
                f"{name}() is no hook{near}",
                f"hooks are {', '.join(HOOKS)}, marked with @hookimpl",
            )
        elif name in HOOKS and not hasattr(value, "dovetail_impl"):
            yield (
                "hook-unknown",
                f"{name}() isn't marked as a hook, so nobody calls it",
                "mark it with @hookimpl from dovetail.api",
            )


def offers_of(plugin: LoadedPlugin) -> Iterator[tuple[str, str, str]]:
    """Yield (what, name, short name of the declaration) of each offer that can collide with another
    plugin's."""
    yield from ((what, name, name) for what, name in plugin.offers())
    yield from (
        ("architecture", name, spec.name)
        for spec in plugin.components
        for name in spec.architectures
    )


def _of_what_it_offers(plugin: LoadedPlugin, write: Callable[..., None]) -> Iterator[Problem]:
    for spec in sorted(plugin.components, key=lambda spec: (KINDS.index(spec.kind), spec.name)):
        write(
            phase=f"importing what {spec.kind} {spec.name!r} names",
            module=spec.target.partition(":")[0],
        )
        yield from _of_component(ResolvedComponent(spec, plugin.origin))
    for command in plugin.commands:
        write(
            phase=f"importing what command {command.name!r} names",
            module=command.target.partition(":")[0],
        )
        yield from _attempts(
            f"command {command.name!r}", [ResolvedCommand(command, plugin.origin).load]
        )
    for routes in plugin.routes:
        write(
            phase=f"making routes {routes.name!r}",
            module=routes.target.partition(":")[0],
        )
        resolved = ResolvedRoutes(routes, plugin.origin)
        paths = set[tuple[str, str]]()
        yield from _attempts(f"routes {routes.name!r}", [partial(_try_routes, resolved, paths)])
        write(offers=[("path", " ".join(path), routes.name) for path in sorted(paths)])
    yield from _of_classes(plugin, write)
    for model in plugin.models:
        if not _has_model(model.package, model.path):
            yield (
                "target-fails",
                f"bundled model {model.name!r}: there is no {model.path} in {model.package}",
                "ship it as package data",
            )


def _try_routes(offer: ResolvedRoutes, paths: set[tuple[str, str]]) -> None:
    """Make routes, and add their methods and paths, in which the names of parameters don't
    count."""
    made = make_routes(offer, NotServing())
    paths |= {
        (method, re.sub(r"{[^}]*}", "{}", path)) for one in made for method, path in paths_of(one)
    }
    check_paths(offer, made)


def _of_classes(plugin: LoadedPlugin, write: Callable[..., None]) -> Iterator[Problem]:
    """Yield the problems of weight formats, which need torch, and of routers."""
    has_torch = find_spec("torch") is not None
    formats = [ResolvedQuantization(spec, plugin.origin) for spec in plugin.quantizations]
    routers = [ResolvedRouter(spec, plugin.origin) for spec in plugin.routers]
    for offer in (*(formats if has_torch else ()), *routers):
        named = f"{offer.noun} {offer.spec.name!r}"
        module = offer.spec.target.partition(":")[0]
        write(phase=f"importing what {named} names", module=module)
        yield from _attempts(named, [partial(_load_class, offer, named)])


def _load_class(offer: ResolvedQuantization | ResolvedRouter, named: str) -> None:
    if not isinstance(loaded := offer.load(), type):
        raise PluginError(f"{named}: {offer.spec.target} is {loaded!r:.200}, expected a class")


def _of_component(component: ResolvedComponent) -> Iterator[Problem]:
    named = f"{component.spec.kind} {component.spec.name!r}"
    if (mismatch := component.api_problem()) is not None:
        yield (
            "api-mismatch",
            mismatch,
            "docs/plugins/versions.md says which versions run, docs/plugins/upgrade.md what to change",
        )
        return
    faults = faults_of(shipped(), component.spec.kind, component.spec.target)
    for fault in faults:
        yield "contract-broken", f"{named}: {fault.place}: {fault.what}", fault.remedy
    steps = [component.options_model, component.request_extra]
    missing = missing_requirements(component.spec.requires)
    if missing:
        lacks = ", ".join(map(str, missing))
        yield (
            "requirement-missing",
            f"{named} can't be used here: it needs {lacks}",
            pip_line(missing, component.distribution),
        )
    elif not faults:  # otherwise loading it says the same again
        steps.append(component.load)
    yield from _attempts(named, steps)


def _attempts(named: str, steps: Iterable[Any]) -> Iterator[Problem]:
    told = set()  # a module that can't be imported may be wanted by several steps
    for step in steps:
        try:
            step()
        except MissingExtraError as error:
            what, _, pip = str(error).partition("; install with: ")
            yield "requirement-missing", f"{named} can't be used here: {what}", pip
        except DovetailError as error:
            if str(error) not in told:
                yield (
                    "target-fails",
                    f"{named}: {error}",
                    "correct what the spec names, or the module that it names",
                )
            told.add(str(error))


def _has_model(package: str, path: str) -> bool:
    try:
        return resources.files(package).joinpath(path).is_dir()
    except (ImportError, TypeError, OSError):
        return False


def _is_below(name: str, module: str) -> bool:
    top = module.partition(".")[0]
    return name == top or name.startswith(f"{top}.")


def short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 80 else f"{line[:77]}...")


if __name__ == "__main__":
    main()
