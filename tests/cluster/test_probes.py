"""Probes of replicas: whatever a replica answers, its vitals are told, and no probe ends."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from dovetail_cluster.interfaces import Vitals
from dovetail_cluster.probes import RUNNING, WAITING, probe
from tests.http_server import http_server


class Replica(BaseHTTPRequestHandler):
    metrics: str

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.metrics.encode() if self.path == "/metrics" else b"{}")

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def replica() -> Iterator[tuple[str, type[Replica]]]:
    class Mine(Replica):
        pass

    with http_server(Mine) as url:
        yield url, Mine


@pytest.mark.parametrize(
    "metrics",
    ["", "<html>", "a{", "# TYPE", "\0", f"{WAITING} NaN\n", f"{RUNNING} +Inf\n"],
    ids=repr,
)
def test_garbage_from_a_replicas_metrics_leaves_it_alive_with_its_last_load(
    replica: tuple[str, type[Replica]], metrics: str
) -> None:
    url, server = replica
    server.metrics = f"{WAITING} 3\n{RUNNING} 4\n"
    last = probe(url, None, Vitals(), lambda: 1.0)
    assert last == Vitals(True, 1.0, 3, 4)
    server.metrics = metrics
    now = probe(url, None, last, lambda: 2.0)
    assert now in (Vitals(True, 2.0, 3, 4), Vitals(True, 2.0, 0, 0)), "0: it reports no load"
