"""`Models`: the models that a front end serves. `Model`: one of them, with its engine, admission,
parsers and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from dovetail.errors import ConfigError, DovetailError, EngineDeadError, RequestError
from dovetail.serving import JsonBounds, PluginSelection, Registry
from dovetail_server.admission import Admission
from dovetail_server.engine import ServedEngine
from dovetail_server.errors import HttpError
from dovetail_server.metrics import ServerMetrics
from dovetail_server.parsers.registry import AnswerParsing
from dovetail_server.settings import ServerSettings

_MOST_LISTED = 2_000  # characters of names in an error


@dataclass(frozen=True)
class Model:
    """A served model. A restart of its engine replaces it."""

    names: tuple[str, ...]  # names that requests may use; answers use the first by default
    engine: ServedEngine
    registry: Registry  # of the plugins that the engine's config allows
    admission: Admission
    parsing: AnswerParsing
    metrics: ServerMetrics

    @classmethod
    def of(
        cls,
        engine: ServedEngine,
        settings: ServerSettings,
        names: tuple[str, ...] = (),
        front_end: int = 0,
    ) -> Model:
        """Make the model of an engine. `names`: if empty, the model's name in `engine.yaml`.
        `front_end`: see `create_app`. Raises `ConfigError` or `PluginError` if the settings don't
        fit the model."""
        info = engine.info
        if settings.chat_template is not None:
            _use_chat_template(engine, settings.chat_template)
        names = names or (info.model,)
        registry = Registry.discover(
            PluginSelection(allow=info.allowed_plugins, deny=info.denied_plugins)
        )
        return cls(
            names,
            engine,
            registry,
            Admission(engine, settings),
            AnswerParsing(engine, settings, registry),
            ServerMetrics(engine, names[0], front_end=front_end),
        )


class Models:
    """The served models, in the order of the command line."""

    def __init__(self, places: Sequence[Model | tuple[str, ...]]) -> None:
        """`places`: for each, a model, or the names of one whose engine is starting."""
        self._places = list(places)
        self._lost: dict[int, str] = {}  # reasons why engines are down, by place

    def __iter__(self) -> Iterator[Model]:
        return (one for one in self._places if isinstance(one, Model))

    @property
    def first(self) -> Model:
        """The model of requests that don't name one."""
        return next(iter(self))

    @property
    def adapted(self) -> Model:
        """The first model that accepts adapters; the first model if none does."""
        takers = (model for model in self if model.engine.info.intake.has_adapters)
        return next(takers, self.first)

    def put(self, place: int, model: Model) -> None:
        """Serve `model`, whose engine has started, at a place."""
        self._lost.pop(place, None)
        self._places[place] = model

    def lose(self, place: int, reason: str) -> None:
        """Record the death of an engine."""
        self._lost[place] = reason

    def named(self, name: str | None) -> Model:
        """Return the model with that name or with an adapter of that name; the first if `name` is
        None. Raises `HttpError`: 404 for an unknown name, 503 while the model's engine is down."""
        if name is None:
            return self.first
        for place, reason in self._lost.items():
            if name in self._names_at(place):
                raise HttpError(503, reason, code="engine_dead")
        for model in self:
            if name in model.names:
                return model
        if (adapted := self.with_adapter(name)) is not None:
            return adapted
        adapters = chain.from_iterable(model.engine.adapters for model in self)
        known = ", ".join((*self.names, *adapters))[:_MOST_LISTED]
        message = f"the model {name[:200]!r} isn't served here; available: {known}"
        raise HttpError(404, message, param="model", code="model_not_found")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all models, without adapters."""
        return tuple(name for model in self for name in model.names)

    def with_adapter(self, name: str) -> Model | None:
        """Return the model that serves the adapter of that name, or None."""
        return next((model for model in self if name in model.engine.adapters), None)

    @property
    def json_bounds(self) -> JsonBounds:
        """The largest JSON bounds of all models: a body is parsed before its model is known."""
        limits = [model.engine.info.intake.limits for model in self]
        return JsonBounds(
            max(one.max_json_parts for one in limits), max(one.max_json_depth for one in limits)
        )

    def down(self) -> dict[str, str]:
        """Return the reasons why engines are down, by the first name of their model."""
        problems = ((place, self._problem(place)) for place in range(len(self._places)))
        return {self._names_at(place)[0]: problem for place, problem in problems if problem}

    def check_health(self) -> None:
        """Raise `EngineDeadError` if no engine works."""
        if len(down := self.down()) == len(self._places):
            raise EngineDeadError(next(iter(down.values())))

    def _problem(self, place: int) -> str | None:
        model = self._places[place]
        if place in self._lost or not isinstance(model, Model):
            return self._lost.get(place)
        try:
            model.engine.check_health()
        except DovetailError as error:
            return str(error)
        return None

    def _names_at(self, place: int) -> tuple[str, ...]:
        one = self._places[place]
        return one.names if isinstance(one, Model) else one


def _use_chat_template(engine: ServedEngine, text: str) -> None:
    """Replace the model's chat template. Raises `ConfigError` if the new one can't render a
    message."""
    engine.tokenizer.use_chat_template(text)
    try:
        engine.chat.render([{"role": "user", "content": "Hello"}])
    except RequestError as error:
        raise ConfigError(f"chat_template: {error}") from None
