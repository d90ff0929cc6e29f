"""`AdapterStore`: the LoRA adapters that an engine keeps on its host. Processes read them, while
their requests wait."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from dovetail.api.executor import AdapterCapacity
from dovetail.end_reason import EndReason
from dovetail.engine.finish import Finish
from dovetail.errors import RequestError, describe
from dovetail.front.lora_files import AdapterFiles, most_bytes
from dovetail.front.worker_processes import WorkerEndedError, WorkerProcess, WorkerProcesses
from dovetail.request.lora import LoRARequest

logger = logging.getLogger("dovetail")

_WORKER = Path(__file__).with_name("adapter_worker.py")
# processor time to read an adapter: what it may take in any case, and the slowest rate
CPU_S = 3.0
BYTES_A_CPU_S = 20e6
# the same for a disk that is slow
WALL_S = 60.0
BYTES_A_WALL_S = 1e6
# address space
MEMORY_BYTES = 1 << 30
MEMORY_A_BYTE = 8


class HostCopy:
    """An adapter's normalized file, which is removed with this object."""

    def __init__(self, digest: str, path: Path) -> None:
        self.digest, self.path = digest, str(path)
        # the directory is removed then
        weakref.finalize(self, partial(path.unlink, missing_ok=True)).atexit = False


class _Readers:
    """Processes that read adapters into a folder, and remove it when they end, even if this process
    is killed."""

    def __init__(self, capacity: AdapterCapacity, most: int) -> None:
        self._capacity = capacity
        self._processes = WorkerProcesses(most, self._start)
        self._folder: TemporaryDirectory[str] | None = None
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def read(self, files: AdapterFiles) -> HostCopy:
        """Return a checked copy of an adapter. Raises `RequestError` naming the file and what is
        wrong, or the limit that reading it exceeds."""
        size = min(sum(one[2] for one in files.seen), most_bytes(self._capacity))
        cpu_s = CPU_S + size / BYTES_A_CPU_S
        memory_bytes = MEMORY_BYTES + MEMORY_A_BYTE * size
        path = self._new_path()
        request = {"config": str(files.config), "weights": str(files.weights), "target": str(path)}
        limits = {"cpu_s": cpu_s, "memory_bytes": memory_bytes}
        capacity = self._capacity
        takes = {
            "slots": capacity.slots,
            "max_rank": capacity.max_rank,
            "modules": dict(capacity.modules),
        }
        try:
            with self._processes.one() as process:
                answer = process.ask(
                    json.dumps({**request, **limits, **takes}).encode(),
                    WALL_S + size / BYTES_A_WALL_S,
                )
        except WorkerEndedError as ended:
            path.unlink(missing_ok=True)
            with (
                self._processes.one()
            ):  # another, which removes the folder if this process is killed
                pass
            most = {
                "time": f"takes more than {cpu_s:.0f} s",
                "memory": f"takes more than {memory_bytes >> 20} MiB of memory",
            }
            raise RequestError(
                f"reading it {most.get(ended.reason, 'ended the process that did')}"
            ) from None
        if "refused" in answer:
            path.unlink(missing_ok=True)
            raise RequestError(answer["refused"])
        return HostCopy(answer["digest"], path)

    def close(self) -> None:
        self._processes.close()
        with self._lock:
            if self._folder is not None:
                self._folder.cleanup()

    def _new_path(self) -> Path:
        return Path(self._made_folder()) / f"{next(self._numbers)}.safetensors"

    def _made_folder(self) -> str:
        with self._lock:
            if self._folder is None:
                self._folder = TemporaryDirectory(
                    prefix="dovetail-adapters-", ignore_cleanup_errors=True
                )
            return self._folder.name

    def _start(self) -> WorkerProcess:
        return WorkerProcess("reads adapters", _WORKER, self._made_folder())


class RequestedAdapter:
    """The `Adapter` of requests, which may still be loading."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.copy: Future[HostCopy] = Future()

    @property
    def path(self) -> str:
        return self.copy.result().path

    @property
    def digest(self) -> str:
        return self.copy.result().digest

    def closed(self) -> bool:
        return not self.copy.done()

    def failed(self) -> Finish | None:
        error = self.copy.exception()
        return None if error is None else Finish(EndReason.ADAPTER, str(error))


@dataclass(slots=True)
class _Known:
    """The adapter last read under a name."""

    request: LoRARequest
    files: AdapterFiles
    digest: str


@dataclass(slots=True)
class _Inspection:
    """Check of a name's directory in progress, and the request that arrived meanwhile."""

    following: tuple[RequestedAdapter, LoRARequest, Path | None] | None = None


