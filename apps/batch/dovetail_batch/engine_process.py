"""The process of one engine: `python -m dovetail_batch.engine_process DESCRIPTOR`, started by
`EngineLink`.

The engine's thread only steps: one thread receives and tokenizes rows, another sends answers. The
process ends when the command's process does.

    command -> engine    the engine's config, then lists of `JobRow`, then None
    engine -> command    ("ready", max_num_seqs) or ("refused", reason); then ("answers", list of `Answer`); ("dead", reason) if the engine fails
"""

from __future__ import annotations

import gc
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from dovetail.errors import DovetailError, EngineDeadError, RequestError
from dovetail.request.sampling_params import SamplingParams
from dovetail.serving import cuts
from dovetail_batch.answers import Answer, answer_of, failure_of
from dovetail_batch.rows import JobRow

if TYPE_CHECKING:
    from dovetail import LLMEngine
    from dovetail.serving import ChatFrontEnd, Prompt

_Prepared = tuple[JobRow, "Prompt | RequestError"]

# rows whose images are prepared at a time: each waits for a process
IMAGE_ROWS = min(8, os.cpu_count() or 1)
HELD_IMAGE_BYTES = 2**32  # of prepared images of unanswered rows, beyond which no more are prepared


def main() -> int:
    """Return the exit code: 2 if the engine can't start, 1 if it fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    source = connection.recv()
    received: queue.SimpleQueue[list[JobRow] | None] = queue.SimpleQueue()
    threading.Thread(
        target=_receive, args=(connection, received), name="dovetail-batch-rows", daemon=True
    ).start()
    try:
        engine = start_engine(source)
    except DovetailError as error:
        connection.send(("refused", str(error)))
        return 2
    gc.collect()
    gc.freeze()  # long-lived objects: collections that traverse them would delay steps
    connection.send(("ready", engine.config.max_num_seqs))
    with engine:
        try:
            EngineWorker(
                engine, received, lambda answers: connection.send(("answers", answers))
            ).run()
        except EngineDeadError as error:
            connection.send(("dead", str(error)))
            return 1
    return 0


def start_engine(source: str | Mapping[str, Any]) -> LLMEngine:
    """Return an engine with its tokenizer loaded, which would otherwise delay the first steps.
    Raises as `LLMEngine.from_config` does."""
    from dovetail import LLMEngine

    engine = LLMEngine.from_config(source)
    with suppress(DovetailError):  # rows of token ids need none, and the others report it
        _ = engine.tokenizer
    return engine


def _receive(
    connection: Connection[Any, Any], received: queue.SimpleQueue[list[JobRow] | None]
) -> None:
    """Queue rows as they arrive. Started before the model loads, so that the command's death is
    noticed meanwhile."""
    try:
        while True:
            received.put(connection.recv())
    except (EOFError, OSError):
        # with the engine's own processes: this one leads the group
        os.killpg(os.getpgrp(), signal.SIGKILL)


class HeldImages:
    """Bytes of the prepared images of unanswered rows."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes: dict[int, int] = {}  # by the row's number
        self._total = 0
        self._changed = threading.Condition()

    def wait_for_room(self) -> None:
        """Wait until there are fewer than the most."""
        with self._changed:
            self._changed.wait_for(lambda: self._total < self._most)

    def add(self, number: int, prompt: Prompt | RequestError) -> None:
        """Account for the images of a row."""
        media = getattr(prompt, "media", ())
        size = sum(array.nbytes for item in media for array in item.tensors.values())
        with self._changed:
            self._bytes[number] = size
            self._total += size

    def release(self, number: int) -> None:
        """Forget a row, if it had images."""
        with self._changed:
            self._total -= self._bytes.pop(number, 0)
            self._changed.notify_all()


