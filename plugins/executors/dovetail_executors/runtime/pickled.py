"""Tensors of the small pickled files that some checkpoints have beside their weights.

Nothing in them is run: torch's restricted unpickler makes tensors and containers only.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from dovetail.errors import ModelLoadError

_REST = 2**16  # bytes of a file beside its tensors
_NUMBER = 4  # bytes


def pickled_tensors(path: Path, size: int) -> dict[str, torch.Tensor]:
    """Return the tensors, on the CPU, of a file that `torch.save` wrote of a layer's `state_dict`,
    each under its name after the file's: "colbert_linear.weight". `size`: of the square that the
    layer's weight fits in.

    Raises `ModelLoadError` for a file that is larger than this or another kind of file. Tensors may
    have any shape.
    """
    most = _NUMBER * size * (size + 1) + _REST
    try:
        with zipfile.ZipFile(path) as file:
            held = sum(part.file_size for part in file.infolist())  # unpacked
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelLoadError(f"{path}: not a file that torch.save writes: {error}") from error
    if max(held, path.stat().st_size) > most:
        raise ModelLoadError(f"{path}: {held} bytes, and a layer of this model has at most {most}")
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises whatever a damaged file leads to
        reason = " ".join(str(error).split())[:200]
        raise ModelLoadError(f"{path}: it can't be read: {reason}") from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in found.items()
    ):
        raise ModelLoadError(f"{path}: expected tensors by their names")
    return {f"{path.stem}.{name}": tensor for name, tensor in found.items()}
