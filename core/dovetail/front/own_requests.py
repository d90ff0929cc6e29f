"""`OwnRequests`: the requests of one call of `LLM`, in an engine that others use as well."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dovetail.errors import EngineDeadError, RequestError
from dovetail.request import RequestOutput
from dovetail.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dovetail.front.llm_engine import LLMEngine
    from dovetail.front.prompts import Prompt


class OwnRequests:
    """Requests under ids that nobody else has, whose outputs nobody else gets, whoever makes the steps. A context: what is unfinished at its end is
    aborted, and nothing else is."""

    def __init__(self, engine: LLMEngine, name: str) -> None:
        self._engine = engine
        self._prefix = f"{name}-{secrets.token_hex(4)}"  # of this call alone
        self._places: dict[str, int] = {}  # of the unfinished, by request id: their places in the list of prompts
        self._outputs: deque[RequestOutput] = deque()  # that came and weren't taken
        self._ending = False
        self._aborted = False  # by somebody else

    @property
    def unfinished(self) -> bool:
        """True while outputs are still to be computed or taken."""
        return bool(self._places or self._outputs)

    def add(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
        """Add all requests or none, before any is computed. Raises as `LLMEngine.add_request` does."""
        self._engine.add_list(lambda: self._add(prompts, params))

    def step(self) -> list[RequestOutput]:
        """Return the outputs that are ready; if there are none, run a step first. Raises `EngineDeadError` if the engine has failed or was closed,
        and `RequestError` if one of them was aborted by another caller."""
        self._engine.turns.take(self._step)
        outputs = []
        while self._outputs:
            outputs.append(self._outputs.popleft())
        return outputs

    def abort(self) -> None:
        """Abort the unfinished requests."""
        self._ending = True
        self._engine.abort_request(list(self._places))
        self._places.clear()
        self._outputs.clear()

    def abandon(self) -> None:
        """Abort like `abort`, but a little later: made for finalizers, which may run inside a step."""
        self._engine.abandon(list(self._places))

    def __enter__(self) -> OwnRequests:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()

    def _add(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
        try:
            for place, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
                request_id = f"{self._prefix}-{place}"
                self._places[request_id] = place
                self._engine.add_request(request_id, prompt, one)
                self._engine.divert(request_id, self._take)
        except BaseException:
            self.abort()
            raise

    def _step(self) -> None:
        if self._places and not self._outputs:
            self._engine.step_for_takers()
        if self._aborted:
            raise RequestError("a request of this call was aborted by another caller")
        reason = self._engine.core.dead
        if reason is not None:
            raise EngineDeadError(f"the engine died while it generated: {reason}") from reason

    def _take(self, output: RequestOutput | None) -> None:
        if output is None:
            self._aborted = not self._ending
            return
        output.prompt_index = self._places[output.request_id]
        if output.finished:
            del self._places[output.request_id]
        self._outputs.append(output)
