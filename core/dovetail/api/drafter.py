"""Drafter: guesses the next tokens of requests, so that one step can check several (speculative
decoding).

A guess, a *draft*, never changes what is generated: the engine samples the model's own token at
each position, with that position's noise, and keeps it and those before it (see
`dovetail.api.executor.Batch`). A good drafter makes steps yield more tokens; a bad one only wastes
work, and the engine measures which it is. This module doesn't need torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import BaseModel

from dovetail.errors import UnsupportedError
from dovetail.request import Request


def _no_tokenizer(text: str) -> list[int]:
    raise UnsupportedError("there is no tokenizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterContext:
    """Constants passed to a drafter's constructor. A drafter that needs another vocabulary or
    tokenizer raises `UnsupportedError` there, which ends the start of the engine."""

    max_drafts: int  # most that a request is asked for at once
    # Ids are 0 to vocab_size - 1. None: not known yet, as for a `ModelDrafter`, which is created
    # before the models are loaded
    vocab_size: int | None
    max_model_len: int | None  # tokens of the longest sequence; None: not known yet
    # A text -> its token ids, without special tokens. The first call loads the tokenizer, and
    # raises `DovetailError` if there is none
    encode: Callable[[str], list[int]] = _no_tokenizer
    eos_ids: tuple[int, ...] = ()  # ids that end an answer, by the model's files and its tokenizer


class Drafter(ABC):
    """Proposes drafts on the host. Created once per engine; one thread at a time calls it, not
    always the same.

    It sees all tokens of a request in `prompt_token_ids` and `output_token_ids`, which grow from
    call to call. What it learns from one request's tokens may only be proposed to requests with the
    same `client` (of None, to no other request): what is proposed shows in the timing of
    answers.
    """

    options: BaseModel

    def __init__(self, options: BaseModel, context: DrafterContext) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return, for each of `requests`, the tokens that are likely to follow its last one, in
        order: at most `most[i]` (at least 1) for the i-th, possibly none. The engine waits for it
        between steps, so it should take microseconds per request.

        If it raises, returns ids outside the vocabulary, or takes longer than
        `speculation.timeout_s`, the step goes on without drafts, and the log names the drafter
        once.
        """

    def on_finished(self, request: Request) -> None:
        """Forget `request`, or learn from it: it has ended, and won't be proposed for again. Also
        called if it never was."""


class ModelDrafter(Drafter):
    """Drafts come from a smaller model of the same vocabulary, or a head, which the executor runs.
    It draws with the target's noise, temperature and filters."""

    # "package.module:Class" of a `dovetail.api.draft_head.HeadArch`, made with the drafter's
    # options: `model` is a head. None: a whole model
    head: ClassVar[str | None] = None

    @property
    @abstractmethod
    def model(self) -> str | None:
        """A model's name or directory, as `model` in `engine.yaml`. None: the head is in the
        checkpoint of the engine's model."""

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> Sequence[Sequence[int]]:
        """Not called: the executor proposes."""
        return [()] * len(requests)
