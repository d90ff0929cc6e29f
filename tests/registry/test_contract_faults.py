"""The doctor compares a component's source with the contract, without importing it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.api.component import Kind
from dovetail.registry.contract.document import shipped
from dovetail.registry.contract.faults import Fault, faults_of
from dovetail.registry.contract.modules import Modules, Own
from dovetail.registry.doctor.examine import examine
from dovetail.registry.registry import Registry
from dovetail.testing import check_contract
from tests.registry.fakes import Site, components

ROOT = Path(__file__).parents[2]

SCHEDULER = """
from dovetail.api.scheduler import Scheduler, SchedulerCapabilities, Step

class Mine(Scheduler):
    capabilities = SchedulerCapabilities(order="arrival")

    def __init__(self, options, context):
        super().__init__(options, context)

    def on_finished(self, request): ...

    def schedule(self, step: Step) -> None:
        step.grant_each(step.running)
"""
DRAFTER = """
from dovetail.api import Drafter as Base

class Mine(Base):
    def propose(self, requests, most): ...
    def on_finished(self, request): ...
"""
OBSERVER = """
from dovetail import api
from dovetail.api.observer import ObserverCapabilities

class Shared(api.Observer):
    def on_step(self, event): ...

class Mine(Shared):
    capabilities = ObserverCapabilities(decisions=True)
"""
PARSER = """
from dovetail.api.parser import Parser, ParserCapabilities

class Mine(Parser):
    capabilities = ParserCapabilities(calls=True)

    @property
    def in_call(self): return False
    def feed(self, text): return []
    def finish(self): return []
    @classmethod
    def call_form(cls, template): return None
"""
TOKENIZER = """
from dovetail.api.tokenizer import Tokenizer, TokenizerCapabilities

class Mine(Tokenizer):
    capabilities = TokenizerCapabilities(chat=True)
    eos_ids = ()

    def vocabulary(self): ...
    def encode(self, text, *, unused=None): ...
    def encode_chat(self, chat): ...
"""
GRAMMAR = """
from dovetail.api.grammar import Grammar, GrammarBackend, GrammarCapabilities, Matcher

class Mine(GrammarBackend):
    capabilities = GrammarCapabilities(kinds=("regex",), forced=True, rollback=True)

    def compile(self, spec): return Words()

class Words(Grammar):
    def begin(self): return Word()

class Word(Matcher):
    @property
    def complete(self): return True
    def accept(self, token): ...
    def fill(self, words): ...
    def forced(self): ...
    def rollback(self, tokens): ...
"""
KV_CACHE = """
from dovetail.api.kv_cache import KVCapabilities
from dovetail.api.prefix_cache import PrefixCache

class Mine(PrefixCache):
    capabilities = KVCapabilities(reuse=True, fork=True)

    def fork(self, parent, child, num_tokens): ...
    def rank(self, block): return block.hits
"""
SAMPLER = """
from dovetail.api.graphs import GraphSupport
from dovetail.api.sampler import Sampler, SamplerCapabilities

class Mine(Sampler):
    capabilities = SamplerCapabilities(cuda_graph=GraphSupport.DECODE)

    def prepare(self, max_rows): ...
    def update(self, removed, added): ...
    def sample(self, inputs): ...
    def capture_for(self, host_rows): ...
