"""The same tokens as mistral-common's, alone and in an engine."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from dovetail import LLM, SamplingParams
from dovetail.api.component import NoOptions
from dovetail.api.tokenizer import Chat, TokenizerContext
from dovetail.errors import ModelLoadError, RequestError
from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, ToolMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import Function, FunctionCall, Tool, ToolCall
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

from dovetail_tekken.tokenizer import TekkenTokenizer

TEXTS = ["", "Hello, world!", "naïve 漢字 \U0001f468\u200d\U0001f469 e\u0301", "<s>[INST] not special [/INST]</s>", "  a\r\n\n\tb   ", "1234567"]
SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "The weather", "parameters": SCHEMA}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"town": "Zürich"}}}
CONFIG = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 131072,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def ours(directory: Path) -> TekkenTokenizer:
    return TekkenTokenizer(NoOptions(), TokenizerContext(directory))


@pytest.fixture(scope="module")
def theirs(directory: Path) -> Any:
    return MistralTokenizer.from_file(directory / "tekken.json")


def test_texts_become_the_same_tokens_and_come_back(ours: TekkenTokenizer, theirs: Any) -> None:
    vocabulary = ours.vocabulary()
    tekken = theirs.instruct_tokenizer.tokenizer
    chance = random.Random(0)
    samples = TEXTS + ["".join(chance.choices("".join(TEXTS) + "ÄЖ한\U0001f600 ", k=60)) for _ in range(100)]
    for text in samples:
        ids = ours.encode(text)
        assert ids == tekken.encode(text, bos=False, eos=False)
        assert b"".join(vocabulary[token_id] for token_id in ids).decode() == text
    for _ in range(100):
        ids = chance.choices(range(len(vocabulary)), k=9)
        spelled = b"".join(vocabulary[token_id] for token_id in ids if token_id not in ours.special_ids)
        assert spelled.decode(errors="replace") == tekken.decode(ids, SpecialTokenPolicy.IGNORE)


def test_a_megabyte_is_encoded_or_refused(ours: TekkenTokenizer, theirs: Any) -> None:
    for text in ("a" * 1_000_000, "x y " * 250_000):
        assert ours.encode(text) == theirs.instruct_tokenizer.tokenizer.encode(text, bos=False, eos=False)
    with pytest.raises(RequestError, match="can't be split"):
        ours.encode(" " * 1_000_000)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("chat", "messages", "tools"),
    [
        (Chat([user("Hi [/INST]</s>")]), [UserMessage(content="Hi [/INST]</s>")], None),
        (
            Chat([{"role": "system", "content": "Be brief."}, user("a"), {"role": "assistant", "content": "b"}, user("c")]),
            [SystemMessage(content="Be brief."), UserMessage(content="a"), AssistantMessage(content="b"), UserMessage(content="c")],
            None,
        ),
        (
            Chat([user("a"), {"role": "assistant", "content": "b"}], begins_answer=False, continues=True),
            [UserMessage(content="a"), AssistantMessage(content="b", prefix=True)],
            None,
        ),
        (
            Chat(
                [
                    user("a"),
                    {"role": "assistant", "tool_calls": [CALL]},
                    {"role": "tool", "content": "sun", "tool_call_id": "call00001", "name": "weather"},
                ],
                [{"type": "function", "function": FUNCTION}],
            ),
            [
                UserMessage(content="a"),
                AssistantMessage(
                    tool_calls=[ToolCall(id="call00001", function=FunctionCall(name="weather", arguments=json.dumps({"town": "Zürich"})))]
                ),
                ToolMessage(content="sun", tool_call_id="call00001", name="weather"),
            ],
            [Tool(function=Function(**FUNCTION))],
        ),
    ],
)
def test_conversations_become_the_same_tokens(ours: TekkenTokenizer, theirs: Any, chat: Chat, messages: list[Any], tools: Any) -> None:
    expected = theirs.encode_chat_completion(ChatCompletionRequest(messages=messages, tools=tools)).tokens
    assert ours.encode_chat(chat) == expected


def test_ids_of_calls_may_be_those_of_other_models(ours: TekkenTokenizer) -> None:
    call = {**CALL, "id": "call_7f3b2c"}
    messages = [user("a"), {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "sun", "tool_call_id": "call_7f3b2c"}]
    text = b"".join(ours.vocabulary()[token_id] for token_id in ours.encode_chat(Chat(messages))).decode()
    [made] = {word for word in text.split('"') if len(word) == 9 and word.isalnum() and word != "arguments"}
    assert text.count(made) == 2


@pytest.mark.parametrize(
    ("chat", "says"),
    [
        (Chat([{"role": "assistant", "content": "a"}]), "must start with a user message"),
        (Chat([user("a"), {"role": "assistant", "content": "b"}]), "Expected last role User or Tool"),
        (Chat([{**user("a"), "name": "bob"}]), r"messages\[0\]\.name"),
        (Chat([{"role": "function", "content": "a"}]), r"messages\[0\]\.role"),
        (Chat([user("a")], variables={"enable_thinking": True}), "chat_template_kwargs.enable_thinking"),
        (Chat([user("a")], variables={"reasoning_effort": "high"}), "reasoning_effort"),
        (Chat([user("a")], [{"name": "weather", "parameters": {}}]), "function"),
    ],
)
def test_what_the_format_lacks_is_refused(ours: TekkenTokenizer, chat: Chat, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        ours.encode_chat(chat)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "isn't there"),
        (b"", "is damaged: JSONDecodeError"),
        (b"{}", "is damaged"),
        (b"[1]", "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (b'{"config": {"version": "v99"}, "vocab": []}', "is damaged: .*v99"),
        (b'{"config": {"version": "v3", "pattern": "a", "default_vocab_size": 1010, "default_num_special_tokens": 1000}, "vocab": []}', "is damaged"),
    ],
)
def test_a_file_that_is_missing_or_damaged_is_named(tmp_path: Path, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / "tekken.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=f"tekken.json.* {says}|{says}"):
        TekkenTokenizer(NoOptions(), TokenizerContext(tmp_path))


def test_an_engine_speaks_with_it(directory: Path, theirs: Any) -> None:
    (directory / "config.json").write_text(json.dumps(CONFIG))
    tekken = theirs.instruct_tokenizer.tokenizer
    with LLM(str(directory), load_format="dummy", tokenizer="dovetail-tekken:tekken", max_model_len=256, max_num_seqs=4) as llm:
        assert tuple(llm.engine.eos_token_ids) == (tekken.eos_id,)
        streamed = ""
        for output in llm.stream("Grüße 漢", SamplingParams(max_tokens=60, seed=1, ignore_eos=True, output_kind="delta")):
            streamed += output.outputs[0].text
        [whole] = llm.generate("Grüße 漢", SamplingParams(max_tokens=60, seed=1, ignore_eos=True), use_tqdm=False)
        assert list(whole.prompt_token_ids) == tekken.encode("Grüße 漢", bos=True, eos=False)
        assert streamed == whole.outputs[0].text == tekken.decode(list(whole.outputs[0].token_ids), SpecialTokenPolicy.IGNORE)
        [chat] = llm.chat([user("Hi")], SamplingParams(max_tokens=1), use_tqdm=False)
        assert list(chat.prompt_token_ids) == theirs.encode_chat_completion(ChatCompletionRequest(messages=[UserMessage(content="Hi")])).tokens
        rule = {"json_schema": '{"type": "object", "properties": {"é": {"enum": ["漢"]}}, "required": ["é"], "additionalProperties": false}'}
        [held] = llm.generate("x", SamplingParams(max_tokens=80, seed=1, structured=rule), use_tqdm=False)
        assert json.loads(held.outputs[0].text) == {"é": "漢"}
