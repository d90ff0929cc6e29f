"""`RowTable`: which request has which of the executor's rows. The core assigns them, so that a step can name its requests by small numbers."""

from __future__ import annotations

from dovetail.engine.live_request import LiveRequest


class RowTable:
    """The `max_num_seqs` rows, as many as can run in one step. A request keeps its row from step to step, so that its token ids needn't be sent
    again; one that holds blocks but doesn't run may lose its row to one that does, and gets a new one later."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows - 1, -1, -1))
        self._holders: list[LiveRequest | None] = [None] * num_rows
        self._removed: list[int] = []  # rows given up since the last batch

    def release(self, request: LiveRequest) -> None:
        """Free its row, if it has one."""
        row = request.row
        if row >= 0:
            self._holders[row] = None
            self._free.append(row)
            self._removed.append(row)
            request.row = -1

    def assign(self, request: LiveRequest) -> None:
        """Give a row to a request that runs in the step being planned and has none."""
        if not self._free:
            self.release(self._victim())
        row = self._free.pop()
        self._holders[row] = request
        request.row = row

    def take_removed(self) -> list[int]:
        """Return the rows given up since the last call, each once."""
        removed, self._removed = sorted(set(self._removed)), []
        return removed

    def _victim(self) -> LiveRequest:
        """Return the request to take a row from: it doesn't run in this step, has the fewest tokens in flight, and among such ran longest
        ago."""
        idle = [holder for holder in self._holders if holder is not None and not holder.granted]
        return min(idle, key=lambda r: (r.in_flight, r.decided_in))
