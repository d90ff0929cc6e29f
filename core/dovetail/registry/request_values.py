"""Values that a request carries for a component (`extra`, `extra_args`), validated by the component's own pydantic model when the request arrives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from dovetail.errors import RequestError, describe
from dovetail.frozen import frozen
from dovetail.where import Where, explain


def validated(model: type[BaseModel], values: Any, name: str) -> BaseModel:
    """Return `values` as the model has them. Raises `RequestError` with the key below `name` and the value, whatever the model's validators raise."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise RequestError(str(explain(error, model, values, Where((name,)), "key"))) from None
    except Exception as error:
        raise RequestError(f"{name}: {describe(error)}") from error


def validated_extra_args(model: type[BaseModel], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of `given` with the model's values, read-only. Raises as `validated`."""
    checked = validated(model, given, "extra_args")
    values: Mapping[str, Any] = frozen(checked.model_dump(mode="json", by_alias=True, exclude_unset=True))
    return values
