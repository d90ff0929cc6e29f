"""Run clients against a server of the demo model: `python -m tests.clients [NAME...]`, or
`make test-clients CLIENTS="..."`.

Each client gets an environment of its own, made of packages of the index and deleted afterwards.
Prints a table; exits with 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import dovetail_models
from tests.clients.agents import served_agents

PROGRAMS = Path(__file__).parent / "programs"
DEMO = Path(dovetail_models.__file__).parent / "demo"
CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"
CONFIG_CHANGES = {
    "max_position_embeddings": 8192
}  # the prompts of some clients are longer than the demo's 1,024 tokens
INSTALL_S, CHECKS_S, START_S = 1200, 600, 120
QUIET = {
    "HAYSTACK_TELEMETRY_ENABLED": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class Client:
    """A client: the packages of its environment, the first of which names its version. Its program
    is `programs/with_NAME.py` or `.mjs`.

    A coding agent (`agent`) talks to a server that calls its shell, see `agents`. The program of an
    agent from npm runs it as a command.
    """

    packages: tuple[str, ...]
    npm: bool = False
    agent: bool = False


CLIENTS = {
    "openai": Client(("openai",)),
    "anthropic": Client(("anthropic",)),
    "litellm": Client(("litellm",)),
    "langchain-openai": Client(("langchain-openai",)),
    "llama-index": Client(("llama-index-llms-openai-like", "llama-index-embeddings-openai-like")),
    "instructor": Client(("instructor", "anthropic")),
    "pydantic-ai": Client(("pydantic-ai-slim[openai,anthropic]",)),
    "openai-agents": Client(("openai-agents",)),
    "haystack": Client(("haystack-ai",)),
    "outlines": Client(("outlines[openai]",)),
    "guidance": Client(("guidance", "openai")),
    "lm-eval": Client(("lm-eval[api]", "transformers")),
    "guidellm": Client(("guidellm",)),
    "ai-sdk": Client(("ai", "@ai-sdk/openai-compatible", "zod"), npm=True),
    "codex": Client(("@openai/codex",), npm=True, agent=True),
    "claude-code": Client(("@anthropic-ai/claude-code",), npm=True, agent=True),
    "opencode": Client(("opencode-ai",), npm=True, agent=True),
    "aider": Client(("aider-chat",), agent=True),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a client: its version and the error of each check, None where it passed. `trouble`
    is set where no check ran."""

    name: str
    version: str = "-"
    checks: dict[str, str | None] = field(default_factory=dict)
    trouble: str | None = None

    @property
    def passed(self) -> bool:
        """Whether checks ran, and all passed."""
        return self.trouble is None and bool(self.checks) and not any(self.checks.values())

    def row(self) -> tuple[str, str, str]:
        """Return the cells of the table."""
        failed = [name for name, error in self.checks.items() if error]
        return (
            self.name,
            self.version,
            self.trouble
            or (f"FAILED: {', '.join(failed)}" if failed else "passed: " + ", ".join(self.checks)),
        )


def program_of(name: str) -> Path:
    """Return the file with the checks of a client."""
    client = CLIENTS[name]
    return (
        PROGRAMS
        / f"with_{name.replace('-', '_')}.{'mjs' if client.npm and not client.agent else 'py'}"
    )


def results_of(stdout: str) -> dict[str, str | None]:
    """Return the results that a program printed as its last line. Raise ValueError if it printed
    none."""
    lines = stdout.strip().splitlines()
    results = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    if not isinstance(results, dict) or not results:
        raise ValueError("the program printed no results")
    return results


def table(verdicts: Sequence[Verdict]) -> str:
    """Return the verdicts as a table of three columns."""
    rows = [("client", "version", "checks"), *(verdict.row() for verdict in verdicts)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}" for row in rows)


