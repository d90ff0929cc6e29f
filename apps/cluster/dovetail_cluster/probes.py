"""`Probes`: checks each replica in a thread of its own, so that a hung one delays no other. `ask`:
a short HTTP request to a process of the cluster, without proxies, with a timeout."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from dovetail_cluster.interfaces import Vitals

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
MAX_BYTES = 16 * 2**20
WAITING = "vllm:num_requests_waiting"
RUNNING = "vllm:num_requests_running"


def ask(
    url: str,
    *,
    key: str | None = None,
    method: str = "GET",
    body: Mapping[str, Any] | None = None,
    timeout_s: float = 2.0,
) -> tuple[int, str]:
    """Return the status and text of a response; status 0: none."""
    headers = {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )
    request = urllib.request.Request(
        url, None if body is None else json.dumps(body).encode(), headers, method=method
    )
    try:
        with _OPENER.open(request, timeout=timeout_s) as answer:
            return answer.status, answer.read(MAX_BYTES).decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""
    except (OSError, ValueError):
        return 0, ""
    except Exception as error:  # of http.client: a truncated response
        return 0, str(error)


class Probes:
    """Checks replicas over HTTP."""

    def __init__(
        self,
        key: str | None = None,
        every_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._key = key
        self._every_s = every_s
        self._clock = clock
        self._vitals: dict[str, Vitals | None] = {}

    def vitals(self, url: str) -> Vitals | None:
        if url not in self._vitals:
            self._vitals[url] = None
            threading.Thread(
                target=self._watch, args=(url,), name=f"probe of {url}", daemon=True
            ).start()
        return self._vitals[url]

    def forget(self, url: str) -> None:
        self._vitals.pop(url, None)

    def _watch(self, url: str) -> None:
        last = Vitals()
        while url in self._vitals:
            last = probe(url, self._key, last, self._clock)
            if url in self._vitals:
                self._vitals[url] = last
            time.sleep(self._every_s)


def probe(
    url: str, key: str | None, last: Vitals, clock: Callable[[], float] = time.monotonic
) -> Vitals:
    """Check a replica and return its vitals; where it gives no answer, or garbage, those of
    `last`."""
    healthy = ask(f"{url}/health", timeout_s=5.0)[0] == 200
    ready = ask(f"{url}/ready")[0] == 200
    status, text = ask(f"{url}/metrics", key=key)
    loads = {WAITING: last.waiting, RUNNING: last.running}
    if status == 200:
        with suppress(ValueError, OverflowError):  # it isn't in Prometheus's format
            loads = gauges(text)
    return Vitals(
        ready, clock() if healthy else last.healthy_at, loads.get(WAITING, 0), loads.get(RUNNING, 0)
    )


def gauges(text: str) -> dict[str, int]:
    """Return the two gauges of a server's /metrics. All front ends report those of the one engine:
    the maximum counts. Raises `ValueError` or `OverflowError` for anything else."""
    found: dict[str, int] = {}
    for family in text_string_to_metric_families(text):
        if family.name in (WAITING, RUNNING):
            found[family.name] = max((int(sample.value) for sample in family.samples), default=0)
    return found
