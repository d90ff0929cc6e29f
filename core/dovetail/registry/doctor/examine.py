"""`examine`: check each installed plugin in its own process, with a timeout, and report name
collisions. `look_at_machine`: one sentence on the devices available to the ranks of the executor
`tensor`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from packaging.utils import canonicalize_name

from dovetail.api.component import ENTRY_POINT_GROUP
from dovetail.base.where import did_you_mean
from dovetail.errors import PluginError
from dovetail.registry.doctor import probe
from dovetail.registry.doctor.metadata import Diagnosis, Finding, Problem, metadata_findings
from dovetail.registry.doctor.process import TIME_LIMIT_S, ending, event, last_words, run_within
from dovetail.registry.loader import find_plugins, load_plugin
from dovetail.registry.plugin import NAMESPACE, FoundPlugin, LoadedPlugin, PluginOrigin
from dovetail.registry.selection import PluginSelection

SHOWN = 200  # characters of the end of its output
AT_ONCE = min(4, os.cpu_count() or 1)  # processes
ASKS = "dovetail.nn.machine"


def examine(
    only: str | None = None,
    *,
    time_limit_s: float = TIME_LIMIT_S,
    core_commands: Collection[str] = (),
) -> Diagnosis:
    """Examine all third-party plugins, or those of the distribution `only`. Other plugins only
    declare what they offer, to find name collisions; built-in ones do so in this process, as in
    every command. `time_limit_s`: timeout per plugin, as `OwnTime` counts. Plugins denied by
    `DOVETAIL_PLUGINS` aren't imported. `core_commands`: names reserved for Dovetail's own commands.

    Raises `PluginError` if `only` isn't installed.
    """
    only = None if only is None else canonicalize_name(only)
    found = find_plugins().plugins
    selection = PluginSelection().with_environment()
    if only is not None:
        _check_installed(only, found)
    denied = [plugin for plugin in found if selection.denial(plugin.origin)]
    allowed = [plugin for plugin in found if plugin not in denied]

    def concerns(origin: PluginOrigin) -> bool:
        return not origin.built_in if only is None else origin.distribution == only

    def examined(plugin: FoundPlugin) -> _Report:
        if plugin.origin.built_in and not concerns(plugin.origin):
            return offers[plugin.origin]
        return _examine_one(plugin, "use" if concerns(plugin.origin) else "declare", time_limit_s)

    offers = {plugin.origin: _ask(plugin) for plugin in allowed if plugin.origin.built_in}

    with ThreadPoolExecutor(AT_ONCE) as pool:
        reports = list(pool.map(examined, allowed))
    findings = [
        *metadata_findings(only),
        *(finding for report in reports for finding in report.findings),
    ]
    findings += _collisions(reports, core_commands)
    if only is not None:
        findings += _nothing_there(only, found, findings)

    return Diagnosis(
        tuple(plugin.origin for plugin in allowed if concerns(plugin.origin)),
        tuple(
            sorted(
                (finding for finding in findings if concerns(finding.origin)),
                key=lambda finding: finding.origin,
            )
        ),
        tuple(plugin.origin for plugin in denied if concerns(plugin.origin)),
    )


@dataclass(slots=True)
class _Report:
    """The results of one process."""

    origin: PluginOrigin
    findings: list[Finding] = field(default_factory=list)
    # as `probe.offers_of` yields them
    offers: list[tuple[str, str, str]] = field(default_factory=list)


def _ask(plugin: FoundPlugin) -> _Report:
    """Load a built-in plugin in this process, as every command does, and return its offers."""
    loaded = load_plugin(plugin)
    return _Report(
        plugin.origin, offers=[*probe.offers_of(loaded)] if isinstance(loaded, LoadedPlugin) else []
    )


def _examine_one(plugin: FoundPlugin, level: probe.Level, time_limit_s: float) -> _Report:
    with tempfile.TemporaryDirectory(prefix="dovetail-doctor-") as folder:
        report = Path(folder, "report")
        output = Path(folder, "output")
        report.touch()
        command = [sys.executable, "-P", "-m", probe.__name__, plugin.origin.id, str(report), level]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # it would read all entry points, and fail on malformed ones
        environment["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
        with output.open("wb") as sink:
            code = run_within(
                command,
                time_limit_s,
                stdout=sink,
                stderr=sink,
                env=environment,
                start_new_session=True,
            )
        lines = [
            event(line)
            for line in report.read_text(encoding="utf-8", errors="replace").splitlines()
        ]
        return _read(plugin, lines, code, last_words(output), time_limit_s)


def _read(
    plugin: FoundPlugin,
    lines: Sequence[Mapping[str, Any]],
    code: int | None,
    output: Sequence[str],
    time_limit_s: float,
) -> _Report:
    report = _Report(plugin.origin)
    phase = "starting"
    module = plugin.entry_point.module
    ended = False
    for line in lines:
        phase = line.get("phase", phase)
        module = line.get("module", module)
        ended = ended or "end" in line
        if "problem" in line:
            report.findings.append(Finding(plugin.origin, *line["problem"]))
        report.offers += [(what, name, by) for what, name, by in line.get("offers", ())]
    if not ended:
        said = f"; its last words: {output[-1][-SHOWN:]}" if output else ""
        report.findings.append(
            Finding(plugin.origin, *_unfinished(module, phase, code, said, time_limit_s))
        )
    elif output and not any(finding.problem == "prints" for finding in report.findings):
        what = f"it writes to the process's output: {probe.short(' '.join(output))}"
        report.findings.append(
            Finding(
                plugin.origin,
                "prints",
                what,
                "log with the logging module, and only once something of it runs",
            )
        )
    return report


def _unfinished(
    module: str, phase: str, code: int | None, said: str, time_limit_s: float
) -> Problem:
    if code is None:
        remedy = (
            f"python -X faulthandler -c 'import {module}' and Ctrl-C show where it waits; "
            f"--time-limit gives it longer"
        )
        return (
            "hangs",
            f"{phase} took longer than {time_limit_s:g} s, not counting time when others had the "
            f"CPU{said}",
            remedy,
        )
    if code < 0:
        return (
            "crashes",
            f"{phase} ended the process {ending(code)}{said}",
            f"python -X faulthandler -c 'import {module}' shows where",
        )
    return (
        "exits",
        f"{phase} ended the process {ending(code)}{said}",
        "neither importing nor declaring may exit",
    )


def _collisions(reports: Sequence[_Report], core_commands: Collection[str]) -> Iterator[Finding]:
    owners: dict[tuple[str, str], list[tuple[PluginOrigin, str]]] = {}
    for report in reports:
        for what, name, by in report.offers:
            owners.setdefault((what, name), []).append(
                (report.origin, f"{report.origin.distribution}:{by}")
            )
    for (what, name), offers in owners.items():
        for origin, full in offers:
            yield from _collision(
                what, name, origin, full, [other for other, _ in offers if other != origin]
            )
            if what == "command" and name in core_commands:
                yield Finding(
                    origin,
                    "name-collision",
                    f"command {name!r} is one of Dovetail's own",
                    f"it is reached as {full}; rename it",
                )


def _collision(
    what: str, name: str, origin: PluginOrigin, full: str, others: Sequence[PluginOrigin]
) -> Iterator[Finding]:
    if what == "bundled model":  # it is always named in full
        others = [other for other in others if other.distribution == origin.distribution]
    if not others:
        return
    told = f"{what} {name!r} is offered by {', '.join(map(str, others))} too"
    if any(other.distribution == origin.distribution for other in others):
        yield Finding(origin, "offered-twice", f"{told}, of the same distribution", "offer it once")
        return
    built_in = any(other.built_in for other in others)
    if what == "path":
        yield Finding(
            origin,
            "name-collision",
            f"{told}; the server refuses to serve both",
            "choose another path, or name the routes of only one with --route",
        )
        return
    used = (
        "the built-in is used unless the other is named in full"
        if built_in
        else "neither is used unless it is named in full"
    )
    remedy = {
        "architecture": f"to use this one, write `model: {{path: …, component: {full}}}` in "
        f"engine.yaml",
        "quantization": f"to use this one, write `quantization: {full}` in engine.yaml",
    }
    yield Finding(
        origin,
        "name-collision",
        f"{told}; {used}",
        remedy.get(what, f"to use this one, write {full}; or rename it"),
    )


def _check_installed(only: str, found: Sequence[FoundPlugin]) -> None:
    try:
        metadata.distribution(only)
    except metadata.PackageNotFoundError:
        known = sorted({plugin.origin.distribution for plugin in found})
        hint = did_you_mean(only, known)
        raise PluginError(
            f"no distribution {only!r} is installed{hint}; with plugins there are "
            f"{', '.join(known) or 'none'}"
        ) from None


def _nothing_there(
    only: str, found: Sequence[FoundPlugin], findings: Sequence[Finding]
) -> Iterator[Finding]:
    told = (
        any(finding.problem == "metadata-unreadable" for finding in findings) or only == NAMESPACE
    )
    if told or any(plugin.origin.distribution == only for plugin in found):
        return
    origin = PluginOrigin(only, "?", metadata.version(only))
    remedy = (
        f'add [project.entry-points."{ENTRY_POINT_GROUP}"] to its pyproject.toml, with a line '
        f'like name = "package", and reinstall it'
    )
    yield Finding(
        origin, "no-plugin", f"it has no entry point in the group {ENTRY_POINT_GROUP}", remedy
    )


def look_at_machine(time_limit_s: float) -> str | None:
    """Return the sentence; None if torch isn't installed. A separate process queries the devices,
    since that imports torch and starts the driver."""
    if find_spec("torch") is None:
        return None
    with TemporaryFile() as told:
        run_within(
            [sys.executable, "-P", "-m", ASKS], time_limit_s, stdout=told, stderr=subprocess.DEVNULL
        )
        told.seek(0)
        offers = event(told.read().decode(errors="replace").strip().rpartition("\n")[2])
    if not offers:
        return f"torch can't say what devices there are: python -m {ASKS} shows why"
    return in_words(offers["gpus"], offers["peers"], offers["backends"])


def in_words(gpus: list[str], peers: bool, backends: list[str]) -> str:
    """Return the sentence for CUDA devices with these names, with or without peer access, and these
    torch.distributed backends."""
    if not gpus:
        return (
            f"no CUDA device; ranks of the executor tensor are processes on the CPU, "
            f"{_sums('gloo', backends)}"
        )
    names = ", ".join(dict.fromkeys(gpus))
    if len(gpus) == 1:
        return f"1 CUDA device ({names}): one rank, so the executor tensor has nothing to split"
    reach = (
        "which can read each other's memory" if peers else "which can't read each other's memory"
    )
    return (
        f"{len(gpus)} CUDA devices ({names}), {reach}; as many ranks of the executor tensor, "
        f"{_sums('nccl', backends)}"
    )


def _sums(backend: str, backends: list[str]) -> str:
    return (
        f"which sum through {backend}"
        if backend in backends
        else f"which can't sum: this torch was built without {backend}"
    )
