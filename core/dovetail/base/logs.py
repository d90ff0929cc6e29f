"""Logging of the library: to stderr by a handler of its own, unless the program has configured
logging. `import dovetail` calls `set_up`, in each process of an engine.

Programs configure logging as usual, before or after they import this package: once the root logger
or the logger "dovetail" has a handler of theirs, the library's own is silent.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

NAME = "dovetail"
VARIABLE = "DOVETAIL_LOG"
OFF = logging.CRITICAL + 10
LEVELS: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": OFF,
}
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _DefaultLevel(int):
    """Level of the logger until a program sets one; differs from the same level set by a
    program."""


DEFAULT = _DefaultLevel(logging.INFO)


class StderrHandler(logging.Handler):
    """Writes to the present `sys.stderr`, above progress bars, while no handler of the program gets
    the records."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        if is_configured() or sys.stderr is None:
            return
        try:
            self._write(self.format(record))
        except Exception:
            self.handleError(record)

    def _write(self, text: str) -> None:
        bars = sys.modules.get("tqdm.std")
        if bars is not None:
            bars.tqdm.write(text, file=sys.stderr)
        else:
            sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def set_up() -> None:
    """Add the handler to the logger "dovetail", and set the level that `DOVETAIL_LOG` names, INFO
    by default. Idempotent."""
    logger = logging.getLogger(NAME)
    if any(isinstance(handler, StderrHandler) for handler in logger.handlers):
        return
    logger.addHandler(StderrHandler())
    logger.addFilter(_is_wanted)
    wanted = os.environ.get(VARIABLE, "")
    level = LEVELS.get(wanted.strip().lower())
    if level is not None:
        logger.setLevel(level)
    elif logger.level == logging.NOTSET:
        logger.setLevel(DEFAULT)
    if wanted and level is None:
        logger.warning(
            "%s must be %s, got %.80r: it is taken for info", VARIABLE, ", ".join(LEVELS), wanted
        )


def is_configured() -> bool:
    """Return True if a handler of the program gets the library's records."""
    logger = logging.getLogger(NAME)
    own = [handler for handler in logger.handlers if not isinstance(handler, StderrHandler)]
    return bool(own) or (logger.propagate and logging.getLogger().hasHandlers())


def _is_wanted(record: logging.LogRecord) -> bool:
    """Return True unless only the default level lets a record pass, and the program has configured
    a higher one."""
    logger = logging.getLogger(NAME)
    if logger.level is not DEFAULT or not is_configured():
        return True
    return record.levelno >= logging.getLogger().getEffectiveLevel()
