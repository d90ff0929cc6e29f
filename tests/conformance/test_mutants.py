"""Every check can fail: for each there is a component, broken on purpose, that it catches. The
quick profile tries one for each check, the full profile all."""

from __future__ import annotations

import gc
import json
import logging
import random
import signal
import socket
import warnings
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from dovetail.api.component import KINDS, Kind
from dovetail.testing import elsewhere
from dovetail.testing.checks import checks_of
from dovetail.testing.hanging import ended_after
from dovetail.testing.suites import (
    executor,
    footprint,
    holding,
    kv_cache,
    kv_tier_world,
    repeatable,
    scheduler,
    scheduler_replay,
    suite_for,
)
from tests.conformance.fewer import one_in
from tests.conformance.kept_processes import KeptProcesses
from tests.conformance.mutants import Mutant, mutants
from tests.frozen import freeze_what_lasts
from tests.support import FULL

MUTANTS = list(mutants())
# The last of each check, unless another is caught sooner.
TRIED = (
    MUTANTS
    if FULL
    else list(
        {
            mutant.caught_by: mutant for mutant in sorted(MUTANTS, key=lambda mutant: mutant.soon)
        }.values()
    )
)
CHECK_S = 300.0  # of a check; the suite's own limit is that of pytest's plugin
CAUGHT_ELSEWHERE = {"hygiene.declaration"}  # in test_runner.py: its mutant has to be installed


# kinds whose suites import torch
WITH_TORCH = {"attention", "executor", "logits_processor", "model", "sampler"}


@pytest.fixture
def process_as_it_was() -> Iterator[None]:
    """Undoes what mutants change for the whole process, in which other tests run afterwards."""
    freeze_what_lasts()  # the first executor imports transformers, and each collects garbage
    timeout, collects, level, engines_level, handler, state, printed, dumps = (
        socket.getdefaulttimeout(),
        gc.isenabled(),
        logging.root.level,
        logging.getLogger("dovetail").level,
        signal.getsignal(signal.SIGUSR1),
        random.getstate(),
        np.get_printoptions(),
        json.dumps,
    )
    with warnings.catch_warnings():
        yield
    socket.setdefaulttimeout(timeout)
    (gc.enable if collects else gc.disable)()
    logging.root.setLevel(level)
    logging.getLogger("dovetail").setLevel(engines_level)
    signal.signal(signal.SIGUSR1, handler)
    random.setstate(state)
    np.set_printoptions(**printed)
    json.dumps = dumps
    logging.addLevelName(logging.DEBUG, "DEBUG")


def keep_processes(kinds: Iterable[Kind]) -> Iterator[KeptProcesses]:
    modules = [f"dovetail.testing.suites.{kind}" for kind in kinds]
    with closing(KeptProcesses((), modules, forks=True)) as processes:
        yield processes


@pytest.fixture(scope="module")
def without_torch() -> Iterator[KeptProcesses]:
    yield from keep_processes(kind for kind in KINDS if kind not in WITH_TORCH)


@pytest.fixture(scope="module")
def with_torch() -> Iterator[KeptProcesses]:
    yield from keep_processes(KINDS)


@pytest.fixture
def forked_processes(
    mutant: Mutant,
    without_torch: KeptProcesses,
    with_torch: KeptProcesses,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutants are found out in forks of a process that has imported the suites."""
    if not FULL:
        kept = with_torch if mutant.kind in WITH_TORCH else without_torch
        for module in (elsewhere, scheduler_replay):
            monkeypatch.setattr(module, "run_python", kept.run_python)


@pytest.mark.usefixtures("process_as_it_was", "forked_processes")
@pytest.mark.parametrize("mutant", TRIED, ids=repr)
def test_mutant_is_caught_by_its_check(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(repeatable, "SHRINK_S", 0.0)  # any failing example will do
    # and any wait
    monkeypatch.setattr(kv_tier_world, "JOB_S", 0.2)
    monkeypatch.setattr(executor, "NOTICES_S", 0.1)
    monkeypatch.setattr(footprint, "GRACE_S", 0.1)
    if not FULL:
        # what grows is no buffer that will be full after a few more
        monkeypatch.setattr(holding, "DOUBLINGS", 1)
        monkeypatch.setattr(kv_cache, "LONG", one_in(2)(kv_cache.LONG))
        monkeypatch.setattr(scheduler, "LONG_BATCHES", one_in(3)(scheduler.LONG_BATCHES))
    if mutant.kind == "kv_tier":
        monkeypatch.chdir(tmp_path)  # where its files are
    check = checks_of(mutant.suite)[mutant.caught_by]
    with ended_after(CHECK_S), pytest.raises(mutant.error) as raised:
        getattr(mutant.suite(), check.attribute)()
    assert "positional argument" not in str(raised.value), (
        "the mutant itself calls something wrongly"
    )


def test_every_check_has_a_mutant() -> None:
    checks = {id for kind in KINDS for id in checks_of(suite_for(kind))}
    assert checks - {mutant.caught_by for mutant in MUTANTS} == CAUGHT_ELSEWHERE


def test_there_are_as_many_mutants_as_the_docs_say_and_no_two_are_the_same() -> None:
    assert len({mutant.component for mutant in MUTANTS}) == len(MUTANTS) > 1000
