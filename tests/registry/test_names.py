"""Names: short or in full; nothing is guessed, and an error says what there is."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from dovetail.api.component import API_VERSIONS
from dovetail.base.where import Where
from dovetail.errors import DISTRIBUTION, PluginError
from dovetail.registry.models import locate_model
from dovetail.registry.registry import Registry
from tests.registry.fakes import Site, components, scheduler


def test_short_and_qualified_names_mean_the_same(site: Site) -> None:
    site.install_scheduler("dovetail-fair")
    registry = Registry.discover()
    found = [
        registry.resolve("scheduler", name)
        for name in ("fair", "dovetail-fair:fair", "Dovetail_Fair:fair")
    ]
    assert {part.qualified_name for part in found} == {"dovetail-fair:fair"}
    assert (found[0].plugin_id, found[0].version) == ("dovetail-fair/main", "1.0")


def test_built_ins_answer_to_the_name_of_the_module_and_of_the_distribution() -> None:
    registry = Registry.discover()
    found = [
        registry.resolve("scheduler", name)
        for name in ("fcfs", "dovetail:fcfs", "dovetail-llm:fcfs", "Dovetail_LLM:fcfs")
    ]
    assert {part.qualified_name for part in found} == {"dovetail:fcfs"}
    assert {(part.distribution, part.plugin_id) for part in found} == {
        (DISTRIBUTION, "dovetail-llm/schedulers")
    }
    assert (
        locate_model("dovetail:demo", registry).path
        == locate_model("dovetail-llm:demo", registry).path
        == locate_model("demo", registry).path
    )


@pytest.mark.parametrize("name", ["dovetail", "Dovetail"])
def test_a_distribution_called_dovetail_is_never_taken_for_the_built_ins(
    site: Site, name: str
) -> None:
    """It may be an older Dovetail left by an upgrade, or a third party's."""
    site.install_scheduler(name, "fcfs")
    registry = Registry.discover()
    assert registry.resolve("scheduler", "dovetail:fcfs").distribution == DISTRIBUTION
    assert registry.resolve("scheduler", "fcfs").origin.built_in
    (failure,) = registry.failures
    assert failure.origin.distribution == "dovetail"
    assert failure.reason.endswith("pip uninstall dovetail dovetail-llm, then install dovetail-llm")
    assert not any(module.startswith(f"{name}_plugin") for module in sys.modules)


def test_short_name_offered_twice_is_an_error_only_when_used(site: Site) -> None:
    site.install_scheduler("dovetail-a")
    site.install_scheduler("dovetail-b", version="2.0")
    registry = Registry.discover()
    with pytest.raises(PluginError, match=r"dovetail-a:fair \(1.0\) and dovetail-b:fair \(2.0\)"):
        registry.resolve("scheduler", "fair")
    assert registry.resolve("scheduler", "dovetail-b:fair").version == "2.0"


def test_a_short_name_means_the_built_in_whatever_is_installed(site: Site) -> None:
    site.install(
        "dovetail-mine",
        modules={"mine": components('kind="kv_cache", name="prefix", target="a:B"')},
    )
    registry = Registry.discover()
    assert registry.resolve("kv_cache", "prefix").qualified_name == "dovetail:prefix"
    mine = registry.resolve("kv_cache", "dovetail-mine:prefix")
    assert mine.distribution == "dovetail-mine"
    assert registry.needs_full_name(mine)
    assert not registry.needs_full_name(registry.resolve("kv_cache", "dovetail:prefix"))


def test_unknown_name_suggests_lists_and_suspects(site: Site) -> None:
    site.install_scheduler("dovetail-fair")
    site.install("dovetail-broken", modules={"broken": "import there_is_no_such_module"})
    where = Where(("scheduler",), {("scheduler",): "engine.yaml:7"})
    with pytest.raises(PluginError) as caught:
        Registry.discover().resolve("scheduler", "fare", where=where)
    text = str(caught.value)
    assert text.startswith("engine.yaml:7: scheduler: unknown scheduler 'fare', did you mean fair?")
    assert "fair (dovetail-fair 1.0)" in text
    assert "dovetail-broken/main 1.0 failed (import): ModuleNotFoundError" in text


def test_unknown_qualified_name_suspects_only_its_distribution(site: Site) -> None:
    site.install("dovetail-a", modules={"broken_a": "1/0"})
    site.install("dovetail-b", modules={"broken_b": "1/0"})
    with pytest.raises(PluginError, match="dovetail-a/main") as caught:
        Registry.discover().resolve("scheduler", "dovetail-a:fair")
    assert "dovetail-b" not in str(caught.value)


def test_a_former_built_in_names_the_example_package_to_install() -> None:
    path = "examples/plugins/dovetail-xgrammar"
    with pytest.raises(PluginError, match=f"unknown grammar 'xgrammar'(?s:.*)pip install ./{path}"):
        Registry.discover().resolve("grammar", "xgrammar")
    assert (Path(__file__).parents[2] / path / "pyproject.toml").exists()


def test_name_of_another_kind_is_reported(site: Site) -> None:
    site.install_scheduler()
    with pytest.raises(PluginError, match="of kind scheduler"):
        Registry.discover().resolve("sampler", "fair")
    with pytest.raises(PluginError, match="did you mean scheduler"):
        Registry.discover().resolve("schedular", "fair")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("api", "says"),
    [
        ("0.1", 'upgrade dovetail-fair; its author changes api="0.1" in its ComponentSpec'),
        ("0.9", "docs/plugins/upgrade.md"),
        ("1.0", None),
        ("1.3", None),
        (
            "1.4",
            f"needs a Dovetail with scheduler >= 1.4, this one has 1.3: upgrade {DISTRIBUTION}",
        ),
        (
            "2.0",
            f"needs a Dovetail with scheduler >= 2.0, this one has 1.3: upgrade {DISTRIBUTION}",
        ),
    ],
)
def test_a_component_runs_on_later_minors_of_its_major_and_others_are_refused(
    site: Site, api: str, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(API_VERSIONS, "scheduler", "1.3")
    site.install_scheduler(api=api)
    registry = Registry.discover()
    if says is None:
        assert registry.resolve("scheduler", "fair").spec.api == api
        return
    assert any(c.api_problem() for c in registry.components("scheduler"))
    with pytest.raises(PluginError, match=re.escape(says)):
        registry.resolve("scheduler", "fair")


def test_empty_environment_is_reported() -> None:
    with pytest.raises(PluginError, match="is the distribution 'dovetail-llm' installed"):
        Registry().resolve("scheduler", "fcfs")


def test_component_names_of_several_kinds_live_apart(site: Site) -> None:
    source = components(scheduler("same"), 'kind="sampler", name="same", target="a:B"')
    site.install("dovetail-two", modules={"two": source})
    registry = Registry.discover()
    assert registry.resolve("scheduler", "same").spec.kind == "scheduler"
    assert registry.resolve("sampler", "same").spec.kind == "sampler"
