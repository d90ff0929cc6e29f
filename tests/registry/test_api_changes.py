"""Components written for an older version: the table says which run, how, and what the others must
change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tools.docs_hooks import fill_in

from dovetail.api.attention import AttentionBackend, AttentionContext, LayerSpec
from dovetail.api.component import API_VERSIONS, KINDS, Kind
from dovetail.api.executor import Capacity, Executor
from dovetail.api.kv_cache import CacheGroup, KVLayout
from dovetail.api.targets import bridged
from dovetail.errors import PluginError
from dovetail.registry import api_changes
from dovetail.registry.api_changes import CHANGES, ApiChange, changes_since
from dovetail.registry.doctor.examine import examine
from dovetail.registry.registry import Registry
from dovetail.registry.resolved import BASE_CLASSES
from tests.docs.pages import DOCS
from tests.registry.fakes import Site, components

ANY_CLASS = (
    "from dovetail.api import {base}\nclass Old({base}): pass\nOld.__abstractmethods__ = "
    "frozenset()\n"
)


def install(site: Site, kind: Kind, api: str) -> None:
    """A package dovetail-old with a component "old" of that version."""
    spec = components(f'kind="{kind}", api="{api}", name="old", target="old_parts:Old"')
    site.install(
        "dovetail-old",
        modules={"old": spec, "old_parts": ANY_CLASS.format(base=BASE_CLASSES[kind])},
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if API_VERSIONS[kind] != "0.1"])
def test_the_step_to_the_present_version_of_a_kind_is_in_the_table(kind: Kind) -> None:
    (step,) = [
        change for change in CHANGES if (change.kind, change.after) == (kind, API_VERSIONS[kind])
    ]
    major, minor = step.after.split(".")
    assert step.before == f"{major}.{int(minor) - 1}"
    assert changes_since(kind, step.before) == (step,)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: f"{change.kind}-{change.before}")
def test_an_older_component_loads_or_is_refused_with_its_line(
    site: Site, change: ApiChange
) -> None:
    install(site, change.kind, change.before)
    steps = changes_since(change.kind, change.before)
    assert steps is not None
    (finding,) = examine("dovetail-old").findings
    for step in steps:
        assert step.upgrade in finding.what + finding.remedy
    if any(step.refused for step in steps):
        with pytest.raises(PluginError, match="upgrade dovetail-old"):
            Registry.discover().resolve(change.kind, "old")
        assert finding.problem == "api-mismatch"
        return
    component = Registry.discover().resolve(change.kind, "old")
    assert component.load().__qualname__ == component.ref().load().__qualname__ == "Old"
    assert (finding.problem, finding.severity) == ("api-older", "warning")
    assert f'api="{API_VERSIONS[change.kind]}"' in finding.remedy


def bridges_of(kind: Kind, before: str) -> list[str]:
    return [
        change.bridge
        for change in CHANGES
        if (change.kind, change.before) == (kind, before) and change.bridge is not None
    ]


def through(*changes: ApiChange, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_changes, "CHANGES", changes)
    monkeypatch.setitem(API_VERSIONS, "scheduler", "0.9")


def test_several_steps_are_taken_in_order_and_one_that_is_refused_or_missing_refuses(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = (
        ApiChange("scheduler", "0.7", "0.8", "do this", "a:b"),
        ApiChange("scheduler", "0.8", "0.9", "do that", "c:d"),
    )
    install(site, "scheduler", "0.7")
    through(last, first, monkeypatch=monkeypatch)
    assert Registry.discover().resolve("scheduler", "old").bridges == ("a:b", "c:d")
    through(first, replace(last, bridge=None, refused=True), monkeypatch=monkeypatch)
    with pytest.raises(
        PluginError, match=r"upgrade dovetail-old \(for its author: do this; then do that\)"
    ):
        Registry.discover().resolve("scheduler", "old")
    through(first, monkeypatch=monkeypatch)
    with pytest.raises(PluginError, match=r"upgrade dovetail-old$"):
        Registry.discover().resolve("scheduler", "old")


def test_a_step_is_either_refused_or_bridged() -> None:
    with pytest.raises(ValueError, match="isn't refused"):
        ApiChange("scheduler", "0.1", "0.2", "do", "a:b", refused=True)


def test_a_class_that_no_bridge_can_be_made_of_is_an_error_that_names_it() -> None:
    with pytest.raises(
        PluginError,
        match=r"mine: dovetail.registry.bridges:executor_0_6 can't make it fit this Dovetail: "
        r"TypeError",
    ):
        bridged(
            bool,
            ["dovetail.registry.bridges:executor_0_6"],
            lambda what: PluginError(f"mine: {what}"),
        )


class AnyLayers(AttentionBackend):
    """Written for 0.4: refuses what it knew of by itself."""

    @classmethod
    def reasons_against(cls, context: AttentionContext, layers: Sequence[LayerSpec]) -> list[str]:
        return ["too wide"] if any(layer.head_size > 64 for layer in layers) else []


def test_attention_of_0_4_refuses_encoders() -> None:
    backend = bridged(AnyLayers, bridges_of("attention", "0.4"), PluginError)
    layer, context = LayerSpec(0, 1, 1, 64, 1.0), AttentionContext("cpu", "float32", 16)
    assert backend.reasons_against(context, [layer]) == []
    assert backend.reasons_against(context, [replace(layer, head_size=65)]) == ["too wide"]
    assert "encoder" in backend.reasons_against(context, [layer, replace(layer, causal=False)])[0]


@pytest.mark.parametrize("recurrent", [False, True])
def test_an_executor_of_0_6_checks_no_drafts_of_models_with_states(recurrent: bool) -> None:
    groups = (CacheGroup((0,), 16), CacheGroup((1,), 16, recurrent=True))
    capacity = Capacity(8, 1, KVLayout(groups[: 1 + recurrent], 64, "float32"), 10, 64, max_lines=8)

    class Drafting(Executor):
        def start(self) -> Capacity:
            return capacity

    Drafting.__abstractmethods__ = frozenset()
    executor: Any = bridged(Drafting, bridges_of("executor", "0.6"), PluginError)(None, None)
    assert executor.start().max_lines == (0 if recurrent else 8)


def test_the_page_shows_the_table() -> None:
    page = fill_in((DOCS / "plugins/versions.md").read_text(encoding="utf-8"))
    for change in CHANGES:
        assert f"| `{change.kind}` | {change.before} | {change.after} |" in page
        assert f"### {change.kind} {change.after}\n" in page, "say in full what changed"
