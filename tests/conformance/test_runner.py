"""`run` returns a verdict for any behaviour of a component, and names the component."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dovetail import __version__
from dovetail.api.component import API_VERSIONS, SUITE_VERSION, Kind
from dovetail.cli.app import app
from dovetail.errors import ConfigError, DovetailError, PluginError
from dovetail.testing import ObserverSuite, Waiver, run, runner
from dovetail.testing.checks import checks_of
from dovetail.testing.child import SuiteRun, generated_suite
from tests.conformance import unruly
from tests.conformance.forked_suites import MODULES, ForkedSuites
from tests.preloaded import Preloaded
from tests.registry.fakes import Site, components
from tests.registry.site import site  # noqa: F401
from tests.support import FULL

CHECK = "observer.failed_run"  # in which the unruly are unruly
CHECKS = {
    CHECK,
    "observer.process_untouched",
    "observer.no_effect",
}  # those that play a failed run, up to the third: then the suite gives up
LIMIT_S = 4.0
RUN_S = 600.0  # of a process that no runner watches
# `dovetail.testing.runner.COMMAND`, with a shorter long run, and with a suite that starts no
# processes of its own, too: test_builtins.py shows what it finds with them.
SHORTER = """
import sys
from dovetail.testing.child import main
from dovetail.testing.suites import observer
observer.LONG //= 50
main(sys.argv[1])
"""
COMMAND = f"""
from dovetail.testing import hygiene
from dovetail.testing.suites import process_state
hygiene.run_python = lambda *args, **environ: None
process_state.answer_elsewhere = lambda *args, **named: ([], [])
{SHORTER}"""


@pytest.fixture(scope="module")
def suites_imported() -> Iterator[Preloaded]:
    with closing(Preloaded(MODULES)) as process:
        yield process


@pytest.fixture(autouse=True)
def fewer_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run shorter suites, in forks of one process unless the test uses `executed`."""
    if FULL:
        return
    monkeypatch.setattr(runner, "COMMAND", COMMAND)
    if request.node.get_closest_marker("slow") and "executed" not in request.fixturenames:
        forks = ForkedSuites(request.getfixturevalue("suites_imported"))
        monkeypatch.setattr(runner, "subprocess", forks)


@pytest.fixture
def executed() -> None:
    """Each suite of this test has a process that isn't forked from another one."""


@pytest.mark.parametrize(
    ("component", "message", "in_line"),
    [
        (unruly.Crashes, "it ended the process, by SIGSEGV", True),
        (unruly.Exits, "it ended the process, with exit code 0", False),
    ],
)
@pytest.mark.slow("runs suites of components in processes")
def test_a_check_in_which_the_process_is_lost_has_failed_and_the_others_count(
    component: type, message: str, in_line: bool
) -> None:
    verdict = run("observer", component)
    lost, given_up = verdict.findings
    assert {lost.id, *lost.also} == CHECKS
    assert given_up.message.startswith("it didn't run")
    assert message in verdict.findings[0].message
    assert ("in misbehave (unruly.py:" in verdict.findings[0].message) == in_line
    assert verdict.findings[0].help == "", "a hint on what the check would have looked at"
    assert verdict.passed == verdict.expected - len(CHECKS) - 1 - len(given_up.also)
    assert component.__name__ in verdict.component


@pytest.mark.slow("runs suites of components in processes")
def test_a_check_that_hangs_has_failed_and_the_others_count() -> None:
    verdict = run("observer", unruly.HangsInC, time_limit_s=LIMIT_S)
    (lost,) = verdict.findings
    assert {lost.id, *lost.also} < CHECKS
    assert lost.message.startswith(
        "it hung, and was ended after 4 s, without the time when others had the CPU; --time-limit"
    )
    assert "in misbehave (unruly.py:" in lost.message
    assert lost.help == ""
    assert verdict.passed == verdict.expected - 1


@pytest.mark.slow("runs suites of components in processes")
def test_a_component_that_always_ends_the_process_is_given_up() -> None:
    *deaths, given_up = run("observer", unruly.DiesAtOnce, time_limit_s=60).findings
    assert "it ended the process, with exit code 3" in [death.message for death in deaths]
    assert sum(1 + len(death.also) for death in deaths) >= 3
    assert given_up.message.startswith("it didn't run: checks before it ended the process 3 times")
    assert given_up.also


@pytest.mark.parametrize("component", [unruly.ExitsPolitely, unruly.RaisesWithoutWords])
@pytest.mark.slow("runs suites of components in processes")
def test_what_a_component_raises_fails_the_check(component: type) -> None:
    assert CHECK in [finding.id for finding in run("observer", component).findings]


