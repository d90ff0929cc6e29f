"""`GrammarCompiler`: compiles grammars in threads, while their requests wait. An engine makes one
at the first structured output."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary, ref

from dovetail.api.grammar import Grammar, GrammarBackend, GrammarContext, GrammarSpec, SpecKind
from dovetail.config.limits import Limits
from dovetail.engine.constraint import Constraint
from dovetail.errors import RequestError, UnsupportedError, describe, shown
from dovetail.front.detokenizer import byte_pieces
from dovetail.front.grammar_trials import (
    GrammarTrials,
    TrialEndedError,
    Trials,
    TrialTimeoutError,
)
from dovetail.front.worker_processes import own_memory
from dovetail.request.structured import Structured

if TYPE_CHECKING:
    from dovetail.front.tokenizer import Tokenizer
    from dovetail.registry.resolved import ResolvedComponent

logger = logging.getLogger("dovetail")

QUICK_S = 0.5  # of a trial; what takes longer is left to the thread for such specs
MAX_SLOW = 16  # specs in that thread, waiting ones included
_CAN_FORK = hasattr(os, "fork")  # not on Windows, where nothing is tried
CACHE_BYTES = 256 * 2**20
GROWN_BYTES = 2**30  # by which this process may grow before it forgets compiled grammars
# of a compiled grammar: a guess, as backends don't tell
_BASE_BYTES = 65_536
_BYTES_A_CHAR = 256


@dataclass(frozen=True, slots=True)
class AnswerRule:
    """A validated `Structured`, as messages carry it: the `spec` applies after the text `after`."""

    spec: GrammarSpec | None  # None: any text
    after: str | None = None
    after_tokens: int | None = None  # the most tokens that may come without `after`

    @classmethod
    def of(cls, structured: Any) -> AnswerRule:
        """Return the rule of a `Structured`, or of a mapping of its fields."""
        asked = Structured.of(structured)
        spec = None if asked.kind is None else GrammarSpec(cast(SpecKind, asked.kind), asked.text)
        return cls(spec, asked.after, asked.after_tokens)


def bounds(
    rule: AnswerRule, n: int, spelled: Sequence[bytes], encode: Callable[[str], list[int]]
) -> list[Constraint]:
    """Return the constraints of `n` samples that only bound what precedes `after`.

    `spelled`: the bytes of each id, special tokens included. Raises `RequestError` if the model
    can't spell it.
    """
    return _constraints(None, None, rule, n, spelled, encode)


def _constraints(
    compiling: Future[Grammar] | None,
    backend: GrammarBackend | None,
    rule: AnswerRule,
    n: int,
    spelled: Sequence[bytes],
    encode: Callable[[str], list[int]],
) -> list[Constraint]:
    after = (rule.after or "").encode()
    closing = list[int]()
    if rule.after_tokens is not None:
        closing = encode(rule.after or "")
        if after not in b"".join(spelled[one] if one < len(spelled) else b"" for one in closing):
            raise RequestError(
                f"structured.after_tokens: the model has no tokens for {shown(rule.after)}"
            )
    return [
        Constraint(compiling, backend, after, spelled, rule.after_tokens, closing) for _ in range(n)
    ]


class GrammarCompiler:
    """Compiles each spec once, in a few threads. Each is first compiled on trial, in a process that
    can be ended: for at most `QUICK_S`, and if that doesn't suffice, once more in a thread for such
    specs. So what takes long delays only its like.

    Clients are served in turn. A spec is forgotten, and not compiled, when the last request that
    waits for it has ended: only its requests refer to its future. Thread safe.
    """

    def __init__(
        self,
        backend: GrammarBackend,
        limits: Limits,
        name: str = "",
        spelled: Sequence[bytes] | None = None,
        encode: Callable[[str], list[int]] = lambda text: [],
        *,
        trials: Trials | None = None,
        threads: int | None = None,
        cache_bytes: int = CACHE_BYTES,
        grown_bytes: int = GROWN_BYTES,
    ) -> None:
        """`name`: the backend's, for errors. `spelled`: the bytes of each id, special tokens
        included; None: those of the backend's context. `encode`: returns the token ids of a text;
        without it, `Structured.after_tokens` is refused. `trials`: None means that the backend is
        trusted with any spec. `threads`: None means half of the cores, from two to four; there is
        one more for what takes long. `grown_bytes`: how much the process may grow before cached
        grammars are forgotten, since those in use may grow."""
        self.backend = backend
        self._name = name or type(backend).__name__
        self._spelled = (
            spelled
            if spelled is not None
            else [piece or b"" for piece in backend.context.token_bytes]
        )
        self._encode = encode
        self._limits = limits
        self._trials = trials
        self._cache = _Cache(cache_bytes)
        self._grown_bytes = grown_bytes
        self._least_bytes = own_memory().resident_bytes  # since grammars were last forgotten
        self._pending: WeakValueDictionary[GrammarSpec, _Pending] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._quick = _Lane(threads or _threads(), "dovetail-grammars", self._compile_quickly)
        self._slow = _Lane(1, "dovetail-slow-grammars", self._compile_slowly, MAX_SLOW)
        self._closed = False

    @classmethod
    def make(
        cls,
        part: ResolvedComponent | None,
        tokenizer: Tokenizer,
        vocab_size: int,
        stop_ids: Collection[int],
        limits: Limits,
    ) -> GrammarCompiler:
        """Make the backend that `part` describes, for a model's vocabulary, and its compiler.
        Raises `UnsupportedError` if there is none or it can't be used with this tokenizer,
        `MissingExtraError` without its package, `PluginError` if it fails."""
        if part is None:
            raise UnsupportedError("structured: no grammar backend is installed")
        part.load()  # before the vocabulary is looked through
        plain, spelled = token_bytes(tokenizer, vocab_size)
        for token_id in stop_ids:
            if token_id < vocab_size:
                plain[token_id] = None
        context = GrammarContext(plain, frozenset(stop_ids), vocab_size)
        backend: GrammarBackend = part.make(context)
        return cls(
            backend,
            limits,
            part.qualified_name,
            spelled,
            partial(tokenizer.encode, special_tokens=False),
            trials=GrammarTrials(part.ref(), context, _threads() + 1) if _CAN_FORK else None,
        )

    def constraints(self, rule: AnswerRule, n: int, client: Hashable = None) -> list[Constraint]:
        """Return a constraint for each of `n` samples, which waits for the grammar, and fails with
        the reason if it doesn't compile.

        `client`: in whose turn it is compiled. Raises `RequestError` for a kind of spec that the
        backend doesn't support.
        """
        spec = rule.spec
        kinds = self.backend.capabilities.kinds
        if spec is None:
            return bounds(rule, n, self._spelled, self._encode)
        if spec.kind not in kinds:
            raise RequestError(
                f"structured.{spec.kind}: grammar backend {self._name} can't do it; it has "
                f"{', '.join(kinds)}"
            )
        compiling = self.compile(spec, client)
        return _constraints(compiling, self.backend, rule, n, self._spelled, self._encode)

    def compile(self, spec: GrammarSpec, client: Hashable = None) -> Future[Grammar]:
        """Return a future of the grammar, which is compiled in the client's turn if the caller
        keeps the future. Its exception is a `RequestError` whose text begins with "structured"."""
        with self._lock:
            known = self._cache.get(spec)
            if known is not None:
                return known
            pending = self._pending.get(spec)
            if pending is None:
                pending = _Pending(spec)
                if self._closed:
                    pending.set_exception(_closed())
                    return pending
                self._pending[spec] = pending
            if client not in pending.clients and not pending.begun:
                pending.clients.add(client)
                self._quick.put(client, pending)
            return pending

    def prepare(self) -> None:
        """Start what the first spec would wait for. Raises `DovetailError` if that fails."""
        if self._trials is not None:
            self._trials.prepare()

    def close(self) -> None:
        """End the threads after their present compilations, and the processes. What waits fails."""
        with self._lock:
            self._closed = True
            waiting = [one for one in self._quick.close() if not one.begun]
            for one in waiting:
                one.begun = True  # so that no thread begins it
            waiting += self._slow.close()
        for one in waiting:
            one.set_exception(_closed())
        if self._trials is not None:
            self._trials.close()

    # In a thread

    def _compile_quickly(self, pending: _Pending, client: Hashable) -> None:
        with self._lock:
            if pending.begun:  # in another client's turn
                return
            pending.begun = True
        most_s = self._limits.max_grammar_s
        try:
            self._compile(pending, min(most_s, QUICK_S))
        except TrialTimeoutError:
            if most_s <= QUICK_S:
                self._fail(pending, self._too_slow())
                return
            if (refused := self._compile_later(pending, client)) is not None:
                self._fail(
                    refused,
                    f"it takes longer than {QUICK_S:g} s to compile, and {MAX_SLOW} rules that do "
                    f"are waiting already; try again later",
                )

    def _compile_later(self, pending: _Pending, client: Hashable) -> _Pending | None:
        """Leave a spec to the thread for those that take long. Return one that it has no room for,
        if any."""
        with self._lock:
            if not self._closed:
                return self._slow.put(client, pending)
        pending.set_exception(_closed())
        return None

    def _compile_slowly(self, pending: _Pending, client: Hashable) -> None:
        try:
            self._compile(pending, self._limits.max_grammar_s)
        except TrialTimeoutError:
            self._fail(pending, self._too_slow())

    def _compile(self, pending: _Pending, seconds: float) -> None:
        """Set the result or the exception of `pending`. Raises `TrialTimeoutError` if a trial takes
        longer than `seconds`."""
        spec = pending.spec
        try:
            if self._trials is not None and spec.text:
                self._trials.check(spec, seconds)
            grammar = self.backend.compile(spec)
        except TrialTimeoutError:
            raise
        except TrialEndedError as error:
            self._fail(pending, str(error))
        except RequestError as error:
            self._cache_result(pending)
            pending.set_exception(_named(spec, str(error)))
        except (
            BaseException
        ) as error:  # such as a panic of a native library: only this request fails
            logger.exception("a grammar backend failed")
            self._fail(pending, f"the grammar backend failed: {describe(error)}")
        else:
            self._cache_result(pending)
            pending.set_result(grammar)

    def _too_slow(self) -> str:
        return (
            f"it takes longer than {self._limits.max_grammar_s:g} s (limits.max_grammar_s) to "
            f"compile"
        )

    def _cache_result(self, pending: _Pending) -> None:
        with self._lock:
            forgotten = self._cache.clear() if self._has_grown() else []
            self._pending.pop(pending.spec, None)
            self._cache.put(pending.spec, pending)
        if forgotten:
            logger.warning("compiled rules have grown: %d are forgotten", len(forgotten))
            while forgotten:
                forgotten.pop()  # one at a time: other threads run between them
            self._least_bytes = own_memory().resident_bytes

    def _has_grown(self) -> bool:
        """Return True if grammars use too much memory.

        Backends don't report their size, which grows with the matched text.
        """
        resident_bytes = own_memory().resident_bytes
        self._least_bytes = min(self._least_bytes, resident_bytes)
        return resident_bytes - self._least_bytes > self._grown_bytes

    def _fail(self, pending: _Pending, why: str) -> None:
        """Refuse a spec, but not the next time: it may be due to the state of this machine."""
        spec = pending.spec
        logger.warning("a rule of kind %s with %d characters: %s", spec.kind, len(spec.text), why)
        with self._lock:
            self._pending.pop(spec, None)
        pending.set_exception(_named(spec, why))


class _Pending(Future[Grammar]):
    """Future of a spec's grammar."""

    def __init__(self, spec: GrammarSpec) -> None:
        super().__init__()
        self.spec = spec
        self.clients: set[Hashable] = set()  # in whose turns it waits
        self.begun = False


