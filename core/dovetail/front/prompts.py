"""Prompts: text, token ids, or a mapping that says which; and their way to token ids.

`PromptSource` has prompts whose texts have been measured, but neither joined nor tokenized: that
takes time and memory by the character. The library does all at once, a server does it in slices,
so that clients share its threads fairly. `PromptEncoder` does it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.base.checks import BINARY, is_integer
from dovetail.config.limits import Limits
from dovetail.errors import RequestError, shown
from dovetail.front.request_checks import check_prompt_chars
from dovetail.front.tokenizer import TokenizedText, Tokenizer
from dovetail.request.pooling import PoolingParams
from dovetail.request.request import token_array
from dovetail.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger("dovetail")

PROMPT_COST = 32  # of a prompt beside its characters, in characters
_KEYS = 8  # vLLM's prompts have six, of which None asks for nothing
# text, token ids, or {"prompt": …} / {"prompt_token_ids": …}
Prompt = str | Sequence[int] | Mapping[str, Any] | TokenizedText


def cuts(params: SamplingParams | PoolingParams | None) -> bool:
    """Tell whether a request truncates its prompt, whose text may then be longer than what fits."""
    # parameters of other types are refused later
    return getattr(params, "truncate_prompt_tokens", None) is not None


def is_text(prompt: Any) -> bool:
    """Tell whether a prompt is still to be tokenized.

    Raises `RequestError` for what can't be a prompt.
    """
    return isinstance(content_of(prompt), str)


def content_of(prompt: Any) -> Any:
    """Return the text of a prompt that is text, else what should be token ids.

    Raises `RequestError` for a mapping that is neither.
    """
    if not isinstance(prompt, Mapping):
        return prompt
    if len(prompt) <= _KEYS:
        prompt = {key: value for key, value in prompt.items() if value is not None}
    if len(prompt) != 1 or next(iter(prompt)) not in ("prompt", "prompt_token_ids"):
        keys = shown(list(prompt))
        raise RequestError(
            'a prompt given as a mapping must be {"prompt": …} or {"prompt_token_ids": …}, '
            f"got the keys {keys}"
        )
    [(key, content)] = prompt.items()
    if (key == "prompt") != isinstance(content, str):
        expected = "text" if key == "prompt" else "a list of token ids"
        raise RequestError(f'the prompt\'s "{key}" must be {expected}, got {shown(content)}')
    return content


def as_sequence(prompt: Any) -> Sequence[Any]:
    """Return a list, tuple, numpy array or torch tensor as a sequence that can be cut and counted.

    Raises `RequestError` for anything else.
    """
    ids = prompt if isinstance(prompt, BINARY) or not hasattr(prompt, "tolist") else prompt.tolist()
    if isinstance(ids, BINARY) or not isinstance(ids, Sequence):
        raise RequestError(f"the prompt must be text or a list of token ids, got {shown(prompt)}")
    return ids if isinstance(ids, list | tuple | range) else tuple(ids)


def checked_ids(given: Sequence[Any], vocab_size: int) -> NDArray[np.int32]:
    """Return a prompt's token ids [tokens], read-only. Raises `RequestError` if one is none."""
    if not given:
        raise RequestError("the prompt is empty: it needs at least one token")
    if not set(map(type, given)) <= {int}:  # seldom, and quickly seen
        for token in given:
            if not is_integer(token):
                raise RequestError(f"the prompt's token ids must be integers, got {shown(token)}")
        given = [int(token) for token in given]
    try:
        token_ids = token_array(given)
    except OverflowError:
        raise _beyond(max(given, key=abs), vocab_size) from None
    for token in (int(token_ids.min()), int(token_ids.max())):
        if not 0 <= token < vocab_size:
            raise _beyond(token, vocab_size)
    return token_ids


