"""`dovetail plugins doctor`: each thing that can be wrong with an installed plugin is found, named,
and comes with what to do."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dovetail.api.component import API_VERSIONS
from dovetail.cli.app import app as dovetail_app
from dovetail.cli.plugins_doctor import doctor
from dovetail.errors import DISTRIBUTION, PluginError
from dovetail.registry.doctor.examine import examine, in_words, look_at_machine
from dovetail.registry.doctor.metadata import PROBLEMS, Diagnosis, Finding, metadata_findings
from tests.registry.fakes import HOOK, SCHEDULER, Site, components, scheduler
from tests.support import PROFILE

GOOD = components(scheduler(package="good"))
MODEL = 'kind="model", name="{}", target="good_policy:Fair", architectures=("SameForCausalLM",)'
COMMAND = (
    "from dovetail.api import CommandSpec, hookimpl\n@hookimpl\ndef dovetail_commands():\n   "
    " return [CommandSpec({!r}, {!r})]\n"
)
ROUTES = (
    "from dovetail.api import RoutesSpec, hookimpl\n@hookimpl\ndef dovetail_routes():\n"
    "    return [RoutesSpec('x', {!r})]\n"
)

MOUNTED = """
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

def make(context):
    return [Mount("/same", routes=[Route("/{{{0}}}", lambda request: JSONResponse(1))])]
"""
TAKEN = """
from starlette.responses import JSONResponse
from starlette.routing import Route

def make(context):
    return [Route("/health", lambda request: JSONResponse(1))]
