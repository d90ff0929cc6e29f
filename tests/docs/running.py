"""Runs the code blocks of a page, as a program of its own: see `pages.py`.

`test_code_blocks.py` starts one for each page; a block that is wrong ends it with an error.
"""

from __future__ import annotations

import doctest
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from dovetail.cli.app import app
from dovetail.config.engine import COMPONENT_KEYS, EngineConfig
from dovetail.errors import ConfigError
from dovetail.registry.registry import AUTO, Registry
from dovetail.testing import runner
from dovetail_batch.job import load_plan
from dovetail_cluster.settings import load_cluster
from tests.conformance import fewer
from tests.docs.pages import ROOT, SHOWN_URL, Block, blocks_of, commands_of
from tests.forking import forking
from tests.support import FULL

NOT_INSTALLED = {"dovetail-fair", "dovetail-experimental"}  # distributions that pages make up
# "py": an excerpt of a file, as a test compares it; it isn't run
LANGUAGES = {"python", "py", "yaml", "console", "text", "toml", "json", "bash"}
ENDLESS = ("serve", "chat", "ranks", "cluster")  # commands that run until they are told to end
CURL_S = 60
# commands of the lab, as those that simulate a given time: only the full profile compares what they print with the page
SIMULATE_OFTEN = (
    "compare",
    "sweep",
    "capacity",
)
# of many seconds: only the full profile runs them
LONG_SUITE = re.compile(r"\brun\(\"(model|attention|sampler|logits_processor|kv_tier)\"")
LONG_SUITE_OF_A_COMMAND = re.compile(r"dovetail plugins test (scheduler\b|observer log$)")
# commands of seconds that a page shows too: outside of the full profile this other page runs them
RUN_BY = {"dovetail doctor determinism demo --schedules 2": "docs/cli.md"}
FEW = 8  # requests of each simulation otherwise
FEW_S = 20  # its time, where that is given instead
MANY = 200  # requests that take seconds: only the full profile replays more in a page's Python
FEW_OF_EACH = 2  # of each of a workload's clients, in a page's Python


def run_page(page: str, url: str) -> None:
    """Run the blocks in the current folder, whose modules they can import. `url`: of a server of
    the demo model."""
    # other cores run other tests: the lab doesn't start processes that import it again
    os.cpu_count = lambda: 1
    if not FULL:
        runner.COMMAND = fewer.COMMAND
    with nullcontext() if FULL else cheap_processes():
        run_blocks(page, url)


@contextmanager
def cheap_processes() -> Iterator[None]:
    """Processes of suites, batch jobs and the doctor are forks of this one, which has imported what
    they do, and ranks are its threads."""
    from dovetail.registry.doctor import process
    from dovetail_batch import runner as batch_runner
    from tests.executors.rank_threads import ranks_as_threads

    with forking(runner, batch_runner, process), ranks_as_threads():
        yield


def run_blocks(page: str, url: str) -> None:
    module = ModuleType("documentation_page")
    sys.modules[module.__name__] = module
    printed: str | None = ""
    for block in blocks_of(page):
        if block.included is not None:
            assert block.included.is_file(), f"{block.place}: no file {block.included}"
            continue
        assert block.language in LANGUAGES, f"{block.place}: unknown language {block.language!r}"
        if block.not_run:
            continue
        if block.is_file:
            write(block)
        if LONG_SUITE.search(block.text) and not FULL:
            printed = None
        elif block.language == "python":
            text = block.text if FULL else with_few_requests(block.text)
            code = compile("\n" * block.line + addressed(text, url), block.page, "exec")
            printed = "" if block.is_file else run_python(code, vars(module))
            if text != block.text:
                printed = None
        elif block.language == "yaml":
            check_config(block)
        elif block.language == "console":
            run_console(block, url)
        elif block.language == "bash":
            check_docker(block)
        elif block.is_output and printed is not None:
            check_output(block, block.text, printed)


def write(block: Block) -> None:
    path = Path(str(block.title))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text)


def run_python(code: object, namespace: dict[str, object]) -> str:
    with redirect_stdout(io.StringIO()) as out:
        exec(code, namespace)  # type: ignore[arg-type]
    return out.getvalue()


