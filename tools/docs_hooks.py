"""Writes generated parts into the pages of the documentation: `python -m tools.docs_hooks`.

A page includes a part with a comment on a separate line, `<!-- generated: NAME -->`. The command
writes the part below it, and `<!-- end of generated -->` after it, so that the pages can be read
without building the site. `tests/docs/test_generated.py` fails if a page isn't current.

`PIECES` lists the names. `<!-- generated: keys of FILE -->` is the table of a model's file.
`<!-- generated: code FILE NAME -->` includes a definition from a Python file of the repository, or
the whole file without NAME. `<!-- generated: signatures MODULE -->` lists a module's signatures.

`mkdocs.yml` lists this file as a hook, which adapts two kinds of parts to the site: drawings are
inlined, and signatures are left out, since the site has them with their docstrings.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import typer
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

from dovetail.api import sentence_transformers_files
from dovetail.api.component import API_VERSIONS, KINDS, Kind
from dovetail.api.file_keys import FileKeys, NoEffect, Refused
from dovetail.cli.app import app
from dovetail.config.engine import COMPONENT_KEYS, LISTS, EngineConfig, Pooling, Speculation
from dovetail.config.limits import Limits
from dovetail.config.schema import json_schema
from dovetail.front import lora_files, tokenizer
from dovetail.front.generation_config import GENERATION_CONFIG
from dovetail.front.vllm_args import TABLE
from dovetail.front.vllm_groups import GROUPS
from dovetail.gguf import config as gguf_config
from dovetail.registry.contract.document import FILE, shipped
from dovetail.registry.contract.text import module_lines
from dovetail.registry.registry import Registry
from dovetail.registry.resolved import ResolvedComponent
from dovetail.registry.selection import PluginSelection

END = "<!-- end of generated -->"
PART = re.compile(
    r"^<!-- generated: (?P<name>[^>\n]+?) -->$"
    rf"(?:\n(?P<body>(?:(?!<!-- generated: ).*\n)*?){END}$)?",
    re.MULTILINE,
)
HELP_WIDTH = "100"
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ASSETS = DOCS / "assets"
CONTRACT = ROOT / "core/dovetail" / FILE
PACKAGES = DOCS / "plugins/packages.json"  # results, written by tools.downstream
DRAWINGS = {  # name -> what it shows
    "loop": "The parts of the core, the plugins around it, and the applications on top",
    "house": "The packages, and which one imports which",
    "request": "The way of a request through the loop",
    "processes": "The processes of a server, and what they exchange",
}

KIND_TITLES: dict[Kind, str] = {
    "scheduler": "Schedulers",
    "kv_cache": "KV-cache managers",
    "attention": "Attention backends",
    "model": "Model architectures",
    "sampler": "Samplers",
    "grammar": "Grammar backends",
    "executor": "Executors",
    "observer": "Observers",
    "drafter": "Drafters",
    "tokenizer": "Tokenizers",
    "logits_processor": "Logits processors",
    "parser": "Parsers",
    "kv_tier": "KV tiers",
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page's text as the site shows it; called by mkdocs."""

    def shown(part: re.Match[str]) -> str:
        kind, *words = part["name"].split()
        if kind == "signatures":
            return ""
        return inlined(words[-1]) if kind == "drawing" else part[0]

    return PART.sub(shown, markdown)


def fill_in(markdown: str) -> str:
    """Return a page's text with all generated parts as they are now. Raises `KeyError` for an
    unknown name."""
    return PART.sub(
        lambda part: f"<!-- generated: {part['name']} -->\n\n{piece(part['name'])}\n\n{END}",
        markdown,
    )


def piece(name: str) -> str:
    """Return a generated part. Raises `KeyError` for an unknown name."""
    kind, *words = name.split()
    if kind == "code":
        return code(*words)
    if kind == "signatures":
        return signatures(*words)
    return file_keys(" ".join(words[1:])) if kind == "keys" else PIECES[name]()


def pages() -> list[Path]:
    """Return the files with generated parts that the command writes."""
    return sorted(path for path in DOCS.rglob("*.md") if PART.search(path.read_text("utf-8")))


def main() -> None:
    """Write the generated parts into all pages, and print the pages that change."""
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if (filled := fill_in(text)) != text:
            path.write_text(filled, encoding="utf-8")
            print(path.relative_to(ROOT))


def code(path: str, name: str | None = None) -> str:
    """Return a Python file of the repository, or a top-level definition in it. Raises `KeyError` if
    there is none."""
    text = (ROOT / path).read_text(encoding="utf-8")
    shown = text if name is None else definitions(text)[name]
    block = f'```python title="{path.rpartition("/")[2]}"\n{shown.strip()}\n```'
    return f"<!-- fmt: off -->\n\n{block}\n\n<!-- fmt: on -->"  # formatted as the file is


