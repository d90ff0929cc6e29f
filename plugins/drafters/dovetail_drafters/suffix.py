"""`SuffixDrafter`: continues as earlier text did after the longest match, in the request itself or
in earlier answers to its client.

The idea, and that the length of a draft follows the length of the match and the share of the
continuations, is SuffixDecoding's (Oliaro et al., arXiv:2411.04975).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from pydantic import Field

from dovetail.api.drafter import Drafter, DrafterContext
from dovetail.request import Request
from dovetail_drafters.match_options import MAX_MATCH, MatchOptions
from dovetail_drafters.own_text import OwnTexts, continued
from dovetail_drafters.token_index import TokenIndex

# tokens: a match below SHORT gives way to one of LONG or more that ended a token ago
SHORT = 4
LONG = 8
MAX_LEFT_OUT = 4  # tokens that an edit may leave out
SEPARATOR = -1  # between answers


class SuffixOptions(MatchOptions):
    max_match: int = Field(
        24,
        ge=1,
        le=MAX_MATCH,
        description="Most tokens that are compared: the longest match up to this wins.",
    )
    max_factor: float = Field(
        2.0, gt=0, le=64, description="Drafts are at most this many times as long as the match."
    )
    min_share: float = Field(
        0.3,
        ge=0,
        le=1,
        description="A draft ends where less than this share of the places that match would "
        "continue as it does.",
    )
    kept_tokens: int = Field(
        65_536,
        ge=0,
        le=2**28,
        description="Most tokens of earlier answers that are kept for a client; 0: none.",
    )
    kept_clients: int = Field(
        64,
        ge=1,
        le=2**20,
        description="Most clients whose answers are kept, of those with the latest ones.",
    )


class SuffixDrafter(Drafter):
    """Finds the longest match of a request's last tokens, and proposes what came next at most of
    its places. It searches the request's own text, and earlier answers to the same `client` (of
    None, none are kept). After a token that edits what is being copied, it goes on copying."""

    options: SuffixOptions

    def __init__(self, options: SuffixOptions, context: DrafterContext) -> None:
        super().__init__(options, context)
        self._own = OwnTexts(options.min_match)
        # client -> its own; the latest last
        self._answers: OrderedDict[str, _Answers] = OrderedDict()

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        return [
            []
            if own is None
            else self._draft(
                own, None if request.client is None else self._answers.get(request.client), limit
            )
            for own, request, limit in zip(self._own.read(requests), requests, most, strict=True)
        ]

    def on_finished(self, request: Request) -> None:
        self._own.forget(request)
        if request.client is None or not request.generated or self.options.kept_tokens < 2:
            return
        answers = self._answers.pop(request.client, None) or _Answers(self.options)
        self._answers[request.client] = answers
        answers.add(request)
        if len(self._answers) > self.options.kept_clients:
            self._answers.popitem(last=False)

    def _draft(self, own: TokenIndex, answers: _Answers | None, most: int) -> list[int]:
        best, length, places = own, *own.places_after(own.token_ids, self.options.max_match)
        for index in () if answers is None else answers.indices:
            other, others = index.places_after(own.token_ids, self.options.max_match)
            if other > length:
                best = index
                length = other
                places = others
        if length < SHORT and (edited := self._past_an_edit(own)) is not None:
            best = own
            length = SHORT
            places = [edited]
        most = min(most, int(length * self.options.max_factor))
        return self._vote([continued(best.token_ids, place, most) for place in places], most)

    def _past_an_edit(self, own: TokenIndex) -> int | None:
        """Return where a text goes on that was being copied until the last token, which replaces
        one of it, or follows some that were left out."""
        last = len(own.token_ids) - 1
        length, places = own.places_after(
            own.token_ids[-1 - MAX_MATCH : -1], self.options.max_match, 1, last
        )
        if length < LONG:
            return None
        after = own.token_ids[places[0] : places[0] + MAX_LEFT_OUT + 1]
        place = (
            places[0]
            + 1
            + (after.index(own.token_ids[last]) if own.token_ids[last] in after else 0)
        )
        return place if place < last else None

    def _vote(self, texts: list[list[int]], most: int) -> list[int]:
        """Return the beginning that most of `texts` share, token by token; of equally frequent ones
        the first's."""
        draft: list[int] = []
        needed = self.options.min_share * len(texts)
        while len(draft) < most:
            if len(texts) >= needed and texts.count(texts[0]) == len(texts):  # the usual case
                draft += texts[0][len(draft) :]
                break
            [(token, count)] = Counter(text[len(draft)] for text in texts).most_common(1)
            if count < needed:
                break
            texts = [text for text in texts if text[len(draft)] == token]
            draft.append(token)
        return draft[: draft.index(SEPARATOR)] if SEPARATOR in draft else draft


class _Answers:
    """The latest answers to one client, each after the end of its prompt: in two indices, of which
    the older is dropped when the younger is full."""

    def __init__(self, options: SuffixOptions) -> None:
        self._options = options
        self._most = options.kept_tokens // 2
        self.indices = [TokenIndex(options.min_match)]  # the younger first

    def add(self, request: Request) -> None:
        context = request.prompt_array[-self._options.max_match :].tolist()
        text = [*context, *request.output_token_ids, SEPARATOR][-self._most :]
        if len(self.indices[0].token_ids) + len(text) > self._most:
            self.indices = [TokenIndex(self._options.min_match), self.indices[0]]
        self.indices[0].extend(text)
