"""`OwnTexts`: the text of each request that drafts are made for, indexed as it grows."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.request import Request
from dovetail_drafters.token_index import TokenIndex

# tokens that one call of `propose` adds, in one or two milliseconds: a long prompt takes several
# calls
MAX_READ = 8192


class OwnTexts:
    """Request id -> index of its prompt and output."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._texts: dict[str, TokenIndex] = {}

    def read(self, requests: Sequence[Request]) -> list[TokenIndex | None]:
        """Return the index of each request, up to date; None for one that couldn't be read to its
        end yet."""
        left = MAX_READ
        indices: list[TokenIndex | None] = []
        for request in requests:
            index = self._texts.get(request.id)
            if index is None:
                index = self._texts[request.id] = TokenIndex(self._width)
            left -= self._read(index, request, left)
            indices.append(index if len(index.token_ids) == request.num_tokens else None)
        return indices

    def forget(self, request: Request) -> None:
        self._texts.pop(request.id, None)

    @staticmethod
    def _read(index: TokenIndex, request: Request, most: int) -> int:
        """Add at most `most` tokens to the index. Returns how many."""
        known = len(index.token_ids)
        if known < request.prompt_tokens:
            index.extend(request.prompt_array[known : known + most].tolist())
        done = len(index.token_ids) - request.prompt_tokens
        if done >= 0:
            index.extend(
                request.output_token_ids[done : done + known + most - len(index.token_ids)]
            )
        return len(index.token_ids) - known


def continued(token_ids: Sequence[int], place: int, most: int) -> list[int]:
    """Return the `most` tokens from `place` on, which is at most the last; where the text ends, it
    goes on with those returned already, as a loop does."""
    left = len(token_ids) - place
    tokens = list(token_ids[place : place + most])
    while len(tokens) < most:
        tokens.append(tokens[len(tokens) - left])
    return tokens
