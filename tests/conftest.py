"""Settings of every test: one torch thread where torch is used, so that tests can run in parallel
and results don't depend on the machine; and slow tests only on request."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import cache
from importlib.util import find_spec
from inspect import isfunction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import _pytest.logging
import pytest
import typer.main
from _pytest.logging import catching_logs
from _pytest.runner import runtestprotocol
from hypothesis import given, settings
from hypothesis.strategies import floats, integers, text

from tests.budget import Budget, pytest_terminal_summary  # noqa: F401 (a hook)
from tests.frozen import count_once, freeze_what_lasts, uncollected
from tests.preloaded import MODULES, SLOW_MODULES, Preloaded
from tests.slow_checks import is_tried_with_another, reason_for, without_a_case
from tests.support import FULL, PROFILE, examples

os.environ.setdefault("OMP_NUM_THREADS", "1")
# a loaded machine is no fault; as many as `examples(quick=100, full=100)` has
settings.register_profile("dovetail", deadline=None, max_examples=100 if FULL else 25)
settings.load_profile("dovetail")


# half a minute and more, and late in the alphabet
LONG = (
    "test_interpreter.py",
    "models/test_transformers_layers.py",
    "server/test_images.py",
    "server/test_processes.py",
    "structured/test_same_tokens.py",
)


# `tests/without_torch.sh` writes names of tests that have passed to this file; then CI doesn't run
# them again, with torch, which they don't use.
PASSED_TO = os.environ.get("DOVETAIL_TEST_PASSED_TO")
PASSED = os.environ.get("DOVETAIL_TEST_PASSED")


BUDGET = os.environ.get("DOVETAIL_TEST_BUDGET", "1")
MEASURED = PROFILE == "quick" and BUDGET != "off"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if (
        PASSED_TO
        and report.when == "call"
        and report.passed
        and not os.environ.get("PYTEST_XDIST_WORKER")
    ):
        with open(PASSED_TO, "a", encoding="utf-8") as passed:
            passed.write(f"{report.nodeid}\n")


def is_of_profile(marks: set[str]) -> bool:
    """Whether `make test` (quick), `make test-slow` (slow) or `make test-full` (full: all) runs a
    test."""
    if FULL:
        return True
    return "full" not in marks and ("slow" in marks) == (PROFILE == "slow")


def names_tests(config: pytest.Config) -> bool:
    """Whether the command line names single tests."""
    return any("::" in arg for arg in config.args)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[Any] | None:
    """Make no items, one for each case, of a function that the profile leaves out: a third of all
    would be made in vain. One that the command line names is said to be deselected."""
    if FULL or not isfunction(obj) or not isinstance(collector, pytest.Module):
        return None
    if names_tests(collector.config):
        return None
    marks = {mark.name for mark in getattr(obj, "pytestmark", ())}
    left_out = "full" in marks or (PROFILE != "slow" and "slow" in marks)
    return [] if left_out else None


def pytest_configure(config: pytest.Config) -> None:
    if MEASURED and not getattr(config.option, "collectonly", False):
        config.pluginmanager.register(Budget(float(BUDGET)), "budget")
    if hasattr(catching_logs, "attached_loggers"):  # since pytest 9.1
        _pytest.logging.catching_logs = CatchingLogs


def leave_unjudged(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Expect no verdict of a suite whose checks belong to several profiles; `make test-full` gives
    one for each."""
    suites = config.pluginmanager.get_plugin("dovetail-suites")
    for item in items:
        if suites is not None and item.parent is not None:
            suites.leave_unjudged(item.parent.nodeid)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # with `-n`, nobody is left alone with one at the end
    items.sort(key=lambda item: not item.nodeid.partition("::")[0].endswith(LONG))
    none = [] if names_tests(config) else without_a_case(item.nodeid for item in items)
    if none:
        raise pytest.UsageError(f"tests/quick_cases.py has no id of {none}")
    kept = []
    other = []
    for item in items:
        if (reason := reason_for(item.nodeid)) is not None:
            item.add_marker(pytest.mark.slow(reason))
        marks = list(item.iter_markers())
        if any(mark.name == "slow" for mark in marks) and is_tried_with_another(item.nodeid):
            item.add_marker(pytest.mark.full)
            marks = list(item.iter_markers())
        if any(mark.name == "slow" and not mark.args for mark in marks):
            raise pytest.UsageError(f"marked slow without a reason: {item.nodeid}")
        (kept if is_of_profile({mark.name for mark in marks}) else other).append(item)
    config.hook.pytest_deselected(items=other)
    items[:] = kept
    leave_unjudged(config, other)
    if PASSED:
        passed = set(Path(PASSED).read_text(encoding="utf-8").splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]
    if PROFILE == "brief":  # each test once, with the first of its parameters
        first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
        items[:] = [item for item in items if first[item.nodeid.partition("[")[0]] is item]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, whole files go to workers, in their order: at the end there are short ones."""
    from tests.files_to_workers import FilesToWorkers

    if config.option.dist != "load":
        return None  # another way was asked for
    config.option.loadscopereorder = False
    return FilesToWorkers(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """While tests are imported the garbage collector would look through them again and again, and
    find little; and afterwards, too."""
    with uncollected():
        result = yield
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """With `-n`, report a setup or teardown only if it didn't pass: each report is a message to the
    controller, and three for each test took as long as the median test."""
    find_loggers_apart()
    if not os.environ.get("PYTEST_XDIST_WORKER"):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


APART: list[logging.Logger] = []  # loggers that don't propagate, as of a test's beginning


def find_loggers_apart() -> None:
    APART[:] = (
        logger
        for logger in logging.root.manager.loggerDict.values()
        if isinstance(logger, logging.Logger) and not logger.propagate
    )


class CatchingLogs(catching_logs[Any]):
    """pytest's, which looks through all loggers six times a test for those that don't propagate.
    There are thousands."""

    __slots__ = ()

    def __enter__(self) -> Any:
        if self.level is not None:
            return super().__enter__()
        for logger in (logging.root, *APART):
            logger.addHandler(self.handler)
            self.attached_loggers.append(logger)
        return self.handler


def let_loggers_propagate() -> None:
    """pytest adds its handlers to each logger that doesn't propagate, three times a test. torch
    makes more than fifty below its own, which took half of the time of a test that does little."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Between classes and files, freeze what tests have imported late."""
    if nextitem is not None and nextitem.parent is not item.parent:
        freeze_what_lasts()
        let_loggers_propagate()


