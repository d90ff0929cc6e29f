"""JSON Schema of `engine.yaml`, for editors: the config's own keys, and for each component key the
names and options that are installed."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, JsonSchemaWarningKind
from pydantic_core import core_schema

from dovetail.config.engine import COMPONENT_KEYS, LISTS, EngineConfig
from dovetail.errors import DovetailError
from dovetail.registry.registry import AUTO, PREFERENCE, Registry
from dovetail.registry.resolved import ResolvedComponent


class _LenientSchema(GenerateJsonSchema):
    """A schema generator in which a type that JSON can't describe accepts anything, instead of
    failing the whole schema."""

    def handle_invalid_for_json_schema(
        self, schema: core_schema.CoreSchema, error_info: str
    ) -> JsonSchemaValue:
        return {}

    def emit_warning(self, kind: JsonSchemaWarningKind, detail: str) -> None:
        """Do nothing: a schema has no place for warnings."""


def json_schema(registry: Registry) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12). A component whose options can't be imported accepts
    any, and its description says why."""
    schema = EngineConfig.model_json_schema(mode="validation", schema_generator=_LenientSchema)
    definitions = schema.setdefault("$defs", {})
    for key, kind in COMPONENT_KEYS.items():
        components = [c for c in registry.components(kind) if c.api_problem() is None]
        names = [name for c in components for name in _names(c, registry)]
        extra = [AUTO] if kind in PREFERENCE else []
        choices = [
            {"enum": extra + names},
            *(_with_options(c, registry, definitions) for c in components),
        ]
        choice: dict[str, Any] = {"anyOf": choices}
        if key == "tokenizer":  # which may be a model's name
            choices[0] = {"type": ["string", "null"], "examples": names}
        properties = (
            definitions["Speculation"]["properties"]
            if key == "speculation.drafter"
            else schema["properties"]
        )
        name = key.rpartition(".")[2]
        text = {
            about: properties[name][about]
            for about in ("description", "default")
            if about in properties[name]
        }
        properties[name] = {
            **text,
            **({"type": "array", "items": choice} if key in LISTS else choice),
        }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _names(component: ResolvedComponent, registry: Registry) -> list[str]:
    """Return the names that a config may use."""
    return (
        [component.qualified_name]
        if registry.needs_full_name(component)
        else [component.spec.name, component.qualified_name]
    )


def _with_options(
    component: ResolvedComponent, registry: Registry, definitions: dict[str, Any]
) -> dict[str, Any]:
    """Return the schema of `{name: …, option: …}`; models inside the options go to
    `definitions`."""
    shape: dict[str, Any] = {
        "type": "object",
        "description": component.spec.summary,
        "required": ["name"],
    }
    shape["properties"] = {"name": {"enum": _names(component, registry)}}
    try:
        model = component.options_model()
    except DovetailError as error:
        return shape | {"description": f"{component.spec.summary} (options unknown: {error})"}
    prefix = f"{component.spec.kind}.{component.qualified_name}."
    options = model.model_json_schema(
        ref_template=f"#/$defs/{prefix}{{model}}", schema_generator=_LenientSchema
    )
    definitions.update({prefix + name: inner for name, inner in options.pop("$defs", {}).items()})
    shape["properties"] |= options.get("properties", {})
    shape["required"] = ["name", *options.get("required", [])]
    return shape | {"additionalProperties": False}
