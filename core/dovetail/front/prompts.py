"""Prompts: text, token ids, or a mapping that says which; and their way to token ids.

`PromptSource` has prompts whose texts have been measured, but neither joined nor tokenized: that
takes time and memory by the character, and so does preparing images. The library does all at once,
a server does it in slices, so that clients share its threads fairly. `PromptEncoder` does it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dovetail.base.checks import BINARY, is_integer
from dovetail.config.limits import Limits
from dovetail.errors import RequestError, shown
from dovetail.front.media.facts import IMAGES_AT_ONCE
from dovetail.front.media.prompts import ImagePrompt, ImagePrompts, MediaPrompt
from dovetail.front.media.sources import NO_IMAGES, images_of_data
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
IMAGE_COST = 50_000  # of an image to prepare, likewise: about as long as a text takes
_DATA = "multi_modal_data"
_OPTIONS = "mm_processor_kwargs"
_KEYS = 8  # vLLM's prompts have six, of which None asks for nothing
# text, token ids, or {"prompt": …} / {"prompt_token_ids": …}, with images {…, "multi_modal_data":
# {"image": …}}
Prompt = str | Sequence[int] | Mapping[str, Any] | TokenizedText | ImagePrompt | MediaPrompt


def cuts(params: SamplingParams | PoolingParams | None) -> bool:
    """Tell whether a request truncates its prompt, whose text may then be longer than what fits."""
    # parameters of other types are refused later
    return getattr(params, "truncate_prompt_tokens", None) is not None


def is_unmade(prompt: Any) -> bool:
    """Tell whether a prompt is still to be tokenized, or has images to prepare.

    Raises `RequestError` for what can't be a prompt.
    """
    return isinstance(content_of(prompt, images=True), str) or images_in(prompt) > 0


def images_in(prompt: Any) -> int:
    """Return the number of images of a prompt that aren't prepared."""
    if isinstance(prompt, ImagePrompt):
        return len(prompt.images)
    if not isinstance(prompt, Mapping):
        return 0
    data = prompt.get(_DATA)
    given = data.get("image") if isinstance(data, Mapping) else data
    return len(given) if isinstance(given, list | tuple) else int(bool(data))


def content_of(prompt: Any, *, images: bool = False) -> Any:
    """Return the text of a prompt that is text, else what should be token ids. `images`: it may
    have some.

    Raises `RequestError` for a mapping that is neither.
    """
    if not isinstance(prompt, Mapping):
        return prompt
    if len(prompt) <= _KEYS:
        prompt = {key: value for key, value in prompt.items() if value is not None}
        prompt = _without_images(prompt, allowed=images)
    if len(prompt) != 1 or next(iter(prompt)) not in ("prompt", "prompt_token_ids"):
        keys = shown(list(prompt))
        raise RequestError(
            'a prompt given as a mapping must be {"prompt": …} or {"prompt_token_ids": …}, with '
            f'images {{…, "{_DATA}": {{"image": …}}}}, got the keys {keys}'
        )
    [(key, content)] = prompt.items()
    if (key == "prompt") != isinstance(content, str):
        expected = "text" if key == "prompt" else "a list of token ids"
        raise RequestError(f'the prompt\'s "{key}" must be {expected}, got {shown(content)}')
    return content


def _without_images(prompt: Mapping[str, Any], *, allowed: bool) -> Mapping[str, Any]:
    if prompt.get(_DATA) and not allowed:
        raise RequestError(f"the prompt's {_DATA}: only requests that generate take images")
    return {key: value for key, value in prompt.items() if key not in (_DATA, _OPTIONS)}


def with_images(prompt: Prompt, data: Any, options: Mapping[str, Any]) -> Prompt:
    """Return a prompt with the images of `multi_modal_data` and with options of the image
    processor, if it has images. Raises `RequestError`."""
    _check_options(options)
    if isinstance(prompt, ImagePrompt):
        return replace(prompt, options={**prompt.options, **options})
    if data is None and not images_in(prompt):
        return prompt
    given = prompt if isinstance(prompt, Mapping) else {}
    if not given:
        given = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    if data is not None and given.get(_DATA):
        raise RequestError(f"{_DATA}: the prompt and the call both have some")
    own = given.get(_OPTIONS) or {}
    _check_options(own)
    return {**given, _DATA: given.get(_DATA) or data, _OPTIONS: {**own, **options}}


def _check_options(options: Any) -> None:
    if not isinstance(options, Mapping):
        raise RequestError(f"{_OPTIONS} must be a mapping, got {shown(options)}")


