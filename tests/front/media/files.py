"""Image files, good ones and hostile ones, made in memory."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from dovetail.front.media.worker import MOST_READS


def picture(width: int = 23, height: int = 17, seed: int = 0) -> Image.Image:
    """A picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    """A part of a PNG file."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *parts: bytes, depth: int = 8, color: int = 2) -> bytes:
    """A PNG file that says it has this size, and has these parts."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(parts) + chunk(b"IEND", b"")


def zeros(count: int) -> bytes:
    """Return `count` zero bytes, compressed. Each MiB is compressed by itself, so the first is
    repeated."""
    packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    block = packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)
    last = packer.compress(bytes(count % 2**20)) + packer.flush()
    adler32 = struct.pack(">I", (count % 65_521) << 16 | 1)
    return b"\x78\xda" + block * (count >> 20) + last + adler32


def webp(*, width: int, height: int) -> bytes:
    """A WebP file that says it has this size."""
    sizes = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    part = b"VP8X" + struct.pack("<I", 10) + bytes(4) + sizes
    return b"RIFF" + struct.pack("<I", 4 + len(part)) + b"WEBP" + part


def jpeg_of_size(width: int, height: int) -> bytes:
    """A JPEG file whose header says this size."""
    data = file_of(picture(), "JPEG")
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


def animated(kind: str, frames: int = 3) -> bytes:
    """A file with several pictures, of which the first is `picture()`."""
    others = [picture(seed=seed) for seed in range(1, frames)]
    options = {} if kind == "GIF" else {"lossless": True} if kind == "WEBP" else {}
    return file_of(picture(), kind, save_all=True, append_images=others, **options)


def with_text(count: int) -> bytes:
    """A PNG file with a compressed text of so many characters."""
    return png(4, 4, chunk(b"zTXt", b"a\0\0" + zeros(count)), chunk(b"IDAT", zeros(4 * 13)))


def with_metadata(megabytes: int) -> bytes:
    """A good PNG file with so much text."""
    info = PngInfo()
    for place in range(megabytes):
        info.add_text(f"key {place}", "x" * 2**20)
    return file_of(picture(), pnginfo=info)


def scans(count: int) -> bytes:
    """A progressive JPEG file that repeats its last scan."""
    data = file_of(picture(400, 400), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * count + data[-2:]


def inside(data: bytes, at: int, parts: bytes) -> bytes:
    """A file with something put in."""
    return data[:at] + parts + data[at:]


GOOD = file_of(picture())
JPEG = file_of(picture(), "JPEG")
GIF = file_of(picture(), "GIF")
AFTER_HEAD = {"PNG": 33, "GIF": 13 + 3 * 256}  # bytes, where other parts may come
MANY = MOST_READS + 1
HOSTILE: dict[str, bytes] = {  # what is refused
    "empty": b"",
    "text": b"an image, honestly",
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'><rect/></svg>",
    "html": b"<!doctype html><img src=x onerror=alert(1)>",
    "pdf": b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n",
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n",
    "zip": b"PK\x03\x04" + bytes(100),
    "elf": b"\x7fELF" + bytes(100),
    "tiff": file_of(picture(), "TIFF"),
    "bmp": file_of(picture(), "BMP"),
    "ico": file_of(picture(), "ICO"),
    "ppm": file_of(picture(), "PPM"),
    "tga": file_of(picture(), "TGA"),
    "jpeg 2000": b"\x00\x00\x00\x0cjP  \r\n\x87\n" + bytes(64),
    "avif": b"\x00\x00\x00\x1cftypavif" + bytes(64),
    "png of 65,000 x 65,000": png(65_000, 65_000, chunk(b"IDAT", zeros(100))),
    "jpeg of 65,000 x 65,000": jpeg_of_size(65_000, 65_000),
    "gif of 65,535 x 65,535": b"GIF89a" + struct.pack("<HH", 65_535, 65_535) + bytes(20),
    "webp of 16,000,000 x 16,000,000": webp(width=2**24, height=2**24),
    "png bomb": png(8_000, 8_000, chunk(b"IDAT", zeros(8_000 * 8_001)), color=0),
    "png of 2**31 x 1": png(2**31 - 1, 1),
    "png without pixels": png(0, 10),
    "png without data": png(9, 9),
    "png with too little data": png(9, 9, chunk(b"IDAT", zeros(20))),
    "gif without pixels": b"GIF89a" + bytes(20),
    "jpeg without pixels": jpeg_of_size(0, 0),
    "a long line": file_of(Image.new("RGB", (5000, 2))),
    "a long column": file_of(Image.new("RGB", (1, 201))),
    "text bomb": with_text(8 * 2**20),
    "profile bomb": png(
        4, 4, chunk(b"iCCP", b"a\0\0" + zeros(8 * 2**20)), chunk(b"IDAT", zeros(52))
    ),
    "half a png": GOOD[: len(GOOD) // 2],
    "half a jpeg": file_of(picture(99, 99), "JPEG")[:900],
    "half a webp": file_of(picture(99, 99), "WEBP")[:900],
    "half a gif": file_of(picture(99, 99), "GIF")[:900],
    "head of a png": GOOD[:20],
    "wrong checksum": GOOD[:50] + bytes([GOOD[50] ^ 1]) + GOOD[51:],
    "png of many chunks": inside(GOOD, AFTER_HEAD["PNG"], chunk(b"tEXt", b"a\0b") * MANY),
    "png of many empty chunks": inside(GOOD, AFTER_HEAD["PNG"], chunk(b"IDAT", b"") * MANY),
    "jpeg of many markers": inside(JPEG, 2, b"\xff\xfe\x00\x02" * MANY),
    "jpeg of many profiles": inside(JPEG, 2, b"\xff\xe2\x00\x10ICC_PROFILE\0\1\1" * MANY),
    "jpeg filled up": inside(JPEG, 2, b"\xff" * MANY),
    "jpeg of zeros": inside(JPEG, JPEG.index(b"\xff\xdb"), bytes(MANY)),
    "gif of many comments": inside(GIF, AFTER_HEAD["GIF"], b"\x21\xfe\x01a\0" * MANY),
    "gif of a long comment": inside(GIF, AFTER_HEAD["GIF"], b"\x21\xfe" + b"\x01a" * MANY + b"\0"),
    "palette that is too short": png(
        16, 16, chunk(b"tRNS", bytes(300)), chunk(b"IDAT", zeros(16 * 17)), color=3
    ),
    "webp without its picture": webp(width=7_000, height=7_000) + bytes(100),
    "jpeg of garbage": b"\xff\xd8\xff\xe0" + bytes(range(256)) * 20,
}
