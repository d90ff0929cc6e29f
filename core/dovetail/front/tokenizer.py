"""A model's tokenizer: text to token ids and back. `Tokenizer` is the front end's interface.
`TransformersTokenizer` wraps tokenizers of transformers, `dovetail.front.component_tokenizer` those
of plugins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.api.file_keys import FileKeys, NoEffect, Used
from dovetail.api.json_files import MAX_DEPTH, check_json_file, read_json_object
from dovetail.api.sentence_transformers_files import MODULES, read_transformer
from dovetail.base.bounded_json import JsonBounds
from dovetail.base.checks import unicode_error
from dovetail.base.config_sizes import check_sizes
from dovetail.errors import ConfigError, MissingExtraError, ModelLoadError, RequestError

if TYPE_CHECKING:
    from dovetail.api.late_interaction_files import Side
    from dovetail.api.tokenizer import Chat

_ITS_CLASS = Used("by transformers' class")
_NAMES = NoEffect("where the files are")
TOKENIZER_CONFIG = FileKeys(
    "tokenizer_config.json",
    {
        "chat_template": Used("the template of conversations"),
        "tokenizer_class": Used("transformers' class"),
        "truncation_side": Used("the side at which texts that pool are cut"),
        "model_max_length": Used(
            "the longest text, for checkpoints of sentence-transformers without `max_seq_length`"
        ),
        "model_input_names": Used("whether models are given the token types of pairs"),
        "max_len": NoEffect("an old name of `model_max_length`"),
        "*_token": _ITS_CLASS,
        "*_special_tokens": _ITS_CLASS,
        **dict.fromkeys(
            ("add_prefix_space", "added_tokens_decoder", "do_lower_case", "legacy"), _ITS_CLASS
        ),
        **dict.fromkeys(("split_special_tokens", "backend", "from_slow", "use_fast"), _ITS_CLASS),
        "auto_map": NoEffect("the checkpoint's own code is never run"),
        "clean_up_tokenization_spaces": NoEffect("texts are streamed as they are decoded"),
        "spaces_between_special_tokens": NoEffect("texts are streamed as they are decoded"),
        "padding_side": NoEffect("nothing is padded"),
        "pad_to_multiple_of": NoEffect("nothing is padded"),
        **dict.fromkeys(
            ("max_length", "stride", "truncation_strategy"), NoEffect("of calls in transformers")
        ),
        "pad_token_type_id": NoEffect("nothing is padded"),
        "processor_class": NoEffect("images are prepared without the whole processor"),
        "response_schema": NoEffect("the server's parsers read answers"),
        **dict.fromkeys(("name_or_path", "tokenizer_file", "special_tokens_map_file"), _NAMES),
    },
    unknown="left",
)
CHAT_TEMPLATE = FileKeys(
    "chat_template.json",
    {"chat_template": Used("the template of conversations, if the tokenizer has none")},
)
PROCESSORS = FileKeys(
    "preprocessor_config.json",
    {"*": Used("by transformers' image processor, for models that read images")},
)
_JSON_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "chat_template.json",
)
# of such a file: 262,000 tokens and 515,000 merges, each a list, are 800,000
_MAX_PARTS = 4_000_000
# of transformers' classes
_ENCODING_METHODS = (
    "__call__",
    "_encode_plus",
    "_batch_encode_plus",
    "_convert_encoding",
)
# `tokenizer_class` of a tokenizer.json that needs no class of its own
GENERIC = (
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
)


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text with its token ids: a prompt that was tokenized already."""

    text: str
    token_ids: Sequence[int]
    second: int | None = None  # of a pair of texts: see `dovetail.api.executor.RowPooling`
    side: Side | None = None  # of a model of late interaction: which of the two texts it is
    seen: int | None = None  # see `dovetail.api.executor.RowPooling`


