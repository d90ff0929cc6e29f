"""Built-in components fulfil the contract of their kind: one suite for each component that the
distribution `dovetail` declares.

The suites are classes that pytest collects, as a plugin's author would write them; so their
verdicts stand in the summary.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.registry.registry import Registry
from dovetail.registry.requirements import missing_requirements
from dovetail.registry.resolved import ResolvedComponent
from dovetail.testing import elsewhere, hygiene
from dovetail.testing.processes import run_python
from dovetail.testing.suite import Suite
from dovetail.testing.suites import scheduler, scheduler_replay, suite_for
from tests.conformance.fewer import use_fewer
from tests.conformance.kept_processes import KeptProcesses
from tests.slow_checks import LIKE_ANOTHER
from tests.support import FULL

BUILT_INS = [
    component for component in Registry.discover().components() if component.origin.built_in
]
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
NEEDS_A_GPU = {"triton"}  # without one, tests/attention runs its suite in Triton's interpreter
FEWER_MIXES = 6  # of rows, in a step of attention: there are tests of each backend besides
COMPILES_S = 600.0  # of a check on a GPU, where each kernel is compiled first
NEEDS_GPUS = {"tensor"}  # or none: then its ranks are on the CPU
NEEDS_TIME = {
    "tensor",
    "llama",
    "mistral",
    "qwen2",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "gemma3_text",
    "ministral",
    "gemma4_text",
    "gemma4_unified_text",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "nemotron_h",
    "granitemoehybrid",
    "lfm2",
    "bamba",
    "lfm2_moe",
    "llama4_text",
    "roberta",
    "distilbert",
    "mpnet",
    "eurobert",
}  # processes, many tensors, or layers that another model has: in the full profile alone
SERVES_ANY = {
    "transformers"
}  # has no architecture of its own to be tried with: tests/models/test_transformers.py
# the class's defaults are another model's, which isn't served: tests/models/test_encoders.py
NEEDS_FIELDS = {"deberta_v2"}
# a package: tests/attention/test_flash_suite.py has stand-ins, tests/gpu/test_flash_attn.py the
# real one
NEEDS_MORE = {"flash_attn"}
NEEDS_A_COLLECTOR = {
    "otlp"
}  # spans wait in its queue and thread, by design: tests/observers/test_otlp.py
# keeps names only, for simulations: tests/lab/test_simulated_disk.py
NEEDS_A_VIRTUAL_CLOCK = {"simulated_disk"}
NEEDED: Mapping[str, Mapping[str, Any]] = {
    "dovetail_drafters.model:NamedModel": {"model": "demo"},
    "dovetail_drafters.heads:Eagle3Drafter": {"model": "head"},
    "dovetail_kv_tiers.disk:DiskTier": {"path": "frames", "size": "1GiB"},
}  # target -> options that have no default
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "dovetail_kv_tiers.disk:DiskTier": {"small": {"path": "small", "size": "1MiB"}},
}  # target -> settings of its suite
# tried beside the defaults in the full profile
OPTIONS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "priority": ({"aging_s": 5.0},),
    "mlfq": ({"levels": 3, "quantum": 4, "growth": 2, "starve_s": 3.0},),
    "vtc": ({"weights": {"a": 2.0}},),
    "edf": ({"assume": "longest", "warmup_steps": 0},),
    "lightllm": ({"order": "vtc"},),
    "prefix": ({"reuse": False}, {"hash": "sha256"}),
    "prometheus": ({"model_name": "m"},),
    "local": ({"num_pages": 40, "max_in_flight": 3},),
    "tensor": ({"size": 4, "num_pages": 40, "max_in_flight": 3},),
}


def suite_of(component: ResolvedComponent, options: Mapping[str, Any]) -> type[Suite]:
    spec = component.spec
    name = "_".join(
        ["Test", spec.kind, spec.name, *(f"{key}_{value}" for key, value in options.items())]
    )
    body: dict[str, Any] = {
        "component": component.qualified_name,
        "options": options,
        "__module__": __name__,
        **SETTINGS.get(spec.target, {}),
    }
    if spec.kind == "attention" and not FULL:
        body["examples"] = FEWER_MIXES
    if spec.name in NEEDS_A_GPU:
        body["time_limit_s"] = COMPILES_S
    return type("".join(c if c.isalnum() else "_" for c in name), (suite_for(spec.kind),), body)


def suites() -> Iterator[type[Suite]]:
    for component in BUILT_INS:
        left_out = (
            SERVES_ANY
            | NEEDS_FIELDS
            | NEEDS_MORE
            | NEEDS_A_COLLECTOR
            | NEEDS_A_VIRTUAL_CLOCK
            | (NEEDS_A_GPU if not GPUS else NEEDS_GPUS if GPUS == 1 else set())
            | (set() if FULL else NEEDS_TIME)
        )
        if (
            component.spec.kind == "parser" or component.spec.name not in left_out
        ):  # some parsers are named after models
            for options in (
                NEEDED.get(component.spec.target, {}),
                *(OPTIONS.get(component.spec.name, ()) if FULL else ()),
            ):
                yield suite_of(component, options)


@pytest.fixture(autouse=True)
def fewer_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are many policies, and each has its own tests too."""
    if not FULL:
        use_fewer(monkeypatch.setattr)


