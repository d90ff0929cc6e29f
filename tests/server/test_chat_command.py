"""`dovetail chat`: with a server, which a thread plays here, with the demo model, through pipes and
in a terminal."""

from __future__ import annotations

import base64
import json
import os
import pty
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dovetail.cli.app import app
from tests.http_server import http_server
from tests.media.checkpoints import checkpoint, picture

DEADLINE_S = 60.0


class Parrot(BaseHTTPRequestHandler):
    """A server that answers with the last message, a word at a time. Some words have it do other
    things."""

    bodies: list[dict[str, Any]]
    keys: list[str | None]
    hung_up: threading.Event
    models: Any

    def do_GET(self) -> None:
        self._send(200, self.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        self.keys.append(self.headers["Authorization"])
        said = body["messages"][-1]["content"]
        if isinstance(said, list):
            said = said[-1]["text"]
        if said == "refuse":
            self._send(
                400,
                {
                    "error": {
                        "message": "this model has no chat template",
                        "type": "invalid_request_error",
                    }
                },
            )
            return
        self.send_response(200)
        self.end_headers()
        self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        if said.startswith("garbage"):
            self.wfile.write(b"data: %s\n\n" % said.removeprefix("garbage").encode())
            return
        try:
            for word in said.split():
                self._event(
                    {"choices": [{"delta": {"content": f"{word} "}, "finish_reason": None}]}
                )
                while said.startswith("endless"):
                    self._event({"choices": [{"delta": {"content": "and on "}}]})
                    time.sleep(0.01)
        except OSError:
            self.hung_up.set()
            return
        if said == "die":
            self._event({"error": {"message": "the engine died"}})
        elif said != "break off":
            self._event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
            self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: Any) -> None:
        self.wfile.write(b"data: %s\n\n" % json.dumps(value).encode())
        self.wfile.flush()

    def _send(self, status: int, value: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def parrot() -> Iterator[tuple[str, type[Parrot]]]:
    class Mine(Parrot):
        bodies, keys, hung_up = [], [], threading.Event()

    Mine.models = {"data": [{"id": "parrot"}, {"id": "raven"}]}

    with http_server(Mine) as url:
        yield url, Mine


def chat(*arguments: str, said: str = "") -> Result:
    return CliRunner().invoke(app, ["chat", *arguments], input=said)


def test_images_are_sent_with_the_next_message(
    parrot: tuple[str, type[Parrot]], tmp_path: Path
) -> None:
    url, server = parrot
    names = [str(tmp_path / name) for name in ("a.png", "b.jpeg", "c")]
    for name in names:
        Path(name).write_bytes(name.encode())
    said = f"one\ntwo\n/image {names[1]}\n/image {names[2]}\n/image {tmp_path}/none\nthree\n"
    result = chat(url, "--image", names[0], said=said)
    assert result.exit_code == 0
    assert "none: No such file" in result.stderr
    contents = [message["content"] for message in server.bodies[-1]["messages"][::2]]

    def image(name: str, kind: str) -> dict[str, Any]:
        data = base64.b64encode(name.encode()).decode()
        return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}

    assert contents == [
        [image(names[0], "image/png"), {"type": "text", "text": "one"}],
        "two",
        [
            image(names[1], "image/jpeg"),
            image(names[2], "application/octet-stream"),
            {"type": "text", "text": "three"},
        ],
    ]
    missing = chat(url, "--image", f"{tmp_path}/none")
    assert missing.exit_code == 2
    assert "none: No such file" in missing.stderr


@pytest.mark.slow("makes a checkpoint, and loads it")
def test_a_local_model_reads_images(tmp_path: Path) -> None:
    picture(30, 20).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_text("no image")
    directory = str(checkpoint("mistral3"))
    options = ["--temperature", "0", "--max-tokens", "4", "--image", f"{tmp_path}/a.png"]
    result = chat(directory, *options, said="one\n")
    assert result.exit_code == 0, result.stderr
    refused = chat(directory, *options[:4], "--image", f"{tmp_path}/b.png", said="one\n")
    assert refused.exit_code == 1
    assert "messages[0].content[0]" in refused.stderr
    demo = chat("demo", *options, said="one\n")
    assert demo.exit_code == 1
    assert "takes no images" in demo.stderr


