"""`/v1/files` and `/v1/batches`, as OpenAI's client uses them: each request of a batch means what
it means over HTTP, and is answered once."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import IO, Any, Final

import httpx
import msgspec
import openai
import pytest
from openai.types import Batch

from dovetail.errors import ConfigError
from dovetail_server.batches import store as store_module
from dovetail_server.batches import worker
from dovetail_server.batches.lines import BatchLine, answered_in, request_at, scan
from dovetail_server.batches.store import BatchStore, Open, derived_file_id, new_id
from dovetail_server.errors import HttpError
from dovetail_server.protocol.batches import Batch as StoredBatch
from dovetail_server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import PATIENCE_S, serving

pytestmark = pytest.mark.anyio

CHAT: Final = "/v1/chat/completions"


def line(name: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": name,
        "method": "POST",
        "url": url,
        "body": {"messages": [{"role": "user", "content": name}], **body},
    }


def jsonl(*lines: dict[str, Any] | str) -> bytes:
    return "".join(
        f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines
    ).encode()


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "POLL_S", 0.01)
    monkeypatch.setattr(worker, "TRY_AGAIN_S", 0.01)
    monkeypatch.setattr(worker, "MOST_PAUSE_S", 0.05)


@asynccontextmanager
async def client_of(
    engine: FakeEngine, directory: Path | None, **settings: Any
) -> AsyncIterator[openai.AsyncOpenAI]:
    made = ServerSettings(
        batch_directory=None if directory is None else str(directory),
        log_requests=False,
        **settings,
    )
    async with (
        serving(engine, made, lifespan="on") as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
    ):
        yield client


async def begun(client: openai.AsyncOpenAI, content: bytes, endpoint: Any = CHAT) -> Batch:
    file = await client.files.create(file=("rows.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"for": "test"}
    )


def stored(directory: Path, content: bytes, **fields: Any) -> StoredBatch:
    """Keep a batch, as another front end does."""
    store, now = BatchStore(directory, 1 << 30), int(time.time())
    file = store.add_file("rows.jsonl", lambda to: to.write(content))
    store.add_batch(
        batch := StoredBatch(new_id("batch_"), CHAT, file.id, now, now + 3600, **fields)
    )
    return batch


def told_of(batch: Batch) -> list[str | None]:
    """The messages of a batch's errors."""
    return [error.message for error in (batch.errors and batch.errors.data) or []]


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Batch:
    async with asyncio.timeout(PATIENCE_S):
        while (batch := await client.batches.retrieve(batch_id)).status not in (
            "completed",
            "failed",
            "cancelled",
            "expired",
        ):
            await asyncio.sleep(0.01)
    return batch


async def until_health_says(client: openai.AsyncOpenAI, told: str) -> None:
    """Wait until /health says this of batches."""
    async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient() as plain:
        while (answer := await plain.get(str(client.base_url.join("/health")))).json()[
            "batches"
        ] != told:
            assert answer.status_code == 200
            await asyncio.sleep(0.01)


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    found = [json.loads(one) for one in (await client.files.content(file_id)).text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found), "each is answered once"
    return {one["custom_id"]: one for one in found}


