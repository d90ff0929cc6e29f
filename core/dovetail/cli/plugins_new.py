"""`dovetail plugins new`: a package with one working component or extension, its conformance test
and its CI file.

The templates are such packages themselves, called dovetail-acme: the files in `templates/common`,
for an extension also those in `templates/extension`, and in the folder of the kind. Writing a
package replaces the word acme, and in the common files also the words that begin with it and depend
on the kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from dovetail import __version__
from dovetail.api.component import KINDS
from dovetail.base.where import did_you_mean
from dovetail.cli import completion
from dovetail.errors import DISTRIBUTION, ConfigError

MAX_NAME = 40  # in characters
PREFIX = "dovetail-"  # of a distribution's name

_NAME = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
_WORD = re.compile(r"dovetail[-_]acme|[Aa]cme(_[a-z_]+)?")
# Lines of common files that a component has and an extension lacks, between two comments
_OF_COMPONENTS = re.compile(
    r"^ *# begin: of components\n(.*?)^ *# end: of components\n", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Template:
    """The words in which the package of a kind differs, beside the files of its folder."""

    title: str
    module: str  # the module with its code
    extra: str = ""  # of Dovetail, that the code needs
    use: str = ""  # of an extension: a command that uses it


TEMPLATES: Mapping[str, Template] = {
    "scheduler": Template("A scheduling policy", "policy"),
    "kv_cache": Template("A KV-cache manager", "manager"),
    "attention": Template("An attention backend", "backend", "torch"),
    "model": Template("A model architecture", "model", "torch"),
    "sampler": Template("A sampler", "sampler", "torch"),
    "grammar": Template("A grammar backend", "backend"),
    "executor": Template("An executor", "executor"),
    "observer": Template("An observer", "observer"),
    "drafter": Template("A drafter", "drafter"),
    "tokenizer": Template("A tokenizer", "tokenizer"),
    "logits_processor": Template("A logits processor", "processor", "torch"),
    "parser": Template("A parser", "parser"),
    "kv_tier": Template("A KV tier", "tier"),
}
EXTENSIONS: Mapping[str, Template] = {  # what a plugin may add beside components
    "route": Template(
        "A route of the server", "routes", "server", "dovetail serve demo --route acme"
    ),
    "command": Template(
        "A subcommand of `dovetail`", "command", "torch", 'dovetail acme demo "To be"'
    ),
    "weight_format": Template(
        "A weight format",
        "format",
        "torch",
        'dovetail generate demo "To be" --set quantization=acme',
    ),
    "router": Template(
        "A router of replicas",
        "router",
        use='dovetail lab run demo --trace "arrivals=poisson(9) requests=50 prompt=uniform(8, 90) '
        'output=uniform(4, 12)" --replicas 3 --router acme',
    ),
}
NEW = (*KINDS, *EXTENSIONS)


def new(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help=f"{', '.join(NEW[:-1])} or {NEW[-1]}.",
            autocompletion=completion.among(NEW),
        ),
    ],
    name: Annotated[
        str,
        typer.Argument(
            help="The component's name, like my_policy; the package is called dovetail-my-policy."
        ),
    ],
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Where to put the package's folder.")
    ] = Path("."),
) -> None:
    """Write a package with one working component, or a route, command, weight format or router, its
    conformance test and its CI file."""
    project = write_package(kind, name, folder)
    component = component_name(name)
    typer.echo(f"{project} has a working {kind} called {component!r}. Next:")
    typer.echo(f"  cd {project}")
    typer.echo('  pip install -e ".[test]"')
    typer.echo(
        "  python -m pytest"
        if kind in EXTENSIONS
        else f"  dovetail plugins test {kind} {component}"
    )
    typer.echo(f"  dovetail plugins doctor {project.name}")
    typer.echo("What to change is in src/, what it must keep to in tests/test_conformance.py.")


def write_package(kind: str, name: str, folder: Path) -> Path:
    """Write a package and return its folder, below `folder`. Raises `ConfigError`, with nothing
    written, if kind or name is wrong or the folder exists; also if it can't be written."""
    if kind not in NEW:
        raise ConfigError(
            f"unknown kind {kind!r}{did_you_mean(kind, NEW)}; kinds are {', '.join(NEW)}"
        )
    component = component_name(name)
    _check_free(kind, component)
    project = folder / f"{PREFIX}{component.replace('_', '-')}"
    if project.exists():
        raise ConfigError(
            f"{project} is there already: choose another name, another --dir, or remove it"
        )
    words = _words(kind, component)
    try:
        for path, text in _files(kind).items():
            target = project / _replaced(path, words)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_replaced(text, words), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{project} can't be written: {error}; name another place with --dir"
        ) from None
    return project


