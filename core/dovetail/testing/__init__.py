"""Tools for authors of components: the conformance suites and `run`, fakes that validate their
calls, and `plan`, which runs one step of a policy.

Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.base import lazy_names

if TYPE_CHECKING:
    from dovetail.testing.checks import Waiver
    from dovetail.testing.contract import check_contract
    from dovetail.testing.extensions.command import CommandSuite
    from dovetail.testing.extensions.route import RouteSuite
    from dovetail.testing.extensions.route_requests import RouteExample
    from dovetail.testing.extensions.weight_format import WeightFormatSuite
    from dovetail.testing.fake_executor import FakeExecutor, FakeExecutorOptions
    from dovetail.testing.fake_kv import FakeKVCache
    from dovetail.testing.fake_routes import FakeRouteContext
    from dovetail.testing.ledger import Verdict
    from dovetail.testing.planning import Plan, make_request, plan
    from dovetail.testing.runner import run
    from dovetail.testing.suites.attention import AttentionSuite
    from dovetail.testing.suites.drafter import DrafterSuite
    from dovetail.testing.suites.executor import ExecutorSuite
    from dovetail.testing.suites.grammar import GrammarSuite
    from dovetail.testing.suites.kv_cache import KVCacheSuite
    from dovetail.testing.suites.kv_tier import KVTierSuite
    from dovetail.testing.suites.logits_processor import LogitsProcessorSuite
    from dovetail.testing.suites.model import ModelSuite
    from dovetail.testing.suites.observer import ObserverSuite
    from dovetail.testing.suites.parser import ParserSuite
    from dovetail.testing.suites.sampler import SamplerSuite
    from dovetail.testing.suites.scheduler import SchedulerSuite
    from dovetail.testing.suites.tokenizer import TokenizerSuite

_HOMES = {
    "AttentionSuite": "suites.attention",
    "CommandSuite": "extensions.command",
    "DrafterSuite": "suites.drafter",
    "ExecutorSuite": "suites.executor",
    "FakeExecutor": "fake_executor",
    "FakeExecutorOptions": "fake_executor",
    "FakeKVCache": "fake_kv",
    "FakeRouteContext": "fake_routes",
    "GrammarSuite": "suites.grammar",
    "KVCacheSuite": "suites.kv_cache",
    "KVTierSuite": "suites.kv_tier",
    "LogitsProcessorSuite": "suites.logits_processor",
    "ModelSuite": "suites.model",
    "ObserverSuite": "suites.observer",
    "ParserSuite": "suites.parser",
    "Plan": "planning",
    "RouteExample": "extensions.route_requests",
    "RouteSuite": "extensions.route",
    "SamplerSuite": "suites.sampler",
    "SchedulerSuite": "suites.scheduler",
    "TokenizerSuite": "suites.tokenizer",
    "Verdict": "ledger",
    "Waiver": "checks",
    "WeightFormatSuite": "extensions.weight_format",
    "check_contract": "contract",
    "make_request": "planning",
    "plan": "planning",
    "run": "runner",
}

__all__ = [
    "AttentionSuite",
    "CommandSuite",
    "DrafterSuite",
    "ExecutorSuite",
    "FakeExecutor",
    "FakeExecutorOptions",
    "FakeKVCache",
    "FakeRouteContext",
    "GrammarSuite",
    "KVCacheSuite",
    "KVTierSuite",
    "LogitsProcessorSuite",
    "ModelSuite",
    "ObserverSuite",
    "ParserSuite",
    "Plan",
    "RouteExample",
    "RouteSuite",
    "SamplerSuite",
    "SchedulerSuite",
    "TokenizerSuite",
    "Verdict",
    "Waiver",
    "WeightFormatSuite",
    "check_contract",
    "make_request",
    "plan",
    "run",
]

__getattr__ = lazy_names("dovetail.testing", _HOMES, "dovetail.testing")
