"""Nothing passes silently: a check that doesn't count, for any reason, makes the verdict NOT
CONFORMANT, is named, and fails the session."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WAIVER = 'Waiver("known", "https://example.org/issues/1")'
RUN_S = 600.0  # of a session in a process
SLOW = pytest.mark.slow("starts a session of pytest, as another option does in a quick test")

HEAD = """
import pytest
from dovetail.testing import Waiver
from tests.conformance import tiny

"""

CLASSES = {  # name -> decorator, what the class changes, its verdict
    "TestGood": (
        "",
        "",
        "CONFORMANT scheduler api=1.1 suite=1.1, 8/8, 1 capabilities absent, 0 waived",
    ),
    "TestUnordered": (
        "",
        "component = tiny.Unordered",
        "CONFORMANT scheduler api=1.1 suite=1.1, 7/7, 2 capabilities absent, 0 waived",
    ),
    "TestOwnTests": (
        "",
        "def test_mine(self): self.helper()\n    def helper(self): ...",
        "CONFORMANT scheduler api=1.1 suite=1.1, 8/8, …",
    ),
    "TestWaived": (
        "",
        f"component = tiny.Broken\n    waivers = {{'tiny.second': {WAIVER}}}",
        "CONFORMANT scheduler api=1.1 suite=1.1, 7/8, …, 1 waived",
    ),
    "TestBroken": (
        "",
        "component = tiny.Broken",
        "NOT CONFORMANT scheduler api=1.1 suite=1.1, 7/8, …: tiny.second",
    ),
    "TestHangs": (
        "",
        "component = tiny.Hanging\n    time_limit_s = 1",
        "NOT CONFORMANT scheduler api=1.1 suite=1.1, 7/8, …: tiny.second",
    ),
    "TestOverrides": ("", "def test_first(self): ...", "NOT CONFORMANT …, 7/8, …: tiny.first"),
    "TestDeletes": ("", "test_first = None", "NOT CONFORMANT …, 7/8, …: tiny.first"),
    "TestAliases": (
        "",
        "test_again = tiny.TinySuite.test_first",
        "NOT CONFORMANT …, 7/8, …: tiny.first",
    ),
    "TestSwaps": (
        "",
        "test_second = tiny.TinySuite.test_first",
        "NOT CONFORMANT …, 7/8, …: tiny.second",
    ),
    "TestDeclares": (
        "",
        "def declares(self, capability): return False",
        "NOT CONFORMANT …: declares",
    ),
    "TestLoadsAnother": ("", "component_class = tiny.Good", "NOT CONFORMANT …: component_class"),
    "TestHooksIn": (
        "",
        "def __getattribute__(self, name): return object.__getattribute__(self, name)",
        "NOT CONFORMANT …: __getattribute__",
    ),
    "TestSkipped": (
        "@pytest.mark.skip",
        "",
        "NOT CONFORMANT …, 0/9, …: tiny.first, tiny.second, tiny.third, …",
    ),
    "TestExpectedToFail": (
        "@pytest.mark.xfail",
        "component = tiny.Broken",
        "NOT CONFORMANT …, 0/8, …: tiny.first, …",
    ),
    "TestSkipsItself": (
        "",
        "def setup_method(self): pytest.skip('not today')",
        "NOT CONFORMANT …, 0/9, …: tiny.first, …",
    ),
    "TestFailsAfterwards": (
        "",
        "def teardown_method(self): raise KeyError",
        "NOT CONFORMANT …, 0/9, …: tiny.first, …",
    ),
    "TestUncollectable": (
        "",
        "def __init__(self): ...",
        "NOT CONFORMANT …, 0/9, …: __init__, tiny.first, …",
    ),
    "TestOff": ("", "__test__ = False", "NOT CONFORMANT …, 0/9, …: __test__, tiny.first, …"),
    "NotCalledTest": ("", "", "NOT CONFORMANT …, 0/9, …: tiny.first, …"),
    "TestWaivesWhatPasses": (
        "",
        f"waivers = {{'tiny.first': {WAIVER}}}",
        "NOT CONFORMANT …, 7/8, …, 0 waived: tiny.first",
    ),
    "TestWaivesWhatIsAbsent": (
        "",
        f"component = tiny.Unordered\n    waivers = {{'tiny.third': {WAIVER}}}",
        "NOT CONFORMANT …: tiny.third",
    ),
    "TestWaivesNothing": (
        "",
        f"waivers = {{'tiny.nothing': {WAIVER}}}",
        "NOT CONFORMANT …: tiny.nothing",
    ),
    "TestWaivesWithoutReason": (
        "",
        "component = tiny.Broken\n    waivers = {'tiny.second': 'sorry'}",
        "NOT CONFORMANT …: tiny.second",
    ),
}


def source(*names: str) -> str:
    classes = (
        f"{CLASSES[name][0]}\nclass {name}(tiny.TinySuite):\n    component = tiny.Good\n    "
        f"{CLASSES[name][1]}\n"
        for name in names
    )
    return HEAD + "\n".join(classes)


def run_pytest(
    folder: Path, text: str, *args: str, installed: bool = False
) -> tuple[int, dict[str, str]]:
    """The exit code, and the verdict of each class. `installed`: pytest finds the plugin, and all
    others, by their entry points."""
    code, printed = print_of_pytest(folder, text, "--tb=no", *args, installed=installed)
    return code, verdicts_in(printed)


def print_of_pytest(
    folder: Path, text: str, *args: str, installed: bool = False
) -> tuple[int, str]:
    """The exit code, and what pytest prints."""
    (folder / "test_suites.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = a\n")
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTEST_ADDOPTS": "",
    }
    if not installed:
        environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        args = ("-p", "dovetail.testing.pytest_plugin", *args)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_S,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode, done.stdout


def verdicts_in(printed: str) -> dict[str, str]:
    verdicts, name = {}, ""
    for line in printed.splitlines():
        if heading := re.match(r"test_suites\.py::(\w+) \(", line):
            name = heading[1]
        elif re.match("(NOT )?CONFORMANT ", line):
            verdicts[name] = line
    return verdicts


def matches(pattern: str, line: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace("…", ".*"), line) is not None


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return pytest's output for all of them."""
    code, printed = print_of_pytest(
        tmp_path_factory.mktemp("suites"), source(*CLASSES), "test_suites.py"
    )
    assert code == 1
    return printed


