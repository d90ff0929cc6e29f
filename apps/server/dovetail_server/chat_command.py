"""`dovetail chat`: a conversation in the terminal, with a model in this process or with a server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Annotated, Any

import typer
from rich.console import Console

from dovetail.cli.settings import Settings, load_config
from dovetail.cli.streams import read_text
from dovetail.errors import ConfigError, RequestError
from dovetail_server.chat_partners import LocalModel, Partner, Server, ServerError

PROMPT = "> "
UNPRINTABLE = {code: None for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}  # which could command the terminal
HELP = """/reset         begin anew
/system TEXT   set the system prompt from here on; without a text: none
/quit          end, as Ctrl-D does
Ctrl-C stops an answer. A message that begins with / is written with two."""


def chat(
    source: Annotated[str, typer.Argument(metavar="MODEL|URL", help="A model (or engine.yaml) to run here, or a server's http://host:port.")],
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Without it: as the model would have it.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer, at most. Without it: as many as fit.")] = None,
    chat_template: Annotated[str | None, typer.Option(metavar="FILE", help="A Jinja template instead of the model's own.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="The server's key.")] = None,
    model: Annotated[str | None, typer.Option(help="The model, if the server has several. Without it: the first.")] = None,
    settings: Settings = [],  # noqa: B006 typer makes a list of its own
) -> None:
    """Talk to a model."""
    params = {"temperature": temperature, "max_tokens": max_tokens}
    template = read_text(chat_template, "--chat-template") if chat_template is not None else None
    with closing(_partner(source, params, template, api_key, model, settings)) as partner:
        good = Conversation(partner, system).run()
    if not good:
        raise typer.Exit(1)


def _partner(
    source: str, params: dict[str, Any], template: str | None, api_key: str | None, model: str | None, settings: list[str]
) -> LocalModel | Server:
    """Raises `ConfigError` for options that don't go with the source."""
    if source.startswith(("http://", "https://")):
        if settings:
            raise ConfigError(f"--set sets up an engine here, but {source} has one: give the setting to `dovetail serve`")
        return Server(source, model, {**params, "chat_template": template}, api_key)
    if model is not None:
        raise ConfigError("--model names a model of a server; here the model is the argument")
    return LocalModel(load_config(source, settings), params, template)


class Conversation:
    """A conversation in the terminal, or through pipes: then each line of standard input is a message, and only answers are printed."""

    def __init__(self, partner: Partner, system: str | None) -> None:
        self._partner, self._system = partner, system
        self._messages: list[dict[str, str]] = []
        self._typed = sys.stdin is not None and sys.stdin.isatty()
        self._out, self._notes = _console(False), _console(True)

    def run(self) -> bool:
        """Go on until the input ends. Returns False if an answer failed and nobody was there to see it."""
        good = True
        if self._typed:
            with suppress(ImportError):
                import readline  # noqa: F401 gives `input` a history and an editor
            self._note(f"{self._partner.name}. /help says what can be done; Ctrl-D ends.")
        for line in self._lines():
            if line.startswith("/") and not line.startswith("//"):
                if not self._command(line):
                    break
            elif line.strip():
                good = self._say(line.removeprefix("/") if line.startswith("//") else line) and good
        return good or self._typed

    def _lines(self) -> Iterator[str]:
        if not self._typed:
            yield from (line.rstrip("\r\n") for line in sys.stdin or ())
            return
        while True:
            try:
                yield input(PROMPT)
            except KeyboardInterrupt:
                self._note("\nCtrl-D ends.")
            except EOFError:
                self._out.print()
                return

    def _command(self, line: str) -> bool:
        """Carry out a line that begins with "/". Returns False for the one that ends it all."""
        name, _, rest = line.partition(" ")
        if name == "/quit":
            return False
        if name == "/reset":
            self._messages.clear()
            self._note("begun anew")
        elif name == "/system":
            self._system = rest.strip() or None
            self._note("the system prompt is set" if self._system else "there is no system prompt")
        elif name == "/help":
            self._note(HELP)
        else:
            self._note(f"there is no {name}; there are /reset, /system, /quit and /help, and a message that begins with / is written with two")
        return True

    def _say(self, text: str) -> bool:
        """Send a message and print the answer as it comes. Returns False if it failed: then the message counts as never said."""
        self._messages.append({"role": "user", "content": text})
        before = [{"role": "system", "content": self._system}] if self._system else []
        answer, reason, failure = "", None, None
        try:
            with closing(self._partner.answer([*before, *self._messages])) as pieces:
                for piece in pieces:
                    answer += piece.text
                    reason = piece.finish_reason or reason
                    self._out.print(piece.text.translate(UNPRINTABLE), end="")
                    self._out.file.flush()
        except KeyboardInterrupt:
            reason = "stopped"
        except (RequestError, ServerError) as error:
            failure = str(error)
        if answer or failure is None:
            self._out.print()
        if failure is not None:
            self._messages.pop()
            self._notes.print(f"error: {failure}", style="red")
            return False
        if answer:
            self._messages.append({"role": "assistant", "content": answer})
        else:  # stopped before it began
            self._messages.pop()
        if self._typed and reason in ("stopped", "length"):
            self._note("(stopped)" if reason == "stopped" else "(the answer has reached its length)")
        return True

    def _note(self, text: str) -> None:
        self._notes.print(text, style="dim")


def _console(stderr: bool) -> Console:
    """A console that prints text as it stands."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
