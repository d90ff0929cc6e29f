"""The tier with a real server, and without one."""

from collections.abc import Iterator
from contextlib import suppress

import pytest
import redis
from dovetail.api.clock import WallClock
from dovetail.api.kv_tier import Done, Frame, FrameKey, Job, TierContext
from dovetail.errors import ConfigError
from servers import needs_a_server, server

from dovetail_redis.tier import RedisOptions, RedisTier

KEYS = tuple(FrameKey(b"n" * 32, bytes([number]) * 32) for number in range(3))


class Engine:
    """The engine's side of a tier."""

    def __init__(self, **options: object) -> None:
        self.tier = RedisTier(RedisOptions(**options), TierContext(WallClock(), lambda: None))
        self.ids = 0

    def do(self, kind: str, sizes: tuple[int, ...] = (5000,) * 3) -> tuple[Done, list[bytes]]:
        memory = [bytearray(bytes([number]) * size) for number, size in enumerate(sizes)]
        if kind == "load":
            memory = [bytearray(len(one)) for one in memory]
        frames = tuple(Frame(key, memoryview(one)) for key, one in zip(KEYS, memory, strict=True))
        self.ids += 1
        assert self.tier.submit(Job(self.ids, kind, KEYS, () if kind == "find" else frames))
        while not (done := self.tier.done()):
            pass
        return done[0], [bytes(one) for one in memory]

    def close(self) -> None:
        self.tier.close(10.0)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server() as url:
        yield url


@needs_a_server
def test_another_engine_finds_what_was_stored(url: str) -> None:
    one, other = Engine(url=url), Engine(url=url)
    stored, memory = one.do("store")
    assert all(stored.ok)
    assert other.do("load") == (Done(1, (True,) * 3), memory)
    one.close()
    other.close()


@needs_a_server
def test_a_string_of_another_length_is_damaged(url: str) -> None:
    engine = Engine(url=url)
    engine.do("store")
    assert engine.do("load", (5000, 4000, 5000))[0] == Done(2, (True, False, True), "damaged")
    engine.close()


@needs_a_server
def test_frames_expire(url: str) -> None:
    engine = Engine(url=url, ttl_s=100)
    engine.do("store")
    with redis.Redis.from_url(url) as client:
        assert [0 < client.ttl(name) <= 100 for name in client.keys("*")] == [True] * 3
    engine.close()


@needs_a_server
@pytest.mark.parametrize(("policy", "why"), [("noeviction", "full"), ("allkeys-lru", None)])
def test_a_full_server_refuses_or_removes_old_frames_by_its_policy(
    policy: str, why: str | None
) -> None:
    with server("--maxmemory", "32mb", "--maxmemory-policy", policy) as url:
        with redis.Redis.from_url(url) as others:
            for number in range(40):
                with suppress(redis.OutOfMemoryError):
                    others.set(f"old {number}", bytes(2**20))
        engine = Engine(url=url)
        assert engine.do("store", (2**20,) * 3)[0].why == why
        engine.close()


@needs_a_server
def test_it_works_again_once_the_server_does(tmp_path: object) -> None:
    with server() as url:
        engine = Engine(url=url, timeout_s=2.0)
        assert all(engine.do("store")[0].ok)
    assert engine.do("find")[0] == Done(2, (False,) * 3, "unavailable")
    engine.close()


def test_an_engine_starts_without_a_server() -> None:
    engine = Engine(url="redis://localhost:1")
    for kind in ("store", "find", "load"):
        assert engine.do(kind)[0].why == "unavailable"
    engine.tier.drop(b"n" * 32)
    engine.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"url": "http://localhost"}, "kv_tier redis: url: .*must specify one of"),
        ({"password_variable": "NOT_SET_HERE"}, "password_variable: NOT_SET_HERE isn't set"),
    ],
)
def test_options_that_can_not_be_served_are_refused(options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Engine(**options)
