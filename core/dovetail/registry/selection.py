"""`plugins: {allow, deny, require}`: the distributions that may be imported. It acts on names
alone, before any import."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidName, canonicalize_name
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from dovetail.base.where import Where, did_you_mean, explain
from dovetail.errors import DISTRIBUTION, ConfigError, shown
from dovetail.registry.plugin import NAMESPACE, PluginOrigin

ENVIRONMENT_VARIABLE = "DOVETAIL_PLUGINS"


def _distribution(name: str) -> str:
    try:
        return canonicalize_name(name, validate=True)
    except InvalidName:
        raise ValueError(f"expected the name of a distribution, got {shown(name)}") from None


def _deniable(name: str) -> str:
    if name in (DISTRIBUTION, NAMESPACE):
        raise ValueError(
            f"the built-ins ({name}) can't be denied: they do nothing until a config names them"
        )
    return name


def _requirement(text: str) -> str:
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise ValueError(
            f"expected a requirement like 'dovetail-fair>=1.2', got {shown(text)}: {error}"
        ) from None
    if canonicalize_name(requirement.name) == NAMESPACE:
        raise ValueError(
            f"expected a requirement of {DISTRIBUTION}, as Dovetail's distribution is called, got "
            f"{shown(text)}"
        )
    return text


class PluginSelection(BaseModel):
    """The distributions whose plugins are used. An installed plugin runs code when the engine
    starts, unless it is excluded here."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    allow: tuple[Annotated[str, AfterValidator(_distribution)], ...] | None = None
    """Use only these distributions, and the built-ins, which are always allowed; `[]`: built-ins
    only. null: all that are installed."""

    deny: tuple[Annotated[str, AfterValidator(_distribution), AfterValidator(_deniable)], ...] = ()
    """Don't use these distributions, even if `allow` has them."""

    require: tuple[Annotated[str, AfterValidator(_requirement)], ...] = ()
    """Distributions whose plugins must be installed and load, as requirements like
    "dovetail-fair>=1.2"; otherwise the engine doesn't start."""

    def denial(self, origin: PluginOrigin) -> str | None:
        """Return the reason why this plugin may not be imported, or None."""
        if origin.distribution in self.deny:
            return "denied by plugins.deny"
        if self.allow is not None and not origin.built_in and origin.distribution not in self.allow:
            return "not in plugins.allow"
        return None

    def with_environment(self, environ: Mapping[str, str] = os.environ) -> PluginSelection:
        """Return the selection with the keys in `DOVETAIL_PLUGINS="allow=a,b;deny=c"` replaced;
        `allow=` means built-ins only, `allow=*` all. Raises `ConfigError` if the variable can't be
        read, or has a key twice."""
        text = environ.get(ENVIRONMENT_VARIABLE, "").strip()
        if not text:
            return self
        where = Where(origins={(): ENVIRONMENT_VARIABLE})
        given: dict[str, list[str] | None] = {}
        for part in filter(None, map(str.strip, text.split(";"))):
            key, equals, names = (piece.strip() for piece in part.partition("="))
            if not equals or key not in PluginSelection.model_fields:
                near = did_you_mean(key, PluginSelection.model_fields) if equals else ""
                hint = near or ', expected something like "allow=a,b;deny=c"'
                raise ConfigError(where.says(f"can't read {shown(part)}{hint}"))
            if key in given:
                raise ConfigError(
                    where.says(f"{key} is given twice: write one list, like {key}=a,b")
                )
            given[key] = (
                None
                if (key, names) == ("allow", "*")
                else [name.strip() for name in names.split(",") if name.strip()]
            )
        try:
            return PluginSelection(**{**self.model_dump(), **given})
        except ValidationError as error:
            raise explain(error, PluginSelection, given, where, "key") from None
