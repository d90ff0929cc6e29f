"""Prompts with images: what they may be given as, and which of their tokens are images."""

from __future__ import annotations

import base64
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dovetail.config.limits import Limits
from dovetail.errors import RequestError
from dovetail.front.chat import ChatFrontEnd, ChatOptions
from dovetail.front.media.prompts import ImagePrompt, ImagePrompts, MediaPrompt
from dovetail.front.prompts import PromptEncoder, with_images
from tests.front.media import files
from tests.front.media.checkpoints import image_prompts, own_tokenizer
from tests.media.checkpoints import KINDS

NAME = "qwen3_vl"
TOKEN = KINDS[NAME].prompt_token
PICTURE = files.picture(40, 24)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImagePrompts:
    return image_prompts(NAME, tmp_path_factory.mktemp("model"))


@pytest.fixture
def encoder(images: ImagePrompts) -> PromptEncoder:
    return PromptEncoder(lambda: own_tokenizer(NAME), Limits(), 10_000, images=images)


def made(encoder: PromptEncoder, prompt: Any) -> MediaPrompt:
    done = encoder.tokenized(prompt)
    assert isinstance(done, MediaPrompt)
    return done


def of(image: Any, prompt: str | list[int] = TOKEN) -> dict[str, Any]:
    key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    return {key: prompt, "multi_modal_data": {"image": image}}


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def test_the_same_picture_is_one_item_however_it_is_given(
    encoder: PromptEncoder, tmp_path: Path
) -> None:
    data = files.file_of(PICTURE)
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    given = [
        PICTURE,
        data,
        bytearray(data),
        memoryview(data),
        path,
        str(path),
        f"file://{path}",
        data_url(data),
        data_url(data).replace("data:image/png", "DATA:"),
        data_url(data).replace("image/png", "image/png;name=a%20b.png;charset=utf-8"),
        data_url(data).replace("image/png", "text/html"),  # its content says what it is
        files.file_of(PICTURE, "WEBP", lossless=True),
        files.file_of(PICTURE.convert("RGBA")),
        Image.open(io.BytesIO(data)),
        [PICTURE],
        (data,),
    ]
    items = [made(encoder, of(one)).media for one in given]
    assert len({item.digest for [item] in items}) == 1
    [other] = made(encoder, of(files.picture(40, 24, seed=1))).media
    assert other.digest != items[0][0].digest


def test_a_picture_that_exif_turns_is_the_turned_one(encoder: PromptEncoder) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    [turned] = made(encoder, of(files.file_of(PICTURE, exif=exif))).media
    [upright] = made(encoder, of(PICTURE.transpose(Image.Transpose.ROTATE_270))).media
    assert turned.digest == upright.digest


def test_options_of_the_processor_are_of_the_digest(encoder: PromptEncoder) -> None:
    [plain] = made(encoder, of(PICTURE)).media
    [fewer] = made(encoder, of(PICTURE) | {"mm_processor_kwargs": {"max_pixels": 256}}).media
    assert fewer.rows < plain.rows
    assert fewer.digest != plain.digest
    [least] = made(encoder, of(PICTURE) | {"mm_processor_kwargs": {"min_pixels": 2000}}).media
    assert least.rows > plain.rows
    with pytest.raises(RequestError, match=r"'patch_size': the options .* size, min_pixels, max"):
        made(encoder, of(PICTURE) | {"mm_processor_kwargs": {"patch_size": 1}})


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (7, "must be an image of Pillow, a path, the bytes"),
        ({"url": "x"}, "must be an image of Pillow"),
        ("/nowhere/picture.png", "No such file"),
        (Path("/"), "/"),
        ("data:image/png,abc", "must be data:image/…;base64"),
        ("data:image/png;base64,@@@", "isn't valid base64"),
        ("data:image/png;base64,iVBO\nRw0K", "isn't valid base64"),
        ("data:image/png;base64,iVBORw%3D%3D", "isn't valid base64"),
        ("data:image/png;base64,iVBORw", "isn't valid base64"),
        ("data:image/png;" + "a=b;" * 1000 + "base64,iVBORw==", "must be data:image/…;base64"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "must be one of JPEG, PNG"),
        ("https://example.com/a.png", "media.hosts"),
        ("ftp://example.com/a.png", "must be a data: URL"),
        (b"", "it must be one of JPEG, PNG, WEBP, GIF"),
        (Image.new("RGB", (0, 5)), "must have from 1 to"),
        (Image.new("RGB", (5, 3000)), "at most 200 times"),
    ],
    ids=range(16),
)
def test_what_is_no_image_is_refused(encoder: PromptEncoder, image: Any, why: str) -> None:
    with pytest.raises(RequestError, match=r"^multi_modal_data: the image") as refused:
        made(encoder, of(image))
    assert why in str(refused.value)