def test_a_server_gets_the_whole_conversation(parrot: tuple[str, type[Parrot]]) -> None:
    url, server = parrot
    result = chat(
        f"{url}/v1/",
        "--system",
        "Be kind.",
        "--temperature",
        "0",
        "--api-key",
        "secret",
        said="good day\n\nand you?\n",
    )
    assert (result.exit_code, result.stdout) == (0, "good day \nand you? \n")
    assert server.bodies[1] == {
        "model": "parrot",
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "good day"},
            {"role": "assistant", "content": "good day "},
            {"role": "user", "content": "and you?"},
        ],
        "stream": True,
        "temperature": 0.0,
    }
    assert server.keys == ["Bearer secret"] * 2


def test_commands_begin_with_a_slash(parrot: tuple[str, type[Parrot]]) -> None:
    url, server = parrot
    result = chat(
        url,
        "--model",
        "raven",
        said="one\n/reset\n/system Caw.\ntwo\n/system\n//three\n/what\n/quit\nfour\n",
    )
    assert result.exit_code == 0
    assert [[one["content"] for one in body["messages"]] for body in server.bodies] == [
        ["one"],
        ["Caw.", "two"],
        ["two", "two ", "/three"],
    ]
    assert {body["model"] for body in server.bodies} == {"raven"}
    assert "unknown command /what" in result.stderr


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("refuse", "answers 400: this model has no chat template"),
        ("die", "the engine died"),
        ("break off", "broke off during the answer"),
    ],
)
def test_an_answer_that_fails_is_reported_and_forgotten(
    parrot: tuple[str, type[Parrot]], said: str, told: str
) -> None:
    url, server = parrot
    result = chat(url, said=f"{said}\nagain\n")
    assert result.exit_code == 1, "whoever reads the pipe must know"
    assert told in " ".join(result.stderr.split())
    assert result.stderr.count("error:") == 1
    assert [one["content"] for one in server.bodies[-1]["messages"]] == ["again"]


@pytest.mark.parametrize(
    "event",
    ["[1]", '{"choices": 1}', '{"choices": [1]}', '{"choices": [{"delta": ""}]}', "[" * 9999],
)
def test_an_event_of_another_form_fails_its_answer_alone(
    parrot: tuple[str, type[Parrot]], event: str
) -> None:
    result = chat(parrot[0], said=f"garbage{event}\nagain\n")
    assert "doesn't have OpenAI's API: it answered" in " ".join(result.stderr.split())
    assert result.stdout.strip() == "again"


@pytest.mark.parametrize("models", [{"data": {"a": 1}}, {"data": "a"}, {"data": [{}]}, [1], None])
def test_a_list_of_models_of_another_form_is_reported(
    parrot: tuple[str, type[Parrot]], models: Any
) -> None:
    url, server = parrot
    server.models = models
    result = chat(url, said="hello\n")
    assert result.exit_code == 2
    assert "doesn't have OpenAI's API: it answered" in " ".join(result.stderr.split())


def test_what_an_answer_says_commands_no_terminal(parrot: tuple[str, type[Parrot]]) -> None:
    assert (
        chat(parrot[0], said="\x1b]0;mine\x07 [bold] :smile:\n").stdout
        == "]0;mine [bold] :smile: \n"
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["http://127.0.0.1:1"], "doesn't answer: Connection refused"),
        (["http://"], "expected the URL of a server"),
        (["http://127.0.0.1:x"], "Port could not be cast"),
        (["http://127.0.0.1:1", "--set", "seed=1"], "pass the setting to `dovetail serve`"),
        (["demo", "--model", "x"], "--model is for servers"),
        (["demo", "--chat-template", "/nowhere"], "--chat-template: /nowhere: can't be read"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(arguments: list[str], told: str) -> None:
    result = chat(*arguments)
    assert result.exit_code == 2
    assert told in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.slow("starts a server's processes")
def test_a_model_here_answers(tmp_path: Path) -> None:
    result = chat(
        "demo",
        "--max-tokens",
        "5",
        "--temperature",
        "0",
        "--set",
        "max_model_len=128",
        said="Where art thou?\nSay more.\n",
    )
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) >= 2
    template = tmp_path / "strict.jinja"
    template.write_text("{{ raise_exception('no words for this') if messages else '' }}")
    refused = chat(
        "demo",
        "--chat-template",
        str(template),
        "--set",
        "max_model_len=128",
        said="Where art thou?\n",
    )
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "no words for this" in refused.stderr


