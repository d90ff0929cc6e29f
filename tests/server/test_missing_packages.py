"""Installations without the extra `server`, with a part of it, or without `grammar`: what works,
and the errors otherwise."""

from __future__ import annotations

import subprocess
import sys
import threading
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from dovetail.cli.app import app
from dovetail.errors import DISTRIBUTION
from dovetail.front.assembly import assemble
from dovetail.registry import requirements
from dovetail.registry.requirements import installed_version
from dovetail_server import command
from dovetail_server.command import EXTRA, MODULES
from dovetail_server.settings import ServerSettings
from dovetail_server.supervisor import Supervisor
from tests.server.serving import PATIENCE_S, serving_in_threads

ROOT = Path(__file__).parents[2]
MISSING = """import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {modules}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Finder())
from dovetail.cli.main import main
main()
"""


def run(modules: list[str], *args: str) -> subprocess.CompletedProcess[str]:
    """Run `dovetail` where these can't be imported."""
    return subprocess.run(
        [sys.executable, "-c", MISSING.format(modules=modules), *args],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("module", MODULES)
def test_a_package_that_is_missing_is_named_with_its_remedy_before_anything_starts(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Supervisor, "run", lambda supervisor: 0)
    # Imports themselves must not fail: a server of other tests runs in this process.
    monkeypatch.setattr(
        command, "find_spec", lambda name: None if name == module else find_spec(name)
    )
    done = CliRunner().invoke(app, ["serve", "demo", "--port", "0"])
    assert done.exit_code == 2
    assert (
        done.stderr == f"error: dovetail serve needs {MODULES[module]}; install with: pip install "
        f'"{DISTRIBUTION}[{EXTRA}]"\n'
    )


@pytest.mark.slow("starts a server's processes")
def test_without_the_extra_the_server_fails_with_one_sentence() -> None:
    done = run(list(MODULES), "serve", "demo", "--port", "0")
    assert done.returncode == 2
    needed = ", ".join(MODULES.values())
    assert (
        done.stderr == f"error: dovetail serve needs {needed}; install with: pip install "
        f'"{DISTRIBUTION}[{EXTRA}]"\n'
    )


@pytest.mark.parametrize(
    "args",
    [
        ("chat", "--help"),
        pytest.param(
            ("serve", "--help"), marks=pytest.mark.slow("imports all arguments of vLLM's")
        ),
        ("plugins", "list"),
    ],
    ids=" ".join,
)
def test_what_needs_no_server_works_without_its_packages(args: tuple[str, ...]) -> None:
    done = run(list(MODULES), *args)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_packages_are_those_of_the_extra() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ][EXTRA]
    needed = {
        requirement.name
        for requirement in map(Requirement, extra)
        if requirement.marker is None or requirement.marker.evaluate()
    }
    assert needed == {DISTRIBUTION, *MODULES.values()}


@pytest.fixture
def no_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages of the extra `grammar` aren't installed."""

    def find(package: str) -> str | None:
        return None if package == "llguidance" else installed_version(package)

    monkeypatch.setattr(requirements, "installed_version", find)


@pytest.mark.usefixtures("no_grammars")
def test_a_server_without_grammars_logs_it_on_start(caplog: pytest.LogCaptureFixture) -> None:
    assembly = assemble({"model": "demo"}, {})
    assembly.prepare_grammars()
    for thread in threading.enumerate():
        if thread.name == "dovetail-prepares-grammars":
            thread.join(PATIENCE_S)
    [record] = [record for record in caplog.records if "held to a rule" in record.getMessage()]
    assert record.levelname == "WARNING"
    assert f'pip install "{DISTRIBUTION}[grammar]"' in record.getMessage()


CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "chat_template": "{{ messages[0].content }}{{ tools }}{# <tool_call> #}",
}
PARAMETERS: dict[str, Any] = {"type": "object"}
WANT_GRAMMARS: dict[str, tuple[str, dict[str, Any], str]] = {
    "completions": ("/v1/completions", {"prompt": "Hi", "guided_choice": ["a"]}, "guided_choice"),
    "chat": (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_object"}},
        "response_format",
    ),
    "a demanded call": (
        "/v1/chat/completions",
        {
            **CHAT,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}],
            "tool_choice": "required",
        },
        "tool_choice",
    ),
    "responses": (
        "/v1/responses",
        {
            "input": "Hi",
            "chat_template": CHAT["chat_template"],
            "text": {"format": {"type": "json_object"}},
        },
        "text.format",
    ),
    "messages": (
        "/v1/messages",
        {
            **CHAT,
            "max_tokens": 5,
            "tools": [{"name": "f", "input_schema": PARAMETERS}],
            "tool_choice": {"type": "any"},
        },
        "tool_choice",
    ),
}


@pytest.mark.slow("imports modules anew")
@pytest.mark.usefixtures("no_grammars")
def test_without_grammars_a_rule_is_answered_with_501_and_no_advice_that_clients_cannot_follow() -> (
    None
):
    with serving_in_threads({"model": "demo"}, ServerSettings(log_requests=False)) as url:
        for path, body, param in WANT_GRAMMARS.values():
            for stream in (False, True):
                answer = httpx.post(url + path, json={**body, "stream": stream}, timeout=PATIENCE_S)
                message = answer.json()["error"]["message"]
                assert answer.status_code == 501, message
                assert message.startswith(f"{param}: this server has no working grammar backend")
                assert "pip" not in answer.text
        assert (
            httpx.post(
                f"{url}/v1/completions", json={"prompt": "Hi", "max_tokens": 2}, timeout=PATIENCE_S
            ).status_code
            == 200
        )