def test_a_named_pipe_holds_nothing_up(encoder: PromptEncoder, tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RequestError, match="isn't a file"):
        made(encoder, of(tmp_path / "pipe"))


def test_files_are_bounded_before_they_are_read(tmp_path: Path) -> None:
    limits = Limits(max_image_bytes=1000)
    few = image_prompts(NAME, tmp_path / "model", limits)
    encoder = PromptEncoder(lambda: own_tokenizer(NAME), limits, 10_000, images=few)
    (tmp_path / "large").write_bytes(bytes(1001))
    for image in (bytes(1001), tmp_path / "large", data_url(bytes(1001)), data_url(bytes(9999))):
        with pytest.raises(RequestError, match=r"at most 1,000 bytes \(limits\.max_image_bytes\)"):
            made(encoder, of(image))


def test_pixels_and_numbers_are_bounded(tmp_path: Path) -> None:
    limits = Limits(max_image_pixels=500, max_images=2)
    few = image_prompts(NAME, tmp_path, limits)
    encoder = PromptEncoder(lambda: own_tokenizer(NAME), limits, 10_000, images=few)
    for image in (PICTURE, files.file_of(PICTURE)):
        with pytest.raises(RequestError, match=r"500 pixels \(limits\.max_image_pixels\)"):
            made(encoder, of(image))
    small = files.picture(20, 20)
    assert len(made(encoder, of([small] * 2, TOKEN * 2)).media) == 2
    with pytest.raises(RequestError, match=r"at most 2 images \(limits\.max_images\), got 3"):
        made(encoder, of([small] * 3, TOKEN * 3))


def test_an_image_with_more_rows_than_the_device_keeps_is_refused(tmp_path: Path) -> None:
    few = image_prompts(NAME, tmp_path / "a", cache_rows=5)
    encoder = PromptEncoder(lambda: own_tokenizer(NAME), Limits(), 10_000, images=few)
    with pytest.raises(RequestError, match=r"media\.cache_rows"):
        made(encoder, of(PICTURE))
    few = image_prompts(
        "llava", tmp_path / "b", cache_rows=15
    )  # whose processor doesn't tell before
    encoder = PromptEncoder(lambda: own_tokenizer("llava"), Limits(), 10_000, images=few)
    with pytest.raises(RequestError, match=r"it has 16 rows, and at most 15 fit \(media\.cache"):
        made(encoder, of(PICTURE, "<image>"))


def test_images_are_prepared_only_as_long_as_they_fit_the_model(tmp_path: Path) -> None:
    few = image_prompts(NAME, tmp_path, max_model_len=40)
    encoder = PromptEncoder(lambda: own_tokenizer(NAME), Limits(), 40, images=few)
    [item] = made(encoder, of(PICTURE)).media
    assert item.rows == 15
    with pytest.raises(RequestError, match=r"images have 45 tokens or more, .*max_model_len 40"):
        made(encoder, of([PICTURE] * 3 + [b"never read"], TOKEN * 4))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_prompt_has_a_placeholder_for_each_image(encoder: PromptEncoder, count: int) -> None:
    ids = own_tokenizer(NAME).encode(TOKEN * count)
    for prompt in (TOKEN * count, ids):
        with pytest.raises(RequestError, match=f"it has {count}, and there are 2 images"):
            made(encoder, of([PICTURE] * 2, prompt))


