"""Prompts with images: `ImagePrompt` has its images as they came, `MediaPrompt` has them prepared.
`ImagePrompts` makes the second of the first.

In an `ImagePrompt` one token stands for an image. It is known by its place: the same token
elsewhere in the prompt is text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.api.media_types import MediaType, media_type_of
from dovetail.config.limits import Limits
from dovetail.errors import RequestError
from dovetail.front.media.facts import MediaFacts
from dovetail.front.media.fetching import Fetcher
from dovetail.front.media.layouts import Layout, Piece, layout_of
from dovetail.front.media.processes import ImageProcesses, PreparedImage
from dovetail.front.media.sources import ImageSource, SourceKind, check_count
from dovetail.front.tokenizer import Tokenizer
from dovetail.request.media import MediaItem

_MOST_NEWLINES = 32  # tokens of newlines next to an image that are looked at


class _Newlines(NamedTuple):
    """Newlines next to an image."""

    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A tokenized prompt, with images that aren't prepared yet. Plain values, but for images of
    Pillow."""

    text: str | None  # None if the prompt was given as token ids
    token_ids: Sequence[int]  # with one placeholder for each image
    images: tuple[ImageSource, ...] = field(repr=False)
    # of each image, which placeholder of `token_ids` it is, ascending; the others are text
    occurrences: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)  # of the image processor


@dataclass(frozen=True, slots=True)
class MediaPrompt:
    """A tokenized prompt with images, prepared: what `Intake.check` takes."""

    text: str | None
    token_ids: Sequence[int]  # with a placeholder for each row of an image
    media: tuple[MediaItem, ...]


