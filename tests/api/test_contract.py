"""The interfaces that plugins and users build on don't change by accident: `contract.json` is what
the code says, and from 1.0 on it only grows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tools import contract as tool

from dovetail.api.component import API_VERSIONS, EXTENSION_VERSIONS, KINDS, SUITE_VERSION
from dovetail.errors import ConfigError
from dovetail.registry.contract.diff import changes_between, owners_of
from dovetail.registry.contract.document import (
    FIRST,
    Check,
    Clause,
    Contract,
    Extension,
    KindContract,
    Module,
    number,
    read,
    shipped,
)
from dovetail.registry.contract.source import module_of
from dovetail.testing.checks import checks_of
from dovetail.testing.suites import suite_for

RULE = """The interfaces have changed. If the change is meant, run

    python -m tools.contract

which says whether a kind needs a higher minor version in `dovetail.api.component.API_VERSIONS`.
From 1.0 on an interface only grows: names, fields and methods with defaults, members of enums,
capabilities.
"""

BEFORE = """
Words = Literal["a", "b"]

class Color(Enum):
    RED = 1

@dataclass(frozen=True)
class Value:
    x: int
    y: int = 0

class Step(Protocol):
    def grant(self, request: Request) -> int: ...

class Policy(ABC):
    capabilities = Can()
    def __init__(self, options, context): ...
    @abstractmethod
    def schedule(self, step: Step) -> None: ...
    @property
    def size(self) -> int: ...