def test_images_and_options_may_be_given_beside_a_prompt(encoder: PromptEncoder) -> None:
    fewer = {"max_pixels": 256}
    data = {"image": PICTURE}
    expected = made(encoder, of(PICTURE) | {"mm_processor_kwargs": fewer})
    ids = own_tokenizer(NAME).encode(TOKEN)
    for prompt in (
        with_images(TOKEN, data, fewer),
        with_images(ids, data, fewer),
        with_images({"prompt": TOKEN}, data, fewer),
        with_images(of(PICTURE), None, fewer),
        with_images(of(PICTURE) | {"mm_processor_kwargs": {"max_pixels": 9999}}, None, fewer),
    ):
        assert made(encoder, prompt).media[0].digest == expected.media[0].digest
    assert with_images(TOKEN, None, fewer) == TOKEN
    with pytest.raises(RequestError, match="the prompt and the call both have some"):
        with_images(of(PICTURE), data, {})
    for options in (5, [], "max_pixels"):
        with pytest.raises(RequestError, match="mm_processor_kwargs must be a mapping"):
            made(encoder, of(PICTURE) | {"mm_processor_kwargs": options or [1]})


def test_an_image_that_is_too_small_for_the_encoder_is_refused(tmp_path: Path) -> None:
    lines = image_prompts("mistral3", tmp_path)
    encoder = PromptEncoder(lambda: own_tokenizer("mistral3"), Limits(), 10_000, images=lines)
    with pytest.raises(RequestError, match=r"too small for the model: .* makes 1 rows of it"):
        made(encoder, of(files.picture(5, 7), "[IMG]"))
    assert made(encoder, of(files.picture(9, 7), "[IMG]")).media[0].rows == 2


def test_an_image_has_no_more_lines_than_the_encoder(tmp_path: Path) -> None:
    lines = image_prompts("mistral3", tmp_path)
    encoder = PromptEncoder(lambda: own_tokenizer("mistral3"), Limits(), 10_000, images=lines)
    large = of(files.picture(90, 40), "[IMG]")
    assert made(encoder, large | {"mm_processor_kwargs": {"size": {"longest_edge": 64}}})
    with pytest.raises(RequestError, match="at most 64 pixels on a side"):
        made(encoder, large | {"mm_processor_kwargs": {"size": {"longest_edge": 72}}})


def test_options_are_those_of_conversations_too(chat: ChatFrontEnd, encoder: PromptEncoder) -> None:
    prompt = chat.prompt([message(IMAGE)])
    [fewer] = made(encoder, with_images(prompt, None, {"max_pixels": 256})).media
    assert fewer.rows < made(encoder, prompt).media[0].rows


def test_a_message_that_goes_on_may_have_images_before_it(chat: ChatFrontEnd) -> None:
    options = ChatOptions(continue_final_message=True)
    prompt = chat.prompt([message(IMAGE, TOKEN), message("It is", role="assistant")], options)
    assert isinstance(prompt, ImagePrompt)
    assert prompt.text == f"<user>{TOKEN}{TOKEN}<assistant>It is"
    assert prompt.occurrences == (0,)
    with pytest.raises(RequestError, match="the last message ends with an image"):
        chat.prompt([message(IMAGE, role="assistant")], options)


def test_token_ids_may_have_images(encoder: PromptEncoder) -> None:
    text = f"Look: {TOKEN} and {TOKEN}."
    others = [PICTURE, files.picture(20, 20)]
    by_text = made(encoder, of(others, text))
    by_ids = made(encoder, of(others, own_tokenizer(NAME).encode(text)))
    assert by_text.text == text
    assert by_ids.text is None
    assert list(by_text.token_ids) == list(by_ids.token_ids)
    assert [item.runs for item in by_text.media] == [item.runs for item in by_ids.media]


@pytest.mark.parametrize("kind", ["audio", "video", "audio_url"])
def test_audio_and_video_are_refused_with_where_they_stand(
    encoder: PromptEncoder, kind: str
) -> None:
    for encodes in (encoder, PromptEncoder(lambda: own_tokenizer(NAME), Limits(), 10_000)):
        with pytest.raises(RequestError, match='see "Audio and video" in the roadmap'):
            encodes.tokenized({"prompt": "a", "multi_modal_data": {kind: b"abc"}})


def test_an_engine_without_images_says_so() -> None:
    encoder = PromptEncoder(lambda: own_tokenizer(NAME), Limits(), 10_000)
    with pytest.raises(RequestError, match="this engine takes no images"):
        encoder.tokenized(of(PICTURE))


