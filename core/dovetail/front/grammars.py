"""`GrammarCompiler`: compiles grammars in threads, while their requests wait. An engine makes one at the first structured output."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from dovetail.api.grammar import Grammar, GrammarBackend, GrammarContext, GrammarSpec, SpecKind
from dovetail.checks import shown
from dovetail.engine.constraint import Constraint
from dovetail.errors import RequestError, UnsupportedError, describe
from dovetail.front.detokenizer import byte_pieces
from dovetail.limits import Limits
from dovetail.sampling_params import SamplingParams
from dovetail.structured import Structured

if TYPE_CHECKING:
    from dovetail.front.tokenizer import Tokenizer
    from dovetail.registry.resolved import ResolvedComponent

logger = logging.getLogger("dovetail")

MAX_ABANDONED = 4  # threads with compilations that took too long and can't be ended; with as many under way nothing new is compiled
CACHE_BYTES = 256 * 2**20
_BASE_BYTES, _BYTES_A_CHAR = 65_536, 256  # of a compiled grammar: a guess, as backends don't tell


def spec_of(structured: Structured) -> GrammarSpec:
    """Return the spec that a backend compiles."""
    return GrammarSpec(cast(SpecKind, structured.kind), structured.text)


def bounds(
    structured: Structured, n: int, tokenizer: Tokenizer, spelled: Sequence[bytes]
) -> list[Constraint]:
    """Return the constraints of `n` samples without a rule, which only bound what precedes `after`. `spelled`: the bytes of each id, special tokens
    included. Raises `RequestError` if the model can't spell it."""
    return _constraints(
        None, None, structured, n, spelled, partial(tokenizer.encode, special_tokens=False)
    )


def _constraints(
    compiling: Future[Grammar] | None,
    backend: GrammarBackend | None,
    structured: Structured,
    n: int,
    spelled: Sequence[bytes],
    encode: Callable[[str], list[int]],
) -> list[Constraint]:
    after, closing = (structured.after or "").encode(), list[int]()
    if structured.after_tokens is not None:
        closing = encode(structured.after or "")
        if after not in b"".join(spelled[one] if one < len(spelled) else b"" for one in closing):
            raise RequestError(
                f"structured.after_tokens: the model has no tokens for {shown(structured.after)}"
            )
    return [
        Constraint(compiling, backend, after, spelled, structured.after_tokens, closing)
        for _ in range(n)
    ]


class _Compilation:
    """A grammar being compiled, or waiting for it."""

    __slots__ = ("abandoned", "compiled", "future", "spec")

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec
        self.future: Future[Grammar] = Future()
        self.compiled = False  # or it has failed
        self.abandoned = False


