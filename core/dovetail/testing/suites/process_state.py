"""`process_state`: the state of the whole process that components share with each other and with a
server, and must leave as it is."""

from __future__ import annotations

import atexit
import builtins
import decimal
import gc
import json
import locale
import logging
import math
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dovetail.api.observer import Observer, StepFinished
from dovetail.engine.core import EngineCore
from dovetail.engine.live_request import LiveRequest
from dovetail.engine.stats import ObserverHub
from dovetail.request import Request
from dovetail.testing.binding import Binding
from dovetail.testing.checks import fail
from dovetail.testing.elsewhere import answer_elsewhere

_MODULES = (json, logging, math, os, random, signal, socket, subprocess, sys, threading, time)
_ENGINES_CLASSES = (EngineCore, LiveRequest, Request, ObserverHub, StepFinished, Observer)
_SIGNALS = tuple(map(int, signal.valid_signals()))  # the set is made anew for each question
_ENGINES_LOGGERS = {
    name: logging.getLogger(name)
    for name in sorted(logging.root.manager.loggerDict)
    if name.startswith("dovetail.")
}


def process_state(component: type) -> dict[str, object]:
    """Return the state of the process that no component may change, by its name, in a form that can
    be compared. The loggers of the component's own module aren't in it, and of torch nothing unless
    it is imported."""
    return {**_of_the_process(), "the engine's loggers": _engine_loggers(component.__module__)}


class Usable(Protocol):
    """A suite that can use its component once."""

    component_class: type

    def use_once(self) -> None:
        """Make the component and use it, with nothing else that changes the process's state."""
        ...


def require_untouched_by_first_use(suite: Binding, settings: Mapping[str, Any]) -> None:
    """Require that the first uses of a component in a new process change nothing of it, since a
    setting that was changed once looks unchanged afterwards. What the libraries change that it
    imports then doesn't count. `settings`: further attributes of the suite, which is a `Usable`."""
    imported: list[str] = []
    for _ in range(2):
        changed, imported = answer_elsewhere(
            suite,
            f"{__name__}:changes_of_first_use",
            dict(settings),
            imported,
            what="it can't be used in a new process",
            hash_seed="1",
        )
        if not changed:
            return
    fail(f"{', '.join(changed)}: changed by its first use in a process")


def changes_of_first_use(
    bound: Binding, settings: Mapping[str, Any], modules: Iterable[str]
) -> tuple[list[str], list[str]]:
    """Return what the first uses of a component change in this process, once it has imported
    `modules`, and the names of the modules that they import."""
    from dovetail.testing.suites import suite_for

    named = {"component": bound.component, "options": bound.options, **settings}
    suite: Usable = type("Elsewhere", (suite_for(bound.kind),), named)()
    for module in modules:
        with suppress(Exception):
            import_module(module)
    if (torch := sys.modules.get("torch")) is not None:
        torch.rand(())  # seeds torch, which would show
    known = set(sys.modules)
    before = process_state(suite.component_class)
    suite.use_once()
    after = process_state(suite.component_class)
    imported = [name for name in sys.modules if name not in known]
    changed = [name for name, value in after.items() if value != before[name]]
    registered = atexit._ncallbacks()  # noqa: SLF001  # nothing else counts them
    suite.use_once()
    suite.use_once()
    if atexit._ncallbacks() > registered:  # noqa: SLF001
        changed.append("functions registered at exit, by each use")
    return changed, imported


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _engine_loggers(own: str) -> dict[str, object]:
    """Return the state of the engine's loggers, but for those of the component's module `own`."""
    return {
        name: _logger(logger)
        for name, logger in _ENGINES_LOGGERS.items()
        if not f"{name}.".startswith(f"{own}.")
    }


def _functions(of: Iterable[object]) -> list[dict[str, object]]:
    """Return the callables of modules or classes, of each by their names."""
    return [
        {
            name: value
            for name, value in vars(one).items()
            if callable(value) or isinstance(value, property)
        }
        for one in of
    ]


def _limits() -> object:
    if sys.platform == "win32":
        return None
    import resource

    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_AS, resource.RLIMIT_CPU)
    return (
        [resource.getrlimit(kind) for kind in kinds],
        os.getpriority(os.PRIO_PROCESS, 0),
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None,
    )


def _timers() -> object:
    if sys.platform == "win32":
        return None
    # the rest of a timer that runs changes by itself
    kinds = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
    return [bool(signal.getitimer(kind)[0]) for kind in kinds]


def _torch() -> object:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    return (
        torch.get_rng_state().numpy().tobytes(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        repr(torch.tensor([1 / 3, 1e9])),  # by its print options
    )


def _numpy_random() -> object:
    name, numbers, *others = np.random.get_state(legacy=True)
    return name, np.asarray(numbers).tobytes(), others


def _decimals() -> object:
    context = decimal.getcontext()
    return context.prec, context.rounding, dict(context.traps), decimal.DefaultContext.prec


def _logger(logger: logging.Logger) -> tuple[object, ...]:
    return logger.level, list(logger.handlers), list(logger.filters), logger.propagate


def _of_the_process() -> dict[str, object]:
    return {
        "the state of torch": _torch(),
        "the state of random": random.getstate(),
        "the state of numpy.random": _numpy_random(),
        "os.environ": dict(os.environ),
        "the working directory": Path.cwd(),
        "sys.stdout or sys.stderr": (sys.stdout, sys.stderr),
        "sys.path": list(sys.path),
        "sys.excepthook or threading.excepthook": (sys.excepthook, threading.excepthook),
        "the recursion limit": sys.getrecursionlimit(),
        "a signal handler": [signal.getsignal(number) for number in _SIGNALS],
        "the garbage collector": (gc.isenabled(), gc.get_threshold()),
        "warnings.filters": list(warnings.filters),
        "the umask": _umask(),
        "a function of tracing or profiling": (
            sys.gettrace(),
            sys.getprofile(),
            threading.gettrace(),
            threading.getprofile(),
        ),
        "the interval of switches between threads": sys.getswitchinterval(),
        "the timeout of sockets": socket.getdefaulttimeout(),
        "numpy's handling of errors": (np.geterr(), np.geterrcall()),
        "numpy's print options": np.get_printoptions(),
        "the context of decimals": _decimals(),
        "the way in which processes are started": multiprocessing.get_start_method(allow_none=True)
        or multiprocessing.get_all_start_methods()[0],
        "a limit or the priority of the process": _limits(),
        "a timer of the process": _timers(),
        "the blocked signals": None
        if sys.platform == "win32"
        else signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "the stack size of threads": threading.stack_size(),
        "the longest number that is printed": sys.get_int_max_str_digits(),
        "sys.displayhook or sys.unraisablehook": (sys.displayhook, sys.unraisablehook),
        "a callback of the garbage collector": (list(gc.callbacks), gc.get_debug()),
        "a function of the standard library": _functions(_MODULES),
        "a class of the engine": _functions(_ENGINES_CLASSES),
        "the logging module": (
            logging.raiseExceptions,
            logging.getLoggerClass(),
            logging.getLogRecordFactory(),
            [logging.getLevelName(level) for level in range(0, 60, 5)],
        ),
        "the locale": locale.setlocale(locale.LC_ALL),
        "a built-in function": dict(vars(builtins)),
        "the root logger": (*_logger(logging.root), logging.root.manager.disable),
        "the engine's logger": _logger(logging.getLogger("dovetail")),
    }