@pytest.fixture(autouse=True, scope="session")
def nothing_is_kept_for_the_next_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.getbasetemp() / "cache")


@pytest.fixture(autouse=True, scope="session")
def an_engine_has_run(nothing_is_kept_for_the_next_run: None) -> None:
    """Import what an engine imports late, so that no test's budget pays for it because it is the
    first."""
    if not MEASURED or find_spec("torch") is None:
        return
    with uncollected():
        import transformers

        from dovetail import LLM, SamplingParams, Structured

        assert transformers.BertModel  # the first name of a model reads those of all
    with LLM("demo", max_model_len=64, kv_cache_memory="64MiB") as llm:
        llm.generate(
            "R", SamplingParams(max_tokens=2, structured=Structured(regex="[a-z]+")), use_tqdm=False
        )
    freeze_what_lasts()
    let_loggers_propagate()


@pytest.fixture(autouse=True, scope="session")
def hypothesis_has_its_tables() -> None:
    """Let Hypothesis compute the categories of all characters, and collect the constants of
    imported modules: both take more than a test's budget. It keeps them in the checkout, so a fresh
    one pays."""

    @examples(quick=100, full=100)
    @given(text(), integers(), floats())
    def draw(one: str, two: int, three: float) -> None:
        pass

    draw()


@pytest.fixture(autouse=True, scope="session")
def imported_things_are_counted_once() -> Iterator[None]:
    with count_once():
        yield


@pytest.fixture(autouse=True, scope="session")
def commands_are_read_once() -> Iterator[None]:
    """Typer reads the signatures of all commands twice for each command that a test runs."""
    with patch.object(
        typer.main, "get_params_from_function", cache(typer.main.get_params_from_function)
    ):
        yield


@pytest.fixture(autouse=True, scope="session")
def certificates_are_read_once() -> Iterator[None]:
    """Each new client of httpx or openai reads all certificates for TLS, which takes longer than
    most tests that make one."""
    with patch.object(ssl, "create_default_context", cache(ssl.create_default_context)):
        yield


@pytest.fixture(autouse=True, scope="session")
def shared_template_processes() -> Iterator[None]:
    """Engines of all tests share the processes that render chat templates."""
    from dovetail.front import chat_rendering
    from tests.shared_processes import SharedProcesses

    with (
        closing(SharedProcesses()) as shared,
        patch.object(chat_rendering, "WorkerProcesses", shared),
    ):
        yield


@pytest.fixture(scope="module")
def own_template_processes() -> Iterator[None]:
    """Engines of a module's later tests start those processes themselves."""
    from dovetail.front import chat_rendering, worker_processes

    with patch.object(chat_rendering, "WorkerProcesses", worker_processes.WorkerProcesses):
        yield


@pytest.fixture(scope="session")
def preloaded() -> Iterator[Preloaded]:
    """Starts programs in Python that import torch or Dovetail, without the time of these
    imports."""
    pytest.importorskip("torch")
    modules = MODULES if PROFILE == "quick" else (*MODULES, *SLOW_MODULES)
    with closing(Preloaded(modules)) as process:
        yield process


@pytest.fixture
def ranks_in_threads() -> Iterator[None]:
    """Ranks of the executor `tensor` are threads of this process, but in the full profile: for
    tests of what they compute."""
    if FULL:
        yield
        return
    from tests.executors.rank_threads import ranks_as_threads

    with ranks_as_threads():
        yield


@pytest.fixture(scope="module")
def shared_image_processes() -> Iterator[None]:
    """Engines of a module's tests share the processes that prepare images, which may take any time:
    a busy machine is no reason to refuse an image. The limit of processor time remains."""
    pytest.importorskip("torch")
    from dovetail.front.media import processes
    from tests.shared_processes import SharedProcesses

    with (
        closing(SharedProcesses()) as shared,
        patch.object(processes, "WorkerProcesses", shared),
        patch.object(processes, "OVERTIME_S", 600.0),
    ):
        yield


@pytest.fixture
def sockets_with_a_time_limit() -> Iterator[None]:
    """New sockets have one, as a program sets it that fetches things: to the system they are then
    ones that never block."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(600.0)
    yield
    socket.setdefaulttimeout(before)


@pytest.fixture
def forgetting_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels may be found unavailable: that is forgotten afterwards."""
    from dovetail.nn.kernels import launch

    monkeypatch.setattr(launch, "_unavailable", {})


@pytest.fixture(autouse=True)
def no_kernel_is_missed() -> Iterator[None]:
    """A kernel that can't be had is replaced by its twin, with which a test of the kernel would
    pass."""
    yield
    if (launch := sys.modules.get("dovetail.nn.kernels.launch")) is not None:
        assert [str(error) for _, error in launch._unavailable.values()] == []
