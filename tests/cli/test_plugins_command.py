"""`dovetail plugins`, and commands that plugins add."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dovetail.api.component import API_VERSIONS, EXTENSION_VERSIONS
from dovetail.cli.app import app
from dovetail.registry.contract.document import shipped
from tests.registry.fakes import Site, components, scheduler

COMMANDS = """
from dovetail.api import CommandSpec, hookimpl
@hookimpl
def dovetail_commands():
    return [{}]
"""


def dovetail(*args: str) -> Any:
    return CliRunner().invoke(app, list(args))


def install_commands(site: Site, distribution: str, **commands: str) -> None:
    module = distribution.replace("-", "_")
    specs = ", ".join(
        f"CommandSpec({name!r}, {target!r}, 'does {name}')" for name, target in commands.items()
    )
    site.install(distribution, modules={module: COMMANDS.format(specs)})


def test_list_works_with_any_number_of_broken_plugins(site: Site) -> None:
    for number in range(20):
        site.install(
            f"dovetail-broken-{number}",
            modules={f"broken_{number}": f"import sys; print('chatter'); sys.exit({number})"},
        )
    site.install_scheduler("dovetail-fair", summary="Fair to all")
    done = dovetail("plugins", "list")
    assert done.exit_code == 0
    assert "scheduler      fair" in done.stdout
    assert done.stdout.count("failed (import): SystemExit") == 20
    assert "chatter" not in done.stdout
    failed = dovetail("plugins", "list", "--failed").stdout
    assert failed.count("SystemExit: ") == failed.count("    chatter") == 20


def test_list_says_what_cannot_be_used_and_what_is_ambiguous(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install_scheduler("dovetail-old", "aged", api="0.0")
    site.install_scheduler("dovetail-a")
    site.install_scheduler("dovetail-b")
    site.install_scheduler("dovetail-c", "see")
    monkeypatch.setenv("DOVETAIL_PLUGINS", "deny=dovetail-c")
    lines = dovetail("plugins", "list").stdout.splitlines()
    assert any(
        "aged" in line and "CAN'T BE USED" in line and "upgrade dovetail-old" in line
        for line in lines
    )
    assert any("dovetail-a:fair" in line for line in lines)
    assert "  dovetail-c/main 1.0 is denied by plugins.deny" in lines


def test_list_as_json(site: Site) -> None:
    site.install("dovetail-broken", "2.0", modules={"broken": "print('noise'); 1/0"})
    site.install_scheduler("dovetail-fair")
    shown = json.loads(dovetail("plugins", "list", "--json").stdout)
    (fair,) = [
        component
        for component in shown["components"]
        if component["distribution"] == "dovetail-fair"
    ]
    assert fair["qualified_name"] == "dovetail-fair:fair"
    assert (fair["ambiguous"], fair["problem"], fair["version"]) == (False, None, "1.0")
    broken = {
        "plugin": "dovetail-broken/main",
        "distribution": "dovetail-broken",
        "version": "2.0",
        "phase": "import",
    }
    assert (
        broken | {"error": "ZeroDivisionError", "message": "division by zero", "output": "noise\n"}
        in shown["failures"]
    )
    assert set(json.loads(dovetail("plugins", "list", "--json", "--failed").stdout)) == {"failures"}


def test_info_tells_options_claims_and_origin(site: Site) -> None:
    site.install_scheduler(summary="Fair to all", requires=("there-is-no-such-package",))
    text = dovetail("plugins", "info", "scheduler", "fair").stdout
    for part in (
        "scheduler dovetail-fair:fair 1.0",
        "dovetail-fair/main",
        "Fair to all",
        "aging_s",
        "float",
        "1.0",
        "Seconds until it counts double.",
    ):
        assert part in text
    assert "there-is-no-such-package (not installed)" in text
    assert "capabilities" in text
    assert "capabilities.order" in dovetail("plugins", "info", "scheduler", "fcfs").stdout


def test_info_of_models_alone_lists_formats_of_weights() -> None:
    def facts(*names: str) -> list[str]:
        return [
            line.split()[0]
            for line in dovetail("plugins", "info", *names).stdout.split("\n")
            if line
        ]

    assert "quantizations" in facts("model", "qwen3")
    assert "quantizations" not in facts("scheduler", "fcfs")


def test_info_tells_what_requests_may_say_to_a_logits_processor(site: Site) -> None:
    spec = 'kind="logits_processor", name="shun", target="tests.e2e.processing:Shun"'
    site.install("dovetail-processing", modules={"processing": components(spec)})
    options, _, arguments = dovetail(
        "plugins", "info", "logits_processor", "shun"
    ).stdout.partition("arguments of requests:\n")
    assert options.endswith("options:\n  none\n")
    assert [line.split() for line in arguments.splitlines()[1:3]] == [
        ["amount", "float", "2.0"],
        ["window", "int", "8"],
    ]


def test_info_of_nothing_is_an_error() -> None:
    done = dovetail("plugins", "info", "kv_cache", "prefx")
    assert done.exit_code == 2
    assert done.stderr.startswith(
        "error: plugins info: unknown kv_cache 'prefx', did you mean prefix?"
    )
    assert "Traceback" not in done.stderr
    assert "did you mean kv_cache" in dovetail("plugins", "info", "kvcache", "prefix").stderr


def test_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" in dovetail("--traceback", "plugins", "info", "kv_cache", "x").stderr
    monkeypatch.setenv("DOVETAIL_TRACEBACK", "1")
    done = dovetail("plugins", "info", "kv_cache", "x")
    assert "Traceback" in done.stderr
    assert done.exit_code == 2


def test_plugin_commands_are_listed_without_their_import_and_run_with_it(site: Site) -> None:
    install_commands(site, "dovetail-more", hello="more_commands:app", shout="more_commands:shout")
    (site.path / "more_commands.py").write_text(
        "import typer\nprint('imported')\napp = typer.Typer()\n"
        "@app.command()\ndef one(n: int = 1): print('one', n)\n@app.command()\ndef two(): "
        "print('two')\n"
        "def shout(word: str, loud: bool = False): print(word.upper() if loud else word)\n"
    )
    help_text = dovetail("--help").stdout
    assert "does hello" in help_text
    assert "imported" not in help_text
    assert dovetail("hello", "one", "--n", "3").stdout.endswith("one 3\n")
    assert dovetail("shout", "--loud", "x").stdout == "X\n"
    assert dovetail("dovetail-more:shout", "x").stdout == "x\n"
    assert "--loud" in dovetail("shout", "--help").stdout


def test_plugin_command_that_fails_to_import_is_an_error(site: Site) -> None:
    install_commands(
        site, "dovetail-more", hello="there_is_no_such_module:app", odd="dovetail_more:__name__"
    )
    assert dovetail("--help").exit_code == 0
    done = dovetail("hello", "x")
    assert done.exit_code == 2
    assert (
        "command 'hello' of plugin dovetail-more/main 1.0: importing there_is_no_such_module "
        "failed: ModuleNotFoundError" in done.stderr
    )
    assert "not a Typer app" in dovetail("odd").stderr


def test_colliding_commands_need_their_full_names_and_core_ones_stay(site: Site) -> None:
    for name in ("dovetail-a", "dovetail-b"):
        install_commands(site, name, hello="who:run", plugins="who:run")
    (site.path / "who.py").write_text("def run(): print('run')")
    assert "dovetail-a:hello and dovetail-b:hello" in dovetail("hello").stderr
    assert dovetail("dovetail-b:hello").stdout == "run\n"
    assert "KIND" in dovetail("plugins", "list").stdout
    assert "dovetail-a:plugins" in dovetail("--help").stdout


def test_a_command_of_a_built_ins_name_leaves_the_built_in_as_it_is(site: Site) -> None:
    install_commands(site, "dovetail-a", serve="who:run")
    (site.path / "who.py").write_text("def run(): print('run')")
    assert "--port" in dovetail("serve", "--help").stdout
    assert dovetail("dovetail-a:serve").stdout == "run\n"
    listed = [line.split()[0] for line in dovetail("--help").stdout.splitlines() if line.strip()]
    assert {"dovetail-a:serve", "serve"} <= set(listed)
    assert any(
        line.split()[:2] == ["command", "dovetail-a:serve"]
        for line in dovetail("plugins", "list").stdout.splitlines()
    )


def test_unknown_command_names_the_plugins_that_failed(site: Site) -> None:
    site.install("dovetail-broken", modules={"broken": "1/0"})
    done = dovetail("serv")
    assert done.exit_code == 2
    assert "note: dovetail-broken/main 1.0 failed (import)" in done.stderr
    assert "No such command 'serv'" in done.stderr


def test_a_command_to_come_points_to_the_roadmap() -> None:
    done = dovetail("moe", "--port", "80")
    assert (done.exit_code, done.stderr) == (
        2,
        'error: dovetail moe: not there yet; "Mixture of experts" is on the roadmap, '
        "docs/roadmap.md\n",
    )


def test_one_bad_environment_variable_is_one_clean_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_PLUGINS", "nonsense")
    for args in (["plugins", "list"], ["--help"], ["config", "show"]):
        done = dovetail(*args)
        assert done.exit_code == 2
        assert done.stderr.startswith("error: DOVETAIL_PLUGINS: can't read 'nonsense'")


def test_two_components_in_one_plugin(site: Site) -> None:
    site.install("dovetail-two", modules={"two": components(scheduler("one"), scheduler("other"))})
    assert {"one", "other"} <= {
        line.split()[1]
        for line in dovetail("plugins", "list").stdout.splitlines()
        if line.startswith("scheduler")
    }


def test_contract_prints_the_interface_of_a_kind_as_text_and_as_json() -> None:
    text = dovetail("plugins", "contract", "--kind", "drafter").stdout
    assert f"drafter {API_VERSIONS['drafter']}: dovetail.api.Drafter" in text
    assert "interface Drafter" in text
    assert "abstract def propose(" in text
    assert "drafter.most (required" in text
    printed = json.loads(dovetail("plugins", "contract", "--kind", "drafter", "--json").stdout)
    assert [*printed["kinds"]] == ["drafter"]
    assert "dovetail.api.drafter" in printed["modules"]
    assert "dovetail.api.attention" not in printed["modules"]
    for name, part in (("routes", "protocol RouteContext"), ("hooks", "def dovetail_routes()")):
        told = dovetail("plugins", "contract", "--kind", name).stdout
        assert told.startswith(f"{name} {EXTENSION_VERSIONS[name]}: ")
        assert part in told
    unknown = dovetail("plugins", "contract", "--kind", "draughter")
    assert (unknown.exit_code, "did you mean drafter?" in unknown.stderr) == (2, True)


def test_contract_tells_what_two_files_differ_in_and_whether_packages_still_run(
    tmp_path: Path,
) -> None:
    old, more, other = (tmp_path / f"{name}.json" for name in ("old", "more", "other"))
    text = shipped().to_json()
    old.write_text(text)
    more.write_text(text.replace('"on_finished": {', '"on_gone": {}, "on_finished": {'))
    other.write_text(text.replace('"propose"', '"suggest"'))
    added = dovetail("plugins", "contract", "--kind", "drafter", "--diff", str(old), str(more))
    assert added.exit_code == 0
    assert "added dovetail.api.drafter:Drafter.on_gone" in added.stdout
    assert added.stdout.endswith("1 changes, additive\n")
    as_json = dovetail(
        "plugins", "contract", "--kind", "drafter", "--diff", str(old), str(more), "--json"
    )
    [change] = json.loads(as_json.stdout)
    assert (change["name"], change["additive"]) == ("dovetail.api.drafter:Drafter.on_gone", True)
    renamed = dovetail("plugins", "contract", "--diff", str(old), str(other))
    assert renamed.exit_code == 1
    assert (
        "removed dovetail.api.drafter:Drafter.propose: method [breaks packages]" in renamed.stdout
    )
    nothing = dovetail("plugins", "contract", "--diff", str(old), "0.3")
    assert (nothing.exit_code, "there is no contract 0.3" in nothing.stderr) == (2, True)
