"""`TokenizerSuite`: checks that a tokenizer conforms to the contract of `dovetail.api.tokenizer`.

Encodes texts in many scripts, texts with names of special tokens, and long texts, and decodes them
with the vocabulary. Needs no torch.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any, ClassVar

from dovetail.api.tokenizer import Chat, Tokenizer, TokenizerContext
from dovetail.errors import ModelLoadError, RequestError, describe
from dovetail.testing.checks import check, fail, require
from dovetail.testing.suite import Suite

LONG = 200_000  # characters of the long texts
RANDOM_TEXTS = 60
THREADS = 4
UNKNOWN = "no_format_has_this_variable"
# files that tokenizers are usually in
USUAL = (
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
GARBAGE = b"\xff\x00 no tokenizer"
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
SAMPLES = (
    "",
    " ",
    "\n",
    "a",
    "Hello, world!",
    "  two  spaces\tand\r\nlines \n\n",
    "naïve café, Ünï, Übergrößenträger",
    "e\u0301 is not \u00e9, \u212b is not \u00c5, \ufb01",
    "漢字かな交じり文 한국어 ไทย हिन्दी العربية",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467\U0001f1e9\U0001f1ea\U00010348\U000e0041",
    "\0\x01\x7f\x80\xa0\u2028\ufeff\ufffd\uffff\U0010ffff",
    '{"a": [1, 2.5e-3, "é\\n"], "b": null}',
    "def f(x):\n\treturn x ** 2  # 0123456789\n",
    "<s>[INST]<|im_start|><|endoftext|></s><unk><pad>",
)
ODD: tuple[tuple[Mapping[str, Any], ...], ...] = (
    ({"role": "assistant", "content": "one"},),
    ({"role": "user", "content": "one"}, {"role": "user", "content": "two"}),
    ({"role": "user", "content": ""},),
    (
        {
            "role": "user",
            "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
        },
    ),
    ({"role": "system", "content": "one"},),
    ({"role": "user", "content": "one"}, {"role": "system", "content": "two"}),
    (
        {"role": "user", "content": "one"},
        {"role": "tool", "content": "two", "tool_call_id": "call00001"},
    ),
    ({"role": "developer", "content": "one"}, {"role": "user", "content": "two"}),
    (
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two", "reasoning_content": "three"},
        {"role": "user", "content": "four"},
    ),
)


class TokenizerSuite(Suite):
    """Texts of many scripts, names of special tokens within texts, conversations."""

    kind = "tokenizer"
    settings = Suite.settings | {"directory"}

    # a model's folder with the files that it needs; None: an empty one
    directory: ClassVar[str | None] = None

    @check("tokenizer.vocabulary", since="1.0")
    def test_the_vocabulary_has_bytes_for_each_id(self) -> None:
        """`vocabulary` doesn't return `bytes` for each id, or returns others when it is called
        again; or `special_ids`, `eos_ids` or `around` have ids that aren't in it; or a special
        token has no name."""
        require(self._vocabulary, "vocabulary() is empty")
        for token_id, piece in enumerate(self._vocabulary):
            require(
                type(piece) is bytes, f"vocabulary()[{token_id}] is {piece!r:.100}, expected bytes"
            )
        require(
            list(self._made.vocabulary()) == self._vocabulary,
            "vocabulary() returned something else when called again",
        )
        for what, ids in (
            ("special_ids", self._made.special_ids),
            ("eos_ids", self._made.eos_ids),
            *(("around", ids) for ids in self._made.around),
        ):
            self._require_known(what, ids)
        for token_id in self._special_ids:
            require(
                self._vocabulary[token_id],
                f"the special token {token_id} has no name: give it one, it is shown unless it is "
                f"skipped",
            )
        self.note(f"{len(self._vocabulary)} token ids, {len(self._special_ids)} of them special")

    @check("tokenizer.encode", since="1.0")
    def test_any_text_becomes_known_ids(self) -> None:
        """`encode` raised an error other than `RequestError`, or returned ids that aren't in the
        vocabulary, or any id for an empty text. Texts may contain any character, be empty, or have
        megabytes without a space."""
        require(
            len(self._encoded("")) == 0,
            f"an empty text became {list(self._encoded(''))}: ids around a text belong in `around`",
        )
        for text in self._texts:
            self._encoded(text)
        for piece in ("a", " ", "ab ", "漢", "\n", "1", "\U0001f600"):
            text = piece * (LONG // len(piece))
            before = time.perf_counter()
            try:
                self._require_known("encode", self._made.encode(text))
            except RequestError as error:
                self.note(f"a text of {LONG} characters, {piece!r} repeated, is refused: {error}")
            except BaseException as error:
                fail(
                    f"encode raised {describe(error)} for {LONG} characters, {piece!r} repeated",
                    error,
                )
            took_s = time.perf_counter() - before
            if took_s > 1:
                self.note(
                    f"a text of {LONG} characters, {piece!r} repeated, takes {took_s:.1f} s (not "
                    f"judged)"
                )

    @check("tokenizer.exact", since="1.0", capability="exact")
    def test_the_bytes_of_the_ids_are_those_of_the_text(self) -> None:
        """The bytes of a text's ids aren't the text's: what the model reads and writes would be
        shown as another text. A tokenizer that changes texts on purpose doesn't declare
        `exact`."""
        for text in self._texts:
            ids = self._encoded(text)
            require(
                self._spelled(ids) == text.encode(),
                f"{text!r} became {list(ids)}, whose bytes are {self._spelled(ids)!r}",
            )

    @check("tokenizer.special", since="1.0")
    def test_no_text_becomes_a_special_token(self) -> None:
        """A text became a special token, so a user could end a message and begin another role's.
        Encode the names of special tokens as text."""
        for text in [*self._texts, *self._with_special_names()]:
            special = self._special_ids.intersection(self._encoded(text))
            require(not special, f"{text!r} became the special tokens {sorted(special)}")

    @check("tokenizer.repeatable", since="1.0")
    def test_a_text_always_becomes_the_same_ids(self) -> None:
        """The same text became other ids when it was encoded again, after other texts, or by
        another tokenizer made with the same options. Prefixes wouldn't be found in the cache, and
        front ends would differ."""
        first = [list(self._encoded(text)) for text in self._texts]
        other = self._make()
        for turn in (self._made, other):
            for text, ids in random.Random(0).sample(
                list(zip(self._texts, first, strict=True)), len(first)
            ):
                require(
                    list(turn.encode(text)) == ids,
                    f"{text!r} became {ids}, and another time {list(turn.encode(text))}",
                )

    @check("tokenizer.threads", since="1.0")
    def test_several_threads_may_encode(self) -> None:
        """Called by several threads at once, `encode` raised or returned other ids. Keep no state
        of a call in the tokenizer."""
        expected = [list(self._encoded(text)) for text in self._texts]

        def encode_all(_: int) -> list[list[int]]:
            return [list(self._made.encode(text)) for _ in range(3) for text in self._texts]

        with ThreadPoolExecutor(THREADS) as pool:
            for found in self._trying(
                lambda: list(pool.map(encode_all, range(THREADS))),
                "encode, called by several threads,",
            ):
                require(found == expected * 3, "in one of several threads, texts became other ids")

    @check("tokenizer.chat_threads", since="1.0", capability="chat")
    def test_several_threads_may_encode_conversations(self) -> None:
        """Called by several threads at once, `encode_chat` raised or returned other ids. Keep no
        state of a call in the tokenizer."""
        chats = [Chat([{"role": "user", "content": text}]) for text in SAMPLES[3:7]]
        expected = [list(self._chat(chat)) for chat in chats]

        def encode_all(_: int) -> list[list[int]]:
            return [list(self._made.encode_chat(chat)) for _ in range(3) for chat in chats]

        with ThreadPoolExecutor(THREADS) as pool:
            for found in self._trying(
                lambda: list(pool.map(encode_all, range(THREADS))),
                "encode_chat, called by several threads,",
            ):
                require(found == expected * 3, "in one of several threads, chats became other ids")

    @check("tokenizer.damaged", since="1.0")
    def test_files_that_are_missing_or_damaged_are_refused(self) -> None:
        """The constructor, or `vocabulary`, raised something other than `ModelLoadError` because
        all files are missing, cut off or hold something else. Catch what your library raises, and
        name the file."""
        whole = self._files()
        states = {
            "missing": {},
            "cut off": {name: content[: len(content) // 2] for name, content in whole.items()},
            "of other bytes": dict.fromkeys(whole, GARBAGE),
        }
        for state, files in states.items():
            with tempfile.TemporaryDirectory() as folder:
                for name, content in files.items():
                    path = Path(folder, name)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)
                try:
                    self.make(TokenizerContext(Path(folder))).vocabulary()
                except ModelLoadError:
                    continue
                except BaseException as error:
                    fail(f"with files that are {state} it raised {describe(error)}", error)

    def _files(self) -> dict[str, bytes]:
        """Return the files of `directory`; without one, files with the usual names."""
        if self.directory is None:
            return dict.fromkeys(USUAL, b'{"model": {"vocab": {"a": 0}}}')
        folder = Path(self.directory)
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and path.suffix not in WEIGHTS
        }

    @check("tokenizer.chat", since="1.0", capability="chat")
    def test_a_conversation_has_all_its_texts(self) -> None:
        """The ids of a conversation aren't in the vocabulary, or don't spell the contents of all
        messages in order; or with `continues` something follows the content of the last message,
        which the model should continue."""
        contents = ["first question", "first answer", "second question"]
        messages = [
            {"role": role, "content": text}
            for role, text in zip(("user", "assistant", "user"), contents, strict=True)
        ]
        ids = self._chat(Chat(messages))
        text = self._spelled(ids).decode(errors="replace")
        place = 0
        for content in contents if self.declares("exact") else ():
            place = text.find(content, place)
            require(
                place >= 0,
                f"the conversation became {text!r}, in which {content!r} isn't in its place",
            )
        try:
            begun = self._made.encode_chat(Chat(messages[:2], begins_answer=False, continues=True))
        except RequestError as error:
            self.note(f"continuing the last message is refused: {error}")
        else:
            spelled = self._spelled(begun).decode(errors="replace")
            require(
                spelled.endswith(contents[1]),
                f"with `continues`, a conversation became {spelled!r}, which should end with "
                f"{contents[1]!r}",
            )

    @check("tokenizer.chat_text", since="1.0", capability="chat")
    def test_what_messages_say_is_text(self) -> None:
        """A message's content became special tokens, so a user could begin a message of another
        role. Encode contents as text, and add the format's special tokens as ids."""

        def special_of(question: str, answer: str) -> list[int]:
            said = [("user", question), ("assistant", answer), ("user", question)]
            ids = self._chat(Chat([{"role": role, "content": text} for role, text in said]))
            return [token_id for token_id in ids if token_id in self._special_ids]

        plain = special_of("a", "b")
        for text in self._with_special_names():
            for question, answer in ((text, "b"), ("a", text)):
                found = special_of(question, answer)
                require(
                    found == plain,
                    f"with {text!r} in a message, the special tokens of a conversation are "
                    f"{found}, and {plain} without it",
                )

    @check("tokenizer.chat_refuses", since="1.0", capability="chat")
    def test_what_the_format_lacks_is_refused(self) -> None:
        """`encode_chat` raised an error other than `RequestError`; or ignored an unknown variable,
        a tool, or a tool call, instead of rejecting it by name."""
        user: Mapping[str, Any] = {"role": "user", "content": "question"}
        try:
            self._chat(Chat([user], variables={UNKNOWN: True}))
        except RequestError as error:
            require(
                UNKNOWN in str(error),
                f"the unknown variable {UNKNOWN} is refused without being named: {error}",
            )
        else:
            fail(f"the unknown variable {UNKNOWN} is ignored: raise RequestError")
        function = {
            "name": "find_weather",
            "description": "Weather",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
        }
        call = {
            "id": "call00001",
            "type": "function",
            "function": {"name": "find_weather", "arguments": {"town": "Zermatt"}},
        }
        result = {
            "role": "tool",
            "content": "sunny skies",
            "tool_call_id": "call00001",
            "name": "find_weather",
        }
        tools = ({"type": "function", "function": function},)
        for what, chat, said in (
            ("a tool", Chat([user], tools), ("find_weather",)),
            (
                "a call",
                Chat([user, {"role": "assistant", "tool_calls": [call]}, result], tools),
                ("find_weather", "Zermatt", "sunny skies"),
            ),
        ):
            try:
                text = self._spelled(self._chat(chat)).decode(errors="replace")
            except RequestError as error:
                self.note(f"{what} is refused: {error}")
                continue
            for word in said if self.declares("exact") else ():
                require(
                    word in text,
                    f"{what} is left out: the conversation became {text!r}, without {word!r}",
                )
        for messages in ODD:
            try:
                text = self._spelled(self._chat(Chat(messages))).decode(errors="replace")
            except RequestError:
                continue
            for content in (
                [message["content"] for message in messages if isinstance(message["content"], str)]
                if self.declares("exact")
                else ()
            ):
                require(content in text, f"{list(messages)} became {text!r}, without {content!r}")

    @cached_property
    def _made(self) -> Tokenizer:
        made: Tokenizer = self._make()
        return made

    def _make(self) -> Any:
        if self.directory is not None:
            return self.make(TokenizerContext(Path(self.directory).absolute()))
        with tempfile.TemporaryDirectory(prefix="dovetail-test-") as folder:
            return self.make(TokenizerContext(Path(folder)))

    @cached_property
    def _vocabulary(self) -> list[bytes]:
        return list(self._made.vocabulary())

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self._made.special_ids)

    @cached_property
    def _texts(self) -> list[str]:
        """The samples, and random parts of them joined."""
        chance = random.Random(0)
        whole = "".join(SAMPLES)
        parts = [
            whole[start : start + chance.randrange(1, 12)]
            for start in (chance.randrange(len(whole)) for _ in range(4 * RANDOM_TEXTS))
        ]
        return [*SAMPLES, *("".join(chance.sample(parts, 4)) for _ in range(RANDOM_TEXTS))]

    def _with_special_names(self) -> Iterator[str]:
        """Yield texts with names of special tokens, at most 200 of these."""
        ids = sorted(self._special_ids)
        for token_id in random.Random(0).sample(ids, min(200, len(ids))):
            name = self._vocabulary[token_id].decode(errors="replace")
            yield name
            yield f"a{name}{name} b"

    def _spelled(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._vocabulary[token_id] for token_id in ids)

    def _encoded(self, text: str) -> Sequence[int]:
        ids: Sequence[int] = self._trying(lambda: self._made.encode(text), f"encode({text!r:.200})")
        self._require_known("encode", ids)
        return ids

    def _chat(self, chat: Chat) -> Sequence[int]:
        """Return the ids of a conversation. Raises `RequestError`."""
        try:
            ids = self._made.encode_chat(chat)
        except RequestError:
            raise
        except BaseException as error:
            fail(f"encode_chat raised {describe(error)} for {chat}", error)
        self._require_known("encode_chat", ids)
        return ids

    def _require_known(self, what: str, ids: Collection[int]) -> None:
        try:
            known = all(0 <= index(token_id) < len(self._vocabulary) for token_id in ids)
        except TypeError:
            known = False
        require(
            known, f"{what} has {ids!r:.200}, expected ids from 0 to {len(self._vocabulary) - 1}"
        )

    @staticmethod
    def _trying(call: Callable[[], Any], what: str) -> Any:
        try:
            return call()
        except BaseException as error:
            fail(f"{what} raised {describe(error)}", error)
