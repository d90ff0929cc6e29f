"""`dovetail models`: the models on this machine, and whether each would load."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.streams import echo_json, print_table, tell
from dovetail.errors import DovetailError, MissingExtraError, describe, shown

if TYPE_CHECKING:
    from dovetail.registry.registry import Registry

MAX_INDEX_BYTES = 64 << 20  # of a file that lists a model's shards


@dataclass(frozen=True, slots=True)
class Found:
    """A model on this machine. `size`: bytes on disk. `lacks`: missing files that its index
    lists."""

    name: str  # as `LLM` takes it
    path: Path
    size: int
    lacks: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a model would load. `how`: how it would be served, or why not."""

    served: bool
    how: str


Folders = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[DIRECTORY]...", help="Search here, too.", exists=True, file_okay=False
    ),
]


def models(
    folders: Folders = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Say whether each would load. No weights are read."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List models on this machine: bundled ones, those in the Hugging Face hub's cache, and those
    in the given directories and directly below."""
    from dovetail.registry.registry import Registry

    registry = Registry.discover(enforce_require=False)
    found = [*bundled(registry), *cached()]
    found += [model for folder in folders or () for model in below(folder)]
    verdicts = [verdict(model, registry) if check else None for model in found]
    if as_json:
        echo_json(
            [
                {**asdict(model), "path": str(model.path)} | (asdict(says) if says else {})
                for model, says in zip(found, verdicts, strict=True)
            ],
            indent=2,
        )
        return
    rows = [("MODEL", "SIZE", "WOULD LOAD" if check else "PATH")]
    for model, says in zip(found, verdicts, strict=True):
        told = _line(says) if says else _lacking(model) or str(model.path)
        rows.append((_printable(model.name), _size(model.size), _printable(told)))
    print_table(rows, headed=True)


def bundled(registry: Registry) -> Iterator[Found]:
    """Yield the models that plugins bundle."""
    from dovetail.registry.models import bundled_models

    for name, path in bundled_models(registry):
        yield _found(name, path)


def cached() -> Iterator[Found]:
    """Yield the models in the hub's cache, one for each revision."""
    try:
        from huggingface_hub import constants, scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError as error:
        raise MissingExtraError.naming("torch", "the cache of the hub can't be read") from error
    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    except (OSError, ValueError) as error:  # it is a file, or somebody else's
        tell(f"{constants.HF_HUB_CACHE}: the cache of the hub can't be read: {error}")
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type != "model":
            continue
        for revision in sorted(repo.revisions, key=lambda revision: revision.commit_hash):
            if "main" in revision.refs:
                name = repo.repo_id
            else:
                name = f"{repo.repo_id}@{min(revision.refs, default=revision.commit_hash)}"
            with suppress(OSError):
                if (revision.snapshot_path / "config.json").exists():
                    yield _found(name, revision.snapshot_path)


def below(folder: Path) -> Iterator[Found]:
    """Yield the models in a directory and directly below it."""
    from dovetail.gguf.unpacked import gguf_in

    for directory in (folder, *sorted(folder.iterdir())):
        with suppress(OSError):  # unreadable directories are skipped
            if (directory / "config.json").is_file():
                yield _found(str(directory), directory)
            for file in gguf_in(directory):
                yield Found(str(file), file, file.stat().st_size)


def verdict(model: Found, registry: Registry) -> Verdict:
    """Return whether a model would load, by its config and the headers of its weights. No weights
    are read."""
    if model.lacks:
        return Verdict(False, _lacking(model))
    try:
        return Verdict(True, _forecast(model, registry))
    except DovetailError as error:
        return Verdict(False, str(error))
    except Exception as error:  # configs and model plugins come from others
        return Verdict(False, describe(error))


def _forecast(model: Found, registry: Registry) -> str:
    """Return what the executor of a config with nothing but the model says. Raises
    `DovetailError`."""
    from dovetail.api.clock import WallClock
    from dovetail.config.engine import EngineConfig
    from dovetail.config.parts import find_parts
    from dovetail.front.assembly import executor_context
    from dovetail.registry.models import resolve_model

    config = EngineConfig.load({"model": str(model.path)})
    parts = find_parts(config, registry)
    directory = resolve_model(str(model.path), registry)
    context = executor_context(config, parts, registry, directory, WallClock())
    return parts.executor.load().forecast(context) or "its executor doesn't say how"


def _found(name: str, path: Path) -> Found:
    files = [file for file in path.iterdir() if file.is_file()]
    return Found(name, path, sum(file.stat().st_size for file in files), tuple(_lacks(path)))


def _lacks(path: Path) -> list[str]:
    """Return the names of missing weight files that the index lists."""
    index = path / "model.safetensors.index.json"
    if not index.is_file() or index.stat().st_size > MAX_INDEX_BYTES:
        return []
    try:
        files = json.loads(index.read_bytes())["weight_map"].values()
        names = {name for name in files if isinstance(name, str)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    # unlike `Path.is_file`, `isfile` also takes names that are too long
    return sorted(name for name in names if not os.path.isfile(path / Path(name).name))


def _lacking(model: Found) -> str:
    if not model.lacks:
        return ""
    more = f" (and {len(model.lacks) - 1} more)" if len(model.lacks) > 1 else ""
    return f"incomplete: {shown(model.lacks[0])} is missing{more}"


def _line(says: Verdict) -> str:
    return ("yes: " if says.served else "no: ") + says.how.partition("\n")[0]


def _printable(text: str) -> str:
    """Return a text in which characters that would move the cursor, or do worse, are escapes."""
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in text
    )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
