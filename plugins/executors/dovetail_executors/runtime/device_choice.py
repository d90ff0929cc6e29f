"""Resolves an executor's device option, and describes devices for humans."""

from __future__ import annotations

import torch

from dovetail.errors import ConfigError, UnsupportedError


def choose_device(name: str, option: str) -> torch.device:
    """Return the device `name`: "auto" (a CUDA device if available, otherwise the CPU), "cpu",
    "cuda" or "cuda:N". A CUDA device includes its index, and becomes this thread's current device.

    `option`: key of `engine.yaml` for errors, such as "executor.device". Raises `ConfigError` if
    `name` isn't a device, `UnsupportedError` if it doesn't exist.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"{option}: {name!r} isn't a device; expected auto, cpu, cuda or cuda:N"
        ) from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = device.index or 0
        if index >= count:
            raise UnsupportedError(
                f"{option}: {name} doesn't exist; torch {torch.__version__} sees {count} CUDA "
                f"devices"
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise UnsupportedError(f"{option}: {name} is neither the CPU nor a CUDA device")
    return device


def describe_device(device: torch.device) -> str:
    """Describe a device: "cpu (8 threads)", "cuda:0 (NVIDIA H200)"."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads)"
