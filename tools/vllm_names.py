"""Read names and defaults from vLLM's source: `python -m tools.vllm_names SOURCE >
tests/e2e/data/vllm_names.json`.

`SOURCE` is an unpacked source distribution, or its `tar.gz`. Only names and plain default values
are kept; tests check that each name is translated, accepted at its default, or rejected with a
sentence.
"""

from __future__ import annotations

import ast
import json
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

UNKNOWN = {"unknown": True}  # of a default that isn't a plain value
FLAG_SOURCES = ("entrypoints/common/cli_args.py", "entrypoints/openai/cli_args.py")


def collect_names(source: Path) -> dict[str, Any]:
    """Return version, fields and flags of vLLM's package below a folder `vllm-VERSION`."""
    package = source / "vllm"
    configs = {
        name: fields
        for path in (package / "config").glob("*.py")
        for name, fields in classes_of(path).items()
    }
    args = classes_of(package / "engine/arg_utils.py")
    fields = {**args["EngineArgs"], **args["AsyncEngineArgs"]}
    frontend: dict[str, ast.expr | None] = {}
    flags: set[str] = set()
    for path in (package / name for name in FLAG_SOURCES):
        if path.exists():
            for name, of_class in classes_of(path).items():
                frontend |= of_class if name.endswith("FrontendArgs") else {}
            flags |= set(flags_of(path))
    flags |= set(flags_of(package / "engine/arg_utils.py"))
    flags |= {
        "--" + name.replace("_", "-") for name in (*fields, *frontend) if not name.startswith("_")
    }
    sampling = classes_of(package / "sampling_params.py")
    pooling = classes_of(package / "pooling_params.py")
    return {
        "version": source.name.removeprefix("vllm-"),
        "EngineArgs": defaults_of(fields, configs),
        "SamplingParams": defaults_of(sampling["SamplingParams"], configs),
        "BeamSearchParams": defaults_of(sampling["BeamSearchParams"], configs),
        "PoolingParams": defaults_of(pooling["PoolingParams"], configs),
        "flags": sorted(flags),
    }


def classes_of(path: Path) -> dict[str, dict[str, ast.expr | None]]:
    """Return class -> field -> the expression of its default, of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name: {
            field.target.id: field.value
            for field in node.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        }
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def flags_of(path: Path) -> Iterator[str]:
    """Yield the spellings of flags in calls of `add_argument`, and in lists of short ones."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "add_argument"
        ):
            for arg in node.args:
                if (
                    isinstance(arg, ast.Constant)
                    and isinstance(arg.value, str)
                    and arg.value.startswith("-")
                ):
                    yield arg.value


def defaults_of(
    fields: dict[str, ast.expr | None], configs: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return public field -> default."""
    return {
        name: default_of(value, configs)
        for name, value in fields.items()
        if not name.startswith("_")
    }


def default_of(value: ast.expr | None, configs: dict[str, dict[str, Any]]) -> Any:
    """Return a default as JSON; `UNKNOWN` if it isn't plain, or there is none."""
    if (
        isinstance(value, ast.Attribute)
        and isinstance(value.value, ast.Name)
        and value.attr in configs.get(value.value.id, {})
    ):
        return default_of(configs[value.value.id][value.attr], configs)
    if isinstance(value, ast.Call):
        called = ast.unparse(value.func)
        if called == "get_field":
            owner = ast.unparse(value.args[0])
            field = ast.literal_eval(value.args[1])
            return default_of(configs.get(owner, {}).get(field), configs)
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default" in keywords:
            return default_of(keywords["default"], configs)
        if isinstance(factory := keywords.get("default_factory"), ast.Name):
            return {"dict": {}, "list": [], "set": []}.get(
                factory.id, {} if factory.id in configs else UNKNOWN
            )
        return UNKNOWN
    try:
        plain = ast.literal_eval(value) if value is not None else UNKNOWN
        json.dumps(plain)
    except (ValueError, TypeError):
        return UNKNOWN
    return plain


def main() -> None:
    [given] = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        if given.is_file():
            with tarfile.open(given) as archive:
                archive.extractall(folder, filter="data")
            [given] = Path(folder).iterdir()
        print(json.dumps(collect_names(given), indent=1))


if __name__ == "__main__":
    main()
