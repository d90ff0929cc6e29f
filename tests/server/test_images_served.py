"""A server of a small model with an image encoder: all APIs answer what `LLM.chat` does, and what is
hostile or leaves early ends alone."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from dovetail import LLM, SamplingParams
from dovetail_server.app import create_app
from dovetail_server.settings import ServerSettings
from tests.media.checkpoints import checkpoint, picture, save_checkpoint
from tests.server.engines import Link, served
from tests.server.pictures import APIS, CHAT, MESSAGES, RESPONSES, asked, image, png, text
from tests.server.serving import serving, serving_in_threads

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow("makes a checkpoint, and serves it"),
    pytest.mark.usefixtures("shared_image_processes"),
]
GREEDY = {"temperature": 0}
ABSENT = 1.0  # in place of a log-probability
SIZES = ((24, 16), (30, 40), (47, 9))


def encoded(size: tuple[int, int]) -> str:
    return base64.b64encode(png(picture(*size))).decode()


def parts(path: str, *sizes: tuple[int, int]) -> list[dict[str, Any]]:
    """Return a user's message: text around images."""
    images = [image(path, encoded(size)) for size in sizes]
    return [text(path, "Look at"), *images, text(path, "and say what it is.")]


class Told(NamedTuple):
    """What `LLM.chat` says."""

    text: str
    prompt_tokens: int
    logprob: float  # of the first token
    prompt_logprobs: list[float]  # of each token of the prompt


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return {
        "model": str(checkpoint("mistral3")),
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }


@pytest.fixture(scope="module")
def told(config: dict[str, Any]) -> dict[int, Told]:
    """What is said of a prompt, by the number of its images."""
    found = {}
    with LLM(**config) as llm:
        for count in range(len(SIZES) + 1):
            content = [{"type": "image", "image": picture(*size)} for size in SIZES[:count]]
            around = parts(CHAT)
            message = {"role": "user", "content": [around[0], *content, around[1]]}
            params = SamplingParams(max_tokens=4, temperature=0, logprobs=0, prompt_logprobs=0)
            [output] = llm.chat([message], params)
            [sample] = output.outputs
            first = sample.logprobs[0][sample.token_ids[0]].logprob  # type: ignore[index]
            of_prompt = [
                next(iter(one.values())).logprob if one else ABSENT
                for one in output.prompt_logprobs or ()
            ]
            found[count] = Told(sample.text, len(output.prompt_token_ids), first, of_prompt)
    assert len({one.logprob for one in found.values()}) == len(found)
    return found


@pytest.fixture(scope="module")
def url(config: dict[str, Any]) -> Iterator[str]:
    settings = ServerSettings(served_model_name=("small",))
    with serving_in_threads(config, settings) as url:
        yield url


def said(path: str, answer: dict[str, Any]) -> str:
    if path == CHAT:
        return str(answer["choices"][0]["message"]["content"])
    if path == RESPONSES:
        return "".join(part["text"] for one in answer["output"] for part in one["content"])
    return "".join(block["text"] for block in answer["content"])