class ImagePrompts:
    """Prepares the images of prompts, for one engine. Thread safe.

    A server reads a conversation with `ChatFrontEnd.prompt` and brings the result here, both off
    its event loop:

    ```python
    prompt = chat.prompt(messages, options)  # an `ImagePrompt`, if there are images
    if isinstance(prompt, ImagePrompt):
        prompt = images.prepared(prompt)  # blocks for 10 to 200 ms an image, most of it waiting
    entered = intake.check(request_id, prompt, params, fields)  # `entered.request.media`
    ```

    `PromptEncoder.source` does the second step for the prompts that it is given, too.
    """

    def __init__(
        self,
        facts: MediaFacts,
        limits: Limits,
        tokenizer: Callable[[], Tokenizer],
        max_model_len: int | None = None,
        *,
        processes: ImageProcesses | None = None,
    ) -> None:
        """`tokenizer` loads it when first called. `max_model_len`: of the model, in tokens; None if
        prompts may be of any length. `processes` takes the place of its own, for tests."""
        self.facts = facts
        self._limits = limits
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._processes = processes or ImageProcesses(facts.model_dir, limits, facts.kept_bytes)
        self._tokens_of = lru_cache(maxsize=256)(self._encoded)

    @cached_property
    def _type(self) -> MediaType:
        media_type = media_type_of(self.facts.config)
        assert media_type is not None
        return media_type

    @cached_property
    def _layout(self) -> Layout:
        return layout_of(Path(self.facts.model_dir), self.facts.config, self._spelled)

    @cached_property
    def _row_id(self) -> int:
        return self._type.placeholder(self.facts.config)

    @cached_property
    def token_id(self) -> int:
        """The token that stands for an image in a prompt that isn't expanded."""
        return self._type.unexpanded(self.facts.config)

    @cached_property
    def text(self) -> str:
        """The text of `token_id`."""
        return self._spelled(self.token_id)

    @cached_property
    def written(self) -> str:
        """How chat templates write an image."""
        return self._type.written or self.text

    def _spelled(self, token_id: int) -> str:
        return self._tokenizer().token_strings([token_id])[0]

    def close(self) -> None:
        """End the processes; another image starts new ones."""
        self._processes.close()

    def unprepared(
        self,
        text: str | None,
        token_ids: Sequence[int],
        images: tuple[ImageSource, ...],
        options: Mapping[str, Any],
    ) -> ImagePrompt:
        """Return a prompt in which each placeholder is an image, in order. `options`: of the image
        processor. Raises `RequestError` if the numbers of both differ."""
        check_count(images, self._limits)
        found = sum(1 for one in token_ids if one == self.token_id)
        if found != len(images):
            raise RequestError(
                f"the prompt must have one {self.text!r} for each image: it has {found}, and there "
                f"are {len(images)} images"
            )
        return ImagePrompt(text, token_ids, images, tuple(range(found)), options)

    def prepared(self, prompt: ImagePrompt) -> MediaPrompt:
        """Return the prompt of `all_prepared`."""
        return self.all_prepared([prompt])[0]

    def all_prepared(
        self, prompts: Sequence[ImagePrompt], wanted: Callable[[], bool] = lambda: True
    ) -> list[MediaPrompt]:
        """Fetch, decode and prepare the images of prompts, as many at once as there are processes,
        and put their tokens in the places of their placeholders.

        Blocks. `wanted`: called before each image, in any thread; False ends the work with a
        `RequestError`. Raises `RequestError` for the first image that can't be used, and what
        `ImageProcesses.image` raises.
        """
        for prompt in prompts:
            check_count(prompt.images, self._limits)
        images: list[list[Future[PreparedImage]]] = []
        with ThreadPoolExecutor(self._processes.most) as threads:
            try:
                for prompt in prompts:
                    settings = {**self.facts.options, **prompt.options}
                    arguments = self._layout.with_options(settings)
                    prepare = partial(
                        self._image,
                        arguments=arguments,
                        wanted=wanted,
                        beside_others=self._layout.knows_others and len(prompt.images) > 1,
                    )
                    images.append([threads.submit(prepare, source) for source in prompt.images])
                return [
                    self._with_images(prompt, self._within_model(each))
                    for prompt, each in zip(prompts, images, strict=True)
                ]
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    def _within_model(self, images: Iterable[Future[PreparedImage]]) -> list[PreparedImage]:
        """Wait for the images of a prompt. Raises `RequestError` at the first that makes it too
        long, so that the others, of megabytes each, needn't be prepared."""
        done = []
        rows = 0
        for one in images:
            image = one.result()
            rows += sum([piece for piece in self._layout.pieces(image) if isinstance(piece, int)])
            if self._max_model_len is not None and rows >= self._max_model_len:
                raise RequestError(
                    f"the prompt's images have {rows:,} tokens or more, which leaves no room in "
                    f"max_model_len {self._max_model_len:,}"
                )
            done.append(image)
        return done

    def _with_images(self, prompt: ImagePrompt, images: Sequence[PreparedImage]) -> MediaPrompt:
        occurrences = set(prompt.occurrences)
        tokens = list(prompt.token_ids)
        ids: list[int] = []
        media: list[MediaItem] = []
        seen = -1
        place = 0
        while place < len(tokens):
            seen += tokens[place] == self.token_id
            if tokens[place] != self.token_id or seen not in occurrences:
                ids.append(tokens[place])
                place += 1
                continue
            place += 1
            image = images[len(media)]
            before = self._newlines(reversed(ids))
            after = self._newlines(tokens[place : place + _MOST_NEWLINES])
            place += after.tokens
            del ids[len(ids) - before.tokens :]
            pieces = [before.text, *self._layout.pieces(image), after.text]
            expanded, runs = self._expanded(pieces)
            source = prompt.images[len(media)]
            media.append(self._item(image, runs, len(ids), source.place))
            ids += expanded
        if len(media) < len(images):
            raise RequestError(
                f"the prompt has {self.text!r} {seen + 1} times, which is too few for its images"
            )
        return MediaPrompt(prompt.text, ids, tuple(media))

    def _newlines(self, tokens: Iterable[int]) -> _Newlines:
        """Return the newlines with which tokens begin, of types whose images' own join them."""
        text = ""
        count = 0
        for token in islice(tokens, _MOST_NEWLINES) if self._layout.joins_newlines else ():
            spelled = self._tokenizer().decode([token])
            if not spelled or spelled.strip("\n"):
                break
            text += spelled
            count += 1
        return _Newlines(text, count)

    def _image(
        self,
        source: ImageSource,
        arguments: Mapping[str, Any],
        wanted: Callable[[], bool],
        *,
        beside_others: bool,
    ) -> PreparedImage:
        if not wanted():
            raise RequestError(f"{source.place}: nobody waits for it any more")
        if source.kind is SourceKind.URL:
            data = Fetcher(self.facts.hosts, self._limits).fetch(source)
        elif source.kind is SourceKind.PIL:
            data = None
        else:
            data = source.file_bytes(self._limits)
        most = self._layout.max_patches(
            min(self.facts.cache_rows, self._max_model_len or self.facts.cache_rows)
        )
        return self._processes.image(
            source,
            data,
            arguments,
            most,
            as_bytes=self._layout.as_bytes,
            beside_others=beside_others,
        )

    def _expanded(self, pieces: Sequence[Piece]) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of an image, and its runs: (index of the first token, number)."""
        row = self._spelled(self._row_id)
        text = "".join([one if isinstance(one, str) else row for one in pieces])
        counts = [one for one in pieces if isinstance(one, int)]
        encoded = self._tokens_of(text)
        if encoded.count(self._row_id) != len(counts):
            raise RequestError("the tokenizer doesn't know the tokens of the model's images")
        left = iter(counts)
        ids: list[int] = []
        runs: list[tuple[int, int]] = []
        for token in encoded:
            if token == self._row_id:
                count = next(left)
                runs.append((len(ids), count))
                ids += [token] * count
            else:
                ids.append(token)
        return ids, runs

    def _encoded(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer().encode(text, special_tokens=False))

    def _item(
        self, image: PreparedImage, runs: Sequence[tuple[int, int]], start: int, place: str
    ) -> MediaItem:
        """Return the item of an image whose tokens begin at `start`. Raises `RequestError` if the
        engine can't compute it."""
        item = MediaItem(
            kind="image",
            digest=image.digest,
            runs=tuple((start + first, count) for first, count in runs if count),
            tensors=self._layout.tensors(image),
            grid=self._layout.grid(image),
            whole=self._type.whole(self.facts.config),
        )
        if item.rows < self._type.least_rows:
            raise RequestError(
                f"{place}: it is too small for the model: the image processor makes {item.rows} "
                f"rows of it, and at least {self._type.least_rows} are needed"
            )
        if item.rows > self.facts.cache_rows:
            raise RequestError(
                f"{place}: it has {item.rows:,} rows, and at most {self.facts.cache_rows:,} fit "
                f"(media.cache_rows)"
            )
        longest = max(count for _, count in item.runs)
        if item.whole and longest > self.facts.step_tokens:
            raise RequestError(
                f"{place}: {longest:,} of its tokens are computed in one step, and at most "
                f"{self.facts.step_tokens:,} fit (max_num_batched_tokens)"
            )
        return item