"""

BAD_PLUGINS = {  # problem -> source of a plugin that has it
    "import-fails": "import there_is_no_such_module",
    "exits": "import sys\nsys.exit(3)",
    "exits at once": "import os\nos.write(2, b'good bye')\nos._exit(0)",
    "exits in a hook": HOOK.format(specs="exit()"),
    "hangs": "import time\nprint('waiting')\ntime.sleep(1000)",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "crashes by a signal without a name": "import os\nos.kill(os.getpid(), 40)",
    "import-fails with an error without a text": "class E(Exception):\n    def __str__(self): "
    "raise E\nraise E",
    "prints until it fails": "import os\ntry:\n    while True: os.write(1, bytes(2**20))\nexcept "
    "OSError: pass\n" + GOOD,
    "prints to any open file": "import os\nfor n in range(1, 64):\n    try: os.write(n, "
    "b'\\xff[1]')\n    except OSError: pass\n" + GOOD,
    "hook-unknown": "from dovetail.api import hookimpl\n@hookimpl\ndef dovetail_component(): "
    "return []",
    "hook-unknown beside a good one": GOOD + "def dovetail_comands(): return []",
    "hook-unknown for want of a mark": GOOD + "def dovetail_commands(): return []",
    "hook-missing": "x = 1",
    "declaration-wrong": components(scheduler("Fair!")),
    "declaration-wrong in requires": components(
        scheduler(package="good", requires=("dovetail[torch]>=0.1",))
    ),
    "imports-torch": "import torch\n" + GOOD,
    "prints": "print('hello')\n" + GOOD,
    "prints past its guard": "import os\nos.write(1, b'hello')\n" + GOOD,
    "leaves-threads": "import threading, time\nthreading.Thread(target=time.sleep, "
    "args=(1000,)).start()\n" + GOOD,
    "api-mismatch": components(scheduler(package="good", api="0.0")),
    "contract-broken": components(scheduler(package="good", target="bad_policy:Fair")),
    "requirement-missing": components(
        scheduler(package="good", requires=("there-is-no-such-package>=2",))
    ),
    "target-fails": components(scheduler(package="good", target="good_policy:Unfair")),
    "contract-broken by its kind": components(
        'kind="sampler", name="x", target="good_policy:Fair"'
    ),
    "target-fails by its options": components(
        'kind="scheduler", name="x", target="good_policy:Fair", options="good_policy:Fair"'
    ),
    "target-fails by routes from nowhere": ROUTES.format("there_is_no_such_module:make"),
    "target-fails by routes that raise": ROUTES.format("good_policy:Fair"),
    "target-fails by a path of the server": ROUTES.format("taken_routes:make"),
    "target-fails by a command": COMMAND.format("x", "there_is_no_such_module:app"),
    "name-collision with a built-in": components(
        'kind="scheduler", name="fcfs", target="good_policy:Fair", options="good_policy:Options"'
    ),
    "name-collision with a command": COMMAND.format("config", "good_policy:Fair"),
}

IN_QUICK = (  # each takes a process that imports Dovetail
    "exits at once",
    "hook-unknown",
    "hook-missing",
    "declaration-wrong",
    "imports-torch",
    "prints",
    "api-mismatch",
    "contract-broken",
    "requirement-missing",
    "target-fails",
    "name-collision with a built-in",
)
INSTALLED = {
    "quick": IN_QUICK,
    "slow": tuple(what for what in BAD_PLUGINS if what not in IN_QUICK),
}.get(PROFILE, tuple(BAD_PLUGINS))
IN_SLOW = pytest.mark.slow("examines a process of each bad plugin")


def name_of(what: str) -> str:
    return f"dovetail-{what.replace(' ', '-')}"


def with_quick_ones(distributions: Iterable[str]) -> list[Any]:
    """Return the names as parameters: those that aren't installed in the quick profile are
    marked."""
    slow = {name_of(what) for what in BAD_PLUGINS if what not in IN_QUICK}
    return [pytest.param(name, marks=IN_SLOW) if name in slow else name for name in distributions]


@pytest.fixture(scope="module")
def diagnosis(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    """Report for an installation with every possible error (some in the quick profile, and the
    others in the slow one), and one correct plugin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DOVETAIL_PLUGINS", raising=False)
        site = Site(tmp_path_factory.mktemp("site"))
        patch.setattr(sys, "path", [str(site.path), *sys.path])
        (site.path / "good_policy.py").write_text(SCHEDULER)
        (site.path / "bad_policy.py").write_text(SCHEDULER.replace("self, step", "self, plan"))
        (site.path / "taken_routes.py").write_text(TAKEN)
        (site.path / "torch.py").write_text("")
        for what in INSTALLED:
            site.install(
                name_of(what), modules={name_of(what).replace("-", "_"): BAD_PLUGINS[what]}
            )
        if PROFILE != "slow":
            install_bad_metadata(site)
        site.install("good", modules={"good": components(scheduler("good", package="good"))})
        return examine(time_limit_s=5.0, core_commands=["config"])


