"""Fewer examples in suites, for the quick profile: all checks run, for many components. With `-p`,
this module is a plugin of pytest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dovetail.testing.elsewhere import HASH_SEEDS
from dovetail.testing.suites import (
    drafter,
    kv_cache,
    observer,
    parser,
    repeatable,
    sampler,
    sampler_rules,
    scheduler,
    scheduler_loads,
    tokenizer,
)

# `dovetail.testing.runner.COMMAND`, with fewer examples in the suite's process.
COMMAND = (
    "import sys; from tests.conformance.fewer import use_fewer; use_fewer(setattr); from "
    "dovetail.testing.child import main; main(sys.argv[1])"
)


def use_fewer(change: Callable[[Any, str, Any], None]) -> None:
    """Try one hash seed, a twelfth of what the schedulers' suite does, a twelfth of the scripts for
    KV-cache managers and half of their long run, a fifth of an observer's, a quarter of the draws
    that tell temperatures and rules of samplers apart, and a sixth of the parsers' texts. `change`
    is `setattr`, or that of pytest's `monkeypatch`."""

    def for_some(among: Any, examples: int, *rest: Any) -> None:
        repeatable.for_all(among, max(2, examples // 12), *rest)

    change(scheduler, "for_all", for_some)
    # requests: half as many, of which 100 that overtake are still too many
    change(scheduler_loads, "FLOOD_S", 200)
    for suite in (drafter, parser, scheduler, tokenizer):
        change(suite, "HASH_SEEDS", HASH_SEEDS[:1])
    change(scheduler, "LONG_BATCHES", scheduler_loads.LONG_BATCHES // 3)
    change(observer, "LONG", observer.LONG // 5)
    for name in ("LONG", "GROWTH"):
        change(kv_cache, name, getattr(kv_cache, name) // 2)
    change(parser, "MIXED", parser.MIXED // 6)
    change(sampler, "MANY_DRAWS", sampler.MANY_DRAWS // 4)
    change(sampler_rules, "DRAWS", sampler_rules.DRAWS // 4)
    for name in ("SCRIPTS", "GROUP_SCRIPTS", "STATE_SCRIPTS"):
        change(kv_cache, name, getattr(kv_cache, name) // 12)


def pytest_configure() -> None:
    use_fewer(setattr)
