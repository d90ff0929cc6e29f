"""`http_server`: one of the standard library, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer

POLL_S = 0.01  # between looks whether it shall end, half a second if not told otherwise


@contextmanager
def running(server: HTTPServer) -> Iterator[None]:
    """Run a server in a thread, and close it."""
    with server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": POLL_S}, daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def http_server(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """Answer requests by a handler, on a free port of loopback; the URL, without a slash."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    with running(server):
        yield f"http://127.0.0.1:{server.server_port}"