def install_bad_metadata(site: Site) -> None:
    def info(name: str) -> Path:
        return site.path / f"{name.replace('-', '_')}-1.0.dist-info"

    site.install(
        "dovetail-metadata-unreadable",
        modules={"m": GOOD},
        raw_entry_points="[dovetail.plugins]\nx = m\nx = n\n",
    )
    site.install("dovetail-metadata-twice", modules={"twice": GOOD})
    site.install("dovetail-metadata-twice", "0.9", modules={"twice": GOOD})
    site.install("dovetail-files-gone", modules={"stays": GOOD})
    (info("dovetail-files-gone") / "RECORD").write_text("stays.py,,\nleft.py,,\n")
    site.install("dovetail-source-moved", modules={"moved": GOOD})
    (info("dovetail-source-moved") / "direct_url.json").write_text(
        json.dumps(editable(site.path / "nowhere"))
    )
    site.install("dovetail-entry-points-stale", modules={"stale": GOOD})
    source = site.path / "with a space"
    source.mkdir()
    (source / "pyproject.toml").write_text(
        '[project]\nname = "x"\n[project.entry-points."dovetail.plugins"]\nmain = "stale"\nmore = '
        '"stale_too"\n'
    )
    (info("dovetail-entry-points-stale") / "direct_url.json").write_text(
        json.dumps(editable(source))
    )
    site.install(
        "dovetail-wrong-group",
        modules={"wrong": GOOD},
        raw_entry_points="[dovetail_plugins]\nmain = wrong\n",
    )
    site.install(
        "dovetail-dependency-missing",
        modules={"lacks": GOOD},
        metadata="Requires-Dist: there-is-no-such-package>=3\n",
    )
    needs = (
        "Requires-Dist: dovetail[torch]<0.2,>=0.1\nRequires-Dist: dovetail[testing]; extra == "
        '"test"\n'
    )
    site.install("dovetail-wrong-dovetail", modules={"older": GOOD}, metadata=needs)
    site.install(
        "dovetail-points-nowhere", modules={"elsewhere": GOOD}, entry_points={"main": "nowhere"}
    )
    site.install(
        "dovetail-points-nowhere-in-it",
        modules={"there": GOOD},
        entry_points={"main": "there:plugin"},
    )
    same = components(scheduler("same", package="good"))
    site.install(
        "dovetail-offered-twice",
        modules={"one": same, "other": same},
        entry_points={"one": "one", "other": "other"},
    )
    for name in "ab":
        (site.path / f"mounted_{name}.py").write_text(MOUNTED.format(name))
        site.install(
            f"dovetail-same-path-{name}",
            modules={f"path_{name}": ROUTES.format(f"mounted_{name}:make")},
        )
        site.install(
            f"dovetail-name-collision-{name}",
            modules={f"arch_{name}": components(MODEL.format(name))},
        )


def editable(source: Path) -> dict[str, object]:
    return {"url": source.as_uri(), "dir_info": {"editable": True}}


def of(diagnosis: Diagnosis, distribution: str) -> list[Finding]:
    return [
        finding for finding in diagnosis.findings if finding.origin.distribution == distribution
    ]


def problems_of(diagnosis: Diagnosis, distribution: str) -> set[str]:
    return {finding.problem for finding in of(diagnosis, distribution)}


EVERYTHING = [
    *map(name_of, BAD_PLUGINS),
    *(
        name_of(what)
        for what in PROBLEMS
        if what not in BAD_PLUGINS and what not in ("no-plugin", "name-collision")
    ),
]


@pytest.mark.parametrize("distribution", with_quick_ones(EVERYTHING))
def test_what_is_wrong_is_found(diagnosis: Diagnosis, distribution: str) -> None:
    assert problem_in(distribution) in problems_of(diagnosis, distribution)


def problem_in(distribution: str) -> str:
    """The problem's name is the beginning of the distribution's."""
    return max((known for known in PROBLEMS if distribution.startswith(name_of(known))), key=len)


def test_the_tests_here_provoke_every_problem(diagnosis: Diagnosis) -> None:
    assert {problem_in(distribution) for distribution in EVERYTHING} | {"no-plugin"} == set(
        PROBLEMS
    )
    assert {finding.problem for finding in diagnosis.findings} <= set(PROBLEMS)


def test_a_plugin_with_one_thing_wrong_has_one_finding(diagnosis: Diagnosis) -> None:
    alone = set(EVERYTHING) - {"dovetail-source-moved"}
    shared = {"name-collision"}  # many plugins here offer "fair"
    for distribution in alone:
        others = problems_of(diagnosis, distribution) - shared
        assert len(others) <= 1, f"{distribution}: {others}"


def test_routes_of_two_packages_at_one_path_are_found(diagnosis: Diagnosis) -> None:
    for name, other in ("ab", "ba"):
        told = [finding.what for finding in of(diagnosis, f"dovetail-same-path-{name}")]
        path = f"path 'GET /same/{{}}' is offered by dovetail-same-path-{other}"
        assert any(path in one for one in told)


def test_a_good_plugin_has_nothing_said_of_it(diagnosis: Diagnosis) -> None:
    assert not of(diagnosis, "good")
    assert not of(diagnosis, DISTRIBUTION)
    assert "good/main" in {origin.id for origin in diagnosis.examined}