class _Lane:
    """Threads that compile what waits, clients in turn, and skip what no request waits for any
    more. Thread safe."""

    def __init__(
        self,
        threads: int,
        name: str,
        work: Callable[[_Pending, Hashable], None],
        most: int | None = None,
    ) -> None:
        """`most`: the most specs that are worked on or wait; None: no limit."""
        self._most_threads = threads
        self._work = work
        self._most = most
        self._threads = ThreadPoolExecutor(threads, name)
        self._lock = threading.Lock()
        self._queues: OrderedDict[Hashable, deque[ref[_Pending]]] = OrderedDict()
        self._num_threads = 0  # that look for work
        self._num_begun = 0

    def put(self, client: Hashable, pending: _Pending) -> _Pending | None:
        """Let a spec wait. Return one that there is no room for, if any: the newest of the client
        that has most."""
        with self._lock:
            queue = self._queues.setdefault(client, deque())
            while queue and queue[-1]() is None:
                queue.pop()
            queue.append(ref(pending))
            refused = None if self._most is None else self._shrink(self._most)
            if self._num_threads < self._most_threads:
                self._threads.submit(self._run)
                self._num_threads += 1
            return refused

    def close(self) -> list[_Pending]:
        """End the threads after their present work. Return what waits."""
        with self._lock:
            left = [one for queue in self._queues.values() for each in queue if (one := each())]
            self._queues.clear()
        self._threads.shutdown(wait=False)
        return [*dict.fromkeys(left)]

    def _shrink(self, most: int) -> _Pending | None:
        for client, queue in [*self._queues.items()]:
            self._queues[client] = deque(each for each in queue if each() is not None)
        if self._num_begun + sum(map(len, self._queues.values())) <= most:
            return None
        return max(self._queues.values(), key=len).pop()()

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            try:
                self._work(*taken)
            finally:
                with self._lock:
                    self._num_begun -= 1
            del taken  # the last reference, if no request waits

    def _take(self) -> tuple[_Pending, Hashable] | None:
        """Take the next spec of the client whose turn it is. None, and this thread ends, if none is
        left."""
        with self._lock:
            while self._queues:
                client, queue = self._queues.popitem(last=False)
                pending = queue.popleft()() if queue else None
                if queue:
                    self._queues[client] = queue
                if pending is not None:
                    self._num_begun += 1
                    return pending, client
            self._num_threads -= 1
            return None


