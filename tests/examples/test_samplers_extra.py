"""The example `dovetail-samplers-extra`: its own tests, and the suite of its kind over each
processor. `tests/third_party.sh` installs it."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.testing.checks import Absent, Untried, checks_of
from dovetail.testing.suites.logits_processor import LogitsProcessorSuite
from tests.registry.fakes import Site

PACKAGE = Path(__file__).parents[2] / "examples/plugins/dovetail-samplers-extra"
sys.path.insert(0, str(PACKAGE / "src"))  # processes that the suite starts need it, too

from dovetail_samplers_extra import dry, top_n_sigma, xtc  # noqa: E402

CLASSES = {"dry": dry.Dry, "top_n_sigma": top_n_sigma.TopNSigma, "xtc": xtc.Xtc}
THEIRS = runpy.run_path(str(PACKAGE / "tests/test_conformance.py"))
SUITES = {value.component: value for name, value in THEIRS.items() if name.startswith("Test")}
OF_ALL_KINDS = {
    "hygiene.spawn",
    "hygiene.declaration",
}  # take a process each: third_party.sh runs the whole suites

for file in ("test_samplers_extra.py", "test_engine.py"):
    for name, value in runpy.run_path(str(PACKAGE / "tests" / file)).items():
        if name.startswith("test_"):
            of_engine = file == "test_engine.py"
            slow = pytest.mark.slow("generates with an engine of this package's processors")
            globals()[name] = slow(value) if of_engine else value


@pytest.fixture(autouse=True, scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    site = Site(tmp_path_factory.mktemp("site"))
    site.install(
        PACKAGE.name, modules={}, entry_points={"samplers_extra": "dovetail_samplers_extra"}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DOVETAIL_PLUGINS", raising=False)
        patch.syspath_prepend(site.path)
        yield


@pytest.mark.parametrize(
    "check",
    [check for id, check in checks_of(LogitsProcessorSuite).items() if id not in OF_ALL_KINDS],
    ids=lambda check: check.id,
)
@pytest.mark.parametrize("name", CLASSES)
def test_processors_pass_their_suite(name: str, check: object) -> None:
    suite = type(
        "Suite",
        (LogitsProcessorSuite,),
        {"component": CLASSES[name], "arguments": SUITES[name].arguments},
    )
    try:
        getattr(suite(), check.attribute)()  # type: ignore[attr-defined]
    except (Absent, Untried) as reason:
        pytest.skip(str(reason))
