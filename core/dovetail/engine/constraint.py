"""`Constraint`: applies a grammar to one sample.

Holds the sample back during compilation, then masks and checks its tokens. It may also bound what
comes before the grammar, such as reasoning, with or without a grammar after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from dovetail.api.grammar import Grammar, GrammarBackend, Matcher
from dovetail.end_reason import EndReason
from dovetail.engine.finish import Finish
from dovetail.errors import DovetailError


class Constraint:
    """A `Preparation` until the grammar is compiled, and a `TokenWatcher` afterwards.

    Samples share `compiling`; each has its own matcher.
    """

    __slots__ = (
        "_after",
        "_closing",
        "_compiling",
        "_left",
        "_matcher",
        "_seen",
        "_tail",
        "_token_bytes",
        "backend",
    )

    def __init__(
        self,
        compiling: Future[Grammar] | None,
        backend: GrammarBackend | None,
        after: bytes = b"",
        token_bytes: Sequence[bytes | None] | None = None,
        most: int | None = None,
        closing: Sequence[int] = (),
    ) -> None:
        """`compiling` yields the grammar of `backend`, or a `RequestError`; None: any text.

        The grammar applies after the first `after` in the answer, which may be the text of a
        special token if `token_bytes` has those; None: the backend's bytes, without special tokens.
        `most`: the tokens that may come without `after`; then the token ids `closing`, which spell
        it, are forced.
        """
        self.backend = backend
        self._compiling = compiling
        self._after = after  # not seen yet; empty: the grammar has begun
        # if negative, how many of `_closing` have been forced
        self._left = most
        self._closing = closing
        self._tail = b""  # the end of the text so far, shorter than `_after`
        self._token_bytes = (
            backend.context.token_bytes
            if token_bytes is None and backend is not None
            else token_bytes or ()
        )
        self._matcher: Matcher | None = None
        self._seen: Finish | bool = False  # see `saw`

    def closed(self) -> bool:
        return self._compiling is not None and not self._compiling.done()

    def failed(self) -> Finish | None:
        if self._compiling is None or not self._compiling.done():
            return None
        error = self._compiling.exception()
        if error is None:
            return None
        return Finish(EndReason.GRAMMAR, str(error) or type(error).__name__)

    def may_mask(self, ahead: int) -> bool:
        """Return False if any token is allowed after `ahead` more tokens, whatever they are."""
        return self._compiling is not None or (
            bool(self._after) and self._left is not None and self._left <= ahead
        )

    @property
    def forced(self) -> int | None:
        """The only token that is allowed next, because nothing but `after` may follow; None
        otherwise."""
        if not self._after or self._left is None or self._left > 0:
            return None
        return self._closing[-self._left % len(self._closing)]

    @property
    def matcher(self) -> Matcher | None:
        """Return the matcher of the next token; None while any token is allowed, or one is
        `forced`."""
        if self._after or self._compiling is None:
            return None
        if self._matcher is None:
            self._matcher = self._compiling.result(timeout=0).begin()
        return self._matcher

    def forced_drafts(self, most: int) -> Sequence[int]:
        """Return at most `most` of the next tokens, if the grammar determines them and can check
        them as drafts."""
        if (
            self.backend is None
            or self.matcher is None
            or not self.backend.capabilities.rollback
            or not self.backend.capabilities.forced
        ):
            return ()
        try:
            return [*self.matcher.forced()[:most]]
        except Exception:  # it fails again when the mask is filled, which ends the request
            return ()

    def checkable(self, drafts: Sequence[int]) -> int:
        """Return how many of `drafts` a step can check.

        Masks begin after the text `after`: a token that completes it comes last in its step, as
        does the last one before `after` is forced.
        """
        if not self._after:
            return len(drafts) if self.backend is None or self.backend.capabilities.rollback else 0
        if self._left is not None:
            drafts = drafts[: max(0, self._left - 1)]
        text = self._tail
        for index, token in enumerate(drafts):
            text += self._token_bytes[token] or b""
            if self._after in text:
                return index
        return len(drafts)

    def saw(self, end: Finish | bool) -> None:
        """Note that the matcher has accepted the next token for `see` already, or why it failed at
        it."""
        self._seen = end

    def see(self, token: int) -> Finish | None:
        if self._seen:
            return self._see_again()
        if self._after:
            if self._left is not None:
                self._left = self._left - 1 if self.forced in (None, token) else 0
            self._look_for_beginning(self._token_bytes[token] or b"")
            return None
        if (matcher := self.matcher) is None:
            return None
        try:
            accepted = matcher.accept(token)
        except Exception as error:  # it went beyond a limit of its library, say
            return failure(error)
        if not accepted:
            return Finish(
                EndReason.ERROR,
                f"token {token} was sampled, which the grammar doesn't allow: the executor or the "
                f"grammar backend is at fault",
            )
        return Finish(EndReason.STOP, keeps_token=True) if matcher.complete else None

    def _see_again(self) -> Finish | None:
        """Return the end by a token that the matcher has accepted already."""
        seen = self._seen
        self._seen = False
        if isinstance(seen, Finish):
            return seen
        complete = self._matcher is not None and self._matcher.complete
        return Finish(EndReason.STOP, keeps_token=True) if complete else None

    def _look_for_beginning(self, text: bytes) -> None:
        """Look for `after`.

        The rest of the token that completes it is ignored: a token may hold `>` and line breaks.
        """
        seen = self._tail + text
        if self._after in seen:
            self._after = self._tail = b""
        else:
            self._tail = seen[max(0, len(seen) - len(self._after) + 1) :]


def failure(error: Exception) -> Finish:
    """Return the end by a matcher's failure: the grammar's fault if it exceeds its backend."""
    if isinstance(error, DovetailError):
        why = f"structured: the grammar can't be followed to the end: {error}"
        return Finish(EndReason.GRAMMAR_LIMIT, why)
    return Finish(EndReason.ERROR, f"its grammar failed: {type(error).__name__}: {error}")