async def test_a_batch_is_answered_and_what_is_wrong_says_why(
    fake: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    async with client_of(fake(), tmp_path / "kept") as client:
        content = jsonl(
            line("a"), line("b", temperature=-1), "", line("c", stream=True), line("d", nonsense=1)
        )
        batch = await begun(client, content)
        assert (batch.status, batch.metadata, batch.endpoint) == (
            "validating",
            {"for": "test"},
            CHAT,
        )
        done = await ended(client, batch.id)
        assert done.status == "completed"
        assert done.request_counts is not None
        assert (
            done.request_counts.total,
            done.request_counts.completed,
            done.request_counts.failed,
        ) == (4, 1, 3)
        answers, failures = (
            await lines_of(client, done.output_file_id),
            await lines_of(client, done.error_file_id),
        )
        assert answers["a"]["response"]["status_code"] == 200
        assert (
            answers["a"]["response"]["body"]["choices"][0]["message"]["content"] == "Hello, world"
        )
        assert {
            name: one["response"]["body"]["error"]["param"] for name, one in failures.items()
        } == {
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
    for path in (tmp_path / "kept", *(tmp_path / "kept").rglob("*")):
        assert oct(path.stat().st_mode & 0o777) == ("0o700" if path.is_dir() else "0o600")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "there is no request in the file"),
        (b"{\n", "the line isn't valid JSON"),
        (jsonl(line("a"), line("a")), "custom_id 'a' occurs twice"),
        (jsonl(line("a", url="/v1/completions")), "url must be the batch's endpoint"),
        (jsonl({**line("a"), "method": "GET"}), "method must be POST, got 'GET'"),
        (jsonl({**line("a"), "body": []}), "body must be an object"),
        (jsonl({"custom_id": "a"}), "missing required field `url`"),
        (jsonl({**line("a"), "custom_id": ""}), "custom_id must be a non-empty string"),
        (
            jsonl({**line("a"), "custom_id": "x" * 513}),
            "custom_id must have at most 512 characters",
        ),
        (b"x" * 3000, "the line has more than 2000 bytes"),
    ],
)
async def test_a_batch_with_a_wrong_line_fails_as_a_whole(
    tmp_path: Path, content: bytes, told: str
) -> None:
    (tmp_path / "rows").write_bytes(jsonl(line("good")) * (len(content) > 0) + content)
    assert told in scan(tmp_path / "rows", CHAT, 2000).errors[0].message


async def test_what_is_no_file_or_batch_is_refused(
    fake: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    async with client_of(fake(), tmp_path, max_file_bytes=1000) as client:
        for refused, told in [
            (
                client.files.create(file=("x", b"x" * 1001), purpose="batch"),
                "larger than 1000 bytes",
            ),
            (
                client.files.create(file=("x", b"x" * 100_000), purpose="batch"),
                "larger than 1000 bytes",
            ),
            (
                client.files.create(file=("x", b"x"), purpose="fine-tune"),
                "purpose must be batch, got 'fine-tune'",
            ),
            (
                client.batches.create(
                    input_file_id="file-x", endpoint=CHAT, completion_window="24h"
                ),
                "there is no file 'file-x' here",
            ),
            (
                client.batches.create(
                    input_file_id="../x", endpoint="/v1/audio/speech", completion_window="24h"
                ),
                "endpoint must be one of",
            ),  # type: ignore[arg-type]
            (
                client.batches.create(input_file_id="x", endpoint=CHAT, completion_window="1h"),
                "completion_window must be 24h",
            ),  # type: ignore[arg-type]
            (client.batches.retrieve("batch_x"), "there is no batch 'batch_x' here"),
            (client.files.content("../../etc/passwd"), "nothing is served|there is no file"),
            (
                client.batches.list(limit=0).__aiter__().__anext__(),
                "limit must be an integer from 1",
            ),
        ]:
            with pytest.raises(openai.APIStatusError, match=told):
                await refused
        answer = await httpx.AsyncClient().post(
            f"{client.base_url}files", content=b"x", headers={"content-type": "text/plain"}
        )
        assert "must be a form" in answer.json()["error"]["message"]
        for kind in ("multipart/form-data", "multipart/form-data; boundary=b"):
            answer = await httpx.AsyncClient().post(
                f"{client.base_url}files", content=b"--b\r\nx", headers={"content-type": kind}
            )
            assert answer.status_code == 400
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "batches.db"}


async def test_a_file_may_have_any_name(fake: Callable[..., FakeEngine], tmp_path: Path) -> None:
    async with client_of(fake(), tmp_path) as client, httpx.AsyncClient() as plain:
        for name, kept in [
            ("../../x", "../../x"),
            ("ü", "ü"),
            ("+2AA-", "?"),
        ]:  # the last is half a surrogate pair in UTF-7
            parts = 'name="purpose"\r\n\r\nbatch', f'name="file"; filename="{name}"\r\n\r\nx'
            body = (
                "".join(f"--b\r\nContent-Disposition: form-data; {part}\r\n" for part in parts)
                + "--b--\r\n"
            )
            charset = "utf-7" if name.startswith("+") else "utf-8"
            head = {"content-type": f"multipart/form-data; boundary=b; charset={charset}"}
            answer = await plain.post(
                f"{client.base_url}files", content=body.encode(), headers=head
            )
            assert (answer.status_code, answer.json().get("filename")) == (200, kept)
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("file-")]) == 3


