"""`KVTierSuite`: checks that a KV tier conforms to the contract of `dovetail.api.kv_tier`.

Plays the core's part: lends memory to jobs, uses it again once they are reported, lets the medium
hang and fail, and kills processes that store. Needs no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, ClassVar

from dovetail.api.kv_tier import FrameKey, Job, KVTier, TierCapabilities, TierContext
from dovetail.errors import ConfigError
from dovetail.testing.blocking import heard_blocking_calls
from dovetail.testing.checks import check, require
from dovetail.testing.medium import SOCKETS, USES, medium_that
from dovetail.testing.suite import Suite
from dovetail.testing.suites import kv_tier_kills
from dovetail.testing.suites.footprint import Footprint
from dovetail.testing.suites.holding import require_bounded
from dovetail.testing.suites.kv_tier_world import SIZES, Lent, TierWorld, in_time
from dovetail.testing.suites.process_state import (
    process_state,
    require_untouched_by_first_use,
)

KINDS = ("find", "store", "load")
MANY = 24  # keys of a job
ROUNDS = 20  # of use before the size of a tier is taken
ROUND_BYTES = 2_048  # that so many rounds may add, for a buffer that isn't full yet
DROPS = 3
KILLS = 2
HUNG_S = 0.5  # within which a thread uses the medium, if the tier has one
CLOSE_S = 0.2  # given to `close` while the medium hangs
FILE_LIMIT = 2**19  # bytes of a file, while there is room for no more
LARGE = 2**20 + 64  # bytes of a frame that exceeds it
SMALL = 65_600  # bytes of the frames by which a tier of limited size is filled
NUL = b"\0" * 31


class KVTierSuite(Suite):
    """Frames of several sizes and namespaces, many jobs at a time, and a medium that hangs, fails,
    is full, or is left by a killed process."""

    kind = "kv_tier"
    settings = Suite.settings | {"small", "small_bytes"}

    # options, besides those of `options`, with which it holds at most `small_bytes`; None: how it
    # is full isn't tried
    small: ClassVar[Mapping[str, Any] | None] = None
    small_bytes: ClassVar[int] = 2**20

    @property
    def capabilities(self) -> TierCapabilities:
        """The capabilities of a tier that is constructed with `options`, which may change them."""
        with self._world() as world:
            return world.tier.capabilities

    # First, since process-wide changes happen only once.
    @check("kv_tier.process_untouched", since="1.0")
    def test_what_belongs_to_the_whole_process_is_left_alone(self) -> None:
        """The tier changed process-wide state, such as the umask, a signal handler, the working
        directory, sockets' timeout or the environment. It runs in the engine's process."""
        before = process_state(self.component_class)
        self.use_once()
        for name, value in process_state(self.component_class).items():
            require(value == before[name], f"{name} isn't what it was before a use")

    @check("kv_tier.first_use", since="1.0")
    def test_first_use(self) -> None:
        """The first use of the tier in a process changed a setting of the whole process; or each
        use registered a function at exit."""
        require_untouched_by_first_use(self, {})

    def use_once(self) -> None:
        with self._world() as world:
            keys = world.keys(3)
            world.store(keys)
            world.require_loaded(keys, "after it was stored")
            world.drop(keys[0].namespace, keys)

    @check("kv_tier.round_trip", since="1.0")
    def test_what_is_stored_is_loaded(self) -> None:
        """A frame that was reported as stored isn't found, isn't loaded, or is loaded with other
        bytes: those of another key, or only a part. A frame may have any length of
        `context.frame_bytes`, its memory may begin at any byte, and a job may have many."""
        with self._world() as world:
            for count in (1, len(SIZES), MANY):
                keys = world.keys(count)
                world.store(keys)
                world.require_loaded(keys, "after it was stored")
                world.require_loaded(keys[::-1], "in another order")

    @check("kv_tier.missing", since="1.0")
    def test_what_was_never_stored_is_missing(self) -> None:
        """A frame that was never stored was reported as found or loaded, or one that was stored
        beside it in the same job was not. Report each key of a job for itself."""
        with self._world() as world:
            keys = world.keys(9)
            stored = keys[1::2]
            for kind in ("find", "load"):
                done = world.do(kind, keys)
                require(not any(done.ok), f"nothing was stored, and a {kind} reports {done}")
            world.store(stored)
            expected = tuple(key in stored for key in keys)
            for kind in ("find", "load"):
                done = world.do(kind, keys)
                require(done.ok == expected, f"{kind}: {done.ok}, expected {expected}")

    @check("kv_tier.reasons", since="1.1")
    def test_a_miss_is_no_failure(self) -> None:
        """A frame that isn't there was reported with another `why` than "missing", or one that is
        larger than the tier (with the options `small` of the suite) with another than "full". An
        exception counts as "unavailable": after three in a row the engine doesn't use the tier for
        a while."""
        with self._world() as world:
            for kind in ("find", "load"):
                done = world.do(kind, world.keys(3))
                require(done.why == "missing", f"nothing was stored, and a {kind} reports {done}")
        if self.small is not None:
            with self._world(self.small, sizes=(2 * self.small_bytes,)) as world:
                done = world.do("store", world.keys(1))
                require(
                    done.ok[0] or done.why == "full",
                    f"a frame that is larger than the tier is reported by {done}",
                )

    @check("kv_tier.names", since="1.0")
    def test_keys_that_differ_in_one_byte_are_different(self) -> None:
        """Frames of two keys were taken for each other. Use all bytes of `namespace` and `chain`:
        two namespaces have the same chains, and bytes may be zero, a slash or a line's end."""
        with self._world() as world:
            one, other = os.urandom(32), os.urandom(32)
            names = [
                *(NUL + end for end in (b"\0", b"\1", b"/", b"\n", b"\r", b" ", b"\xff", b".")),
                *(begin + NUL for begin in (b"\1", b"/", b".", b"~", b"\xff", b"A", b"a")),
                b"\1" * 16 + b"\2" * 16,
                b"\2" * 16 + b"\1" * 16,
            ]
            keys = [FrameKey(namespace, name) for name in names for namespace in (one, other)]
            world.store(keys[::3])
            expected = tuple(key in keys[::3] for key in keys)
            found = world.do("find", keys)
            require(found.ok == expected, f"of {keys}, {found.ok} are found, expected {expected}")
            world.store(keys)
            world.require_loaded(keys, "after frames with similar keys were stored")
            swapped = [FrameKey(key.chain, key.namespace) for key in keys[:4]]
            require(
                not any(world.do("find", swapped).ok),
                "a frame is found by a key whose namespace and chain were exchanged",
            )

    @check("kv_tier.again", since="1.0")
    def test_a_frame_may_be_stored_again(self) -> None:
        """Storing a frame that was there already, also by two jobs at a time, raised, wasn't
        reported as stored, left another frame, or kept it from being loaded meanwhile."""
        with self._world() as world:
            keys = world.keys(4)
            world.store(keys)
            for _ in range(2):
                ids = [world.begin("store", keys) for _ in range(3)]
                for _ in range(3):
                    world.require_loaded(keys, "while it is stored again")
                for done in world.reports(ids):
                    world.require_stored(done, "frames that are there weren't stored again")
                world.require_loaded(keys, "after it was stored again")

    @check("kv_tier.replaces", since="1.1")
    def test_a_frame_is_replaced(self) -> None:
        """A frame was stored where there was a damaged one, and the damaged one was loaded. Replace
        what is there: the core stores a frame again when it was damaged."""
        with self._world() as world:
            keys = world.keys(4)
            damaged = world.job("store", keys)
            for lent in world.lent[damaged.id]:
                lent.memory[-1] ^= 0xFF
            require(world.submit(damaged), "a store was refused by a tier without jobs")
            world.require_stored(world.report(damaged.id), "frames weren't stored")
            world.store(keys)
            world.require_loaded(keys, "after it had replaced a damaged one")

    @check("kv_tier.reports", since="1.0")
    def test_each_job_is_reported_once(self) -> None:
        """A job that `submit` took wasn't reported by `done`, or twice, or not with a bool for each
        key and a `why` if any is False; or one that it didn't take was reported. A job whose
        deadline has passed is reported, too."""
        with self._world() as world:
            keys = world.keys(3)
            for deadline_s in (None, -1.0, 100.0):
                ids = [world.begin(kind, keys, deadline_s) for kind in (*KINDS, *KINDS)]
                world.reports(ids)
            require(not world.call("done"), "a job was reported again")

    @check("kv_tier.wake", since="1.0")
    def test_wake_is_called_after_a_report(self) -> None:
        """A job was reported without a call of `context.wake` after it: the engine might sleep
        until the next request. Make the report before the call."""
        with self._world(waits_for_wake=True) as world:
            keys = world.keys(2)
            for _ in range(10):
                for kind in ("store", "find", "load"):
                    world.do(kind, keys)

    @check("kv_tier.busy", since="1.0")
    def test_it_takes_jobs_again_after_many(self) -> None:
        """The tier took no job although it had none, as after a burst of jobs, cancelled ones too.
        It may refuse jobs only while it is busy; `max_jobs` says with how many."""
        with self._world() as world:
            most = world.tier.capabilities.max_jobs
            require(most >= 1, f"capabilities.max_jobs is {most}: expected 1 or more")
            keys = world.keys(2)
            for _ in range(3):
                jobs = [world.job(kind, keys) for kind in KINDS for _ in range(most)]
                taken = [job.id for job in jobs if world.submit(job)]
                for id in taken[::2]:
                    world.call("cancel", id)
                world.reports(taken)
                for kind in KINDS:
                    job = world.job(kind, keys)
                    require(world.submit(job), f"a {kind} was refused by a tier without jobs")
                    world.report(job.id)

    @check("kv_tier.cancel", since="1.0")
    def test_a_cancelled_job_is_reported(self) -> None:
        """A job that was cancelled wasn't reported; or cancelling a job that has ended, or is
        unknown, raised or changed another one."""
        with self._world() as world:
            keys = world.keys(8)
            world.store(keys)
            id = world.begin("load", keys)
            world.call("cancel", id)
            world.report(id)
            for other in (id, 10**9):
                world.call("cancel", other)
            world.require_loaded(keys, "after jobs that had ended were cancelled")

    @check("kv_tier.lent", since="1.0")
    def test_memory_is_used_only_until_the_report(self) -> None:
        """The tier wrote to a frame's memory, or read it, after it had reported the job: others'
        frames are there by then. Report a store once all is written, not when it is queued."""
        with self._world() as world:
            keys = world.keys(MANY)
            world.store(keys)  # whose memory is written over when they are reported
            world.require_loaded(keys, "after the memory of its store was used for another")
            ids = [world.begin("load", keys[:6]) for _ in range(3)]
            lent = [one for id in ids for one in world.lent[id]]
            for id in ids[:2]:
                world.call("cancel", id)
            world.reports(ids)
            for one in lent:
                one.use_again()
            world.require_loaded(keys, "after others")
        changed = sum(not one.is_untouched for one in lent)
        require(not changed, f"{changed} frames were written to after their jobs were reported")

    @check("kv_tier.drop", since="1.0")
    def test_a_dropped_namespace_is_forgotten_and_no_other(self) -> None:
        """After `drop`, frames of the namespace are still found, or those of another aren't; or a
        frame that was stored later is lost. If frames are removed in the background, let later
        stores of the namespace wait."""
        with self._world(sizes=SIZES[:3]) as world:
            others = world.keys(5)
            world.store(others)
            keys = world.keys(MANY)
            world.call("drop", keys[0].namespace)  # of which there is nothing
            for _ in range(DROPS):
                world.store(keys)
                world.drop(keys[0].namespace, keys)
                world.store(keys)
                world.call("drop", keys[0].namespace)
                world.store(keys[:2])
                world.require_loaded(keys[:2], "when it was stored after a drop")
                world.require_loaded(others, "after another namespace was dropped")

    @check("kv_tier.any_thread", since="1.0")
    def test_any_thread_may_call_it(self) -> None:
        """Called from another thread each time, one at a time, it raised, or lost a job."""
        with self._world() as world:
            keys = world.keys(3)
            for kind in ("store", "find", "load"):
                in_time(partial(world.do, kind, keys), f"a {kind} from another thread")
            in_time(partial(world.drop, keys[0].namespace, keys), "a drop from another thread")
            in_time(world.close, "close in another thread")

    @check("kv_tier.returns", since="1.0")
    def test_no_method_waits_for_the_medium(self) -> None:
        """`submit`, `done`, `cancel` or `drop` used a file, socket or process, slept, or waited for
        a thread that does: all requests of the engine wait meanwhile. Hold no lock while you use
        the medium."""
        with self._world() as world:
            keys = world.keys(4)
            world.store(keys)
            world.require_loaded(keys, "after it was stored")
            for name, call in _calls(world, keys):
                with heard_blocking_calls(USES) as heard:
                    call()
                require(not heard, f"{name} called {', '.join(sorted(set(heard)))}")
            ids: list[int | None] = []
            with medium_that("hangs") as hung:
                world.submit(world.job("store", keys))
                hung.wait(HUNG_S)
                for name, call in (*_calls(world, keys), *_calls(world, keys)):
                    in_time(lambda: ids.append(call()), f"{name}, while the medium hangs,")  # noqa: B023
            world.reports(id for id in ids if id is not None)
            world.store(keys)
            world.require_loaded(keys, "after the medium had hung")

    @check("kv_tier.returns_at_first", since="1.1")
    def test_no_method_waits_for_the_first_use_of_the_medium(self) -> None:
        """`submit`, `done`, `cancel` or `drop` waited for a thread that opens the medium, such as a
        connection to a server that doesn't answer. Hold no lock while you use the medium."""
        with self._world() as world:
            keys = world.keys(2)
            ids: list[int | None] = []
            with medium_that("hangs") as hung:
                world.submit(world.job("store", keys))
                hung.wait(HUNG_S)
                for name, call in _calls(world, keys):
                    what = f"{name}, while the medium is opened and hangs,"
                    in_time(lambda: ids.append(call()), what)  # noqa: B023
            world.reports(id for id in ids if id is not None)

    @check("kv_tier.failing", since="1.0")
    def test_a_failing_medium_is_reported(self) -> None:
        """Files or sockets that failed made a method raise, left a job without a report, ended a
        thread, or a frame that is there in part; or the tier didn't work again afterwards. Report
        False with the `why` "unavailable"."""
        with self._world() as world:
            keys = world.keys(4)
            before = world.keys(4)
            world.store(before)
            with medium_that("fails"):
                for kind in KINDS:
                    world.do(kind, keys)
                world.load(before)
                world.call("drop", os.urandom(32))
            world.require_whole_or_missing([*keys, *before], "after the medium had failed")
            world.store(keys)
            world.require_loaded(keys, "after the medium had failed")

    @check("kv_tier.no_room", since="1.0")
    def test_a_store_without_room_is_reported(self) -> None:
        """A store that the medium has no room for raised, or was reported as stored, or left a
        frame that is there in part. Report False with the `why` "full"."""
        with self._world(sizes=(LARGE,)) as world:
            keys = world.keys(3)
            with _files_limited():
                done = world.do("store", keys)
            there = world.require_whole_or_missing(keys, "after the medium was full")
            for is_stored, is_there in zip(done.ok, there, strict=True):
                require(is_there or not is_stored, "a frame was reported as stored, and is missing")
            world.store(keys)
            world.require_loaded(keys, "after there was room again")

    @check("kv_tier.bounded", since="1.0")
    def test_its_size_is_limited(self) -> None:
        """With the options `small` of the suite, the tier kept more than `small_bytes`, or raised,
        or took nothing any more once it was full. Remove old frames, or report False with the `why`
        "full"."""
        if self.small is None:
            self.note("`small` isn't set, so how it is full wasn't tried")
            return
        fit = self.small_bytes // SMALL
        kept: list[FrameKey] = []
        for _ in range(2):  # a persistent one finds what is there, and has the same limit
            with self._world(self.small, sizes=(SMALL,)) as world:
                keys = world.keys(2 * fit + 1, kept[0].namespace if kept else None)
                for key in keys:
                    world.do("store", [key])
                kept += keys
                found = sum(world.do("find", kept).ok)
                require(
                    found <= fit,
                    f"{found} frames of {SMALL} bytes are kept, in a tier of {self.small_bytes}",
                )
                require(found, f"of {len(kept)} frames, none is kept: {fit} have room")
        with self._world(self.small, sizes=(2 * self.small_bytes,)) as world:
            [large] = world.keys(1)
            done = world.do("store", [large])
            require(not done.ok[0], "a frame that is larger than the tier was reported as stored")
            world.drop(kept[0].namespace, kept)

    @check("kv_tier.keeps_new", since="1.1")
    def test_a_full_tier_keeps_what_is_new(self) -> None:
        """With the options `small` of the suite, frames that were reported as stored in a full tier
        weren't there directly afterwards. Remove those that weren't used for the longest time."""
        if self.small is None:
            return
        fit = self.small_bytes // SMALL
        with self._world(self.small, sizes=(SMALL,)) as world:
            keys = world.keys(2 * fit)
            stored = [key for key in keys if all(world.do("store", [key]).ok)]
            later = [key for key in stored if key in keys[fit:]]
            require(
                not later or world.do("find", later[-1:]).ok[0],
                f"{len(later)} frames were stored in a full tier, and the last one isn't there",
            )
            world.drop(keys[0].namespace, keys)

    @check("kv_tier.memory", since="1.0")
    def test_its_memory_is_limited(self) -> None:
        """After many jobs for the same few frames, the tier holds more memory than before. Keep
        nothing of jobs that were reported, nor of namespaces that were dropped."""
        with self._world(sizes=SIZES[:2]) as world:
            keys = world.keys(4)

            def use(times: int) -> None:
                for _ in range(times):
                    world.store(keys)
                    world.load(keys)
                    gone = world.keys(2)
                    world.store(gone)
                    world.drop(gone[0].namespace, gone)
                    world.call("cancel", 10**9)

            require_bounded(world.tier, use, ROUNDS, ROUND_BYTES, "used for the same frames")

    @check("kv_tier.starts", since="1.1")
    def test_the_constructor_waits_for_no_server(self) -> None:
        """The constructor waited for a server that doesn't answer: an engine should start while its
        server is down. Connect in the methods."""
        made: list[TierWorld] = []
        with medium_that("hangs", SOCKETS):
            in_time(
                lambda: made.append(TierWorld(self.make)), "the constructor, while sockets hang,"
            )
        made[0].close()

    @check("kv_tier.close", since="1.0")
    def test_nothing_is_left_after_close(self) -> None:
        """After `close`, threads, processes or open files are left, frames are written to, jobs are
        reported or taken, or a second call raised."""
        with self._world() as world:  # what a library makes once for the process
            world.do("store", world.keys(1))
        before = Footprint.now()
        with self._world() as world:
            keys = world.keys(MANY)
            world.store(keys)
            ids = [world.begin("load", keys[:4]) for _ in range(2)]
            lent: list[Lent] = [one for id in ids for one in world.lent[id]]
            world.close()
            for one in lent:
                one.use_again()
            require(not world.submit(world.job("find", keys)), "a job was taken after close")
            require(not world.call("done"), "a job was reported after close")
            for again in (0.0, 1.0):
                world.close(again)
            world.call("cancel", ids[0])
            world.call("drop", keys[0].namespace)
        left = before.left_behind()
        require(not left, f"left behind after close: {', '.join(left)}")
        require(all(one.is_untouched for one in lent), "a frame was written to after close")

    @check("kv_tier.close_hung", since="1.0")
    def test_close_returns_although_the_medium_hangs(self) -> None:
        """`close` waited for a medium that hangs, beyond its `timeout_s`: the engine couldn't
        stop."""
        with self._world() as world:
            keys = world.keys(2)
            world.store(keys)
            with medium_that("hangs") as hung:
                for kind in KINDS:
                    world.submit(world.job(kind, keys))
                hung.wait(HUNG_S)
                in_time(lambda: world.close(CLOSE_S), f"close({CLOSE_S}), while the medium hangs,")

    @check("kv_tier.restart", since="1.0", capability="persistent")
    def test_frames_survive_a_restart(self) -> None:
        """A tier that declares `persistent` doesn't find what another one with the same options had
        stored before it was closed."""
        with self._world() as world:
            keys = world.keys(MANY)
            world.store(keys)
        with self._world() as world:
            world.require_loaded(keys, "after a restart")
            world.drop(keys[0].namespace, keys)
        with self._world() as world:
            require(not any(world.do("find", keys).ok), "a dropped frame is there after a restart")

    @check("kv_tier.killed", since="1.0", capability="persistent")
    def test_a_kill_leaves_whole_frames(self) -> None:
        """A process was killed while it stored, and a frame is there in part; or one is missing
        that it had reported. Write under another name, and rename."""
        for number in range(KILLS):
            stored, keys = kv_tier_kills.killed_after(self, 1 + 2 * number)
            with self._world(sizes=(kv_tier_kills.SIZE,)) as world:
                there = world.require_whole_or_missing(keys, "after a kill")
                for index in stored:
                    require(there[index], "a frame that was reported before the kill is missing")
                world.store(keys)
                world.require_loaded(keys, "after a kill")
                world.drop(keys[0].namespace, keys)

    @check("kv_tier.together", since="1.0", capability="persistent")
    def test_two_engines_may_use_one_medium(self) -> None:
        """Two tiers with the same options, as of two engines, raised, or loaded a frame that isn't
        whole, while both stored, loaded and dropped; or one that is `shared` doesn't find what the
        other stored. A constructor may refuse the second with `ConfigError`."""
        with self._world() as one:
            try:
                second = TierWorld(self.make)
            except ConfigError as error:
                self.note(f"a second engine is refused: {error}")
                return
            with closing(second) as other:
                keys = one.keys(MANY)
                ids = [(world, world.begin("store", keys)) for world in (one, other)]
                for world, id in ids:
                    done = world.report(id)
                    world.require_stored(done, "frames that two engines store weren't stored")
                for world in (one, other):
                    world.require_loaded(keys, "stored by two engines")
                mine = one.keys(4, keys[0].namespace)
                one.store(mine)
                there = other.require_whole_or_missing(mine, "stored by another engine")
                require(
                    all(there) or not one.tier.capabilities.shared,
                    "a frame that another engine stored isn't found",
                )
                one.call("drop", keys[0].namespace)
                for world in (other, one, other, one):
                    world.load(keys)
                one.drop(keys[0].namespace, keys)
                one.store(keys)
                one.require_loaded(keys, "after a drop")

    @contextmanager
    def _world(
        self, options: Mapping[str, Any] | None = None, **settings: Any
    ) -> Iterator[TierWorld]:
        """Make a tier with these options in place of the suite's, and close it at the end."""
        make = self.make if options is None else partial(self._make_with, options)
        with closing(TierWorld(make, **settings)) as world:
            yield world

    def _make_with(self, options: Mapping[str, Any], context: TierContext) -> KVTier:
        tier: KVTier = self.component_class(self.make_options(options), context)
        return tier


def _taken(world: TierWorld, job: Job) -> int | None:
    return job.id if world.submit(job) else None


def _calls(
    world: TierWorld, keys: Sequence[FrameKey]
) -> Iterator[tuple[str, Callable[[], int | None]]]:
    """Yield calls of each method by name. Those of `submit` return the id of the job if it was
    taken."""
    for kind in KINDS:
        job = world.job(kind, keys)
        yield f"submit of a {kind}", partial(_taken, world, job)
        yield "cancel", partial(world.call, "cancel", job.id)
    yield "done", world.look
    yield "drop", partial(world.call, "drop", os.urandom(32))


@contextmanager
def _files_limited() -> Iterator[None]:
    """Let no file of this process grow beyond `FILE_LIMIT`; nothing where that can't be set."""
    if sys.platform == "win32":
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
