"""Cross-origin requests: a browser's requests for other sites' pages are rejected, unless allowed,
or the server has API keys, which such pages don't know."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from dovetail_server.app import create_app
from dovetail_server.settings import ServerSettings
from dovetail_server.sockets import is_on_loopback
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio
EVIL = "https://evil.example"
TEXT = {"content-type": "text/plain"}
JSON = {"content-type": "application/json"}


async def status(
    engine: FakeEngine,
    headers: dict[str, str],
    settings: ServerSettings | None = None,
    path: str = "/v1/completions",
    *,
    on_loopback: bool = True,
) -> int:
    """The status of a request: a GET if the path is no API's."""
    app = create_app(engine, settings, on_loopback=on_loopback)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000"
    ) as http:
        if path.startswith("/v1"):
            answer = await http.post(
                path, content=b'{"prompt": "a", "max_tokens": 1}', headers=headers
            )
        else:
            answer = await http.get(path, headers=headers)
    if answer.status_code == 403:
        assert answer.json()["error"]["type"] == "permission_error"
        assert answer.headers["x-request-id"]
    return answer.status_code


@pytest.mark.parametrize(
    "headers",
    [
        {**TEXT, "origin": EVIL},
        {"origin": EVIL},
        {**JSON, "origin": EVIL},
        {**TEXT, "origin": "null"},
        {**TEXT, "origin": "http://127.0.0.1:9999"},
        {**TEXT, "origin": "http://127.0.0.1:8000.evil.example"},
        {**TEXT, "sec-fetch-site": "cross-site"},
        {**TEXT, "sec-fetch-site": "same-site", "origin": "http://127.0.0.1:3000"},
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/messages", "/v1/files", "/v1/batches/batch_1/cancel"]
)
@pytest.mark.parametrize("on_loopback", [True, False])
async def test_pages_of_other_sites_may_not_send(
    fake: Callable[..., FakeEngine], headers: dict[str, str], path: str, on_loopback: bool
) -> None:
    assert await status(fake(), headers, path=path, on_loopback=on_loopback) == 403


@pytest.mark.parametrize(
    ("headers", "settings"),
    [
        (TEXT, ServerSettings()),  # no browser
        (JSON, ServerSettings()),
        ({**JSON, "origin": "http://127.0.0.1:8000"}, ServerSettings()),  # the server's own page
        (
            {**JSON, "origin": "https://llm.example", "sec-fetch-site": "same-origin"},
            ServerSettings(),
        ),  # the same, behind a proxy
        ({**JSON, "sec-fetch-site": "none"}, ServerSettings()),
        ({**JSON, "origin": EVIL}, ServerSettings(cors_origins=(EVIL,))),
        (
            {**JSON, "origin": EVIL, "sec-fetch-site": "cross-site"},
            ServerSettings(cors_origins=("*",)),
        ),
        (
            {**JSON, "origin": EVIL, "authorization": "Bearer k", "host": "evil.example"},
            ServerSettings(api_keys=("k",)),
        ),
    ],
)
async def test_programs_and_pages_that_were_allowed_may_send(
    fake: Callable[..., FakeEngine], headers: dict[str, str], settings: ServerSettings
) -> None:
    assert await status(fake(), headers, settings) == 200


async def test_a_page_of_another_site_may_link_here(fake: Callable[..., FakeEngine]) -> None:
    assert (
        await status(
            fake(), {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, path="/"
        )
        == 200
    )


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/page/live", "/v1/completions"])
@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "evil.example:127",
        "[x",
        "@",
    ],
)
async def test_on_loopback_a_name_that_points_here_is_not_served(
    fake: Callable[..., FakeEngine], path: str, host: str
) -> None:
    assert (
        await status(
            fake(),
            {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"},
            path=path,
        )
        == 403
    )


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "LocalHost:1",
        "a.localhost",
        "127.0.0.1",
        "127.0.0.2:80",
        "[::1]:8000",
        "10.0.0.1",
        "",
    ],
)
async def test_on_loopback_addresses_and_localhost_are_served(
    fake: Callable[..., FakeEngine], host: str
) -> None:
    assert await status(fake(), {"host": host}, path="/health") == 200


@pytest.mark.parametrize(
    ("settings", "on_loopback"),
    [
        (ServerSettings(allowed_hosts=("LLM.example",)), True),
        (ServerSettings(allowed_hosts=("*",)), True),
        (ServerSettings(), False),
    ],
)
async def test_elsewhere_and_where_it_was_allowed_any_name_is_served(
    fake: Callable[..., FakeEngine], settings: ServerSettings, on_loopback: bool
) -> None:
    assert (
        await status(fake(), {"host": "llm.example:8000"}, settings, on_loopback=on_loopback) == 200
    )


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.0.0.3", True), ("localhost", True), ("0.0.0.0", False)],
)
async def test_a_socket_knows_whether_it_is_on_loopback(host: str, expected: bool) -> None:
    with socket.socket() as sock:
        sock.bind((host, 0))
        assert is_on_loopback(sock) is expected


async def test_a_unix_socket_is_out_of_browsers_reach(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "socket"))
        assert not is_on_loopback(sock)