"""
SOURCES: dict[Kind, str] = {
    "sampler": SAMPLER,
    "kv_cache": KV_CACHE,
    "scheduler": SCHEDULER,
    "drafter": DRAFTER,
    "observer": OBSERVER,
    "parser": PARSER,
    "tokenizer": TOKENIZER,
    "grammar": GRAMMAR,
}
# a fault, by what it is: the kind, a text of its source, what stands there instead, what is said
SEEDED: dict[str, tuple[Kind, str, str, str]] = {
    "a missing method": ("drafter", "    def propose(self, requests, most): ...\n", "", "missing"),
    "a misspelt method": ("scheduler", "def schedule", "def shedule", "mean it by shedule"),
    "a misspelt callback": ("observer", "def on_step", "def on_steps", "did you mean on_step?"),
    "a callback that isn't there": ("observer", "on_step", "on_token", "no such method"),
    "a misspelt optional method": ("drafter", "on_finished", "on_finish", "mean on_finished?"),
    "an argument too few": ("scheduler", "self, step: Step", "self", "too many"),
    "an argument too many": ("scheduler", "step: Step)", "step: Step, hint)", "'hint'"),
    "an argument of another name": ("tokenizer", "self, text", "self, string", "'string'"),
    "arguments in another order": ("drafter", "requests, most", "most, requests", "should be"),
    "a constructor without the context": ("scheduler", "options, context):", "options):", "many"),
    "a keyword that is required": ("tokenizer", "unused=None", "unused", "'unused'"),
    "a property as a method": ("parser", "    @property\n", "", "should be a property"),
    "a method as a property": (
        "parser",
        "    def finish",
        "    @property\n    def finish",
        "should be a method",
    ),
    "a class method as a method": ("parser", "    @classmethod\n", "", "a class method"),
    "a coroutine": ("scheduler", "def schedule", "async def schedule", "async"),
    "an attribute in place of a method": (
        "tokenizer",
        "def encode_chat(self, chat): ...",
        "encode_chat = None",
        "should be a method",
    ),
    "a feature that isn't declared": ("tokenizer", "chat=True", "", "isn't declared"),
    "a feature that is declared only": (
        "tokenizer",
        "    def encode_chat(self, chat): ...\n",
        "",
        "doesn't define encode_chat",
    ),
    "a misspelt capability": ("scheduler", "order=", "ordr=", "did you mean order?"),
    "a capability of another type": (
        "sampler",
        "GraphSupport.DECODE",
        "True",
        "should be a GraphSupport",
    ),
    "another kind's capabilities": (
        "observer",
        "ObserverCapabilities(decisions=True)",
        "SchedulerCapabilities()",
        "it is SchedulerCapabilities",
    ),
    "another kind's base": ("scheduler", "Mine(Scheduler)", "Mine(object)", "isn't a subclass"),
    "an import of a name that isn't there": (
        "scheduler",
        "SchedulerCapabilities, Step",
        "SchedulerCapabilities, Refused, Step",
        "has no Refused, did you mean Refusal?",
    ),
    "a part that misses a method": ("grammar", "    def fill(self, words): ...\n", "", "fill"),
    "a part's feature that isn't declared": ("grammar", "forced=True, ", "", "Word.forced"),
    "a part's feature that is declared only": (
        "grammar",
        "    def rollback(self, tokens): ...\n",
        "",
        "doesn't define Matcher.rollback",
    ),
    "features that a base declares": (
        "kv_cache",
        "reuse=True, fork=True",
        "reuse=True",
        "capability fork",
    ),
    "a part with another argument": ("grammar", "accept(self, token)", "accept(self)", "many"),
}


def faults(kind: Kind, source: str) -> list[Fault]:
    modules = Modules(shipped(), {"mine": source})
    return faults_of(shipped(), kind, "mine:Mine", modules)


@pytest.mark.parametrize("kind", SOURCES)
def test_right_components_have_no_fault(kind: Kind) -> None:
    assert faults(kind, SOURCES[kind]) == []


@pytest.mark.parametrize(("kind", "right", "wrong", "says"), SEEDED.values(), ids=SEEDED)
def test_a_seeded_fault_is_found(kind: Kind, right: str, wrong: str, says: str) -> None:
    source = SOURCES[kind].replace(right, wrong)
    assert source != SOURCES[kind]
    assert any(says in str(fault) for fault in faults(kind, source)), faults(kind, source)


@pytest.mark.slow("examines all components")
def test_the_bundled_components_have_no_faults() -> None:
    modules = Modules(shipped())
    found = [
        f"{one}: {fault}"
        for one in Registry.discover().components()
        for fault in faults_of(shipped(), one.spec.kind, one.spec.target, modules)
    ]
    assert found == []


PACKAGES = [
    *sorted(ROOT.glob("examples/plugins/*/src")),
    *sorted(ROOT.glob("core/dovetail/cli/templates/*/src")),
]


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: str(folder.parent.name))
def test_examples_and_templates_have_no_faults(folder: Path) -> None:
    sources = {
        ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): (
            file.read_text(encoding="utf-8")
        )
        for file in folder.rglob("*.py")
    }
    declared: dict[str, Any] = {}
    for package in folder.glob("*/__init__.py"):
        exec(package.read_text(encoding="utf-8"), declared)  # only declares, as a plugin does
    for spec in declared["dovetail_components"]() if "dovetail_components" in declared else ():
        modules = Modules(shipped(), sources)
        assert isinstance(modules.find(*spec.target.split(":")), Own)
        assert faults_of(shipped(), spec.kind, spec.target, modules) == []


def test_capabilities_of_a_base_of_the_interface_are_inherited() -> None:
    source = KV_CACHE.replace("    capabilities = KVCapabilities(reuse=True, fork=True)\n", "")
    assert source != KV_CACHE
    assert faults("kv_cache", source) == []


CLEAR = {
    "a base whose source isn't found": "from nowhere import Base\nclass Mine(Base): ...",
    "a class that isn't found": "Other = 1",
    "a helper of another name": SCHEDULER + "\n    def wait_for(self): ...",
    "a decorator that may change it": SCHEDULER.replace(
        "    def schedule(self, step: Step)", "    @wrapped\n    def schedule(self)"
    ),
    "values that aren't literals": SCHEDULER.replace('order="arrival"', "**CAN"),
    "values of a base": SCHEDULER.replace(
        'SchedulerCapabilities(order="arrival")', "replace(Scheduler.capabilities, idles=True)"
    ),
    "more arguments with defaults": SCHEDULER.replace("step: Step)", "step, *, hint=None)"),
    "any arguments": SCHEDULER.replace("self, step: Step)", "self, *args)"),
}


@pytest.mark.parametrize("source", CLEAR.values(), ids=CLEAR)
def test_what_the_source_does_not_show_is_no_fault(source: str) -> None:
    assert faults("scheduler", source) == []


def test_bases_are_found_in_other_modules_and_packages() -> None:
    sources = {
        "mine": "from bases import Shared\nclass Mine(Shared):\n    def shedule(self, step): ...",
        "bases": "import dovetail.api as api\nclass Shared(api.Scheduler): ...",
    }
    (fault,) = faults_of(shipped(), "scheduler", "mine:Mine", Modules(shipped(), sources))
    assert "mean it by shedule" in str(fault)


@pytest.fixture
def wrong(site: Site) -> Site:
    """A package whose component can't be imported, and has another argument than its kind's."""
    site.install(
        "dovetail-wrong",
        modules={
            "wrong": components('kind="scheduler", name="wrong", target="wrong_policy:Mine"'),
            "wrong_policy": "import no_such_module\n" + SCHEDULER.replace("step: Step", "plan"),
        },
    )
    return site


@pytest.mark.slow("starts processes")
def test_the_doctor_reports_faults_of_a_component_that_it_cannot_import(wrong: Site) -> None:
    (broken,) = examine("dovetail-wrong").findings
    assert broken.problem == "contract-broken"
    assert "Mine.schedule: 'plan' is where 'step' should be" in broken.what
    assert broken.remedy == "Scheduler has schedule(self, step)"


def test_a_package_checks_its_contract_in_its_own_test(wrong: Site, site: Site) -> None:
    site.install_scheduler("dovetail-fair")
    check_contract("dovetail-fair")
    with pytest.raises(AssertionError, match="'plan' is where 'step' should be"):
        check_contract("dovetail-wrong")
    with pytest.raises(AssertionError, match="no component of dovetail-none"):
        check_contract("dovetail-none")
    assert "wrong_policy" not in sys.modules


@pytest.mark.slow("starts a process")
def test_comparing_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from dovetail.testing import check_contract; "
        "check_contract('dovetail-llm'); assert 'dovetail_samplers.default' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
