"""Requests of a client go to the same few replicas, whose caches have its prompts."""

import zlib
from collections.abc import Sequence

from dovetail_lab.routers import Arrival, ReplicaLoad, Router
from pydantic import Field


class AcmeRouter(Router):
    """Chooses the replica with the least to do, among those of the client."""

    replicas_per_client: int = Field(2, ge=1)  # an option: `--router "acme(3)"`

    def choose(self, request: Arrival, replicas: Sequence[ReplicaLoad]) -> int:
        # not hash(), which differs from run to run
        home = zlib.crc32((request.client or "").encode()) % len(replicas)
        near = [(home + step) % len(replicas) for step in range(min(self.replicas_per_client, len(replicas)))]
        return min(near, key=lambda index: replicas[index].all_tokens)
