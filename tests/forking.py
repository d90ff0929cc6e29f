"""`start_by_fork`: `subprocess.Popen` for programs of this project, whose imports a process has
already: the new process is a fork of it. For processes that `tests/preloaded.py` has started."""

from __future__ import annotations

import gc
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

_modules: list[ModuleType] = []


def subprocess_with(popen: Callable[..., Any]) -> SimpleNamespace:
    """Return what stands for the module `subprocess` in a module that starts processes by its
    `Popen`."""
    names = ("DEVNULL", "PIPE", "STDOUT", "TimeoutExpired")
    return SimpleNamespace(Popen=popen, **{name: getattr(subprocess, name) for name in names})


@contextmanager
def forking(*modules: ModuleType) -> Iterator[None]:
    """Let these modules, which import `subprocess`, start their processes by forks; in these they
    don't."""
    forks = subprocess_with(start_by_fork)
    for module in modules:
        vars(module).update(subprocess=forks)
    _modules.extend(modules)
    try:
        yield
    finally:
        _stop_forking()


def _stop_forking() -> None:
    while _modules:
        vars(_modules.pop()).update(subprocess=subprocess)


def start_by_fork(command: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE ...`, whose function `main` is called, or `python -c CODE ...`. A
    process that has several threads, which a fork might leave with locks that nobody releases,
    starts it by `exec`."""
    if len(os.listdir("/proc/self/task")) > 1:
        return subprocess.Popen(command, **how)
    become = partial(_become, list(command), how.get("pass_fds", ()), how.get("env"))
    return subprocess.Popen(command, preexec_fn=become, **how)


def name_process(name: str) -> None:
    """Let the system know this process by a name, of which it keeps 15 characters: its command line
    is that of the process it was forked from."""
    Path("/proc/self/comm").write_text(name)


def _become(
    command: list[str], descriptors: Sequence[int], environ: Mapping[str, str] | None
) -> NoReturn:
    """Run the program in a new process, in place of `exec`."""
    code = 1
    try:
        _forget(descriptors)
        if environ is not None:
            _enter(environ)
        sys.orig_argv[:] = command
        _customize()
        code = _run(*(word for word in command[1:] if word != "-P"))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _forget(descriptors: Sequence[int]) -> None:
    """Leave what is the parent's: its open files, but for these, its handlers of signals, and
    `forking`."""
    _stop_forking()
    kept = {0, 1, 2, *descriptors}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):
                os.close(int(name))
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()


def _enter(environ: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    given = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[1:] = [*given, *(entry for entry in sys.path[1:] if entry not in given)]


def _customize() -> None:
    """Run the `sitecustomize.py` that the path has, as Python does at its start."""
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if (path := Path(folder) / "sitecustomize.py").is_file():
            runpy.run_path(str(path))


def _run(option: str, program: str, *arguments: str) -> int:
    sys.argv[:] = [option if option == "-c" else program, *arguments]
    if option == "-c":
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(main))
        return 0
    name_process(program.rpartition(".")[2])
    return int(import_module(program).main() or 0)
