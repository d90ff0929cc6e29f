"""Chat templates rendered in processes apart, so that none hurts the engine: one that is out of time is ended, one that is out of memory fails.

For `chat`; `chat_worker` is what runs there. A render costs 0.15 ms more than in this process (0.8 ms for 40 KB of text, whose tokens take 40 ms),
and the first one starts a process, in 0.1 s. The alternative, a guard on each operation of Jinja's sandbox, would have to know all that Python can do
in one, and what each costs.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.checks import shown
from dovetail.errors import DovetailError, MissingExtraError, RequestError
from dovetail.limits import Limits

_WORKER = Path(__file__).with_name("chat_worker.py")
_ENVIRONMENT = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "SYSTEMROOT", "TZ")  # what Python and the time of day need; no secrets
_STARTS_S = 60.0  # how long a process may take to start
_OVERTIME_S = 5.0  # a process that hasn't ended itself for so long after its time was up is stopped, and killed
_OWN_PROCESSES, _GIVEN_PROCESSES = 4, 2  # at most, for models' own templates and for those that came with requests


class ChatTemplate(NamedTuple):
    """A template's text, and whether it came with the request: such templates may hold up each other, never the model's own."""

    text: str
    given: bool = False


class TemplateRenderer:
    """Renders chat templates; several threads may call it. Its processes are started when they are needed, and end with it or by `close`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._own = _Processes(_OWN_PROCESSES, limits.max_template_bytes)
        self._given = _Processes(_GIVEN_PROCESSES, limits.max_template_bytes)

    def render(self, template: ChatTemplate, variables: Mapping[str, Any], must_read: Sequence[str] = ()) -> str:
        """The text that the template makes of these variables, which are plain JSON values. `must_read`: variables that it has to look at.

        Raises `RequestError` if the template is wrong, refuses these variables, fails, or is over a limit; `MissingExtraError` without Jinja.
        """
        [answer] = self._answers(template, [variables], must_read)
        if "text" not in answer:
            raise RequestError(_in_words(template, answer, self._limits))
        text: str = answer["text"]
        return text

    def try_all(self, template: ChatTemplate, variables: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Render each like `render`, all within the time limit of one. An entry is None where the template refuses or fails."""
        return [answer.get("text") for answer in self._answers(template, variables, ())]

    def close(self) -> None:
        """End the processes; another render starts new ones."""
        self._own.close()
        self._given.close()

    def _answers(self, template: ChatTemplate, variables: Sequence[Mapping[str, Any]], must_read: Sequence[str]) -> list[dict[str, Any]]:
        limits = self._limits
        if (chars := len(template.text)) > limits.max_template_chars:
            raise RequestError(
                f"a chat template must have at most {limits.max_template_chars:,} characters (limits.max_template_chars), got {chars:,}"
            )
        request = {"text": template.text, "variables": variables, "must_read": must_read, "max_chars": limits.max_chat_chars}
        line = _as_json({**request, "max_s": limits.max_template_s})
        if (chars := len(line) - len(template.text)) > limits.max_chat_chars:
            raise RequestError(f"a conversation must have at most {limits.max_chat_chars:,} characters (limits.max_chat_chars), got {chars:,}")
        with (self._given if template.given else self._own).one() as process:
            answers = process.ask(line.encode("utf-8", "surrogatepass"), limits.max_template_s)
        if isinstance(answers, str):
            raise RequestError(_in_words(template, {"kind": answers}, limits))
        return answers


def _as_json(values: Mapping[str, Any]) -> str:
    try:
        return json.dumps(values, ensure_ascii=False)
    except RecursionError:
        raise RequestError("what goes into a chat template is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise RequestError(f"what goes into a chat template must be plain JSON values: {error}") from None


def _in_words(template: ChatTemplate, refusal: Mapping[str, Any], limits: Limits) -> str:
    whose = "the chat_template" if template.given else "the model's chat template"
    match refusal["kind"]:
        case "syntax":
            return f"{whose} is no valid Jinja: line {refusal['line']}: {refusal['reason']}"
        case "nested":
            return f"{whose} is nested too deeply"
        case "unread":
            return f"{whose} doesn't look at {' and '.join(map(shown, refusal['names']))}: it would be ignored"
        case "long":
            return f"{whose} makes more than {limits.max_chat_chars:,} characters of this conversation (limits.max_chat_chars)"
        case "memory":
            return f"{whose} takes more than {limits.max_template_bytes:,} bytes of memory for this conversation (limits.max_template_bytes)"
        case "time":
            return f"{whose} takes longer than {limits.max_template_s:g} s for this conversation (limits.max_template_s)"
        case "refuses":
            return f"{whose} refuses this conversation: {refusal['reason']}"
        case "fails":
            return f"{whose} fails on this conversation{_place(template, refusal)}"
        case _:
            return f"{whose} ended the process that rendered it"


def _place(template: ChatTemplate, refusal: Mapping[str, Any]) -> str:
    """Return where it failed. The sender of a template also gets Jinja's reason."""
    why = f": {refusal['reason']}" if template.given else "; something there is missing, or of another type than it expects"
    if (line := refusal["line"]) is None:
        return why
    lines = template.text.splitlines()
    statement = f", {shown(lines[line - 1].strip())}" if line <= len(lines) else ""
    return f" at its line {line}{statement}{why}"


class _Processes:
    """A pool of at most `most` processes. Each serves one render at a time."""

    def __init__(self, most: int, max_bytes: int) -> None:
        self._most, self._max_bytes = most, max_bytes
        self._begin()

    def _begin(self) -> None:
        self._owner = os.getpid()
        self._free = threading.Semaphore(self._most)
        self._idle: list[_Process] = []

    @contextlib.contextmanager
    def one(self) -> Iterator[_Process]:
        """A process that is nobody else's meanwhile. One that was interrupted, or has ended, isn't used again."""
        if os.getpid() != self._owner:  # forked: those are the parent's
            self._begin()
        with self._free:
            process = self._taken()
            try:
                yield process
            except BaseException:
                process.end()
                raise
            if process.alive:
                self._idle.append(process)

    def _taken(self) -> _Process:
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread was quicker
                if (process := self._idle.pop()).alive:
                    return process
                process.end()
        return _Process(self._max_bytes)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().end()


class _Process:
    """A running `chat_worker`. `end()` kills it, if it is still there."""

    def __init__(self, max_bytes: int) -> None:
        """Starts it. Raises `MissingExtraError` without Jinja, `DovetailError` if it doesn't start."""
        if find_spec("jinja2") is None:
            raise MissingExtraError.naming("torch", "chat templates need Jinja")
        command = [sys.executable, "-I", "-S", str(_WORKER), json.dumps([path for path in sys.path if path]), str(max_bytes)]
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:  # in a session of its own: Ctrl-C in a terminal is for the engine
            self._process = subprocess.Popen(command, **pipes, env=environment, start_new_session=True)
        except OSError as error:
            raise DovetailError(f"the process that renders chat templates doesn't start: {command[0]}: {error.strerror}") from error
        self.end = weakref.finalize(self, _end, self._process, os.getpid())
        if self.ask(b"null", _STARTS_S):
            raise DovetailError(f"the process that renders chat templates doesn't start: {' '.join(command[:4])}")

    @property
    def alive(self) -> bool:
        """False once it has ended, of itself or by `end`."""
        return self.end.alive and self._process.poll() is None

    def ask(self, request: bytes, seconds: float) -> list[dict[str, Any]] | str:
        """Its answers; or why there are none, and the process is no more: "memory", "time" if it ended after so many seconds, else "ended"."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        begun = time.monotonic()
        overdue = threading.Timer(seconds + _OVERTIME_S, self._process.kill)
        overdue.daemon = True
        overdue.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(request + b"\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        finally:
            overdue.cancel()
        if line.endswith(b"]\n"):
            answers: list[dict[str, Any]] = json.loads(line)
            return answers
        self.end()
        if line:
            return "memory"
        return "time" if time.monotonic() - begun >= seconds else "ended"


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:  # a fork has no right to
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # of what was to be written
            pipe.close()  # type: ignore[union-attr]
