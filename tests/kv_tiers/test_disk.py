"""The tier `disk`: its folder, its files, and what others do with them. Its suite is among those of
the built-in components."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from dovetail.api.clock import WallClock
from dovetail.api.kv_tier import FrameKey, TierContext
from dovetail.errors import ConfigError
from dovetail.testing.suites import kv_tier_kills
from dovetail.testing.suites.kv_tier import KVTierSuite
from dovetail.testing.suites.kv_tier_world import TierWorld
from dovetail_kv_tiers import frame_folder
from dovetail_kv_tiers.disk import DiskOptions, DiskTier
from dovetail_kv_tiers.frame_folder import SCAN_SHARE, FrameFolder
from dovetail_kv_tiers.ownership import own_folder

SIZE = 1_000
NAMESPACE = b"n" * 32
CONTEXT = TierContext(WallClock(), lambda: None, (SIZE,))


def key(number: int) -> FrameKey:
    return FrameKey(NAMESPACE, number.to_bytes(32))


def data(number: int, size: int = SIZE) -> memoryview:
    return memoryview(bytes([number % 256]) * size)


def load(folder: FrameFolder, number: int) -> bytes | str:
    """The bytes of a frame, or why they can't be had."""
    memory = bytearray(SIZE)
    return folder.load(key(number), memoryview(memory)) or bytes(memory)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not path.is_dir()]


def there(folder: FrameFolder, numbers: range) -> list[int]:
    return [number for number in numbers if folder.size_of(key(number)) is not None]


def use_in_order(folder: Path, numbers: list[int]) -> None:
    """Let the frames have been used in this order."""
    for second, number in enumerate(numbers):
        [file] = folder.rglob(key(number).chain.hex())
        os.utime(file, (second, second))


# Who may write to the folder


def test_a_new_folder_and_all_in_it_is_its_users_only(tmp_path: Path) -> None:
    tier = DiskTier(DiskOptions(path=str(tmp_path / "a/b"), size=10**6), CONTEXT)
    world = TierWorld(lambda _: tier, sizes=(SIZE,))
    world.store(world.keys(3))
    world.close()
    made = tmp_path / "a/b"
    for path in (made, *made.rglob("*")):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


@pytest.mark.parametrize(
    ("folder", "mode", "says"),
    [
        ("a/b", 0o777, "other users can write to {0}/a/b, whose mode is 777"),
        ("a/b", 0o720, "other users can write to {0}/a/b, whose mode is 720"),
        ("a", 0o777, "other users can write to {0}/a, whose mode is 777"),
    ],
)
def test_a_folder_that_others_can_write_to_or_replace_is_refused(
    tmp_path: Path, folder: str, mode: int, says: str
) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / folder).chmod(mode)
    options = {"path": str(tmp_path / "a/b"), "size": "1GiB"}
    with pytest.raises(ConfigError) as caught:
        DiskTier(DiskOptions(**options), CONTEXT)
    assert says.format(tmp_path) in str(caught.value)
    assert "can change answers: take that from them (`chmod go-w`), choose another" in str(
        caught.value
    )
    assert DiskTier(DiskOptions(**options, shared=True), CONTEXT).capabilities.shared


def test_a_folder_in_a_sticky_one_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(0o1777)
    assert own_folder(str(tmp_path / "a/b"), shared=False) == (tmp_path / "a/b").resolve()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o700)
    os.chown(tmp_path / "a", 12345, -1)
    with pytest.raises(ConfigError, match="a belongs to another user, 12345"):
        own_folder(str(tmp_path / "a"), shared=False)
    own_folder(str(tmp_path / "a"), shared=True)


@pytest.mark.parametrize("path", ["file", "file/below", "/proc/none", "~nobody-has-this-name/x"])
def test_what_can_not_be_a_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(ConfigError, match=r"kv_tier disk: path: .*can't be used.*name a folder"):
        own_folder(path, shared=False)


# Files that others have changed


def test_a_flipped_bit_is_returned_for_the_core_to_find(tmp_path: Path) -> None:
    folder = FrameFolder(tmp_path, 10**6)
    folder.store(key(1), data(1))
    [file] = files(tmp_path)
    flipped = bytearray(data(1))
    flipped[500] ^= 4
    file.write_bytes(flipped)
    assert load(folder, 1) == flipped


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1])
def test_a_file_of_another_size_is_damaged_and_removed(tmp_path: Path, size: int) -> None:
    folder = FrameFolder(tmp_path, 10**6)
    folder.store(key(1), data(1))
    os.truncate(files(tmp_path)[0], size)
    assert [load(folder, 1), load(folder, 1)] == ["damaged", "missing"]
    folder.store(key(1), data(1))
    assert load(folder, 1) == data(1)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_is_never_read(tmp_path: Path, make: Any) -> None:
    tier = DiskTier(DiskOptions(path=str(tmp_path), size=10**6), CONTEXT)
    world = TierWorld(lambda _: tier, sizes=(SIZE,))
    [one] = world.keys(1)
    world.store([one])
    [file] = files(tmp_path)
    file.unlink()
    make(file)
    assert not any(world.do("find", [one]).ok)
    assert not any(world.load([one]))
    world.close()


