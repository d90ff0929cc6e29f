"""Declarations resolved by name and imported on first use: `ResolvedComponent`, `ResolvedCommand`,
`ResolvedQuantization`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

from pydantic import BaseModel, ValidationError

from dovetail import api
from dovetail.api.component import (
    API_VERSIONS,
    CommandSpec,
    ComponentSpec,
    Kind,
    NoOptions,
    QuantizationSpec,
    RouterSpec,
    RoutesSpec,
)
from dovetail.api.targets import import_target, make_component
from dovetail.base.where import Where, explain
from dovetail.errors import DISTRIBUTION, MissingExtraError, PluginError
from dovetail.registry.plugin import PluginOrigin
from dovetail.registry.requirements import missing_requirements, pip_line

if TYPE_CHECKING:
    from dovetail.api.executor import ComponentRef, QuantizationRef

BASE_CLASSES: dict[Kind, str] = {  # names in dovetail.api
    "scheduler": "Scheduler",
    "kv_cache": "KVCacheManager",
    "attention": "AttentionBackend",
    "model": "ModelArch",
    "sampler": "Sampler",
    "grammar": "GrammarBackend",
    "executor": "Executor",
    "observer": "Observer",
    "drafter": "Drafter",
    "tokenizer": "Tokenizer",
    "logits_processor": "LogitsProcessor",
    "parser": "Parser",
    "kv_tier": "KVTier",
}


@dataclass(frozen=True, slots=True)
class _Resolved:
    """A plugin's declaration with its origin."""

    spec: Any
    origin: PluginOrigin

    @property
    def qualified_name(self) -> str:
        """The full name, "distribution:name"; for a built-in "dovetail:name"."""
        return self.origin.in_full(self.spec.name)


@dataclass(frozen=True, slots=True)
class _Extension(_Resolved):
    """A plugin's declaration of something beside components."""

    noun: ClassVar[str]  # in messages

    def __str__(self) -> str:
        return f"{self.noun} {self.spec.name!r} of plugin {self.origin}"

    def load(self) -> Any:
        """Import and return the declared target. Raises `PluginError` with the plugin's name if the
        import fails."""
        return import_target(self.spec.target, lambda what: PluginError(f"{self}: {what}"))


@dataclass(frozen=True, slots=True)
class ResolvedComponent(_Resolved):
    """A plugin's component, with its options as `given` in a config and the place (`where`) of its
    name there."""

    spec: ComponentSpec
    given: Mapping[str, Any] = field(default_factory=dict)
    where: Where = field(default_factory=Where, compare=False, repr=False)

    @property
    def distribution(self) -> str:
        return self.origin.distribution

    @property
    def version(self) -> str:
        return self.origin.version

    @property
    def plugin_id(self) -> str:
        return self.origin.id

    def __str__(self) -> str:
        return f"{self.spec.kind} {self.qualified_name} {self.version}"

    def api_problem(self) -> str | None:
        """The reason why this Dovetail can't use it, and what to upgrade; None if it can. A
        component for 1.m runs on every 1.n with n >= m."""
        kind = self.spec.kind
        ours = _version(API_VERSIONS[kind])
        theirs = _version(self.spec.api)
        if theirs > ours:
            return (
                f"{self} needs a Dovetail with {kind} >= {self.spec.api}, this one has "
                f"{API_VERSIONS[kind]}: upgrade {DISTRIBUTION}"
            )
        if theirs == ours or theirs[0] == ours[0] > 0:
            return None
        return (
            f"{self} is written for {kind} {self.spec.api}, this Dovetail has "
            f"{API_VERSIONS[kind]}: upgrade {self.distribution}; its author changes "
            f'api="{self.spec.api}" in its ComponentSpec, and what docs/plugins/upgrade.md lists '
            f"for {kind}"
        )

    def check_requires(self) -> None:
        """Raise `MissingExtraError`, with the pip line, if a package that it needs is missing or
        too old."""
        missing = missing_requirements(self.spec.requires)
        if missing:
            lacks = ", ".join(map(str, missing))
            raise MissingExtraError(
                self.where.says(
                    f"{self} needs {lacks}; install with: {pip_line(missing, self.distribution)}"
                )
            )

    def load(self) -> type[Any]:
        """Import and return its class. Raises `MissingExtraError`, or `PluginError` if the import
        fails or isn't a concrete class of its kind, or if the class is annotated with an options
        model that the spec doesn't name."""
        self.check_requires()
        loaded = import_target(self.spec.target, self._wrong)
        base = getattr(api, BASE_CLASSES[self.spec.kind])
        if not isinstance(loaded, type) or not issubclass(loaded, base):
            raise self._wrong(
                f"{self.spec.target} is {loaded!r}, expected a subclass of "
                f"dovetail.api.{base.__name__}"
            )
        if inspect.isabstract(loaded):
            raise self._wrong(
                f"{self.spec.target} doesn't implement "
                f"{', '.join(sorted(getattr(loaded, '__abstractmethods__', ())))}"
            )
        if (wrong := _description_problem(loaded, base)) is not None:
            raise self._wrong(f"{self.spec.target}.{wrong}")
        if self.spec.options is None and (model := options_of(loaded)) is not NoOptions:
            named = f'options="{model.__module__}:{model.__qualname__}"'
            raise self._wrong(
                f"{self.spec.target} is annotated with options: {model.__name__}, but its "
                f"ComponentSpec names none: give it {named}"
            )
        return loaded

    def options_model(self) -> type[BaseModel]:
        """Return the pydantic model of its options, which refuses unknown keys. Raises
        `PluginError` if it doesn't, or can't be imported."""
        if self.spec.options is None:
            return NoOptions
        model = import_target(self.spec.options, self._wrong)
        if not isinstance(model, type) or not issubclass(model, BaseModel):
            raise self._wrong(
                f"options {self.spec.options} is {model!r}, expected a pydantic model"
            )
        if model.model_config.get("extra") != "forbid":
            raise self._wrong(
                f'options {self.spec.options} must have model_config = ConfigDict(extra="forbid"), '
                f"or misspelt keys pass unseen"
            )
        return model

    def validate_options(self) -> BaseModel:
        """Return the options of the config as their model. Raises `ConfigError` with a line for
        each wrong one."""
        model = self.options_model()
        try:
            return model.model_validate(dict(self.given))
        except ValidationError as error:
            if self.spec.options is None:
                with suppress(MissingExtraError):
                    self.load()  # may name the reason why it has no options
            raise explain(error, model, self.given, self.where, "option") from None

    def in_full(self) -> str | dict[str, Any]:
        """Return its qualified name and all its options, defaults included, as plain values for
        YAML. Raises as `validate_options`."""
        options = self.validate_options().model_dump(mode="json")
        return {"name": self.qualified_name, **options} if options else self.qualified_name

    def ref(self) -> ComponentRef:
        """Return the reference that worker processes get. The options are validated; nothing else
        of the component is imported."""
        from dovetail.api.executor import (
            ComponentRef,
        )  # here, since it imports numpy, which `dovetail --help` doesn't need

        self.validate_options()
        spec = self.spec
        return ComponentRef(
            spec.kind,
            self.qualified_name,
            spec.target,
            dict(self.given),
            spec.options,
            spec.architectures,
        )

    def make(self, context: Any) -> Any:
        """Make the component, `cls(options, context)`. An error that isn't a `DovetailError`
        becomes a `PluginError` with the component's name."""
        options = self.validate_options()
        cls = self.load()
        return make_component(cls, options, context, self.spec.target, self._wrong)

    def request_extra(self) -> type[BaseModel] | None:
        """Return the model of a request's `extra` for this distribution, or None. Raises
        `PluginError` if it can't be imported."""
        if self.spec.request_extra is None:
            return None
        model = import_target(self.spec.request_extra, self._wrong)
        if not isinstance(model, type) or not issubclass(model, BaseModel):
            raise self._wrong(
                f"request_extra {self.spec.request_extra} is {model!r}, expected a pydantic model"
            )
        return model

    def _wrong(self, what: str) -> PluginError:
        return PluginError(self.where.says(f"{self} (plugin {self.plugin_id}): {what}"))


