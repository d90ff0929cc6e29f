"""`TokenizerSuite`: checks that a tokenizer conforms to the contract of `dovetail.api.tokenizer`.

Encodes texts in many scripts, texts with names of special tokens, and long texts, and decodes them
with the vocabulary. Needs no torch.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from functools import cached_property, partial
from operator import index
from pathlib import Path
from typing import Any, ClassVar

from dovetail.api.tokenizer import Chat, Tokenizer, TokenizerContext
from dovetail.errors import ModelLoadError, RequestError, describe, shown
from dovetail.testing.checks import check, fail, require
from dovetail.testing.elsewhere import HASH_SEEDS, answer_elsewhere
from dovetail.testing.suite import Suite
from dovetail.testing.suites import tokenizer_elsewhere
from dovetail.testing.suites.odd_texts import ALIKE, TEXTS
from dovetail.testing.suites.proportional import require_proportional
from dovetail.testing.suites.tokenizer_chats import CARRIED, ODD, USER, with_text

LONG = 200_000  # characters of the long texts
SHORT = 32  # characters of the messages of a long conversation
LENGTHS = (255, 256, 257, 1_023, 4_096, 32_768, 65_537, 131_073, LONG)
# bytes of the longest texts; the first is just above a power of two that a buffer may have
VERY_LONG = (2**20 + 7, 3_000_000)
VERY_LONG_WITHIN_S = 10  # CPU time expected for each of these; otherwise it isn't tried
PIECES = 20_000  # of the vocabulary that are encoded as texts, at most
BEGINNING = "a long beginning, " * 8
OFTEN = 1_000  # texts that are encoded before the first ones are encoded again
RANDOM_TEXTS = 60
THREADS = 4
TRIMMED = " \t\r\n\x0b\x0c\x1c\x1d\x1e\x85\xa0\u2028\u2029\u3000"  # formats may trim contents
SWITCH_S = 1e-6  # so that threads meet in the middle of a call
_SUMMARY = "dovetail.testing.suites.tokenizer_elsewhere:made_summary"
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
VALUES: tuple[Any, ...] = (True, False, None, "", 0, {}, [], "auto")  # of an unknown variable
FILES = 12  # of the folder that are damaged one by one, at most
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
SPECIAL_NAMES = 20  # texts with them that are tried in all places of a conversation
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
        given = self._made.vocabulary()
        require(isinstance(given, Sequence), f"vocabulary() is {given!r:.100}, not a sequence")
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
        for text in (*self._texts, *self._pieces()):
            self._require_exact(text, self._encoded(text))
        for text in ("ab ", "\u6f22", "a\n"):
            for length in LENGTHS:
                long = (text * LONG)[:length]
                ids = tokenizer_elsewhere.ids_or_none(self._made.encode, long)
                if ids is not None:
                    self._require_exact(long, ids)

    @check("tokenizer.exact_long", since="1.1", capability="exact")
    def test_megabytes_are_encoded_whole(self) -> None:
        """The bytes of the ids of a text of one or three megabytes aren't the text's, such as only
        its beginning. Not tried if it would take more than 10 s, by the time for a shorter text."""
        for length in VERY_LONG:
            text = _numbered_words(length)
            expected_s = self._seconds(text[:LONG]) * length / LONG
            if expected_s > VERY_LONG_WITHIN_S:
                self.note(f"a text of {length} bytes isn't tried: it would take {expected_s:.0f} s")
                continue
            ids = tokenizer_elsewhere.ids_or_none(self._made.encode, text)
            if ids is not None:
                self._require_known("encode", ids)
                self._require_exact(text, ids)

    def _require_exact(self, text: str, ids: Sequence[int]) -> None:
        require(
            self._spelled(ids) == text.encode(),
            f"{shown(text)}, {len(text)} characters, became {shown(list(ids))}, whose bytes are "
            f"{shown(self._spelled(ids))}",
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
        given = [self._encoded(text) for text in self._texts]
        first = [list(ids) for ids in given]
        mine = tokenizer_elsewhere.summary(self._made, ())
        other = self._make()
        for name, value in tokenizer_elsewhere.summary(other, ()).items():
            require(value == mine[name], f"{name} of two tokenizers with the same options differ")
        self._require_first(self._made, first)
        self._require_first(other, first)
        alike = {tuple(self._encoded(f"{BEGINNING} {number:04}")) for number in range(OFTEN)}
        require(
            len(alike) == OFTEN or not self.declares("exact"),
            f"{OFTEN} texts that differ in their end became only {len(alike)} different ids",
        )
        self._require_first(self._made, first)
        for text, ids, before in zip(self._texts, given, first, strict=True):
            require(list(ids) == before, f"the ids of {text!r} were changed by a later call")

    def _require_first(self, turn: Tokenizer, first: Sequence[list[int]]) -> None:
        """Check that the texts, in another order, become the ids that they became first."""
        for text, ids in random.Random(0).sample(
            list(zip(self._texts, first, strict=True)), len(first)
        ):
            again = list(turn.encode(text))
            require(again == ids, f"{text!r} became {ids}, and another time {again}")

    @check("tokenizer.processes", since="1.0")
    def test_other_processes_find_the_same_ids(self) -> None:
        """In a process with another string hash seed, texts became other ids, or the vocabulary is
        another. Front ends and the engine would differ: don't depend on the order of a set."""
        texts = self._texts
        chats = self._chats if self.declares("chat") else []
        expected = tokenizer_elsewhere.summary(self._made, texts, chats)
        directory = None if self.directory is None else str(Path(self.directory).absolute())
        for seed in HASH_SEEDS:
            what = "another process can't encode"
            found = answer_elsewhere(
                self, _SUMMARY, directory, texts, chats, what=what, hash_seed=seed
            )
            for name, value in expected.items():
                if name != "ids":
                    require(found[name] == value, f"in another process, {name} differs")
            for text, ids, others in zip(texts, expected["ids"], found["ids"], strict=True):
                require(ids == others, f"{text!r} became {ids}, and in another process {others}")

    @check("tokenizer.linear", since="1.0")
    def test_time_is_proportional_to_length(self) -> None:
        """A text of words, or a conversation, that is eight times as long took far more than eight
        times the time.
        Split a text before merging, or keep the merges that are possible in a queue."""
        for piece in ("a ", "word, 12\n", "\u6f22\u5b57\u3002"):
            require_proportional(piece, self._seconds)
            if self.declares("chat"):
                require_proportional(piece, self._chat_seconds)

    @check("tokenizer.threads", since="1.0")
    def test_several_threads_may_encode(self) -> None:
        """Called by several threads at once, `encode` raised or returned other
        ids. Keep no state of a call in the tokenizer."""
        calls: list[Callable[[], list[int]]] = [
            partial(self._listed, self._made.encode, text) for text in self._texts
        ]
        expected = [call() for call in calls]

        def call_all(_: int) -> list[list[int]]:
            return [call() for _ in range(3) for call in calls]

        with switching_often(), ThreadPoolExecutor(THREADS) as pool:
            for found in self._trying(
                lambda: list(pool.map(call_all, range(THREADS))),
                "encode, called by several threads,",
            ):
                require(found == expected * 3, "in one of several threads, texts became other ids")

    @check("tokenizer.chat_threads", since="1.0", capability="chat")
    def test_several_threads_may_encode_conversations(self) -> None:
        """Called by several threads at once, `encode_chat` raised or returned other ids. Keep no
        state of a call in the tokenizer."""
        chats = [Chat([{"role": "user", "content": text}]) for text in (*SAMPLES[3:], *TEXTS)]
        expected = [self._listed(self._made.encode_chat, chat) for chat in chats]

        def encode_all(_: int) -> list[list[int]]:
            return [self._listed(self._made.encode_chat, chat) for _ in range(3) for chat in chats]

        with switching_often(), ThreadPoolExecutor(THREADS) as pool:
            for found in self._trying(
                lambda: list(pool.map(encode_all, range(THREADS))),
                "encode_chat, called by several threads,",
            ):
                require(found == expected * 3, "in one of several threads, chats became other ids")

    @check("tokenizer.damaged", since="1.0")
    def test_files_that_are_missing_or_damaged_are_refused(self) -> None:
        """The constructor, or `vocabulary`, raised something other than `ModelLoadError` because
        all files, or one of them, are missing, cut off or hold something else. Catch what your library raises, and
        name the file."""
        whole = self._files()
        cut = {name: content[: len(content) // 2] for name, content in whole.items()}
        states = {
            "missing": {},
            "cut off": cut,
            "empty": dict.fromkeys(whole, b""),
            "of other bytes": dict.fromkeys(whole, GARBAGE),
        }
        for name in sorted(whole)[:FILES] if self.directory is not None else ():
            others = {other: content for other, content in whole.items() if other != name}
            states[f"whole, but {name} is missing"] = others
            states[f"whole, but {name} is cut off"] = {**others, name: cut[name]}
            states[f"whole, but {name} has other bytes"] = {**others, name: GARBAGE}
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

    @staticmethod
    def _listed(call: Callable[[Any], Sequence[int]], given: Any) -> list[int]:
        """Return the ids; none if the text or conversation is refused."""
        try:
            return list(call(given))
        except RequestError:
            return []

    @check("tokenizer.chat", since="1.0", capability="chat")
    def test_a_conversation_has_all_its_texts(self) -> None:
        """The ids of a conversation aren't in the vocabulary, or don't spell the contents of all
        messages in order; or with `continues` something follows the content of the last message,
        which the model should continue; or an answer became the ids of a question; or an answer is
        begun although `begins_answer` is False; or the messages that were given are changed."""
        contents = ["first question", "first answer", "second question"]
        messages = [
            {"role": role, "content": text}
            for role, text in zip(("user", "assistant", "user"), contents, strict=True)
        ]
        ids = self._chat(Chat(deepcopy(messages)))
        text = self._spelled(ids).decode(errors="replace")
        place = 0
        for content in contents if self.declares("exact") else ():
            place = text.find(content, place)
            require(
                place >= 0,
                f"the conversation became {text!r}, in which {content!r} isn't in its place",
            )
        try:
            begun = self._made.encode_chat(
                Chat(deepcopy(messages[:2]), begins_answer=False, continues=True)
            )
        except RequestError as error:
            self.note(f"continuing the last message is refused: {error}")
        else:
            spelled = self._spelled(begun).decode(errors="replace")
            require(
                spelled.endswith(contents[1]),
                f"with `continues`, a conversation became {spelled!r}, which should end with "
                f"{contents[1]!r}",
            )
        self._require_roles()
        self._require_its_beginning(messages)

    def _require_roles(self) -> None:
        """Check that an answer and a question don't become the same ids, if both are allowed."""
        question = {"role": "user", "content": "one"}
        try:
            answer, other = (
                list(self._chat(Chat([question, {"role": role, "content": "two"}])))
                for role in ("assistant", "user")
            )
        except RequestError:
            return
        require(answer != other, "an answer and a second question become the same ids")

    def _require_its_beginning(self, messages: list[dict[str, str]]) -> None:
        """Check that `begins_answer` only adds to the ids, and that messages aren't changed."""
        given = deepcopy(messages)
        try:
            whole = list(self._chat(Chat(given)))
            without = list(self._chat(Chat(given, begins_answer=False)))
        except RequestError:
            return
        require(given == messages, f"encode_chat changed the messages {messages} to {given}")
        require(
            whole[: len(without)] == without,
            "without the beginning of an answer, a conversation isn't the beginning of the one "
            "with it",
        )

    @check("tokenizer.chat_text", since="1.0", capability="chat")
    def test_what_messages_say_is_text(self) -> None:
        """A message's content became special tokens, so a user could begin a message of another
        role; or it was changed, white space around it aside, though the tokenizer is `exact`.
        Encode contents as text, and add the format's special tokens as ids."""

        def special_of(question: str, answer: str) -> list[int]:
            said = [("user", question), ("assistant", answer), ("user", question)]
            ids = self._chat(Chat([{"role": role, "content": text} for role, text in said]))
            return self._special(ids)

        plain = special_of("a", "b")
        for text in self._with_special_names():
            for question, answer in ((text, "b"), ("a", text)):
                found = special_of(question, answer)
                require(
                    found == plain,
                    f"with {text!r} in a message, the special tokens of a conversation are "
                    f"{found}, and {plain} without it",
                )
        self._require_special_names_are_text()
        texts = (*TEXTS, *(text for group in ALIKE for text in group))
        for text in texts if self.declares("exact") else ():
            for what, stands, chat in with_text(text):
                if stands:
                    self._require_said(text, what, chat)

    def _require_said(self, text: str, what: str, chat: Chat) -> None:
        """Require that a conversation has a text, and ends with it if that is continued; white
        space around it aside."""
        ids = self._chat_or_none(chat)
        if ids is None:
            return
        spelled = self._spelled(ids)
        part = text.strip(TRIMMED).encode()
        require(
            part in spelled and (not chat.continues or part in spelled[-len(text.encode()) - 1 :]),
            f"a conversation with {shown(text)} as {what} became {shown(spelled)}",
        )

    def _require_special_names_are_text(self) -> None:
        """Require that a special token's name becomes no special token, wherever it is."""
        plain = {what: self._chat_or_none(chat) for what, _, chat in with_text("plain")}
        for text in [*self._with_special_names()][:SPECIAL_NAMES]:
            for what, _, chat in with_text(text):
                ids = self._chat_or_none(chat)
                expected = plain[what]
                require(
                    ids is None
                    or expected is None
                    or self._special(ids) == self._special(expected),
                    f"with {text!r} as {what}, a conversation has other special tokens than without",
                )

    def _special(self, ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in ids if token_id in self._special_ids]

    def _chat_or_none(self, chat: Chat) -> Sequence[int] | None:
        """Return the ids of a conversation; None if it is refused."""
        try:
            return self._chat(chat)
        except RequestError:
            return None

    @check("tokenizer.chat_repeatable", since="1.0", capability="chat")
    def test_a_conversation_always_becomes_the_same_ids(self) -> None:
        """The same conversation became other ids after others, or by another tokenizer; or two that
        differ in a character of one message, its role, or a tool, the same; or messages, tools or
        variables were changed. If you keep conversations, keep them by all that they have."""
        chats = self._chats
        before = deepcopy(chats)
        first = [self._chat_or_none(chat) for chat in chats]
        kept = [None if ids is None else list(ids) for ids in first]
        numbered = {tuple(self._chat_or_none(chat) or [n]) for n, chat in enumerate(_numbered())}
        require(
            len(numbered) == OFTEN or not self.declares("exact"),
            f"{OFTEN} conversations that differ in one number became only {len(numbered)} "
            f"different ids",
        )
        for made in (self._made, self._make()):
            for chat, ids in random.Random(0).sample(
                list(zip(chats, kept, strict=True)), len(kept)
            ):
                again = tokenizer_elsewhere.ids_or_none(made.encode_chat, chat)
                require(
                    again == ids,
                    f"{shown(chat)} became {shown(ids)}, and another time {shown(again)}",
                )
        require(chats == before, "encode_chat changed messages, tools or variables")
        for chat, given, same in zip(chats, first, kept, strict=True):
            require(
                given is None or list(given) == same,
                f"the ids of {shown(chat)} were changed by a later call",
            )

    @cached_property
    def _chats(self) -> list[Chat]:
        """Conversations of all forms, and those that differ little."""
        alike = [text for group in ALIKE for text in group]
        return [
            *(chat for _, chat, _ in CARRIED),
            *(Chat(messages) for messages in ODD),
            *(chat for _, _, chat in with_text("plain")),
            *(Chat([USER, {"role": "assistant", "content": text}, USER]) for text in alike),
        ]

    @check("tokenizer.chat_refuses", since="1.0", capability="chat")
    def test_what_the_format_lacks_is_refused(self) -> None:
        """`encode_chat` raised an error other than `RequestError`; or ignored an unknown variable,
        a tool, or a tool call, instead of rejecting it by name."""
        for value in VALUES:
            self._require_variable_refused(value)
        for what, chat, said in CARRIED:
            try:
                text = self._spelled(self._chat(chat)).decode(errors="replace")
            except RequestError as error:
                self.note(f"{what} is refused: {error}")
                continue
            self._require_words(what, chat, text, said)
            require(
                not chat.continues or not self.declares("exact") or text.endswith(said[-1]),
                f"{what}: the conversation became {text!r}, which should end with {said[-1]!r}",
            )
        for messages in ODD:
            try:
                text = self._spelled(self._chat(Chat(messages))).decode(errors="replace")
            except RequestError:
                continue
            contents = [message.get("content") for message in messages]
            for content in contents if self.declares("exact") else ():
                require(
                    not isinstance(content, str) or content in text,
                    f"{list(messages)} became {text!r}, without {content!r}",
                )

    def _require_words(self, what: str, chat: Chat, text: str, said: Sequence[str]) -> None:
        """Require that a conversation of contents has them in order, and another one all words."""
        in_order = all(message.keys() == {"role", "content"} for message in chat.messages)
        place = 0
        for word in said if self.declares("exact") else ():
            found = text.find(word, place if in_order and not chat.tools else 0)
            require(
                found >= 0,
                f"{what} is left out: the conversation became {shown(text)}, without {word!r} in "
                f"its place",
            )
            place = found + len(word)

    def _require_variable_refused(self, value: Any) -> None:
        try:
            self._chat(Chat([USER], variables={UNKNOWN: value}))
        except RequestError as error:
            require(
                UNKNOWN in str(error),
                f"the unknown variable {UNKNOWN} is refused without being named: {error}",
            )
        else:
            fail(f"the unknown variable {UNKNOWN} = {value!r} is ignored: raise RequestError")

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
        """The samples, texts at the edges of Unicode, and random parts of the samples joined."""
        chance = random.Random(0)
        whole = "".join(SAMPLES)
        parts = [
            whole[start : start + chance.randrange(1, 12)]
            for start in (chance.randrange(len(whole)) for _ in range(4 * RANDOM_TEXTS))
        ]
        alike = dict.fromkeys(text for group in ALIKE for text in group)
        return [
            *SAMPLES,
            *TEXTS,
            *alike,
            *("".join(chance.sample(parts, 4)) for _ in range(RANDOM_TEXTS)),
        ]

    def _pieces(self) -> Iterator[str]:
        """Yield tokens that are texts: random ones, and the last of the vocabulary, whose ids may
        have more than 16 bits."""
        chance = random.Random(0)
        last = range(max(0, len(self._vocabulary) - PIECES // 2), len(self._vocabulary))
        some = chance.sample(range(len(self._vocabulary)), min(len(self._vocabulary), PIECES // 2))
        for token_id in {*some, *last} - self._special_ids:
            try:
                yield self._vocabulary[token_id].decode()
            except UnicodeDecodeError:  # part of a character
                continue

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

    def _seconds(self, text: str) -> float:
        return _seconds_of(lambda: self._made.encode(text))

    def _chat_seconds(self, text: str) -> float:
        """Return the CPU time for a conversation of short messages."""
        contents = [text[begin : begin + SHORT] for begin in range(0, len(text), SHORT)]
        messages = [
            {"role": "assistant" if turn % 2 else "user", "content": content}
            for turn, content in enumerate(contents)
        ]
        return _seconds_of(lambda: self._made.encode_chat(Chat(messages)))

    @staticmethod
    def _trying(call: Callable[[], Any], what: str) -> Any:
        try:
            return call()
        except BaseException as error:
            fail(f"{what} raised {describe(error)}", error)


def _numbered_words(length: int) -> str:
    """Return a text of ASCII characters whose parts all differ."""
    words = (f"word {number}, " for number in range(length // len("word 0, ") + 1))
    return "".join(words)[:length]


def _seconds_of(call: Callable[[], object]) -> float:
    begun = time.thread_time()
    try:
        call()
    except RequestError:  # too long for it
        return 0.0
    return time.thread_time() - begun


def _numbered() -> Iterator[Chat]:
    """Yield conversations that differ in a number in the middle of a long message."""
    for number in range(OFTEN):
        content = f"{BEGINNING} {number:04} {BEGINNING}"
        yield Chat([USER, {"role": "assistant", "content": content}, USER])


@contextmanager
def switching_often() -> Iterator[None]:
    """Switch between threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
