"""`suite_for`: the suite of each kind."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from dovetail.api.component import Kind

if TYPE_CHECKING:
    from dovetail.testing.suite import Suite

SUITES: dict[Kind, str] = {  # kind -> name in the module of that name
    "scheduler": "SchedulerSuite",
    "kv_cache": "KVCacheSuite",
    "attention": "AttentionSuite",
    "model": "ModelSuite",
    "sampler": "SamplerSuite",
    "grammar": "GrammarSuite",
    "executor": "ExecutorSuite",
    "observer": "ObserverSuite",
    "drafter": "DrafterSuite",
    "tokenizer": "TokenizerSuite",
    "logits_processor": "LogitsProcessorSuite",
    "parser": "ParserSuite",
    "kv_tier": "KVTierSuite",
}


def suite_for(kind: Kind) -> type[Suite]:
    """Return the suite of a kind. Imported on demand, since some need torch."""
    suite: type[Suite] = getattr(import_module(f"{__name__}.{kind}"), SUITES[kind])
    return suite
