"""Chat templates rendered in processes apart, so that none hurts the engine: one that is out of
time is ended, one that is out of memory fails.

For `chat`; `chat_worker` is what runs there. A render costs 0.15 ms more than in this process (0.8
ms for 40 KB of text, whose tokens take 40 ms), and the first one starts a process, in 0.1 s. The
alternative, a guard on each operation of Jinja's sandbox, would have to know all that Python can do
in one, and what each costs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.config.limits import Limits
from dovetail.errors import MissingExtraError, RequestError, shown
from dovetail.front.request_checks import check_template_chars
from dovetail.front.worker_processes import WorkerEndedError, WorkerProcess, WorkerProcesses

_WORKER = Path(__file__).with_name("chat_worker.py")
# a process that hasn't ended itself for so long after its time was up is stopped, and killed
_OVERTIME_S = 5.0
# at most, for models' own templates and for those that came with requests
_OWN_PROCESSES = 4
_GIVEN_PROCESSES = 2


class ChatTemplate(NamedTuple):
    """A template's text, and whether it came with the request: such templates may hold up each
    other, never the model's own."""

    text: str
    given: bool = False


class TemplateRenderer:
    """Renders chat templates; several threads may call it. Its processes are started when they are
    needed, and end with it or by `close`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        start = partial(_start, limits.max_template_bytes)
        self._own, self._given = (
            WorkerProcesses(_OWN_PROCESSES, start),
            WorkerProcesses(_GIVEN_PROCESSES, start),
        )

    def render(
        self, template: ChatTemplate, variables: Mapping[str, Any], must_read: Sequence[str] = ()
    ) -> str:
        """The text that the template makes of these variables, which are plain JSON values.
        `must_read`: variables that it has to look at.

        Raises `RequestError` if the template is wrong, refuses these variables, fails, or is over a
        limit; `MissingExtraError` without Jinja.
        """
        [answer] = self._answers(template, [variables], must_read)
        if "text" not in answer:
            raise RequestError(_in_words(template, answer, self._limits))
        text: str = answer["text"]
        return text

    def try_all(
        self, template: ChatTemplate, variables: Sequence[Mapping[str, Any]]
    ) -> list[str | None]:
        """Render each like `render`, all within the time limit of one. An entry is None where the
        template refuses or fails."""
        return [answer.get("text") for answer in self._answers(template, variables, ())]

    def close(self) -> None:
        """End the processes; another render starts new ones."""
        self._own.close()
        self._given.close()

    def _answers(
        self,
        template: ChatTemplate,
        variables: Sequence[Mapping[str, Any]],
        must_read: Sequence[str],
    ) -> list[dict[str, Any]]:
        limits = self._limits
        check_template_chars(template.text, limits)
        request = {
            "text": template.text,
            "variables": variables,
            "must_read": must_read,
            "max_chars": limits.max_chat_chars,
        }
        line = _as_json({**request, "max_s": limits.max_template_s})
        if (chars := len(line) - len(template.text)) > limits.max_chat_chars:
            raise RequestError(
                f"a conversation must have at most {limits.max_chat_chars:,} characters "
                f"(limits.max_chat_chars), got {chars:,}"
            )
        with (self._given if template.given else self._own).one() as process:
            try:
                answers: list[dict[str, Any]] = process.ask(
                    line.encode("utf-8", "surrogatepass"), limits.max_template_s, _OVERTIME_S
                )
            except WorkerEndedError as ended:
                raise RequestError(_in_words(template, {"kind": ended.reason}, limits)) from None
        return answers


def _start(max_bytes: int) -> WorkerProcess:
    """Raises `MissingExtraError` without Jinja, `DovetailError` if it doesn't start."""
    if find_spec("jinja2") is None:
        raise MissingExtraError.naming("torch", "chat templates need Jinja")
    return WorkerProcess("renders chat templates", _WORKER, str(max_bytes))


def _as_json(values: Mapping[str, Any]) -> str:
    try:
        return json.dumps(values, ensure_ascii=False)
    except RecursionError:
        raise RequestError("what goes into a chat template is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"what goes into a chat template must be plain JSON values: {error}"
        ) from None


def _in_words(template: ChatTemplate, refusal: Mapping[str, Any], limits: Limits) -> str:
    whose = "the chat_template" if template.given else "the model's chat template"
    match refusal["kind"]:
        case "syntax":
            return f"{whose} is no valid Jinja: line {refusal['line']}: {refusal['reason']}"
        case "nested":
            return f"{whose} is nested too deeply"
        case "unread":
            return (
                f"{whose} doesn't look at {' and '.join(map(shown, refusal['names']))}: it "
                f"would be ignored"
            )
        case "long":
            return (
                f"{whose} makes more than {limits.max_chat_chars:,} characters of this "
                f"conversation (limits.max_chat_chars)"
            )
        case "memory":
            return (
                f"{whose} takes more than {limits.max_template_bytes:,} bytes of memory for "
                f"this conversation (limits.max_template_bytes)"
            )
        case "time":
            return (
                f"{whose} takes longer than {limits.max_template_s:g} s for this conversation "
                f"(limits.max_template_s)"
            )
        case "refuses":
            return f"{whose} refuses this conversation: {refusal['reason']}"
        case "fails":
            return f"{whose} fails on this conversation{_place(template, refusal)}"
        case _:
            return f"{whose} ended the process that rendered it"


def _place(template: ChatTemplate, refusal: Mapping[str, Any]) -> str:
    """Return where it failed. The sender of a template also gets Jinja's reason."""
    why = (
        f": {refusal['reason']}"
        if template.given
        else "; something there is missing, or of another type than it expects"
    )
    if (line := refusal["line"]) is None:
        return why
    lines = template.text.splitlines()
    statement = f", {shown(lines[line - 1].strip())}" if line <= len(lines) else ""
    return f" at its line {line}{statement}{why}"