def test_truncated_prompts_have_no_images(encoder: PromptEncoder) -> None:
    with pytest.raises(RequestError, match="truncate_prompt_tokens"):
        encoder.tokenized(of(PICTURE), cut=True)


def test_images_cost_their_share_of_a_server(encoder: PromptEncoder) -> None:
    plain = encoder.source(["ab", "cd"])
    shown = encoder.source([of(PICTURE, f"{TOKEN}"), "cd"])
    assert shown.cost > plain.cost + 10_000
    assert [part for part, _ in shown.slices(10_000)] == [slice(0, 1), slice(1, 2)]
    assert [type(one).__name__ for one in shown.all()] == ["MediaPrompt", "TokenizedText"]


# Conversations


@pytest.fixture
def chat(images: ImagePrompts) -> Any:
    front = ChatFrontEnd(own_tokenizer(NAME), Limits(), 10_000, images=images, local=True)
    yield front
    front.close()


def message(*parts: Any, role: str = "user") -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": role, "content": content}


IMAGE = {"type": "image", "image": PICTURE}


def test_parts_may_be_images_in_any_of_their_forms(chat: ChatFrontEnd) -> None:
    url = data_url(files.file_of(PICTURE))
    for part in (
        IMAGE,
        {"type": "image", "url": url},
        {"type": "image_pil", "image_pil": PICTURE},
        {"type": "image_url", "image_url": url},
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "image_url", "image_url": {"url": url}, "detail": "auto"},
    ):
        prompt = chat.prompt([message("Look:", part, "what?")])
        assert isinstance(prompt, ImagePrompt)
        assert prompt.text == f"<user>Look:{TOKEN}what?<assistant>"
        assert prompt.occurrences == (0,)
    with pytest.raises(RequestError, match="detail must be one of auto, low, high"):
        chat.prompt([message({"type": "image_url", "image_url": {"url": url, "detail": "x"}})])


def test_over_http_neither_paths_nor_objects_are_images(images: ImagePrompts) -> None:
    chat = ChatFrontEnd(own_tokenizer(NAME), Limits(), 10_000, images=images)
    for value in ("/etc/passwd", "file:///etc/passwd", "picture.png", PICTURE, b"abc", None, 5):
        for kind in ("image", "image_url", "image_pil"):
            with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\]"):
                chat.prompt([message({"type": kind, kind: value})])
    chat.close()


def test_placeholders_that_somebody_typed_are_text(
    chat: ChatFrontEnd, images: ImagePrompts
) -> None:
    rng = random.Random(0)
    for _ in range(12):
        parts: list[Any] = [
            rng.choice([IMAGE, TOKEN, "a", f"{TOKEN}{TOKEN}b"]) for _ in range(rng.randint(1, 6))
        ]
        conversation = [message(*parts), message(TOKEN, role="assistant"), message(IMAGE)]
        prompt = chat.prompt(conversation)
        assert isinstance(prompt, ImagePrompt)
        expected = []
        seen = 0
        for part in [*parts, TOKEN, IMAGE]:
            if part is IMAGE:
                expected.append(seen)
            seen += 1 if part is IMAGE else part.count(TOKEN)
        assert list(prompt.occurrences) == expected
        assert prompt.text is not None
        assert prompt.text.count(TOKEN) == seen
        done = images.prepared(prompt)
        assert len(done.media) == len(expected)
        rows = sum(item.rows for item in done.media)
        assert list(done.token_ids).count(images.token_id) == rows + seen - len(expected)
        for item in done.media:
            [(start, rows)] = item.runs
            assert set(done.token_ids[start : start + rows]) == {images.token_id}


