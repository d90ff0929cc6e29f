"""The conformance tests, with the server of DOVETAIL_REDIS_URL, or with one that they start."""

import os
from collections.abc import Iterator

import pytest
from dovetail.testing import KVTierSuite
from servers import needs_a_server, server


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    if url := os.environ.get("DOVETAIL_REDIS_URL"):
        TestRedis.options = {"url": url}
        yield
        return
    with server() as url:
        TestRedis.options = {"url": url}
        yield


@needs_a_server
class TestRedis(KVTierSuite):
    component = "redis"