def test_an_editable_installation_is_one_though_its_build_left_metadata_in_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, source = Site(tmp_path / "site"), Site(tmp_path / "project" / "src")
    for one in (site, source):
        one.path.mkdir(parents=True)
        one.install("dovetail-edited", modules={"edited": GOOD})
    left = source.path / "dovetail_edited.egg-info"
    (source.path / "dovetail_edited-1.0.dist-info").rename(left)
    (left / "METADATA").rename(left / "PKG-INFO")
    (site.path / "dovetail_edited-1.0.dist-info" / "direct_url.json").write_text(
        json.dumps(editable(tmp_path / "project"))
    )
    for path in (
        [site.path, source.path],
        [source.path, site.path],
    ):  # as pip makes it, and as it is in the source's folder
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [*map(str, path), *sys.path])
            assert metadata_findings("dovetail-edited") == []


SAYS = {  # distribution -> in what it says, in what is to do
    "dovetail-import-fails": ("there_is_no_such_module", "install there_is_no_such_module"),
    "dovetail-exits-at-once": (
        "declaring ended the process with exit code 0; its last words: good bye",
        "neither importing nor declaring",
    ),
    "dovetail-hangs": ("longer than 5 s", "--time-limit"),
    "dovetail-crashes": ("SIGSEGV", "faulthandler"),
    "dovetail-hook-unknown": ("dovetail_component", "did you mean dovetail_components?"),
    "dovetail-hook-unknown-beside-a-good-one": (
        "dovetail_comands() is no hook, did you mean dovetail_commands?",
        "@hookimpl",
    ),
    "dovetail-imports-torch": (
        "imports torch while it declares, in dovetail_imports_torch",
        "target",
    ),
    "dovetail-api-mismatch": (
        f"scheduler 0.0, this Dovetail has {API_VERSIONS['scheduler']}: upgrade "
        f'dovetail-api-mismatch; its author changes api="0.0" in its ComponentSpec',
        "docs/plugins/upgrade.md",
    ),
    "dovetail-contract-broken": (
        "'plan' is where 'step' should be",
        "Scheduler has schedule(self, step)",
    ),
    "dovetail-requirement-missing": (
        "there-is-no-such-package>=2 (not installed)",
        'pip install "there-is-no-such-package>=2"',
    ),
    "dovetail-dependency-missing": (
        "there-is-no-such-package>=3",
        'pip install "there-is-no-such-package>=3"',
    ),
    "dovetail-wrong-dovetail": (
        "it depends on dovetail[torch]<0.2,>=0.1, dovetail[testing]; the index's dovetail is "
        "another project",
        'write "dovetail-llm[torch]<0.2,>=0.1" and "dovetail-llm[testing]" in its pyproject.toml',
    ),
    "dovetail-declaration-wrong-in-requires": (
        "requires has 'dovetail[torch]>=0.1', expected dovetail-llm, which is Dovetail's "
        "distribution",
        "",
    ),
    "dovetail-target-fails": ("good_policy:Unfair", "correct"),
    "dovetail-metadata-twice": ("installed 2 times: ", "pip uninstall dovetail-metadata-twice"),
    "dovetail-files-gone": ("left.py", "--force-reinstall"),
    "dovetail-source-moved": ("nowhere", "pip install -e"),
    "dovetail-entry-points-stale": (
        "main = stale, more = stale_too, installed are main = stale",
        "pip install -e",
    ),
    "dovetail-wrong-group": ("'dovetail_plugins'", "dovetail.plugins"),
    "dovetail-points-nowhere": ("module nowhere, which isn't installed", "pyproject.toml"),
    "dovetail-points-nowhere-in-it": ("there:plugin", "pyproject.toml"),
    "dovetail-name-collision-with-a-built-in": (
        "the built-in is used unless",
        "dovetail-name-collision-with-a-built-in:fcfs",
    ),
    "dovetail-name-collision-with-a-command": (
        "'config' is one of Dovetail's own",
        "dovetail-name-collision-with-a-command:config",
    ),
    "dovetail-name-collision-a": (
        "architecture 'SameForCausalLM' is offered by dovetail-name-collision-b/main 1.0 too; "
        "neither is used unless it is named in full",
        "`model: {path: …, component: dovetail-name-collision-a:",
    ),
    "dovetail-offered-twice": (
        "scheduler 'same' is offered by dovetail-offered-twice/",
        "offer it once",
    ),
}


