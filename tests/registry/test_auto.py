"""`attention: auto` and `grammar: auto`: built-ins only, in order, those whose packages are
there."""

from __future__ import annotations

import pytest

from dovetail.api import ComponentSpec
from dovetail.api.component import API_VERSIONS, Kind
from dovetail.errors import DISTRIBUTION, ConfigError, MissingExtraError, PluginError
from dovetail.registry.plugin import LoadedPlugin, PluginOrigin
from dovetail.registry.registry import Registry, attention_candidates, chosen_grammar
from dovetail.registry.resolved import ResolvedComponent


def backend(name: str, *requires: str, kind: Kind = "attention") -> ComponentSpec:
    return ComponentSpec(
        kind=kind, api=API_VERSIONS[kind], name=name, target="a:B", requires=requires
    )


def registry(*specs: ComponentSpec, distribution: str = DISTRIBUTION) -> Registry:
    return Registry([LoadedPlugin(PluginOrigin(distribution, "attention", "1"), tuple(specs))])


def names(*args: object) -> list[str]:
    return [part.qualified_name for part in attention_candidates(*args)]  # type: ignore[arg-type]


def test_built_ins_in_order_of_preference() -> None:
    assert names(
        registry(backend("torch"), backend("triton"), backend("odd"), backend("flash_attn"))
    ) == [
        "dovetail:triton",
        "dovetail:flash_attn",
        "dovetail:torch",
    ]


def test_those_without_their_packages_are_left_out() -> None:
    assert names(registry(backend("torch"), backend("triton", "there-is-no-such-package"))) == [
        "dovetail:torch"
    ]


def test_third_parties_never_come_by_themselves() -> None:
    other = registry(backend("torch"), distribution="dovetail-other")
    assert names(other) == []
    assert names(other, "torch") == ["dovetail-other:torch"]


def test_named_backend_is_just_that_and_auto_takes_no_options() -> None:
    installed = registry(backend("torch"), backend("triton"))
    assert names(installed, "triton") == ["dovetail:triton"]
    with pytest.raises(PluginError, match="did you mean triton"):
        names(installed, "tritn")
    with pytest.raises(ConfigError, match=r"attention\.x: auto takes no options"):
        names(installed, "auto", {"x": 1})


def grammar(*specs: ComponentSpec, distribution: str = DISTRIBUTION) -> ResolvedComponent | None:
    return chosen_grammar(registry(*specs, distribution=distribution))


def test_the_grammar_backend_is_the_built_in_one() -> None:
    named = backend("other", kind="grammar"), backend("llguidance", kind="grammar")
    assert str(grammar(*named)).startswith("grammar dovetail:llguidance")


def test_without_its_package_the_grammar_backend_names_what_it_lacks() -> None:
    chosen = grammar(backend("llguidance", "there-is-no-such-package", kind="grammar"))
    assert chosen is not None
    with pytest.raises(
        MissingExtraError, match=r"grammar dovetail:llguidance .* needs there-is-no-such-package"
    ):
        chosen.check_requires()


def test_no_grammar_backend_of_others_comes_by_itself() -> None:
    assert grammar(backend("llguidance", kind="grammar"), distribution="dovetail-other") is None
