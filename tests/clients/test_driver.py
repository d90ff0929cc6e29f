"""The driver of `make test-clients`: what it makes of programs' results. The clients themselves run
only there."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.clients import __main__ as driver
from tests.clients.__main__ import (
    CLIENTS,
    CONFIG_CHANGES,
    DEMO,
    Verdict,
    main,
    make_checkpoint,
    program_of,
    results_of,
    table,
    verdict_on,
)
from tests.clients.agents import WORD, answer_to
from tests.clients.programs import agent
from tests.docs.pages import DOCS


def test_each_client_has_a_program_and_a_row_of_the_page() -> None:
    page = (DOCS / "serving" / "clients.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[?`?([a-z0-9-]+)`?\]?[^|]* \| [0-9]", page, re.MULTILINE)
    assert sorted(rows) == sorted(CLIENTS)
    programs = {file.name for file in driver.PROGRAMS.iterdir() if file.name.startswith("with_")}
    assert programs == {program_of(name).name for name in CLIENTS}


def test_agents_are_configured_as_documented_and_call_their_shell_once() -> None:
    for title in ("~/.codex/config.toml", "opencode.json"):
        assert "http://x:1/v1" in agent.block(title, "http://x:1")
    for program, variable in (("claude", "ANTHROPIC_BASE_URL"), ("aider", "OPENAI_API_BASE")):
        assert agent.command_line(program, "http://x:1")[0][variable].startswith("http://x:1")
    assert agent.WORD == WORD
    tools = '{"name": "exec_command"}\n<user>Say it\n<assistant>'
    called = answer_to(tools)
    assert '"exec_command"' in called.text
    assert (
        answer_to(f"{tools}{called.text}\n<tool>Output:\n{WORD}\n<assistant>").text
        == f"It said {WORD}."
    )


def test_results_are_the_last_line() -> None:
    assert results_of('noise\n{"chat": null, "tools": "E: no"}\n') == {
        "chat": None,
        "tools": "E: no",
    }
    for stdout in ("", "noise", "{}"):
        with pytest.raises(ValueError, match="no results"):
            results_of(stdout)


def test_a_client_passes_when_all_its_checks_do() -> None:
    good = Verdict("a", "1.0", {"chat": None})
    bad = Verdict("b", "2.0", {"chat": None, "tools": "E: no"})
    broken = Verdict("c", trouble="FAILED: no such package")
    assert [verdict.passed for verdict in (good, bad, broken, Verdict("d"))] == [
        True,
        False,
        False,
        False,
    ]
    lines = table([good, bad, broken]).splitlines()
    assert [line.split(None, 2)[2] for line in lines[1:]] == [
        "passed: chat",
        "FAILED: tools",
        "FAILED: no such package",
    ]


def test_a_failure_is_a_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("pip says no")

    monkeypatch.setattr(driver, "_python_client", fail)
    assert verdict_on("openai", tmp_path, "http://x").row() == (
        "openai",
        "-",
        "FAILED: pip says no",
    )


def test_an_unknown_client_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["openai", "closedai"])
    assert "no client closedai; there are openai," in capsys.readouterr().err


def test_programs_report_each_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "with_it.py").write_text(
        "def good(url):\n    assert url == 'u'\n\ndef bad(url):\n    raise KeyError('x')\n\ndef "
        "_own(url):\n    1 / 0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from tests.clients.programs import run

    run.main("with_it", "u")
    assert results_of(capsys.readouterr().out) == {"good": None, "bad": "KeyError: 'x'"}
    sys.modules.pop("with_it")


def test_the_checkpoint_differs_from_the_demo_in_its_length_alone(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "demo")
    made, demo = (
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for folder in (tmp_path / "demo", DEMO)
    )
    assert made == demo | CONFIG_CHANGES
    assert {file.name for file in (tmp_path / "demo").iterdir()} == {
        file.name for file in DEMO.iterdir()
    }
