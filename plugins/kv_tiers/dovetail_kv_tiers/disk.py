"""KV tier `disk`: keeps frames in files of a folder."""

from __future__ import annotations

from dataclasses import replace

from pydantic import BaseModel, ByteSize, ConfigDict, Field

from dovetail.api.blocking_tier import BlockingTier
from dovetail.api.kv_tier import Frame, FrameKey, TierCapabilities, TierContext, Why
from dovetail_kv_tiers.frame_folder import FrameFolder
from dovetail_kv_tiers.ownership import own_folder


class DiskOptions(BaseModel):
    """Options of the KV tier `disk`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(
        min_length=1,
        description="Folder of the files, made with mode 0700 if it doesn't exist. Several engines "
        "may use one folder.",
    )
    size: ByteSize = Field(
        gt=0,
        description="Maximum size of all files, such as 100GiB. Those that weren't used for the "
        "longest time are removed first.",
    )
    threads: int = Field(default=4, ge=1, le=64, description="Threads that read and write files.")
    shared: bool = Field(
        default=False,
        description="Accept a folder that other users can write to. They can change answers.",
    )


class DiskTier(BlockingTier):
    """Frames as files. They survive the process, and several engines share them. A file is there
    whole or not at all, also after `kill -9`; nothing is synced to the disk, so that a loss of
    power may damage recent files, which the core's checksums find."""

    capabilities = TierCapabilities(persistent=True, max_jobs=16)
    options: DiskOptions

    def __init__(self, options: DiskOptions, context: TierContext) -> None:
        super().__init__(options, context)
        self.capabilities = replace(self.capabilities, shared=options.shared)
        self.threads = options.threads
        path = own_folder(options.path, shared=options.shared)
        self._folder = FrameFolder(path, options.size)

    def find_frame(self, key: FrameKey) -> Why | None:
        size = self._folder.size_of(key)
        if size is None or (self.context.frame_bytes and size not in self.context.frame_bytes):
            return "missing"
        return None

    def store_frame(self, frame: Frame) -> Why | None:
        return self._folder.store(frame.key, frame.data)

    def load_frame(self, frame: Frame) -> Why | None:
        return self._folder.load(frame.key, frame.data)

    def forget(self, namespace: bytes) -> None:
        self._folder.forget(namespace)
