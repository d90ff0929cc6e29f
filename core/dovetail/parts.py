"""The components that a config names, found and not yet made: for the engine, and for `dovetail config show` and `check`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dovetail.api.component import Kind
from dovetail.config import ComponentChoice, EngineConfig
from dovetail.registry.registry import Registry
from dovetail.registry.resolved import ResolvedComponent


@dataclass(frozen=True, slots=True)
class Parts:
    """`attention`: the candidates, best first. `models`: all architectures that are installed and of this api."""

    scheduler: ResolvedComponent
    kv_cache: ResolvedComponent
    attention: tuple[ResolvedComponent, ...]
    sampler: ResolvedComponent
    executor: ResolvedComponent
    observers: tuple[ResolvedComponent, ...]
    models: tuple[ResolvedComponent, ...]

    def __iter__(self) -> Iterator[ResolvedComponent]:
        yield from (self.scheduler, self.kv_cache, *self.attention, self.sampler, self.executor, *self.observers, *self.models)


def find_parts(config: EngineConfig, registry: Registry) -> Parts:
    """Raises `PluginError` for the first name that can't be had, `ConfigError` for options of `attention: auto`."""

    def one(kind: Kind, choice: ComponentChoice) -> ResolvedComponent:
        return registry.resolve(kind, choice.name, choice.options, choice.where)

    return Parts(
        scheduler=one("scheduler", config.scheduler),
        kv_cache=one("kv_cache", config.kv_cache),
        attention=config.attention_candidates(registry),
        sampler=one("sampler", config.sampler),
        executor=one("executor", config.executor),
        observers=tuple(one("observer", choice) for choice in config.observers),
        models=tuple(model for model in registry.components("model") if model.api_problem() is None),
    )
