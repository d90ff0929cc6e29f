"""The example `dovetail-redis`: its own tests, and the suite of its kind, against a real server.
Without the client's package or a server they are skipped; `make test-redis`, which CI runs,
installs both."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from dovetail.testing import run

pytest.importorskip("redis", reason="the package redis isn't installed")

PACKAGE = Path(__file__).parents[2] / "examples/plugins/dovetail-redis"
sys.path[:0] = [str(PACKAGE / "src"), str(PACKAGE / "tests")]

THEIRS = runpy.run_path(str(PACKAGE / "tests/test_redis.py"))
globals().update({name: value for name, value in THEIRS.items() if name.startswith("test_")})
url = THEIRS["url"]


@pytest.mark.full
@THEIRS["needs_a_server"]
def test_it_conforms() -> None:
    from dovetail_redis.tier import RedisTier

    with THEIRS["server"]() as where:
        verdict = run("kv_tier", RedisTier, options={"url": where})
    assert verdict.conformant, str(verdict)
