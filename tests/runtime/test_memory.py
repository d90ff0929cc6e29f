"""Available memory, of machines and of containers; weights that don't fit it are refused before
they are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, StableLmConfig

import dovetail_executors.runtime.worker  # noqa: F401  which would otherwise keep the function that a test has replaced
from dovetail import LLMEngine
from dovetail.errors import ConfigError
from dovetail.nn.weights import stored_bytes
from dovetail_executors.runtime import memory
from dovetail_executors.runtime.memory import available_ram_bytes, require_ram, total_ram_bytes
from tests.models.oracle import reference

GIB = 1 << 30


def machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, files: dict[str, str]
) -> None:
    """A machine of 16 GiB, 12 of them available, with a process in `cgroup` and `files` below
    /sys/fs/cgroup."""
    (folder / "meminfo").write_text(
        f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {12 << 20} kB\n"
    )
    (folder / "cgroup").write_text(cgroup)
    for name, text in files.items():
        path = folder / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(memory, "MEMINFO", folder / "meminfo")
    monkeypatch.setattr(memory, "OWN_CGROUP", folder / "cgroup")
    monkeypatch.setattr(memory, "CGROUPS", folder / "groups")


def version_2(folder: str, limit: object, used: int, files: int = 0) -> dict[str, str]:
    return {
        f"{folder}memory.max": f"{limit}\n",
        f"{folder}memory.current": f"{used}\n",
        f"{folder}memory.stat": f"anon 1\nactive_file {files}\ninactive_file 0\n",
    }


VERSION_1 = {
    "memory/box/memory.limit_in_bytes": f"{4 * GIB}",
    "memory/box/memory.usage_in_bytes": f"{3 * GIB}",
    "memory/box/memory.stat": f"cache 5\ntotal_active_file {GIB}\ntotal_inactive_file {GIB}\n",
    "memory/memory.limit_in_bytes": "9223372036854771712",
    "memory/memory.usage_in_bytes": "0",
    "memory/memory.stat": "",
}


@pytest.mark.parametrize(
    ("cgroup", "files", "available", "total"),
    [
        ("0::/\n", {}, 12, 16),
        ("0::/\n", version_2("", "max", 3 * GIB), 12, 16),
        ("0::/\n", version_2("", 8 * GIB, 3 * GIB), 5, 8),
        ("0::/\n", version_2("", 8 * GIB, 8 * GIB, files=7 * GIB), 7, 8),
        ("0::/a/b\n", version_2("a/", 6 * GIB, 2 * GIB) | version_2("a/b/", "max", GIB), 4, 6),
        ("4:memory:/box\n0::/\n", VERSION_1, 3, 4),
    ],
    ids=[
        "no limit",
        "max",
        "a container's",
        "cached files are available",
        "a service's parent",
        "version 1",
    ],
)
def test_memory_is_the_machines_or_the_tightest_limit_around_the_process(
    cgroup: str,
    files: dict[str, str],
    available: int,
    total: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(tmp_path, monkeypatch, cgroup, files)
    assert (available_ram_bytes(), total_ram_bytes()) == (available * GIB, total * GIB)


def test_ranks_of_one_machine_are_held_against_all_of_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Available memory changes while other ranks load."""
    machine(tmp_path, monkeypatch, "0::/\n", {})
    require_ram(8 * GIB, "they", ranks=2)
    with pytest.raises(
        ConfigError,
        match=r"they need 18.0 GiB of memory \(9.0 GiB in each of 2 ranks\), and 16.0 GiB are "
        r"there",
    ):
        require_ram(9 * GIB, "they", ranks=2)


SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture(scope="module", autouse=True)
def ready() -> None:
    """The first model of a process imports modules, which take memory."""
    reference(Qwen3Config(**SIZES, num_key_value_heads=4))
    with LLMEngine.from_config("demo", max_model_len=64):
        pass


@pytest.mark.parametrize(
    "config_class", [Qwen3Config, StableLmConfig], ids=["native", "through transformers"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_do_not_fit_are_refused_with_both_numbers_before_they_are_read(
    config_class: Any, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = reference(config_class(**SIZES, num_key_value_heads=4, max_position_embeddings=64))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as opened:  # the header is whole, and nothing but zeros follows it
        size = file.stat().st_size
        opened.truncate(8 + int.from_bytes(opened.read(8), "little"))
        opened.truncate(size)
    needed = (
        sum(parameter.numel() for parameter in model.parameters()) * getattr(torch, dtype).itemsize
    )
    monkeypatch.setattr(memory, "available_ram_bytes", lambda: needed // 2)
    with pytest.raises(ConfigError) as caught:
        LLMEngine.from_config(
            {
                "model": str(tmp_path),
                "dtype": dtype,
                "generation_config": "none",
                "executor": {"name": "local", "num_pages": 64},
            }
        )
    told = re.search(
        rf"the weights in {dtype} need ([\d.]+) KiB of memory, and ([\d.]+) KiB are available",
        str(caught.value),
    )
    assert told is not None, caught.value
    assert needed <= float(told[1]) * 1024 + 52 <= 1.05 * needed, (
        "rounded to 0.1 KiB; some layers are padded"
    )
    assert float(told[2]) == round(needed // 2 / 1024, 1)


def test_sizes_follow_from_headers_whatever_the_dtype(tmp_path: Path) -> None:
    """Packed numbers and scales stay as they are; plain ones take the model's dtype."""
    tensors = {
        "a": torch.zeros(3, 5, dtype=torch.bfloat16),
        "b": torch.zeros(7, dtype=torch.float8_e4m3fn),
        "c": torch.zeros(2, dtype=torch.int32),
        "d": torch.zeros(4, dtype=torch.bool),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert stored_bytes(tmp_path) == 3 * 5 * 2 + 7 + 8 + 4
    assert stored_bytes(tmp_path, torch.float32) == 3 * 5 * 4 + 7 + 8 + 4