class AdapterStore:
    """LRU cache of at most `most` host copies. Copies of unfinished requests are never evicted.

    A name's directory is checked for each new request, and read again if it has changed. Thread
    safe.
    """

    def __init__(self, capacity: AdapterCapacity, most: int, *, threads: int = 2) -> None:
        self.capacity = capacity
        self._most = most
        self._readers = _Readers(capacity, threads)
        self._threads = ThreadPoolExecutor(threads, "dovetail-adapters")
        self._lock = threading.Lock()
        self._inspections: dict[str, _Inspection] = {}
        self._names: dict[str, _Known] = {}
        self._copies: OrderedDict[str, HostCopy] = OrderedDict()  # by digest
        # with those of unfinished requests
        self._alive: weakref.WeakValueDictionary[str, HostCopy] = weakref.WeakValueDictionary()
        self._pinned: set[str] = set()  # names
        self._closed = False

    def get(self, request: LoRARequest, within: Path | None = None) -> RequestedAdapter:
        """Return the adapter, whose files are being read. Concurrent requests share one read.

        `within`: the folder that must contain its files; None: anywhere.
        """
        with self._lock:
            inspection = self._inspections.get(request.lora_name)
            if (
                inspection is not None
                and inspection.following is not None
                and inspection.following[1:] == (request, within)
            ):
                return inspection.following[0]
            adapter = RequestedAdapter(request.lora_name)
            if inspection is None:
                # may raise: then there is no inspection
                self._threads.submit(self._inspect, adapter, request, within)
                self._inspections[request.lora_name] = _Inspection()
            elif inspection.following is None:
                inspection.following = adapter, request, within
            else:  # another directory under the same name
                self._threads.submit(self._fill, adapter, request, within)
            return adapter

    def ids(self) -> set[int]:
        """Return the `lora_int_id`s of the cached adapters."""
        with self._lock:
            return {known.request.lora_int_id for known in self._names.values()}

    def remove(self, lora_id: int) -> bool:
        """Evict the copies of an id, those of unfinished requests when these end.

        Returns False if there are none.
        """
        with self._lock:
            names = self._collect_names(lora_id)
            for name in names:
                del self._names[name]
            self._pinned -= names
            self._evict()
            return bool(names)

    def pin(self, lora_id: int) -> bool:
        """Pin the copies of an id: only `remove` evicts them. Returns False if there are none."""
        with self._lock:
            names = self._collect_names(lora_id)
            self._pinned |= names
            return bool(names)

    def _collect_names(self, lora_id: int) -> set[str]:
        return {name for name, known in self._names.items() if known.request.lora_int_id == lora_id}

    def close(self) -> None:
        """End the threads, and remove all copies. Requests that still wait fail. Idempotent."""
        self._closed = True
        self._threads.shutdown(wait=True)
        with self._lock:
            self._names.clear()
            self._pinned.clear()
            self._copies.clear()
        self._readers.close()

    # In a thread

    def _inspect(
        self, adapter: RequestedAdapter, request: LoRARequest, within: Path | None
    ) -> None:
        self._fill(adapter, request, within)
        with self._lock:
            following = self._inspections.pop(request.lora_name, _Inspection()).following
            if following is not None:
                self._inspections[request.lora_name] = _Inspection()
        if following is not None:
            try:
                self._threads.submit(self._inspect, *following)
            except RuntimeError:  # it was closed
                self._fill(*following)

    def _fill(self, adapter: RequestedAdapter, request: LoRARequest, within: Path | None) -> None:
        try:
            adapter.copy.set_result(self._copy(request, within))
        except RequestError as error:
            adapter.copy.set_exception(RequestError(f"lora_request {request.lora_name!r}: {error}"))
        except BaseException as error:  # such as a full disk: only this adapter fails
            logger.exception("an adapter can't be loaded")
            adapter.copy.set_exception(
                RequestError(
                    f"lora_request {request.lora_name!r} can't be loaded: {describe(error)}"
                )
            )

    def _copy(self, request: LoRARequest, within: Path | None) -> HostCopy:
        """Return the copy of what the request's directory holds now."""
        if self._closed:
            raise RequestError("the engine was closed")
        files = AdapterFiles.find(request.lora_path, within)
        with self._lock:
            known = self._names.get(request.lora_name)
            if known is not None and known.files == files and known.digest in self._copies:
                self._copies.move_to_end(known.digest)
                known.request = request
                return self._copies[known.digest]
        copy = self._readers.read(files)
        if AdapterFiles.find(request.lora_path, within) != files:
            raise RequestError(
                "its files were changed while they were read: write them to another directory, and "
                "rename that"
            )
        with self._lock:
            copy = self._alive.setdefault(copy.digest, copy)  # equal adapters share a copy
            self._names[request.lora_name] = _Known(request, files, copy.digest)
            self._copies[copy.digest] = copy
            self._copies.move_to_end(copy.digest)
            self._evict()
        return copy

    def _evict(self) -> None:
        """Drop the copies without a name, and the least recently used ones that are too many, but
        none that is pinned."""
        named = {known.digest for known in self._names.values()}
        self._copies = OrderedDict(
            (digest, copy) for digest, copy in self._copies.items() if digest in named
        )
        pinned = {self._names[name].digest for name in self._pinned}
        spare = [digest for digest in self._copies if digest not in pinned]
        for digest in spare[
            : max(0, min(len(self._copies) - self._most, len(spare) - 1))
        ]:  # the newest stays
            del self._copies[digest]
        self._names = {
            name: known for name, known in self._names.items() if known.digest in self._copies
        }
