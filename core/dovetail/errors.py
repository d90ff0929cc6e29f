"""Dovetail's exceptions: one family, so that callers need only catch `DovetailError`.

Messages say what was wrong, where, and what would be right.
"""

from __future__ import annotations

import traceback
from typing import Any

from dovetail.end_reason import EndReason

_SHOWN = 80  # characters of a value in an error
DISTRIBUTION = "dovetail-llm"  # Dovetail's name for pip; the package index has another `dovetail`


class DovetailError(Exception):
    """Base of all errors that Dovetail raises."""

    reason = EndReason.ERROR  # of the request that it refuses or ends


class ConfigError(DovetailError, ValueError):
    """A setting in `engine.yaml`, an override or a component's options is wrong; the text names
    file, line and key."""


class PluginError(DovetailError):
    """A component isn't available: its name is unknown or ambiguous, its plugin failed to load, or
    it has another api version."""


class UnsupportedError(DovetailError):
    """The chosen components don't fit together, or can't do what was asked; the text lists each
    reason."""

    reason = EndReason.UNSUPPORTED


class ModelLoadError(DovetailError):
    """A model directory, its config or its weights can't be used; the text names the file or the
    tensor."""

    reason = EndReason.UNSUPPORTED


class MissingExtraError(DovetailError, ImportError):
    """A package of an optional extra isn't installed; the text holds the pip line that installs
    it."""

    reason = EndReason.UNSUPPORTED

    @classmethod
    def naming(cls, extra: str, lack: str) -> MissingExtraError:
        """Make the error from the sentence `lack` and the pip line that installs Dovetail's
        extra."""
        return cls(f'{lack}; install with: pip install "{DISTRIBUTION}[{extra}]"')


class RequestError(DovetailError, ValueError):
    """A request was refused on arrival (parameters, length, token ids). Nothing else is
    affected."""

    def __init__(self, text: str = "", reason: EndReason = EndReason.INVALID) -> None:
        super().__init__(text)
        self.reason = reason


class PolicyError(DovetailError):
    """A scheduler broke a rule of its contract, or raised; the text names the policy, the request
    and the rule."""


class SchedulerStalled(DovetailError):
    """The policy would wait forever: there are unfinished requests, but it granted nothing, nothing
    is in flight and it set no `wake_at`. Raised by strict engines, such as those of the conformance
    suite; others plan such a step themselves."""


class EngineDeadError(DovetailError):
    """The engine stopped after an error (`__cause__`) and takes no more work."""

    reason = EndReason.ENGINE_DEAD


# a command that raises one of these ends with 1; errors before the start: 2
RUN_TIME_ERRORS = (PolicyError, SchedulerStalled, EngineDeadError)


def exit_code(error: DovetailError) -> int:
    """Return the exit code of a command that raised this error."""
    return 1 if isinstance(error, RUN_TIME_ERRORS) else 2


def describe(error: BaseException) -> str:
    """Return the type and text of an error, also if it comes from a plugin and its `__str__`
    raises."""
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException as another:
        text = f"(its text can't be had: {type(another).__name__})"
    return f"{name}: {text}" if text else name


def raised_at(error: BaseException, package: str) -> str:
    """Return "FILE:LINE" of the innermost call in a package at which an error, or the first of its
    causes, was raised; empty if there is none.

    `package` is the name of a top-level package, like "dovetail_fair".
    """
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    for one in reversed(chain):
        for frame, line in reversed(list(traceback.walk_tb(one.__traceback__))):
            if str(frame.f_globals.get("__name__")).partition(".")[0] == package:
                return f"{frame.f_code.co_filename}:{line}"
    return ""


def describe_raised(error: BaseException, package: str) -> str:
    """Return the type and text of an error, and where in a package it was raised if that is
    known."""
    place = raised_at(error, package)
    return f"{describe(error)} ({place})" if place else describe(error)


def shown(value: Any) -> str:
    """Show a wrong value in an error: its repr, shortened if that is long. Numbers may have any
    length. Reads no more than it shows."""
    try:
        text = _repr(value, _SHOWN + 1)
    except Exception:  # somebody else's class, or an integer that Python finds too long to print
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _repr(value: Any, room: int) -> str:
    """Return the repr of a value, or the beginning of it if that has more than `room`
    characters."""
    kind = type(value)
    if kind in (str, bytes):
        return repr(value[:room])
    if kind not in (list, tuple, dict) or not value:
        return repr(value)
    text = "[" if kind is list else "(" if kind is tuple else "{"
    for index, item in enumerate(value):
        if len(text) > room:
            return text
        text += (", " if index else "") + _repr(item, room - len(text))
        if kind is dict:
            text += ": " + _repr(value[item], max(0, room - len(text)))
    comma = "," if kind is tuple and len(value) == 1 else ""
    return text + comma + ("]" if kind is list else ")" if kind is tuple else "}")