@pytest.mark.parametrize("distribution", with_quick_ones(SAYS))
def test_a_finding_says_what_and_what_to_do(diagnosis: Diagnosis, distribution: str) -> None:
    what, remedy = SAYS[distribution]
    findings = of(diagnosis, distribution)
    assert any(what in finding.what and remedy in finding.remedy for finding in findings), findings


@pytest.mark.slow("starts processes")
def test_one_distribution_is_looked_at_and_collisions_with_others_are_seen(site: Site) -> None:
    site.install_scheduler("dovetail-fair", "fcfs")
    site.install("dovetail-broken", modules={"broken": "1/0"})
    diagnosis = examine("Dovetail_Fair")
    assert [origin.id for origin in diagnosis.examined] == ["dovetail-fair/main"]
    assert [finding.problem for finding in diagnosis.findings] == ["name-collision"]


@pytest.mark.parametrize("distribution", [None, "dovetail"])
@pytest.mark.parametrize("with_plugins", [True, False])
def test_a_distribution_called_dovetail_is_found_whosever_it_is(
    site: Site, distribution: str | None, with_plugins: bool
) -> None:
    site.install(
        "dovetail", "0.4", modules={"stranger": GOOD}, raw_entry_points=None if with_plugins else ""
    )
    (finding,) = examine(distribution).findings
    assert (str(finding.origin), finding.problem, finding.severity) == (
        "dovetail/? 0.4",
        "wrong-dovetail",
        "error",
    )
    assert finding.remedy == "pip uninstall dovetail dovetail-llm, then install dovetail-llm again"


def test_a_distribution_without_plugins_says_how_to_declare_some(site: Site) -> None:
    site.install("no-plugin", modules={"no_plugin": ""}, raw_entry_points="")
    (finding,) = examine("no-plugin").findings
    assert (finding.problem, finding.severity) == ("no-plugin", "error")
    assert '[project.entry-points."dovetail.plugins"]' in finding.remedy


def test_entry_points_that_cannot_be_parsed_are_found(site: Site) -> None:
    site.install(
        "dovetail-fair",
        modules={"fair": GOOD},
        raw_entry_points="[dovetail.plugins]\nthis is no entry point\n",
    )
    assert problems_of(examine("dovetail-fair"), "dovetail-fair") == {"metadata-unreadable"}


def test_a_distribution_that_is_not_installed_is_an_error(site: Site) -> None:
    site.install_scheduler("dovetail-fair")
    with pytest.raises(
        PluginError,
        match="no distribution 'dovetail-fare' is installed, did you mean dovetail-fair",
    ):
        examine("dovetail-fare")


