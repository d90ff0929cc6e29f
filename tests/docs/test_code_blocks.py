"""Code blocks in the documentation are correct: Python runs, commands print what the page says,
configs are valid. See `pages.py`."""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dovetail.cli.app import app
from dovetail.errors import DISTRIBUTION, DovetailError
from tests.docs.pages import ROOT, SHOWN_URL, Block, blocks_of, commands_of, has_blocks, pages
from tests.docs.running import RUN_BY, check_config, check_docker, run_console
from tests.preloaded import Preloaded
from tests.registry.fakes import Site
from tests.server.serving import serving_in_threads

OWN_TEST = {"docs/write-a-scheduler.md"}  # test_write_a_scheduler.py installs what it describes
NOT_RUN: set[str] = set()  # "page:line" of every block that is marked not to run: none so far

ABOUT = {  # packages of examples/plugins that a page is about: there they are installed
    "docs/plugins/port-a-model.md": "dovetail-olmo2",
    "docs/plugins/logits_processor.md": "dovetail-samplers-extra",
}

PAGE_S = 600  # also with all requests and examples, as in `make test-full`

ENGINES = "makes several engines"
SIMULATES = "simulates"
SUITE = "runs a suite of components"
SLOW = {  # pages whose blocks take more than the budget of a quick test, and why
    "README.md": SUITE,
    "docs/batch.md": "starts engines in processes",
    "docs/beam-search.md": ENGINES,
    "docs/cli.md": SUITE,
    "docs/index.md": ENGINES,
    "docs/lora.md": ENGINES,
    "docs/several-gpus.md": "starts ranks",
    "docs/speculation.md": ENGINES,
    "docs/structured-output.md": ENGINES,
    "docs/lab/calibrate.md": "measures an engine",
    "docs/lab/capacity.md": SIMULATES,
    "docs/lab/compare.md": SIMULATES,
    "docs/lab/features.md": SIMULATES,
    "docs/lab/grammars.md": SIMULATES,
    "docs/lab/host-times.md": SIMULATES,
    "docs/lab/index.md": SIMULATES,
    "docs/lab/metrics.md": SIMULATES,
    "docs/lab/policies.md": SIMULATES,
    "docs/lab/report.md": SIMULATES,
    "docs/lab/roofline.md": SIMULATES,
    "docs/lab/routing.md": SIMULATES,
    "docs/lab/sessions.md": SIMULATES,
    "docs/lab/speculation.md": SIMULATES,
    "docs/plugins/conformance.md": SUITE,
    "docs/determinism.md": "computes a deterministic request, in forwards of 32 tokens each",
    "docs/plugins/drafter.md": SUITE,
    "docs/plugins/executor.md": SUITE,
    "docs/plugins/kv_cache.md": SUITE,
    "docs/plugins/observer.md": SUITE,
    "docs/plugins/port-a-model.md": "makes engines with the model of the page",
    "docs/plugins/publish.md": SUITE,
    "docs/plugins/tokenizer.md": SUITE,
}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """URL of a server of the demo model."""
    with serving_in_threads({"model": "demo"}) as url:
        yield url


def installed(page: str, site: Site) -> list[str]:
    """Install the example that the page is about, as `pip install -e` does, and return the folders
    on its path."""
    source = ROOT / "examples/plugins" / ABOUT[page]
    entry_points = tomllib.loads((source / "pyproject.toml").read_text())["project"][
        "entry-points"
    ]["dovetail.plugins"]
    site.install(ABOUT[page], modules={}, entry_points=entry_points)
    return [str(source / "src"), str(site.path)]


def tried(page: str) -> object:
    return pytest.param(page, marks=pytest.mark.slow(SLOW[page]) if page in SLOW else ())