def check_config(block: Block) -> None:
    """Its keys are right, and so are the options of components that are built in."""
    path = Path(block.title or "engine.yaml")
    path.write_text(block.text)
    if path.name.startswith("job"):
        load_plan(str(path))
    elif path.name.startswith("cluster"):
        load_cluster(str(path))
    elif path.name.startswith("wrong"):
        with pytest.raises(ConfigError):
            check_components(EngineConfig.load(path))
    else:
        check_components(EngineConfig.load(path))


def check_components(config: EngineConfig) -> None:
    for requirement in config.plugins.require:
        assert any(requirement.startswith(name) for name in NOT_INSTALLED), f"who is {requirement}?"
    registry = Registry.discover()
    for key, kind in COMPONENT_KEYS.items():
        for choice in config.choices(key):
            if choice.name != AUTO:
                registry.resolve(kind, choice.name, choice.options, choice.where).validate_options()


def addressed(text: str, url: str) -> str:
    """Return the text with the URL of the server instead of the one that pages show."""
    return text.replace(SHOWN_URL, url) if SHOWN_URL in text else text


def run_console(block: Block, url: str) -> None:
    for command in commands_of(block):
        words = shlex.split(command.line, comments=True)
        if not FULL and is_left_out(command.line, block.page):
            continue
        if words[0] == "curl":
            run_curl(block, words, command.output, url)
        elif words[0] == "dovetail" and words[1] in ENDLESS:
            check_flags(block, words[1:])
        elif words[0] == "dovetail":
            run_dovetail(block, words[1:], command.output)
        else:
            check_that_it_could_run(block, words)


def is_left_out(line: str, page: str) -> bool:
    """Whether only the full profile runs a command of this page."""
    return RUN_BY.get(line, page) != page or LONG_SUITE_OF_A_COMMAND.match(line) is not None


def run_dovetail(block: Block, args: list[str], expected: str) -> None:
    """The exit code is 2 if an error is shown, otherwise 0."""
    if ">" in args:
        args, expected = args[: args.index(">")], ""
    args = [str(ROOT / arg) if arg.startswith("examples/") else arg for arg in args]
    if args[0] == "lab" and not FULL:
        draw_once()
        if args[1] in SIMULATE_OFTEN or "duration=" in str(args):
            args, expected = abridged(args), ""
    result = CliRunner().invoke(app, args, prog_name="dovetail")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == (2 if "error:" in expected else 0), f"{block.place}: {result.output}"
    if expected:
        check_output(block, expected, result.output)


def with_few_requests(code: str) -> str:
    """Return this code, with few requests if it replays more than `MANY`, or those of several
    clients. What it prints isn't what the page shows then."""
    if "replay(" not in code:
        return code
    code = re.sub(r'"requests": \d+', f'"requests": {FEW_OF_EACH}', code)
    return re.sub(
        r"\brequests=(\d+)",
        lambda found: f"requests={FEW}" if int(found[1]) > MANY else found[0],
        code,
    )


def draw_once() -> None:
    """Let reports have their figures in the page alone, as they come: most of the time of a small
    simulation's report is their layout, and the same figures again as PNG."""
    from dovetail_lab.report import html

    vars(html).update(lay_out=lambda figure: figure.set_layout_engine(None), png=lambda _: b"")


def abridged(args: list[str]) -> list[str]:
    """Return this command of the lab with two seeds, few requests, one rate, the first two of
    several values and no warm-up. What it prints isn't what the page shows then."""
    args = [re.sub(r"\brequests=\d+", f"requests={FEW}", arg) for arg in args]
    args = [re.sub(r"\bduration=\d+", f"duration={FEW_S}", arg) for arg in args]
    for index, (option, value) in enumerate(pairwise(args), start=1):
        if option == "--seeds":
            args[index] = "2"
        if option == "--rates":
            args[index] = value.split(",")[0]
        if option == "--window":
            args[index] = "0s:"
        if option == "--set" and re.fullmatch(r"[\w.]+=[\w.]+(,[\w.]+)+", value):
            args[index] = ",".join(value.split(",")[:2])
        if option == "--trace" and value.endswith(".yaml"):
            args[index] = f"few-{Path(value).name}"
            Path(args[index]).write_text(
                re.sub(
                    r"^requests: \d+",
                    f"requests: {FEW}",
                    Path(value).read_text(),
                    flags=re.MULTILINE,
                )
            )
    return args


