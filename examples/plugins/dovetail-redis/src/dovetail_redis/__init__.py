"""The KV tier `redis`."""

from collections.abc import Iterable

from dovetail.api import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        kind="kv_tier",
        name="redis",
        api="1.0",
        target="dovetail_redis.tier:RedisTier",
        options="dovetail_redis.tier:RedisOptions",
        summary="Keeps K and V in Redis or Valkey, for several engines",
    )
