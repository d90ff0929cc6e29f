"""Images over HTTP: what each API sends reaches the model, what is wrong is named by its place, and
nothing of it stays in memory."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from dovetail.front.media import processes
from dovetail.front.media.processes import ImageProcesses
from dovetail.request.media import MediaItem
from dovetail_server.admission import IMAGE_BYTES, HeldImages
from dovetail_server.app import create_app
from dovetail_server.errors import HttpError
from dovetail_server.protocol import advisory
from dovetail_server.protocol.responses import ResponsesRequest
from dovetail_server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.pictures import (
    APIS,
    CHAT,
    MESSAGES,
    RESPONSES,
    asked,
    data_url,
    image,
    image_at,
    large,
    place_of,
    seeing,
    small,
    text,
    with_result,
)
from tests.server.serving import serving
from tests.server.test_batches import begun, client_of, ended, jsonl, lines_of, quick_polls
from tests.server.test_openapi import OF_IMAGES

__all__ = ["quick_polls"]  # a fixture

pytestmark = pytest.mark.usefixtures("shared_image_processes")
ROWS = 6  # of `small`: 24 x 16 pixels, 8 x 8 for each row


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    engine = seeing()
    yield engine
    engine.close()


@pytest.fixture
def client(engine: FakeEngine) -> TestClient:
    engine.submitted.clear()
    return TestClient(create_app(engine))


def prompt_tokens(answer: httpx.Response) -> int:
    usage = answer.json()["usage"]
    return int(usage.get("prompt_tokens", usage.get("input_tokens")))


@pytest.mark.slow("makes a checkpoint and starts the process that prepares images")
@pytest.mark.parametrize("path", APIS)
def test_each_api_gives_the_model_the_same_images(
    path: str, client: TestClient, engine: FakeEngine
) -> None:
    parts = [text(path, "Two:"), image(path, small()), image(path, small(1)), text(path, "?")]
    answer = client.post(path, json=asked(path, *parts))
    assert answer.status_code == 200, answer.text
    whole = client.post(CHAT, json=asked(CHAT, *[image(CHAT, small(seed)) for seed in (0, 1)]))
    first, second = engine.submitted
    assert first.digests == second.digests
    assert len({*first.digests}) == 2
    assert prompt_tokens(answer) == len(first.prompt_token_ids)
    assert prompt_tokens(whole) == len(second.prompt_token_ids)
    pad = max(first.prompt_token_ids, key=list(first.prompt_token_ids).count)
    assert list(first.prompt_token_ids).count(pad) == 2 * ROWS


@pytest.mark.slow("makes a checkpoint and starts the process that prepares images")
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_a_model_sees_the_images_of_a_tools_result(
    path: str, client: TestClient, engine: FakeEngine
) -> None:
    parts = [text(path, "Here:"), image(path, small(2))]
    answer = client.post(path, json=with_result(path, *parts))
    assert answer.status_code == 200, answer.text
    assert "x-dovetail-ignored" not in answer.headers
    client.post(CHAT, json=asked(CHAT, image(CHAT, small(2))))
    first, second = engine.submitted
    assert first.digests == second.digests
    assert "Here:" in (first.prompt or "")


@pytest.mark.slow("makes a checkpoint and starts the process that prepares images")
@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
def test_rows_of_images_are_counted(path: str, client: TestClient) -> None:
    api = MESSAGES if path.startswith("/v1") else CHAT
    body = asked(api, image(api, small()))
    del body["max_tokens"]
    answer = client.post(path, json=body).json()
    without = client.post(path, json=asked(api, text(api, "")) | {"max_tokens": None})
    assert without.status_code in (200, 400)
    assert (answer.get("count") or answer["input_tokens"]) > ROWS


Body = Callable[..., dict[str, Any]]
# fields that ask for a size of images: path, body, and the field's name
SIZES: dict[str, tuple[str, Body, str]] = {
    "messages[].content[].image_url.detail": (CHAT, asked, "detail"),
    "input[].content[].detail": (RESPONSES, asked, "detail"),
    "input[].output[].detail": (RESPONSES, with_result, "detail"),
    "messages[].content[].transformations": (MESSAGES, asked, "transformations"),
    "messages[].content[].content[].transformations": (MESSAGES, with_result, "transformations"),
}
OF_SIZES = {
    field.path: field
    for field in (*advisory.CHAT, *advisory.RESPONSES, *advisory.MESSAGES)
    if field.path.endswith(OF_IMAGES)
}


@pytest.mark.slow("makes a checkpoint and starts the process that prepares images")
def test_a_wish_about_the_size_of_an_image_is_ignored_by_name(client: TestClient) -> None:
    assert OF_SIZES.keys() == SIZES.keys()
    for name, (path, make, field) in SIZES.items():
        value: Any = "low" if field == "detail" else {"oversized_image": "fit"}
        answer = client.post(path, json=make(path, image(path, small(), **{field: value})))
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-dovetail-ignored"] == name
        for neutral in (None, *OF_SIZES[name].neutral):
            told = client.post(path, json=make(path, image(path, small(), **{field: neutral})))
            assert told.status_code == 200, told.text
            assert "x-dovetail-ignored" not in told.headers


def url(path: str, address: Any) -> dict[str, Any]:
    return asked(path, text(path, "a"), image_at(path, address))


NOISE = "QUJD" * 2_000
# by name: a part, as each API has it
WRONG: dict[str, Callable[[str], dict[str, Any]]] = {
    "another scheme": lambda path: image_at(path, "ftp://example.com/a.png"),
    "a local file": lambda path: image_at(path, "file:///etc/passwd"),
    "a path": lambda path: image_at(path, "/etc/passwd"),
    "nothing": lambda path: image_at(path, ""),
    "an unknown host": lambda path: image_at(path, "https://example.com/a.png"),
    "a host within": lambda path: image_at(path, "http://169.254.169.254/latest/meta-data"),
    "data that isn't base64": lambda path: image_at(path, "data:image/png,abc"),
    "broken base64": lambda path: image(path, "ab~~" * 9),
    "half of base64": lambda path: image(path, "abcde"),
    "noise": lambda path: image(path, NOISE),
    "no bytes": lambda path: image(path, ""),
    "half a picture": lambda path: image(path, small()[:120]),
    "text": lambda path: image(path, "PHN2Zz48L3N2Zz4="),
}


@pytest.mark.slow("makes a checkpoint and starts the process that prepares images")
@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_image_is_named_by_its_place(
    name: str, path: str, client: TestClient, engine: FakeEngine
) -> None:
    parts = [text(path, "a"), image(path, small()), WRONG[name](path)]
    answer = client.post(path, json=asked(path, *parts))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    place = place_of(path, 0, 2)
    assert error["message"].startswith(place), error
    if path != MESSAGES:
        assert error["param"].startswith(place)
    assert not engine.submitted


@pytest.mark.slow("makes a checkpoint and starts the process that prepares images")
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_a_wrong_image_of_a_tools_result_is_named_by_its_place(
    path: str, client: TestClient
) -> None:
    body = with_result(path, text(path, "a"), image(path, NOISE))
    message = client.post(path, json=body).json()["error"]["message"]
    expected = "input[2].output[1]" if path == RESPONSES else "messages[2].content[0].content[1]"
    assert message.startswith(expected), message


# Fields of an image of a wrong type, by API; each is alone
ODD = (None, 7, [], {}, [1], {"url": 1}, True)
FIELDS: list[tuple[str, dict[str, Any]]] = [
    *((CHAT, {"type": "image_url", "image_url": odd}) for odd in ODD),
    *((CHAT, {"type": "image_url", "image_url": {"url": odd}}) for odd in ODD),
    *((CHAT, {"type": "image_url", "image_url": {"url": "data:", "detail": odd}}) for odd in ODD),
    *((CHAT, {"type": odd, "image_url": {"url": "data:"}}) for odd in ODD),
    *((CHAT, {"type": "image", "image": odd}) for odd in ODD),
    *((CHAT, {"type": "image_pil", "image_pil": odd}) for odd in ODD),
    *((RESPONSES, {"type": "input_image", "image_url": odd}) for odd in ODD),
    *((RESPONSES, {"type": "input_image", "image_url": "data:", "detail": odd}) for odd in ODD),
    *((RESPONSES, {"type": "input_image", "file_id": odd}) for odd in ("file-1", *ODD)),
    *((MESSAGES, {"type": "image", "source": odd}) for odd in ODD),
    *((MESSAGES, {"type": "image", "source": {"type": odd}}) for odd in ODD),
    *((MESSAGES, {"type": "image", "source": {"type": "url", "url": odd}}) for odd in ODD),
    *((MESSAGES, {"type": "image", "source": {"type": "file", "file_id": "f"}}) for _ in (1,)),
    *(
        (MESSAGES, {"type": "image", "source": {"type": "base64", "media_type": odd, "data": ""}})
        for odd in ("application/pdf", *ODD)
    ),
    *(
        (
            MESSAGES,
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": odd}},
        )
        for odd in ODD
    ),
]


@pytest.mark.slow("makes a checkpoint and starts the process that prepares images")
def test_fields_of_wrong_types_are_refused_with_their_place(client: TestClient) -> None:
    for path, part in FIELDS:
        answer = client.post(path, json=asked(path, text(path, "a"), part))
        assert answer.status_code == 400, (part, answer.text)
        assert place_of(path, 0, 1) in answer.json()["error"]["message"], (part, answer.text)
    for path in APIS:
        assert client.post(path, json=asked(path, image(path, small()))).status_code == 200


@pytest.mark.slow("makes a checkpoint and starts the process that prepares images")
@pytest.mark.parametrize("path", APIS)
def test_hostile_bodies_end_alone(path: str, client: TestClient) -> None:
    many = [image(path, small())] * 10_000
    nested: Any = image(path, small())
    for _ in range(100):
        nested = {"type": "tool_result", "tool_use_id": "c", "content": [nested]}
    bodies = {
        "30 MB of noise": asked(path, image(path, NOISE * 3_700)),
        "10,000 images": asked(path, *many),
        "results in results": asked(path, nested),
        "an image of the assistant": asked(path)
        | {
            "input" if path == RESPONSES else "messages": [
                {"role": "assistant", "content": [image(path, NOISE)]}
            ]
        },
        "20 MB of a name": asked(path, {"type": "image_url", "x" * 20_000_000: 1}),
    }
    for name, body in bodies.items():
        answer = client.post(path, json=body)
        assert answer.status_code == 400, (name, answer.text[:500])
        assert len(answer.text) < 2_000, name
    assert client.post(path, json=asked(path, image(path, small()))).status_code == 200


def test_completions_take_no_images(client: TestClient) -> None:
    body = {"prompt": "a", "multi_modal_data": {"image": data_url(small())}}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "multi_modal_data"
    part = image(CHAT, small())
    assert client.post("/v1/completions", json={"prompt": [part]}).status_code == 400


def test_the_list_of_models_says_what_they_read(client: TestClient) -> None:
    [model] = client.get("/v1/models").json()["data"]
    assert model["architecture"]["input_modalities"] == ["text", "image"]


def test_bodies_of_four_images_of_5_mb_fit() -> None:
    images = [image(CHAT, "A" * (5 * 2**20 * 4 // 3 + 4)) for _ in range(4)]
    size = len(json.dumps(asked(CHAT, text(CHAT, "a" * 100_000), *images)))
    assert size < ServerSettings().max_body_bytes


def test_a_body_keeps_no_image_once_there_is_a_prompt() -> None:
    tools = [{"type": "function", "name": "g", "parameters": {}}]
    found = {"type": "tool_search_output", "call_id": "s", "tools": tools}
    message = {"role": "user", "content": [image(RESPONSES, small())]}
    body = ResponsesRequest(input=[message, found])
    known = [tool.name for tool in body.known_tools().functions]
    body.drop_images()
    assert [tool.name for tool in body.known_tools().functions] == known == ["g"]
    assert small() not in repr(body)


# What is held


async def ask(app: Starlette, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as http:
        return await http.post(CHAT, json=body)


def number_of_items() -> int:
    """Return the number of prepared images in this process."""
    gc.collect()
    return sum(type(one) is MediaItem for one in gc.get_objects())


def held_in(app: Starlette) -> tuple[int, int]:
    return app.state.server.images.held, app.state.server.bodies.held


@pytest.mark.anyio
@pytest.mark.slow("makes a checkpoint and starts the process that prepares images")
async def test_prepared_images_are_bounded_and_released() -> None:
    engine = seeing("a", paced=True)
    app = create_app(engine, ServerSettings(max_held_image_bytes=1))
    body = asked(CHAT, image(CHAT, small()))
    first = asyncio.create_task(ask(app, body))
    await engine.until_requests(1)
    held, bodies = held_in(app)
    assert (held > 1, bodies) == (True, 0)
    refused = await ask(app, body)
    assert refused.status_code == 429
    assert "max_held_image_bytes" in refused.text
    assert int(refused.headers["retry-after"]) >= 1
    without = asyncio.create_task(ask(app, asked(CHAT, text(CHAT, "a"))))
    await engine.until_requests(2)
    engine.step()
    engine.step()
    assert [(await first).status_code, (await without).status_code] == [200, 200]
    assert held_in(app) == (0, 0)
    engine.close()


def test_images_of_several_requests_are_bounded_before_and_after_they_are_prepared() -> None:
    images = HeldImages(10 * IMAGE_BYTES)
    busy = pytest.raises(HttpError, match="max_held_image_bytes")
    with images.preparing(100), busy, images.preparing(1):  # a single request is admitted
        pass
    assert images.held == 0
    with (
        images.preparing(3),
        images.preparing(7),
        pytest.raises(HttpError, match="max_held_image_bytes"),
    ):
        images.take(1)
    images.take(4 * IMAGE_BYTES)
    with images.preparing(6):
        pass
    with pytest.raises(HttpError, match="max_held_image_bytes"):
        images.take(7 * IMAGE_BYTES)  # they were larger than estimated
    images.release(4 * IMAGE_BYTES)
    assert images.held == 0


@pytest.mark.anyio
@pytest.mark.slow("makes a checkpoint and starts the process that prepares images")
async def test_a_client_that_leaves_while_its_image_is_prepared_leaves_nothing() -> None:
    engine = seeing("a")
    app = create_app(engine)
    async with serving(app) as address:
        host, port = address.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        data = json.dumps(asked(CHAT, image(CHAT, large()))).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        while not app.state.server.models.first.admission.queued_requests:
            await asyncio.sleep(0.001)
        writer.close()
        while app.state.server.models.first.admission.queued_requests:
            await asyncio.sleep(0.001)
        assert held_in(app) == (0, 0)
        assert not engine.submitted
        answer = await asyncio.to_thread(
            httpx.post, f"{address}{CHAT}", json=asked(CHAT, image(CHAT, small())), timeout=60
        )
        assert answer.status_code == 200
        assert len(engine.submitted) == 1
    engine.close()


@pytest.mark.anyio
@pytest.mark.slow("makes a checkpoint and starts the process that prepares images")
@pytest.mark.parametrize("path", APIS)
async def test_a_front_end_keeps_nothing_of_the_images_of_a_running_request(path: str) -> None:
    others = number_of_items()  # of other tests
    engine = seeing("a", paced=True)
    body = json.dumps(asked(path, *[image(path, large())] * 4)).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    async with serving(engine) as address:
        host, port = address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        sent = memoryview(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        tracemalloc.start()
        for start in range(0, len(sent), 65_536):
            writer.write(sent[start : start + 65_536])
            await writer.drain()
        await engine.until_requests(1)
        # the thread that has prepared them may be held up before it drops them
        while number_of_items() > others or tracemalloc.get_traced_memory()[0] > len(body) / 4:
            await asyncio.sleep(0.01)
        tracemalloc.stop()
        engine.step()
        engine.step()
        assert b" 200 OK" in await reader.readline()
        writer.close()
    engine.close()


@pytest.mark.anyio
@pytest.mark.slow("makes a checkpoint and starts the process that prepares images")
async def test_no_further_image_is_prepared_once_the_client_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    prepared: list[str] = []
    prepare = ImageProcesses.image

    def held(self: ImageProcesses, source: Any, *arguments: Any, **named: Any) -> Any:
        prepared.append(source.place)
        begun.set()
        may_go_on.wait(60)
        return prepare(self, source, *arguments, **named)

    monkeypatch.setattr(ImageProcesses, "image", held)
    monkeypatch.setattr(processes, "IMAGES_AT_ONCE", 2)
    engine = seeing("a")
    app = create_app(engine)
    async with serving(app) as address:
        host, port = address.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = asked(CHAT, *[image(CHAT, small(seed)) for seed in range(16)])
        data = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await asyncio.to_thread(begun.wait, 60)
        writer.close()
        while app.state.server.models.first.admission.queued_requests:
            await asyncio.sleep(0.001)
        may_go_on.set()
        async with httpx.AsyncClient(base_url=address, timeout=60) as http:
            last = asked(CHAT, image(CHAT, small()))
            assert (await http.post(CHAT, json=last)).status_code == 200
    engine.close()
    assert len(prepared) <= 3, prepared
    assert len(engine.submitted) == 1


@pytest.mark.anyio
@pytest.mark.slow("makes a checkpoint and starts the process that prepares images")
@pytest.mark.usefixtures("quick_polls")
async def test_batches_have_images_and_wait_for_room(tmp_path: Path) -> None:
    bodies = [asked(CHAT, image(CHAT, small(seed))) for seed in range(8)]
    bodies.append(asked(CHAT, image(CHAT, NOISE)))
    lines = [
        {"custom_id": str(number), "method": "POST", "url": CHAT, "body": body}
        for number, body in enumerate(bodies)
    ]
    engine = seeing("a")
    async with client_of(engine, tmp_path, max_held_image_bytes=1) as client:
        batch = await ended(client, (await begun(client, jsonl(*lines))).id)
        told = await lines_of(client, batch.output_file_id)
        wrong = await lines_of(client, batch.error_file_id)
    assert (batch.status, len(told), len(wrong)) == ("completed", 8, 1)
    assert wrong["8"]["response"]["body"]["error"]["param"] == "messages[0].content[0]"
    assert len({*(digest for one in engine.submitted for digest in one.digests)}) == 8
    engine.close()