def component_name(name: str) -> str:
    """Return the component's name, which is the package's without its prefix. Raises `ConfigError`
    unless it can be the name of a component, a distribution, a module and a class."""
    component = re.sub("^dovetail[-_]", "", name)
    if not _NAME.fullmatch(component) or len(component) > MAX_NAME:
        right = (
            f"lower case letters and digits, joined by '-' or '_', with a letter first, "
            f"{MAX_NAME} characters at most"
        )
        raise ConfigError(f"{name!r} can't be a component's name: expected {right}")
    return component


def _check_free(kind: str, component: str) -> None:
    """Raise `ConfigError` if Dovetail itself has a component or a package of that name: the new one
    would need its full name, or hide the other."""
    from dovetail.registry.loader import find_plugins
    from dovetail.registry.registry import Registry
    from dovetail.registry.selection import PluginSelection

    built_in = Registry.discover(PluginSelection(allow=()), environ={}, enforce_require=False)
    taken = {
        name
        for plugin in built_in.plugins
        for what, name in plugin.offers()
        if what == {"weight_format": "quantization"}.get(kind, kind)
    }
    packages = {plugin.package for plugin in find_plugins().plugins if plugin.origin.built_in}
    distribution = PREFIX + component.replace("_", "-")
    if (
        component in taken
        or distribution == DISTRIBUTION
        or distribution.replace("-", "_") in packages
    ):
        raise ConfigError(
            f"{component!r} is the name of something that comes with Dovetail: choose another one"
        )


def _words(kind: str, component: str) -> dict[str, str]:
    """Return the replacement of each placeholder word in the templates."""
    template = {**TEMPLATES, **EXTENSIONS}[kind]
    extra = f"[{template.extra}]" if template.extra else ""
    major, minor = map(int, __version__.split(".")[:2])
    # without an upper bound, since later releases run it, too: see docs/plugins/versions.md
    versions = f">={major}.{minor}"
    return {
        "dovetail-acme": PREFIX + component.replace("_", "-"),
        "dovetail_acme": f"dovetail_{component.replace('-', '_')}",
        "acme": component,
        "Acme": "".join(part.capitalize() for part in re.split("[-_]", component)),
        "acme_kind": kind,
        "acme_title": template.title,
        "acme_module": template.module,
        "acme_requirement": f"{DISTRIBUTION}{extra}{versions}",
        "acme_use": template.use.replace("acme", component),
        "acme_testing": f"{DISTRIBUTION}[testing]{versions}",
    }


def _replaced(text: str, words: Mapping[str, str]) -> str:
    def replace(match: re.Match[str]) -> str:
        word = match[0]
        return words[word] if word in words else words[word[:4]] + word[4:]

    return _WORD.sub(replace, text)


def _files(kind: str) -> Mapping[str, str]:
    """Return path -> text of the templates' files; "dot-" at the beginning of a name becomes a dot.
    Those of `extension` replace common ones, of which extensions lack what is marked as of
    components."""
    templates = resources.files("dovetail.cli") / "templates"
    is_extension = kind in EXTENSIONS
    parts = ("common", "extension", kind) if is_extension else ("common", kind)
    files = {path: text for part in parts for path, text in _below(templates / part, "")}
    kept = "" if is_extension else r"\1"
    return {path: _OF_COMPONENTS.sub(kept, text) for path, text in files.items()}


def _below(folder: Traversable, path: str) -> Iterator[tuple[str, str]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        here = path + re.sub("^dot-", ".", entry.name)
        if entry.name.startswith((".", "__pycache__")):
            continue  # the cache of a linter, or of Python
        if entry.is_dir():
            yield from _below(entry, f"{here}/")
        else:
            yield here, entry.read_text(encoding="utf-8")