def test_a_model_without_a_template_is_reported_with_the_remedy(
    demo_without_template: Path,
) -> None:
    result = chat(str(demo_without_template), "--set", "max_model_len=128", said="hello\n")
    assert result.exit_code == 2
    assert "has no chat template" in result.stderr
    assert "dovetail generate" in result.stderr
    assert "--chat-template FILE" in result.stderr


@pytest.fixture
def demo_without_template(tmp_path: Path) -> Path:
    import dovetail_models

    source, directory = Path(next(iter(dovetail_models.__path__))) / "demo", tmp_path / "plain"
    directory.mkdir()
    for file in source.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self._fd = pty.fork()
        if not self.pid:
            # shells ignore it for what they start in the background, and so do all its children
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execve(
                sys.executable,
                [sys.executable, "-m", "dovetail", *arguments],
                {**os.environ, "TERM": "dumb"},
            )
        self._unread = b""

    def until(self, text: bytes) -> None:
        """Read on until the text has come."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self._unread:
            assert time.monotonic() < deadline, f"{text!r} doesn't come after {self._unread!r}"
            if select.select([self._fd], [], [], 1.0)[0]:
                self._unread += os.read(self._fd, 4096)
        self._unread = self._unread.partition(text)[2]

    def type(self, text: bytes) -> None:
        os.write(self._fd, text)

    def type_until(self, text: bytes, answer: bytes) -> None:
        """Type until the answer has come: Python loses a signal that arrives between the prompt and
        its wait for a key."""
        deadline = time.monotonic() + DEADLINE_S
        while answer not in self._unread:
            assert time.monotonic() < deadline, f"{answer!r} doesn't come after {self._unread!r}"
            self.type(text)
            while answer not in self._unread and select.select([self._fd], [], [], 1.0)[0]:
                self._unread += os.read(self._fd, 4096)
        self._unread = self._unread.partition(answer)[2]

    def status(self) -> int:
        """Return the exit status, once the command has ended by itself."""
        deadline = time.monotonic() + DEADLINE_S
        try:
            while True:
                if time.monotonic() > deadline:
                    os.kill(self.pid, signal.SIGKILL)
                    raise AssertionError(f"the command doesn't end after {self._unread!r}")
                if select.select([self._fd], [], [], 1.0)[0] and not os.read(self._fd, 4096):
                    break
        except OSError:  # the other end is closed
            pass
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.slow("starts a process in a terminal")
def test_in_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_ends(
    parrot: tuple[str, type[Parrot]],
) -> None:
    url, server = parrot
    terminal = Terminal("chat", url)
    terminal.until(b"> ")
    terminal.type(b"endless\n")
    terminal.until(b"and on and on")
    terminal.type(b"\x03")
    terminal.until(b"(stopped)")
    assert server.hung_up.wait(DEADLINE_S), "the server computes no further"
    terminal.until(b"> ")
    terminal.type_until(b"\x03", b"Ctrl-D quits")
    terminal.until(b"> ")
    terminal.type(b"\x1b[A -- or not?\n")  # the line before, from the history
    terminal.until(b"and on and on")
    terminal.type(b"\x03")
    terminal.until(b"(stopped)")
    terminal.until(b"> ")
    terminal.type(b"\x04")
    assert terminal.status() == 0
    assert server.bodies[-1]["messages"][-1]["content"] == "endless -- or not?"
