"""Nothing that a user can name is undocumented: keys, options, commands, hooks, kinds, the public
names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import pytest
import yaml
from tools import docs_griffe, docs_hooks

import dovetail
from dovetail import api, serving, testing
from dovetail.api.component import KINDS, Kind
from dovetail.config.engine import COMPONENT_KEYS, EngineConfig
from dovetail.errors import DISTRIBUTION
from dovetail.registry import hookspecs
from dovetail.registry.doctor.metadata import PROBLEMS
from dovetail.registry.resolved import BASE_CLASSES
from dovetail.registry.selection import PluginSelection
from dovetail_server.command import option_name
from dovetail_server.settings import ServerSettings
from tests.docs.pages import DOCS, ROOT, blocks_of, commands_of, pages

HOOKS = [name for name in dir(hookspecs) if name.startswith("dovetail_")]


def text_of(page: str) -> str:
    """A page as it is published, with what is generated."""
    return docs_hooks.fill_in((DOCS / page).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def nav() -> list[str]:
    def paths(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [
            path
            for item in (entry if isinstance(entry, list) else entry.values())
            for path in paths(item)
        ]

    return paths(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])


def test_every_key_is_on_the_configuration_page_with_its_default_and_meaning() -> None:
    page = text_of("configuration.md")
    for key, field in EngineConfig.model_fields.items():
        row = row_of(page, key)
        assert row[3].split()[:6] == str(field.description).split()[:6], key
        assert row[2] == f"`{docs_hooks.as_yaml(field.default)}`", key
        assert row[1], key
    for key in PluginSelection.model_fields:
        assert row_of(page, f"plugins.{key}")[3]


def test_no_page_and_no_file_for_deployment_gives_an_option_of_the_server_a_name_that_the_command_does_not_know() -> (
    None
):
    names = ServerSettings.model_fields
    wrong = {f"--{name.replace('_', '-')}" for name in names} - {
        option_name(name) for name in names
    }
    files = [
        *map(ROOT.joinpath, pages()),
        *(path for path in (ROOT / "deploy").rglob("*") if path.is_file()),
    ]
    found = {
        path: wrong & set(re.findall(r"--[a-z][a-z-]+", path.read_text(encoding="utf-8")))
        for path in files
    }
    assert not {path: options for path, options in found.items() if options}


def test_every_built_in_component_is_on_the_configuration_page_with_its_options() -> None:
    page = text_of("configuration.md")
    for component in docs_hooks.built_ins().components():
        anchor = f"{component.spec.kind}-{component.spec.name}"
        assert f"#### `{component.spec.name}` {{ #{anchor} }}" in page
        for option in component.options_model().model_fields:
            assert row_of(page, option, f"{anchor}-{option}")[3]


def test_what_is_installed_from_elsewhere_is_not_on_the_configuration_page() -> None:
    assert {component.distribution for component in docs_hooks.built_ins().components()} == {
        DISTRIBUTION
    }


def test_every_command_has_a_section_with_an_example_and_its_help() -> None:
    page = text_of("cli.md")
    shown = [
        command.line
        for block in blocks_of("docs/cli.md")
        if block.language == "console"
        for command in commands_of(block)
    ]
    for path in docs_hooks.commands():
        name = " ".join(path)
        assert f"## `dovetail {name}`" in page
        assert f"Usage: dovetail {name} " in page, (
            f"the section lacks <!-- generated: help {name} -->"
        )
        assert any(line.startswith(f"dovetail {name}") for line in shown), (
            f"dovetail {name} has no example"
        )


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_explained_with_an_example(hook: str) -> None:
    assert f"### `{hook}`" in text_of("plugins/index.md")
    assert any(
        f"def {hook}(" in block.text
        for block in blocks_of("docs/plugins/index.md")
        if block.language == "python"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_reference_page_and_is_in_the_tables(kind: Kind, nav: list[str]) -> None:
    assert f"::: dovetail.api.{kind}\n" in text_of(f"reference/{kind}.md")
    assert {f"reference/{kind}.md", f"plugins/{kind}.md"} <= set(nav)
    key = next((key for key, of in COMPONENT_KEYS.items() if of == kind), None)
    named = f"`{key}` |" if key else "none"
    assert f"| `{kind}` | `{BASE_CLASSES[kind]}` | {named}" in text_of("plugins/index.md")
    assert f"| `{kind}` | {api.component.API_VERSIONS[kind]} |" in text_of("reference/index.md")
    assert f"| `{kind}` | {api.component.API_VERSIONS[kind]} |" in text_of("plugins/versions.md")


def test_every_problem_that_the_doctor_knows_is_in_its_table() -> None:
    rows = dict(
        re.findall(
            r"^\| `([a-z-]+)` \| (error|warning) \|", text_of("plugins/publish.md"), re.MULTILINE
        )
    )
    assert rows == PROBLEMS


def reference_targets() -> set[str]:
    """Modules and names that the reference takes from the code."""
    reference = "".join(
        text_of(f"reference/{path.name}") for path in (DOCS / "reference").glob("*.md")
    )
    return set(re.findall(r"^::: (\S+)", reference, re.MULTILINE))


@pytest.fixture(scope="module")
def package() -> Any:
    return griffe.load("dovetail", search_paths=[ROOT / "core"])


@pytest.fixture(scope="module")
def documented(package: Any) -> list[griffe.Object]:
    """What the reference shows, with all that is inside. A name that is only imported where the
    reference looks for it is a `griffe.Alias`."""

    def walk(thing: Any) -> Iterator[Any]:
        yield thing
        for member in () if thing.is_alias else thing.members.values():
            if member.is_public and not member.is_alias:
                yield from walk(member)

    return [
        thing
        for target in reference_targets()
        for thing in walk(package[target.removeprefix("dovetail.")])
    ]


@pytest.mark.slow("reads the whole package")
def test_the_reference_names_things_where_they_are_defined(documented: list[griffe.Object]) -> None:
    assert not [thing.path for thing in documented if thing.is_alias]


@pytest.mark.slow("reads the whole package")
def test_an_example_in_a_docstring_is_a_code_block(documented: list[griffe.Object]) -> None:
    """A paragraph that is Python, and does something, would be set as text."""
    for thing in documented:
        for paragraph in re.split(r"\n\s*\n", thing.docstring.value if thing.docstring else ""):
            try:
                nodes = list(ast.walk(ast.parse(paragraph)))
            except SyntaxError:
                continue
            assert not any(isinstance(node, ast.Call | ast.Assign) for node in nodes), (
                f"{thing.path}: {paragraph}"
            )


def test_every_public_name_is_in_the_reference() -> None:
    targets = reference_targets()
    homes = {
        f"{dovetail._HOMES[name]}.{name}" for name in dovetail.__all__ if name != "__version__"
    }
    homes |= {f"dovetail.api.{api._HOMES[name]}.{name}" for name in api.__all__}
    homes |= {f"dovetail.testing.{testing._HOMES[name]}.{name}" for name in testing.__all__}
    missing = {
        home for home in homes if home not in targets and home.rpartition(".")[0] not in targets
    }
    assert not missing


def test_every_name_that_servers_build_on_is_on_their_page() -> None:
    page = (ROOT / "docs/serving/own-server.md").read_text()
    table = "".join(line for line in page.splitlines() if line.startswith("| `"))
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted(serving.__all__)
    for name in serving.__all__:
        assert getattr(serving, name) is not None


# as the page says: of some it has a part
NN_INTERNAL = (
    "kernels",
    "adapters",
    "build",
    "format",
    "gguf_tensors",
    "machine",
    "model_aliases",
    "parallel",
    "placed_weights",
    "rehearsal",
    "skeletons",
    "staging",
    "state",
    "transfer",
    "weights",
)


@pytest.mark.slow("reads the whole package")
def test_every_layer_is_in_the_reference_with_its_shapes(
    package: Any, documented: list[griffe.Object]
) -> None:
    nn = package["nn"]
    modules = [module for name, module in nn.modules.items() if name not in NN_INTERNAL]
    targets = reference_targets()
    public = [
        member
        for module in modules
        for member in module.members.values()
        if member.is_public and not member.is_alias and member.docstring
    ]
    assert {
        member.path for member in public if not {member.path, member.parent.path} & targets
    } == set()
    state = [
        nn["state"][name].final_target.path
        for name in ast.literal_eval(str(nn["state"]["__all__"].value))
    ]
    assert {path for path in state if path not in targets} == set()
    for function in documented:
        if (
            not isinstance(function, griffe.Function)
            or not function.path.startswith("dovetail.nn.")
            or function.name == "__init__"
        ):
            continue  # fields of data classes have comments
        docstring = function.docstring or (function.parent and function.parent.docstring)
        tensors = [one.name for one in function.parameters if "torch.Tensor" in str(one.annotation)]
        assert not tensors or (docstring and "[" in docstring.value), (
            f"{function.path} says no shape of {', '.join(tensors)}"
        )


def test_every_page_is_in_the_navigation(nav: list[str]) -> None:
    assert sorted(f"docs/{path}" for path in nav) == pages()[1:]


def test_files_that_pages_name_exist() -> None:
    """Paths like `core/dovetail/config/engine.py`, and bare names of modules like `step.py`."""
    files = [
        path
        for folder in ("core", "plugins", "apps", "bench", "tests", "tools")
        for path in (ROOT / folder).rglob("*.py")
    ]
    names = {path.name for path in files}
    shown = {
        block.title.rpartition("/")[2]
        for page in pages()
        for block in blocks_of(page)
        if block.title
    }
    for page in pages():
        for path in re.findall(
            r"`((?:core|plugins|bench|tests|tools|docs|examples)/[\w./]*|\w+\.py)`",
            (ROOT / page).read_text(),
        ):
            there = (ROOT / path).exists() if "/" in path else path in names | shown
            assert there, f"{page} names {path}, which isn't there"


def test_modules_and_names_that_pages_name_exist() -> None:
    """Dotted names like `dovetail.api`, and attributes of the contracts like
    `Request.cache_keys`."""
    for page in pages():
        text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
        for owner, attribute in re.findall(r"`([A-Z]\w+)\.(\w+)(?:\([^`]*\))?`", text):
            owners = [
                value
                for module in contract_modules()
                if (value := getattr(module, owner, None)) is not None
            ]
            assert owners, f"{page} names {owner}.{attribute}: nobody knows {owner}"
            known = any(hasattr(one, attribute) or attribute in fields_of(one) for one in owners)
            assert known, f"{page} names {owner}.{attribute}, which isn't there"


def test_a_comment_beside_a_field_is_its_documentation(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("x: int = 0  # tokens, 1 or more\n# of the first\n# two\ny: int\nz = '#'\n")
    assert docs_griffe.comment_at(path, 1, 1) == "Tokens, 1 or more"
    assert docs_griffe.comment_at(path, 4, 4) == "Of the first two"
    assert docs_griffe.comment_at(path, 5, 5) == ""


def test_an_unknown_piece_is_an_error() -> None:
    with pytest.raises(KeyError):
        docs_hooks.fill_in("<!-- generated: nothing -->")


def row_of(page: str, name: str, anchor: str | None = None) -> list[str]:
    """The cells of a table's row."""
    start = f'| `{name}`<a id="{anchor or name}"></a> |'
    rows = [line for line in page.splitlines() if line.startswith(start)]
    assert len(rows) == 1, f"{name} has {len(rows)} rows"
    cells = re.split(r"(?<!\\)\|", rows[0])[1:-1]
    assert len(cells) == 4, rows[0]
    return [cell.strip() for cell in cells]


def contract_modules() -> list[Any]:
    from importlib import import_module

    fronts = ["front.llm_engine", "front.llm", "front.async_engine", "front.chat"]
    names = [
        "request.request",
        "request.outputs",
        "request.sampling_params",
        "config.engine",
        "config.limits",
        *fronts,
        "engine.step",
        "engine.core",
        "nn.parameter",
        "nn.state",
    ]
    helpers = ["api.component", "api.clock", "api.routes", "api.state"]
    return [
        import_module(f"dovetail.{name}")
        for name in [*names, *helpers, *(f"api.{kind}" for kind in KINDS)]
    ]


def fields_of(cls: Any) -> set[str]:
    """Names that instances have: dataclass and pydantic fields, slots, and what `__init__` of the
    step sets."""
    names = {
        *getattr(cls, "__dataclass_fields__", ()),
        *getattr(cls, "model_fields", ()),
        *getattr(cls, "__slots__", ()),
    }
    init = getattr(getattr(cls, "__init__", None), "__code__", None)
    return names | set(init.co_names if init else ())
