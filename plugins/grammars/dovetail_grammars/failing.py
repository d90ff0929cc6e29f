"""`Failing`: base of both backends' matchers. Once failed, a matcher stays failed, regardless of its library's behavior."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import TypeVar

from dovetail.api.grammar import Matcher
from dovetail.errors import DovetailError

Call = TypeVar("Call", bound=Callable[..., object])


class Failing(Matcher):
    """`failure`: the reason why it can't continue, once a method decorated with `may_fail` has raised it. From then on all of them raise it."""

    failure: str | None = None

    def require_not_failed(self) -> None:
        if self.failure is not None:
            raise DovetailError(self.failure)


def may_fail(call: Call) -> Call:
    """Decorate a method of a `Failing`."""

    @wraps(call)
    def checked(self: Failing, *args: object) -> object:
        self.require_not_failed()
        try:
            return call(self, *args)
        except DovetailError as error:
            self.failure = str(error)
            raise

    return checked  # type: ignore[return-value]  # it has the same signature


def require_none_failed(matchers: Iterable[Failing]) -> None:
    for matcher in matchers:
        matcher.require_not_failed()
