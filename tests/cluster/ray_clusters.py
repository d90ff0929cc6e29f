"""Clusters for tests of `--on ray`: the fake in this process, or, if DOVETAIL_TEST_RAY is 1, a Ray
cluster on this machine."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from bench.batch import RayCluster
from bench.toy import installed_in

from tests.cluster.fake_ray import FakeRay

REAL = os.environ.get("DOVETAIL_TEST_RAY") == "1"
fake_only = pytest.mark.skipif(REAL, reason="only the fake can be made to do this")
real_only = pytest.mark.skipif(not REAL, reason="needs Ray: make test-cluster")


class Place(Protocol):
    """A cluster with room for two engines."""

    address: str

    def kill_a_worker_soon(self) -> None:
        """Have the process of an engine die once some rows have been answered."""

    def killed(self) -> int:
        """Return how many have died."""


class FakePlace:
    address = "auto"

    def __init__(self, ray: FakeRay) -> None:
        self.ray, self._wanted = ray, 0

    def kill_a_worker_soon(self) -> None:
        self._wanted += 1
        self.ray.dies_after.add(self.ray.answered + 2)

    def killed(self) -> int:
        return self._wanted - len(self.ray.dies_after)


class RealPlace:
    def __init__(self, cluster: RayCluster, answers: Path) -> None:
        self.address, self._cluster, self._answers = cluster.address, cluster, answers
        self._kills = 0
        self._threads: list[threading.Thread] = []

    def kill_a_worker_soon(self) -> None:
        self._threads.append(threading.Thread(target=self._kill, daemon=True))
        self._threads[-1].start()

    def killed(self) -> int:
        for thread in self._threads:
            thread.join()
        return self._kills

    def _kill(self) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if any(self._answers.glob("part-*")):
                self._kills += self._cluster.kill_engine(random.Random(0))
                return
            time.sleep(0.01)


@pytest.fixture(scope="session")
def real_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster | None]:
    """One cluster for all tests, or None. It knows the executor `toy`."""
    if not REAL:
        yield None
        return
    with RayCluster(installed_in(tmp_path_factory.mktemp("site")), cpus=2) as cluster:
        yield cluster


@pytest.fixture
def place(
    real_cluster: RayCluster | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Place:
    """A cluster; this process and it know the executor `toy`."""
    installed_in(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    if real_cluster is not None:
        return RealPlace(real_cluster, tmp_path / "answers")
    return FakePlace(FakeRay().installed(monkeypatch))
