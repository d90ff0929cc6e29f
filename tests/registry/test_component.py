"""A resolved component: what it needs, its class, its options. Everything that goes wrong names the
plugin."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api import Scheduler
from dovetail.api.scheduler import SchedulerContext
from dovetail.base.where import KeyPath, Where
from dovetail.errors import ConfigError, MissingExtraError, PluginError
from dovetail.registry.registry import Registry
from dovetail.registry.resolved import ResolvedComponent
from tests.registry.fakes import SCHEDULER, Site, components, scheduler
from tests.support import examples

CONTEXT = SchedulerContext(token_budget=64, max_num_seqs=4, total_pages=8, block_size=16, seed=0)


def fair(
    site: Site,
    options: Mapping[str, Any] | None = None,
    where: Where | None = None,
    **fields: object,
) -> ResolvedComponent:
    site.install_scheduler(**fields)  # type: ignore[arg-type]
    return Registry.discover().resolve("scheduler", "dovetail-fair:fair", options, where)


def test_made_with_its_validated_options(site: Site) -> None:
    made = fair(site, {"aging_s": "2.5"}).make(CONTEXT)
    assert isinstance(made, Scheduler)
    assert (made.options.aging_s, made.context) == (2.5, CONTEXT)  # type: ignore[attr-defined]


def test_target_survives_pickling_and_makes_the_same(site: Site) -> None:
    target = pickle.loads(pickle.dumps(fair(site, {"aging_s": 3}).ref()))
    assert (target.kind, target.name) == ("scheduler", "dovetail-fair:fair")
    assert target.make(CONTEXT).options.aging_s == 3.0


def test_resolving_imports_no_target(site: Site) -> None:
    fair(site, target="there_is_no_such_module:X")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"agin_s": 1}, "engine.yaml:7: scheduler.agin_s: unknown option, did you mean aging_s?"),
        ({"zzz": 1}, "engine.yaml:3: scheduler.zzz: unknown option; valid are aging_s"),
        (
            {"aging_s": "soon"},
            "engine.yaml:6: scheduler.aging_s: expected a valid number, unable to parse string as "
            "a number, got 'soon'",
        ),
        (
            {"aging_s": -1},
            "engine.yaml:6: scheduler.aging_s: expected greater than or equal to 0, got -1",
        ),
    ],
)
def test_wrong_option_is_reported_with_file_and_line(
    site: Site, options: dict[str, Any], says: str
) -> None:
    lines: dict[KeyPath, str] = {
        ("scheduler",): "engine.yaml:3",
        ("scheduler", "aging_s"): "engine.yaml:6",
        ("scheduler", "agin_s"): "engine.yaml:7",
    }
    with pytest.raises(ConfigError) as caught:
        fair(site, options, Where(("scheduler",), lines)).validate_options()
    assert str(caught.value) == says


def test_all_wrong_options_are_reported_at_once(site: Site) -> None:
    with pytest.raises(ConfigError) as caught:
        fair(site, {"aging_s": None, "a": 1, "b": 2}).ref()
    assert len(str(caught.value).splitlines()) == 3


def test_component_without_options_takes_none(site: Site) -> None:
    site.install(
        "dovetail-plain",
        modules={
            "plain": components('kind="scheduler", name="plain", target="plain_policy:Fair"'),
            "plain_policy": SCHEDULER,
        },
    )
    part = Registry.discover().resolve("scheduler", "plain", {"x": 1})
    with pytest.raises(ConfigError, match=r"scheduler\.x: unknown option; there are none here"):
        part.validate_options()


@pytest.mark.parametrize(
    ("kind", "base", "wrong", "says"),
    [
        (
            "logits_processor",
            "LogitsProcessor",
            "capabilities = {'cuda_graph': True}",
            "capabilities is {'cuda_graph': True}, expected LogitsProcessorCap",
        ),
        (
            "logits_processor",
            "LogitsProcessor",
            "Arguments = dict",
            "Arguments is <class 'dict'>, expected a pydantic model",
        ),
        (
            "parser",
            "Parser",
            "capabilities = None",
            "capabilities is None, expected ParserCapabilities(…)",
        ),
        (
            "tokenizer",
            "Tokenizer",
            "capabilities = 3",
            "capabilities is 3, expected TokenizerCapabilities(…)",
        ),
        (
            "parser",
            "Parser",
            "from dovetail.api.parser import ParserCapabilities as P; P(calls=True, "
            "templates=(('<call>'),))",
            "must be tuples of texts",
        ),
        (
            "parser",
            "Parser",
            "from dovetail.api.parser import ParserCapabilities as P; P(reasoning='<a')",
            "reasoning two texts",
        ),
        (
            "parser",
            "Parser",
            "from dovetail.api.parser import ParserCapabilities as P; P(reasoning=('<a>',))",
            "must be two texts",
        ),
        (
            "parser",
            "Parser",
            "from dovetail.api.parser import ParserCapabilities as P; P(templates=((),))",
            "must be tuples of texts",
        ),
    ],
)
def test_a_component_that_describes_itself_wrongly_is_reported_before_it_is_used(
    site: Site, kind: str, base: str, wrong: str, says: str
) -> None:
    body = (
        f"from dovetail.api import {base}\nclass Odd({base}):\n    "
        f"{wrong}\nOdd.__abstractmethods__ = frozenset()"
    )
    site.install(
        "dovetail-odd",
        modules={
            "odd": components(f'kind="{kind}", name="odd", target="odd_part:Odd"'),
            "odd_part": body,
        },
    )
    with pytest.raises(PluginError, match=f"^{kind}: {kind} dovetail-odd:odd") as caught:
        Registry.discover().resolve(kind, "odd").load()  # type: ignore[arg-type]
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("Fair = 3", "expected a subclass of dovetail.api.Scheduler"),
        ("class Fair: ...", "expected a subclass of dovetail.api.Scheduler"),
        (
            "from dovetail.api import Sampler as Fair",
            "expected a subclass of dovetail.api.Scheduler",
        ),
        (
            "from dovetail.api import Scheduler\nclass Fair(Scheduler): ...",
            "doesn't implement schedule",
        ),
        ("x = 1", "AttributeError"),
        ("import there_is_no_such_module", "ModuleNotFoundError"),
        ("raise SystemExit(4)", "SystemExit: 4"),
        (
            "from dovetail.api import Scheduler\nclass Fair(Scheduler):\n    def schedule(self, "
            "step): 1\n    def __init__(self, *a): 1/0",
            "ZeroDivisionError",
        ),
    ],
)
def test_target_that_is_no_component_is_reported_with_the_plugin(
    site: Site, source: str, says: str
) -> None:
    spec = 'kind="scheduler", name="odd", target="odd_policy:Fair"'
    site.install("dovetail-odd", "0.3", modules={"odd": components(spec), "odd_policy": source})
    with pytest.raises(
        PluginError,
        match=r"^scheduler: scheduler dovetail-odd:odd 0\.3 \(plugin dovetail-odd/main\): ",
    ) as caught:
        Registry.discover().resolve("scheduler", "odd").make(CONTEXT)
    assert says in str(caught.value)


FAILS_WHEN_MADE = (
    "from dovetail.api import Scheduler\nclass Fair(Scheduler):\n    def "
    "schedule(self, step): 1\n    def __init__(self, *a): {raises}"
)


@pytest.mark.parametrize(
    "use",
    [ResolvedComponent.make, lambda part, context: part.ref().make(context)],
    ids=["in this process", "in a worker"],
)
def test_an_error_while_a_component_is_made_is_reported_with_its_name_and_line(
    site: Site, use: Callable[[ResolvedComponent, Any], Any]
) -> None:
    spec = 'kind="scheduler", name="odd", target="odd_policy:Fair"'
    site.install(
        "dovetail-odd",
        "0.3",
        modules={"odd": components(spec), "odd_policy": FAILS_WHEN_MADE.format(raises="1/0")},
    )
    part = Registry.discover().resolve("scheduler", "odd")
    with pytest.raises(
        PluginError,
        match=r"scheduler dovetail-odd:odd.*: making it failed: ZeroDivisionError.* "
        r"\(.*odd_policy\.py:4\)$",
    ):
        use(part, CONTEXT)


ANNOTATED = """
from pydantic import BaseModel, ConfigDict
from dovetail.api import Scheduler
class Mine(BaseModel):
    model_config = ConfigDict(extra="forbid")
    pace: int = 1
