"""Resolution of a model's name to its files: bundled with a plugin, in a local directory or GGUF
file, or on the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from dovetail.api.component import BundledModel
from dovetail.base.where import Where, did_you_mean
from dovetail.errors import ConfigError, MissingExtraError, ModelLoadError, shown
from dovetail.gguf.unpacked import SUFFIX, gguf_in, unpacked_model
from dovetail.registry.plugin import NAMESPACE, PluginOrigin
from dovetail.registry.registry import Registry
from dovetail.registry.resolved import ResolvedComponent

# config, weights, tokenizers; never code, never pickles
HUB_FILES = (
    "*.json",
    "*.safetensors",
    "*.txt",
    "*.model",
    "*.jinja",
    "tokenizer*",
)

MAX_HUB_ID = 200  # in characters; the hub's own limit is 96

# with "@" and a revision: a branch, a tag or a commit; ".." is in none, and would leave the cache
_HUB_ID = re.compile(r"(?!.*\.\.)[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w.-][\w./-]*)?")


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """The place that a model's name refers to, before anything is fetched."""

    kind: Literal["bundled", "directory", "gguf", "hub"]
    name: str  # as given
    path: Path | None = None  # None: on the hub
    origin: PluginOrigin | None = None  # the plugin that bundles it

    def __str__(self) -> str:
        if self.kind == "bundled":
            return f"{self.path} (bundled with {self.origin})"
        return f"{self.name} on the Hugging Face hub" if self.path is None else str(self.path)


def resolve_model(name: str, registry: Registry) -> Path:
    """Return the directory of a model's files, after fetching them from the hub or unpacking them
    from a GGUF file if necessary. Raises `ConfigError` or `ModelLoadError`, saying what was tried,
    and `UnsupportedError` for a GGUF file of another kind."""
    place = locate_model(name, registry)
    if place.kind == "gguf" and place.path is not None:
        return unpacked_model(place.path)
    return _fetch(name, registry) if place.path is None else place.path


def weights_bytes(name: str, registry: Registry) -> int:
    """Return the size of a model's weights in bytes, by its files, which are fetched from the hub
    if necessary. Raises as `resolve_model`."""
    place = locate_model(name, registry)
    if place.kind == "gguf" and place.path is not None:
        return place.path.stat().st_size
    files = resolve_model(name, registry).glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def locate_model(name: str, registry: Registry, key: str = "model") -> ModelPlace:
    """Find a model: a bundled one ("demo", "distribution:name"), else an existing directory or GGUF
    file, else a hub id, which may end in "@" and a revision. Raises `ConfigError`, naming the
    config's key, if the name fits none or two of these."""
    bundled = _find_bundled(name, registry)
    directory = _path(name)
    if bundled is not None:
        if ":" not in name and directory is not None and directory.is_dir():
            both = f"a bundled model and a directory here: write {NAMESPACE}:{name} or ./{name}"
            raise ConfigError(f"{key}: {name!r} is both {both}")
        return ModelPlace("bundled", name, _bundled_path(*bundled), bundled[0])
    if directory is not None and directory.is_dir():
        files = gguf_in(directory)
        if len(files) > 1:
            found = ", ".join(file.name for file in files[:5])
            raise ConfigError(
                f"{key}: {name!r} holds {len(files)} GGUF files ({found}) and no config.json: name "
                f"one of them"
            )
        if files:
            return ModelPlace("gguf", name, files[0].resolve())
        return ModelPlace("directory", name, directory.resolve())
    if directory is not None and directory.suffix == SUFFIX and directory.is_file():
        return ModelPlace("gguf", name, directory.resolve())
    if directory is not None and directory.exists():
        raise ConfigError(
            f"{key}: {shown(name)} is a file; a model is a directory with config.json and "
            f"safetensors files, or a GGUF file, a config ends in .yaml or .yml"
        )
    if not _HUB_ID.fullmatch(name) or len(name) > MAX_HUB_ID:
        raise ConfigError(
            f"{key}: {shown(name)} is not a directory, nor can it be a hub id; "
            f"{_what_is_bundled(name, registry)}"
        )
    return ModelPlace("hub", name)