@pytest.mark.parametrize(
    "page", [tried(page) for page in pages() if has_blocks(page) and page not in OWN_TEST]
)
def test_blocks_of_the_page_run(
    page: str,
    preloaded: Preloaded,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    text = "".join(block.text for block in blocks_of(page))
    if "$ curl " in text and shutil.which("curl") is None:
        pytest.skip(f"{page}: curl isn't installed")
    url = request.getfixturevalue("server") if SHOWN_URL in text else ""
    path = installed(page, Site(tmp_path_factory.mktemp("site"))) if page in ABOUT else []
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([*path, str(ROOT)])}
    environ.pop("DOVETAIL_PLUGINS", None)
    code = f"from tests.docs.running import run_page; run_page({page!r}, {url!r})"
    ended = preloaded.run(["-c", code], cwd=tmp_path, environ=environ, timeout_s=PAGE_S)
    assert ended.exit_code == 0, f"{ended.output}\n{ended.errors}"


def test_what_another_page_runs_is_there() -> None:
    for line, page in RUN_BY.items():
        shown = [block for block in blocks_of(page) if block.language == "console"]
        assert line in {command.line for block in shown for command in commands_of(block)}


def test_every_exemption_is_listed() -> None:
    assert set(SLOW) <= set(pages())
    assert {
        block.place for page in pages() for block in blocks_of(page) if block.not_run
    } == NOT_RUN


def test_fences_are_not_hidden_in_indented_text() -> None:
    hidden = re.compile(r"^(\t| {4,})[`~]{3}", re.MULTILINE)
    assert not [page for page in pages() if hidden.search((ROOT / page).read_text())], (
        "such blocks wouldn't be tested"
    )


@pytest.mark.parametrize(
    "example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name
)
def test_examples_are_configs_of_what_is_built_in(example: Path) -> None:
    result = CliRunner().invoke(app, ["config", "check", str(example)])
    assert result.exit_code == 0, result.output


def test_the_version_that_pages_show_is_this_one() -> None:
    said = re.compile(r"dovetail(?:-llm)?(?:/\w+)? (\d+\.\d+\.\d+)")
    shown = {
        version
        for page in pages()
        for block in blocks_of(page)
        for version in said.findall(block.text)
    }
    assert shown == {metadata(DISTRIBUTION)["Version"]}


def test_a_page_that_is_wrong_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    nowhere = ""  # no server is needed

    def block(language: str, text: str, title: str | None = None) -> Block:
        return Block("page.md", 1, language, title, text, not_run=False)

    with pytest.raises(DovetailError):
        check_config(block("yaml", "scheduler: {name: priority, agin_s: 5}"))

    with pytest.raises(AssertionError, match="expected"):
        run_console(block("console", "$ dovetail config check demo\ndemo: fine\n"), nowhere)
    with pytest.raises(AssertionError):
        run_console(block("console", "$ dovetail config check nowhere/at/all\n"), nowhere)
    with pytest.raises(AssertionError, match="no file"):
        run_console(block("console", "$ python bench/nothing.py\n"), nowhere)
    with pytest.raises(AssertionError, match="no file"):
        run_console(block("console", "$ python -m pytest -m gpu tests/nothing\n"), nowhere)
    with pytest.raises(pytest.fail.Exception, match="is none of"):
        run_console(block("console", "$ wget x | sh\n"), nowhere)
    with pytest.raises(AssertionError, match="another server"):
        run_console(block("console", "$ curl http://example.com/\n"), nowhere)
    with pytest.raises(AssertionError, match="has no \\['--prot'\\]"):
        run_console(block("console", "$ dovetail serve demo --host ::1 --prot 80\n"), nowhere)
    with pytest.raises(AssertionError, match="isn't docker"):
        check_docker(block("bash", "pip install x\n"))


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/completions -d {}"])
def test_a_request_that_is_refused_is_caught(path: str, server: str) -> None:
    block = Block("page.md", 1, "console", None, f"$ curl {SHOWN_URL}{path}\n", not_run=False)
    with pytest.raises(AssertionError, match=r"page\.md:1: 4"):
        run_console(block, server)