async def test_without_a_folder_there_are_no_batches(fake: Callable[..., FakeEngine]) -> None:
    async with client_of(fake(), None) as client:
        with pytest.raises(openai.NotFoundError, match="start the server with --batch-directory"):
            await client.files.create(file=("x", b"x"), purpose="batch")


@pytest.mark.slow("answers many requests")
async def test_a_server_that_starts_again_continues_with_what_is_left(
    fake: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    names = [f"q{at}" for at in range(12)]
    first = fake(paced=True)
    async with client_of(first, tmp_path, batch_requests=4) as client:
        batch = await begun(client, jsonl(*map(line, names)))
        async with asyncio.timeout(PATIENCE_S):
            while len(first.submitted) < 6:  # so two have been answered, at least
                first.step()
                await asyncio.sleep(0.01)
    output = next(
        path
        for path in tmp_path.glob("file-*")
        if path.name != batch.input_file_id and path.stat().st_size and path.suffix == ""
    )
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


async def test_a_batch_that_is_cancelled_keeps_what_has_come(
    fake: Callable[..., FakeEngine], tmp_path: Path
) -> None:
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


def test_of_a_cancellation_and_an_end_one_comes_first(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 1 << 20)
    cancelled, over = (stored(tmp_path, b"{}\n") for _ in range(2))
    assert store.cancel(cancelled.id).status == "cancelling"
    assert store.open_batches() == Open([cancelled.id, over.id], {cancelled.id})
    for batch in (cancelled, over):
        store.end_batch(msgspec.structs.replace(batch, status="completed", completed_at=2))
    with pytest.raises(HttpError, match="is completed: it can't be cancelled any more"):
        store.cancel(over.id)
    assert store.batch(cancelled.id).status == "completed"
    assert store.open_batches() == Open([], set())


@pytest.mark.slow("waits for requests that expire")
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
        assert {
            one["error"]["code"] for one in (await lines_of(client, done.error_file_id)).values()
        } == {"batch_expired"}


@pytest.mark.slow("waits for a batch that is held up")
async def test_a_full_disk_holds_a_batch_up_and_loses_nothing(
    fake: Callable[..., FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, full = BatchStore.append, [True] * 6

    def refused(store: BatchStore, file_id: str, lines: bytes) -> None:
        if full:
            full.pop()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(store, file_id, lines)

    monkeypatch.setattr(BatchStore, "append", refused)
    engine = fake()
    async with client_of(engine, tmp_path) as client:
        batch = await begun(client, jsonl(*(line(f"q{at}") for at in range(9))))
        await until_health_says(client, "No space left on device")
        done = await ended(client, batch.id)
        await until_health_says(client, "ok")
        assert done.status == "completed"
        assert len(await lines_of(client, done.output_file_id)) == 9
        assert len(engine.submitted) == 9, "no answer was computed twice"


def test_an_answer_that_finds_room_for_a_part_only_leaves_nothing(tmp_path: Path) -> None:
    store, file_id = BatchStore(tmp_path, 1 << 20), new_id("file-")
    store.append(file_id, b"one\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            store.append(file_id, b"a longer one\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    store.append(file_id, b"two\n")
    assert store.content(file_id).read_bytes() == b"one\ntwo\n"


async def test_a_batch_whose_input_is_gone_has_failed(
    fake: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    batch = stored(tmp_path, jsonl(line("a")))
    (tmp_path / batch.input_file_id).unlink()
    async with client_of(fake(), tmp_path) as client:
        done = await ended(client, batch.id)
        assert (done.status, told_of(done)) == ("failed", ["the input file is gone"])


async def test_a_body_that_is_no_text_is_a_failure_of_its_own(
    fake: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    async with client_of(fake(), tmp_path) as client:
        broken = (
            b'{"custom_id": "b", "url": "%s", "body": {"stream": false, "user": "\xff"}}\n'
            % CHAT.encode()
        )
        done = await ended(client, (await begun(client, jsonl(line("a")) + broken)).id)
        assert done.status == "completed"
        assert set(await lines_of(client, done.output_file_id)) == {"a"}
        failure = (await lines_of(client, done.error_file_id))["b"]
        assert "the body isn't valid JSON" in failure["response"]["body"]["error"]["message"]


async def test_a_batch_that_meets_a_fault_of_ours_has_failed_and_the_next_gets_its_turn(
    fake: Callable[..., FakeEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(path: Path, offset: int, max_line_bytes: int) -> BatchLine:
        if (line := request_at(path, offset, max_line_bytes)).custom_id == "b":
            raise RuntimeError("a fault at b")
        return line

    monkeypatch.setattr(worker, "request_at", broken)
    async with client_of(fake(), tmp_path) as client:
        two, one = [await begun(client, jsonl(*map(line, names))) for names in ("ab", "c")]
        failed = await ended(client, two.id)
        assert (failed.status, failed.failed_at is not None) == ("failed", True)
        assert told_of(failed) == ["the server failed: RuntimeError: a fault at b"]
        assert (await ended(client, one.id)).status == "completed"
    assert f"{two.id} has failed" in caplog.text


def test_what_a_killed_upload_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 1 << 20)
    known = store.add_file("known.jsonl", lambda to: to.write(b"1"))
    store.add_batch(batch := StoredBatch("batch_" + 32 * "0", CHAT, known.id, 0, 1, "in_progress"))
    store.append(derived_file_id(batch.id, "output"), b"2")
    (left := store.content("file-" + 32 * "a")).write_bytes(b"3")
    for content in tmp_path.glob("file-*"):
        os.utime(content, (0, 0))

    def upload(to: IO[bytes]) -> None:
        store.tidy()  # as another front end does while this one is written
        to.write(b"4")

    late = store.add_file("late.jsonl", upload)
    assert not left.exists()
    assert [
        store.content(one).read_bytes()
        for one in (known.id, derived_file_id(batch.id, "output"), late.id)
    ] == [b"1", b"2", b"4"]
    assert store.file(late.id).bytes == 1


async def test_one_front_end_answers_and_the_folder_has_bounds(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 100)
    with store.owned() as first, BatchStore(tmp_path, 100).owned() as second:
        assert (first, second) == (True, False)
    with store.owned() as again:
        assert again
    store.add_file("a", lambda file: file.write(b"x" * 200))
    with pytest.raises(HttpError, match=r"at most .* 100 bytes \(max_stored_bytes\): delete some"):
        store.add_file("b", lambda file: file.write(b"x"))


async def test_files_and_unfinished_batches_are_bounded_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small they are."""
    monkeypatch.setattr(store_module, "MAX_OPEN", 1)
    first = stored(tmp_path, b"")
    with pytest.raises(HttpError, match="there are 1 unfinished batches") as refused:
        stored(tmp_path, b"")
    assert refused.value.status == 429
    store = BatchStore(tmp_path, 1 << 30)
    store.end_batch(first)
    stored(tmp_path, b"")
    monkeypatch.setattr(store_module, "MAX_STORED", 1 + 5)  # three files and two batches are there
    store.add_file("a", lambda file: file.write(b""))
    with pytest.raises(HttpError, match=r"6 files and batches have .* delete some") as full:
        store.add_file("b", lambda file: file.write(b""))
    assert full.value.status == 507


@pytest.mark.slow("starts the worker anew")
async def test_the_worker_survives_an_unreadable_folder_and_health_reports_it(
    fake: Callable[..., FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing, faults = BatchStore.open_batches, [RuntimeError("a fault of ours")]

    def refused(store: BatchStore) -> Open:
        if faults:
            raise faults[0]
        return listing(store)

    async with client_of(fake(), tmp_path) as client:
        monkeypatch.setattr(BatchStore, "open_batches", refused)
        await until_health_says(client, "failing: RuntimeError")
        batch = await begun(client, jsonl(line("a")))
        with closing(sqlite3.connect(tmp_path / "batches.db", isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            with monkeypatch.context() as patch:
                patch.setattr(store_module, "BUSY_S", 0.01)
                faults.clear()
                await until_health_says(client, "failing: database is locked")
                with pytest.raises(openai.InternalServerError, match="database is locked"):
                    await client.batches.list()
            other.execute("ROLLBACK")
        assert (await ended(client, batch.id)).status == "completed"
        await until_health_says(client, "ok")


def damage(directory: Path, batch_id: str, value: bytes) -> None:
    """Change what the store keeps of a batch."""
    with closing(sqlite3.connect(directory / "batches.db", isolation_level=None)) as database:
        database.execute("UPDATE batches SET value = ? WHERE id = ?", (value, batch_id))


@pytest.mark.parametrize(
    "value", [b"", b'{"id": "batch_', b"\xff", b"[]", b"[" * 10**5], ids=lambda value: value[:9]
)
async def test_a_damaged_batch_fails_and_no_other(
    fake: Callable[..., FakeEngine], tmp_path: Path, value: bytes
) -> None:
    damaged, fine = (stored(tmp_path, jsonl(line(name))) for name in "ab")
    damage(tmp_path, damaged.id, value)
    async with client_of(fake(), tmp_path) as client:
        assert (await ended(client, fine.id)).status == "completed"
        failed = await ended(client, damaged.id)
        assert (failed.status, told_of(failed)) == (
            "failed",
            ["what the server kept of this batch can't be read any more"],
        )
        assert [one.id async for one in client.batches.list()] == [fine.id, damaged.id]
        assert (
            await ended(client, (await begun(client, jsonl(line("c")))).id)
        ).status == "completed"


async def test_a_batch_that_is_damaged_later_can_be_listed_and_deleted(
    fake: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    async with client_of(fake(), tmp_path) as client:
        done = await ended(client, (await begun(client, jsonl(line("a")))).id)
        damage(tmp_path, done.id, b"")
        assert [one.status async for one in client.batches.list()] == ["failed"]
        await client.delete(f"/batches/{done.id}", cast_to=object)
        assert not [one async for one in client.batches.list()]
        assert [one.id async for one in client.files.list()] == [done.input_file_id]


def test_a_database_that_is_none_is_refused_and_a_damaged_one_ends_nothing(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 1 << 20)
    store.add_file("a", lambda to: to.write(b"1"))
    database = tmp_path / "batches.db"
    database.write_bytes(database.read_bytes()[:100] + b"\xff" * 4000)
    with pytest.raises(HttpError, match="the folder of batches is unavailable") as caught:
        store.files()
    assert caught.value.status == 503
    with pytest.raises(OSError, match=r"malformed|not a database"):
        store.open_batches()
    database.write_bytes(b"no database" * 100)
    with pytest.raises(ConfigError, match=r"--batch-directory: .*: file is not a database"):
        BatchStore(tmp_path, 1 << 20)


@pytest.mark.slow("starts processes that kill themselves")
def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    """Each process kills itself amid its writes, as a front end may be killed."""
    writes = f"""
import os, sys, threading
from pathlib import Path
from dovetail_server.batches.store import BatchStore
store = BatchStore(Path({str(tmp_path)!r}), 1 << 30)
count = 0
while True:
    print(store.add_file("a", lambda to: to.write(b"12")).id, flush=True)
    count += 1
    if count == 5:
        threading.Timer(0.01, lambda: os.kill(os.getpid(), 9)).start()
"""
    BatchStore(tmp_path, 1 << 30)
    writers = [
        subprocess.Popen([sys.executable, "-c", writes], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = {name for writer in writers for name in (writer.communicate()[0] or "").split()}
    store = BatchStore(tmp_path, 1 << 30)
    kept = {file.id for file in store.files().items}
    assert len(told) >= 10
    assert told <= kept, "what was answered is kept"
    assert {store.content(name).read_bytes() for name in kept} == {b"12"}
    with sqlite3.connect(tmp_path / "batches.db") as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.slow("waits for a batch of its own server")
async def test_a_request_that_the_scheduler_rejects_is_not_made_again(
    fake: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    engine = fake(finish="rejected")
    async with client_of(engine, tmp_path) as client:
        done = await ended(client, (await begun(client, jsonl(line("a")))).id)
        assert done.status == "completed"
        failure = (await lines_of(client, done.error_file_id))["a"]["response"]
        assert (failure["status_code"], failure["body"]["error"]["code"]) == (503, "rejected")
        assert len(engine.submitted) == 1


@pytest.mark.slow("waits for several batches")
async def test_requests_that_are_refused_delay_no_other_batch(
    fake: Callable[..., FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More batches wait than are answered side by side, and more requests than may run at once."""
    monkeypatch.setattr(worker, "AT_ONCE", 2)
    call: Callable[..., Any] = worker.call  # type: ignore[attr-defined]
    refused: set[str] = set()

    async def refuses(app: Any, path: str, body: bytes, request_id: str) -> Any:
        if b"stuck" in body and open_again is False:
            refused.add(json.loads(body)["messages"][0]["content"])
            return 429, b"{}"
        return await call(app, path, body, request_id)

    open_again = False
    monkeypatch.setattr(worker, "call", refuses)
    async with client_of(fake(), tmp_path, batch_requests=2) as client:
        stuck = [
            await begun(client, jsonl(*(line(f"stuck {at} {row}") for row in range(3))))
            for at in range(5)
        ]
        async with asyncio.timeout(PATIENCE_S):
            while len({name.split()[1] for name in refused}) < 5:
                await asyncio.sleep(0.01)
        assert (
            await ended(client, (await begun(client, jsonl(line("a"), line("b")))).id)
        ).status == "completed"
        await until_health_says(client, "ok")
        open_again = True
        for batch in stuck:
            assert len(await lines_of(client, (await ended(client, batch.id)).output_file_id)) == 3


@pytest.mark.slow("waits for several batches")
async def test_a_batch_is_answered_while_a_larger_one_is_answered(
    fake: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    engine = fake(paced=True)
    async with client_of(engine, tmp_path, batch_requests=2) as client:
        large = await begun(client, jsonl(*(line(f"q{at}") for at in range(40))))
        await engine.until_requests(2)
        small = await begun(client, jsonl(line("a")))
        while (await client.batches.retrieve(small.id)).status != "completed":
            assert len(engine.requests) <= 2
            engine.step()
            await asyncio.sleep(0.01)
        assert (await client.batches.retrieve(large.id)).status == "in_progress"


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"k": "x" * 513}, "metadata: expected `str` of length <= 512"),
        ({"k" * 65: "x"}, "metadata: a key: Expected `str` of length <= 64"),
        ({str(at): "x" for at in range(17)}, "metadata: expected `object` of length <= 16"),
        ({"k": 1}, "metadata: expected `str`"),
    ],
)
async def test_metadata_has_the_bounds_of_openai(
    fake: Callable[..., FakeEngine], tmp_path: Path, metadata: Any, told: str
) -> None:
    async with client_of(fake(), tmp_path) as client:
        file = await client.files.create(file=("rows.jsonl", jsonl(line("a"))), purpose="batch")
        with pytest.raises(openai.BadRequestError, match=told):
            await client.batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata=metadata
            )
        most = {f"{at:x}" * 64: "ü" * 512 for at in range(16)}
        assert (
            await client.batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata=most
            )
        ).metadata == most


@pytest.mark.slow("makes more batches than a page has")
async def test_lists_are_paged_as_openai_pages_them(
    fake: Callable[..., FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, read = msgspec.json.decode, []

    def counting(data: bytes, **options: Any) -> Any:
        read.append(data)
        return decode(data, **options)

    made = [stored(tmp_path, jsonl(line("a"))) for _ in range(7)]
    newest = [batch.id for batch in reversed(made)]
    files = [batch.input_file_id for batch in made]
    engine = fake()
    engine.refusal = HttpError(429, "full")
    async with client_of(engine, tmp_path) as client:
        await until_health_says(client, "ok")
        assert [one.id async for one in client.batches.list(limit=3)] == newest
        page = await client.batches.list(limit=3)
        assert ([one.id for one in page.data], page.has_more) == (newest[:3], True)
        assert page.model_extra == {"object": "list", "first_id": newest[0], "last_id": newest[2]}
        for batch in made:
            await client.batches.cancel(batch.id)
            await ended(client, batch.id)
        monkeypatch.setattr(msgspec.json, "decode", counting)
        await client.delete(f"/batches/{newest[2]}", cast_to=object)
        read.clear()
        page = await client.batches.list(limit=3, after=newest[2])
        assert ([one.id for one in page.data], page.has_more) == (newest[3:6], True), (
            "the one before may have been deleted"
        )
        assert len(read) <= 4, "no more is read than a page"
        page = await client.batches.list(limit=1, after=newest[5])
        assert ([one.id for one in page.data], page.has_more) == (newest[6:], False)
        assert [
            one.id async for one in client.files.list(limit=2, order="asc", purpose="batch")
        ] == files
        assert [one.id async for one in client.files.list(limit=2)] == files[::-1]
        assert [one async for one in client.files.list(purpose="batch_output")] == []
        wrong: list[tuple[Any, str]] = [
            (client.batches.list(limit=101), "limit must be an integer from 1 to 100"),
            (client.batches.list(after="x"), "after must be an id"),
            (client.files.list(limit=10_001), "limit must be an integer from 1 to 10000"),
            (client.files.list(order="up"), "order must be asc or desc"),  # type: ignore[arg-type]
        ]
        for refused, told in wrong:
            with pytest.raises(openai.BadRequestError, match=told):
                await refused


async def test_a_look_for_batches_reads_none_that_has_ended(tmp_path: Path) -> None:
    store, batch = BatchStore(tmp_path, 1 << 20), stored(tmp_path, b"x")
    assert store.open_batches() == ([batch.id], set())
    batch.status = "completed"
    store.end_batch(batch)
    assert store.open_batches() == ([], set())
    assert store.batch(batch.id).status == "completed"


async def test_a_batch_that_has_ended_is_deleted_with_its_answers(
    fake: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    engine = fake(paced=True)
    async with client_of(engine, tmp_path) as client:
        batch = await begun(client, jsonl(line("a"), line("b", nonsense=1)))
        await engine.until_requests(1)
        with pytest.raises(openai.ConflictError, match="cancel it first"):
            await client.delete(f"/batches/{batch.id}", cast_to=object)
        while (done := await client.batches.retrieve(batch.id)).status != "completed":
            engine.step()
            await asyncio.sleep(0.01)
        assert done.output_file_id
        assert done.error_file_id
        deleted = await client.delete(f"/batches/{batch.id}", cast_to=dict[str, Any])
        assert deleted == {"id": batch.id, "object": "batch", "deleted": True}
        assert [one.id async for one in client.files.list()] == [batch.input_file_id]
        with pytest.raises(openai.NotFoundError, match="there is no batch"):
            await client.delete(f"/batches/{batch.id}", cast_to=object)


async def test_files_and_batches_expire(
    fake: Callable[..., FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that an open batch needs are kept."""
    async with client_of(fake(), tmp_path, batch_keep_days=2) as client:
        rows = ("rows.jsonl", jsonl(line("a")))
        brief = await client.files.create(
            file=rows, purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        batch = await client.batches.create(
            input_file_id=brief.id,
            endpoint=CHAT,
            completion_window="24h",
            extra_body={"output_expires_after": {"anchor": "created_at", "seconds": 7200}},
        )
        usual = await client.files.create(file=rows, purpose="batch")
        done = await ended(client, batch.id)
        now = time.time()
        output = await client.files.retrieve(str(done.output_file_id))
        assert [round(((one.expires_at or 0) - now) / 3600) for one in (brief, output, usual)] == [
            1,
            2,
            48,
        ]
        for wrong in (
            {"anchor": "created_at", "seconds": 60},
            {"anchor": "last_active_at", "seconds": 3600},
        ):
            with pytest.raises(openai.BadRequestError, match="expires_after: "):
                await client.files.create(file=rows, purpose="batch", expires_after=wrong)  # type: ignore[arg-type]
    store = BatchStore(tmp_path, 1 << 20, 2)
    waiting = stored(tmp_path, b"x")
    store.keep_batch(waiting)
    for hours, files, batches in [(0, 4, 2), (1.1, 3, 2), (2.1, 2, 2), (49, 1, 1)]:
        monkeypatch.setattr("time.time", lambda hours=hours: now + 3600 * hours)
        store.tidy()
        assert (len(store.files().items), len(store.batches().items)) == (files, batches)
    assert store.file(waiting.input_file_id).id