def tokenizer_named(name: str, registry: Registry) -> ResolvedComponent | None:
    """Return the tokenizer component of that name, "distribution:name" or a short one; None if the
    name is a model's. Raises `ConfigError` if it is both, `PluginError` if it can be neither."""
    where = Where(("tokenizer",))
    bundled = _find_bundled(name, registry)
    directory = _path(name)
    is_here = bundled is not None or (directory is not None and directory.exists())
    if any(
        name in (known.spec.name, known.qualified_name)
        for known in registry.components("tokenizer")
    ):
        if is_here:
            what = "a bundled model" if bundled is not None else "a file or directory here"
            model = (
                f"./{name}" if bundled is None else f"{bundled[0].distribution}:{bundled[1].name}"
            )
            raise ConfigError(
                where.says(
                    f"{name!r} is both an installed tokenizer and {what}: write {{name: {name}}} "
                    f"or {model}"
                )
            )
        return registry.resolve("tokenizer", name, where=where)
    if ":" in name and not is_here and not any(separator in name for separator in "/\\"):
        return registry.resolve("tokenizer", name, where=where)  # which says what there is
    return None


def _path(name: str) -> Path | None:
    """Return the name as a path; None if it can't be one here: an unknown user after `~`, or too
    many characters for the file system."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError):
        return None
    return path


def _find_bundled(name: str, registry: Registry) -> tuple[PluginOrigin, BundledModel] | None:
    """Return the bundled model of that name, or None. A short name means a built-in; other plugins'
    models need the full name."""
    distribution, colon, short = name.rpartition(":")
    owner = distribution if colon else NAMESPACE
    for origin, model in _bundled(registry):
        if model.name == short and origin.is_called(owner):
            return origin, model
    return None


def bundled_models(registry: Registry) -> Iterator[tuple[str, Path]]:
    """Yield the name and the directory of each model that a plugin bundles. Raises
    `ModelLoadError`."""
    for origin, model in _bundled(registry):
        yield _bundled_name(origin, model), _bundled_path(origin, model)


def _bundled(registry: Registry) -> list[tuple[PluginOrigin, BundledModel]]:
    return [(plugin.origin, model) for plugin in registry.plugins for model in plugin.models]


def _bundled_name(origin: PluginOrigin, model: BundledModel) -> str:
    return model.name if origin.built_in else f"{origin.distribution}:{model.name}"


def _what_is_bundled(name: str, registry: Registry) -> str:
    names = [_bundled_name(origin, model) for origin, model in _bundled(registry)]
    return f"bundled models: {', '.join(names) or 'none'}{did_you_mean(name, names)}"


def _bundled_path(origin: PluginOrigin, model: BundledModel) -> Path:
    try:
        path = resources.files(model.package).joinpath(model.path)
    except ModuleNotFoundError as error:
        raise ModelLoadError(f"model {model.name!r}, bundled with {origin}: {error}") from error
    if not isinstance(path, Path) or not path.is_dir():
        raise ModelLoadError(
            f"model {model.name!r}, bundled with {origin}: {path} is not a directory"
        )
    return path


def _fetch(hub_id: str, registry: Registry) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingExtraError.naming(
            "torch",
            f"model: {hub_id!r} is neither bundled nor a directory here "
            f"({_what_is_bundled(hub_id, registry)}), and would come from the hub",
        ) from error
    repo, _, revision = hub_id.partition("@")
    try:
        files = list(HUB_FILES)
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=files))
    except Exception as error:  # errors of the hub, of HTTP and of the file system
        raise ModelLoadError(
            f"model {hub_id!r} can't be had:\n"
            f"  - {_what_is_bundled(hub_id, registry)}\n"
            f"  - no directory {Path(hub_id).absolute()}\n"
            f"  - the Hugging Face hub: {_why_not(error)}"
        ) from error


def _why_not(error: Exception) -> str:
    """Return a sentence that says why the hub's files couldn't be fetched."""
    from huggingface_hub import constants, errors

    if isinstance(
        error, errors.LocalEntryNotFoundError
    ):  # not in the cache, and the hub can't be reached
        way = (
            "HF_HUB_OFFLINE keeps us from asking the hub"
            if constants.HF_HUB_OFFLINE
            else f"{constants.ENDPOINT} can't be reached"
        )
        return f"{way}, and the model is not in the cache, {constants.HF_HUB_CACHE}"
    if isinstance(error, errors.GatedRepoError):
        return "the model is gated: ask for access on its page, then log in with `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return "it has the model, but no such revision"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "it has no model of that name, or one that only its owners see (log in with `hf "
            "auth login`)"
        )
    if isinstance(error, errors.HFValidationError):
        return "that can't be the name of a model there"
    reason = " ".join(str(error).split())[:400]
    return reason or "it gave no answer"
