"""Jobs whose rows have images: answers are those of `LLM.chat`, a wrong image fails its row alone,
and memory is bounded."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, SamplingParams
from dovetail_batch import engine_process, runner
from dovetail_batch.rows import RowReader
from dovetail_batch.runner import SentRows
from tests.batch.jobs import answers, run_job, write_job, write_rows
from tests.batch.test_run import ThreadLink
from tests.media.checkpoints import checkpoint, picture
from tests.server.pictures import CHAT, image, png
from tests.support import FULL

SIZES = ((24, 16), (30, 40), (47, 9))


def message(seed: int, count: int) -> dict[str, Any]:
    """Return a user's message with this many images."""
    files = [png(picture(*size, seed)) for size in SIZES[:count]]
    images = [image(CHAT, base64.b64encode(file).decode()) for file in files]
    return {"role": "user", "content": [*images, {"type": "text", "text": f"What is {seed}?"}]}


@pytest.mark.slow("makes a checkpoint, and runs jobs of it")
@pytest.mark.usefixtures("shared_image_processes")
@pytest.mark.parametrize("bounded", [False, True])
def test_rows_with_images_are_answered_as_in_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bounded: bool
) -> None:
    if bounded or not FULL:
        monkeypatch.setattr(runner, "EngineLink", ThreadLink)
    if bounded:  # by the least: the job goes on, a few rows at a time
        monkeypatch.setattr(runner, "CHARS_AT_ONCE", 1)
        monkeypatch.setattr(runner, "MOST_CHARS", 1)
        monkeypatch.setattr(engine_process, "HELD_IMAGE_BYTES", 1)
    engine = {"model": str(checkpoint("mistral3")), "dtype": "float32", "max_num_seqs": 4}
    messages = {f"q{seed}": message(seed, seed % 4) for seed in range(9)}
    rows: list[dict[str, Any]] = [{"id": id, "messages": [one]} for id, one in messages.items()]
    wrong = {"role": "user", "content": [image(CHAT, "QUJD")]}
    local = {"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]}
    rows[3:3] = [{"id": "noise", "messages": [wrong]}, {"id": "local", "messages": [local]}]
    write_rows(tmp_path / "rows.jsonl", rows)
    sampling = {"max_tokens": 4, "temperature": 0}
    run_job(write_job(tmp_path, engine=engine, sampling=sampling))
    told = {answer["id"]: answer for answer in answers(tmp_path)}
    assert told.keys() == {*messages, "noise", "local"}
    assert "messages[0].content[0]" in told["noise"]["error"]
    assert "messages[0].content[0]" in told["local"]["error"]
    with LLM(**engine) as llm:
        expected = llm.chat([[one] for one in messages.values()], SamplingParams(**sampling))
    for id, output in zip(messages, expected, strict=True):
        assert told[id]["outputs"][0]["text"] == output.outputs[0].text, id


def test_what_an_engine_has_is_counted_in_characters() -> None:
    reader = RowReader({}, 0)
    contents: list[dict[str, Any]] = [
        {"prompt": "abc"},
        {"token_ids": [1, 2]},
        {"messages": [message(0, 2)]},
    ]
    rows = [reader.read(number, fields) for number, fields in enumerate(contents)]
    assert [row.has_images for row in rows] == [False, False, True]
    urls = [part["image_url"]["url"] for part in contents[2]["messages"][0]["content"][:2]]
    assert rows[2].size > sum(map(len, urls))
    sent = SentRows()
    sent.add(rows)
    assert sent.chars == 3 + 2 + rows[2].size
    sent.remove([{"row": 2}, {"row": 0}])
    assert (len(sent), sent.chars) == (1, 2)