def definitions(text: str) -> dict[str, str]:
    """Return the source of each top-level class and function of a Python file, in order."""
    nodes = [
        node for node in ast.parse(text).body if isinstance(node, ast.ClassDef | ast.FunctionDef)
    ]
    lines = text.splitlines()
    starts = {
        node.name: min([node.lineno, *(one.lineno for one in node.decorator_list)])
        for node in nodes
    }
    return {node.name: "\n".join(lines[starts[node.name] - 1 : node.end_lineno]) for node in nodes}


def drawing(name: str) -> str:
    """Return an image, for a page at the top of `docs`."""
    return f"![{DRAWINGS[name]}](assets/{name}.svg)"


def inlined(name: str) -> str:
    """Return a drawing inlined into the page, so that it uses the page's colors; the file has its
    own, light and dark."""
    svg = (ASSETS / f"{name}.svg").read_text(encoding="utf-8").strip()
    return f'<figure class="drawing">\n{svg}\n</figure>'


# Configuration


def config_keys() -> str:
    """Return a table of all keys of `engine.yaml`."""
    properties = json_schema(built_ins())["properties"]
    types = {key: _choice_type(key) for key in COMPONENT_KEYS} | dict.fromkeys(
        ("plugins", "limits"), "mapping, see below"
    )
    types["speculation"] = "`null` or mapping, see below"
    types["model"] = "string or mapping"
    return _table(EngineConfig, properties, "key", types=types)


def plugins_keys() -> str:
    """Return a table of the keys below `plugins`."""
    return _table(
        PluginSelection, PluginSelection.model_json_schema()["properties"], "key", prefix="plugins."
    )


def speculation_keys() -> str:
    """Return a table of the keys below `speculation`."""
    properties = json_schema(built_ins())["$defs"]["Speculation"]["properties"]
    return _table(
        Speculation,
        properties,
        "key",
        prefix="speculation.",
        types={"drafter": _choice_type("speculation.drafter")},
    )


def pooling_keys() -> str:
    """Return a table of the keys below `pooling`."""
    return _table(Pooling, Pooling.model_json_schema()["properties"], "key", prefix="pooling.")


def limits_keys() -> str:
    """Return a table of the keys below `limits`."""
    return _table(Limits, Limits.model_json_schema()["properties"], "key", prefix="limits.")


def server_settings() -> str:
    """Return a table of the options of `dovetail serve`."""
    from dovetail_server.settings import ServerSettings

    return _table(ServerSettings, ServerSettings.model_json_schema()["properties"], "option")


def job_keys() -> str:
    """Return a table of the keys of a job file of `dovetail batch`."""
    from dovetail_batch.job import Input, JobSettings, Output

    types = {
        "engine": "text, mapping or a list of these",
        "input": "path or mapping, see below",
        "output": "path or mapping, see below",
    }
    tables = [
        _table(
            JobSettings,
            JobSettings.model_json_schema()["properties"],
            "key",
            types=types,
            anchor="job.",
        )
    ]
    for name, model, kinds in (("input", Input, {"columns": "mapping"}), ("output", Output, {})):
        tables.append(
            _table(
                model,
                model.model_json_schema()["properties"],
                "key",
                prefix=f"{name}.",
                anchor="job.",
                types=kinds,
            )
        )
    return "\n\n".join(tables)


def request_fields() -> str:
    """Return the fields of the server's endpoints with unsupported values."""
    from dovetail_server.protocol.openapi import ONLY, OPERATIONS

    lines = ["| | field | accepted values | reason |", "|---|---|---|---|"]
    for operation in OPERATIONS:
        if operation.request in ONLY and operation.streams:
            for index, (name, values, reason) in enumerate(ONLY[operation.request]):
                accepted = _code(*(json.dumps(value) for value in values)) or "none"
                lines.append(
                    f"| {'' if index else f'`{operation.path}`'} | `{name}` | {accepted} | "
                    f"{reason.replace('|', chr(92) + '|')} |"
                )
    return "\n".join(lines)


def advisory_fields() -> str:
    """Return a table of the fields that the server's endpoints ignore."""
    from dovetail_server.protocol.openai_common import GenerationFields
    from dovetail_server.protocol.openapi import OPERATIONS

    found: dict[Any, list[str]] = {}
    for operation in OPERATIONS:
        if (
            operation.streams
            and operation.request is not None
            and issubclass(operation.request, GenerationFields)
        ):
            for field in operation.request.ADVISORY:
                found.setdefault(field, []).append(operation.path.removeprefix("/v1/"))
    rows = ["| field | of | without effect, since | with `refuse` |", "|---|---|---|---|"]
    for field, paths in found.items():
        rows.append(
            f"| `{field.path}` | {_code(*paths)} | {field.reason} | "
            f"{'refused' if field.hint else 'accepted'} |"
        )
    return "\n".join(rows)


