"""`ServedAdapters`: the adapters that requests may name, loaded and unloaded for front ends."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from dovetail.end_reason import EndReason
from dovetail.errors import RequestError
from dovetail.request.lora import LoRARequest
from dovetail.serving import ENABLE, Assembly, RequestedAdapter
from dovetail_server.frames import Accepted, Adapters, LoadAdapter, Refused
from dovetail_server.front_end_samples import FrontEnd


class Answered(NamedTuple):
    """Answer to a front end's demand. If it is `Accepted`, what is served has changed."""

    front_end: FrontEnd
    answer: Accepted | Refused


class ServedAdapters:
    def __init__(self, assembly: Assembly) -> None:
        self._store = assembly.adapters  # None if the engine takes no adapters
        # by name, with the folder in which their files must be
        self._served: dict[str, tuple[LoRARequest, Path | None]] = {}
        self.loading: list[tuple[FrontEnd, LoadAdapter, RequestedAdapter]] = []

    @property
    def paths(self) -> Adapters:
        return Adapters({name: request.lora_path for name, (request, _) in self._served.items()})

    def get(self, request: LoRARequest) -> RequestedAdapter:
        """Return a served adapter. Raises `RequestError` if it isn't served any more."""
        name = request.lora_name
        if name not in self._served or self._store is None:
            raise RequestError(f"model: the adapter {name[:200]!r} was unloaded")
        return self._store.get(*self._served[name])

    def change(self, front_end: FrontEnd, message: LoadAdapter) -> Answered | None:
        """Unload an adapter, or begin to load one: then its answer comes with `loaded`."""
        if self._store is None:
            why = f"this server takes no adapters: {ENABLE}"
            return Answered(front_end, Refused(message.number, EndReason.INVALID, why))
        if message.path is None:
            self._served.pop(message.name, None)
            return Answered(front_end, Accepted(message.number))
        try:
            adapter = self._store.get(*_request_of(message))
        except RequestError as error:
            return Answered(front_end, Refused(message.number, error.reason, str(error)))
        self.loading.append((front_end, message, adapter))
        return None

    def loaded(self) -> list[Answered]:
        """Serve the adapters that have been loaded, and return the answers."""
        done = [one for one in self.loading if not one[2].closed()]
        self.loading = [one for one in self.loading if one not in done]
        answers = []
        for front_end, message, adapter in done:
            answer: Accepted | Refused = Accepted(message.number)
            if (end := adapter.failed()) is not None:
                # the request that names it is wrong, and no other
                answer = Refused(message.number, EndReason.INVALID, str(end.stop_reason))
            else:
                self._served[message.name] = _request_of(message)
            answers.append(Answered(front_end, answer))
        return answers


def _request_of(message: LoadAdapter) -> tuple[LoRARequest, Path | None]:
    within = None if message.within is None else Path(message.within)
    return LoRARequest(message.name, 1, str(message.path)), within
