"""Shell completion of models, components, kinds, config keys and values. Errors yield no
completions."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import typer

from dovetail.api.component import KINDS

if TYPE_CHECKING:
    from dovetail.registry.registry import Registry

Offer = tuple[str, str]  # a word and its meaning


def _offers(
    complete: Callable[[typer.Context, str], Iterator[Offer]],
) -> Callable[[typer.Context, str], list[Offer]]:
    """Return `complete` as a function that returns all its offers, or none on an error, which would
    be printed into the line being typed."""

    @wraps(complete)
    def offers(ctx: typer.Context, incomplete: str) -> list[Offer]:
        try:
            return list(complete(ctx, incomplete))
        except Exception:
            return []

    offers.__annotations__ = {"ctx": typer.Context, "incomplete": str}
    return offers


def among(names: Sequence[str]) -> Callable[[typer.Context, str], list[Offer]]:
    """Return a completion that offers these names."""

    @_offers
    def offers(ctx: typer.Context, incomplete: str) -> Iterator[Offer]:
        yield from ((name, "") for name in names)

    return offers


@_offers
def kinds(ctx: typer.Context, incomplete: str) -> Iterator[Offer]:
    yield from ((kind, "") for kind in KINDS)


@_offers
def components(ctx: typer.Context, incomplete: str) -> Iterator[Offer]:
    """Yield the components of the kind given earlier on the line."""
    yield from _names(_registry(), ctx.params["kind"])


@_offers
def sources(ctx: typer.Context, incomplete: str) -> Iterator[Offer]:
    """Yield configs and models: bundled ones, those in the hub's cache, and those in the current
    directory."""
    registry = _registry()
    for plugin in registry.plugins:
        for model in plugin.models:
            yield (
                (
                    model.name
                    if plugin.origin.built_in
                    else f"{plugin.origin.distribution}:{model.name}"
                ),
                "bundled",
            )
    yield from ((name, "in the cache") for name in _cached_models())
    for path in sorted(Path(incomplete or ".").parent.glob("*")):
        if path.suffix in (".yaml", ".yml") or (path / "config.json").is_file():
            yield str(path), "a config" if path.suffix else "a model"


@_offers
def settings(ctx: typer.Context, incomplete: str) -> Iterator[Offer]:
    """Yield `key=`, and after it the key's values; both at once if only one key is left, since bash
    would put a space after a single `key=`."""
    key, equals, _ = incomplete.partition("=")
    if not equals:
        keys = [(key, text) for key, text in _keys(incomplete) if key.startswith(incomplete)]
        if len(keys) != 1 or not any(_values(keys[0][0])):
            yield from ((f"{key}=", text) for key, text in keys)
            return
        key = keys[0][0]
    yield from ((f"{key}={value}", text) for value, text in _values(key))


@_offers
def params(ctx: typer.Context, incomplete: str) -> Iterator[Offer]:
    from dovetail.cli.prompts import FIELD_KEYS, PARAMS_KEYS

    yield from ((f"{key}=", "") for key in (*PARAMS_KEYS, *FIELD_KEYS))


def _keys(incomplete: str) -> Iterator[Offer]:
    from dovetail.config.engine import COMPONENT_KEYS, EngineConfig, Pooling, Speculation
    from dovetail.config.limits import Limits

    yield from (
        (name, _first_line(field.description)) for name, field in EngineConfig.model_fields.items()
    )
    for section, model in (("limits", Limits), ("pooling", Pooling), ("speculation", Speculation)):
        yield from (
            (f"{section}.{name}", _first_line(field.description))
            for name, field in model.model_fields.items()
        )
    head = incomplete.rpartition(".")[0]
    if head in COMPONENT_KEYS:
        for component in _registry().components(COMPONENT_KEYS[head]):
            for name, field in component.options_model().model_fields.items():
                yield f"{head}.{name}", f"{component.spec.name}: {_first_line(field.description)}"


def _values(key: str) -> Iterator[Offer]:
    from dovetail.config.engine import COMPONENT_KEYS, LISTS, EngineConfig

    if key in COMPONENT_KEYS:
        names = _names(_registry(), COMPONENT_KEYS[key])
        yield from ((f"[{name}]" if key in LISTS else name, text) for name, text in names)
    elif key in EngineConfig.model_fields:
        kind: Any = EngineConfig.model_fields[key].annotation
        yield from (
            (value, "")
            for value in (
                ("true", "false")
                if kind is bool
                else filter(lambda value: isinstance(value, str), get_args(kind))
            )
        )


def _names(registry: Registry, kind: str) -> Iterator[Offer]:
    for component in registry.components():
        if component.spec.kind == kind:
            yield (
                (
                    component.qualified_name
                    if registry.needs_full_name(component)
                    else component.spec.name
                ),
                component.spec.summary,
            )


def _registry() -> Registry:
    from dovetail.registry.registry import Registry

    return Registry.discover(enforce_require=False)


def _cached_models() -> Iterator[str]:
    from huggingface_hub.constants import HF_HUB_CACHE

    for path in sorted(Path(HF_HUB_CACHE).glob("models--*")):
        yield path.name.removeprefix("models--").replace("--", "/")


def _first_line(text: str | None) -> str:
    return (text or "").partition("\n")[0]


def join_words(environ: MutableMapping[str, str] = os.environ) -> str:
    """Join the words that bash splits at "=" and ":", so that `--set scheduler=fc` comes as three.
    Returns the part of the last word that bash has already, which must not be offered again."""
    if not environ.get("_DOVETAIL_COMPLETE", "").endswith("_bash"):
        return ""
    try:
        words = shlex.split(environ["COMP_WORDS"])
        index = int(environ["COMP_CWORD"])
    except (KeyError, ValueError):
        return ""
    words = words[: index + 1] + [""] * (index + 1 - len(words))
    joined: list[str] = []
    had = ""  # the last word without its last part
    for number, word in enumerate(words):
        parted = joined and (word in ("=", ":") or words[number - 1] in ("=", ":"))
        had = joined[-1] if parted else ""
        joined[-1:] = [joined[-1] + word] if parted else [*joined[-1:], word]
    if words[-1] in ("=", ":"):
        had += words[-1]
    environ["COMP_WORDS"], environ["COMP_CWORD"] = shlex.join(joined), str(len(joined) - 1)
    return had
