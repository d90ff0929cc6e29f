"""Where a model's files are: bundled with a plugin, in a local directory, or on the Hugging Face hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from packaging.utils import canonicalize_name

from dovetail.api.component import BundledModel
from dovetail.errors import ConfigError, MissingExtraError, ModelLoadError
from dovetail.registry.plugin import BUILT_IN, PluginOrigin
from dovetail.registry.registry import Registry
from dovetail.where import did_you_mean

HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "tokenizer*")  # config, weights, tokenizers; never code, never pickles

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """What a model's name stands for, before anything is fetched."""

    kind: Literal["bundled", "directory", "hub"]
    name: str  # as it was given
    path: Path | None = None  # None: on the hub
    origin: PluginOrigin | None = None  # who bundles it

    def __str__(self) -> str:
        if self.kind == "bundled":
            return f"{self.path} (bundled with {self.origin})"
        return str(self.path) if self.kind == "directory" else f"{self.name} on the Hugging Face hub"


def resolve_model(name: str, registry: Registry) -> Path:
    """The directory of a model's files, fetched from the hub if it must be. Raises `ConfigError` or `ModelLoadError`, saying what was tried."""
    place = locate_model(name, registry)
    return _fetch(name, registry) if place.path is None else place.path


def locate_model(name: str, registry: Registry) -> ModelPlace:
    """Bundled ("demo", "distribution:name"), else a directory that exists, else a hub id. Raises `ConfigError` when it is none or two of these."""
    bundled, directory = _find_bundled(name, registry), Path(name).expanduser()
    if bundled is not None:
        if ":" not in name and directory.is_dir():
            both = f"a bundled model and a directory here: write {BUILT_IN}:{name} or ./{name}"
            raise ConfigError(f"model: {name!r} is both {both}")
        return ModelPlace("bundled", name, _bundled_path(*bundled), bundled[0])
    if directory.is_dir():
        return ModelPlace("directory", name, directory.resolve())
    if directory.exists():
        raise ConfigError(f"model: {name!r} is a file; a model is a directory with config.json and safetensors files")
    if not _HUB_ID.fullmatch(name):
        raise ConfigError(f"model: {name!r} is not a directory, nor can it be a hub id; {_what_is_bundled(name, registry)}")
    return ModelPlace("hub", name)


def _find_bundled(name: str, registry: Registry) -> tuple[PluginOrigin, BundledModel] | None:
    """A bare name means a built-in: whoever else bundles models is named."""
    distribution, colon, short = name.rpartition(":")
    owner = canonicalize_name(distribution) if colon else BUILT_IN
    for plugin in registry.plugins:
        for model in plugin.models:
            if model.name == short and plugin.origin.distribution == owner:
                return plugin.origin, model
    return None


def _bundled_names(registry: Registry) -> list[str]:
    plugins = [(plugin.origin, model.name) for plugin in registry.plugins for model in plugin.models]
    return [name if origin.built_in else f"{origin.distribution}:{name}" for origin, name in plugins]


def _what_is_bundled(name: str, registry: Registry) -> str:
    names = _bundled_names(registry)
    return f"bundled models: {', '.join(names) or 'none'}{did_you_mean(name, names)}"


def _bundled_path(origin: PluginOrigin, model: BundledModel) -> Path:
    try:
        path = resources.files(model.package).joinpath(model.path)
    except ModuleNotFoundError as error:
        raise ModelLoadError(f"model {model.name!r}, bundled with {origin}: {error}") from error
    if not isinstance(path, Path) or not path.is_dir():
        raise ModelLoadError(f"model {model.name!r}, bundled with {origin}: {path} is not a directory")
    return path


def _fetch(hub_id: str, registry: Registry) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingExtraError(f'model: {hub_id!r} would come from the Hugging Face hub; install with: pip install "{BUILT_IN}[torch]"') from error
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # the hub's own errors, those of HTTP and of the file system
        reason = " ".join(str(error).split())[:400]
        raise ModelLoadError(
            f"model {hub_id!r} can't be had:\n"
            f"  - {_what_is_bundled(hub_id, registry)}\n"
            f"  - no directory {Path(hub_id).absolute()}\n"
            f"  - the Hugging Face hub: {type(error).__name__}: {reason}"
        ) from error
