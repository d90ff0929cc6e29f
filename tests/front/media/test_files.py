"""Files of images: what is refused, and what is read of the others."""

from __future__ import annotations

import contextlib
import io
import os
import random
import resource
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dovetail.config.limits import Limits
from dovetail.errors import RequestError
from dovetail.front.media.processes import ImageProcesses
from dovetail.front.media.sources import ImageSource, SourceKind
from dovetail.front.media.worker import RefusedError, decoded
from tests.front.media import files
from tests.front.media.checkpoints import InThisProcess, write
from tests.support import FULL

PIXELS = Limits().max_image_pixels
SOURCE = ImageSource(SourceKind.BYTES, b"", "image 0")


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(decoded(data, PIXELS))


@pytest.mark.parametrize("name", files.HOSTILE)
def test_hostile_files_are_refused(name: str) -> None:
    with pytest.raises(RefusedError):
        decoded(files.HOSTILE[name], PIXELS)


def test_the_size_is_checked_before_anything_is_decoded() -> None:
    data = files.file_of(Image.new("L", (3000, 3000)))
    checked = []
    with pytest.raises(RefusedError, match="at most 8,999,999 pixels"):
        decoded(data, 8_999_999, checked.append)
    assert not checked
    truncated = data[:60]

    def refuse(size: tuple[int, int]) -> None:
        raise RefusedError(f"size {size}")

    with pytest.raises(RefusedError, match="size"):
        decoded(truncated, PIXELS, refuse)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_of_an_animation_the_first_picture_is_read(kind: str) -> None:
    data = files.animated(kind)
    first = files.picture().convert("P").convert("RGB") if kind == "GIF" else files.picture()
    got = pixels(data)
    assert got.shape == (17, 23, 3)
    if kind != "GIF":  # which has fewer colours
        np.testing.assert_array_equal(got, np.asarray(first))


def test_modes_become_rgb() -> None:
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    plain = np.repeat(grey[..., None], 3, axis=2)
    np.testing.assert_array_equal(pixels(files.file_of(Image.fromarray(grey))), plain)
    deep = Image.fromarray(grey.astype(np.uint16) * 257)
    np.testing.assert_array_equal(pixels(files.file_of(deep)), plain)
    palette = Image.fromarray(grey).convert("P")
    np.testing.assert_array_equal(pixels(files.file_of(palette)), plain)
    bits = Image.fromarray(grey > 99)
    expected = np.where(plain > 99, 255, 0)
    np.testing.assert_array_equal(pixels(files.file_of(bits)), expected)


def test_cmyk_is_converted() -> None:
    data = files.file_of(files.picture().convert("CMYK"), "JPEG", quality=100)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(pixels(data), expected)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_what_is_transparent_is_white(mode: str) -> None:
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    image.putpixel((0, 0), (9, 9, 9, 255))
    data = files.file_of(image.convert(mode) if mode != "PA" else image.quantize())
    np.testing.assert_array_equal(pixels(data), [[[9] * 3, [255] * 3]])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_and_mirrors(orientation: int) -> None:
    image = files.picture()
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = np.asarray(image)
    mirrored = orientation in (2, 4, 5, 7)
    turns = {1: 0, 2: 0, 3: 2, 4: 2, 5: 1, 6: 3, 7: 3, 8: 1}[orientation]
    expected = np.rot90(upright[:, ::-1] if mirrored else upright, turns)
    for kind, options in (("PNG", {}), ("WEBP", {"lossless": True})):
        data = files.file_of(image, kind, exif=exif, **options)
        np.testing.assert_array_equal(pixels(data), expected)


def test_metadata_is_dropped() -> None:
    np.testing.assert_array_equal(pixels(files.with_metadata(3)), np.asarray(files.picture()))


def test_what_follows_an_image_in_its_file_is_not_read() -> None:
    for data in (files.GOOD + files.HOSTILE["zip"], files.GOOD + files.HOSTILE["html"]):
        np.testing.assert_array_equal(pixels(data), np.asarray(files.picture()))


