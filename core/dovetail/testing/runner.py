"""`run`: runs a suite over a component in a separate process (`dovetail.testing.child`). If that
hangs, exits or crashes, the current check fails, and the remaining ones run in a new process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from dovetail.api.component import API_VERSIONS, KINDS, Kind
from dovetail.base.where import did_you_mean
from dovetail.errors import ConfigError, DovetailError, PluginError
from dovetail.registry.doctor.process import (
    SAMPLED_S,
    TIME_LIMIT_S,
    OwnTime,
    ending,
    event,
    kill,
    last_words,
)
from dovetail.testing import frames
from dovetail.testing.checks import Waiver
from dovetail.testing.child import COMMAND, SuiteRun
from dovetail.testing.ledger import Expected, Finding, Outcome, Verdict, judge

MAX_DEATHS = 3  # deaths of the process, after which the remaining checks are abandoned
GRACE_S = 10.0  # time for a process to write where it hangs
POLL_S = 0.02
LOADING = "loading"  # instead of a check's id
OUTPUT_LINES = 5  # number of last output lines to show


def run(
    kind: Kind,
    component: str | type[Any],
    options: Mapping[str, Any] | None = None,
    *,
    waivers: Mapping[str, Waiver] | None = None,
    time_limit_s: float = TIME_LIMIT_S,
    settings: Mapping[str, Any] | None = None,
) -> Verdict:
    """Run all checks of a kind over one component and return the verdict. The component runs in
    another process, and its output is hidden.

    `component`: its name, or a class at the top level of a module. `time_limit_s`: timeout of each
    check and of loading, without the time that the process waits for a CPU. `settings`: further
    settings of the kind's suite, such as `variants` for a model. `options` and `settings` must be
    JSON. Raises `PluginError` if there is no such component, and `ConfigError` if the options or
    settings are unknown or not JSON; the verdict reports any other error.
    """
    if kind not in KINDS:
        raise PluginError(
            f"unknown kind {kind!r}{did_you_mean(kind, KINDS)}; kinds are {', '.join(KINDS)}"
        )
    name = (
        f"{component.__module__}:{component.__qualname__}"
        if isinstance(component, type)
        else component
    )
    if name.startswith("__main__:") or "<" in name:
        raise DovetailError(
            f"{name} can't be imported by another process: define it at the top level of a module"
        )
    _check_json("options", options)
    _check_json("settings", settings)
    plain_waivers = {id: asdict(waiver) for id, waiver in (waivers or {}).items()}
    path = [os.path.abspath(entry) for entry in sys.path]
    with tempfile.TemporaryDirectory(prefix="dovetail-test-") as folder:
        job = SuiteRun(
            kind,
            name,
            isinstance(component, type),
            dict(options or {}),
            plain_waivers,
            dict(settings or {}),
            folder,
            path,
        )
        started = time.monotonic()
        runs = _Run(job, time_limit_s)
        return replace(runs.verdict(), **runs.found, seconds=round(time.monotonic() - started, 1))


def _check_json(what: str, values: Mapping[str, Any] | None) -> None:
    try:
        json.dumps(dict(values or {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{what} must be what JSON can hold, since another process gets them: {error}"
        ) from None


class _Run:
    """The processes of one run, and the content of their ledgers."""

    def __init__(self, job: SuiteRun, time_limit_s: float) -> None:
        self.job = job
        self.time_limit_s = time_limit_s
        self.expected: Expected | None = None
        self.outcomes: dict[str, Outcome] = {}
        self.doing = LOADING  # or the id of the current or last check
        self.broken = ""  # reason if it can't be loaded
        # fields of the verdict that name the component's distribution
        self.found: dict[str, Any] = {}
        self.ended = False

    def verdict(self) -> Verdict:
        for _ in range(MAX_DEATHS):
            how = self._process()
            if self.ended:
                break
            if self.expected is None:
                return self._unloadable(self.broken or how)
            self.outcomes[self.doing] = Outcome("failed", how, fault=how, judged=False)
        if self.expected is None:
            return self._unloadable("no check was collected")
        if not self.ended:
            why = f"it didn't run: checks before it ended the process {MAX_DEATHS} times"
            given_up = Outcome("failed", why, fault=why, judged=False)
            self.outcomes = dict.fromkeys(self.expected.checks, given_up) | self.outcomes
        return judge(self.expected, self.outcomes)

    def _unloadable(self, why: str) -> Verdict:
        return Verdict(
            self.job.kind,
            self.job.component,
            API_VERSIONS[self.job.kind],
            0,
            0,
            (),
            (),
            (Finding(LOADING, why),),
            (),
        )

    def _process(self) -> str:
        """Run the remaining checks in a new process. Returns how it ended, for an error message."""
        job = replace(self.job, done=[*self.outcomes])
        path = job.write()
        output = Path(job.folder, "output.txt")
        environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
        environ["PYTHONPATH"] = os.pathsep.join(job.path)
        # Tensors of suites are tiny: threads would only wait for each other, and burn CPU time on a
        # busy machine.
        environ.setdefault("OMP_NUM_THREADS", "1")
        environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(Path(job.folder, ".hypothesis"))
        job.ledger.write_text("")
        with output.open("wb") as sink, job.ledger.open(errors="replace") as ledger:
            process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, str(path)],
                env=environ,
                cwd=job.working_folder(),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
            try:
                hung = self._follow(process, ledger)
            finally:
                kill(process)
        calls = frames.of_dump(job.trace.read_text(errors="replace")) if job.trace.exists() else ""
        if hung:
            longer = "--time-limit, in Python time_limit_s, gives it longer"
            return (
                f"it hung, and was ended after {self.time_limit_s:g} s, without the time when "
                f"others had the CPU; {longer}{calls}"
            )
        return "\n  ".join(
            [
                f"it ended the process, {ending(process.returncode)}{calls}",
                *last_words(output)[-OUTPUT_LINES:],
            ]
        )

    def _follow(self, process: subprocess.Popen[bytes], ledger: IO[str]) -> bool:
        """Read the ledger until the process has ended. Returns True if a check, or loading, timed
        out and the process was killed."""
        own = OwnTime(process.pid)
        asked = time.monotonic()
        unread = ""
        while True:
            over = process.poll() is not None
            if text := ledger.read():
                *lines, unread = (unread + text).split("\n")
                for line in lines:
                    self._heed(event(line))
                own.restart()
            if over or self.ended:
                return False
            if time.monotonic() >= asked + SAMPLED_S:
                asked = time.monotonic()
                if own.elapsed_s() > self.time_limit_s:
                    process.send_signal(signal.SIGABRT)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(GRACE_S)
                    return True
            time.sleep(POLL_S)

    def _heed(self, told: dict[str, Any]) -> None:
        match told.get("event"):
            case "found":
                self.found = told["component"]
            case "expected":
                self.expected = Expected.from_json(told["expected"])
            case "started":
                self.doing = told["id"]
            case "outcome":
                self.outcomes[told["id"]] = Outcome.from_json(told["outcome"])
            case "ended":
                self.ended = True
            case "misused":
                raise {"ConfigError": ConfigError}.get(told["error"], PluginError)(told["message"])
            case "broken":
                self.broken = told["message"]
