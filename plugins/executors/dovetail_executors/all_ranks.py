"""`AllRanks`: the ranks of this host and of others as one. If one fails, all are ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dovetail.errors import DovetailError
from dovetail_executors.connection import token, versions
from dovetail_executors.rank_process import RankJob
from dovetail_executors.ranks import Ranks
from dovetail_executors.remote_ranks import Reception, RemoteRanks, beat_until
from dovetail_executors.ring import Kind, Words

POLL_S = 0.2


class AllRanks:
    """All ranks but the first. Made by one thread, which also waits; `failure` may be read by
    any."""

    def __init__(
        self, here: Ranks, hosts: Sequence[tuple[str, list[RankJob]]], at: tuple[str, int]
    ) -> None:
        """`hosts`: address and jobs of each other one. `at`: where this host listens for them."""
        self._here, self._at, self._changed = here, at, threading.Condition()
        self._hosts = [RemoteRanks(address, jobs, self._changed) for address, jobs in hosts]
        self._reception: Reception | None = None
        self._over, self._lock = threading.Event(), threading.Lock()
        self._beats = threading.Thread(
            target=beat_until,
            args=(self._over, self._hosts),
            name="dovetail-host-beats",
            daemon=True,
        )
        self.failure: DovetailError | None = None
        self.sent = 0  # messages
        # called once, when all ranks have been or are being ended
        self.on_failure: Callable[[], None] = lambda: None
        for each in self._everywhere():
            each.on_failure = partial(self._failed, each)

    def start(self) -> None:
        """Start this host's processes, and listen for the other hosts. Raises what starting a
        process raises, `ConfigError` without a token, and `DovetailError` if the address can't be
        listened at."""
        if self._hosts:
            reception = Reception(*self._at, self._hosts, token(), dict(versions()))
            self._beats.start()
            self._reception = reception
        self._here.start()

    def limit(self, seconds: float | None, late: Callable[[], str] = lambda: "") -> None:
        """As of `Ranks`."""
        self._here.limit(seconds, late)

    def tell(self, **message: Any) -> None:
        """Send a message to every rank; `check` reports dead ones."""
        for each in self._everywhere():
            each.tell(**message)

    def heard(self, what: str) -> list[Any]:
        """Wait until every rank has sent `what`, and return the values in order of ranks. Raises
        `DovetailError` if one fails or the limit has passed."""
        said = self._here.heard(what)
        with self._changed:
            while (
                self.failure is None
                and not self._over.is_set()
                and not all(host.has_said(what) for host in self._hosts)
            ):
                self._changed.wait(POLL_S)
        self.check()
        if self._over.is_set():
            raise DovetailError("executor tensor was stopped while it was starting")
        return [*said, *(each for host in self._hosts for each in host.said(what))]

    def silent(self, what: str) -> str:
        """Name the ranks that haven't sent `what`."""
        local = self._here.silent(what)
        missing = [] if self._reception is None else self._reception.waits_for()
        silent = [
            *([] if local == "none" else [local]),
            *(
                host.named
                for host in self._hosts
                if not host.has_said(what) and host.address not in missing
            ),
        ]
        if missing:
            refused = (
                ""
                if self._reception is None
                else "".join(f"; refused: {each}" for each in self._reception.refused())
            )
            silent.append(
                f"{', '.join(missing)}, where `dovetail ranks` hasn't connected to this "
                f"host{refused}, and so its ranks"
            )
        return ", ".join(silent) or "none"

    def behind(self) -> list[str]:
        """Name the ranks that haven't finished everything that was sent."""
        done = [] if self._here.writer is None else self._here.writer.done()
        names = [self._here.named(index) for index, count in enumerate(done) if count < self.sent]
        return names + [host.named for host in self._hosts if min(host.done()) < self.sent]

    def send(self, kind: Kind, arrays: Sequence[Words]) -> None:
        """Send every rank a batch, or masks. Raises as `check` does if they can't be taken."""
        self.sent += 1
        for host in self._hosts:
            host.send_words(kind, arrays)
        if self._here.writer is not None:
            self._here.writer.send(kind, arrays)

    def check(self) -> None:
        """Raise `DovetailError` if a rank is dead or was too slow."""
        if self.failure is not None:
            raise DovetailError(str(self.failure)) from self.failure

    def await_failure(self, seconds: float) -> None:
        """Wait up to `seconds` for the root cause of the failure that the caller has seen."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or self._over.is_set(), seconds)

    def stop(self) -> None:
        """End all ranks. Idempotent; a no-op in a fork of the process that started them."""
        if self._here.is_forked():
            return
        self._over.set()
        for host in self._hosts:
            host.stop()
        if self._reception is not None:
            self._reception.stop()
            self._beats.join()
        self._here.stop()

    def _everywhere(self) -> list[Ranks | RemoteRanks]:
        return [self._here, *self._hosts]

    def _failed(self, source: Ranks | RemoteRanks) -> None:
        """End all others."""
        with self._lock:
            if self.failure is not None or source.failure is None:
                return
            self.failure = source.failure
        for each in self._everywhere():
            if each is not source:
                each.break_off(source.failure)
        with self._changed:
            self._changed.notify_all()
        self.on_failure()