def damaged(data: bytes, rng: random.Random) -> bytes:
    """A file with some bytes changed, left out or put in."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        place = rng.randrange(len(changed) or 1)
        match rng.randrange(4):
            case 0:
                del changed[place : place + rng.randint(1, 20)]
            case 1:
                changed[place:place] = rng.randbytes(rng.randint(1, 20))
            case _:
                changed[place : place + 1] = rng.randbytes(1)
    return bytes(changed)


def test_damaged_files_are_refused_or_read() -> None:
    rng = random.Random(0)
    good = [
        files.GOOD,
        files.file_of(files.picture(), "JPEG"),
        files.file_of(files.picture(), "JPEG", progressive=True),
        files.file_of(files.picture(), "WEBP"),
        *map(files.animated, ("GIF", "PNG", "WEBP")),
    ]
    read = 0
    for _ in range(10_000 if FULL else 200):
        with contextlib.suppress(RefusedError):
            assert decoded(damaged(rng.choice(good), rng), PIXELS).mode == "RGB"
            read += 1
    assert read > 50


@pytest.mark.slow("starts a process, and sends it all hostile files")
def test_hostile_files_end_nothing_and_take_no_memory_here(tmp_path: Path) -> None:
    write(tmp_path, "llava")
    processes = ImageProcesses(str(tmp_path), Limits())
    for _ in range(2):
        for name, data in files.HOSTILE.items():
            with pytest.raises(RequestError, match=r"^image 0: it"):
                processes.image(SOURCE, data, {})
            assert name
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss == before
    assert processes.image(SOURCE, files.GOOD, {}).size == (23, 17)
    processes.close()


def test_images_that_come_again_are_not_prepared_again(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_vl")
    first = files.file_of(files.picture(40, 40))
    others = [files.file_of(files.picture(40, 40, seed)) for seed in (1, 2, 3)]
    each = InThisProcess(str(tmp_path), Limits()).image(SOURCE, first, {}).nbytes
    processes = InThisProcess(str(tmp_path), Limits(), 2 * each)
    prepared = processes.image(SOURCE, first, {})
    assert processes.image(SOURCE, first, {}) is prepared
    assert processes.image(SOURCE, first, {"size": {"shortest_edge": 1, "longest_edge": 400}})
    assert processes.asked == 2
    for data in (others[0], first, others[1], first, others[2], first):
        processes.image(SOURCE, data, {})
    assert processes.asked == 6  # two fit, and the first is used between the others
    for data in (first, b"GIF89a", b"GIF89a"):
        with contextlib.suppress(RequestError):
            processes.image(SOURCE, data, {})
    assert processes.asked == 8
    none = InThisProcess(str(tmp_path), Limits(), each - 1)
    assert none.image(SOURCE, first, {}).digest == none.image(SOURCE, first, {}).digest
    assert none.asked == 2


class Killing(ImageProcesses):
    """Kills a process, once, while it is asked."""

    dies: int | None = None

    def ask(self, request: Mapping[str, Any], place: str) -> dict[str, Any]:
        if self.dies is not None:
            threading.Timer(0.5, os.kill, [self.dies, signal.SIGKILL]).start()
            self.dies = None
        return super().ask(request, place)


def workers() -> list[int]:
    """The processes of this one that prepare images."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = stat.with_name("cmdline").read_bytes()
            if parent == os.getpid() and b"media/worker.py" in command:
                found.append(int(stat.parent.name))
    return found


@pytest.mark.slow("starts processes, one of which takes its whole time")
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
def test_a_process_that_hangs_or_dies_takes_one_image_with_it(tmp_path: Path) -> None:
    write(tmp_path, "llava")
    processes = Killing(str(tmp_path), Limits(max_image_s=2))
    assert processes.image(SOURCE, files.GOOD, {}).size == (23, 17)
    [hangs] = workers()
    os.kill(hangs, signal.SIGSTOP)
    with pytest.raises(RequestError, match=r"^image 0: it takes longer than 2 s to prepare"):
        processes.image(SOURCE, files.GOOD, {})
    assert hangs not in workers()
    assert processes.image(SOURCE, files.GOOD, {}).size == (23, 17)
    [dies] = workers()
    os.kill(dies, signal.SIGSTOP)
    processes.dies = dies
    with pytest.raises(RequestError, match=r"^image 0: it ended the process that prepared it"):
        processes.image(SOURCE, files.GOOD, {})
    assert processes.image(SOURCE, files.GOOD, {}).size == (23, 17)
    processes.close()
    assert not workers()


@pytest.mark.slow("starts processes, one of which takes its whole time")
def test_a_process_that_grows_or_is_late_ends_alone(tmp_path: Path) -> None:
    write(tmp_path, "llava")
    large = files.file_of(Image.new("RGB", (7000, 7000)))
    small = ImageProcesses(str(tmp_path), Limits(max_image_memory=2**29))
    with pytest.raises(RequestError, match=r"bytes of memory .*limits\.max_image_memory"):
        small.image(SOURCE, large, {})
    assert small.image(SOURCE, files.GOOD, {}).size == (23, 17)
    small.close()
    hurried = ImageProcesses(str(tmp_path), Limits(max_image_s=0.3))
    with pytest.raises(RequestError, match=r"takes longer than 0\.3 s .*limits\.max_image_s"):
        hurried.image(SOURCE, files.scans(3000), {})
    hurried.close()
