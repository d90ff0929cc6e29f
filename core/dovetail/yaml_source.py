"""YAML with line numbers: what a file says, and on which line it says it. YAML 1.1, but numbers like 1e-3 are numbers."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import yaml

from dovetail.errors import ConfigError
from dovetail.where import KeyPath


class YamlSource(NamedTuple):
    """A document: its value, and "file:line" for each key and list item."""

    value: Any
    origins: dict[KeyPath, str]


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which would take 1e-3 for a string."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+"), list("-+0123456789"))


def parse_yaml(text: str, name: str) -> YamlSource:
    """Read a document; an empty one is None. Raises `ConfigError` with file and line for bad syntax, a duplicate key, or a key that is no string."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        origins: dict[KeyPath, str] = {}
        if node is None:
            return YamlSource(None, origins)
        _check(node, name, (), origins, set())
        return YamlSource(loader.construct_document(node), origins)
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{name}:{mark.line + 1 if mark else 1}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:  # a character that YAML doesn't have; a date that doesn't exist
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None


def parse_value(text: str) -> Any:
    """The YAML of one value, as `--set key=value` gives it. Raises `ConfigError`."""
    return parse_yaml(text, "--set").value


def _check(node: yaml.Node, name: str, path: KeyPath, origins: dict[KeyPath, str], above: set[int]) -> None:
    """Notes the lines below a node."""
    if id(node) in above:
        raise ConfigError(f"{name}:{node.start_mark.line + 1}: an alias to what contains it")
    above = above | {id(node)}
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            origins[(*path, index)] = _place(name, item)
            _check(item, name, (*path, index), origins, above)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, str] = {}
        for key, value in node.value:
            place = _place(name, key)
            if not isinstance(key, yaml.ScalarNode) or key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                raise ConfigError(f"{place}: a key must be a string, got {getattr(key, 'value', 'a collection')!r}")
            if key.value in seen:
                raise ConfigError(f"{place}: key {key.value!r} is here twice, first at {seen[key.value]}")
            seen[key.value] = place
            origins[(*path, key.value)] = place
            _check(value, name, (*path, key.value), origins, above)


def _place(name: str, node: yaml.Node) -> str:
    return f"{name}:{node.start_mark.line + 1}"
