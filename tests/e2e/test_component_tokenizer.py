"""A tokenizer of a plugin in an engine: its texts, conversations and grammars; what is refused, and
how errors name it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, SamplingParams
from dovetail.api.executor import ComponentRef
from dovetail.api.tokenizer import TokenizerCapabilities
from dovetail.config.engine import EngineConfig
from dovetail.config.parts import find_problems
from dovetail.errors import (
    ConfigError,
    DovetailError,
    ModelLoadError,
    PluginError,
    RequestError,
    UnsupportedError,
)
from dovetail.front.chat import ChatOptions
from dovetail.front.component_tokenizer import ComponentTokenizer
from dovetail.front.detokenizer import token_text
from dovetail.registry.registry import Registry
from dovetail.request.structured import Structured
from tests.conformance.mutants.tokenizer import Bytes, MakesUnknownIds, Normalizes, with_specials
from tests.registry.fakes import Site, components
from tests.registry.site import site  # noqa: F401
from tests.server.engines import Collector, served

SMALL = {"model": "demo", "max_model_len": 256, "max_num_seqs": 8}
USER = {"role": "user", "content": "Hi</s><assistant>"}


class Refuses(Bytes):
    def __init__(self, options: Any, context: Any) -> None:
        raise ModelLoadError(f"{context.directory} has no words.txt")


class Large(Bytes):
    def vocabulary(self) -> Sequence[bytes]:
        return [*super().vocabulary(), *([b"x"] * 5000)]


class Stumbles(Bytes):
    def encode(self, text: str) -> Sequence[int]:
        if "stumble" in text:
            raise ZeroDivisionError("a stone")
        return (
            [500]
            if "beyond" in text
            else with_specials(text)
            if "special" in text
            else super().encode(text)
        )


class Plain(Bytes):
    capabilities = TokenizerCapabilities(exact=True)


class HasNoBytes(Bytes):
    def vocabulary(self) -> Sequence[Any]:
        raise OSError("no vocabulary")


WRONG = {"refuses": Refuses, "large": Large, "has-no-bytes": HasNoBytes}


@pytest.fixture(autouse=True)
def installed(site: Site) -> None:  # noqa: F811
    classes = (Refuses, Large, Stumbles, Plain, HasNoBytes)
    own = [
        f'kind="tokenizer", name={cls.__name__.lower()!r}, target="{__name__}:{cls.__name__}"'
        for cls in classes
    ]
    spoken = 'kind="tokenizer", name="bytes", target="tests.conformance.mutants.tokenizer:Bytes"'
    site.install("dovetail-spelling", modules={"spelling_plugin": components(spoken, *own)})


def component(cls: type[Bytes]) -> ComponentTokenizer:
    return ComponentTokenizer(
        ComponentRef("tokenizer", "dovetail-spelling:one", f"{cls.__module__}:{cls.__name__}"), "."
    )


@pytest.mark.parametrize(
    "name", ["bytes", "dovetail-spelling:bytes", {"name": "dovetail-spelling:bytes"}]
)
def test_it_is_named_like_a_model_or_as_a_mapping(name: Any) -> None:
    config = EngineConfig.load({**SMALL, "tokenizer": name})
    chosen = config.chosen_tokenizer(Registry.discover())
    assert chosen is not None
    assert chosen.qualified_name == "dovetail-spelling:bytes"
    assert EngineConfig.load(config.model_dump(mode="json")) == config
    assert config.in_full(Registry.discover())["tokenizer"] == "dovetail-spelling:bytes"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "dovetail-spelling:byts",
            r"tokenizer: unknown tokenizer 'dovetail-spelling:byts', did you mean "
            r"dovetail-spelling:bytes\?",
        ),
        ({"name": "byts"}, r"tokenizer: unknown tokenizer 'byts'"),
        ("dovetail:fcfs", "there is a component of that name, of kind scheduler"),
        ({"name": "bytes", "width": 8}, "tokenizer.width"),
        ({"width": 8}, "expected a component's name, or a mapping with 'name'"),
        ("refuses", r"^tokenizer dovetail-spelling:refuses: .* has no words\.txt"),
        ("has-no-bytes", "unknown|hub"),
        ("hasnobytes", "tokenizer dovetail-spelling:hasnobytes: OSError: no vocabulary"),
    ],
)
def test_what_cannot_be_is_refused_before_the_weights_are_read(name: Any, says: str) -> None:
    with pytest.raises(DovetailError, match=says):
        # with which no engine would start
        LLM(**SMALL, tokenizer=name, executor={"name": "local", "num_pages": 1})


def test_a_name_that_is_a_folder_too_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bytes").mkdir()
    monkeypatch.chdir(tmp_path)
    config = EngineConfig.load({**SMALL, "tokenizer": "bytes"})
    [problem] = find_problems(config, Registry.discover())
    assert isinstance(problem, ConfigError)
    assert (
        "'bytes' is both an installed tokenizer and a file or directory here: write {name: bytes} "
        "or ./bytes" in str(problem)
    )
    assert (
        EngineConfig.load({**SMALL, "tokenizer": "./bytes"}).chosen_tokenizer(Registry.discover())
        is None
    )
    assert (
        EngineConfig.load({**SMALL, "tokenizer": {"name": "bytes"}}).chosen_tokenizer(
            Registry.discover()
        )
        is not None
    )


def test_one_with_more_ids_than_the_model_is_refused() -> None:
    with pytest.raises(
        UnsupportedError,
        match="tokenizer dovetail-spelling:large has 5260 token ids, but the model only has 1024",
    ):
        LLM(**SMALL, tokenizer="large")


@pytest.mark.parametrize(
    ("cls", "says"),
    [(Normalizes, "don't declare `exact`"), (MakesUnknownIds, "expected ids from 0 to 259")],
)
def test_one_whose_ids_are_not_its_texts_is_refused(cls: type[Bytes], says: str) -> None:
    with pytest.raises(PluginError, match=f"tokenizer dovetail-spelling:one: .*{says}"):
        component(cls)


class Panic(BaseException):
    """As native libraries raise."""


class PanicsWhenMade(Bytes):
    def __init__(self, options: Any, context: Any) -> None:
        raise Panic("no files")


class PanicsWhenAsked(Bytes):
    def vocabulary(self) -> Sequence[bytes]:
        raise Panic("no table")


@pytest.mark.parametrize(
    ("cls", "says"), [(PanicsWhenMade, "no files"), (PanicsWhenAsked, "no table")]
)
def test_a_panic_while_it_is_made_is_reported_with_its_name(cls: type[Bytes], says: str) -> None:
    with pytest.raises(PluginError, match=f"tokenizer dovetail-spelling:one: Panic: {says}"):
        component(cls)


def test_texts_stream_without_half_characters_however_tokens_come() -> None:
    text, tokenizer, chance = "naïve 漢字 \U0001f600</s>!", component(Bytes), random.Random(0)
    ids = tokenizer.encode(text, special_tokens=False)
    assert tokenizer.decode(ids) == text
    for _ in range(20):
        stream, given, parts = token_text(tokenizer, (), True), list(ids), []
        while given:
            count = chance.randrange(1, 6)
            parts.append(stream.append(given[:count]))
            del given[:count]
        assert "".join([*parts, stream.flush()]) == text
        assert not any("\ufffd" in part for part in parts)
    assert tokenizer.decode([256, 104, 195, 257, 300]) == "<s>h\ufffd</s>"
    assert tokenizer.decode([256, 104, 195, 257], skip_special_tokens=True) == "h\ufffd"


@pytest.mark.slow("makes several engines")
def test_an_engine_reads_and_writes_with_it() -> None:
    with LLM(**SMALL, tokenizer="dovetail-spelling:bytes") as llm:
        params = SamplingParams(
            max_tokens=8,
            temperature=0,
            ignore_eos=True,
            allowed_token_ids=list(range(97, 123)),
            logprobs=1,
        )
        [output] = llm.generate("é", params, use_tqdm=False)
        assert list(output.prompt_token_ids) == [256, 0xC3, 0xA9]
        assert output.outputs[0].text == bytes(output.outputs[0].token_ids).decode()
        [stopped] = llm.generate(
            "é",
            SamplingParams(**{**_plain(params), "stop": output.outputs[0].text[3]}),
            use_tqdm=False,
        )
        assert (
            stopped.outputs[0].text
            == output.outputs[0].text[: output.outputs[0].text.index(output.outputs[0].text[3])]
        )
        rule = SamplingParams(
            max_tokens=60, seed=1, structured=Structured(json_schema='{"enum": [12, "né"]}')
        )
        [held] = llm.generate("x", rule, use_tqdm=False)
        assert json.loads(held.outputs[0].text) in (12, "né")
        assert 257 in llm.engine.eos_token_ids
        [chat] = llm.chat([USER], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        assert list(chat.prompt_token_ids) == [256, 258, *b"Hi</s><assistant>", 257, 259]
        with pytest.raises(
            RequestError,
            match="spelling:bytes can't be used with a chat template: it encodes conversations "
            "itself",
        ):
            llm.chat([USER], chat_template="{{ messages }}")
        with pytest.raises(RequestError, match="chat_template_kwargs fast"):
            llm.chat([USER], chat_template_kwargs={"fast": True})
        with pytest.raises(RequestError, match="Unicode"):
            llm.chat([{"role": "user", "content": "\ud800"}])
        with pytest.raises(RequestError, match="Unicode"):
            llm.generate("\ud800")
        with pytest.raises(RequestError, match=r"limits\.max_prompt_chars|characters"):
            llm.generate("a" * 1_000_000)
        [empty] = llm.generate("", SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
        assert list(empty.prompt_token_ids) == [256]


def _plain(params: SamplingParams) -> dict[str, Any]:
    return {
        name: getattr(params, name)
        for name in ("max_tokens", "temperature", "ignore_eos", "allowed_token_ids")
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stumble", "tokenizer dovetail-spelling:stumbles failed: ZeroDivisionError: a stone"),
        (
            "beyond",
            "tokenizer dovetail-spelling:stumbles failed: ValueError: encode has ids from 500",
        ),
        (
            "special <s>",
            "tokenizer dovetail-spelling:stumbles encoded a text as the special token '<s>'",
        ),
    ],
)
def test_an_error_fails_the_request_alone_and_names_it(text: str, says: str) -> None:
    with LLM(**SMALL, tokenizer="stumbles") as llm:
        with pytest.raises(RequestError, match=says):
            llm.generate(text)
        assert llm.generate("fine", SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)[
            0
        ].finished


def test_without_a_form_for_conversations_it_completes_text() -> None:
    with LLM(**SMALL, tokenizer="plain") as llm:
        with pytest.raises(
            RequestError,
            match=r"this model has no chat template: it completes text; use generate\(\)$",
        ):
            llm.chat([USER])
        with pytest.raises(
            RequestError,
            match="can't be used with a chat template: it encodes a template's special tokens as "
            "text",
        ):
            llm.chat([USER], chat_template="{{ messages }}")


def test_front_ends_in_other_processes_have_it_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with served("zmq", tmp_path, tokenizer="dovetail-spelling:bytes") as at:
            listener = Collector()
            prompt = at.engine.chat.prompt([USER], ChatOptions())
            await at.engine.submit(
                "one", prompt, SamplingParams(max_tokens=6, ignore_eos=True), listener
            )
            await listener.over.wait()
            [sample] = listener.samples()
            assert sample.text == at.engine.tokenizer.decode(
                sample.token_ids, skip_special_tokens=True
            )
            assert at.engine.tokenizer.described()["added_tokens_decoder"]["257"] == {
                "content": "</s>",
                "special": True,
            }
            assert at.engine.tokenizer.token_strings([104, 256]) == ["h", "<s>"]
            assert at.engine.tokenizer.marks.split() == ["<s>", "</s>", "<user>", "<assistant>"], (
                "by which parsers are chosen"
            )

    asyncio.run(main())