class EngineWorker:
    """Computes rows as they arrive. `run` is called once, in the engine's thread."""

    def __init__(
        self,
        engine: LLMEngine,
        received: queue.SimpleQueue[list[JobRow] | None],
        send: Callable[[list[Answer]], None],
    ) -> None:
        """`received` ends with None. `send` is called in a thread of the worker's; an `OSError` of
        it means that nobody receives any more."""
        self._engine = engine
        self._received = received
        self._send = send
        self._prepared: queue.SimpleQueue[list[_Prepared] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[list[Answer] | None] = queue.SimpleQueue()
        self._rows: dict[str, JobRow] = {}  # in the engine, by request id
        self._images = HeldImages(HELD_IMAGE_BYTES)
        self._more = True

    def run(self) -> None:
        """Return when all rows are answered and no more will come. Raises `EngineDeadError`, after
        sending the answers so far."""
        threading.Thread(
            target=self._prepare_all, name="dovetail-batch-prompts", daemon=True
        ).start()
        sender = threading.Thread(target=self._send_all, name="dovetail-batch-answers", daemon=True)
        sender.start()
        try:
            self._compute()
        finally:
            self._answers.put(None)
            sender.join()
            if "_chat" in vars(self):  # it was created
                self._chat.close()

    def _compute(self) -> None:
        engine = self._engine
        while self._more or engine.has_unfinished_requests():
            answers = self._take_rows()
            if engine.has_unfinished_requests():
                outputs = engine.step()
                engine.core.check_alive()  # otherwise all unfinished rows would count as failed
                answers += [self._answered(output) for output in outputs if output.finished]
            if answers:
                self._answers.put(answers)

    def _answered(self, output: Any) -> Answer:
        row = self._rows.pop(output.request_id)
        self._images.release(row.number)
        return answer_of(row, output)

    def _take_rows(self) -> list[Answer]:
        """Add the prepared rows to the engine, waiting for some if it is idle. Return the answers
        of rows that it rejects."""
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
                # not subject to `limits.max_waiting`
                self._engine.add_list([(str(row.number), prompt, row.params, row.fields)])
                self._rows[str(row.number)] = row
            except RequestError as error:
                self._images.release(row.number)
                refused.append(failure_of(row.number, row.id, str(error), row.form))

    # In the thread that tokenizes

    def _prepare_all(self) -> None:
        with ThreadPoolExecutor(IMAGE_ROWS, "dovetail-batch-images") as threads:
            while (rows := self._received.get()) is not None:
                if self._engine.images is None:
                    self._prepared.put(self._prepare(rows))
                    continue
                if texts := [row for row in rows if not row.has_images]:
                    self._prepared.put(self._prepare(texts))
                self._prepare_images([row for row in rows if row.has_images], threads)
        self._prepared.put(None)

    def _prepare_images(self, rows: Sequence[JobRow], threads: ThreadPoolExecutor) -> None:
        """Prepare rows with images, a few at a time, as far as there is room for them."""
        for start in range(0, len(rows), IMAGE_ROWS):
            self._images.wait_for_room()
            some = rows[start : start + IMAGE_ROWS]
            prepared = list(zip(some, threads.map(self._prompt, some), strict=True))
            for row, prompt in prepared:
                self._images.add(row.number, prompt)
            self._prepared.put(prepared)

    def _prepare(self, rows: Sequence[JobRow]) -> list[_Prepared]:
        try:
            cut = any(cuts(row.params) for row in rows)
            texts = iter(
                self._engine.all_tokenized(
                    [self._text(row) for row in rows if row.form == "prompt"], cut=cut
                )
            )
            return [
                (row, next(texts) if row.form == "prompt" else self._prompt(row)) for row in rows
            ]
        except DovetailError:  # one by one, to find the invalid ones
            return [(row, self._prompt(row)) for row in rows]

    def _text(self, row: JobRow) -> str:
        """Return the text of a row, with the stored prompt if it is to be embedded."""
        text: str = row.content
        return (
            text
            if isinstance(row.params, SamplingParams)
            else self._engine.pooling.prompted(text, row.prompt_name)
        )

    def _prompt(self, row: JobRow) -> Prompt | RequestError:
        try:
            if row.form == "messages":
                cut = cuts(row.params)
                return self._engine.tokenized(self._chat.prompt(row.content, cut=cut), cut=cut)
            if row.form == "prompt":
                return self._engine.tokenized(self._text(row), cut=cuts(row.params))
            if row.prompt_name is not None:
                raise RequestError(
                    "prompt_name: a stored prompt is put before texts; these are token ids"
                )
            return {"prompt_token_ids": row.content}
        except RequestError as error:
            return error
        except DovetailError as error:  # there is no tokenizer
            return RequestError(str(error))

    @cached_property
    def _chat(self) -> ChatFrontEnd:
        from dovetail.serving import ChatFrontEnd

        engine = self._engine
        return ChatFrontEnd(
            engine.tokenizer,
            engine.config.limits,
            engine.capacity.max_model_len,
            images=engine.images,
        )

    # In the thread that sends answers

    def _send_all(self) -> None:
        ended = False
        while not ended:
            batches = [self._answers.get()]
            while not self._answers.empty():
                batches.append(self._answers.get())
            ended = batches[-1] is None
            if answers := [answer for batch in batches if batch is not None for answer in batch]:
                with suppress(OSError):  # `_receive` ends the process
                    self._send(answers)


if __name__ == "__main__":
    sys.exit(main())
