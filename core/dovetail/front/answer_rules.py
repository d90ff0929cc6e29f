"""`AnswerRules`: what holds samples to the rules of their requests. Makes the grammar backend when
the first rule needs it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Hashable
from functools import cached_property, partial
from typing import TYPE_CHECKING

from dovetail.config.limits import Limits
from dovetail.errors import DovetailError
from dovetail.front.grammars import AnswerRule, GrammarCompiler, bounds, token_bytes

if TYPE_CHECKING:
    from dovetail.engine.constraint import Constraint
    from dovetail.front.tokenizer import Tokenizer
    from dovetail.registry.resolved import ResolvedComponent

logger = logging.getLogger("dovetail")


class AnswerRules:
    """Thread safe."""

    def __init__(
        self,
        backend: ResolvedComponent | None,
        tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        stop_ids: Collection[int],
        limits: Limits,
    ) -> None:
        """`backend`: neither imported nor made yet; None if there is none."""
        self.backend = backend
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = stop_ids
        self._limits = limits
        self._compiler: GrammarCompiler | DovetailError | None = None  # None: not made yet
        self._making = threading.Lock()

    def constraints(self, rule: AnswerRule, n: int, client: Hashable = None) -> list[Constraint]:
        """Return what holds each of `n` samples to a rule.

        The first call that needs the grammar backend makes it, which may take a second for a large
        vocabulary; a bound without a spec needs none. `client`: in whose turn the rule is compiled.

        Raises:

        - `RequestError` if the backend can't do what is asked;
        - `MissingExtraError` without its package;
        - `UnsupportedError` if the model's tokenizer is of an unknown kind;
        - `ModelLoadError` if there is none.
        """
        if rule.spec is None:
            encode = partial(self._tokenizer().encode, special_tokens=False)
            return bounds(rule, n, self._spelled, encode)
        return self.compiler().constraints(rule, n, client)

    def compiler(self) -> GrammarCompiler:
        """Return the compiler, made by the first call. Raises as `constraints`; a failure is
        remembered."""
        with self._making:
            if self._compiler is None:
                try:
                    self._compiler = GrammarCompiler.make(
                        self.backend,
                        self._tokenizer(),
                        self._vocab_size,
                        self._stop_ids,
                        self._limits,
                    )
                except DovetailError as error:
                    self._compiler = error
        if isinstance(self._compiler, DovetailError):
            raise self._compiler.with_traceback(None)
        return self._compiler

    def prepare(self) -> None:
        """Make the grammar backend in a thread, so that no request waits for it.

        Logs a warning if that fails: requests that need it will, too.
        """
        threading.Thread(
            target=self._prepare, name="dovetail-prepares-grammars", daemon=True
        ).start()

    def close(self) -> None:
        """End the threads that compile."""
        if isinstance(self._compiler, GrammarCompiler):
            self._compiler.close()

    def _prepare(self) -> None:
        try:
            _ = self._spelled
            self.compiler().prepare()
        except DovetailError as error:
            logger.warning("no answer can be held to a rule, and no tool call demanded: %s", error)

    @cached_property
    def _spelled(self) -> list[bytes]:
        return token_bytes(self._tokenizer(), self._vocab_size)[1]
