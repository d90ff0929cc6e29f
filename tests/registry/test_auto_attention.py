"""`attention: auto`: built-ins only, in order, those whose packages are there."""

from __future__ import annotations

import pytest

from dovetail.api import ComponentSpec
from dovetail.errors import DISTRIBUTION, ConfigError, PluginError
from dovetail.registry.auto_attention import attention_candidates
from dovetail.registry.plugin import LoadedPlugin, PluginOrigin
from dovetail.registry.registry import Registry


def backend(name: str, *requires: str) -> ComponentSpec:
    return ComponentSpec(kind="attention", name=name, target="a:B", requires=requires)


def registry(*specs: ComponentSpec, distribution: str = DISTRIBUTION) -> Registry:
    return Registry([LoadedPlugin(PluginOrigin(distribution, "attention", "1"), tuple(specs))])


def names(*args: object) -> list[str]:
    return [part.qualified_name for part in attention_candidates(*args)]  # type: ignore[arg-type]


def test_built_ins_in_order_of_preference() -> None:
    assert names(registry(backend("torch"), backend("triton"), backend("odd"), backend("flash_attn"))) == [
        "dovetail:triton",
        "dovetail:flash_attn",
        "dovetail:torch",
    ]


def test_those_without_their_packages_are_left_out() -> None:
    assert names(registry(backend("torch"), backend("triton", "there-is-no-such-package"))) == ["dovetail:torch"]


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
