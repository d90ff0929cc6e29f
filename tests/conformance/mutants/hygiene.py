"""Components that work, but can't be declared, configured or sent elsewhere as they should."""

from __future__ import annotations

import threading
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from dovetail.api.scheduler import Scheduler, Step
from dovetail.request import Request
from tests.conformance.mutants import mutant
from tests.conformance.mutants.scheduler import Plain


@mutant(caught_by="hygiene.capabilities")
class CapabilitiesInADict(Plain):
    capabilities: Any = {"order": "arrival"}  # noqa: RUF012


class LaxOptions(BaseModel):
    quantum: int = 8


@mutant(caught_by="hygiene.options")
class TakesAnyOption(Plain):
    options: LaxOptions


class LockedOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    lock: Any = Field(default_factory=threading.Lock)


@mutant(caught_by="hygiene.options_pickle")
class OptionsHoldALock(Plain):
    options: LockedOptions


class ForgetfulOptions(BaseModel, extra="forbid"):
    quantum: int = 8

    def __reduce__(self) -> Any:
        return ForgetfulOptions, ()


@mutant(caught_by="hygiene.options_pickle", options={"quantum": 9})
class OptionsChangeOnTheWay(Plain):
    options: ForgetfulOptions


def _local() -> type[Scheduler]:
    class Local(Plain):
        pass

    return Local


mutant(caught_by="hygiene.spawn")(_local())


@mutant(caught_by="hygiene.signatures")
class WantsAHint(Plain):
    def schedule(self, step: Step, hint: int) -> None:  # type: ignore[override]
        super().schedule(step)


@mutant(caught_by="hygiene.signatures")
class HearsOfArrivalsByAnotherName(Plain):
    def on_arrived(self, req: Request) -> None: ...


@mutant(caught_by="hygiene.callbacks")
class MisspelsACallback(Plain):
    def on_finish(self, request: Request) -> None: ...