@dataclass(frozen=True, slots=True)
class ResolvedCommand(_Extension):
    """A plugin's subcommand: a `typer.Typer`, or a function."""

    noun = "command"
    spec: CommandSpec

    def typer_app(self, name: str | None) -> Any:
        """Import it, and return it as a `typer.Typer`; a function's command is called `name`.
        Raises `PluginError` with the plugin's name."""
        import typer  # here, since it takes a while

        loaded = self.load()
        if isinstance(loaded, typer.Typer):
            return loaded
        if not callable(loaded):
            raise PluginError(
                f"command {name!r} of plugin {self.origin}: {self.spec.target} is {loaded!r}, not "
                f"a Typer app"
            )
        # it would swallow "[default: …]"
        app = typer.Typer(
            add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
        )
        app.command(name=name)(loaded)
        return app


@dataclass(frozen=True, slots=True)
class ResolvedRoutes(_Extension):
    """The function that makes a plugin's routes."""

    noun = "routes"
    spec: RoutesSpec


@dataclass(frozen=True, slots=True)
class ResolvedRouter(_Extension):
    """The class of a plugin's router of replicas."""

    noun = "router"
    spec: RouterSpec


def _description_problem(loaded: type[Any], base: type[Any]) -> str | None:
    """Return which attribute by which a component describes itself has a wrong type; None if none
    has."""
    own = vars(base)
    if "capabilities" in own and not isinstance(
        found := getattr(loaded, "capabilities", None), type(own["capabilities"]) | property
    ):
        return f"capabilities is {found!r:.200}, expected {type(own['capabilities']).__name__}(…)"
    if "Arguments" in own and not (
        isinstance(model := getattr(loaded, "Arguments", None), type)
        and issubclass(model, BaseModel)
    ):
        return f"Arguments is {model!r:.200}, expected a pydantic model"
    return None


@lru_cache(maxsize=128)  # to evaluate annotations takes longer than all else of an import
def options_of(cls: type[Any]) -> type[BaseModel]:
    """Return the options model that a class is annotated with, as `options: Mine` or
    `__init__(self, options: Mine, …)`; `NoOptions` if there is none narrower than `BaseModel`, or
    if the annotations can't be evaluated."""
    for annotated in (cls, cls.__init__):
        with suppress(Exception):  # a name that only a type checker imports
            model = get_type_hints(annotated).get("options", BaseModel)
            if isinstance(model, type) and issubclass(model, BaseModel) and model is not BaseModel:
                return model
    return NoOptions


@dataclass(frozen=True, slots=True)
class ResolvedQuantization(_Extension):
    """The class of a plugin's quantization method, which needs torch."""

    noun = "quantization"
    spec: QuantizationSpec

    def ref(self) -> QuantizationRef:
        """Return the reference that worker processes get. Nothing is imported."""
        from dovetail.api.executor import (
            QuantizationRef,
        )  # here, since it imports numpy, which `dovetail --help` doesn't need

        return QuantizationRef(
            self.qualified_name, self.spec.name, self.spec.target, self.spec.quantizes
        )


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)
