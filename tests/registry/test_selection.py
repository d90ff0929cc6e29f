"""`plugins: {allow, deny, require}` and DOVETAIL_PLUGINS act before any import."""

from __future__ import annotations

import sys

import pytest

from dovetail.errors import DISTRIBUTION, ConfigError, PluginError
from dovetail.registry.registry import Registry
from dovetail.registry.selection import PluginSelection
from tests.registry.fakes import Site


def loaded(registry: Registry) -> set[str]:
    return {plugin.origin.distribution for plugin in registry.plugins}


@pytest.fixture
def two(site: Site) -> Site:
    """Two third-party plugins, a and b."""
    site.install_scheduler("dovetail-a", "one")
    site.install_scheduler("dovetail-b", "two")
    return site


@pytest.mark.parametrize(
    ("selection", "environment", "expected"),
    [
        ({}, "", {"dovetail-a", "dovetail-b"}),
        ({"allow": []}, "", set()),
        ({"allow": ["Dovetail_A"]}, "", {"dovetail-a"}),
        ({"deny": ["dovetail-a"]}, "", {"dovetail-b"}),
        ({"allow": ["dovetail-a"], "deny": ["dovetail-a"]}, "", set()),
        ({}, "allow=", set()),
        ({}, "allow=dovetail-b", {"dovetail-b"}),
        ({}, " deny = dovetail-b ; ", {"dovetail-a"}),
        ({"allow": []}, "allow=*", {"dovetail-a", "dovetail-b"}),
        ({"deny": ["dovetail-a"]}, "allow=dovetail-a,dovetail-b", {"dovetail-b"}),
        ({"deny": ["dovetail-a"]}, "deny=", {"dovetail-a", "dovetail-b"}),
    ],
)
def test_selection_and_environment_say_what_is_loaded(
    two: Site,
    monkeypatch: pytest.MonkeyPatch,
    selection: dict[str, list[str]],
    environment: str,
    expected: set[str],
) -> None:
    monkeypatch.setenv("DOVETAIL_PLUGINS", environment)
    registry = Registry.discover(PluginSelection.model_validate(selection))
    assert loaded(registry) & {"dovetail-a", "dovetail-b"} == expected
    assert DISTRIBUTION in loaded(registry)
    for name in {"a", "b"} - {name.removeprefix("dovetail-") for name in expected}:
        assert f"dovetail_{name}_plugin" not in sys.modules


def test_denied_plugin_is_a_suspect(two: Site) -> None:
    registry = Registry.discover(PluginSelection(deny=("dovetail-a",)))
    with pytest.raises(PluginError, match=r"dovetail-a/main 1.0 is denied by plugins\.deny"):
        registry.resolve("scheduler", "one")


@pytest.mark.parametrize(
    ("require", "says"),
    [
        ("dovetail-a>=1.2", "dovetail-a>=1.2: 1.0 is installed"),
        ("dovetail-c", "dovetail-c: no plugin of that distribution is installed"),
        ("pluggy", "no plugin of that distribution"),
        ("dovetail-b", "is denied by plugins.deny"),
        ("dovetail-broken", "failed (import)"),
    ],
)
def test_unmet_require_stops_everything(two: Site, require: str, says: str) -> None:
    two.install("dovetail-broken", modules={"broken": "1/0"})
    selection = PluginSelection(require=(require, "dovetail-a"), deny=("dovetail-b",))
    with pytest.raises(ConfigError, match=r"^plugins\.require: ") as caught:
        Registry.discover(selection)
    assert says in str(caught.value)
    assert Registry.discover(selection, enforce_require=False).plugins


def test_met_require_is_quiet(two: Site) -> None:
    Registry.discover(PluginSelection(require=("Dovetail.A>=1,<2", "dovetail_llm>=0.1")))


@pytest.mark.parametrize("key", ["allow", "deny", "require"])
def test_a_key_that_is_there_twice_imports_nothing(
    two: Site, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("DOVETAIL_PLUGINS", f"{key}=dovetail-a; {key} = dovetail-b")
    with pytest.raises(ConfigError, match=f"DOVETAIL_PLUGINS: {key} is given twice"):
        Registry.discover()
    assert not {"dovetail_a_plugin", "dovetail_b_plugin"} & set(sys.modules)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ("alow=a", "DOVETAIL_PLUGINS: can't read 'alow=a', did you mean allow?"),
        ("dovetail-a", "DOVETAIL_PLUGINS: can't read 'dovetail-a', expected something like"),
        ("deny", "DOVETAIL_PLUGINS: can't read 'deny', expected something like"),
        ("deny=dovetail", "DOVETAIL_PLUGINS: deny.0: the built-ins (dovetail) can't be denied"),
        (
            "deny=Dovetail_LLM",
            "DOVETAIL_PLUGINS: deny.0: the built-ins (dovetail-llm) can't be denied",
        ),
        (
            "require=dovetail>=0.1",
            "DOVETAIL_PLUGINS: require.0: expected a requirement of dovetail-llm, as Dovetail's "
            "distribution is called",
        ),
        (
            "allow=not a name",
            "DOVETAIL_PLUGINS: allow.0: expected the name of a distribution, got 'not a name'",
        ),
        ("require=a>>1", "DOVETAIL_PLUGINS: require.0: expected a requirement"),
    ],
)
def test_unreadable_environment_is_reported(
    monkeypatch: pytest.MonkeyPatch, environment: str, says: str
) -> None:
    monkeypatch.setenv("DOVETAIL_PLUGINS", environment)
    with pytest.raises(ConfigError) as caught:
        Registry.discover()
    assert str(caught.value).startswith(says)
