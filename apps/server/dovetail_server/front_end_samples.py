"""`FrontEndSamples`: which front end each unfinished sample belongs to, and under which number; and
each front end's share of a step's results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from dovetail.serving import Delivery, Finish, LiveRequest
from dovetail_server.frames import (
    Extra,
    Finished,
    First,
    PackedLogprobs,
    PackedResult,
    pack_numbers,
)


class FrontEnd:
    """A front end, as the engine's process knows it."""

    __slots__ = ("live", "lost_below", "name", "top")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.live: dict[int, LiveRequest] = {}  # unfinished samples by number
        self.top = 0  # above all its numbers
        self.lost_below = 0  # aborted samples of which it must be told; 0: none


class Share:
    """The results of one step that go to one front end."""

    __slots__ = ("extra", "finished", "first", "numbers", "tokens")

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.tokens: list[int] = []
        self.first: list[First] = []
        self.finished: list[Finished] = []
        self.extra: Extra | None = None


class FrontEndSamples:
    """Unfinished samples of all front ends."""

    def __init__(self) -> None:
        self.front_ends: dict[bytes, FrontEnd] = {}
        self._places: dict[LiveRequest, tuple[FrontEnd, int]] = {}
        self._new: set[LiveRequest] = set()  # without a token yet

    def __contains__(self, sample: LiveRequest) -> bool:
        return sample in self._places

    def add(self, front_end: FrontEnd, number: int, samples: Sequence[LiveRequest]) -> None:
        """Add a request's samples, the first of which has this number."""
        for index, sample in enumerate(samples):
            self._places[sample] = (front_end, number + index)
            front_end.live[number + index] = sample
        self._new.update(samples)

    def remove(self, sample: LiveRequest) -> bool:
        """Remove a sample; return True if its request has no other."""
        front_end, number = self._places.pop(sample)
        del front_end.live[number]
        self._new.discard(sample)
        samples = sample.siblings or (sample,)
        return not any(one in self._places for one in samples)

    def shares(
        self, delivery: Delivery, finished: dict[LiveRequest, Finish]
    ) -> dict[FrontEnd, Share]:
        """Return what each front end gets of a delivery, in which these samples have finished."""
        shares = defaultdict[FrontEnd, Share](Share)
        self._put_tokens(delivery, shares)
        self._put_first(delivery, shares)
        for sample, finish in finished.items():
            front_end, number = self._places[sample]
            ended = Finished(
                number,
                finish.reason,
                finish.stop_reason,
                sample.preemptions,
                finish.keeps_token,
                tuple(sample.pauses),
            )
            shares[front_end].finished.append(ended)
        if delivery.logprobs or delivery.prompt_logprobs or delivery.pooled:
            self._put_extra(delivery, shares)
        return shares

    def _put_tokens(self, delivery: Delivery, shares: dict[FrontEnd, Share]) -> None:
        places = self._places
        if len(self.front_ends) == 1:  # fast path
            [front_end] = self.front_ends.values()
            share = shares[front_end]
            share.numbers = [places[sample][1] for sample in delivery.requests]
            share.tokens = delivery.token_ids
            return
        for sample, token in zip(delivery.requests, delivery.token_ids, strict=True):
            front_end, number = places[sample]
            share = shares[front_end]
            share.numbers.append(number)
            share.tokens.append(token)

    def _put_first(self, delivery: Delivery, shares: dict[FrontEnd, Share]) -> None:
        """Tell of samples with their first result."""
        if not self._new:
            return
        pooled = (sample for sample, _ in delivery.pooled)
        for sample in self._new.intersection([*delivery.requests, *pooled]):
            front_end, number = self._places[sample]
            times = sample.first_scheduled_time, sample.first_token_time
            first = First(number, sample.cached_tokens, *times, sample.restored_tokens)
            shares[front_end].first.append(first)
            self._new.discard(sample)

    def _put_extra(self, delivery: Delivery, shares: dict[FrontEnd, Share]) -> None:
        rows = defaultdict[FrontEnd, list[tuple[int, int]]](list)  # number, row
        prompts = defaultdict[FrontEnd, list[tuple[int, PackedLogprobs]]](list)
        pooled = defaultdict[FrontEnd, list[PackedResult]](list)
        for sample, _, row in delivery.logprobs:
            front_end, number = self._places[sample]
            rows[front_end].append((number, row))
        for sample, hosts in delivery.prompt_logprobs:
            front_end, number = self._places[sample]
            prompts[front_end].append((number, PackedLogprobs.of(hosts)))
        for sample, data in delivery.pooled:
            front_end, number = self._places[sample]
            pooled[front_end].append(PackedResult.of(number, data))
        for front_end in {**rows, **prompts, **pooled}:
            packed = None
            if front_end in rows:
                numbers, kept = zip(*rows[front_end], strict=True)
                hosts = delivery.logprobs[0][1]  # all of one step
                packed = PackedLogprobs.of(hosts, pack_numbers(numbers), kept)
            shares[front_end].extra = Extra(
                packed, tuple(prompts[front_end]), tuple(pooled[front_end])
            )
