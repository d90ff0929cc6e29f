"""Finding the components that a config names, without making them: for the engine, and for `dovetail config show` and `check`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
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


@dataclass(frozen=True, slots=True)
class Parts:
    """The components of an engine. `attention`: the candidates, best first. `models`: all installed architectures of this api version.
    `grammar` is neither imported nor made before a request asks for it; None: `grammar: auto`, and no built-in backend is there."""

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
        yield from (self.executor, *self.observers, *self.models)


def find_parts(config: EngineConfig, registry: Registry) -> Parts:
    """Find the components that `config` names. Raises `PluginError` for the first that isn't available, `ConfigError` for options of
    `auto`."""

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
    )


def read_parts(
    source: str | Path | Mapping[str, Any] | EngineConfig,
    overrides: Mapping[str, Any],
    registry: Registry | None = None,
    *,
    origin: str = "override",
    imports: Collection[Kind] = (),
) -> tuple[EngineConfig, Registry, Parts]:
    """Load a config, find its components, check their options, and import those of the kinds `imports`. Raises the error, or a `ConfigError` that
    lists all if there are several."""
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
    """Return all problems with the model's name and with the components: their names, their options, and the import of those of the kinds
    `imports`. Packages may be missing that nobody needs: a simulation has neither sampler nor attention, and no request may ask
    for a grammar. If `note` is given, it is told of these instead."""
    problems: list[DovetailError] = []

    def check(part: ResolvedComponent) -> None:
        with _noting(problems):
            part.validate_options()
        if part.spec.kind in imports:
            with _noting(problems):
                try:
                    part.load()
                except MissingExtraError as error:
                    if note is None or part.spec.kind not in (
                        "sampler",
                        "logits_processor",
                        "attention",
                        "grammar",
                    ):
                        raise
                    note(error)

    with _noting(problems):
        locate_model(config.model.path, registry)
    with _noting(problems):
        tokenizer = config.chosen_tokenizer(registry)
        if tokenizer is not None:
            check(tokenizer)
        elif isinstance(config.tokenizer, str):
            locate_model(config.tokenizer, registry, key="tokenizer")
    with _noting(problems):
        for part in config.model_candidates(registry) if config.model.component is not None else ():
            check(part)
    with _noting(problems):
        for part in config.attention_candidates(registry):
            check(part)
    with _noting(problems):
        grammar = config.chosen_grammar(registry)
        if grammar is not None:
            check(grammar)
    for key, kind in COMPONENT_KEYS.items():
        if kind in PREFERENCE or kind == "tokenizer":
            continue
        listed = set[str]()
        for choice in config.choices(key):
            with _noting(problems):
                part = registry.resolve(kind, choice.name, choice.options, choice.where)
                check(part)
                if kind == "logits_processor" and part.qualified_name in listed:
                    raise ConfigError(
                        part.where.says(
                            f"{part.qualified_name} is listed twice: requests ask for a logits processor by its name"
                        )
                    )
                listed.add(part.qualified_name)
    return problems


def all_of(problems: Sequence[DovetailError]) -> DovetailError:
    """Return one error for one or more problems; it lists at most `LISTED`."""
    if len(problems) == 1:
        return problems[0]
    return ConfigError("\n".join([*map(str, problems[:LISTED]), *and_more(len(problems))]))


@contextmanager
def _noting(problems: list[DovetailError]) -> Iterator[None]:
    """Suppress a `DovetailError` and append it to `problems`, unless one says the same: a module that can't be imported may be wanted twice."""
    try:
        yield
    except DovetailError as error:
        if str(error) not in map(str, problems):
            problems.append(error)
