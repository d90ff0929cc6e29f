"""A field of a request is declared once; the rest follows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from dovetail import LLMEngine
from dovetail.request import Request
from dovetail.request.request import RequestFields

RESOLVED = {"cache_salt", "lora_request"}  # a request has them as some of its `cache_keys`


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
    }


@pytest.mark.parametrize("field", fields(RequestFields), ids=lambda field: field.name)
def test_users_give_each_field_and_policies_read_it(field: Any) -> None:
    assert defaults_of(LLMEngine.add_request)[field.name] == field.default
    assert field.name in RESOLVED or field.name in defaults_of(Request)