def test_what_is_denied_is_not_imported(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("dovetail-broken", modules={"broken": "1/0"})
    monkeypatch.setenv("DOVETAIL_PLUGINS", "deny=dovetail-broken")
    diagnosis = examine("dovetail-broken")
    assert ([origin.id for origin in diagnosis.denied], diagnosis.findings) == (
        ["dovetail-broken/main"],
        (),
    )


def test_the_command_knows_the_names_of_all_core_commands(site: Site) -> None:
    site.install(
        "dovetail-taken",
        modules={"taken": COMMAND.format("generate", "taken:run") + "def run(): pass\n"},
    )
    done = CliRunner().invoke(dovetail_app, ["plugins", "doctor", "dovetail-taken", "--json"])
    assert [finding["what"] for finding in json.loads(done.stdout)["findings"]] == [
        "command 'generate' is one of Dovetail's own"
    ]


@pytest.mark.slow("starts processes that import everything")
def test_the_command_exits_with_1_if_there_are_errors_and_prints_json(site: Site) -> None:
    app = typer.Typer()
    app.command()(doctor)
    site.install_scheduler("dovetail-fair", requires=("there-is-no-such-package",))
    site.install("dovetail-broken", modules={"broken": "1/0"})
    text = CliRunner().invoke(app, ["dovetail-broken"])
    assert text.exit_code == 1
    assert (
        "dovetail-broken/main 1.0\n  error import-fails: importing broken failed: ZeroDivisionError"
        in text.stdout
    )
    assert "plugins examined: 1, errors: 1, warnings: 0" in text.stdout
    shown = CliRunner().invoke(app, ["dovetail-fair", "--json"])
    assert shown.exit_code == 0, "warnings alone are no failure"
    (finding,) = json.loads(shown.stdout)["findings"]
    assert (finding["plugin"], finding["severity"], finding["problem"]) == (
        "dovetail-fair/main",
        "warning",
        "requirement-missing",
    )


@pytest.mark.parametrize(
    ("offers", "words"),
    [
        (
            ([], False, ["gloo"]),
            "no CUDA device; ranks of the executor tensor are processes on the CPU, which sum "
            "through gloo",
        ),
        (
            ([], False, []),
            "no CUDA device; ranks of the executor tensor are processes on the CPU, which can't "
            "sum: this torch was built without gloo",
        ),
        (
            (["H200"], False, ["gloo", "nccl"]),
            "1 CUDA device (H200): one rank, so the executor tensor has nothing to split",
        ),
        (
            (["H200", "H200"], True, ["gloo", "nccl"]),
            "2 CUDA devices (H200), which can read each other's memory; as many ranks of the "
            "executor tensor, which sum through nccl",
        ),
        (
            (["H200", "H100"], False, ["nccl"]),
            "2 CUDA devices (H200, H100), which can't read each other's memory; as many ranks of "
            "the executor tensor, which sum through nccl",
        ),
    ],
)
def test_what_a_machine_offers_to_ranks_is_said(
    offers: tuple[list[str], bool, list[str]], words: str
) -> None:
    assert in_words(*offers) == words


@pytest.mark.full
def test_this_machine_is_asked() -> None:
    assert re.match(
        "no CUDA device; ranks|1 CUDA device|[2-9] CUDA devices", str(look_at_machine(60))
    )


@pytest.mark.parametrize(
    ("named", "told"), [([], True), (["Dovetail_LLM"], True), (["another"], False)]
)
def test_the_machine_is_described_unless_another_distribution_is_named(
    named: list[str], told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "dovetail.registry.doctor.examine"
    monkeypatch.setattr(f"{module}.examine", lambda *given, **settings: Diagnosis((), ()))
    monkeypatch.setattr(f"{module}.look_at_machine", lambda limit_s: "a machine")
    result = CliRunner().invoke(dovetail_app, ["plugins", "doctor", *named])
    assert result.exit_code == 0, result.output
    assert ("this machine: a machine" in result.output) == told


def test_routes_without_their_server_cannot_be_used_here_but_are_not_wrong(
    site: Site,
) -> None:
    site.install("dovetail-x", modules={"x": ROUTES.format("good_policy:Fair")})
    (site.path / "starlette.py").write_text("raise ModuleNotFoundError('starlette')")
    (finding,) = examine("dovetail-x").findings
    assert (finding.problem, finding.severity) == ("requirement-missing", "warning")
    assert finding.remedy == f'pip install "{DISTRIBUTION}[server]"'


@pytest.mark.parametrize("command", ["test", "info"])
@pytest.mark.parametrize("kind", ["route", "command", "weight_format", "router"])
def test_what_pytest_checks_is_said_with_its_command(command: str, kind: str) -> None:
    ran = CliRunner().invoke(dovetail_app, ["plugins", command, kind, "mine"])
    assert ran.exit_code == 2
    assert "python -m pytest tests/test_conformance.py" in " ".join(ran.output.split())