def malformed_calls() -> str:
    """Return a table of the mistakes in calls that parsers recover from."""
    parsers = [
        (component.spec.name, component.load()) for component in built_ins().components("parser")
    ]
    rows = ["| format | malformed | recovery | for example |", "|---|---|---|---|"]
    for name, parser in parsers:
        for one in getattr(parser, "malformed", ()):
            text = one.example.text.replace("\n", "⏎").replace("|", "\\|")
            rows.append(f"| `{name}` | {one.mistake} | {one.recovery} | `{text}` |")
    return "\n".join(rows)


def built_in_components() -> str:
    """Return all built-in components with their options."""
    return "\n".join(line for kind in KINDS for line in _components_of(kind))


def vllm_arguments() -> str:
    """Return a table of how arguments of other engines are translated."""
    rows = ["| argument | here | values | anything else |", "|---|---|---|---|"]
    grouped = {name for group in GROUPS for name in group.defaults}
    for row in TABLE.values():
        if row.name in grouped:
            continue
        here = f"`{row.key}`" if row.key else "ignored"
        examples = _code(*map(repr, row.accepted)) if row.rejected else "any"
        values = row.meaning if row.key else f"{examples}: {row.meaning}"
        rows.append(
            f"| `{row.name}` | {here} | {values} | "
            f"{row.advice or ('as for the key' if row.key else 'nothing')} |"
        )
    return "\n".join(rows)


def vllm_groups() -> str:
    """Return a table of the arguments of vLLM that have no counterpart, by the reason why."""
    rows = ["| arguments | other values than vLLM's default |", "|---|---|"]
    for group in GROUPS:
        what = "ignored" if group.advisory else "refused"
        rows.append(f"| {_code(*group.defaults)} | {what}: {group.reason} |")
    return "\n".join(rows)


def vllm_examples() -> str:
    """Return a table of vLLM's offline examples: which run, which are refused, and which need a
    package that isn't installed."""
    known = json.loads(
        (Path(__file__).parents[1] / "docs" / "assets" / "vllm_examples.json").read_text(
            encoding="utf-8"
        )
    )
    rows = [f"| example of vLLM {known['version']} | | |", "|---|---|---|"]
    for name, row in known["examples"].items():
        why = row["why"].replace("|", "\\|").replace("<", "&lt;")
        rows.append(
            f"| `{name.removesuffix('_offline')}` | {row['verdict']} | "
            f"{f'`{why}`' if row['verdict'] == 'needs' else why} |"
        )
    return "\n".join(rows)


def vllm_flags() -> str:
    """Return a table of the flags of vLLM's server that have another name here, or none."""
    from dovetail_server.vllm_flags import GROUPS as FLAG_GROUPS
    from dovetail_server.vllm_flags import RENAMED

    rows = [
        "| vLLM | here |",
        "|---|---|",
        *(f"| `{flag}` | `{ours}` |" for flag, ours in RENAMED.items()),
    ]
    for group in FLAG_GROUPS:
        what = "left out" if group.advisory else "refused, but for vLLM's default"
        rows.append(f"| {_code(*group.defaults)} | {what}: {group.reason} |")
    return "\n".join(rows)


def api_versions() -> str:
    """Return the interface version of each kind."""
    return "\n".join(
        ["| kind | api |", "|---|---|", *(f"| `{kind}` | {API_VERSIONS[kind]} |" for kind in KINDS)]
    )


def tried_packages() -> str:
    """Return how the listed packages did, a component a line; `tools.downstream` tried them."""
    rows = ["| package | component | Dovetail | device | result |", "|---|---|---|---|---|"]
    for one in json.loads(PACKAGES.read_text(encoding="utf-8")):
        component = f"{one['kind']} `{one['component']}`" if one["component"] else ""
        says = " ".join(one["says"].split()).replace("|", "\\|")
        rows.append(
            f"| {one['package']} {one['version']} | {component} | {one['dovetail']} | "
            f"{one['device']} | {says} |"
        )
    return "\n".join(rows)