def run_curl(block: Block, words: list[str], expected: str, url: str) -> None:
    """The server's answer must be one of success."""
    assert any(word.startswith(f"{SHOWN_URL}/") for word in words), (
        f"{block.place}: curl asks another server than {SHOWN_URL}"
    )
    added = [
        "--silent",
        "--show-error",
        "--noproxy",
        "*",
        "--max-time",
        str(CURL_S),
        "--write-out",
        "\n%{http_code}",
    ]
    done = subprocess.run(
        [*(addressed(word, url) for word in words), *added], capture_output=True, text=True
    )
    body, _, status = done.stdout.rpartition("\n")
    assert done.returncode == 0, f"{block.place}: {done.stderr}"
    assert status.startswith("2"), f"{block.place}: {status} {body}"
    if expected:
        check_output(block, expected, body)


def check_flags(block: Block, args: list[str]) -> None:
    """The command's help must have them."""
    told = (
        CliRunner()
        .invoke(app, [*args[: 2 if args[0] == "cluster" else 1], "--help"], prog_name="dovetail")
        .output
    )
    told = re.sub(r"-\n\s*", "-", told)  # a flag may be broken at a hyphen
    unknown = {word.partition("=")[0] for word in args if word.startswith("--")} - set(
        re.findall(r"--[\w-]+", told)
    )
    assert not unknown, f"{block.place}: dovetail {args[0]} has no {sorted(unknown)}"


def check_docker(block: Block) -> None:
    for line in block.text.splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "docker", (
            f"{block.place}: {words[0]} isn't docker; what can be run or checked is in blocks of "
            f"the language console"
        )
        missing = [
            word for word in words if word.startswith("deploy/") and not (ROOT / word).is_file()
        ]
        assert not missing, f"{block.place}: no file {missing}"


def check_that_it_could_run(block: Block, words: list[str]) -> None:
    """Commands that a test can't run: what they name must exist."""
    if words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(), (
            f"{block.place}: the Makefile has no target {words[1]}"
        )
    elif words[:3] == ["python", "-m", "pytest"]:
        missing = [word for word in words[3:] if "/" in word and not (ROOT / word).exists()]
        assert not missing, f"{block.place}: no file {missing}"
    elif words[0] == "python":
        script = ROOT / (f"{words[2].replace('.', '/')}.py" if words[1] == "-m" else words[1])
        assert script.exists(), f"{block.place}: no file {script}"
        unknown = [
            word
            for word in words[2:]
            if word.startswith("--") and f'"{word}"' not in script.read_text()
        ]
        assert not unknown, f"{block.place}: {script.name} has no {unknown}"
    elif words[0] == "kubectl":
        missing = [
            word for word in words if word.startswith("deploy/") and not (ROOT / word).exists()
        ]
        assert not missing, f"{block.place}: no file {missing}"
    elif words[0] == "source":
        assert words[1:] == [".venv/bin/activate"], f"{block.place}: `make demo` makes .venv"
        assert "VENV ?= .venv\n" in (ROOT / "Makefile").read_text()
    elif words[:2] == ["git", "clone"]:
        assert words[2] == "WHERE_YOU_HAVE_THIS_FROM", (
            f"{block.place}: is there a public address now? Then pyproject.toml wants "
            f"[project.urls]"
        )
    elif words[:2] == ["pip", "install"]:
        extras = re.findall(r"dovetail-llm\[(.+?)\]", " ".join(words))
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
        assert all(extra in known for names in extras for extra in names.split(",")), (
            f"{block.place}: unknown extra in {words}"
        )
    else:
        pytest.fail(
            f"{block.place}: {words[0]} is none of dovetail, curl, make, source, python, pip, git, "
            f"kubectl: nobody could check it"
        )


def check_output(block: Block, expected: str, printed: str) -> None:
    checker, flags = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert checker.check_output(expected, printed, flags), (
        f"{block.place}: expected\n{expected}\ngot\n{printed}"
    )