class Tokenizer(ABC):
    """Text to token ids and back. `own`: the wrapped object, of transformers or of a plugin.
    `backend`: its `tokenizers.Tokenizer`, if it has one."""

    own: Any
    backend: Any = None

    @staticmethod
    def load(directory: Path | str) -> TransformersTokenizer:
        """From a model directory; no code of it is run. Raises `ModelLoadError` if there is none
        that works, `MissingExtraError` without transformers."""
        directory = Path(directory)
        if not directory.is_dir():
            raise ModelLoadError(
                f"{directory} isn't a directory: a tokenizer is loaded from a model's local "
                f"directory"
            )
        _check_files(directory)
        try:
            tokenizer = _loader(directory).from_pretrained(
                directory, trust_remote_code=False, local_files_only=True
            )
        except (MissingExtraError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # transformers raises whatever its parts do, panics of the tokenizers library included
            reason = " ".join(str(error).split())[:300]
            raise _no_tokenizer(directory, f"{type(error).__name__}: {reason}") from None
        if _is_empty(tokenizer):
            raise _no_tokenizer(directory, "no file with a vocabulary")
        path = directory / CHAT_TEMPLATE.file
        if not getattr(tokenizer, "chat_template", None) and path.is_file():
            content = read_json_object(path)
            CHAT_TEMPLATE.check(content, path)
            tokenizer.chat_template = content.get("chat_template")
        if (directory / MODULES.file).is_file() and read_transformer(directory)[1].get(
            "do_lower_case"
        ):
            _lower_case(tokenizer, directory)
        return TransformersTokenizer(tokenizer)

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Ids that it knows, added tokens included."""

    @property
    @abstractmethod
    def longest_token(self) -> int:
        """The characters of its longest token: what a text has more of, for each token that it
        becomes, is rare and strange."""

    @property
    @abstractmethod
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which `skip_special_tokens` leaves out of texts."""

    @property
    def bytes_of(self) -> Callable[[int], bytes] | None:
        """Function from an id to its bytes, if tokens are decoded by concatenating their bytes;
        None for other tokenizers."""
        return None

    @property
    def bos_token_id(self) -> int | None:
        """The id that a text's own BOS becomes, if the tokenizer finds special tokens in texts."""
        return None

    @property
    def chat_templates(self) -> dict[str, str]:
        """The model's chat templates by name; a single one is the "default". Empty for a model that
        only completes text."""
        return {}

    @property
    def no_template(self) -> str | None:
        """The reason why it can't be used with a chat template; None if it can."""
        return None

    def use_chat_template(self, text: str) -> None:
        """Replace the model's chat templates by this one. Raises `ConfigError` if the tokenizer
        can't be used with one."""
        raise ConfigError(f"chat_template: {self.no_template}")

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of special tokens by the names that chat templates know them by: "bos_token",
        "eos_token"."""
        return {}

    @property
    def encodes_chats(self) -> bool:
        """True if `encode_chat` replaces chat templates."""
        return False

    @property
    def marks(self) -> str:
        """Text with the marks of the conversation format, by which servers choose parsers: the chat
        templates."""
        return "\n".join(self.chat_templates.values())

    @property
    def has_chats(self) -> bool:
        """True if conversations can be encoded without a template from the caller."""
        return self.encodes_chats or bool(self.chat_templates)

    def encode_chat(self, chat: Chat) -> list[int]:
        """Return the ids of a conversation. Raises `RequestError`."""
        raise NotImplementedError

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """`special_tokens`: with those that the model expects around a text, such as BOS. Raises
        `RequestError` for text that isn't Unicode."""
        [ids] = self.encode_all([text], special_tokens)
        return ids

    @abstractmethod
    def encode_all(self, texts: Sequence[str], special_tokens: bool = True) -> list[list[int]]:
        """Encode each text like `encode`; on all cores, unless the tokenizer is written in
        Python."""

    @abstractmethod
    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], most: int | None = None
    ) -> list[TokenizedText]:
        """Encode each pair of texts as the model expects it, cut to `most` tokens: of the longer
        text as many as needed. Raises `RequestError` for text that isn't Unicode, and if that is
        impossible."""

    @property
    @abstractmethod
    def around(self) -> tuple[list[int], list[int]]:
        """The special tokens that the model expects before a text, and after it."""

    @property
    def truncates_left(self) -> bool:
        """True if long texts are truncated at their beginning rather than at their end."""
        return False

    @abstractmethod
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Unknown ids are left out."""

    @abstractmethod
    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary spells it."""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token that the vocabulary spells like this; None if it has none."""
        ids = self.encode(token, special_tokens=False)
        return ids[0] if len(ids) == 1 and self.token_strings(ids) == [token] else None

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """Describe it as tokenizer_config.json does, in plain values, without names of files."""


class TransformersTokenizer(Tokenizer):
    """Thin wrapper of a tokenizer of transformers; `backend` is None for one written in Python."""

    def __init__(self, tokenizer: Any) -> None:
        self.own = tokenizer
        self.backend: Any = getattr(tokenizer, "backend_tokenizer", None)

    @property
    def vocab_size(self) -> int:
        return len(self.own)

    @cached_property
    def longest_token(self) -> int:
        return max(map(len, self.own.get_vocab()), default=0)

    @property
    def special_ids(self) -> frozenset[int]:
        if self.backend is None:
            return frozenset(self.own.all_special_ids)
        return frozenset(
            token_id
            for token_id, token in self.backend.get_added_tokens_decoder().items()
            if token.special
        )

    @property
    def bytes_of(self) -> Callable[[int], bytes] | None:
        decoder = getattr(self.backend, "decoder", None)
        is_byte_level = (
            type(decoder).__name__ == "ByteLevel"
            and type(decoder).__module__ == "tokenizers.decoders"
        )
        return self._bytes_of if is_byte_level else None

    def _bytes_of(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id) or ""
        try:
            return bytes(BYTE_OF_CHAR[char] for char in token)
        except KeyError:  # an added token that isn't spelled in byte characters stands for itself
            return str(token).encode()

    @property
    def bos_token_id(self) -> int | None:
        token_id: int | None = self.own.bos_token_id
        return token_id

    def token_id(self, token: str) -> int | None:
        token_id: int | None = (
            self.own.get_vocab().get(token)
            if self.backend is None
            else self.backend.token_to_id(token)
        )
        return token_id

    @cached_property
    def chat_templates(self) -> dict[str, str]:
        own: Any = getattr(self.own, "chat_template", None)
        return own if isinstance(own, dict) else {"default": own} if own else {}

    def use_chat_template(self, text: str) -> None:
        self.own.chat_template = text
        vars(self).pop("chat_templates", None)

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        return {name: str(token) for name, token in self.own.special_tokens_map.items()}

    def encode_all(self, texts: Sequence[str], special_tokens: bool = True) -> list[list[int]]:
        for text in texts:
            check_unicode(text)
        if not texts:
            return []  # transformers can't
        if self._encodes_plainly:
            encodings = self.backend.encode_batch_fast(
                list(texts), add_special_tokens=special_tokens
            )
            return [encoding.ids for encoding in encodings]
        encoded = self.own(
            list(texts),
            add_special_tokens=special_tokens,
            return_attention_mask=False,
            verbose=False,
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    @cached_property
    def _encodes_plainly(self) -> bool:
        """True if its class does nothing but call the tokenizers library, which can then leave out
        the texts and places of tokens. They take most of the time, and freeing them holds the
        interpreter's lock: 1 s for a text of 16 MB."""
        if self.backend is None:
            return False
        from transformers import PreTrainedTokenizerFast

        if not isinstance(self.own, PreTrainedTokenizerFast):
            return False
        kinds = type(self.own).__mro__
        own_kinds = kinds[: kinds.index(PreTrainedTokenizerFast)]
        plain = not any(name in vars(kind) for kind in own_kinds for name in _ENCODING_METHODS)
        if plain:
            # has the library neither cut nor pad, and treat special tokens as configured
            self.own("a", verbose=False)
        return plain

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], most: int | None = None
    ) -> list[TokenizedText]:
        for pair in pairs:
            for text in pair:
                check_unicode(text)
        if not pairs:
            return []  # transformers can't
        firsts, seconds = map(list, zip(*pairs, strict=True))
        # The tokenizers library keeps what it cuts off, and of a pair all combinations of it: it
        # never cuts here.
        own_cut = (
            {"truncation": "longest_first", "max_length": most}
            if self.backend is None and most is not None
            else {}
        )
        try:
            encoded = self.own(
                firsts,
                seconds,
                return_token_type_ids=True,
                return_attention_mask=False,
                verbose=False,
                **own_cut,
            )
        except Exception as error:  # a tokenizer in Python may raise anything
            raise RequestError(
                f"truncate_prompt_tokens: a pair of texts can't be cut to {most} tokens: {error}"
            ) from None
        made = []
        for place, pair in enumerate(pairs):
            ids: list[int] = encoded["input_ids"][place]
            types: list[int] = encoded["token_type_ids"][place]
            if most is not None and len(ids) > most:
                kept = kept_of_pair(encoded.sequence_ids(place), most, left=self.truncates_left)
                ids = [ids[index] for index in kept]
                types = [types[index] for index in kept]
            second = types.index(1) if 1 in types and self._tells_types else None
            made.append(TokenizedText("\n".join(pair), ids, second))
        return made

    @property
    def _tells_types(self) -> bool:
        """True if models are given the token types: `model_input_names` of
        tokenizer_config.json."""
        return "token_type_ids" in self.own.model_input_names

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        whole = self.encode("a")
        inner = self.encode("a", special_tokens=False)
        for start in range(len(whole) - len(inner) + 1):
            if whole[start : start + len(inner)] == inner:
                return whole[:start], whole[start + len(inner) :]
        return [], []

    @property
    def truncates_left(self) -> bool:
        return getattr(self.own, "truncation_side", "right") == "left"

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        if self.backend is not None:
            text: str = self.backend.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens
            )
        else:
            text = self.own.decode(
                list(token_ids),
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        return text

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        names: list[str] = self.own.convert_ids_to_tokens(list(token_ids))
        return names

    def described(self) -> dict[str, Any]:
        own = self.own
        templates = self.chat_templates
        settings = {
            name: own.init_kwargs[name]
            for name in _SETTINGS
            if isinstance(own.init_kwargs.get(name), bool | int | str)
        }
        added = {
            str(number): {"content": token.content, "special": token.special}
            | {
                name: getattr(token, name)
                for name in ("lstrip", "rstrip", "normalized", "single_word")
            }
            for number, token in own.added_tokens_decoder.items()
        }
        return {
            "tokenizer_class": type(own).__name__,
            **settings,
            **self.special_tokens,
            "added_tokens_decoder": added,
            "chat_template": templates.get("default")
            if templates.keys() <= {"default"}
            else templates,
        }


def kept_of_pair(sides: Sequence[int | None], most: int, *, left: bool) -> list[int]:
    """Return the places of the tokens that remain of a pair of texts cut to `most` tokens: all
    special ones, and of the longer text as few as needed. `sides`: 0 or 1 for a token of either
    text, None for a special one. `left`: texts lose their beginnings. Raises `RequestError`."""
    first, second = (
        [place for place, side in enumerate(sides) if side == number] for number in (0, 1)
    )
    special = len(sides) - len(first) - len(second)
    room = most - special
    if room < 1:
        raise RequestError(
            f"truncate_prompt_tokens must be more than {special}, the special tokens of a pair, "
            f"got {most}"
        )
    if len(first) <= len(second):
        of_first = min(len(first), room // 2)
        of_second = room - of_first
    else:
        of_second = min(len(second), room // 2)
        of_first = room - of_second
    dropped = {*_dropped(first, of_first, left), *_dropped(second, of_second, left)}
    return [place for place in range(len(sides)) if place not in dropped]


def _dropped(places: Sequence[int], kept: int, left: bool) -> Sequence[int]:
    return places[: len(places) - kept] if left else places[kept:]


_SETTINGS = (
    "model_max_length",
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "clean_up_tokenization_spaces",
    "legacy",
    "padding_side",
)


def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE, as GPT-2 set it: printable Latin-1 stands for itself, the
    other bytes for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


BYTE_OF_CHAR = _byte_of_char()


def check_unicode(text: str) -> None:
    if error := unicode_error(text):
        raise RequestError(
            f"the text isn't valid Unicode: half a surrogate pair, {error.object[error.start]!r}, "
            f"at character {error.start}"
        )


def _check_files(directory: Path) -> None:
    """Bound the JSON files that transformers and tokenizers read. Raises `ModelLoadError`."""
    for name in _JSON_FILES:
        if (directory / name).is_file():
            check_json_file(directory / name, JsonBounds(_MAX_PARTS, MAX_DEPTH))
    if (directory / "config.json").is_file():  # transformers builds it to learn a tokenizer's class
        check_sizes(directory / "config.json", read_json_object(directory / "config.json"))


def _no_tokenizer(directory: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"{directory} has no tokenizer that can be loaded ({reason}); name another with "
        f"`tokenizer:`, or give token ids with detokenize=False"
    )


def _is_empty(tokenizer: Any) -> bool:
    """True if the tokenizer has special tokens alone: transformers makes such a one, for some
    models, of a directory without tokenizer files."""
    return len(tokenizer) < 100 and not set(tokenizer.get_vocab()) - set(
        tokenizer.all_special_tokens
    )


def _lower_case(tokenizer: Any, directory: Path) -> None:
    """Put texts in lower case before the tokenizer's own rules, as sentence-transformers does.
    Raises `ModelLoadError` for one that can't."""
    from tokenizers import normalizers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelLoadError(
            f"{directory}: do_lower_case: this tokenizer is written in Python, and has no "
            f"normalizer"
        )
    own = backend.normalizer
    backend.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), *([] if own is None else [own])]
    )


def _loader(directory: Path) -> Any:
    """The transformers class that loads it. `AutoTokenizer` would find the same, but imports torch,
    which takes seconds and may be missing."""
    try:
        config = read_json_object(directory / "tokenizer_config.json")
        generic = (
            config.get("tokenizer_class") in GENERIC and (directory / "tokenizer.json").is_file()
        )
    except ModelLoadError:  # AutoTokenizer says what is wrong
        generic = False
    try:
        if generic:
            from transformers import PreTrainedTokenizerFast as Loader
        else:
            from transformers import AutoTokenizer as Loader
    except ImportError as error:
        raise MissingExtraError.naming("torch", "tokenizing needs transformers") from error
    return Loader
