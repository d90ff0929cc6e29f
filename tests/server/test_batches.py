"""`/v1/files` and `/v1/batches`, as OpenAI's client uses them: each request of a batch means what it means over HTTP, and is answered once."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

import httpx
import openai
import pytest
from openai.types import Batch

from dovetail_server.batches import worker
from dovetail_server.batches.lines import BatchLine, answered_in, checked, requests_in
from dovetail_server.batches.store import BatchStore, derived_file_id
from dovetail_server.errors import HttpError
from dovetail_server.protocol.batches import Batch as StoredBatch
from dovetail_server.settings import ServerSettings
from dovetail_server.testing import FakeEngine
from tests.server.serving import PATIENCE_S, serving

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


def line(name: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {"messages": [{"role": "user", "content": name}], **body}}


def jsonl(*lines: dict[str, Any] | str) -> bytes:
    return "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines).encode()


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "LOOK_S", 0.01)
    monkeypatch.setattr(worker, "TRY_AGAIN_S", 0.01)


@asynccontextmanager
async def client_of(engine: FakeEngine, directory: Path | None, **settings: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    made = ServerSettings(batch_directory=None if directory is None else str(directory), log_requests=False, **settings)
    async with serving(engine, made, lifespan="on") as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        yield client


async def begun(client: openai.AsyncOpenAI, content: bytes, endpoint: Any = CHAT) -> Batch:
    file = await client.files.create(file=("rows.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"for": "test"})


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Batch:
    async with asyncio.timeout(PATIENCE_S):
        while (batch := await client.batches.retrieve(batch_id)).status not in ("completed", "failed", "cancelled", "expired"):
            await asyncio.sleep(0.01)
    return batch


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    found = [json.loads(one) for one in (await client.files.content(file_id)).text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found), "each is answered once"
    return {one["custom_id"]: one for one in found}


async def test_a_batch_is_answered_and_what_is_wrong_says_why(fake: Callable[..., FakeEngine], tmp_path: Path) -> None:
    async with client_of(fake(), tmp_path / "kept") as client:
        content = jsonl(line("a"), line("b", temperature=-1), "", line("c", stream=True), line("d", nonsense=1))
        batch = await begun(client, content)
        assert (batch.status, batch.metadata, batch.endpoint) == ("validating", {"for": "test"}, CHAT)
        done = await ended(client, batch.id)
        assert done.status == "completed"
        assert done.request_counts is not None
        assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (4, 1, 3)
        answers, failures = await lines_of(client, done.output_file_id), await lines_of(client, done.error_file_id)
        assert answers["a"]["response"]["status_code"] == 200
        assert answers["a"]["response"]["body"]["choices"][0]["message"]["content"] == "Hello, world"
        assert {name: one["response"]["body"]["error"]["param"] for name, one in failures.items()} == {
            "b": "temperature",
            "c": "stream",
            "d": "nonsense",
        }
        assert [one.id async for one in client.batches.list()] == [batch.id]
        assert {one.purpose async for one in client.files.list()} == {"batch", "batch_output"}
        assert (await client.files.content(batch.input_file_id)).content == content
        assert (await client.files.delete(batch.input_file_id)).deleted
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            await client.files.retrieve(batch.input_file_id)
    assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "kept").iterdir()} == {"0o600"}
    assert oct((tmp_path / "kept").stat().st_mode & 0o777) == "0o700"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "there is no request in the file"),
        (b"{\n", "the line isn't valid JSON"),
        (jsonl(line("a"), line("a")), "custom_id 'a' is there twice"),
        (jsonl(line("a", url="/v1/completions")), "url must be the batch's endpoint"),
        (jsonl({**line("a"), "method": "GET"}), "method must be POST, got 'GET'"),
        (jsonl({**line("a"), "body": []}), "body must be an object"),
        (jsonl({"custom_id": "a"}), "missing required field `url`"),
        (jsonl({**line("a"), "custom_id": ""}), "custom_id must be a non-empty string"),
        (b"x" * 3000, "the line has more than 2000 bytes"),
    ],
)
async def test_a_batch_with_a_wrong_line_fails_as_a_whole(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "rows").write_bytes(jsonl(line("good")) * (len(content) > 0) + content)
    _, errors = checked(tmp_path / "rows", CHAT, 2000)
    assert told in errors[0].message


async def test_what_is_no_file_or_batch_is_refused(fake: Callable[..., FakeEngine], tmp_path: Path) -> None:
    async with client_of(fake(), tmp_path, max_file_bytes=1000) as client:
        for refused, told in [
            (client.files.create(file=("x", b"x" * 1001), purpose="batch"), "larger than 1000 bytes"),
            (client.files.create(file=("x", b"x" * 100_000), purpose="batch"), "larger than 1000 bytes"),
            (client.files.create(file=("x", b"x"), purpose="fine-tune"), "purpose must be batch, got 'fine-tune'"),
            (client.batches.create(input_file_id="file-x", endpoint=CHAT, completion_window="24h"), "there is no file 'file-x' here"),
            (client.batches.create(input_file_id="../x", endpoint="/v1/embeddings", completion_window="24h"), "endpoint must be one of"),
            (client.batches.create(input_file_id="x", endpoint=CHAT, completion_window="1h"), "completion_window must be 24h"),  # type: ignore[arg-type]
            (client.batches.retrieve("batch_x"), "there is no batch 'batch_x' here"),
            (client.files.content("../../etc/passwd"), "nothing is served|there is no file"),
            (client.batches.list(limit=0).__aiter__().__anext__(), "limit must be an integer from 1"),
        ]:
            with pytest.raises(openai.APIStatusError, match=told):
                await refused
        answer = await httpx.AsyncClient().post(f"{client.base_url}files", content=b"x", headers={"content-type": "text/plain"})
        assert "must be a form" in answer.json()["error"]["message"]
        for kind in ("multipart/form-data", "multipart/form-data; boundary=b"):
            answer = await httpx.AsyncClient().post(f"{client.base_url}files", content=b"--b\r\nx", headers={"content-type": kind})
            assert answer.status_code == 400
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


async def test_a_file_may_have_any_name(fake: Callable[..., FakeEngine], tmp_path: Path) -> None:
    async with client_of(fake(), tmp_path) as client, httpx.AsyncClient() as plain:
        for name, kept in [("../../x", "../../x"), ("ü", "ü"), ("+2AA-", "?")]:  # the last is half a surrogate pair in UTF-7
            parts = 'name="purpose"\r\n\r\nbatch', f'name="file"; filename="{name}"\r\n\r\nx'
            body = "".join(f"--b\r\nContent-Disposition: form-data; {part}\r\n" for part in parts) + "--b--\r\n"
            charset = "utf-7" if name.startswith("+") else "utf-8"
            head = {"content-type": f"multipart/form-data; boundary=b; charset={charset}"}
            answer = await plain.post(f"{client.base_url}files", content=body.encode(), headers=head)
            assert (answer.status_code, answer.json().get("filename")) == (200, kept)
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("file-")]) == 6, "a content and what is known of it, each"


async def test_without_a_folder_there_are_no_batches(fake: Callable[..., FakeEngine]) -> None:
    async with client_of(fake(), None) as client:
        with pytest.raises(openai.NotFoundError, match="start it with --batch-directory"):
            await client.files.create(file=("x", b"x"), purpose="batch")


async def test_a_server_that_starts_again_goes_on_with_what_is_left(fake: Callable[..., FakeEngine], tmp_path: Path) -> None:
    names = [f"q{at}" for at in range(12)]
    first = fake(paced=True)
    async with client_of(first, tmp_path, batch_requests=4) as client:
        batch = await begun(client, jsonl(*map(line, names)))
        async with asyncio.timeout(PATIENCE_S):
            while len(first.submitted) < 6:  # so two have been answered, at least
                first.step()
                await asyncio.sleep(0.01)
    output = next(path for path in tmp_path.glob("file-*") if path.name != batch.input_file_id and path.stat().st_size and path.suffix == "")
    kept = answered_in(output)
    assert 2 <= len(kept) < 12
    with output.open("ab") as file:
        file.write(b'{"custom_id": "q11", "resp')  # it was killed amidst a line
    second = fake()
    async with client_of(second, tmp_path) as client:
        done = await ended(client, batch.id)
        assert set(await lines_of(client, done.output_file_id)) == set(names)
        assert done.error_file_id is None
        assert len(second.submitted) == 12 - len(kept)


async def test_a_batch_that_is_cancelled_keeps_what_has_come(fake: Callable[..., FakeEngine], tmp_path: Path) -> None:
    engine = fake(paced=True)
    async with client_of(engine, tmp_path, batch_requests=2) as client:
        batch = await begun(client, jsonl(*(line(f"q{at}") for at in range(6))))
        async with asyncio.timeout(PATIENCE_S):
            while len(engine.submitted) < 4:
                engine.step()
                await asyncio.sleep(0.01)
        with pytest.raises(openai.ConflictError, match="needs this file"):
            await client.files.delete(batch.input_file_id)
        assert (await client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
        done = await ended(client, batch.id)
        assert done.status == "cancelled"
        assert 2 <= len(await lines_of(client, done.output_file_id)) < 6
        assert not engine.requests, "nothing is left in the engine"
        with pytest.raises(openai.ConflictError, match="it can't be cancelled any more"):
            await client.batches.cancel(batch.id)


async def test_requests_wait_while_the_server_is_full_and_expire_with_their_batch(
    fake: Callable[..., FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake()
    engine.refusal = HttpError(429, "full")
    async with client_of(engine, tmp_path) as client:
        batch = await begun(client, jsonl(line("a"), line("b")))
        async with asyncio.timeout(PATIENCE_S):
            while (await client.batches.retrieve(batch.id)).status != "in_progress":
                await asyncio.sleep(0.01)
        engine.refusal = None
        assert (await ended(client, batch.id)).status == "completed"
        monkeypatch.setattr("dovetail_server.routes.batches.WINDOW_S", 0)
        engine.refusal = HttpError(429, "full")
        done = await ended(client, (await begun(client, jsonl(line("a"), line("b")))).id)
        assert done.status == "expired"
        assert {one["error"]["code"] for one in (await lines_of(client, done.error_file_id)).values()} == {"batch_expired"}


async def test_a_full_disk_holds_a_batch_up_and_loses_nothing(
    fake: Callable[..., FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six lines find room for a part alone, the first three of them at once."""
    monkeypatch.setattr(worker, "TROUBLE_S", 0.01)
    append, full, call = worker._append, [True] * 6, worker.call
    answered, three = [], asyncio.Event()

    async def together(*request: Any) -> Any:
        answered.append(answer := await call(*request))
        if len(answered) >= 3:
            three.set()
        await three.wait()
        return answer

    def partly(file: Any, text: bytes) -> None:
        if full:
            full.pop()
            append(file, text[:10])
            raise OSError(28, "No space left on device")
        append(file, text)

    monkeypatch.setattr(worker, "_append", partly)
    monkeypatch.setattr(worker, "call", together)
    async with client_of(fake(), tmp_path) as client:
        done = await ended(client, (await begun(client, jsonl(*(line(f"q{at}") for at in range(9))))).id)
        assert not full
        gc.collect()  # a task whose error nobody looked at tells it now
        assert done.status == "completed"
        assert len(await lines_of(client, done.output_file_id)) == 9


