"""Interfaces for plugin authors: one module per kind of component, and `component` for declaring
them.

All names can also be imported from here; modules are loaded on first use: `from dovetail.api import
ComponentSpec, Scheduler, hookimpl`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.base import lazy_names

if TYPE_CHECKING:
    from dovetail.api.attention import AttentionBackend
    from dovetail.api.component import (
        BundledModel,
        CommandSpec,
        ComponentSpec,
        QuantizationSpec,
        RouterSpec,
        RoutesSpec,
        hookimpl,
    )
    from dovetail.api.drafter import Drafter
    from dovetail.api.executor import Executor
    from dovetail.api.grammar import GrammarBackend
    from dovetail.api.kv_cache import KVCacheManager
    from dovetail.api.kv_tier import KVTier
    from dovetail.api.logits_processor import LogitsProcessor
    from dovetail.api.model import ModelArch
    from dovetail.api.observer import Observer
    from dovetail.api.parser import Parser
    from dovetail.api.prefix_cache import PrefixCache
    from dovetail.api.sampler import Sampler
    from dovetail.api.scheduler import Scheduler
    from dovetail.api.tokenizer import Tokenizer

_HOMES = {
    "AttentionBackend": "attention",
    "BundledModel": "component",
    "CommandSpec": "component",
    "ComponentSpec": "component",
    "Drafter": "drafter",
    "Executor": "executor",
    "GrammarBackend": "grammar",
    "KVCacheManager": "kv_cache",
    "KVTier": "kv_tier",
    "LogitsProcessor": "logits_processor",
    "ModelArch": "model",
    "Observer": "observer",
    "Parser": "parser",
    "PrefixCache": "prefix_cache",
    "QuantizationSpec": "component",
    "RouterSpec": "component",
    "RoutesSpec": "component",
    "Sampler": "sampler",
    "Scheduler": "scheduler",
    "Tokenizer": "tokenizer",
    "hookimpl": "component",
}

__all__ = [
    "AttentionBackend",
    "BundledModel",
    "CommandSpec",
    "ComponentSpec",
    "Drafter",
    "Executor",
    "GrammarBackend",
    "KVCacheManager",
    "KVTier",
    "LogitsProcessor",
    "ModelArch",
    "Observer",
    "Parser",
    "PrefixCache",
    "QuantizationSpec",
    "RouterSpec",
    "RoutesSpec",
    "Sampler",
    "Scheduler",
    "Tokenizer",
    "hookimpl",
]

__getattr__ = lazy_names("dovetail.api", _HOMES, "dovetail.api")
