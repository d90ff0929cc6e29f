"""KV tier `redis`: a frame is a string of a Redis server, which several engines share."""

import os

import redis
from dovetail.api.blocking_tier import BlockingTier
from dovetail.api.kv_tier import Frame, FrameKey, TierCapabilities, TierContext, Why
from dovetail.errors import ConfigError
from pydantic import BaseModel, ConfigDict, Field
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError
from redis.retry import Retry

PREFIX = "dovetail:kv:1"
REMOVED_AT_ONCE = 500  # frames of a command


class RedisOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(
        default="redis://localhost:6379/0",
        description="Server and database: redis://, rediss:// for TLS, or unix://.",
    )
    password_variable: str | None = Field(
        default=None,
        description="Environment variable that has the server's password, so that no file has it.",
    )
    ttl_s: int | None = Field(
        default=None, ge=1, description="Seconds after which a stored frame expires. null: never."
    )
    timeout_s: float = Field(
        default=5.0, gt=0, le=600, description="Seconds that a call of the server may take."
    )
    threads: int = Field(default=4, ge=1, le=64, description="Connections, each with a thread.")


class RedisTier(BlockingTier):
    """Frames as strings of a server. Its own `maxmemory` and `maxmemory-policy` limit their size.
    It needn't run when the engine starts."""

    capabilities = TierCapabilities(persistent=True, shared=True)
    options: RedisOptions

    def __init__(self, options: RedisOptions, context: TierContext) -> None:
        super().__init__(options, context)
        self.threads = options.threads
        self._client = _client(options)

    def find_frame(self, key: FrameKey) -> Why | None:
        return None if self._client.exists(_name(key)) else "missing"

    def store_frame(self, frame: Frame) -> Why | None:
        try:
            self._client.set(_name(frame.key), frame.data, ex=self.options.ttl_s)
        except OutOfMemoryError:  # the server removes no old frames by its policy
            return "full"
        return None

    def load_frame(self, frame: Frame) -> Why | None:
        data = self._client.get(_name(frame.key))
        if data is None:
            return "missing"
        if len(data) != len(frame.data):
            return "damaged"
        frame.data[:] = data
        return None

    def forget(self, namespace: bytes) -> None:
        found = self._client.scan_iter(f"{PREFIX}:{namespace.hex()}:*", count=REMOVED_AT_ONCE)
        names = list(found)
        for begin in range(0, len(names), REMOVED_AT_ONCE):
            self._client.unlink(*names[begin : begin + REMOVED_AT_ONCE])

    def disconnect(self) -> None:
        self._client.connection_pool.disconnect()


def _name(key: FrameKey) -> str:
    return f"{PREFIX}:{key.namespace.hex()}:{key.chain.hex()}"


def _client(options: RedisOptions) -> redis.Redis:
    """Return a client that isn't connected yet. Raises `ConfigError` for options that it can't
    use."""
    password = None
    if options.password_variable is not None:
        password = os.environ.get(options.password_variable)
        if password is None:
            raise ConfigError(
                f"kv_tier redis: password_variable: {options.password_variable} isn't set in the "
                "environment"
            )
    try:
        return redis.Redis.from_url(
            options.url,
            password=password,
            socket_timeout=options.timeout_s,
            socket_connect_timeout=options.timeout_s,
            retry=Retry(NoBackoff(), 1),  # for a connection that the server has closed
        )
    except ValueError as error:
        raise ConfigError(f"kv_tier redis: url: {error}") from None