def _threads() -> int:
    return min(4, max(2, (os.cpu_count() or 1) // 2))


def _named(spec: GrammarSpec, why: str) -> RequestError:
    return RequestError(
        f"structured.{why}" if why.startswith(f"{spec.kind}:") else f"structured.{spec.kind}: {why}"
    )


def _closed() -> RequestError:
    return RequestError("structured: the engine was closed")


class _Cache:
    """LRU cache of grammars and failures by spec. Not thread safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._futures: OrderedDict[GrammarSpec, Future[Grammar]] = OrderedDict()

    def get(self, spec: GrammarSpec) -> Future[Grammar] | None:
        future = self._futures.get(spec)
        if future is not None:
            self._futures.move_to_end(spec)
        return future

    def clear(self) -> list[Future[Grammar]]:
        """Empty the cache, and return what was in it."""
        futures = [*self._futures.values()]
        self._futures.clear()
        self._bytes = 0
        return futures

    def put(self, spec: GrammarSpec, future: Future[Grammar]) -> None:
        """Add a new one; the least used go, until there is room. One that is larger than all room
        stays until the next comes."""
        self._futures[spec] = future
        self._bytes += _size(spec)
        while self._bytes > self._max_bytes and len(self._futures) > 1:
            old, _ = self._futures.popitem(last=False)
            self._bytes -= _size(old)


def _size(spec: GrammarSpec) -> int:
    return _BASE_BYTES + _BYTES_A_CHAR * len(spec.text)


# The vocabulary


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> tuple[list[bytes | None], list[bytes]]:
    """Return the bytes [vocab_size] that each id adds to a text, twice: first None where an id is
    never text (special tokens, and ids that the tokenizer doesn't have), then with the text of
    special tokens.

    Raises `UnsupportedError` if the tokenizer is of a kind whose tokens have no bytes of their
    own.
    """
    spell = token_speller(tokenizer)
    special = tokenizer.special_ids
    spelled = [
        spell(token_id) if token_id < tokenizer.vocab_size else b""
        for token_id in range(vocab_size)
    ]
    plain = [
        None if not piece or token_id in special else piece
        for token_id, piece in enumerate(spelled)
    ]
    _check(tokenizer, plain)
    return plain, spelled


def token_speller(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """Return a function from a token id, which may be a special token's, to the bytes that it adds
    to a text. Raises `UnsupportedError` if the tokenizer is of a kind whose tokens have no bytes of
    their own."""
    pieces = byte_pieces(tokenizer, False)
    if pieces is not None:
        return pieces.__getitem__
    backend = tokenizer.backend
    if backend is None:
        raise UnsupportedError(
            "structured: this model's tokenizer is written in Python, and tells no bytes of its "
            "tokens: structured output needs them"
        )
    parts = _decoders(backend.decoder)
    kinds = {part["type"] for part in parts}
    spaces = [
        part["pattern"]["String"]
        for part in parts
        if part["type"] == "Replace" and part["content"] == " " and "String" in part["pattern"]
    ]
    spaces += [part["replacement"] for part in parts if part["type"] == "Metaspace"]
    if len(spaces) != 1 or kinds - {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}:
        names = ", ".join(sorted(kinds)) or "none"
        raise UnsupportedError(
            f"structured: this model's tokenizer decodes by {names}: the bytes of its tokens "
            f"aren't known, which structured output needs"
        )

    def spell(token_id: int) -> bytes:
        token = backend.id_to_token(token_id) or ""
        if (
            "ByteFallback" in kinds
            and len(token) == 6
            and token.startswith("<0x")
            and token.endswith(">")
        ):
            with suppress(ValueError):
                return bytes([int(token[3:5], 16)])
        return str(token).replace(spaces[0], " ").encode()

    return spell


def _decoders(of_backend: Any) -> Sequence[dict[str, Any]]:
    """Return the parts of a backend's decoder, as in tokenizer.json. The backend's own JSON would
    take seconds: it has the vocabulary."""
    if of_backend is None:
        return ()
    try:
        decoder = json.loads(of_backend.__getstate__())
    except Exception:  # one written in Python
        return ({"type": "custom"},)
    return decoder["decoders"] if decoder["type"] == "Sequence" else (decoder,)


def _check(tokenizer: Tokenizer, plain: Sequence[bytes | None]) -> None:
    """Spell a text with what was found: a tokenizer may do more than its parts say."""
    text = ' {"a": [1, "é漢 \\n\U0001f600"]}'
    spelled = b"".join(
        plain[token_id] or b""
        for token_id in tokenizer.encode(text, special_tokens=False)
        if token_id < len(plain)
    )
    if spelled.strip() != text.encode().strip():
        raise UnsupportedError(
            "structured: the bytes of this model's tokens aren't known: spelled with them, a text "
            "is another one"
        )
