"""KV tier: storage for K and V beyond the host's memory, such as a disk or a server.

The core names frames, copies them between the device and its host pool, and verifies every byte
that it loads. A tier stores and loads named bytes on its own threads. It never sees a request, a
token or a device.

    device pages ── save ──▶ frame of the host pool ── store ──▶ tier
    device pages ◀─ restore ─ frame of the host pool ◀── load ── tier

The core verifies loaded frames against a checksum of what was computed. A tier that loses or
damages a frame therefore doesn't affect answers. The checksum isn't a signature: anyone who can
write to a tier's medium can change answers, like anyone who can write to the model's files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from dovetail.api.clock import Clock

# Why a frame wasn't found, stored or loaded: there is no space; no frame has this key, or the job
# was cancelled; the frame is incomplete or corrupt; the medium doesn't work.
Why = Literal["full", "missing", "damaged", "unavailable"]


@dataclass(frozen=True, slots=True)
class FrameKey:
    """Key of a frame: the K and V of one cache group for up to some hundred tokens, or one
    recurrent state. Opaque to tiers; equal keys name equal content.

    `namespace` [32 bytes]: SHA-256 of everything that determines the meaning of a frame's bytes
    except the tokens: the model's weights and config, dtypes, scales, layout and the group. `chain`
    [32 bytes]: SHA-256 of the request's `cache_keys` (salt, adapter) and of all tokens and images
    up to the frame's end.
    """

    namespace: bytes
    chain: bytes


@dataclass(frozen=True, slots=True)
class Frame:
    """Bytes of a frame in the host pool, header included. `data` has the exact length of the frame;
    it is read-only in a store. It may be used until the job is reported, and not afterwards."""

    key: FrameKey
    data: memoryview


@dataclass(frozen=True, slots=True)
class Job:
    """Work for a tier. "find": report which of `keys`, one or more, have frames. "store": keep
    `frames`. "load": fill `frames`. `frames` is parallel to `keys`, and empty for "find"."""

    id: int
    kind: Literal["find", "store", "load"]
    keys: tuple[FrameKey, ...]
    frames: tuple[Frame, ...] = ()
    # on the context's clock: results that come later are ignored; the frames remain lent to the
    # tier until the job is reported
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """Report of a job: for each key, whether its frame was found, stored or loaded completely.
    Loaded frames are verified, so a wrong True costs time only. `why`: the reason, if any is False;
    "unavailable" counts as a failure of the tier."""

    job: int
    ok: tuple[bool, ...]
    why: Why | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCapabilities:
    """`persistent`: frames survive the process. `shared`: other engines read and write them, too;
    the engine logs at startup that writers can change answers. `max_jobs`: maximum number of
    unreported jobs; the core submits no more than that."""

    persistent: bool = False
    shared: bool = False
    max_jobs: int = 8


@dataclass(frozen=True, slots=True)
class TierContext:
    """Constants passed to a tier's constructor.

    `wake`: call it from any thread after a report is ready for `done`; it returns at once.
    `frame_bytes`: the sizes that frames can have, in ascending order; empty if unknown.
    """

    clock: Clock
    wake: Callable[[], None]
    frame_bytes: tuple[int, ...] = ()


class KVTier(ABC):
    """Store of named bytes. One thread at a time calls it. Methods return at once, whatever the
    medium does, and don't raise if it is full, slow or lost; the work happens on the tier's own
    threads. Each job that `submit` accepts is reported by `done` exactly once.

    A frame that was reported as stored can be loaded until the tier needs its space. A tier doesn't
    touch a frame's memory after it has reported the job. A store must not be visible in part: a
    frame is found whole or not at all, even after a crash.

    The constructor may raise `ConfigError`, with the remedy, for options that it can't honour.
    """

    capabilities = TierCapabilities()
    options: BaseModel

    def __init__(self, options: BaseModel, context: TierContext) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def submit(self, job: Job) -> bool:
        """Begin `job`. Return False if the tier is too busy, and forget the job; the core then
        drops a store, and counts a find or load as a miss."""

    @abstractmethod
    def done(self) -> Sequence[Done]:
        """Return the reports of the jobs that have ended since the last call, in any order."""

    def cancel(self, job: int) -> None:
        """Give up a job whose result is no longer needed, if that is easy. It is still reported. By
        default it continues."""

    @abstractmethod
    def drop(self, namespace: bytes) -> None:
        """Remove all frames of a namespace, as far as possible; later stores to it are kept."""

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """End the threads within `timeout_s`, and report no more jobs. Idempotent. Afterwards
        `submit` returns False. Stores that were reported remain if the tier is persistent. If the
        medium hangs, return anyway: the core never uses the frames of unreported jobs again."""
