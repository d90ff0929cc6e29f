"""`own_folder`: makes a folder that only its user can write to, or says who else can."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dovetail.errors import ConfigError, describe, shown

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def own_folder(path: str, *, shared: bool) -> Path:
    """Return the folder's absolute path, after making it with mode 0700 if it doesn't exist.

    Raises `ConfigError` if that can't be done, if it isn't a folder, or, unless it is `shared`, if
    another user than this one and root can write to it or replace it.
    """
    try:
        folder = Path(path).expanduser().resolve()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        writer = None if shared else _other_writer(folder)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"kv_tier disk: path: {shown(path)} can't be used: {describe(error)}; name a folder "
            "that this user can write to"
        ) from None
    if writer is not None:
        raise ConfigError(
            f"kv_tier disk: path: {writer}. Who can write to {shown(path)} can change answers: "
            "take that from them (`chmod go-w`), choose another folder, or set `shared: true` if "
            "you trust them"
        )
    return folder


def _other_writer(folder: Path) -> str | None:
    """Return how other users can write to a folder, or replace it in one above; None: they
    can't."""
    for path in (folder, *folder.parents):
        status = path.stat()
        if status.st_uid not in (os.getuid(), 0):
            return f"{path} belongs to another user, {status.st_uid}"
        # in a sticky folder such as /tmp, only its owner can rename what is inside
        is_replaceable = path == folder or not status.st_mode & stat.S_ISVTX
        if status.st_mode & _OTHERS_WRITE and is_replaceable:
            return (
                f"other users can write to {path}, whose mode is {stat.S_IMODE(status.st_mode):o}"
            )
    return None