"""


def of(source: str, version: str = "1.0") -> Contract:
    """A contract of one kind whose interface is this source."""
    module = module_of(source)
    types = {
        name: one.model_copy(update={"given": name in tool.GIVEN})
        for name, one in module.types.items()
    }
    return Contract(
        version=version,
        kinds={"policy": KindContract(version=version, base="Policy")},
        modules={"dovetail.api.policy": module.model_copy(update={"types": types})},
    )


@pytest.mark.slow("reads all of the public interface")
def test_the_file_is_what_the_code_says() -> None:
    present = tool.current(shipped())
    differences = "\n".join(str(change) for change in changes_between(shipped(), present))
    versions = "\n".join(tool.problems(shipped(), present))
    if tool.FILE.read_text(encoding="utf-8") != present.to_json():
        pytest.fail(f"{RULE}\n{differences}\n{versions}", pytrace=False)


def test_the_file_has_every_kind_with_its_version_and_every_check() -> None:
    assert {kind: one.version for kind, one in shipped().kinds.items()} == API_VERSIONS
    known = {id for kind in KINDS for id in checks_of(suite_for(kind))}
    listed = {id for one in shipped().kinds.values() for id in one.checks} | {*shipped().checks}
    assert listed == known
    assert shipped().suite == SUITE_VERSION


@pytest.mark.slow("starts a process that imports all interfaces")
def test_the_file_is_made_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None; "
        "from tools import contract; contract.contract()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_a_layer_that_models_are_built_of_belongs_to_their_interface() -> None:
    modules = dict(shipped().modules)
    rotary = modules["dovetail.nn.rotary"]
    functions = {name: one for name, one in rotary.functions.items() if name != "apply_rotary"}
    modules["dovetail.nn.rotary"] = rotary.model_copy(update={"functions": functions})
    without = shipped().model_copy(update={"modules": modules})
    (removed,) = changes_between(shipped(), without)
    assert (removed.name, removed.additive) == ("dovetail.nn.rotary:apply_rotary", False)
    assert owners_of(removed, without) == ["model"]


ADDITIVE = {
    "a field with a default": ("    y: int = 0", "    y: int = 0\n    z: int = 0"),
    "a method with a default": ("    @property", "    def more(self): ...\n    @property"),
    "a method of a class that Dovetail implements": (
        "class Policy",
        "    def more(self) -> int: ...\nclass Policy",
    ),
    "an argument with a default of what Dovetail implements": (
        "request: Request)",
        "request: Request, tokens: int = 0)",
    ),
    "a member of an enum": ("    RED = 1", "    RED = 1\n    BLUE = 2"),
    "a word": ('"a", "b"', '"a", "b", "c"'),
    "a class": ("class Policy", "class More: ...\nclass Policy"),
    "a default of an abstract method": ("    @abstractmethod\n", ""),
    "a default of a field": ("    x: int\n", "    x: int = 1\n"),
}
BREAKING = {
    "a field without a default": ("    x: int\n", "    x: int\n    z: int\n"),
    "a field before another": ("    y: int = 0", "    z: int = 0\n    y: int = 0"),
    "a field of another type": ("    x: int\n", "    x: float\n"),
    "a field with another default": ("    y: int = 0", "    y: int = 1"),
    "a field that is gone": ("    y: int = 0\n", ""),
    "an abstract method": (
        "    @property",
        "    @abstractmethod\n    def more(self): ...\n    @property",
    ),
    "an argument of what components implement": ("step: Step)", "step: Step, hint: int = 0)"),
    "an argument of another name": ("step: Step)", "plan: Step)"),
    "an argument without a default": ("request: Request)", "request: Request, tokens: int)"),
    "a method in place of a property": ("    @property\n", ""),
    "a method that is gone": ("    def schedule", "    def plan"),
    "a member that is gone": ("    RED = 1", "    BLUE = 1"),
    "a word that is gone": ('"a", "b"', '"a"'),
    "a base that is gone": ("class Policy(ABC)", "class Policy(ABC, Sized)"),
    "a class that is gone": ("class Value", "class Values"),
}


@pytest.mark.parametrize(("old", "new"), ADDITIVE.values(), ids=ADDITIVE)
def test_an_additive_change_needs_a_higher_minor_version(old: str, new: str) -> None:
    before, changed = of(BEFORE), BEFORE.replace(old, new)
    assert changed != BEFORE
    (problem,) = tool.problems(before, of(changed))
    assert problem.startswith("policy: raise its version to 1.1")
    assert tool.problems(before, of(changed, "1.1")) == []


@pytest.mark.parametrize(("old", "new"), BREAKING.values(), ids=BREAKING)
def test_any_other_change_is_refused_whatever_the_version(old: str, new: str) -> None:
    before, changed = of(BEFORE), BEFORE.replace(old, new)
    assert changed != BEFORE
    for version in ("1.0", "1.1", "2.0"):
        assert any("only grows" in one for one in tool.problems(before, of(changed, version)))


HOOKS = "dovetail.registry.hookspecs"
ROUTES = "dovetail.api.routes"


def extended(hooks: str, routes: str, version: str = "1.0") -> Contract:
    """A contract of hooks and routes with these sources."""
    return Contract(
        version=version,
        extensions={
            "hooks": Extension(version=version, modules=(HOOKS,)),
            "routes": Extension(version=version, modules=(ROUTES,)),
        },
        modules={HOOKS: module_of(hooks), ROUTES: module_of(routes)},
    )


def test_hooks_and_routes_are_held_to_their_versions() -> None:
    hooks = "def dovetail_a() -> Iterable[A]: ..."
    routes = "class RouteContext(Protocol):\n    def answer(self, prompt: str) -> str: ..."
    before = extended(hooks, routes)
    another_hook = f"{hooks}\ndef dovetail_b() -> Iterable[B]: ..."
    (problem,) = tool.problems(before, extended(another_hook, routes))
    assert problem.startswith("hooks: raise its version to 1.1, since it has added")
    assert not tool.problems(before, extended(another_hook, routes, "1.1"))
    renamed = routes.replace("answer", "reply")
    wrong = tool.problems(before, extended(hooks, renamed, "1.1"))
    assert any("removed dovetail.api.routes:RouteContext.answer" in one for one in wrong)
    changes = [str(one) for one in changes_between(before, extended(another_hook, routes))]
    assert changes == [f"added {HOOKS}:dovetail_b: () -> Iterable[B]"]


def test_hooks_and_routes_are_in_the_file_with_their_versions() -> None:
    assert {name: one.version for name, one in shipped().extensions.items()} == EXTENSION_VERSIONS
    for one in shipped().extensions.values():
        assert set(one.modules) <= set(shipped().modules)
    assert "dovetail_routes" in shipped().modules[HOOKS].functions
    assert "RouteContext" in shipped().modules[ROUTES].types


def checked(checks: dict[str, tuple[str, str | None]], suite: str = "1.0") -> Contract:
    """A contract whose checks have these versions and capabilities."""
    found = {
        id: Check(since=since, capability=capability, help="")
        for id, (since, capability) in checks.items()
    }
    return Contract(version="1.0", suite=suite, checks=found)


CHECKS: dict[str, tuple[str, str | None]] = {"a.x": ("1.0", None), "a.y": ("1.0", "order")}
GATED = {
    "a check that is gone": ({"a.x": CHECKS["a.x"]}, "a.y: the check was removed"),
    "a check that is new": (CHECKS | {"a.z": ("1.0", None)}, "a.z: a new check needs"),
    "a check of all": (CHECKS | {"a.y": ("1.0", None)}, "a.y: it applies to other components"),
    "a check of another version": (CHECKS | {"a.x": ("1.1", None)}, "a.x: since is 1.1"),
}


@pytest.mark.parametrize(("checks", "said"), GATED.values(), ids=GATED)
def test_checks_change_only_with_the_version_of_the_suites(
    checks: dict[str, tuple[str, str | None]], said: str
) -> None:
    (problem,) = tool.problems(checked(CHECKS), checked(checks))
    assert problem.startswith(said)


def test_a_new_version_of_the_suites_may_change_checks() -> None:
    changed: dict[str, tuple[str, str | None]] = {"a.y": ("1.0", None), "a.z": ("1.1", None)}
    assert not tool.problems(checked(CHECKS), checked(changed, "1.1"))
    old = changed | {"a.z": ("1.0", None)}
    assert tool.problems(checked(CHECKS), checked(old, "1.1"))
    assert [str(one) for one in changes_between(checked(CHECKS), checked(changed, "1.1"))] == [
        "removed a.x",
        "added a.z",
        "changed suite: 1.0 is now 1.1",
        "changed a.y: if order since 1.0 is now required since 1.0",
    ]


def saying(*texts: str, version: str = "1.0") -> Contract:
    """A contract of one kind with these clauses at one place."""
    clauses = {text: Clause(place="Policy", text=text, checks=("a.x",)) for text in texts}
    kind = KindContract(version=version, base="Policy", clauses=clauses)
    return Contract(version=version, kinds={"policy": kind})


def test_a_clause_is_removed_only_with_a_new_version_but_may_be_worded_anew() -> None:
    before = saying("It is fair.", "It is quick.")
    (problem,) = tool.problems(before, saying("It is fair."))
    assert problem == (
        "policy: raise its version to 1.1, since Policy doesn't say any more: It is quick."
    )
    assert not tool.problems(before, saying("It is fair.", version="1.1"))
    assert not tool.problems(before, saying("It is fair.", "It is fast."))
    assert not tool.problems(before, saying("It is fair.", "It is quick.", "It is new."))


def test_before_1_0_any_change_is_written() -> None:
    assert tool.problems(of(BEFORE, "0.4"), of(BEFORE.replace("schedule", "plan"), "0.4")) == []


def test_kinds_that_change_together_get_one_number() -> None:
    def two(policy: str, other: str, source: str = BEFORE) -> Contract:
        kinds = {
            "policy": KindContract(version=policy, base="Policy"),
            "other": KindContract(version=other, base="Other", uses=("dovetail.api.policy:Color",)),
        }
        whole = of(source)
        highest = max(policy, other, key=number)
        return whole.model_copy(update={"kinds": kinds, "version": highest})

    changed = BEFORE.replace("    RED = 1", "    RED = 1\n    BLUE = 2")
    before = two("1.0", "1.3")
    assert tool.problems(before, two("1.4", "1.4", changed)) == []
    assert any("policy: raise" in one for one in tool.problems(before, two("1.0", "1.4", changed)))
    assert any("should be 1.4" in one for one in tool.problems(before, two("1.1", "1.4", changed)))


def test_the_file_keeps_which_version_added_what_and_gives_older_contracts() -> None:
    first = of(BEFORE)
    later = BEFORE.replace("    RED = 1", "    RED = 1\n    BLUE = 2")
    later = later.replace("request: Request)", "request: Request, tokens: int = 0)")
    second = tool.stamped(of(later, "1.1"), first)
    third = tool.stamped(of(later + "\nclass New: ...", "1.2"), second)
    module = third.modules["dovetail.api.policy"]
    assert module.types["Color"].members["BLUE"].since == "1.1"
    assert module.types["New"].since == "1.2"
    assert third.at("1.0").modules == first.modules
    assert third.at("1.1") == second
    assert [str(one) for one in changes_between(third.at("1.1"), third)] == [
        "added dovetail.api.policy:New: class"
    ]
    with pytest.raises(ConfigError, match=r"1\.0 to 1\.2"):
        third.at("1.3")


def test_a_contract_survives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "contract.json"
    file.write_text(of(BEFORE).to_json())
    assert read(file) == of(BEFORE)
    file.write_text("{")
    with pytest.raises(ConfigError, match="is no contract"):
        read(file)


def test_a_private_base_belongs_to_its_subclasses() -> None:
    source = "class _Base:\n    x: int = 1\n    def f(self): ...\nclass Public(_Base):\n    y: int"
    module: Module = module_of(source)
    assert [*module.types] == ["Public"]
    assert [*module.types["Public"].fields, *module.types["Public"].methods] == ["x", "y", "f"]


def test_versions_are_numbers() -> None:
    assert number("1.10") > number("1.9") > number(FIRST)
    with pytest.raises(ConfigError, match="no version"):
        number("1")