@pytest.mark.slow("runs suites of components in processes")
def test_what_fails_many_checks_is_one_finding_with_file_and_line() -> None:
    finding, *_ = run("observer", unruly.Interrupts).findings
    line = inspect.getsourcelines(unruly.Interrupts)[1] + 2
    assert finding.message == f"the check broke off: KeyboardInterrupt ({unruly.__file__}:{line})"
    assert CHECK in finding.also
    assert finding.help == ""


@pytest.mark.parametrize("component", [unruly.WritesToAnyFile, unruly.ForksItself])
@pytest.mark.slow("runs suites of components in processes")
def test_a_component_that_meddles_with_its_process_has_a_verdict(component: type) -> None:
    verdict = run("observer", component, time_limit_s=60)
    assert component.__name__ in verdict.component
    assert verdict.expected >= verdict.passed > 5


@pytest.mark.slow("runs suites of components in processes")
def test_an_error_whose_message_holds_the_time_is_one_finding() -> None:
    (finding,) = run("observer", unruly.RaisesWithTheTime).findings
    assert "observer.failed_run" in finding.also


@pytest.mark.slow("runs suites of components in processes")
@pytest.mark.usefixtures("executed")  # numbers of threads are read as libraries are imported
@pytest.mark.parametrize("own", [None, "2"])
def test_tensors_of_a_suite_are_computed_in_one_thread_unless_told_otherwise(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    if own is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", own)
    (finding,) = run("observer", unruly.SaysHowManyThreads).findings
    assert f"threads: {own or 1}" in finding.message


@pytest.mark.slow("runs suites of components in processes")
def test_a_call_that_blocks_is_mentioned() -> None:
    verdict = run("observer", unruly.BlocksOnce)
    assert verdict.conformant
    assert any("a call of on_stopped took 0.2 s" in note for note in verdict.notes)


@pytest.mark.slow("runs suites of components in processes")
def test_no_component_can_say_that_a_required_check_is_not_wanted() -> None:
    verdict = run("observer", unruly.SaysThatItIsAbsent)
    assert (
        f"the check broke off: Absent: anything isn't declared ({unruly.__file__}:"
        in verdict.findings[0].message
    )
    assert (verdict.conformant, verdict.expected) == (False, 18)


@pytest.mark.slow("runs suites of components in processes")
def test_what_is_not_text_is_told_too(site: Site) -> None:  # noqa: F811
    site.install(
        "dovetail-mute",
        modules={
            "mute": components(
                'kind="observer", name="mute", target="tests.conformance.unruly:RaisesNoText"'
            )
        },
    )
    done = CliRunner().invoke(app, ["plugins", "test", "observer", "mute"])
    assert "ValueError: no text: \\udcff" in done.stdout


@pytest.mark.slow("runs suites of components in processes")
def test_what_a_component_prints_is_not_in_the_json(site: Site) -> None:  # noqa: F811
    spec = 'kind="observer", name="loud", target="tests.conformance.unruly:Prints"'
    site.install("dovetail-loud", modules={"loud": "print('noise')\n" + components(spec)})
    done = CliRunner().invoke(app, ["plugins", "test", "observer", "loud", "--json"])
    told = json.loads(done.stdout)
    assert [
        told[key] for key in ("kind", "component", "distribution", "version", "written_for")
    ] == [
        "observer",
        "loud",
        "dovetail-loud",
        "1.0",
        "1.1",
    ]


@pytest.mark.slow("runs suites of components in processes")
def test_a_verdict_for_machines_names_every_check(site: Site, tmp_path: Path) -> None:  # noqa: F811
    site.install(
        "dovetail-one",
        modules={
            "one": components(
                'kind="observer", name="one", target="tests.conformance.unruly:RaisesNoText"'
            )
        },
    )
    done = CliRunner().invoke(
        app,
        ["plugins", "test", "observer", "one", "--json", "--badge", str(tmp_path / "badge.json")],
    )
    told, badge = json.loads(done.stdout), json.loads((tmp_path / "badge.json").read_text())
    assert (done.exit_code, told["conformant"], told["dovetail"]) == (1, False, __version__)
    assert set(told["checks"]) == set(checks_of(ObserverSuite))
    counts = Counter(told["checks"].values())
    assert (counts["passed"], counts["passed"] + counts["failed"]) == (
        told["passed"],
        told["expected"],
    )
    failed = {id for id, judged in told["checks"].items() if judged == "failed"}
    assert (
        failed
        == {id for finding in told["findings"] for id in (finding["id"], *finding["also"])}
        != set()
    )
    assert badge["message"] == f"observer not conformant, {told['passed']}/{told['expected']}"
    assert told["seconds"] > 0


@pytest.mark.parametrize("badge", [".", "nowhere/badge.json"])
def test_a_badge_that_cannot_be_written_is_refused_before_the_suite_runs(badge: str) -> None:
    done = CliRunner().invoke(app, ["plugins", "test", "observer", "log", "--badge", badge])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--badge: expected a file in a folder that exists" in done.stderr


@pytest.mark.slow("starts a process")
def test_a_component_that_cannot_be_imported_has_a_verdict(site: Site) -> None:  # noqa: F811
    site.install(
        "dovetail-gone",
        modules={"gone": components('kind="observer", name="gone", target="nowhere.at_all:Gone"')},
    )
    done = CliRunner().invoke(app, ["plugins", "test", "observer", "gone"])
    assert done.exit_code == 1
    assert "importing nowhere.at_all failed" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(
        f"NOT CONFORMANT observer api={API_VERSIONS['observer']} suite={SUITE_VERSION}, 0/0"
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise SystemExit(0)", "dovetail-gone/main 1.0 failed (import): SystemExit: 0"),
        (
            components('kind="observer", name="gone", target="nowhere:Gone", api="7.0"'),
            "needs a Dovetail with observer >= 7.0",
        ),
    ],
)
@pytest.mark.slow("runs suites of components in processes")
def test_a_component_whose_plugin_is_to_blame_has_a_verdict(
    site: Site,  # noqa: F811
    source: str,
    message: str,
) -> None:
    site.install("dovetail-gone", modules={"gone": source})
    verdict = run("observer", "gone")
    assert not verdict.conformant
    assert message in verdict.findings[0].message


