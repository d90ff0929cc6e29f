"""`ComponentValues`: what requests carry for components (`extra`, `extra_args`, and the arguments
of logits processors), validated by the components' own pydantic models.

Only the engine's process has these models: `Admission` asks them when a request is admitted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from dovetail.api.executor import Capacity, ExtraContext
from dovetail.api.logits_processor import ArgumentContext
from dovetail.api.sampler import RowSampling
from dovetail.base.where import Where, explain
from dovetail.errors import DovetailError, RequestError, describe, shown
from dovetail.request.frozen import FrozenDict, frozen, thawed

if TYPE_CHECKING:
    from dovetail.front.tokenizer import Tokenizer

logger = logging.getLogger("dovetail")


@dataclass
class ComponentValues:
    """The models of an engine's components for what requests carry."""

    capacity: Capacity  # validators of `extra` find it in their context
    tokenizer: Callable[[], Tokenizer]  # raises `ModelLoadError` if the model has none
    extra_models: Mapping[str, type[BaseModel]]  # by distribution
    extra_args: frozenset[str] = frozenset()  # keys that the sampler understands
    extra_args_model: type[BaseModel] | None = None  # of their values
    # of logits processors, by full name; None: not applied
    arguments: Mapping[str, type[BaseModel] | None] = field(default_factory=dict)
    _warned_of: set[str] = field(default_factory=set)  # what has no effect: logged once

    def extra(self, given: Mapping[str, Any]) -> dict[str, BaseModel]:
        """Return a request's `extra`, validated. Raises `RequestError`."""
        checked = {}
        context = ExtraContext(capacity=self.capacity)
        for distribution, values in given.items():
            model = self.extra_models.get(distribution)
            if model is None:
                known = ", ".join(sorted(self.extra_models)) or "nobody here"
                raise RequestError(
                    f"extra: {shown(distribution)} reads nothing from requests; those that do: "
                    f"{known}"
                )
            made = validated(model, values, f"extra.{distribution}", context)
            checked[distribution] = made.model_copy(deep=True)  # nothing of it is the caller's
        return checked

    def extra_with(
        self, extra: Mapping[str, Any] | None, trace_headers: Mapping[str, str]
    ) -> Mapping[str, Any]:
        """Return `extra` with `trace_headers` for the components that read them.

        Logs, once, that there are none.
        """
        readers = [
            distribution
            for distribution, model in self.extra_models.items()
            if "trace_headers" in model.model_fields
        ]
        if not readers and "trace_headers" not in self._warned_of:
            self._warned_of.add("trace_headers")
            logger.warning(
                "trace_headers: left out, as no observer reads them: "
                "observers=[{'name': 'otlp', 'endpoint': …}]"
            )
        if not isinstance(trace_headers, Mapping):
            raise RequestError(f"trace_headers must map names to texts, got {shown(trace_headers)}")
        carried = {distribution: {"trace_headers": dict(trace_headers)} for distribution in readers}
        return {**carried, **(extra or {})}

    def sampling(self, sampling: RowSampling) -> RowSampling:
        """Return a request's sampling with what it holds for components validated.

        Raises `RequestError`.
        """
        if sampling.logits_processors:
            processors = {
                name: self._arguments(name, given)
                for name, given in sampling.logits_processors.items()
            }
            sampling = replace(sampling, logits_processors=FrozenDict(processors))
        if self.extra_args_model is None or not sampling.extra_args:
            return sampling
        extra_args = validated_extra_args(self.extra_args_model, sampling.extra_args)
        return replace(sampling, extra_args=extra_args)

    def _arguments(self, name: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a logits processor's arguments as plain values that its model accepts again,
        without the tokenizer. Raises `RequestError`, also for a number that isn't finite."""
        model = self.arguments[name]
        place = f"logits_processors.{name.partition(':')[2]}"
        if model is None:
            return given
        plain = thawed(given)
        if (wrong := _not_finite(plain, place)) is not None:
            raise RequestError(f"{wrong} must be a finite number")
        on_arrival = ArgumentContext(encode=self._encode, vocab_size=self.capacity.vocab_size)
        values = _dumped(validated(model, plain, place, on_arrival), place)
        validated(model, thawed(values), place, replace(on_arrival, encode=None))
        return values

    @cached_property
    def _encode(self) -> Callable[[str], list[int]] | None:
        """Tokenizes a text, without special tokens. None without a tokenizer."""
        try:
            tokenizer = self.tokenizer()
        except DovetailError:
            return None
        return lambda text: [
            int(token) for token in tokenizer.encode_all([text], special_tokens=False)[0]
        ]


def validated(model: type[BaseModel], values: Any, name: str, context: object = None) -> BaseModel:
    """Return `values` validated by the model; `context` is passed to its validators.

    Raises `RequestError` with the key below `name` and the value, whatever the validators raise.
    """
    try:
        return model.model_validate(values, context=context)
    except ValidationError as error:
        raise RequestError(str(explain(error, model, values, Where((name,)), "key"))) from None
    except Exception as error:
        raise RequestError(f"{name}: {describe(error)}") from error


def validated_extra_args(model: type[BaseModel], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of `given` with the model's values, read-only. Raises as `validated`."""
    return _dumped(validated(model, given, "extra_args"), "extra_args", exclude_unset=True)


def _not_finite(value: Any, place: str) -> str | None:
    """Return the place of a number that is NaN or infinite; None if there is none."""
    if isinstance(value, float):
        return None if math.isfinite(value) else place
    inside: Any = ()
    if isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, list | frozenset):
        inside = enumerate(value)
    for key, inner in inside:
        if (found := _not_finite(inner, f"{place}.{key}")) is not None:
            return found
    return None


def _dumped(checked: BaseModel, name: str, **options: Any) -> Mapping[str, Any]:
    """Return a model's values as plain ones, read-only.

    Raises `RequestError` if it has others, or its serializers raise.
    """
    try:
        values: Mapping[str, Any] = frozen(
            checked.model_dump(mode="json", by_alias=True, **options)
        )
    except Exception as error:
        raise RequestError(f"{name}: it can't be sent to the ranks: {describe(error)}") from error
    return values