ALL_AT_ONCE = """
import io, pickle, sys
from types import SimpleNamespace
code, payloads = pickle.load(sys.stdin.buffer)
for payload in payloads:
    sys.stdin = SimpleNamespace(buffer=io.BytesIO(payload))
    exec(code, {})
"""


@cache
def _run_once(code: str, stdin: bytes, what: str, *args: str) -> None:
    run_python(code, stdin, what, *args)


@pytest.fixture(autouse=True)
def fewer_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a plugin's declarations once for all of its components; in the quick profile, start all
    components in one new process."""

    def once(code: str, stdin: bytes, what: str, *args: str) -> None:
        if stdin and not FULL:
            code, stdin, what = (
                ALL_AT_ONCE,
                pickle.dumps((code, [suite().spawn_payload() for suite in SUITES])),
                "a new process can't start them all",
            )
        _run_once(code, stdin, what, *args)

    monkeypatch.setattr(hygiene, "run_python", once)


@cache
def _all_plans(hash_seed: str) -> dict[type[Suite], list[str]]:
    """Return the plans of the built-in policies that are tried, made in one process."""
    like_another = () if FULL else LIKE_ANOTHER["scheduler"]
    of_policies = [
        suite
        for suite in SUITES
        if suite.kind == "scheduler" and suite().resolved.spec.name not in like_another
    ]
    return dict(
        zip(
            of_policies,
            scheduler_replay.plans_elsewhere(
                *(suite() for suite in of_policies), hash_seed=hash_seed
            ),
            strict=True,
        )
    )


@pytest.fixture(autouse=True)
def one_process_plans_for_all_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    def plans(suite: Suite, *, hash_seed: str) -> list[list[str]]:
        return [_all_plans(hash_seed)[type(suite)]]

    monkeypatch.setattr(scheduler, "plans_elsewhere", plans)


@pytest.fixture(scope="module")
def kept_processes() -> Iterator[KeptProcesses]:
    kinds = [f"dovetail.testing.suites.{kind}" for kind in ("drafter", "parser")]
    with closing(KeptProcesses(elsewhere.HASH_SEEDS[:1], kinds)) as processes:
        yield processes


@pytest.fixture(autouse=True)
def one_process_a_hash_seed(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not FULL:
        processes = request.getfixturevalue("kept_processes")
        monkeypatch.setattr(elsewhere, "run_python", processes.run_python)


@pytest.fixture(autouse=True)
def another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make components write their files there."""
    monkeypatch.chdir(tmp_path)


SUITES = list(suites())
globals().update({suite.__name__: suite for suite in SUITES})


@pytest.mark.parametrize("component", BUILT_INS, ids=str)
def test_what_a_built_in_needs_is_here(component: ResolvedComponent) -> None:
    assert component.spec.name in NEEDS_MORE or not missing_requirements(component.spec.requires)
