"""The KV tier: it keeps frames, which are named bytes. Its four methods run in threads, several at a time, and may block and raise."""

import threading
import zlib
from collections import OrderedDict

from dovetail.api.blocking_tier import BlockingTier
from dovetail.api.kv_tier import Frame, FrameKey, TierCapabilities, TierContext, Why
from pydantic import BaseModel, ByteSize, ConfigDict, Field


class AcmeOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    size: ByteSize = Field(default=ByteSize(2**30), gt=0, description="Maximum size of all compressed frames, such as 1GiB.")


class AcmeTier(BlockingTier):
    """A tier that keeps compressed frames in this process's memory. The one that wasn't used for the longest time is removed first."""

    capabilities = TierCapabilities()
    options: AcmeOptions

    def __init__(self, options: AcmeOptions, context: TierContext) -> None:
        super().__init__(options, context)
        self._lock = threading.Lock()
        self._frames: OrderedDict[FrameKey, bytes] = OrderedDict()  # the oldest first
        self._bytes = 0

    def find_frame(self, key: FrameKey) -> Why | None:
        return None if key in self._frames else "missing"

    def store_frame(self, frame: Frame) -> Why | None:
        data = zlib.compress(frame.data, level=1)
        if len(data) > self.options.size:
            return "full"
        with self._lock:
            self._remove(frame.key)
            while self._bytes + len(data) > self.options.size:
                self._remove(next(iter(self._frames)))
            self._frames[frame.key] = data
            self._bytes += len(data)
        return None

    def load_frame(self, frame: Frame) -> Why | None:
        with self._lock:
            kept = self._frames.get(frame.key)
            if kept is None:
                return "missing"
            self._frames.move_to_end(frame.key)
        data = zlib.decompress(kept)
        if len(data) != len(frame.data):
            return "damaged"
        frame.data[:] = data
        return None

    def forget(self, namespace: bytes) -> None:
        with self._lock:
            for key in [key for key in self._frames if key.namespace == namespace]:
                self._remove(key)

    def _remove(self, key: FrameKey) -> None:
        self._bytes -= len(self._frames.pop(key, b""))
