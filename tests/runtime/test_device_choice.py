"""The device that an executor's option selects, and the error if it is missing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dovetail.errors import ConfigError, UnsupportedError
from dovetail_executors.runtime import device_choice
from dovetail_executors.runtime.device_choice import choose_device


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("gpu", ConfigError, "'gpu' isn't a device; expected auto, cpu, cuda"),
        ("cuda:99", UnsupportedError, "cuda:99 doesn't exist"),
        ("meta", UnsupportedError, "meta is neither the CPU nor a CUDA device"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    name: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=rf"^executor\.device: {message}"):
        choose_device(name, "executor.device")


def test_an_error_names_the_option_that_the_executor_calls_it_by() -> None:
    with pytest.raises(ConfigError, match=r"^executor\.devices: 'gpu' isn't a device"):
        choose_device("gpu", "executor.devices")


@pytest.mark.parametrize(
    ("name", "chosen"),
    [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")],
)
def test_a_gpu_is_chosen_by_its_index_and_becomes_the_current_one(
    name: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[torch.device] = []
    gpus = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, set_device=current.append
    )
    monkeypatch.setattr(device_choice.torch, "cuda", gpus)
    assert str(choose_device(name, "executor.device")) == chosen
    assert [str(device) for device in current] == ([chosen] if chosen != "cpu" else [])
