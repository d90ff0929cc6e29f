"""Process in which `dovetail.testing.runner` runs a suite: pytest over a generated class, with
progress written to a ledger file.

The ledger has JSON lines: of a component with a name {"event": "found", "component"}; then
{"event": "expected", "expected"}; for each check {"event": "started", "id"} and {"event":
"outcome", "id", "outcome"}; last {"event": "ended"}. Instead {"event": "misused", "error",
"message"} if the component or one of its options doesn't exist, or {"event": "broken", "message"}
if it can't be loaded. A fatal signal, which the runner also sends to a hanging check, leaves a
traceback in the trace file.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import pytest

from dovetail.api.component import Kind
from dovetail.errors import ConfigError, DovetailError, PluginError, describe
from dovetail.registry.doctor.process import limit_files
from dovetail.testing import frames
from dovetail.testing.binding import installed
from dovetail.testing.checks import fail
from dovetail.testing.suite import Suite

COMMAND = "import sys; from dovetail.testing.child import main; main(sys.argv[1])"
MODULE = (
    "from dovetail.testing.child import generated_suite\n\nTestComponent = "
    "generated_suite({job!r})\n"
)
PYTEST = [
    "-p",
    "dovetail.testing.pytest_plugin",
    "-p",
    "no:terminal",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:faulthandler",
    "--noconftest",
    "-c",
]
REGULAR = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """Arguments of a suite's process. `component`: a name, or "package.module:Class" if `is_class`.
    `done`: checks to skip."""

    kind: Kind
    component: str
    is_class: bool
    options: Mapping[str, Any]
    waivers: Mapping[str, Mapping[str, str]]
    settings: Mapping[str, Any]  # only those of the kind's suite
    folder: str  # folder of the files below
    path: list[str]  # sys.path
    done: list[str] = field(default_factory=list)

    @property
    def ledger(self) -> Path:
        return Path(self.folder, "ledger.jsonl")

    @property
    def trace(self) -> Path:
        return Path(self.folder, "trace.txt")

    @property
    def module(self) -> Path:
        return Path(self.folder, "test_component.py")

    def working_folder(self) -> Path:
        """Return a writable working folder for the component; the user's may be read-only."""
        folder = Path(self.folder, "work")
        folder.mkdir(exist_ok=True)
        return folder

    def write(self) -> Path:
        path = Path(self.folder, "job.json")
        path.write_text(json.dumps(asdict(self)))
        self.module.write_text(MODULE.format(job=str(path)))
        return path

    @classmethod
    def read(cls, path: str) -> SuiteRun:
        return cls(**json.loads(Path(path).read_text()))


def main(job_path: str) -> None:
    """Run the checks of a job that aren't done."""
    job = SuiteRun.read(job_path)
    sys.path[:] = job.path
    limit_files()
    with job.trace.open("w") as trace, job.ledger.open("a", buffering=1) as file:
        faulthandler.enable(trace)  # doesn't need the interpreter, so that a loop in C shows, too
        ledger = Ledger(job, file)
        if not ledger.load(job_path):
            return
        gc.freeze()  # what was imported lasts: collections needn't look through it
        config = Path(job.folder, "pytest.ini")
        config.write_text("[pytest]\n")
        code = pytest.main([*PYTEST, str(config), str(job.module)], plugins=[ledger])
        if code not in REGULAR:  # interrupted, possibly by the component
            sys.exit(f"pytest was ended: {code!r}")
        ledger.tell("ended")


def generated_suite(job_path: str) -> Any:
    """Return the class that pytest collects."""
    from dovetail.testing.checks import Waiver
    from dovetail.testing.suites import suite_for

    job = SuiteRun.read(job_path)
    component: Any = _load(job.component) if job.is_class else job.component
    waivers = {id: Waiver(**values) for id, values in job.waivers.items()}
    own = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in job.settings.items()
    }
    body = {
        "component": component,
        "options": dict(job.options),
        "waivers": waivers,
        "time_limit_s": None,
        "__module__": job.module.stem,
    }
    return type("TestComponent", (suite_for(job.kind),), own | body)


def _load(target: str) -> Any:
    module, _, path = target.partition(":")
    value: Any = import_module(module)
    for name in path.split("."):
        value = getattr(value, name)
    return value


class Ledger:
    """pytest plugin that writes the ledger and skips checks that are done."""

    def __init__(self, job: SuiteRun, file: IO[str]) -> None:
        self.job = job
        self.file = file
        self.process = os.getpid()

    def tell(self, event: str, **values: Any) -> None:
        if os.getpid() != self.process:
            os._exit(1)  # a component has forked this process, and the child returned here
        self.file.write(json.dumps({"event": event, **values}) + "\n")

    def load(self, job_path: str) -> bool:
        """Load the component first, so that a failure is reported once instead of by every
        check."""
        try:
            suite = generated_suite(job_path)()
            misuse = _wrong_settings(suite, self.job) or (
                None if self.job.is_class else _misuse(suite, self.job)
            )
            if misuse is None and not self.job.is_class:
                found = suite.resolved
                self.tell(
                    "found",
                    component={
                        "distribution": found.distribution,
                        "version": found.version,
                        "written_for": found.spec.api,
                    },
                )
            if misuse is None:
                _ = suite.component_class
        except BaseException as error:  # SystemExit too
            message = (
                str(error)
                if isinstance(error, DovetailError)
                else describe(error) + frames.of_error(error)
            )
            self.tell("broken", message=message)
            return False
        if misuse is not None:
            self.tell("misused", error=type(misuse).__name__, message=str(misuse))
        return misuse is None

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        watch = config.pluginmanager.get_plugin("dovetail-suites")
        for expected in watch.expected.values():
            self.tell("expected", expected=expected.to_json())
        items[:] = [item for item in items if item.function.check.id not in self.job.done]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Generator[None, Any, Any]:
        id = item.function.check.id
        self.tell("started", id=id)
        result = yield
        outcome = item.config.pluginmanager.get_plugin("dovetail-suites").outcomes[
            item.parent.nodeid
        ][id]
        self.tell("outcome", id=id, outcome=asdict(outcome))
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self) -> Generator[None, Any, Any]:
        """Let an interrupt fail the check like any other error: only the component can interrupt
        this process."""
        try:
            return (yield)
        except (KeyboardInterrupt, pytest.exit.Exception) as error:
            fail(f"the check broke off: {describe(error)}", error)


def _wrong_settings(suite: Any, job: SuiteRun) -> DovetailError | None:
    """Return the first setting that the suite of the kind doesn't have, as an error."""
    known = sorted(suite.settings - Suite.settings)
    wrong = next((name for name in job.settings if name not in known), None)
    return (
        None
        if wrong is None
        else ConfigError(
            f"the suite of kind {job.kind} has no setting {wrong!r}; it has: "
            f"{', '.join(known) or 'none'}"
        )
    )


def _misuse(suite: Any, job: SuiteRun) -> DovetailError | None:
    """Return the reason why the component can't be tested: it doesn't exist, or doesn't have these
    options. Broken options are left to a check. Raises `PluginError` if a plugin is at fault: one
    that failed to load may provide it, or it targets another api version."""
    try:
        resolved = suite.resolved
    except PluginError as error:
        registry = installed(tuple(sys.path))
        offered = [
            c
            for c in registry.components(job.kind)
            if job.component in (c.spec.name, c.qualified_name)
        ]
        if len(offered) == 1 or (registry.failures and not offered):
            raise
        return error
    try:
        resolved.validate_options()
    except ConfigError as error:
        return error
    except PluginError:
        pass
    return None
