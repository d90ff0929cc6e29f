"""Starts a Redis server, from a system's package `redis-server`, for the tests."""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

SERVER = shutil.which("redis-server") or shutil.which("valkey-server")
needs_a_server = pytest.mark.skipif(
    SERVER is None, reason="no redis-server is installed: apt-get install redis-server"
)
START_S = 20


@contextmanager
def server(*settings: str) -> Iterator[str]:
    """Run a server that keeps nothing on a disk, and yield its url."""
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder, "redis.sock")
        command = [str(SERVER), "--port", "0", "--unixsocket", str(socket), "--save", ""]
        process = subprocess.Popen(
            [*command, *settings], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            _wait_for(f"unix://{socket}")
            yield f"unix://{socket}"
        finally:
            process.terminate()
            process.wait()


def _wait_for(url: str) -> None:
    limit = time.monotonic() + START_S
    with redis.Redis.from_url(url) as client:
        while time.monotonic() < limit:
            try:
                client.ping()
                return
            except redis.ConnectionError:
                time.sleep(0.02)
    raise TimeoutError(f"{SERVER} isn't ready after {START_S} s")
