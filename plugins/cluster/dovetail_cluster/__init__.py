"""Beyond one engine: replicas behind a router, and batches over a cluster of Ray. Ray is the extra `ray`, the router the extra `router`."""

from __future__ import annotations