@pytest.mark.slow("runs suites of components in processes")
def test_wrong_words_are_errors_and_no_verdict() -> None:
    with pytest.raises(PluginError, match="did you mean log"):
        run("observer", "lgo")
    with pytest.raises(PluginError, match="did you mean observer"):
        run("obsever", "log")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be what JSON can hold"):
        run("observer", "log", {"every_s": {1, 2}})
    with pytest.raises(ConfigError, match="unknown option"):
        run("observer", "log", {"no_such_option": 1})
    with pytest.raises(DovetailError, match="define it at the top level"):
        run("observer", type("Nowhere", (), {"__qualname__": "f.<locals>.Nowhere"}))
    with pytest.raises(ValueError, match="url"):
        Waiver("because", "not a url")


@pytest.mark.slow("runs suites of components in processes")
def test_waivers_reach_the_verdict() -> None:
    verdict = run(
        "observer",
        unruly.Raises,
        waivers={CHECK: Waiver("on purpose", "https://example.org/1")},
        time_limit_s=60,
    )
    assert verdict.waived == (CHECK,)
    assert verdict.conformant


def command(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plugins", "test", *args])
    return done.exit_code, done.output


@pytest.mark.slow("runs suites of components in processes")
def test_the_command_takes_waivers(site: Site) -> None:  # noqa: F811
    spec = 'kind="observer", name="raises", target="tests.conformance.unruly:Raises"'
    site.install("dovetail-raises", modules={"raises": components(spec)})
    code, told = command(
        "observer", "raises", "--waive", f"{CHECK}=on purpose (https://example.org/1)"
    )
    assert (code, told.splitlines()[-1].startswith("CONFORMANT")) == (0, True)
    assert f"waived: {CHECK}: on purpose (https://example.org/1)" in told
    waivers = f'waivers=("{CHECK}=on purpose https://example.org/1",)'
    declared = spec.replace('name="raises"', 'name="declares"') + f", {waivers}"
    site.install("dovetail-declares", modules={"declares": components(declared)})
    assert command("observer", "declares")[1].splitlines()[-1].endswith("1 waived")
    code, told = command(
        "observer",
        "log",
        "--waive",
        f"{CHECK}=on purpose https://example.org/1",
        "--waive",
        "observer.none=x https://x.org",
    )
    assert (
        code,
        f"{CHECK}: log: it is waived, but passes" in told,
        "observer.none: log: it is waived, but there is no such check" in told,
    ) == (
        1,
        True,
        True,
    )


@pytest.mark.parametrize(
    "wrong",
    [
        "observer.decisions",
        "observer.decisions=because",
        "observer.decisions=https://example.org/1",
        "=x https://x.org",
        "",
    ],
)
def test_a_waiver_needs_a_check_a_reason_and_an_issue(wrong: str) -> None:
    code, told = command("observer", "log", "--waive", wrong)
    assert (code, "--waive: expected a check's id, the reason and the url of an issue" in told) == (
        2,
        True,
    )


def test_the_settings_of_a_kinds_suite_reach_it_by_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        "dovetail.testing.runner.run", lambda *args, **kwargs: asked.update(kwargs) or sys.exit(7)
    )
    assert (
        command(
            "model",
            "qwen3",
            "--variant",
            "sliding_window=7",
            "--variant",
            "{head_dim: 4}",
            "--suite",
            "architectures=[A]",
        )[0]
        == 7
    )
    assert asked["settings"] == {
        "architectures": ["A"],
        "variants": [{"sliding_window": 7}, {"head_dim": 4}],
    }
    job = SuiteRun("model", "qwen3", False, {}, {}, asked["settings"], str(tmp_path), [])
    suite = generated_suite(str(job.write()))
    assert (suite.architectures, suite.variants) == (
        ("A",),
        ({"sliding_window": 7}, {"head_dim": 4}),
    )


