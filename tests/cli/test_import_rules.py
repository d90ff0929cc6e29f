"""What may not be imported: torch and transformers by the core's front rooms, anything heavy by
`dovetail --help`; and no module of the core by one that it imports itself."""

from __future__ import annotations

import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]

BLOCKED = """
import importlib, pkgutil, sys
for name in ("torch", "transformers", "tokenizers", "huggingface_hub", "triton"):
    sys.modules[name] = None  # importing it now raises ImportError
import dovetail.errors
for package in ("api", "base", "request", "config", "registry", "engine", "cli"):
    top = importlib.import_module("dovetail." + package)
    for module in pkgutil.walk_packages(top.__path__, top.__name__ + "."):
        importlib.import_module(module.name)
from dovetail.registry.registry import Registry
registry = Registry.discover()
assert not registry.failures, [str(failure) for failure in registry.failures]
registry.resolve("scheduler", "fcfs").load()
registry.resolve("kv_cache", "prefix").load()
"""

QUICK = """
import sys
sys.argv = ["dovetail", *{args}]
from dovetail.cli.main import main
import dovetail_server.supervisor  # it watches only
try:
    main()
except SystemExit as stop:
    assert not stop.code
heavy = {{"torch", "transformers", "numpy", "rich", "huggingface_hub", "jinja2"}} & set(sys.modules)
assert not heavy, heavy
"""


def run(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")]),
    }
    environment.pop("DOVETAIL_PLUGINS", None)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.slow("starts a process")
def test_core_and_built_in_declarations_need_no_torch() -> None:
    done = run(BLOCKED)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow("starts processes")
def test_help_list_and_the_supervisor_of_a_server_import_nothing_heavy() -> None:
    for args in (["--help"], ["plugins", "list"], ["serve", "--help"]):
        done = run(QUICK.format(args=args))
        assert done.returncode == 0, done.stderr


def test_no_import_circle_not_even_for_types_or_inside_a_function() -> None:
    packages = [
        folder.name
        for kind in ("plugins", "apps")
        for folder in (ROOT / kind).glob("*/dovetail_*")
        if (folder / "__init__.py").exists()
    ]
    assert {"dovetail_schedulers", "dovetail_server"} <= set(packages)
    graph = grimp.build_graph("dovetail", *packages, exclude_type_checking_imports=False)
    imported_by = {
        module: graph.find_modules_directly_imported_by(module) for module in graph.modules
    }
    assert "dovetail.cli.plugins" in imported_by["dovetail.cli.app"]
    # raises CycleError, which names the modules of a circle
    TopologicalSorter(imported_by).prepare()


def test_the_contract_of_plugins_names_nothing_else_of_ours_not_even_for_types() -> None:
    graph = grimp.build_graph("dovetail", exclude_type_checking_imports=False)
    allowed = ("dovetail.api", "dovetail.base", "dovetail.end_reason", "dovetail.errors")
    contract = [module for module in graph.modules if f"{module}.".startswith("dovetail.api.")]
    assert "dovetail.api.routes" in contract
    leaks = {
        (module, imported)
        for module in contract
        for imported in graph.find_modules_directly_imported_by(module)
        if not f"{imported}.".startswith((*(f"{name}." for name in allowed), "dovetail.request."))
    }
    assert leaks == set()
