"""Finding the components that a config names, without making them: for the engine, and for
`dovetail config show` and `check`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.api.component import KINDS, Kind
from dovetail.base.where import LISTED, and_more
from dovetail.config.engine import COMPONENT_KEYS, ComponentChoice, EngineConfig
from dovetail.errors import ConfigError, DovetailError, MissingExtraError
from dovetail.registry.models import locate_model
from dovetail.registry.registry import PREFERENCE, Registry
from dovetail.registry.resolved import ResolvedComponent

_SELDOM_NEEDED = ("sampler", "logits_processor", "attention", "grammar")


@dataclass(frozen=True, slots=True)
class Parts:
    """The components of an engine. `attention`: the candidates, best first. `models`: all installed
    architectures of this api version. `grammar` is neither imported nor made before a request asks
    for it; None: `grammar: auto`, and no built-in backend is there."""

    scheduler: ResolvedComponent
    kv_cache: ResolvedComponent
    attention: tuple[ResolvedComponent, ...]
    sampler: ResolvedComponent
    grammar: ResolvedComponent | None
    executor: ResolvedComponent
    observers: tuple[ResolvedComponent, ...]
    models: tuple[ResolvedComponent, ...]
    drafter: ResolvedComponent | None = None  # None: no speculation
    tokenizer: ResolvedComponent | None = None  # None: a model's
    logits_processors: tuple[ResolvedComponent, ...] = ()  # in the order in which they are applied
    kv_tiers: tuple[ResolvedComponent, ...] = ()  # in the order in which they are searched

    def __iter__(self) -> Iterator[ResolvedComponent]:
        optional = (
            part for part in (self.grammar, self.drafter, self.tokenizer) if part is not None
        )
        yield from (
            self.scheduler,
            self.kv_cache,
            *self.attention,
            self.sampler,
            *self.logits_processors,
            *optional,
        )
        yield from (self.executor, *self.observers, *self.kv_tiers, *self.models)


def find_parts(config: EngineConfig, registry: Registry) -> Parts:
    """Find the components that `config` names. Raises `PluginError` for the first that isn't
    available, `ConfigError` for options of `auto`."""

    def one(kind: Kind, choice: ComponentChoice) -> ResolvedComponent:
        return registry.resolve(kind, choice.name, choice.options, choice.where)

    return Parts(
        scheduler=one("scheduler", config.scheduler),
        kv_cache=one("kv_cache", config.kv_cache),
        attention=config.attention_candidates(registry),
        sampler=one("sampler", config.sampler),
        grammar=config.chosen_grammar(registry),
        executor=one("executor", config.executor),
        observers=tuple(one("observer", choice) for choice in config.observers),
        models=config.model_candidates(registry),
        drafter=None if config.speculation is None else one("drafter", config.speculation.drafter),
        tokenizer=config.chosen_tokenizer(registry),
        logits_processors=tuple(
            one("logits_processor", choice) for choice in config.logits_processors
        ),
        kv_tiers=tuple(one("kv_tier", choice) for choice in config.kv_tiers),
    )


def read_parts(
    source: str | Path | Mapping[str, Any] | EngineConfig,
    overrides: Mapping[str, Any],
    registry: Registry | None = None,
    *,
    origin: str = "override",
    imports: Collection[Kind] = (),
) -> tuple[EngineConfig, Registry, Parts]:
    """Load a config, find its components, check their options, and import those of the kinds
    `imports`. Raises the error, or a `ConfigError` that lists all if there are several."""
    config: EngineConfig | None = None
    problems: list[DovetailError] = []
    with _noting(problems):
        config, wrong = EngineConfig.load_what_is_right(source, overrides, origin)
        problems += [wrong] if wrong else []
    if config is not None:
        with _noting(problems):
            registry = registry or Registry.discover(config.plugins)
            problems += find_problems(config, registry, imports=imports)
    if problems or config is None or registry is None:
        raise all_of(problems)
    return config, registry, find_parts(config, registry)


def find_problems(
    config: EngineConfig,
    registry: Registry,
    *,
    imports: Collection[Kind] = KINDS,
    note: Callable[[MissingExtraError], None] | None = None,
) -> list[DovetailError]:
    """Return all problems with the model's name and with the components: their names, their
    options, and the import of those of the kinds `imports`. Packages may be missing that nobody
    needs: a simulation has neither sampler nor attention, and no request may ask for a grammar. If
    `note` is given, it is told of these instead."""
    found = _Problems(imports, note)
    with found.noting():
        locate_model(config.model.path, registry)
    with found.noting():
        tokenizer = config.chosen_tokenizer(registry)
        if tokenizer is not None:
            found.check(tokenizer)
        elif isinstance(config.tokenizer, str):
            locate_model(config.tokenizer, registry, key="tokenizer")
    if config.model.component is not None:
        with found.noting():
            found.check(*config.model_candidates(registry))
    with found.noting():
        found.check(*config.attention_candidates(registry))
    with found.noting():
        grammar = config.chosen_grammar(registry)
        if grammar is not None:
            found.check(grammar)
    for key, kind in COMPONENT_KEYS.items():
        if kind not in PREFERENCE and kind != "tokenizer":
            found.check_choices(config.choices(key), kind, registry)
    return found.problems


class _Problems:
    """Problems with components, collected by `find_problems`."""

    def __init__(
        self, imports: Collection[Kind], note: Callable[[MissingExtraError], None] | None
    ) -> None:
        self.problems: list[DovetailError] = []
        self._imports = imports
        self._note = note

    def noting(self) -> AbstractContextManager[None]:
        return _noting(self.problems)

    def check(self, *parts: ResolvedComponent) -> None:
        """Validate the parts' options, and import those that are to be imported."""
        for part in parts:
            with self.noting():
                part.validate_options()
            if part.spec.kind in self._imports:
                with self.noting():
                    self._load(part)

    def check_choices(
        self, choices: Iterable[ComponentChoice], kind: Kind, registry: Registry
    ) -> None:
        listed = set[str]()
        for choice in choices:
            with self.noting():
                part = registry.resolve(kind, choice.name, choice.options, choice.where)
                self.check(part)
                if kind == "logits_processor" and part.qualified_name in listed:
                    raise ConfigError(
                        part.where.says(
                            f"{part.qualified_name} is listed twice: requests ask for a logits "
                            "processor by its name"
                        )
                    )
                listed.add(part.qualified_name)

    def _load(self, part: ResolvedComponent) -> None:
        try:
            part.load()
        except MissingExtraError as error:
            if self._note is None or part.spec.kind not in _SELDOM_NEEDED:
                raise
            self._note(error)


def all_of(problems: Sequence[DovetailError]) -> DovetailError:
    """Return one error for one or more problems; it lists at most `LISTED`."""
    if len(problems) == 1:
        return problems[0]
    return ConfigError("\n".join([*map(str, problems[:LISTED]), *and_more(len(problems))]))


@contextmanager
def _noting(problems: list[DovetailError]) -> Iterator[None]:
    """Suppress a `DovetailError` and append it to `problems`, unless one says the same: a module
    that can't be imported may be wanted twice."""
    try:
        yield
    except DovetailError as error:
        if str(error) not in map(str, problems):
            problems.append(error)