def check_table(group: str) -> str:
    """Return a table of the checks that a component of a kind must pass; for "hygiene", of those
    for all kinds."""
    from dovetail.testing.checks import checks_of  # suites of some kinds import torch
    from dovetail.testing.suites import suite_for

    suite = suite_for(next((kind for kind in KINDS if kind == group), "scheduler"))
    rows = ["| check | level | since | a failure means |", "|---|---|---|---|"]
    for check in checks_of(suite).values():
        if check.id.startswith(f"{group}."):
            rows.append(
                f"| `{check.id}`{_anchor(check.id)} | {check.level} | {check.since} | "
                f"{check.help.replace('|', chr(92) + '|')} |"
            )
    return "\n".join(rows)


@cache
def built_ins() -> Registry:
    """Return the registry of built-in components, without anything else installed here."""
    return Registry.discover(PluginSelection(allow=()), environ={})


def _components_of(kind: Kind) -> Iterator[str]:
    key = next((key for key, of in COMPONENT_KEYS.items() if of == kind), None)
    yield f"### {KIND_TITLES[kind]}\n"
    elsewhere = (
        "the server's options `--tool-parser` and `--reasoning-parser`"
        if kind == "parser"
        else "the model's own `config.json`"
    )
    yield f"Chosen by {f'the key `{key}`' if key else elsewhere}.\n"
    if not built_ins().components(kind):
        yield "None is built in.\n"
    for component in built_ins().components(kind):
        yield f"#### `{component.spec.name}` {{ #{kind}-{component.spec.name} }}\n"
        yield f"{component.spec.summary[:1].upper()}{component.spec.summary[1:].rstrip('.')}.{_facts(component)}\n"
        model = component.options_model()
        properties = model.model_json_schema().get("properties", {})
        yield (
            _table(model, properties, "option", anchor=f"{kind}-{component.spec.name}-") + "\n"
            if properties
            else "No options.\n"
        )


def _facts(component: ResolvedComponent) -> str:
    spec = component.spec
    serves = f" Serves {_code(*spec.architectures)}." if spec.architectures else ""
    return serves + (f" Needs {_code(*spec.requires)}." if spec.requires else "")


def _choice_type(key: str) -> str:
    one = "a name, or a mapping with `name` and options"
    if key == "tokenizer":
        return f"`null`, a model's name, or that of a component: {one}"
    return f"list; each item is {one}" if key in LISTS else one


def signatures(module: str) -> str:
    """Return the public names of a module of the contract. Raises `KeyError` for another module."""
    lines = module_lines(shipped().modules[module])
    return "```text\n" + "\n".join(lines) + "\n```"


def on_post_build(config: Mapping[str, Any], **_: Any) -> None:
    """Put the contract on the site; called by mkdocs."""
    shutil.copy(CONTRACT, config["site_dir"])