async def test_a_batch_whose_input_is_gone_has_failed(fake: Callable[..., FakeEngine], tmp_path: Path) -> None:
    engine = fake()
    engine.refusal = HttpError(503, "later")
    async with client_of(engine, tmp_path) as client:
        first = await begun(client, jsonl(line("a")))
        second = await begun(client, jsonl(line("b")))
        (tmp_path / second.input_file_id).unlink()
        engine.refusal = None
        assert (await ended(client, first.id)).status == "completed"
        done = await ended(client, second.id)
        assert done.status == "failed"
        assert done.errors is not None
        assert done.errors.data is not None
        assert done.errors.data[0].message == "the input file is gone"


async def test_a_body_that_is_no_text_is_a_failure_of_its_own(fake: Callable[..., FakeEngine], tmp_path: Path) -> None:
    async with client_of(fake(), tmp_path) as client:
        broken = b'{"custom_id": "b", "url": "%s", "body": {"stream": false, "user": "\xff"}}\n' % CHAT.encode()
        done = await ended(client, (await begun(client, jsonl(line("a")) + broken)).id)
        assert done.status == "completed"
        assert set(await lines_of(client, done.output_file_id)) == {"a"}
        failure = (await lines_of(client, done.error_file_id))["b"]
        assert "the body isn't valid JSON" in failure["response"]["body"]["error"]["message"]