def _beyond(token: int, vocab_size: int) -> RequestError:
    return RequestError(
        f"prompt token id {shown(token)} is out of the vocabulary: allowed are 0 to "
        f"{vocab_size - 1}"
    )


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Prompts to make, in order."""

    chars: Sequence[int]  # of each text, 0 for token ids; within the limits of one prompt
    make: Callable[[slice], list[Prompt]]  # some of them; thread safe; raises `RequestError`

    @property
    def total_chars(self) -> int:
        """The characters of all texts, once joined."""
        return sum(self.chars)

    @property
    def cost(self) -> int:
        """The work of making all prompts, in characters."""
        return self.total_chars + PROMPT_COST * len(self.chars)

    def all(self) -> list[Prompt]:
        """Make all prompts."""
        return self.make(slice(None))

    def slices(self, most: int) -> Iterator[tuple[slice, int]]:
        """Yield consecutive slices, each with its cost: at most `most`, unless of one prompt."""
        start = cost = 0
        for place, chars in enumerate(self.chars):
            one = chars + PROMPT_COST
            if place > start and cost + one > most:
                yield slice(start, place), cost
                start = place
                cost = 0
            cost += one
        if start < len(self.chars):
            yield slice(start, len(self.chars)), cost


class PromptEncoder:
    """Tokenizes prompts that are texts. Thread safe."""

    def __init__(
        self,
        tokenizer: Callable[[], Tokenizer],
        limits: Limits,
        max_model_len: int,
        *,
        cuts_all: bool = False,
    ) -> None:
        """`tokenizer` loads it when first called. `cuts_all`: the model truncates all texts."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._max_model_len = max_model_len
        self._cuts_all = cuts_all
        self._warned = False  # of a second BOS

    def tokenized(self, prompt: Prompt, *, cut: bool = False) -> Prompt:
        """Return a prompt of text with its token ids, any other as it is.

        `cut`: its parameters truncate it. Raises `RequestError` for what can't be a prompt.
        """
        return self.source([prompt], cut=cut).all()[0] if is_text(prompt) else prompt

    def source(self, prompts: Sequence[Prompt], *, cut: bool = False) -> PromptSource:
        """Return the source of the same prompts, tokenized: together in a fraction of the time.

        `cut`: their parameters truncate them. Raises `RequestError` for what can't be a prompt, and
        for a text that is too long.
        """
        contents = [content_of(prompt) for prompt in prompts]
        chars = [len(content) if isinstance(content, str) else 0 for content in contents]
        for one in chars:
            self.check_chars(one, cut)
        return PromptSource(chars, lambda part: self.encoded(prompts[part]))

    def check_chars(self, chars: int, cut: bool) -> None:
        """Raise `RequestError` for a text of too many characters. `cut`: it is truncated."""
        if chars:  # otherwise no tokenizer is needed
            cut = cut or self._cuts_all
            tokenizer = self._tokenizer()
            check_prompt_chars(chars, self._limits, self._max_model_len, tokenizer, cut=cut)

    def encoded(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return prompts with the token ids of those that are texts."""
        texts = {
            place: content
            for place, content in enumerate(map(content_of, prompts))
            if isinstance(content, str)
        }
        encoded = self._tokenizer().encode_all(list(texts.values())) if texts else []
        if encoded and not self._warned:
            self._warn_of_second_bos(encoded)
        ids = iter(encoded)
        return [
            TokenizedText(texts[place], next(ids)) if place in texts else prompt
            for place, prompt in enumerate(prompts)
        ]

    def _warn_of_second_bos(self, encoded: Sequence[list[int]]) -> None:
        """Warn once if a text begins with BOS, and the tokenizer has added another."""
        bos = self._tokenizer().bos_token_id
        if bos is None or not any(ids[:2] == [bos, bos] for ids in encoded):
            return
        self._warned = True
        logger.warning(
            "a prompt begins with two BOS tokens: one that its text has, and one that the "
            "tokenizer adds, with which the model may answer worse. Leave it out of the text; for "
            "conversations use chat(), which adds none"
        )
