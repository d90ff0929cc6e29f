"""Data sheets of GPUs, for the roofline model."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from dovetail_lab.step_time import Described


class DataSheet(Described):
    """Data sheet of one device."""

    memory_bytes: float = Field(gt=0, allow_inf_nan=False, description="Memory size in bytes.")
    bytes_per_s: float = Field(
        gt=0, allow_inf_nan=False, description="Memory bandwidth in bytes per second."
    )
    flops: float = Field(
        gt=0,
        allow_inf_nan=False,
        description="Dense 16-bit operations per second on matrix units, with 32-bit accumulation.",
    )
    link_bytes_per_s: float = Field(
        32e9,
        gt=0,
        allow_inf_nan=False,
        description="Bytes per second to other devices, per direction: NVLink or PCIe.",
    )


# dense rates by NVIDIA; of the A10G, which only AWS has, by AWS
DATA_SHEETS: Mapping[str, DataSheet] = {
    "a10g": DataSheet(memory_bytes=24e9, bytes_per_s=600e9, flops=70e12, link_bytes_per_s=32e9),
    "a100-40gb": DataSheet(
        memory_bytes=40e9, bytes_per_s=1555e9, flops=312e12, link_bytes_per_s=300e9
    ),
    "a100-80gb": DataSheet(
        memory_bytes=80e9, bytes_per_s=2039e9, flops=312e12, link_bytes_per_s=300e9
    ),
    "l4": DataSheet(memory_bytes=24e9, bytes_per_s=300e9, flops=121e12, link_bytes_per_s=32e9),
    "l40s": DataSheet(memory_bytes=48e9, bytes_per_s=864e9, flops=362e12, link_bytes_per_s=32e9),
    "h100-80gb": DataSheet(
        memory_bytes=80e9, bytes_per_s=3350e9, flops=989e12, link_bytes_per_s=450e9
    ),
    "h100-pcie": DataSheet(
        memory_bytes=80e9, bytes_per_s=2000e9, flops=756e12, link_bytes_per_s=64e9
    ),
    "rtx-4090": DataSheet(
        memory_bytes=24e9, bytes_per_s=1008e9, flops=165e12, link_bytes_per_s=32e9
    ),
    "h200": DataSheet(memory_bytes=141e9, bytes_per_s=4800e9, flops=989e12, link_bytes_per_s=450e9),
    "b200": DataSheet(
        memory_bytes=180e9, bytes_per_s=8000e9, flops=2250e12, link_bytes_per_s=900e9
    ),
    "rtx-pro-6000": DataSheet(
        memory_bytes=96e9, bytes_per_s=1597e9, flops=500e12, link_bytes_per_s=64e9
    ),
}
