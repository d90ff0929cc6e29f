"""Right drafters in styles that a suite might take for wrong. They import no torch: suites run them
in processes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from threading import Thread

from dovetail.api.drafter import Drafter
from dovetail.request import Request
from dovetail_drafters.ngram import NgramDrafter


class InAThread(NgramDrafter):
    """Proposes in a thread of its own, which it joins."""

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> Sequence[Sequence[int]]:
        proposed = Future[Sequence[Sequence[int]]]()
        work = partial(super().propose, requests, most)

        def run() -> None:
            try:
                proposed.set_result(work())
            except BaseException as error:
                proposed.set_exception(error)

        thread = Thread(target=run)
        thread.start()
        thread.join()
        return proposed.result()


class Ranges(Drafter):
    """Proposes that ids go on by one, as ranges in a tuple."""

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> tuple[range, ...]:
        end = self.context.vocab_size or 0
        lasts = [(*one.prompt_token_ids[-1:], *one.output_token_ids[-1:])[-1] for one in requests]
        return tuple(
            range(last + 1, min(last + 1 + limit, end))
            for last, limit in zip(lasts, most, strict=True)
        )
