"""The process of one engine: `python -m dovetail_batch.engine_process DESCRIPTOR`, as `EngineLink` starts it.

Rows come in lists over a socket pair, and answers go back in lists. The engine's own thread does nothing but steps: a thread takes rows and tokenizes
them, another sends answers. When the command's process is gone, however that came, this one ends at once.

    command -> engine    ("start", the engine's config), then lists of `Row`; None: there will be no more
    engine -> command    ("ready", facts) or ("refused", why); then ("answers", list of `Answer`); ("dead", why) if the engine fails
"""

from __future__ import annotations

import gc
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dovetail.errors import DovetailError, EngineDeadError, RequestError
from dovetail_batch.answers import Answer, answer_of, failure_of
from dovetail_batch.rows import Row

if TYPE_CHECKING:
    from dovetail.front.chat import ChatFrontEnd
    from dovetail.front.llm_engine import LLMEngine
    from dovetail.front.prompts import Prompt

_Prepared = tuple[Row, "Prompt | RequestError"]


def main() -> int:
    """Return the exit code: 2 if the engine can't be started, 1 if it has failed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    _, source = connection.recv()
    received: queue.SimpleQueue[list[Row] | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, received), name="dovetail-batch-rows", daemon=True).start()
    try:
        engine = start_engine(source)
    except DovetailError as error:
        connection.send(("refused", str(error)))
        return 2
    gc.collect()
    gc.freeze()  # what stands now stays: looking through it again and again would delay steps
    connection.send(("ready", {"max_num_seqs": engine.config.max_num_seqs}))
    with engine:
        try:
            EngineWorker(engine, received, connection).run()
        except EngineDeadError as error:
            connection.send(("dead", str(error)))
            return 1
    return 0


def start_engine(source: str | Mapping[str, Any]) -> LLMEngine:
    """Return an engine whose tokenizer is there, too: otherwise it would be loaded amidst the first steps. Raises what `LLMEngine.from_config`
    raises."""
    from dovetail.front.llm_engine import LLMEngine

    engine = LLMEngine.from_config(source)
    with suppress(DovetailError):  # token ids need none, and other rows will say what is wrong with it
        _ = engine.tokenizer
    return engine


def _receive(connection: Connection[Any, Any], received: queue.SimpleQueue[list[Row] | None]) -> None:
    """Pass on what comes, from the first moment on: so the other end's death is seen while the model is loaded, too."""
    try:
        while True:
            received.put(connection.recv())
    except (EOFError, OSError):
        os.killpg(os.getpgrp(), signal.SIGKILL)  # with all that the engine has started: the command made this process the leader of a group


class AnswerSink(Protocol):
    """A receiver of the answers of an `EngineWorker`: the connection to the command's process, or another front."""

    def send(self, message: tuple[Literal["answers"], list[Answer]], /) -> None:
        """Take answers. Called in a thread of the worker's. Raises `OSError` if nobody is there any more."""


class EngineWorker:
    """Computes rows as they come. `run` is called once, in the thread that the engine is to have."""

    def __init__(self, engine: LLMEngine, received: queue.SimpleQueue[list[Row] | None], sink: AnswerSink) -> None:
        self._engine, self._received, self._sink = engine, received, sink
        self._prepared: queue.SimpleQueue[list[_Prepared] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[list[Answer] | None] = queue.SimpleQueue()
        self._rows: dict[str, Row] = {}  # by request id: those in the engine
        self._more = True

    def run(self) -> None:
        """Return when there will be no more rows and all have been answered. Raises `EngineDeadError`, with what had been answered sent."""
        threading.Thread(target=self._prepare_all, name="dovetail-batch-prompts", daemon=True).start()
        sender = threading.Thread(target=self._send_all, name="dovetail-batch-answers", daemon=True)
        sender.start()
        try:
            self._compute()
        finally:
            self._answers.put(None)
            sender.join()
            if "_chat" in vars(self):  # it was used
                self._chat.close()

    def _compute(self) -> None:
        engine = self._engine
        while self._more or engine.has_unfinished_requests():
            answers = self._take_rows()
            if engine.has_unfinished_requests():
                outputs = engine.step()
                engine.core.check_alive()  # or all that is unfinished would be told to have failed
                answers += [answer_of(self._rows.pop(output.request_id), output) for output in outputs if output.finished]
            if answers:
                self._answers.put(answers)

    def _take_rows(self) -> list[Answer]:
        """Give the engine what has been prepared, having waited for some if it has nothing to do. Return the answers of rows that it refuses."""
        refused: list[Answer] = []
        wait = not self._engine.has_unfinished_requests()
        while self._more and (wait or not self._prepared.empty()):
            prepared = self._prepared.get()
            wait = False
            if prepared is None:
                self._more = False
            else:
                self._add(prepared, refused)
        return refused

    def _add(self, prepared: list[_Prepared], refused: list[Answer]) -> None:
        for row, prompt in prepared:
            try:
                if isinstance(prompt, RequestError):
                    raise prompt
                self._engine.add_list([(str(row.number), prompt, row.params)])  # which `limits.max_waiting` doesn't count
                self._rows[str(row.number)] = row
            except RequestError as error:
                refused.append(failure_of(row.number, row.id, str(error), row.form))

    # In the thread that makes prompts

    def _prepare_all(self) -> None:
        while (rows := self._received.get()) is not None:
            self._prepared.put(self._prepare(rows))
        self._prepared.put(None)

    def _prepare(self, rows: Sequence[Row]) -> list[_Prepared]:
        try:
            texts = iter(self._engine.all_tokenized([row.content for row in rows if row.form == "prompt"]))
            return [(row, next(texts) if row.form == "prompt" else self._prompt(row)) for row in rows]
        except DovetailError:  # some text is wrong: one by one, to see which
            return [(row, self._prompt(row)) for row in rows]

    def _prompt(self, row: Row) -> Prompt | RequestError:
        try:
            if row.form == "messages":
                return self._chat.prompt(row.content)
            if row.form == "prompt":
                return self._engine.tokenized(row.content)
            return {"prompt_token_ids": row.content}
        except RequestError as error:
            return error
        except DovetailError as error:  # there is no tokenizer
            return RequestError(str(error))

    @cached_property
    def _chat(self) -> ChatFrontEnd:
        from dovetail.front.chat import ChatFrontEnd

        return ChatFrontEnd(self._engine.tokenizer, self._engine.config.limits, self._engine.capacity.max_model_len)

    # In the thread that sends answers

    def _send_all(self) -> None:
        ended = False
        while not ended:
            batches = [self._answers.get()]
            while not self._answers.empty():
                batches.append(self._answers.get())
            ended = batches[-1] is None
            if answers := [answer for batch in batches if batch is not None for answer in batch]:
                with suppress(OSError):  # the other end is gone: `_receive` ends the process
                    self._sink.send(("answers", answers))


if __name__ == "__main__":
    sys.exit(main())
