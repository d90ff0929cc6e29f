"""Fewer examples in suites, outside of the full profile: all checks run, for many components. With
`-p`, this module is a plugin of pytest."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from dovetail.testing import child, elsewhere
from dovetail.testing.suites import suite_for
from tests.conformance.kept_processes import KeptProcesses

# `dovetail.testing.runner.COMMAND`, with fewer examples in the suite's process.
COMMAND = "import sys; from tests.conformance.fewer import main; main(sys.argv[1])"

Change = Callable[[Any, str, Any], None]


def one_in(share: int) -> Callable[[int], int]:
    return lambda number: number // share


def a_twelfth(for_all: Callable[..., None]) -> Callable[..., None]:
    def for_some(among: Any, examples: int, *rest: Any) -> None:
        for_all(among, max(2, examples // 12), *rest)

    return for_some


def the_first(hash_seeds: tuple[str, ...]) -> tuple[str, ...]:
    return hash_seeds[:1]


# module of `dovetail.testing.suites`, name in it, and what its value becomes
FEWER: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("drafter", "HASH_SEEDS", the_first),
    ("executor", "LONG", one_in(4)),
    ("grammar", "EVERY", lambda step: 4 * step),
    ("grammar", "OFTEN", one_in(4)),
    ("kv_cache", "GROUP_SCRIPTS", one_in(12)),
    ("kv_cache", "GROWTH", one_in(2)),
    ("kv_cache", "LONG", one_in(2)),
    ("kv_cache", "SCRIPTS", one_in(12)),
    ("kv_cache", "STATE_SCRIPTS", one_in(12)),
    ("observer", "LONG", one_in(10)),
    ("parser", "HASH_SEEDS", the_first),
    ("parser", "MIXED", one_in(6)),
    ("proportional", "LONG", one_in(2)),
    ("proportional", "SHORT", one_in(2)),
    ("sampler", "MANY_DRAWS", one_in(4)),  # they tell temperatures apart
    ("sampler_rules", "DRAWS", one_in(4)),
    ("sampler_updates", "CALLS", one_in(3)),
    ("scheduler", "HASH_SEEDS", the_first),
    ("scheduler", "LONG_BATCHES", one_in(3)),
    ("scheduler", "for_all", a_twelfth),
    # requests: half as many, of which 100 that overtake are still too many
    ("scheduler_loads", "FLOOD_S", lambda _: 200),
    ("tokenizer", "HASH_SEEDS", the_first),
)


def use_fewer(change: Change, *, imported_only: bool = False) -> None:
    """Change the suites of all kinds, or of those whose modules have been imported: some import
    torch. `change` is `setattr`, or that of pytest's `monkeypatch`."""
    for name, number, fewer in FEWER:
        module = f"dovetail.testing.suites.{name}"
        if not imported_only or module in sys.modules:
            suite = import_module(module)
            change(suite, number, fewer(getattr(suite, number)))


def main(job_path: str) -> None:
    """Run a suite as `dovetail.testing.child.main` does, with fewer examples, and with one process
    for all that asks for another hash seed."""
    kind = child.SuiteRun.read(job_path).kind
    suite = suite_for(kind)

    @cache
    def kept() -> KeptProcesses:
        return KeptProcesses(elsewhere.HASH_SEEDS[:1], [suite.__module__])

    def run_python(code: str, stdin: bytes, what: str, **environ: str) -> None:
        kept().run_python(code, stdin, what, **environ)

    use_fewer(setattr, imported_only=True)
    setattr(elsewhere, "run_python", run_python)  # noqa: B010 (a name that it has imported)
    child.main(job_path)


def pytest_collection_finish() -> None:
    """Change the suites that tests have imported."""
    use_fewer(setattr, imported_only=True)