class GrammarCompiler:
    """Compiles each spec once, in a few threads. A compilation that exceeds the time limit is abandoned: its thread can't be stopped, so another
    replaces it. Thread safe."""

    def __init__(
        self,
        backend: GrammarBackend,
        limits: Limits,
        name: str = "",
        spelled: Sequence[bytes] | None = None,
        encode: Callable[[str], list[int]] = lambda text: [],
        *,
        threads: int | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """`name`: the backend's, for errors. `spelled`: the bytes of each id, special tokens included; None: those of the backend's context.
        `encode`: returns the token ids of a text; without it, `Structured.after_tokens` is refused. `threads`: None means half of the cores, from
        one to four."""
        self.backend = backend
        self._name = name or type(backend).__name__
        self._spelled = (
            spelled
            if spelled is not None
            else [piece or b"" for piece in backend.context.token_bytes]
        )
        self._encode = encode
        self._limits = limits
        self._threads = threads or min(4, max(1, (os.cpu_count() or 1) // 2))
        self._cache = _Cache(cache_bytes)
        self._lock = threading.Condition()
        self._queue: deque[_Compilation] = deque()
        self._working = 0  # threads, without the abandoned
        self._idle = 0  # of them, those that wait for a job
        self._abandoned = 0
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
        """Make the backend that `part` describes, for a model's vocabulary, and its compiler. Raises `UnsupportedError` if there is none or it can't
        be used with this tokenizer, `MissingExtraError` without its package, `PluginError` if it fails."""
        if part is None:
            raise UnsupportedError("structured: no grammar backend is installed")
        part.load()  # before the vocabulary is looked through
        plain, spelled = token_bytes(tokenizer, vocab_size)
        for token_id in stop_ids:
            if token_id < vocab_size:
                plain[token_id] = None
        backend: GrammarBackend = part.make(GrammarContext(plain, frozenset(stop_ids), vocab_size))
        return cls(
            backend,
            limits,
            part.qualified_name,
            spelled,
            partial(tokenizer.encode, special_tokens=False),
        )

    def constraints(self, params: SamplingParams) -> list[Constraint]:
        """Return a constraint for each sample of a request with structured output, which waits for the grammar, and fails with the reason if it
        doesn't compile. Raises `RequestError` for a kind of spec that the backend doesn't support."""
        structured = Structured.of(params.structured)
        if structured.kind not in (None, *(kinds := self.backend.capabilities.kinds)):
            raise RequestError(
                f"structured.{structured.kind}: grammar backend {self._name} can't do it; it has {', '.join(kinds)}"
            )
        return _constraints(
            self.compile(spec_of(structured)),
            self.backend,
            structured,
            params.n,
            self._spelled,
            self._encode,
        )

    def compile(self, spec: GrammarSpec) -> Future[Grammar]:
        """Return a future of the grammar. Its exception is a `RequestError` whose text begins with "structured"."""
        with self._lock:
            known = self._cache.get(spec)
            if known is not None:
                return known
            job = _Compilation(spec)
            if self._abandoned >= MAX_ABANDONED:
                job.future.set_exception(
                    RequestError(
                        f"structured.{spec.kind}: nothing can be compiled now: {self._abandoned} grammars that took longer than "
                        f"{self._limits.max_grammar_s:g} s (limits.max_grammar_s) are still being compiled"
                    )
                )
                return job.future
            self._cache.put(spec, job.future)
            self._queue.append(job)
            self._lock.notify()
            if (
                len(self._queue) > self._idle and self._working < self._threads
            ):  # who is idle may have been woken for another job
                self._start_worker()
            return job.future

    def close(self) -> None:
        """End the threads after their present compilations."""
        with self._lock:
            self._closed = True
            for job in self._queue:
                job.future.set_exception(RequestError("structured: the engine was closed"))
            self._queue.clear()
            self._lock.notify_all()

    def _start_worker(self) -> None:
        self._working += 1
        threading.Thread(target=self._work, name="dovetail-grammars", daemon=True).start()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            timer = threading.Timer(self._limits.max_grammar_s, self._give_up, [job])
            timer.daemon = True
            timer.start()
            result, error = self._compiled(job.spec)
            timer.cancel()
            with self._lock:
                job.compiled = True
                if job.abandoned:  # whoever asks again has it
                    self._abandoned -= 1
                    job.future = self._cache.replace(job.spec)
            if error is not None:
                job.future.set_exception(error)
            else:
                job.future.set_result(cast(Grammar, result))
            if job.abandoned:
                return

    def _next(self) -> _Compilation | None:
        """Wait for a job; None: the compiler is closed."""
        with self._lock:
            self._idle += 1
            while not self._queue and not self._closed:
                self._lock.wait()
            self._idle -= 1
            if self._closed:
                self._working -= 1
                return None
            return self._queue.popleft()

    def _compiled(self, spec: GrammarSpec) -> tuple[Grammar | None, RequestError | None]:
        try:
            return self.backend.compile(spec), None
        except RequestError as error:
            text = str(error)
            return None, RequestError(
                f"structured.{text}"
                if text.startswith(f"{spec.kind}:")
                else f"structured.{spec.kind}: {text}"
            )
        except (
            BaseException
        ) as error:  # a panic of a native library, too: it is this request's alone
            logger.exception("a grammar backend failed")
            return None, RequestError(
                f"structured.{spec.kind}: the grammar backend failed: {describe(error)}"
            )

    def _give_up(self, job: _Compilation) -> None:
        """Abandon a compilation that exceeds the time limit."""
        with self._lock:
            if job.compiled:
                return
            job.abandoned = True
            self._abandoned += 1
            self._working -= 1
            if self._queue:
                self._start_worker()
            future = job.future
        limit = f"{self._limits.max_grammar_s:g} s (limits.max_grammar_s)"
        logger.warning(
            "a rule of kind %s with %d characters takes longer than %s to compile",
            job.spec.kind,
            len(job.spec.text),
            limit,
        )
        future.set_exception(
            RequestError(f"structured.{job.spec.kind}: it takes longer than {limit} to compile")
        )


class _Cache:
    """LRU cache of grammars and failures by spec. Not thread safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._futures: OrderedDict[GrammarSpec, Future[Grammar]] = OrderedDict()

    def get(self, spec: GrammarSpec) -> Future[Grammar] | None:
        future = self._futures.get(spec)
        if future is not None:
            self._futures.move_to_end(spec)
        return future

    def replace(self, spec: GrammarSpec) -> Future[Grammar]:
        """Return a new future, which takes the place of that of `spec`, if it is still there."""
        future: Future[Grammar] = Future()
        if spec in self._futures:
            self._futures[spec] = future
        return future

    def put(self, spec: GrammarSpec, future: Future[Grammar]) -> None:
        """Add a new one; the least used go, until there is room. One that is larger than all room stays until the next comes."""
        self._futures[spec] = future
        self._bytes += _size(spec)
        while self._bytes > self._max_bytes and len(self._futures) > 1:
            old, _ = self._futures.popitem(last=False)
            self._bytes -= _size(old)


def _size(spec: GrammarSpec) -> int:
    return _BASE_BYTES + _BYTES_A_CHAR * len(spec.text)


# The vocabulary


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> tuple[list[bytes | None], list[bytes]]:
    """Return the bytes [vocab_size] that each id adds to a text, twice: first None where an id is never text (special tokens, and ids that the
    tokenizer doesn't have), then with the text of special tokens.

    Raises `UnsupportedError` if the tokenizer is of a kind whose tokens have no bytes of their own.
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
    """Return a function from a token id, which may be a special token's, to the bytes that it adds to a text. Raises `UnsupportedError` if the
    tokenizer is of a kind whose tokens have no bytes of their own."""
    pieces = byte_pieces(tokenizer, False)
    if pieces is not None:
        return pieces.__getitem__
    backend = tokenizer.backend
    if backend is None:
        raise UnsupportedError(
            "structured: this model's tokenizer is written in Python, and tells no bytes of its tokens: structured output needs them"
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
            f"structured: this model's tokenizer decodes by {names}: the bytes of its tokens aren't known, which structured output needs"
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
    """Return the parts of a backend's decoder, as in tokenizer.json. The backend's own JSON would take seconds: it has the vocabulary."""
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
            "structured: the bytes of this model's tokens aren't known: spelled with them, a text is another one"
        )