def _table(
    model: type[BaseModel],
    properties: Mapping[str, Any],
    noun: str,
    *,
    prefix: str = "",
    anchor: str = "",
    types: Mapping[str, str] | None = None,
) -> str:
    """Return a row for each field; its type in words is from `types`, otherwise from its JSON
    Schema in `properties`.

    Raises `ValueError` for one without a description: undocumented settings must not get into the
    site."""
    types = types or {}
    rows = [f"| {noun} | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if not field.description:
            raise ValueError(f"{model.__name__}.{name} has no description")
        default = (
            "required"
            if field.is_required()
            else _code(as_yaml(field.get_default(call_default_factory=True, validated_data={})))
        )
        meaning = " ".join(field.description.split()).replace("|", "\\|")
        rows.append(
            f"| `{prefix}{name}`{_anchor(f'{anchor}{prefix}{name}')} | "
            f"{types.get(name) or _type(properties[name])} | {default} | {meaning} |"
        )
    return "\n".join(rows)


def _anchor(name: str) -> str:
    """Return the target of links to a row, which GitHub doesn't show."""
    return f'<a id="{name}"></a>'


def _type(schema: Mapping[str, Any]) -> str:
    """Describe a JSON Schema in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return ", ".join(_code(str(value)) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        if "prefixItems" in schema:
            return f"list of {', '.join(map(_type, schema['prefixItems']))}"
        return f"list, each {_type(schema['items'])}"
    if schema.get("type") == "object":
        values = schema["additionalProperties"]
        return "mapping" if isinstance(values, bool) else f"mapping, each value {_type(values)}"
    if schema.get("type") == "null":
        return "`null`"
    return str(schema.get("type", "any")) + _bounds(schema)


def _bounds(schema: Mapping[str, Any]) -> str:
    signs = {"exclusiveMinimum": "> ", "minimum": "≥ ", "exclusiveMaximum": "< ", "maximum": "≤ "}
    bounds = [f"{sign}{schema[name]:g}" for name, sign in signs.items() if name in schema]
    return f" {', '.join(bounds)}" if bounds else ""


def as_yaml(value: Any) -> str:
    """Format a default as in `engine.yaml`."""
    if hasattr(value, "plain"):  # ComponentChoice
        value = value.plain()
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, tuple):
        value = list(value)
    return yaml.safe_dump([value], default_flow_style=True, width=float("inf")).strip()[1:-1]


def _code(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names)


# A model's files


def all_file_keys() -> tuple[FileKeys, ...]:
    """Return the table of each file of a model. Those of models and weight formats need torch,
    which other parts of the site don't."""
    from dovetail.nn.format import (
        aqlm,
        auto_round,
        awq,
        bitsandbytes,
        compressed_tensors,
        fbgemm_fp8,
        fp8,
        gptq,
        modelopt,
        mxfp4,
        quark,
    )
    from dovetail_models import arch, eagle3

    return (
        GENERATION_CONFIG,
        lora_files.KEYS,
        arch.KEYS,
        gguf_config.KEYS,
        eagle3.KEYS,
        *sentence_transformers_files.ALL,
        gptq.KEYS,
        awq.KEYS,
        fp8.KEYS,
        mxfp4.KEYS,
        compressed_tensors.KEYS,
        compressed_tensors.GROUP_KEYS,
        compressed_tensors.NUMBER_KEYS,
        modelopt.KEYS,
        fbgemm_fp8.KEYS,
        auto_round.KEYS,
        bitsandbytes.KEYS,
        quark.KEYS,
        quark.LAYER_KEYS,
        quark.NUMBER_KEYS,
        quark.EXPORT_KEYS,
        aqlm.KEYS,
        tokenizer.TOKENIZER_CONFIG,
        tokenizer.CHAT_TEMPLATE,
        tokenizer.PROCESSORS,
    )


def file_keys(file: str) -> str:
    """Return a table of what the keys of a file do; those that are used come first. Raises
    `KeyError` if there is no such file."""
    table = {table.file: table for table in all_file_keys()}[file]
    lines: list[list[str]] = [[], [], []]
    for key, rule in table.keys.items():
        if isinstance(rule, Refused):
            accepted = _code(*map(json.dumps, rule.unless))
            only = f"refused, except {accepted}" if accepted else "refused"
            lines[2].append(f"| `{key}` | {only} | {rule.what} |")
        elif isinstance(rule, NoEffect):
            lines[1].append(f"| `{key}` | no effect | {rule.why} |")
        else:
            lines[0].append(f"| `{key}` | used | {rule.how} |")
    head = ["| key | here | meaning or reason |", "|---|---|---|"]
    return "\n".join([*head, *chain.from_iterable(lines)])


# Command line


def commands() -> dict[tuple[str, ...], str]:
    """Return every command of the core, "config show" as `("config", "show")`, with the first line
    of its `--help`."""
    return dict(_leaves(typer.main.get_command(app), ()))


def help_text(*command: str) -> str:
    """Return the output of `dovetail COMMAND --help`."""
    result = CliRunner().invoke(
        app,
        [*command, "--help"],
        prog_name="dovetail",
        env={"COLUMNS": HELP_WIDTH, "TERMINAL_WIDTH": HELP_WIDTH},
    )
    if result.exit_code:
        raise ValueError(f"dovetail {' '.join(command)} --help failed: {result.output}")
    return f"```text\n{result.stdout.strip()}\n```"


def _leaves(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    for name, child in getattr(command, "commands", {}).items():
        if hasattr(child, "commands"):
            yield from _leaves(child, (*path, name))
        else:
            yield (*path, name), (child.help or "").splitlines()[0]


PIECES: dict[str, Callable[[], str]] = {
    **{f"drawing of the {name}": partial(drawing, name) for name in DRAWINGS},
    "config keys": config_keys,
    "plugins keys": plugins_keys,
    "limits keys": limits_keys,
    "pooling keys": pooling_keys,
    "speculation keys": speculation_keys,
    "server settings": server_settings,
    "job keys": job_keys,
    "request fields": request_fields,
    "advisory fields": advisory_fields,
    "malformed calls": malformed_calls,
    "built-in components": built_in_components,
    "api versions": api_versions,
    "tried packages": tried_packages,
    "vllm arguments": vllm_arguments,
    "vllm groups": vllm_groups,
    "vllm examples": vllm_examples,
    "vllm flags": vllm_flags,
    **{f"checks {group}": partial(check_table, group) for group in ("hygiene", *KINDS)},
    "help": help_text,
    **{f"help {' '.join(command)}": partial(help_text, *command) for command in commands()},
}


if __name__ == "__main__":
    main()