def as_image_prompt(
    prompt: Mapping[str, Any], token_ids: Sequence[Any], images: ImagePrompts
) -> ImagePrompt:
    """Return a mapping with images, of which `token_ids` are the tokens. Raises `RequestError`."""
    text = prompt.get("prompt")
    options = prompt.get(_OPTIONS) or {}
    _check_options(options)
    return images.unprepared(text, token_ids, images_of_data(prompt[_DATA]), options)


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
    images: Sequence[int] = ()  # to prepare for each prompt; empty: none for any

    @property
    def total_chars(self) -> int:
        """The characters of all texts, once joined."""
        return sum(self.chars)

    @property
    def cost(self) -> int:
        """The work of making all prompts, in characters."""
        return sum(map(self._cost_of, range(len(self.chars))))

    def _cost_of(self, place: int) -> int:
        images = self.images[place] if self.images else 0
        return self.chars[place] + PROMPT_COST + IMAGE_COST * images

    def all(self) -> list[Prompt]:
        """Make all prompts."""
        return self.make(slice(None))

    def parts(self) -> Iterator[tuple[slice, list[Prompt]]]:
        """Make all prompts, and yield parts of them with their places: all at once, or if there are
        images, about as many as are prepared at once."""
        if not any(self.images):
            yield slice(None), self.all()
            return
        for part, _ in self.slices(IMAGES_AT_ONCE * (IMAGE_COST + PROMPT_COST)):
            yield part, self.make(part)

    def slices(self, most: int) -> Iterator[tuple[slice, int]]:
        """Yield consecutive slices, each with its cost: at most `most`, unless of one prompt."""
        start = cost = 0
        for place in range(len(self.chars)):
            one = self._cost_of(place)
            if place > start and cost + one > most:
                yield slice(start, place), cost
                start = place
                cost = 0
            cost += one
        if start < len(self.chars):
            yield slice(start, len(self.chars)), cost


class PromptEncoder:
    """Tokenizes prompts that are texts, and prepares their images. Thread safe."""

    def __init__(
        self,
        tokenizer: Callable[[], Tokenizer],
        limits: Limits,
        max_model_len: int,
        *,
        cuts_all: bool = False,
        images: ImagePrompts | None = None,
    ) -> None:
        """`tokenizer` loads it when first called. `cuts_all`: the model truncates all texts.
        `images`: prepares them; None if the engine takes none."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._max_model_len = max_model_len
        self._cuts_all = cuts_all
        self._images = images
        self._warned = False  # of a second BOS

    def tokenized(self, prompt: Prompt, *, cut: bool = False) -> Prompt:
        """Return a prompt of text with its token ids, one with images with these prepared, any
        other as it is.

        `cut`: its parameters truncate it. Raises `RequestError` for what can't be a prompt.
        """
        return self.source([prompt], cut=cut).all()[0] if is_unmade(prompt) else prompt

    def source(self, prompts: Sequence[Prompt], *, cut: bool = False) -> PromptSource:
        """Return the source of the same prompts, tokenized: together in a fraction of the time.

        `cut`: their parameters truncate them. Raises `RequestError` for what can't be a prompt, and
        for a text that is too long.
        """
        contents = [content_of(prompt, images=True) for prompt in prompts]
        chars = [len(content) if isinstance(content, str) else 0 for content in contents]
        for one in chars:
            self.check_chars(one, cut)
        images = [*map(images_in, prompts)]
        if any(images):
            for prompt in prompts:
                if isinstance(prompt, Mapping):
                    images_of_data(prompt.get(_DATA) or {})
            self._check_images(cut)
        return PromptSource(chars, lambda part: self.encoded(prompts[part]), images)

    def with_images(
        self, prompt: ImagePrompt, *, cut: bool = False, wanted: Callable[[], bool] = lambda: True
    ) -> MediaPrompt:
        """Return a prompt with its images prepared.

        `cut`: its parameters truncate it. `wanted`, and what is raised: as
        `ImagePrompts.all_prepared` has it.
        """
        return self._check_images(cut).all_prepared([prompt], wanted)[0]

    def _check_images(self, cut: bool) -> ImagePrompts:
        """Return what prepares images. Raises `RequestError` if they can't be taken."""
        if self._images is None:
            raise RequestError(NO_IMAGES)
        if cut:
            raise RequestError("truncate_prompt_tokens: a prompt with images can't be truncated")
        return self._images

    def check_chars(self, chars: int, cut: bool) -> None:
        """Raise `RequestError` for a text of too many characters. `cut`: it is truncated."""
        if chars:  # otherwise no tokenizer is needed
            cut = cut or self._cuts_all
            tokenizer = self._tokenizer()
            check_prompt_chars(chars, self._limits, self._max_model_len, tokenizer, cut=cut)

    def encoded(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return prompts with the token ids of those that are texts, and with their images
        prepared."""
        texts = {
            place: content
            for place, prompt in enumerate(prompts)
            if isinstance(content := content_of(prompt, images=True), str)
        }
        encoded = self._tokenizer().encode_all(list(texts.values())) if texts else []
        if encoded and not self._warned:
            self._warn_of_second_bos(encoded)
        ids = dict(zip(texts, encoded, strict=True))
        given = {
            place: self._as_image_prompt(prompt, ids.get(place))
            for place, prompt in enumerate(prompts)
            if images_in(prompt)
        }
        prepared = self._check_images(cut=False).all_prepared([*given.values()]) if given else []
        with_images = dict(zip(given, prepared, strict=True))
        return [
            with_images[place]
            if place in with_images
            else TokenizedText(texts[place], ids[place])
            if place in texts
            else prompt
            for place, prompt in enumerate(prompts)
        ]

    def _as_image_prompt(self, prompt: Prompt, ids: Sequence[int] | None) -> ImagePrompt:
        """Return a prompt with images, tokenized. `ids`: of its text, if it is a mapping with
        text."""
        if isinstance(prompt, Mapping):
            images = self._check_images(cut=False)
            tokens = as_sequence(content_of(prompt, images=True)) if ids is None else ids
            prompt = as_image_prompt(prompt, tokens, images)
        assert isinstance(prompt, ImagePrompt)
        return prompt

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
