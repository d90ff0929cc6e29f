"""`ExecutorSubject`: starts executors for checks, with common helpers."""

import atexit
import json
import shutil
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from dovetail.api.clock import Clock, VirtualClock, WallClock
from dovetail.api.executor import ComponentRef, Executor, ExecutorContext
from dovetail.config.engine import EngineConfig
from dovetail.config.parts import find_parts
from dovetail.errors import UnsupportedError, describe
from dovetail.registry.models import resolve_model
from dovetail.testing.binding import installed
from dovetail.testing.checks import fail, require
from dovetail.testing.suite import Suite
from dovetail.testing.suites.executor_bench import Bench
from dovetail.testing.suites.footprint import child_processes

SETTINGS: Mapping[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "kv_cache_memory": "8MiB",
}
LENGTHS = {"a": 11, "b": 2, "c": 37}  # of prompts: within a block, one step, over some blocks
OBSERVED = (
    *("workers", "shared_prefix", "drafts", "pooling", "transfers", "deterministic"),
    "changes_rows",
)
MOST_DRAFTS = 3  # of executors whose steps have drafts
MOST_STARTED = 6  # executors with processes of their own, which take seconds to start
MOST_ADAPTERS = 2  # slots of executors whose rows have adapters
SEEDED: Mapping[str, Mapping[str, Any]] = {"b": {"temperature": 1.0}}  # the others are greedy


class ExecutorSubject(Suite):
    """An executor, constructed like the engine does for a small `engine.yaml`. `model`: the model
    to load."""

    kind = "executor"
    settings = Suite.settings | {"model"}
    model: ClassVar[str] = "demo"

    def declares(self, capability: str) -> bool:
        """Eight are observed instead of declared: "workers" (`start` starts processes),
        "transfers", and of `Capacity` "shared_prefix", "drafts", "pooling", "adapters",
        "deterministic" and "changes_rows". What adapters that change no module compute, and what is
        pooled on a virtual clock, isn't judged."""
        if capability == "pooling" and self.capabilities.virtual_clock:
            return False
        if capability == "adapters":
            return _adapts(type(self))  # type: ignore[arg-type]  # a class is hashable
        if capability in OBSERVED:
            return capability in _seen(type(self))  # type: ignore[arg-type]  # a class is hashable
        return super().declares(capability)

    def _make(
        self,
        model_dir: Path | None = None,
        *,
        logits_processors: tuple[ComponentRef, ...] = (),
        **config: Any,
    ) -> Executor:
        clock: Clock = VirtualClock() if self.capabilities.virtual_clock else WallClock()
        context = context_of(self.model, clock, model_dir, **config)
        executor: Executor = self.make(replace(context, logits_processors=logits_processors))
        return executor

    @contextmanager
    def _bench(self, model_dir: Path | None = None, **config: Any) -> Iterator[Bench]:
        """Start an executor with these fields of its config, and stop it at the end."""
        executor = self._make(model_dir, **config)
        try:
            yield Bench(executor, executor.start())
        finally:
            executor.stop()

    @contextmanager
    def _shared_bench(self, **config: Any) -> Iterator[Bench]:
        """Use the executor of the last check that asked for these fields of the config, without
        its requests: some take seconds to start. A check that fails leaves it to no other."""
        asked = _key(config)
        # one that computes in this process may be the only one that can
        most = MOST_STARTED if self.declares("workers") else 1
        bench = _shared.take(type(self), asked, most)
        if bench is None:
            executor = self._make(**config)
            try:
                bench = Bench(executor, executor.start())
            except BaseException:
                executor.stop()
                raise
        try:
            yield bench
            bench.clear()
        except BaseException:
            bench.executor.stop()
            raise
        _shared.keep(type(self), asked, bench)

    @classmethod
    def teardown_class(cls) -> None:
        """Stop what checks shared; pytest calls it after the last one."""
        _shared.close()

    def _prompt(self, bench: Bench, name: str) -> list[int]:
        return bench.prompt(LENGTHS[name], variant=ord(name))

    def _add(
        self, bench: Bench, *names: str, rows: Mapping[str, int] | None = None, room: int = 8
    ) -> None:
        for name in names:
            bench.add(
                name,
                self._prompt(bench, name),
                row=(rows or {}).get(name),
                room=room,
                **SEEDED.get(name, {}),
            )


def _key(config: Mapping[str, Any]) -> str:
    return repr(sorted(config.items()))


