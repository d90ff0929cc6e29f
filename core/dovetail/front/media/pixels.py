"""Pixels of images, as Pillow has them, made RGB. Both the processes that decode and programs that
give images of Pillow use it, so that the same picture has the same pixels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from PIL import Image, ImageOps

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_DEEP = ("I", "I;16", "I;16L", "I;16B", "I;16N")  # 16 bits a pixel, in as many or more


def rgb(image: Image.Image) -> Image.Image:
    """Return an image as RGB: turned as its EXIF says, what is transparent on white, 16 bits of
    grey scaled to 8. Decodes it, if that hasn't been done."""
    image = ImageOps.exif_transpose(image) or image
    if image.mode in _DEEP:
        image = _eight_bits(image)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    import numpy as np

    deep: NDArray[np.int64] = np.asarray(image).astype(np.int64)
    return Image.fromarray((deep.clip(0, 2**16 - 1) >> 8).astype(np.uint8))
