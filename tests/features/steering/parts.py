"""Data that the engine, its executor and the ranks exchange for steering: the options, the value of
a request, and the parts of a batch and of the capacity.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from dovetail.api.executor import ExtraContext
from dovetail.engine.feature import EngineFeature
from dovetail.request import Request
from dovetail_executors.options import LocalOptions, TensorOptions

DISTRIBUTION = "dovetail-steering"


class Steering(BaseModel):
    """The options that both executors have besides those of the plain ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vectors: dict[str, str] = Field(description="Files (.npy) of the vectors, by name.")
    layer: int = Field(ge=0, description="The decoder layer that they are added after, from 0.")
    slots: int = Field(default=2, ge=1, le=1024, description="Most requests that run with one.")


class LocalSteering(LocalOptions, Steering):
    """Options of `SteeredLocal`."""


class TensorSteering(TensorOptions, Steering):
    """Options of `SteeredTensor`."""


@dataclass(frozen=True, slots=True)
class SteeringCapacity:
    """Part of `Capacity`: the number of slots on the device, and the names of the vectors."""

    slots: int
    names: frozenset[str]

    def feature(self) -> EngineFeature:
        from tests.features.steering.slots import SteeringSlots

        return SteeringSlots(self.slots)


class Steered(BaseModel):
    """`extra` of a request: the vector's name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vector: str

    @field_validator("vector")
    @classmethod
    def _known(cls, name: str, info: ValidationInfo) -> str:
        capacity = ExtraContext.of(info).capacity.part(SteeringCapacity)
        names = frozenset[str]() if capacity is None else capacity.names
        if name not in names:
            raise ValueError(f"no such vector; there are {', '.join(sorted(names)) or 'none'}")
        return name


@dataclass(frozen=True, slots=True)
class SteeringRows:
    """Part of a batch: new rows that are steered, each with its slot (1 or more) and its vector,
    which is written to the slot before anything is computed."""

    rows: Mapping[int, tuple[int, str]]


def vector_of(request: Request) -> str | None:
    """Return the name of the vector that a request asks for."""
    steered = request.extra.get(DISTRIBUTION)
    return None if steered is None else steered.vector