def test_removed_files_are_misses_and_a_removed_folder_is_made_again_by_its_owner(
    tmp_path: Path,
) -> None:
    place = tmp_path / "mounted"
    tier = DiskTier(DiskOptions(path=str(place), size=10**6), CONTEXT)
    world = TierWorld(lambda _: tier, sizes=(SIZE,))
    keys = world.keys(2)
    world.store(keys)
    files(place)[0].unlink()
    assert sorted(world.load(keys)) == [False, True]
    place.rename(tmp_path / "elsewhere")
    for kind in ("find", "load"):
        assert world.do(kind, keys).why == "missing"
    assert world.do("store", keys).why == "unavailable"
    assert not place.exists()  # it may be the place of a disk that isn't mounted
    (tmp_path / "elsewhere").rename(place)
    world.store(keys)
    assert all(world.load(keys))
    world.close()


def test_only_frames_are_counted_and_removed(tmp_path: Path) -> None:
    others = [tmp_path / "letters", tmp_path / "v1/letters", tmp_path / "v1/temporary/new"]
    folder = FrameFolder(tmp_path, 3 * SIZE)
    folder.store(key(0), data(0))
    for path in others:
        path.write_bytes(bytes(10 * SIZE))
    for number in range(1, 9):
        assert folder.store(key(number), data(number)) is None
    assert all(path.exists() for path in others)
    assert len(there(folder, range(9))) == 3


# Sizes


def test_the_frames_that_were_used_last_stay_also_after_a_restart(tmp_path: Path) -> None:
    folder = FrameFolder(tmp_path, 4 * SIZE)
    for number in range(4):
        folder.store(key(number), data(number))
    use_in_order(tmp_path, [0, 3, 1, 2])
    assert load(folder, 0) == data(0)  # after all others, by now
    again = FrameFolder(tmp_path, 3 * SIZE)  # with less room
    again.store(key(4), data(4))
    assert there(again, range(5)) == [0, 2, 4]


def test_two_engines_keep_the_limit_but_for_what_one_stores_between_scans(tmp_path: Path) -> None:
    limit = 64 * SIZE
    engines = [FrameFolder(tmp_path, limit) for _ in range(2)]
    for number in range(160):
        assert engines[number % 2].store(key(number), data(number)) is None
        held = sum(path.stat().st_size for path in files(tmp_path))
        assert held <= limit + limit // SCAN_SHARE + SIZE
    assert len(there(engines[0], range(160))) > 60


def test_a_frame_stored_again_counts_once(tmp_path: Path) -> None:
    folder = FrameFolder(tmp_path, 3 * SIZE)
    folder.store(key(0), data(0))
    for _ in range(5):
        folder.store(key(1), data(1))
    assert there(folder, range(2)) == [0, 1]


def test_a_dropped_namespace_leaves_its_room(tmp_path: Path) -> None:
    folder = FrameFolder(tmp_path, 3 * SIZE)
    kept = FrameKey(b"k" * 32, bytes(32))
    folder.store(kept, data(0))
    for number in range(2):
        folder.store(key(number), data(number))
    folder.forget(NAMESPACE)
    assert len(files(tmp_path)) == 1
    other = FrameKey(b"o" * 32, bytes(32))
    folder.store(other, data(1))
    assert [folder.size_of(one) for one in (kept, other, key(0))] == [SIZE, SIZE, None]


def test_on_a_full_disk_the_oldest_frames_make_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = FrameFolder(tmp_path, 100 * SIZE)
    for number in range(6):
        folder.store(key(number), data(number))
    use_in_order(tmp_path, [3, 4, 5, 0, 1, 2])

    def write(descriptor: int, part: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(frame_folder.os, "write", write)
        assert folder.store(key(6), data(6)) == "full"
    assert there(folder, range(7)) == [0, 1, 2, 5]
    assert len(files(tmp_path)) == 4
    assert folder.store(key(6), data(6)) is None


def test_what_killed_processes_left_is_removed_once_it_is_old(tmp_path: Path) -> None:
    temporary = tmp_path / "v1/temporary"
    (temporary / "dropped/ab").mkdir(parents=True)
    for name in ("old", "new", "dropped/ab/frame"):
        (temporary / name).touch()
    for name in ("old", "dropped"):
        os.utime(temporary / name, (0, 0))
    FrameFolder(tmp_path, 10**6).store(key(1), data(1))
    assert [path.name for path in temporary.iterdir()] == ["new"]


# Kills


@pytest.mark.full
def test_frames_are_whole_after_thirty_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = {"component": "disk", "options": {"path": "frames", "size": "1GiB"}}
    suite = type("Disk", (KVTierSuite,), named)()
    for number in range(30):
        stored, keys = kv_tier_kills.killed_after(suite, 1 + number % 8)
        world = TierWorld(suite.make, sizes=(kv_tier_kills.SIZE,))
        found = world.require_whole_or_missing(keys, "after a kill")
        assert all(found[index] for index in stored)
        world.close()