class Fair(Scheduler):
    {annotated}
    def schedule(self, step): ...
"""


@pytest.mark.parametrize(
    "annotated",
    [
        "options: Mine",
        "options: 'Mine'",
        "def __init__(self, options: Mine, context): super().__init__(options, context)",
    ],
)
def test_options_that_the_class_is_annotated_with_and_the_spec_does_not_name_are_reported(
    site: Site, annotated: str
) -> None:
    modules = {
        "odd": components('kind="scheduler", name="odd", target="odd_policy:Fair"'),
        "odd_policy": ANNOTATED.format(annotated=annotated),
    }
    site.install("dovetail-odd", modules=modules)
    part = Registry.discover().resolve("scheduler", "odd", {"pace": 2})
    for use in (part.load, part.validate_options):
        with pytest.raises(
            PluginError,
            match=r"annotated with options: Mine, but its ComponentSpec names none: give it "
            r'options="odd_policy:Mine"$',
        ):
            use()


@pytest.mark.parametrize(
    ("modules", "line"),
    [
        ({"odd_policy": "x = 1\ny = {}['gone']"}, 2),
        (
            {"odd_policy": "from statistics import mean\n\nmean([])"},
            3,
        ),  # raised elsewhere, called there
        (
            {
                "odd_policy": SCHEDULER.replace(
                    "def schedule", "def __init__(self, *rest): self.gone\n    def schedule"
                )
            },
            10,
        ),
    ],
)
def test_an_error_of_a_plugin_is_reported_with_its_file_and_line(
    site: Site, modules: dict[str, str], line: int
) -> None:
    site.install("dovetail-odd", modules={"odd": components(scheduler("odd", "odd")), **modules})
    with pytest.raises(PluginError) as caught:
        Registry.discover().resolve("scheduler", "odd").make(CONTEXT)
    assert str(caught.value).endswith(f" ({site.path / 'odd_policy.py'}:{line})")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("Options = dict", "expected a pydantic model"),
        ("from pydantic import BaseModel\nclass Options(BaseModel): ...", 'extra="forbid"'),
        ("import there_is_no_such_module", "ModuleNotFoundError"),
    ],
)
def test_options_model_must_be_one_that_refuses_unknown_keys(
    site: Site, source: str, says: str
) -> None:
    spec = 'kind="scheduler", name="odd", target="odd_policy:Fair", options="odd_policy:Options"'
    site.install("dovetail-odd", modules={"odd": components(spec), "odd_policy": source})
    with pytest.raises(PluginError, match="dovetail-odd:odd") as caught:
        Registry.discover().resolve("scheduler", "odd").validate_options()
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("requirement", "says"),
    [
        (
            "there-is-no-such-package>=1",
            "there-is-no-such-package>=1 (not installed); install with: pip install "
            '"there-is-no-such-package>=1"',
        ),
        ("pluggy>=999", 'is installed); install with: pip install "pluggy>=999"'),
        ("heavy>=2", 'heavy>=2 (not installed); install with: pip install "dovetail-fair[gpu]"'),
    ],
)
def test_missing_requirement_is_reported_with_its_pip_line(
    site: Site, requirement: str, says: str
) -> None:
    extras = (
        "Provides-Extra: gpu\nProvides-Extra: all\nRequires-Dist: heavy; extra == "
        '"gpu"\nRequires-Dist: heavy; extra == "all"\n'
    )
    extras += 'Requires-Dist: light; extra == "all"\n'
    site.install(
        "dovetail-fair",
        modules={"f": components(scheduler(requires=(requirement,)))},
        metadata=extras,
    )
    part = Registry.discover().resolve("scheduler", "dovetail-fair:fair")
    with pytest.raises(MissingExtraError) as caught:
        part.load()
    assert says in str(caught.value)


def test_our_own_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Registry.discover().resolve("executor", "dovetail:local")
    monkeypatch.setattr("dovetail.registry.requirements.installed_version", lambda package: "0.0.1")
    with pytest.raises(
        MissingExtraError,
        match=r'torch>=2.11 \(0.0.1 is installed\).*pip install "dovetail-llm\[torch\]"',
    ):
        part.check_requires()


def test_requirement_whose_marker_does_not_apply_is_met(site: Site) -> None:
    assert fair(
        site, requires=("there-is-no-such-package; python_version < '3'", "pluggy>=1")
    ).load()


@examples(quick=40, full=2000)
@given(
    st.dictionaries(
        st.text(max_size=8),
        st.none()
        | st.booleans()
        | st.integers()
        | st.text(max_size=5)
        | st.lists(st.integers(), max_size=2),
        max_size=4,
    )
)
def test_any_nonsense_is_a_config_error_or_valid(options: dict[str, Any]) -> None:
    part = Registry.discover().resolve("kv_cache", "dovetail:prefix", options)
    with contextlib.suppress(ConfigError):
        part.validate_options()
