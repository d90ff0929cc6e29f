"""`TokenIndex`: a growing text of token ids, in which earlier occurrences of its end, or of another
text's end, are found.

A hash table of the last place of each run of a few tokens, and for each place the one before it
with the same hash: the match finder of deflate (RFC 1951, section 4). It takes 12 bytes a token,
and some 200 ns to add one; a suffix automaton in Python takes several hundred bytes and
microseconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

HASH_BITS = 14
MAX_VISITED = 256  # places that a search visits, the newest first
MAX_FOUND = 16  # places that a search returns


class TokenIndex:
    """Tokens that were added, in order. -1 separates texts: no match goes across it."""

    def __init__(self, width: int) -> None:
        """`width`: the shortest match that is found, in tokens; at least 1."""
        self.width = width
        self.token_ids = array("i")
        self._shift = -(-HASH_BITS // width)  # a token leaves the hash after at most `width` more
        # hash -> the newest place: the index of the token after a run with this hash
        self._newest = array("i", [-1]) * (1 << HASH_BITS)
        self._previous = array("i")  # [place - 1] the place before it with the same hash; -1: none
        self._hash = 0  # of the last tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        mask = (1 << HASH_BITS) - 1
        shift = self._shift
        newest = self._newest
        previous = self._previous
        value = self._hash
        for place, token in enumerate(token_ids, start=len(self.token_ids) + 1):
            value = ((value << shift) ^ token) & mask
            previous.append(newest[value])
            newest[value] = place
        self._hash = value
        self.token_ids.extend(array("i", token_ids))

    def places_after(
        self, text: array[int], longest: int, most: int = MAX_FOUND, limit: int | None = None
    ) -> tuple[int, list[int]]:
        """Return the length of the longest end of `text`, of `width` to `longest` tokens, that
        occurs here with a token after it, and the indices of these tokens, the newest first, at
        most `most`. (0, []) if there is none. `limit`: only of those below it. Of long chains only
        the newest places are visited."""
        best = self.width
        limit = len(self.token_ids) if limit is None else limit
        end = text[-longest:]
        longest = len(end)
        if longest < best:
            return 0, []
        value = 0
        mask = (1 << HASH_BITS) - 1
        for token in end[-best:]:
            value = ((value << self._shift) ^ token) & mask
        tokens = self.token_ids
        previous = self._previous
        found = []
        place = self._newest[value]
        wanted = end[-best:]
        for _ in range(MAX_VISITED):
            if place < best:
                break
            if tokens[place - best : place] == wanted and place < limit:
                length = best
                while (
                    length < longest
                    and length < place
                    and tokens[place - 1 - length] == end[longest - 1 - length]
                ):
                    length += 1
                if length > best:
                    best = length
                    found = [place]
                    wanted = end[-length:]
                else:
                    found.append(place)
                if best == longest and len(found) == most:
                    break
            place = previous[place - 1]
        return (best, found[:most]) if found else (0, [])
