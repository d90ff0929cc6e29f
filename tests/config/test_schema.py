"""The JSON Schema knows what is installed."""

from __future__ import annotations

from typing import Any

from dovetail.config.engine import EngineConfig
from dovetail.config.schema import json_schema
from dovetail.registry.registry import Registry
from tests.registry.fakes import Site, components, scheduler


def schema() -> Any:
    return json_schema(Registry.discover())


def names_in(choice: Any) -> list[str]:
    return list(choice["anyOf"][0]["enum"])


def shape_of(choice: Any, name: str) -> Any:
    return next(
        shape for shape in choice["anyOf"][1:] if name in shape["properties"]["name"]["enum"]
    )


def test_all_keys_are_there_and_no_others_are_allowed() -> None:
    assert set(schema()["properties"]) == set(EngineConfig.model_fields)
    assert schema()["additionalProperties"] is False
    assert all(prop.get("description") for prop in schema()["properties"].values())


def test_installed_components_and_their_options_are_in_it(site: Site) -> None:
    site.install_scheduler("dovetail-fair")
    choice = schema()["properties"]["scheduler"]
    assert {"fair", "dovetail-fair:fair"} <= set(names_in(choice))
    assert shape_of(choice, "fair")["properties"]["aging_s"]["minimum"] == 0
    assert shape_of(choice, "fair")["additionalProperties"] is False
    assert "auto" in names_in(schema()["properties"]["attention"])
    assert schema()["properties"]["observers"]["type"] == "array"


def test_ambiguous_names_are_offered_in_full_only(site: Site) -> None:
    site.install_scheduler("dovetail-a")
    site.install_scheduler("dovetail-b")
    names = names_in(schema()["properties"]["scheduler"])
    assert "fair" not in names
    assert {"dovetail-a:fair", "dovetail-b:fair"} <= set(names)


def test_options_that_cannot_be_imported_or_described_spoil_nothing(site: Site) -> None:
    odd = """
from pydantic import BaseModel, ConfigDict
class Odd(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    x: type(print) = print
    y: int = 1
"""
    lost = 'kind="scheduler", name="lost", target="a:B", options="there_is_no_such_module:X"'
    strange = 'kind="scheduler", name="strange", target="a:B", options="odd_policy:Odd"'
    old = scheduler("old", "odd", api="0.0")
    site.install("dovetail-odd", modules={"odd": components(lost, strange, old), "odd_policy": odd})
    choice = schema()["properties"]["scheduler"]
    assert "options unknown" in shape_of(choice, "lost")["description"]
    assert {"x", "y"} <= set(shape_of(choice, "strange")["properties"])
    assert "old" not in names_in(choice)


def test_models_within_options_are_definitions_that_no_other_component_shares(site: Site) -> None:
    policies = {
        name: f"""
from pydantic import BaseModel
class Inner(BaseModel, extra="forbid"):
    {name}: int
class Options(BaseModel, extra="forbid"):
    inner: Inner
"""
        for name in ("one", "other")
    }
    specs = [
        f'kind="scheduler", name="{name}", target="a:B", options="{name}_policy:Options"'
        for name in policies
    ]
    modules = {f"{name}_policy": source for name, source in policies.items()}
    site.install("dovetail-nested", modules={"nested": components(*specs), **modules})
    whole = schema()
    for name in policies:
        shape = shape_of(whole["properties"]["scheduler"], name)
        assert shape["required"] == ["name", "inner"]
        inner = shape["properties"]["inner"]["$ref"].removeprefix("#/$defs/")
        assert [*whole["$defs"][inner]["properties"]] == [name]
