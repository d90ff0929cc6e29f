"""Writes `core/dovetail/contract.json`: the interfaces that plugins are written against, read from
the sources of `dovetail.api`, the clauses and the suites. Imports no torch.

    python -m tools.contract             # writes it; fails if a version has to be raised first
    python -m tools.contract --rewrite   # only before the version is released: writes any change

From 1.0 on, an additive change needs a higher minor version of every kind that it belongs to, in
`dovetail.api.component.API_VERSIONS`: one more than the highest of the last release. Any other
change is refused. The same holds for the hooks and routes (`EXTENSION_VERSIONS`). Checks are added,
removed and applied to others only with a higher `SUITE_VERSION`, and a clause is removed only with
a higher version of its kind; it may be worded anew.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dovetail.api.component import (
    API_VERSIONS,
    EXTENSION_VERSIONS,
    KINDS,
    SUITE_VERSION,
    Kind,
)
from dovetail.registry.contract import document
from dovetail.registry.contract.diff import changes_between, name_changes, owners_of
from dovetail.registry.contract.document import (
    FIRST,
    Check,
    Clause,
    Constant,
    Contract,
    Extension,
    Feature,
    KindContract,
    Method,
    Module,
    Type,
    number,
)
from dovetail.registry.contract.source import last_name, module_of
from dovetail.registry.resolved import BASE_CLASSES
from dovetail.testing.clauses import Subject, clauses_of

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core"
FILE = CORE / "dovetail" / document.FILE

# Modules of `dovetail.api` for Dovetail's own packages. Components use them at their own risk.
INTERNAL = (
    "file_keys",
    "json_files",
    "process_watch",
    "sentence_transformers_files",
    "spans",
    "targets",
    "token_sizes",
    "whole_files",
)
# Names of other modules that interfaces mention, or that all kinds may use.
SHARED: Mapping[str, tuple[str, ...]] = {
    "dovetail.registry.hookspecs": (
        "dovetail_components",
        "dovetail_commands",
        "dovetail_models",
        "dovetail_quantizations",
        "dovetail_routers",
        "dovetail_routes",
    ),
    "dovetail.end_reason": ("EndReason", "FinishReason"),
    "dovetail.request.request": ("Request",),
    "dovetail.request.outputs": (
        "CompletionOutput",
        "Logprob",
        "RequestMetrics",
        "RequestOutput",
    ),
    "dovetail.request.sampling_params": ("BeamSearchParams", "OutputKind", "SamplingParams"),
}
# The page that says which names of `dovetail.nn` are public.
LAYERS = ROOT / "docs/reference/nn.md"
# Packages that export names of other modules.
PACKAGES = {
    "dovetail": ("dovetail.request.sampling_params",),
    "dovetail.request": ("dovetail.request.request", "dovetail.request.outputs"),
}
# Classes whose instances a component is given: Dovetail may add methods to them.
GIVEN = ("Step", "ParallelGroup", "TrialRun", "RouteContext", "Clock", "Request", "StateLayer")
# Classes of `dovetail.nn` that a package implements. It calls all others, or inherits from them.
IMPLEMENTED = ("Quantization", "WeightFormat")
# Constants whose values are the versions themselves, and change with them.
VERSIONS = ("API_VERSIONS", "EXTENSION_VERSIONS", "SUITE_VERSION")
# Modules of the interfaces that aren't those of components.
EXTENSIONS: Mapping[str, tuple[str, ...]] = {
    "hooks": ("dovetail.registry.hookspecs", "dovetail.api.component"),
    "routes": ("dovetail.api.routes",),
}
# Further modules of a kind's interface: a class to inherit instead of the base class, and functions
# for samplers. All of `dovetail.nn` belongs to that of models.
FURTHER: Mapping[Kind, tuple[str, ...]] = {
    "kv_cache": ("dovetail.api.prefix_cache",),
    "kv_tier": ("dovetail.api.blocking_tier",),
    "sampler": ("dovetail.nn.logprobs", "dovetail.nn.token_masks"),
}
# Capabilities with their optional methods; "Class.method" is of a part that the component makes.
FEATURES: Mapping[Kind, Mapping[str, Feature]] = {
    "kv_cache": {
        "reuse": Feature(methods=("lookup",), required=("lookup",)),
        "fork": Feature(methods=("fork",), required=("fork",)),
        "trim": Feature(methods=("trim",), required=("trim",)),
        "states": Feature(methods=("take_checkpoints",), required=("take_checkpoints",)),
    },
    "attention": {"sinks": Feature(methods=("AttentionLayer.bind_sinks",))},
    "sampler": {"cuda_graph": Feature(methods=("capture_for",), required=("capture_for",))},
    "grammar": {
        "rollback": Feature(methods=("Matcher.rollback",), required=("Matcher.rollback",)),
        "forced": Feature(methods=("Matcher.forced",), required=("Matcher.forced",)),
    },
    "executor": {"masks": Feature(methods=("sample", "mask_words"), required=("sample",))},
    "tokenizer": {"chat": Feature(methods=("encode_chat",), required=("encode_chat",))},
    "parser": {
        "calls": Feature(methods=("in_call", "call_form")),
        "reasoning": Feature(methods=("in_reasoning",)),
    },
}


HINT = "Before these versions are released, --rewrite writes the file as it is."


def contract() -> Contract:
    """Return the contract of the code, without the versions that added each entry."""
    sources = {name: (CORE / _path(name)).read_text(encoding="utf-8") for name in _modules()}
    modules = {name: _module(name, source) for name, source in sources.items()}
    checks = dict(_checks())
    used = _Uses(sources, modules)
    kinds: dict[str, KindContract] = {}
    for kind in KINDS:
        base = modules[f"dovetail.api.{kind}"].types[BASE_CLASSES[kind]]
        declared = base.fields.get("capabilities")
        default = None if declared is None else declared.default
        kinds[kind] = KindContract(
            version=API_VERSIONS[kind],
            base=BASE_CLASSES[kind],
            capabilities=None if default is None else default.partition("(")[0],
            features=dict(FEATURES.get(kind, {})),
            uses=(
                *used.of(f"dovetail.api.{kind}"),
                *(
                    f"{module}:{name}"
                    for module in (layers() if kind == "model" else FURTHER.get(kind, ()))
                    for name in modules[module].names
                ),
            ),
            clauses=_clauses(kind),
            checks={id: check for id, check in checks.items() if id.startswith(f"{kind}.")},
        )
    return Contract(
        version=max((*API_VERSIONS.values(), *EXTENSION_VERSIONS.values()), key=number),
        suite=SUITE_VERSION,
        exports=_exports(),
        kinds=kinds,
        extensions={
            name: Extension(version=EXTENSION_VERSIONS[name], modules=parts)
            for name, parts in EXTENSIONS.items()
        },
        modules=modules,
        clauses=_clauses("component"),
        checks={id: check for id, check in checks.items() if id.startswith("hygiene.")},
    )


def _modules() -> list[str]:
    api = sorted(path.stem for path in (CORE / "dovetail/api").glob("*.py"))
    own = [f"dovetail.api.{name}" for name in api if name not in (*INTERNAL, "__init__")]
    return [*own, *SHARED, *layers()]


@cache
def layers() -> Mapping[str, tuple[str, ...]]:
    """Return the names of `dovetail.nn` that its page shows, by module; no names: all."""
    found: dict[str, tuple[str, ...]] = {}
    for name in re.findall(r"^::: ([\w.]+)$", LAYERS.read_text(encoding="utf-8"), re.MULTILINE):
        if (CORE / _path(name)).exists():
            found[name] = ()
        else:
            module, _, one = name.rpartition(".")
            found[module] = (*found.get(module, ()), one)
    return found


def _path(module: str) -> str:
    return module.replace(".", "/") + ".py"


def _module(name: str, source: str) -> Module:
    found = module_of(source)
    wanted = {**SHARED, **layers()}.get(name, ())
    is_layer = name in layers()

    def is_part(one: str) -> bool:
        return not wanted or one in wanted

    return Module(
        types={
            one: entry.model_copy(update={"given": True})
            if one in GIVEN or (is_layer and one not in IMPLEMENTED)
            else entry
            for one, entry in found.types.items()
            if is_part(one)
        },
        functions={one: entry for one, entry in found.functions.items() if is_part(one)},
        constants={
            one: Constant() if one in VERSIONS else entry
            for one, entry in found.constants.items()
            if is_part(one)
        },
    )


def _exports() -> dict[str, str]:
    source = (CORE / "dovetail/api/__init__.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            homes: dict[str, str] = ast.literal_eval(node.value)
            return {name: f"dovetail.api.{home}" for name, home in homes.items()}
    raise ValueError("dovetail.api has no _HOMES")


class _Uses:
    """Finds the names of other modules that an interface mentions, also through each other."""

    def __init__(self, sources: Mapping[str, str], modules: Mapping[str, Module]) -> None:
        self._modules = modules
        self._defined: dict[str, dict[str, set[str]]] = {}  # module -> name -> words in it
        self._imported: dict[str, dict[str, str]] = {}  # module -> name -> "module:name"
        for module, source in sources.items():
            tree = ast.parse(source)
            self._defined[module] = {
                name: {word.id for word in ast.walk(node) if isinstance(word, ast.Name)}
                for node in tree.body
                for name in _names_of(node)
            }
            self._imported[module] = dict(self._imports(tree))

    def _imports(self, tree: ast.Module) -> Iterator[tuple[str, str]]:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    for home in PACKAGES.get(node.module, (node.module,)):
                        if home in self._modules and self._has(home, alias.name):
                            yield alias.asname or alias.name, f"{home}:{alias.name}"

    def _has(self, module: str, name: str) -> bool:
        return name in self._modules[module].names

    def of(self, module: str) -> list[str]:
        """Return "module:name" of each, sorted."""
        seen: set[str] = set()
        todo = [f"{module}:{name}" for name in self._defined[module]]
        while todo:
            one = todo.pop()
            if one not in seen:
                seen.add(one)
                todo += self._mentioned(*one.split(":"))
        return sorted(
            one for one in seen if not one.startswith(f"{module}:") and self._has(*one.split(":"))
        )

    def _mentioned(self, module: str, name: str) -> Iterator[str]:
        for word in self._defined[module].get(name, ()):
            if word in self._imported[module]:
                yield self._imported[module][word]
            elif word in self._defined[module]:
                yield f"{module}:{word}"


def _names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _clauses(subject: Subject) -> dict[str, Clause]:
    """Return the sentences that require something. An id is the place with a digest of the
    sentence, so that a sentence keeps it when others are added."""
    found = {}
    for one in clauses_of(subject):
        if one.requires:
            digest = hashlib.sha256(one.text.encode()).hexdigest()[:6]
            found[f"{subject}:{one.place}:{digest}"] = Clause(
                place=one.place,
                text=one.text,
                checks=one.checks,
                tests=one.tests,
                unchecked=one.why,
            )
    return found


def _checks() -> Iterator[tuple[str, Check]]:
    """Yield the checks that the sources of the suites define, by id; suites import torch."""
    folder = CORE / "dovetail/testing"
    for path in [*sorted((folder / "suites").glob("*.py")), folder / "hygiene.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call) and last_name(decorator) == "check":
                        yield _check(decorator, ast.get_docstring(node) or "")


def _check(decorator: ast.Call, docstring: str) -> tuple[str, Check]:
    options: dict[str, Any] = {
        str(option.arg): ast.literal_eval(option.value) for option in decorator.keywords
    }
    id: str = ast.literal_eval(decorator.args[0])
    return id, Check.model_validate({**options, "help": " ".join(docstring.split())})


def stamped(new: Contract, old: Contract) -> Contract:
    """Return `new` with the version that added each entry: that of `old`, or its own."""
    modules = {}
    for name, module in new.modules.items():
        before = old.modules.get(name, Module())
        modules[name] = Module(
            types={
                one: _stamped_type(entry, before.types.get(one), new.version)
                for one, entry in module.types.items()
            },
            functions=_stamped(module.functions, before.functions, new.version),
            constants=_stamped(module.constants, before.constants, new.version),
        )
    return new.model_copy(update={"modules": modules})


def _stamped_type(new: Type, old: Type | None, version: str) -> Type:
    if old is None:
        return new.model_copy(update={"since": version})
    parts = {
        "fields": _stamped(new.fields, old.fields, version),
        "methods": _stamped(new.methods, old.methods, version),
        "members": _stamped(new.members, old.members, version),
    }
    return new.model_copy(update={**parts, "since": old.since})


def _stamped(new: Mapping[str, Any], old: Mapping[str, Any], version: str) -> dict[str, Any]:
    found = {}
    for name, entry in new.items():
        before = old.get(name)
        since = version if before is None else before.since
        found[name] = entry.model_copy(update={"since": since})
        if isinstance(entry, Method) and before is not None:
            known = {one.name: one.since for one in before.parameters}
            parameters = tuple(
                one.model_copy(update={"since": known.get(one.name, version)})
                for one in entry.parameters
            )
            found[name] = found[name].model_copy(update={"parameters": parameters})
    return found


def problems(old: Contract, new: Contract) -> list[str]:
    """Return why `new` may not follow `old`, a line each: changes that break packages, interfaces
    whose version has to be raised, and what is missing of checks and clauses. Nothing is demanded
    before 1.0."""
    return [*_name_problems(old, new), *_check_problems(old, new), *_clause_problems(old, new)]


def _name_problems(old: Contract, new: Contract) -> list[str]:
    wrong = []
    changed: dict[str, list[str]] = defaultdict(list)
    for change in name_changes(old, new):
        if not change.additive and number(old.version) >= number(FIRST):
            wrong.append(f"{change}: in 1.x an interface only grows")
        for owner in owners_of(change, new):
            if _is_settled(owner, old):
                changed[owner].append(str(change))
    for owner, lines in changed.items():
        if not _is_raised(owner, old, new):
            raised = _next(old.version)
            wrong.append(f"{owner}: raise its version to {raised}, since it has {'; '.join(lines)}")
    wrong += [
        f"{owner}: {version} should be {new.version}, the version of all that change together"
        for owner, version in new.versions.items()
        if _is_raised(owner, old, new) and version != new.version
    ]
    return wrong


def _is_settled(owner: str, old: Contract) -> bool:
    return owner in old.versions and number(old.versions[owner]) >= number(FIRST)


def _is_raised(owner: str, old: Contract, new: Contract) -> bool:
    before = old.versions.get(owner)
    return before is not None and number(new.versions[owner]) > number(before)


def _check_problems(old: Contract, new: Contract) -> Iterator[str]:
    """Yield the checks that were removed, added or applied to others without a new version of the
    suites, and those that name a wrong one."""
    if not old.suite:
        return
    before = old.all_checks
    after = new.all_checks
    raised = number(new.suite) > number(old.suite)
    wanted = _next(old.suite)
    for id, check in after.items():
        known = before.get(id)
        if known is None and not (raised and check.since == new.suite):
            yield f'{id}: a new check needs SUITE_VERSION {wanted}, and since="{wanted}"'
        if known is not None and known.since != check.since:
            yield f"{id}: since is {check.since}, and was {known.since}: it stays"
        if known is not None and known.capability != check.capability and not raised:
            yield f"{id}: it applies to other components: raise SUITE_VERSION to {wanted}"
    if not raised:
        for id in before.keys() - after.keys():
            yield f"{id}: the check was removed: raise SUITE_VERSION to {wanted}"


def _clause_problems(old: Contract, new: Contract) -> Iterator[str]:
    """Yield the clauses that were removed without a new version. One that was worded anew has
    another at its place."""
    for owner, before, after in _clauses_by_owner(old, new):
        removed = [clause for id, clause in before.items() if id not in after]
        added = Counter(clause.place for id, clause in after.items() if id not in before)
        if not _is_settled(owner, old) or _is_raised(owner, old, new):
            continue
        for clause in removed:
            if added[clause.place]:
                added[clause.place] -= 1
            else:
                yield (
                    f"{owner}: raise its version to {_next(old.version)}, since {clause.place} "
                    f"doesn't say any more: {clause.text}"
                )


def _clauses_by_owner(
    old: Contract, new: Contract
) -> Iterator[tuple[str, Mapping[str, Clause], Mapping[str, Clause]]]:
    for name, kind in old.kinds.items():
        if name in new.kinds:
            yield name, kind.clauses, new.kinds[name].clauses
    yield "hooks", old.clauses, new.clauses


def _next(version: str) -> str:
    major, minor = number(version)
    return f"{major}.{minor + 1}"


def current(old: Contract | None) -> Contract:
    """Return what the file should be, after the file `old`; None: there was none."""
    new = contract()
    if number(new.version) <= number(FIRST) or old is None:
        return new
    return stamped(new, old)


def main(arguments: Iterable[str]) -> str | None:
    """Write the file. Returns what has to be done first, or None."""
    old = document.read(FILE) if FILE.exists() else None
    new = current(old)
    wrong = [] if old is None or "--rewrite" in arguments else problems(old, new)
    if wrong:
        return "\n".join([*wrong, HINT])
    FILE.write_text(new.to_json(), encoding="utf-8")
    for change in changes_between(old, new) if old is not None else ():
        print(change)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
