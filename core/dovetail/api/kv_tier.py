"""KV tier: a place beyond the host's memory where K and V are kept, such as a disk.

The core names frames, copies them between the device and its host pool, and checks every byte that
comes back. A tier stores and loads named bytes, on threads of its own. It never sees a request, a
token or a device.

    device pages ── save ──▶ frame of the host pool ── store ──▶ tier
    device pages ◀─ restore ─ frame of the host pool ◀── load ── tier

What a tier returns is checked against a checksum of what was computed, so a tier can lose a frame or
damage it without an effect on answers. It could forge one, though: who writes to a tier's medium can
change answers, as can who writes to the model's files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from dovetail.api.clock import Clock

# Why a frame wasn't found, stored or loaded: there is no room; there is none of this key, or the job
# was given up; it isn't whole; the medium doesn't work.
Why = Literal["full", "missing", "damaged", "unavailable"]


@dataclass(frozen=True, slots=True)
class FrameKey:
    """Names a frame: the K and V of one cache group for some hundred tokens, or one recurrent
    state. Opaque to tiers; equal keys name equal content.

    `namespace` [32 bytes]: SHA-256 of all that decides the meaning of a frame's bytes besides the
    tokens: the model's weights and config, dtypes, scales, layout and the group. `chain` [32
    bytes]: SHA-256 of the request's `cache_keys` (salt, adapter) and of all tokens up to the
    frame's end.
    """

    namespace: bytes
    chain: bytes


@dataclass(frozen=True, slots=True)
class Frame:
    """Bytes of a frame in the host pool, header included. `data` has the exact length of the frame;
    it is read-only in a store. To be used until its job is reported, and not afterwards."""

    key: FrameKey
    data: memoryview


@dataclass(frozen=True, slots=True)
class Job:
    """Work for a tier. "find": are there frames of these `keys`, one or more? "store": keep
    `frames`. "load": fill `frames`. `frames` is parallel to `keys`, and empty for "find"."""

    id: int
    kind: Literal["find", "store", "load"]
    keys: tuple[FrameKey, ...]
    frames: tuple[Frame, ...] = ()
    # on the clock of the context: results that come later are ignored; the frames are lent to the
    # tier until the job is reported all the same
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """Report of a job: for each key, whether its frame was found, stored or loaded whole. What was
    loaded is checked, so a wrong True costs time only. `why`: for people, if any is False."""

    job: int
    ok: tuple[bool, ...]
    why: Why | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCapabilities:
    """`persistent`: frames survive the process. `shared`: other engines read and write them, too;
    the engine then says at its start who can change answers. `max_jobs`: unreported jobs that it
    takes at a time; more are held back by the core."""

    persistent: bool = False
    shared: bool = False
    max_jobs: int = 8


@dataclass(frozen=True, slots=True)
class TierContext:
    """Constants passed to a tier's constructor.

    `wake`: call it from any thread when `done` has something; it returns at once. `frame_bytes`:
    the sizes that frames can have, ascending.
    """

    clock: Clock
    wake: Callable[[], None]
    frame_bytes: tuple[int, ...] = ()


class KVTier(ABC):
    """A store of named bytes. One thread at a time calls it. Methods return at once, whatever the
    medium does, and raise nothing because it is full, slow or lost; the work happens on the tier's
    own threads. Each job that `submit` takes is reported by `done` exactly once.

    A frame that was reported as stored can be loaded until the tier needs its space. A tier doesn't
    touch a frame's memory after it has reported the job. A store must not be visible in part: a
    frame is found whole or not at all, after a crash, too.

    The constructor may raise `ConfigError` for options that can't be served, with the remedy.
    """

    capabilities = TierCapabilities()
    options: BaseModel

    def __init__(self, options: BaseModel, context: TierContext) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def submit(self, job: Job) -> bool:
        """Begin `job`. False: the tier is too busy, and forgets the job; a store is then dropped,
        and a find or load is a miss."""

    @abstractmethod
    def done(self) -> Sequence[Done]:
        """Return the reports of the jobs that ended since the last call, in any order."""

    def cancel(self, job: int) -> None:
        """Give up a job if that is easy: nobody wants its result any more. It is reported all the
        same. By default it goes on."""

    @abstractmethod
    def drop(self, namespace: bytes) -> None:
        """Forget all frames of a namespace, as far as possible; later stores of it are kept."""

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """End the threads, within `timeout_s`, and report no more. Idempotent. Afterwards `submit`
        returns False. Stores that were reported stay, if the tier is persistent. If the medium
        hangs, return nevertheless: the core never uses the frames of unreported jobs again."""