def _run(
    command: Sequence[str | Path],
    timeout_s: float,
    environment: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Return the stdout of a command. Raise RuntimeError with the end of its stderr if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env=environment, cwd=cwd
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(str(error)) from None
    if done.returncode:
        raise RuntimeError(" ".join((done.stderr or done.stdout).split())[-400:])
    sys.stderr.write(done.stderr[-20_000:])
    return done.stdout


def _python_client(name: str, directory: Path, url: str) -> tuple[str, str]:
    packages, python = CLIENTS[name].packages, directory / "bin" / "python"
    if not python.exists():
        _run([sys.executable, "-m", "venv", directory], INSTALL_S)
    _run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages],
        INSTALL_S,
    )
    own = re.split(r"[\[=<>]", packages[0])[0]
    version = _run(
        [
            python,
            "-c",
            "import sys; from importlib.metadata import version; print(version(sys.argv[1]))",
            own,
        ],
        CHECKS_S,
    ).strip()
    environment = {
        **os.environ,
        **QUIET,
        "PYTHONPATH": "",
        "OPENAI_API_KEY": "none",
        "DOVETAIL_TEST_TOKENIZER": str(DEMO),
    }
    return version, _run(
        [python, PROGRAMS / "run.py", program_of(name).stem, url], CHECKS_S, environment
    )


def _npm_client(name: str, directory: Path, url: str) -> tuple[str, str]:
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            raise RuntimeError(f"{tool} isn't installed")
    directory.mkdir(parents=True, exist_ok=True)
    packages = CLIENTS[name].packages
    _run(
        ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", directory, *packages],
        INSTALL_S,
    )
    version = json.loads(
        (directory / "node_modules" / packages[0] / "package.json").read_text(encoding="utf-8")
    )["version"]
    if CLIENTS[name].agent:
        environment = {
            **os.environ,
            "PATH": f"{directory / 'node_modules' / '.bin'}{os.pathsep}{os.environ['PATH']}",
        }
        return version, _run(
            [sys.executable, PROGRAMS / "run.py", program_of(name).stem, url], CHECKS_S, environment
        )
    program = shutil.copy(program_of(name), directory)  # Node looks for packages beside the program
    return version, _run(["node", program, url], CHECKS_S)


def verdict_on(name: str, directory: Path, url: str) -> Verdict:
    """Install a client in `directory` and run its checks. A failure is part of the verdict."""
    version = "-"
    try:
        version, stdout = (_npm_client if CLIENTS[name].npm else _python_client)(
            name, directory, url
        )
        return Verdict(name, version, results_of(stdout))
    except (RuntimeError, ValueError) as error:
        return Verdict(name, version, trouble=f"FAILED: {error}")


def make_checkpoint(directory: Path) -> None:
    """Make the demo model into one with a longer context."""
    directory.mkdir()
    for file in DEMO.iterdir():
        if file.name != "config.json":
            (directory / file.name).symlink_to(file)
    config: dict[str, Any] = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(config | CONFIG_CHANGES), encoding="utf-8")


def _line_of(stdout: IO[str]) -> str:
    for line in stdout:
        if found := re.search(r"serves \S+ at (http://\S+)", line):
            return found[1]
    raise RuntimeError("the server didn't start")


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """Serve the demo model, with a longer context and a template that knows tools; the URL."""
    make_checkpoint(directory / "demo")
    with _serving(directory / "demo", "--chat-template", str(CHAT_TEMPLATE)) as url:
        yield url


@contextmanager
def served_images(directory: Path) -> Iterator[str]:
    """Serve a tiny random model that reads images; the URL."""
    from tests.media.checkpoints import save_checkpoint  # it imports transformers

    save_checkpoint(directory / "images", "mistral3")
    with _serving(directory / "images") as url:
        yield url


@contextmanager
def _serving(model: Path, *flags: str) -> Iterator[str]:
    common = ["--port", "0", "--no-log-requests", "--served-model-name", "demo"]
    command = [sys.executable, "-m", "dovetail", "serve", str(model), *common, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield _line_of(server.stdout)
        finally:
            server.terminate()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the clients that are named, or all; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.clients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}; default: all"
    )
    parser.add_argument(
        "--environments",
        type=Path,
        help="keep the environments in this folder, and use those that are there",
    )
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.names if name not in CLIENTS]:
        parser.error(f"no client {', '.join(unknown)}; there are {', '.join(CLIENTS)}")
    verdicts = []
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder)) as url,
        served_images(Path(folder)) as images_url,
        served_agents() as agents_url,
    ):
        os.environ["DOVETAIL_TEST_IMAGES_URL"] = images_url
        for name in given.names or CLIENTS:
            print(f"{name} ...", file=sys.stderr)
            directory = (given.environments or Path(folder)) / name
            verdicts.append(verdict_on(name, directory, agents_url if CLIENTS[name].agent else url))
            if given.environments is None:
                shutil.rmtree(directory, ignore_errors=True)
    print(table(verdicts))
    return 0 if all(verdict.passed for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