@pytest.fixture(scope="module")
def verdicts(printed: str) -> dict[str, str]:
    return verdicts_in(printed)


@pytest.mark.parametrize("name", CLASSES)
def test_verdict_of_the_class(name: str, verdicts: dict[str, str]) -> None:
    assert matches(CLASSES[name][2], verdicts[name]), verdicts[name]


@pytest.mark.full
def test_workers_of_xdist_come_to_the_same_verdicts(
    tmp_path: Path, verdicts: dict[str, str]
) -> None:
    code, lines = run_pytest(
        tmp_path, source(*CLASSES), "-n", "2", "test_suites.py", installed=True
    )
    assert code == 1
    assert lines == verdicts


@pytest.mark.slow("runs pytest in a process")
def test_a_session_of_conformant_suites_passes(tmp_path: Path) -> None:
    names = [name for name, (_, _, verdict) in CLASSES.items() if not verdict.startswith("NOT")]
    code, lines = run_pytest(tmp_path, source(*names), "test_suites.py")
    assert (code, list(lines)) == (0, names)


@pytest.mark.slow("runs pytest in a process")
@pytest.mark.parametrize(
    "args",
    [
        ["-k", "first"],
        pytest.param(["-m", "a"], marks=SLOW),
        pytest.param(["--deselect", "test_suites.py::TestGood::test_second"], marks=SLOW),
        pytest.param(["test_suites.py::TestGood::test_first"], marks=SLOW),
        ["test_suites.py::test_other"],
    ],
    ids=" ".join,
)
def test_deselecting_a_check_fails_the_session(tmp_path: Path, args: list[str]) -> None:
    code, lines = run_pytest(tmp_path, source("TestGood") + "def test_other(): ...\n", *args)
    assert code == 1
    assert matches("NOT CONFORMANT …tiny.second…", lines["TestGood"])


def test_where_a_check_hung_is_reported(printed: str) -> None:
    said = r"it hung, and was ended after 1 s; the suite's time_limit_s gives it longer"
    assert re.search(
        said + r"\n.* in wait \(threading\.py:\d+\)(\n.*)* in wait \(tiny\.py:\d+\)", printed
    ), printed


@pytest.mark.slow("starts a process of pytest")
def test_only_collecting_gives_no_verdict(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, source("TestGood"), "--collect-only") == (0, {})