async def test_a_batch_that_meets_a_fault_of_ours_has_failed_and_the_next_gets_its_turn(
    fake: Callable[..., FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(path: Path, done: set[str], max_line_bytes: int) -> Iterator[BatchLine]:
        yield next(lines := requests_in(path, done, max_line_bytes))
        if (second := next(lines, None)) is not None:
            raise RuntimeError(f"a fault at {second.custom_id}")

    monkeypatch.setattr(worker, "requests_in", broken)
    async with client_of(fake(), tmp_path) as client:
        two, one = [await begun(client, jsonl(*map(line, names))) for names in ("ab", "c")]
        failed = await ended(client, two.id)
        assert (failed.status, failed.failed_at is not None) == ("failed", True)
        assert [error.message for error in (failed.errors and failed.errors.data) or []] == ["the server failed: RuntimeError: a fault at b"]
        assert (await ended(client, one.id)).status == "completed"
    assert f"{two.id} is given up" in caplog.text


def test_what_a_killed_upload_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 1 << 20)
    known = store.add_file("known.jsonl", lambda to: to.write(b"1"))
    store.add_batch(batch := StoredBatch("batch_" + 32 * "0", CHAT, known.id, 0, 1, "in_progress"))
    with store.appended(derived_file_id(batch.id, "output")) as answers:
        answers.write(b"2")
    (left := store.content("file-" + 32 * "a")).write_bytes(b"3")

    def upload(to: IO[bytes]) -> None:
        store.remove_abandoned()  # as another front end does while this one is written
        to.write(b"4")

    late = store.add_file("late.jsonl", upload)
    assert not left.exists()
    assert [store.content(one).read_bytes() for one in (known.id, derived_file_id(batch.id, "output"), late.id)] == [b"1", b"2", b"4"]
    assert store.file(late.id).bytes == 1


async def test_one_front_end_answers_and_the_folder_has_bounds(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 100)
    with store.owned() as first, BatchStore(tmp_path, 100).owned() as second:
        assert (first, second) == (True, False)
    with store.owned() as again:
        assert again
    store.add_file("a", lambda file: file.write(b"x" * 200))
    with pytest.raises(HttpError, match="max_stored_bytes is 100: delete some"):
        store.add_file("b", lambda file: file.write(b"x"))
