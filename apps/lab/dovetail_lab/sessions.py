"""`Followers`: requests of a closed loop. A follower arrives a given time after its predecessors
have ended: the next turn of a chat after the answer was read, or of an agent after its tool has
run. So a slow engine gets its next requests later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dovetail_lab.traces.reading import TraceError
from dovetail_lab.traces.request import Trace, TraceRequest
from dovetail_lab.traces.transform import arriving_at


class Released(NamedTuple):
    """A follower whose arrival time is now known. Sorts by arrival, then by index in the trace."""

    arrival_s: float  # since the trace began
    place: int
    request: TraceRequest


class Followers:
    """Requests of a trace that wait for others. Those whose predecessors aren't in the trace, such
    as in a slice, don't wait.

    Raises `TraceError` if one waits for itself, or for a later request.
    """

    def __init__(self, trace: Trace) -> None:
        places = {request.id: place for place, request in enumerate(trace)}
        self._waits_for: dict[str, set[str]] = {}  # follower -> predecessors that haven't ended
        self._followers: dict[str, list[TraceRequest]] = {}  # predecessor -> those that wait for it
        self._places = places
        for request in trace:
            known = {id for id in request.after if id in places}
            if late := [id for id in known if places[id] >= places[request.id]]:
                raise TraceError(
                    f"{trace.name}: request {request.id} waits for {late[0]}, which doesn't come "
                    f"before it"
                )
            if known:
                self._waits_for[request.id] = known
            for id in known:
                self._followers.setdefault(id, []).append(request)

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._waits_for)

    def __contains__(self, id: str) -> bool:
        return id in self._waits_for

    def ended(self, id: str, time_s: float) -> Iterator[Released]:
        """Record that a request completed `time_s` after the start of the trace. Yields the
        requests whose last predecessor it was, each with its arrival."""
        for request in self._followers.pop(id, ()):
            missing = self._waits_for.get(request.id, set())
            missing.discard(id)
            if not missing and self._waits_for.pop(request.id, None) is not None:
                arrival_s = time_s + request.gap_s
                yield Released(arrival_s, self._places[request.id], arriving_at(request, arrival_s))

    def failed(self, id: str, time_s: float) -> Iterator[tuple[TraceRequest, str]]:
        """Record that a request was rejected or failed. Yields the requests that then can't be
        sent, for lack of an answer to continue, with the reason: all that directly or indirectly
        wait for it."""
        for request in self._followers.pop(id, ()):
            if self._waits_for.pop(request.id, None) is not None:
                yield arriving_at(request, time_s), f"it was to follow {id}, which didn't complete"
                yield from self.failed(request.id, time_s)
