"""YAML reader that keeps the line of each value. YAML 1.1, except that 1e-3 is a number.

Files are the operator's own: what a mistake can do is reported with its line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from dovetail.base.where import KeyPath, Where, explain
from dovetail.errors import ConfigError, shown

Model = TypeVar("Model", bound=BaseModel)

MAX_CHARACTERS = 1 << 20  # more are a wrong file, not a config

_MERGE = "tag:yaml.org,2002:merge"
_STRING = "tag:yaml.org,2002:str"


class YamlSource(NamedTuple):
    """A YAML document: its value, and "file:line" for each key and list item."""

    value: Any
    origins: dict[KeyPath, str]


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with 1e-3 as a number, and errors of its conversions as YAML errors."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception:
            # KeyError for !!bool maybe, IndexError for !!int "", ValueError for a date that doesn't
            # exist, …
            kind = node.tag.rpartition(":")[2]
            problem = (
                f"{shown(node.value)} can't be read as {kind}; a text that looks like one "
                f"needs quotes"
            )
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_yaml(name: str) -> YamlSource:
    """Read a file. Raises `ConfigError` if it can't be read, and as `parse_yaml`."""
    try:
        with Path(name).open(encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARACTERS + 1)  # no more of it than a document may have
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name}: can't be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    return parse_yaml(text, name)


def read_settings(name: str, model: type[Model], example: str) -> tuple[Model, Where]:
    """Read a file of settings, and return them with the places of its keys. `example` is a line
    that such a file may have.

    Raises `ConfigError`: a line for each wrong key, with its file and line.
    """
    value, origins = read_yaml(name)
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{name}:1: expected keys and values, like `{example}`, got {shown(value)}"
        )
    where = Where(origins=origins)
    try:
        return model.model_validate(value), where
    except ValidationError as error:
        raise explain(error, model, value, where, "key") from None


def parse_yaml(text: str, name: str) -> YamlSource:
    """Read a document; an empty one is None. Raises `ConfigError` with file and line for bad
    syntax, a duplicate key, a key that isn't a string, or more than `MAX_CHARACTERS`."""
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{name}: more than {MAX_CHARACTERS} characters: that is no config")
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return YamlSource(None, {})
        origins = _Checker(name).origins_of(node)
        return YamlSource(loader.construct_document(node), origins)
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(
            f"{name}:{mark.line + 1 if mark else 1}: not valid YAML: "
            f"{error.problem or error.context}"
        ) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{name}:{line}: not valid YAML: the character {text[error.position]!a} is not allowed"
        ) from None
    except (
        Exception
    ) as error:  # the scanner doesn't catch some of Python's: OverflowError for "\UFFFFFFFF"
        line = 1 if loader is None else loader.line + 1
        raise ConfigError(
            f"{name}:{line}: not valid YAML: {' '.join(str(error).split())}"
        ) from None


class _Checker:
    """A walk through a document with its aliases expanded, before its values are made."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._origins: dict[KeyPath, str] = {}

    def origins_of(self, root: yaml.Node) -> dict[KeyPath, str]:
        """Return the place of each key and item. Raises `ConfigError` for YAML that a config may
        not contain."""
        self._walk(root, ())
        return self._origins

    def _walk(self, node: yaml.Node, path: KeyPath) -> None:
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._origins[(*path, index)] = self._place(item)
                self._walk(item, (*path, index))
        elif isinstance(node, yaml.MappingNode):
            self._walk_mapping(node, path)

    def _walk_mapping(self, node: yaml.Node, path: KeyPath) -> None:
        seen: dict[str, str] = {}
        for key, value in node.value:
            place = self._place(key)
            if not isinstance(key, yaml.ScalarNode) or key.tag not in (_STRING, _MERGE):
                raise ConfigError(
                    f"{place}: a key must be a string, got "
                    f"{shown(key.value) if isinstance(key, yaml.ScalarNode) else 'a collection'}"
                )
            if key.value in seen:
                raise ConfigError(
                    f"{place}: key {shown(key.value)} is here twice, first at {seen[key.value]}"
                )
            seen[key.value] = place
            self._origins[(*path, key.value)] = place
            self._walk(value, (*path, key.value))

    def _place(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}"