def test_typed_placeholders_are_text_wherever_a_template_puts_them(
    images: ImagePrompts,
) -> None:
    """As LLaVA's templates do, this one writes images first, and tools and thoughts at the end."""
    template = (
        "{% for message in messages %}"
        "{% for part in message.content if part.type == 'image' %}%IMAGE%{% endfor %}"
        "{% for part in message.content if part.type == 'text' %}{{ part.text | trim }}{% endfor %}"
        "{% endfor %}{{ name }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    ).replace("%IMAGE%", TOKEN)
    chat = ChatFrontEnd(own_tokenizer(NAME), Limits(), 10_000, images=images, local=True)
    tool = {"type": "function", "function": {"name": "f", "description": f"see {TOKEN}"}}
    options = ChatOptions(
        tools=[tool], chat_template=template, chat_template_kwargs={"name": TOKEN}
    )
    prompt = chat.prompt([message(f" {TOKEN} ", IMAGE, "b"), message(TOKEN, IMAGE)], options)
    assert isinstance(prompt, ImagePrompt)
    assert prompt.occurrences == (0, 2)
    assert prompt.text is not None
    assert prompt.text.startswith(f"{TOKEN}{TOKEN}b{TOKEN}{TOKEN}{TOKEN}")
    assert f"see {TOKEN}" in prompt.text
    chat.close()


def test_a_template_may_write_images_otherwise_than_as_their_token(tmp_path: Path) -> None:
    images = image_prompts("aya_vision", tmp_path)
    chat = ChatFrontEnd(own_tokenizer("aya_vision"), Limits(), 10_000, images=images, local=True)
    parts = [IMAGE, "<image>", images.text, IMAGE, "a<image>"]
    prompt = chat.prompt([message(*parts)])
    assert isinstance(prompt, ImagePrompt)
    token = "<|IMG_PATCH|>"
    assert prompt.text == f"<user>{token}<image>{token}{token}a<image><assistant>"
    assert prompt.occurrences == (0, 2)
    first, second = images.prepared(prompt).media
    assert first.rows == second.rows
    chat.close()


@pytest.mark.parametrize(
    ("template", "times"),
    [
        ("{% for m in messages %}{{ m.content[0].text }}{% endfor %}", 0),
        ("{% for m in messages %}{{ m.content | length }}%IMAGE%%IMAGE%{% endfor %}", 2),
    ],
)
def test_a_template_that_leaves_images_out_is_told(
    chat: ChatFrontEnd, template: str, times: int
) -> None:
    options = ChatOptions(chat_template=template.replace("%IMAGE%", TOKEN))
    with pytest.raises(RequestError, match=rf"writes .* {times} times, .* has 1 images"):
        chat.prompt([message("a", IMAGE)], options)


def test_templates_that_know_no_parts_get_placeholders_in_the_text(chat: ChatFrontEnd) -> None:
    options = ChatOptions(chat_template="{% for m in messages %}[{{ m.content + '' }}]{% endfor %}")
    prompt = chat.prompt([message("a", IMAGE, TOKEN), {"role": "user", "content": TOKEN}], options)
    assert isinstance(prompt, ImagePrompt)
    assert prompt.text == f"[a\n{TOKEN}\n{TOKEN}][{TOKEN}]"
    assert prompt.occurrences == (0,)


def test_conversations_without_images_are_what_they_were(chat: ChatFrontEnd) -> None:
    without = ChatFrontEnd(own_tokenizer(NAME), Limits(), 10_000)
    conversation = [message(f"see {TOKEN}")]
    assert chat.prompt(conversation) == without.prompt(conversation)
    without.close()


def test_a_long_data_url_is_no_long_conversation(images: ImagePrompts) -> None:
    url = data_url(files.file_of(files.picture(300, 300)))
    chat = ChatFrontEnd(own_tokenizer(NAME), Limits(), 64, images=images)
    part = {"type": "image_url", "image_url": {"url": url}}
    assert isinstance(chat.prompt([message(part)]), ImagePrompt)
    with pytest.raises(RequestError, match="conversation has more than"):
        chat.prompt([message(part, "x" * 10_000)])
    chat.close()


def test_the_rows_of_an_item_are_where_its_runs_say(tmp_path: Path) -> None:
    images = image_prompts("mistral3", tmp_path)
    encoder = PromptEncoder(lambda: own_tokenizer("mistral3"), Limits(), 10_000, images=images)
    done = made(encoder, of(PICTURE, "a[IMG]b"))
    [item] = done.media
    ids = np.asarray(done.token_ids)
    assert len(item.runs) > 1
    assert np.flatnonzero(ids == images.token_id).tolist() == [
        place for start, rows in item.runs for place in range(start, start + rows)
    ]