@pytest.mark.slow("runs suites of components in processes")
def test_a_setting_that_a_suite_does_not_have_is_refused_with_those_that_it_has() -> None:
    code, told = command("observer", "log", "--variant", "a=1")
    assert (code, "the suite of kind observer has no setting 'variants'; it has: none" in told) == (
        2,
        True,
    )
    with pytest.raises(
        ConfigError,
        match="the suite of kind model has no setting 'component'; it has: architectures, variants",
    ):
        run("model", "qwen3", settings={"component": "x"})


def test_a_plugin_that_imports_torch_while_declaring_fails(site: Site) -> None:  # noqa: F811
    site.install(
        "dovetail-heavy",
        modules={
            "heavy": "import torch\n"
            + components('kind="scheduler", name="heavy", target="tests.engine.policies:FCFS"')
        },
    )
    (site.path / "torch.py").write_text("")  # a light one will do
    from dovetail.testing.checks import CheckFailed
    from dovetail.testing.suites.scheduler import SchedulerSuite

    suite = type("TestHeavy", (SchedulerSuite,), {"component": "heavy"})()
    with pytest.raises(CheckFailed, match="must not be imported while a plugin declares"):
        suite.test_declaration()


def test_the_pytest_plugin_imports_nothing_else_of_dovetail_and_no_torch() -> None:
    code = (
        "import sys, pytest; import dovetail.testing.pytest_plugin; print(*sorted(m for m in "
        "sys.modules if m.startswith(('dovetail', 'torch'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=RUN_S
    )
    assert done.stdout.split() == [
        "dovetail",
        "dovetail.base",
        "dovetail.base.logs",
        "dovetail.testing",
        "dovetail.testing.pytest_plugin",
    ]


SLOW = [
    ("scheduler", "fcfs"),
    ("kv_cache", "prefix"),
    ("grammar", "llguidance"),
    ("observer", "decision_log"),
    ("observer", "prometheus"),
]


@pytest.mark.slow("runs suites of components in processes")
@pytest.mark.parametrize(
    ("kind", "name"),
    [("observer", "log"), *(pytest.param(*one, marks=pytest.mark.full) for one in SLOW)],
)
def test_suites_that_need_no_torch_run_without_it_and_leave_nothing_in_the_folder(
    kind: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('torch', 'transformers', 'triton'): sys.modules[name] = None\n"
    )
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    }
    code = (
        "import sys; from dovetail.testing import run, runner; "
        f"runner.COMMAND = {runner.COMMAND if FULL else SHORTER!r}; v = run({kind!r}, {name!r}); "
        f"print(v.line); sys.exit(not v.conformant)"
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environ,
        check=False,
        timeout=RUN_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(folder.iterdir()), (
        "where the command is called, not where an author keeps tests"
    )


WITH_TORCH = [
    ("attention", "torch"),
    ("model", "llama"),
    ("sampler", "default"),
    ("executor", "local"),
    ("executor", "tensor"),
]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "name"), WITH_TORCH)
def test_suites_that_need_torch_leave_nothing_in_the_folder(
    kind: Kind, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"size": 2, "device": "cpu"} if name == "tensor" else {}
    assert run(kind, name, options).conformant
    assert not list(tmp_path.iterdir())