class _Shared:
    """Started executors that no check uses at the moment."""

    def __init__(self) -> None:
        self._suite: object = None  # they are of this one's component
        self._benches: dict[str, Bench] = {}  # by config, the one kept first first

    def take(self, suite: object, config: str, most: int) -> Bench | None:
        """Return the bench that was kept for the same. Otherwise make room for another."""
        if suite is self._suite and config in self._benches:
            return self._benches.pop(config)
        self.make_room(suite, most)
        return None

    def make_room(self, suite: object, most: int) -> None:
        """Stop the executors of another suite, and the oldest ones, so that another can be kept:
        there are `most` at a time."""
        if suite is not self._suite:
            self.close()
        while len(self._benches) >= most:
            self._stop_oldest()

    def keep(self, suite: object, config: str, bench: Bench) -> None:
        self._suite = suite
        self._benches[config] = bench

    def close(self) -> None:
        while self._benches:
            self._stop_oldest()

    def _stop_oldest(self) -> None:
        self._benches.pop(next(iter(self._benches))).executor.stop()


_shared = _Shared()
atexit.register(_shared.close)  # of checks that run without pytest


@cache
def _seen(suite: type[ExecutorSubject]) -> frozenset[str]:
    """Return the capabilities that only a started executor shows."""
    before = set(child_processes())
    for max_drafts in (MOST_DRAFTS, 0):
        config: dict[str, Any] = {"max_drafts": max_drafts}
        executor = suite()._make(**config)
        try:
            bench = Bench(executor, executor.start())
            transfers = bench.own_transfers()
        except UnsupportedError:
            executor.stop()
            continue
        except BaseException:
            executor.stop()
            raise
        capacity = bench.capacity
        has = {
            "transfers": transfers is not None,
            "workers": bool(set(child_processes()) - before),
            "shared_prefix": capacity.shared_prefix,
            "drafts": capacity.max_lines > 0,
            "pooling": capacity.pooling is not None,
            "deterministic": not capacity.not_deterministic,
            "changes_rows": capacity.changes_rows,
        }
        # starting it took long, if it has processes: checks go on with it
        _shared.make_room(suite, MOST_STARTED if has["workers"] else 1)
        _shared.keep(suite, _key(config), bench)
        return frozenset(name for name, there in has.items() if there)
    return frozenset()


@cache
def _adapts(suite: type[ExecutorSubject]) -> bool:
    """Return True if the executor has slots for adapters, which change something, when asked for
    some."""
    with suppress(UnsupportedError), suite()._shared_bench(max_adapters=MOST_ADAPTERS) as bench:
        adapters = bench.capacity.adapters
        return adapters is not None and bool(adapters.modules)
    return False


def model_directory(model: str) -> Path:
    """Return where a model's checkpoint is."""
    return Path(resolve_model(model, installed(tuple(sys.path))))


def context_of(model: str, clock: Clock, model_dir: Path | None, **changes: Any) -> ExecutorContext:
    """Make a context as the engine does."""
    registry = installed(tuple(sys.path))
    config = EngineConfig.load({"model": model, **SETTINGS})
    parts = find_parts(config, registry)
    return ExecutorContext(
        config=replace(
            config.executor_config(model_dir or resolve_model(model, registry)), **changes
        ),
        clock=clock,
        models=tuple(part.ref() for part in parts.models),
        attention=tuple(part.ref() for part in parts.attention),
        sampler=parts.sampler.ref(),
    )


def broken_model(model: str, folder: Path, token: int) -> bool:
    """Write a copy of a checkpoint in which one token's embedding is NaN, as input only. Returns
    False for a checkpoint in several files."""
    source = model_directory(model)
    if not (source / "model.safetensors").exists():
        return False
    for path in filter(Path.is_file, source.iterdir()):
        shutil.copyfile(path, folder / path.name)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    data = (source / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    tensors = bytearray(data[8 + size :])
    embedding = header["model.embed_tokens.weight"]
    begin, end = embedding["data_offsets"]
    if "lm_head.weight" not in header:
        header["lm_head.weight"] = {
            **embedding,
            "data_offsets": [len(tensors), len(tensors) + end - begin],
        }
        tensors += tensors[begin:end]
    width = (end - begin) // embedding["shape"][0]
    # NaN, whatever the dtype
    tensors[begin + token * width : begin + (token + 1) * width] = b"\xff" * width
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + tensors)
    return True


def stop(executor: Executor, when: str) -> None:
    try:
        executor.stop()
    except Exception as error:
        fail(f"stop() {when} raised {describe(error)}")


def require_quiet(executor: Executor, when: str) -> None:
    try:
        executor.check()
    except Exception as error:
        fail(f"check() {when} raised {describe(error)}")


def require_same(bench: Bench, name: str, expected: list[int], how: str) -> None:
    """Check that a request's tokens are those that it generates by itself, up to the shorter."""
    tokens = bench.tokens.pop(name)
    bench.tokens[name] = []
    told = (
        f"request {name} generated {tokens} {how}; by itself, with its prompt computed at once, "
        f"{expected}"
    )
    require(tokens and tokens[: len(expected)] == expected[: len(tokens)], told)
