"""Images in the calls of `LLM` and `AsyncLLMEngine`: how they are given, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, AsyncLLMEngine, LLMEngine, SamplingParams
from dovetail.errors import RequestError
from dovetail.front import prompts
from dovetail.request.pooling import PoolingParams
from dovetail.request.sampling_params import BeamSearchParams
from tests.media.checkpoints import checkpoint, picture, written

pytestmark = [
    pytest.mark.slow("makes a checkpoint, an engine and processes that prepare images"),
    pytest.mark.usefixtures("shared_image_processes"),
]
NAME = "llava"
PICTURE = picture(40, 30)
GREEDY = SamplingParams(temperature=0, max_tokens=6)
CONFIG: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(checkpoint(NAME)), **CONFIG) as llm:
        yield llm


def tokens(llm: LLM, prompts: Any, **options: Any) -> list[tuple[int, ...]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, **options)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def prompt(image: Any = PICTURE, text: str = f"see {written(NAME)}!") -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": image}}


def png() -> bytes:
    file = io.BytesIO()
    PICTURE.save(file, "PNG")
    return file.getvalue()


def test_an_image_is_given_in_any_form(llm: LLM, tmp_path: Path) -> None:
    [expected] = tokens(llm, prompt())
    path = tmp_path / "picture.png"
    path.write_bytes(png())
    url = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    for image in (png(), path, str(path), url, [PICTURE]):
        assert tokens(llm, prompt(image)) == [expected]
    text = prompt()["prompt"]
    assert tokens(llm, text, multi_modal_data={"image": path}) == [expected]
    ids = llm.engine.tokenizer.encode(text)
    assert tokens(llm, ids, multi_modal_data={"image": path}) == [expected]
    given = {"prompt_token_ids": ids, "multi_modal_data": {"image": path}}
    assert tokens(llm, given) == [expected]
    assert tokens(llm, [text, "see"], multi_modal_data=[{"image": path}, None])[0] == expected


def test_prompts_of_several_parts_are_answered_in_order(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{written(NAME)} {number}" for number in range(5)]
    expected = [tokens(llm, prompt(text=text))[0] for text in texts]
    monkeypatch.setattr(prompts, "IMAGES_AT_ONCE", 2)
    assert tokens(llm, [prompt(text=text) for text in texts]) == expected


def test_an_image_that_cant_be_used_aborts_the_prompts_before_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "IMAGES_AT_ONCE", 1)
    endless = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    with pytest.raises(RequestError, match="by its content"):
        llm.generate([prompt(), prompt(b"no image")], endless, use_tqdm=False)
    assert tokens(llm, prompt())
    assert not llm.engine.has_unfinished_requests()


def test_another_image_has_another_answer_of_the_same_length(llm: LLM) -> None:
    one, other = llm.generate([prompt(), prompt(picture(40, 30, seed=7))], GREEDY, use_tqdm=False)
    assert one.prompt_token_ids == other.prompt_token_ids
    assert one.prompt == prompt()["prompt"]
    assert len(one.prompt_token_ids or ()) > len(llm.engine.tokenizer.encode(one.prompt or ""))


def test_conversations_have_images_where_their_template_has_them(llm: LLM) -> None:
    parts = [{"type": "image", "image": PICTURE}, {"type": "text", "text": "what?"}]
    [answer] = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
    assert answer.prompt is not None
    assert tokens(llm, prompt(text=answer.prompt)) == [tuple(answer.outputs[0].token_ids)]


def test_one_wrong_image_refuses_its_call_alone(llm: LLM) -> None:
    [expected] = tokens(llm, prompt())
    for wrong, why in (
        (prompt(b"GIF89a"), "damaged"),
        (prompt(text="no placeholder"), "it has 0, and there are 1 images"),
        (prompt([PICTURE] * 17, written(NAME) * 17), r"limits\.max_images"),
        ({"prompt": "a", "multi_modal_data": {"video": "a.mp4"}}, "roadmap"),
        (prompt() | {"mm_processor_kwargs": {"size": 5}}, "the options of this model are none"),
    ):
        with pytest.raises(RequestError, match=why):
            tokens(llm, [prompt(), wrong])
    assert tokens(llm, prompt()) == [expected]
    assert not llm.engine.has_unfinished_requests()


def test_what_takes_no_images_says_so(llm: LLM) -> None:
    with pytest.raises(RequestError, match="beam search takes no images"):
        llm.beam_search([prompt()], BeamSearchParams(beam_width=2, max_tokens=2))
    with pytest.raises(RequestError, match=r"^truncate_prompt_tokens: a prompt with images"):
        llm.generate(prompt(), SamplingParams(truncate_prompt_tokens=5), use_tqdm=False)
    with pytest.raises(RequestError, match="only requests that generate take images"):
        llm.encode(prompt(), PoolingParams(task="embed"), use_tqdm=False)


def test_requests_of_an_engine_may_have_images(llm: LLM) -> None:
    [expected] = tokens(llm, prompt())
    with LLMEngine.from_config(str(checkpoint(NAME)), **CONFIG) as engine:
        engine.add_request("a", prompt(), GREEDY)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
    assert tuple(outputs[-1].outputs[0].token_ids) == expected


def test_an_event_loop_prepares_no_images(llm: LLM) -> None:
    [expected] = tokens(llm, prompt())

    async def answer(engine: AsyncLLMEngine, request_id: str) -> tuple[int, ...]:
        async for output in engine.generate(request_id, prompt(), GREEDY):
            last = output
        return tuple(last.outputs[0].token_ids)

    async def run() -> list[tuple[int, ...]]:
        async with AsyncLLMEngine.from_config(str(checkpoint(NAME)), **CONFIG) as engine:
            with pytest.raises(RequestError, match="damaged"):
                async for _ in engine.generate("wrong", prompt(b"GIF89a"), GREEDY):
                    pass
            return await asyncio.gather(*[answer(engine, str(place)) for place in range(4)])

    assert asyncio.run(run()) == [expected] * 4


def test_images_are_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    with (
        LLM(str(checkpoint(NAME)), language_model_only=True, **CONFIG) as llm,
        pytest.raises(RequestError, match=r"this engine takes no images: .*media\.images"),
    ):
        tokens(llm, prompt())