@pytest.mark.parametrize("path", APIS)
def test_answers_are_those_of_a_program(path: str, url: str, told: dict[int, Told]) -> None:
    for count, expected in told.items():
        if path == RESPONSES and not count:
            continue  # texts alone are joined by a line break
        body = asked(path, *parts(path, *SIZES[:count]), **GREEDY)
        answer = httpx.post(url + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert said(path, answer.json()) == expected.text
        usage = answer.json()["usage"]
        cached = usage.get("cache_read_input_tokens", 0)
        assert (
            usage.get("prompt_tokens", usage.get("input_tokens", 0) + cached)
            == expected.prompt_tokens
        )


def test_the_model_computes_the_same_images_as_in_a_program(
    url: str, told: dict[int, Told]
) -> None:
    for count, expected in told.items():
        body = asked(CHAT, *parts(CHAT, *SIZES[:count]), logprobs=True, **GREEDY)
        [choice] = httpx.post(url + CHAT, json=body, timeout=60).json()["choices"]
        assert choice["logprobs"]["content"][0]["logprob"] == pytest.approx(expected.logprob, 1e-4)


def test_log_probabilities_of_a_prompt_are_those_of_a_program(
    url: str, told: dict[int, Told]
) -> None:
    for count, expected in told.items():
        body = asked(CHAT, *parts(CHAT, *SIZES[:count]), prompt_logprobs=0, **GREEDY)
        known = httpx.post(url + CHAT, json=body, timeout=60).json()["prompt_logprobs"]
        own = [next(iter(one.values()))["logprob"] if one else ABSENT for one in known]
        assert own == pytest.approx(expected.prompt_logprobs, 1e-4)
        assert own.count(ABSENT) > count


def test_streams_are_those_of_a_program(url: str, told: dict[int, Told]) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with client:
        chunks = client.chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": parts(CHAT, *SIZES)}],  # type: ignore[list-item, misc]
            max_tokens=4,
            stream=True,
            **GREEDY,
        )
        deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        made = client.responses.create(
            model="small",
            input=[{"role": "user", "content": parts(RESPONSES, *SIZES)}],  # type: ignore[list-item, misc]
            max_output_tokens=4,
            **GREEDY,
        )
    assert "".join(deltas) == made.output_text == told[3].text


def test_anthropics_client_sends_images(
    url: str, told: dict[int, Told], anthropic: ModuleType
) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    with (
        client,
        client.messages.stream(
            model="small",
            messages=[{"role": "user", "content": parts(MESSAGES, *SIZES)}],
            max_tokens=4,
            extra_body=GREEDY,
        ) as events,
    ):
        assert "".join(events.text_stream) == told[3].text


async def test_many_requests_with_images_at_once_are_answered_as_alone(
    url: str, told: dict[int, Told]
) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        counts = [number % 4 for number in range(24)]
        bodies = [asked(CHAT, *parts(CHAT, *SIZES[:count]), **GREEDY) for count in counts]
        answers = await asyncio.gather(*(http.post(CHAT, json=body) for body in bodies))
    assert [said(CHAT, answer.json()) for answer in answers] == [told[n].text for n in counts]


@pytest.mark.parametrize("link", ["thread", "zmq"])
async def test_clients_that_leave_at_any_moment_leave_nothing(
    link: Link, tmp_path: Path, config: dict[str, Any], told: dict[int, Told]
) -> None:
    data = json.dumps(asked(CHAT, *parts(CHAT, *SIZES, (300, 280)), **GREEDY)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    async with served(link, tmp_path, **config) as engine:
        app = create_app(engine.engine, ServerSettings())
        server = app.state.server
        admission = server.models.first.admission
        async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=120) as http:
            host, port = url.removeprefix("http://").split(":")
            for turns in range(0, 4_000, 200):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
                for _ in range(turns):
                    await asyncio.sleep(0)
                writer.close()
            answer = await http.post(CHAT, json=asked(CHAT, *parts(CHAT, SIZES[0]), **GREEDY))
            assert said(CHAT, answer.json()) == told[1].text
            await engine.until_all_is_free()
            await engine.until(lambda: not admission.queued_requests)
            assert (server.images.held, server.bodies.held) == (0, 0)


async def test_an_image_processor_that_cannot_be_used_is_told_at_the_start(
    tmp_path: Path, config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "model"
    save_checkpoint(directory, "mistral3")
    (directory / "preprocessor_config.json").write_text('{"image_processor_type": "NoSuch"}')
    async with served("thread", tmp_path, **{**config, "model": str(directory)}) as engine:
        [told] = [one for one in caplog.messages if "images can't be prepared" in one]
        assert "NoSuch" in told or "image processor" in told
        app = create_app(engine.engine, ServerSettings())
        async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
            refused = await http.post(CHAT, json=asked(CHAT, *parts(CHAT, SIZES[0])))
            assert refused.status_code in (400, 501)
            assert (await http.post(CHAT, json=asked(CHAT, *parts(CHAT)))).status_code == 200
