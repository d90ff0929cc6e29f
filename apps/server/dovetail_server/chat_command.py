"""`dovetail chat`: a conversation in the terminal with a local model or a server."""

from __future__ import annotations

import base64
import mimetypes
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Annotated, Any

import typer
from rich.console import Console

from dovetail.errors import ConfigError, RequestError
from dovetail.serving import Settings, load_config, read_text
from dovetail_server.chat_partners import LocalModel, Partner, ServerError, ServerModel

PROMPT = "> "
MAX_IMAGE = 2**25  # bytes of a file; engines and servers have limits of their own
UNPRINTABLE = {
    code: None for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"
}  # could contain terminal escape sequences
HELP = """/reset         start a new conversation
/system TEXT   set the system prompt from now on; without TEXT, remove it
/image FILE    send an image with the next message
/quit          quit, like Ctrl-D
Ctrl-C stops an answer. To send a message that begins with /, type //."""


def chat(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|URL",
            help="A model (or engine.yaml) to run here, or a server's http://host:port.",
        ),
    ],
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0: greedy. Default: the model's.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="The most tokens of an answer. Default: as many as fit.")
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A Jinja template instead of the model's own."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="The server's key.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model, if the server has several. Default: the first.")
    ] = None,
    image: Annotated[
        list[str],
        typer.Option(metavar="FILE", help="Send an image with the first message. May be repeated."),
    ] = [],  # noqa: B006
    settings: Settings = [],  # noqa: B006 typer makes a list of its own
) -> None:
    """Talk to a model."""
    images = [image_part(name) for name in image]
    params = {"temperature": temperature, "max_tokens": max_tokens}
    template = read_text(chat_template, "--chat-template") if chat_template is not None else None
    with closing(_partner(source, params, template, api_key, model, settings)) as partner:
        good = ChatSession(partner, system, images).run()
    if not good:
        raise typer.Exit(1)


def _partner(
    source: str,
    params: dict[str, Any],
    template: str | None,
    api_key: str | None,
    model: str | None,
    settings: list[str],
) -> LocalModel | ServerModel:
    """Raise `ConfigError` for options that don't apply to the source."""
    if source.startswith(("http://", "https://")):
        if settings:
            raise ConfigError(
                f"--set configures a local engine, but {source} is a server: pass the setting to "
                f"`dovetail serve`"
            )
        return ServerModel(source, model, {**params, "chat_template": template}, api_key)
    if model is not None:
        raise ConfigError("--model is for servers; a local model is the argument itself")
    return LocalModel(load_config(source, settings), params, template)


def image_part(name: str) -> dict[str, Any]:
    """Return the image in a file as a part of a message. Raises `ConfigError`."""
    try:
        with open(name, "rb") as file:
            data = file.read(MAX_IMAGE + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"image {name}: {reason}") from None
    if len(data) > MAX_IMAGE:
        raise ConfigError(f"image {name}: it has more than {MAX_IMAGE} bytes")
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


class ChatSession:
    """A conversation in the terminal. Through pipes, each line of stdin is a message, and only
    answers are printed."""

    def __init__(
        self, partner: Partner, system: str | None, images: Sequence[dict[str, Any]] = ()
    ) -> None:
        """`images`: parts of the first message."""
        self._partner = partner
        self._system = system
        self._images = list(images)
        self._messages: list[dict[str, Any]] = []
        self._typed = sys.stdin is not None and sys.stdin.isatty()
        self._out, self._notes = _console(False), _console(True)

    def run(self) -> bool:
        """Run until the input ends. Returns False if an answer failed in a non-interactive
        conversation."""
        good = True
        if self._typed:
            with suppress(ImportError):
                import readline  # noqa: F401 adds history and line editing to `input`
            self._note(f"{self._partner.name}. /help lists commands; Ctrl-D quits.")
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
                self._note("\nCtrl-D quits.")
            except EOFError:
                self._out.print()
                return

    def _command(self, line: str) -> bool:
        """Execute a command. Returns False for /quit."""
        name, _, rest = line.partition(" ")
        if name == "/quit":
            return False
        if name == "/reset":
            self._messages.clear()
            self._note("new conversation")
        elif name == "/system":
            self._system = rest.strip() or None
            self._note("system prompt set" if self._system else "system prompt removed")
        elif name == "/image":
            self._attach(rest.strip())
        elif name == "/help":
            self._note(HELP)
        else:
            self._note(
                f"unknown command {name}; commands are /reset, /system, /image, /quit and /help; "
                f"to send a message that begins with /, type //"
            )
        return True

    def _attach(self, name: str) -> None:
        """Send an image with the next message."""
        try:
            self._images.append(image_part(name))
        except ConfigError as error:
            self._notes.print(f"error: {error}", style="red")
        else:
            self._note(f"{name} is sent with the next message")

    def _say(self, text: str) -> bool:
        """Send a message, and print the answer as it arrives. Returns False on failure; the message
        and its images are then discarded."""
        content = [*self._images, {"type": "text", "text": text}] if self._images else text
        self._images = []
        self._messages.append({"role": "user", "content": content})
        before = [{"role": "system", "content": self._system}] if self._system else []
        answer = ""
        reason = None
        failure = None
        try:
            with (
                _interrupts() as interrupts,
                closing(self._partner.answer([*before, *self._messages])) as pieces,
            ):
                for piece in pieces:
                    if interrupts:  # raised where it was lost, such as in a finalizer
                        raise KeyboardInterrupt
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
        else:  # stopped before the first token
            self._messages.pop()
        if self._typed and reason in ("stopped", "length"):
            self._note(
                "(stopped)" if reason == "stopped" else "(the answer reached its length limit)"
            )
        return True

    def _note(self, text: str) -> None:
        self._notes.print(text, style="dim")


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Return the list to which each Ctrl-C in the block is added before it raises
    `KeyboardInterrupt`; empty outside of the main thread."""
    taken: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield taken
        return

    def take(number: int, _: object) -> None:
        taken.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, take)
    try:
        yield taken
    finally:
        signal.signal(signal.SIGINT, before)


def _console(stderr: bool) -> Console:
    """Return a console that prints text verbatim."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
