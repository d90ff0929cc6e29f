"""Detects a machine's features for ranks: `python -m dovetail.nn.machine` prints them as JSON.
`dovetail plugins doctor` runs it in a subprocess, since importing torch takes long and a driver may
hang."""

from __future__ import annotations

import json

import torch
from torch import distributed


def main() -> None:
    """Print {"gpus": names of the CUDA devices that are visible, "peers": whether each can read
    every other's memory, "backends": those of torch.distributed that are there}."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    there = (
        {"gloo": distributed.is_gloo_available, "nccl": distributed.is_nccl_available}
        if distributed.is_available()
        else {}
    )
    offers = {
        "gpus": [torch.cuda.get_device_name(index) for index in range(count)],
        "peers": bool(pairs)
        and all(torch.cuda.can_device_access_peer(one, other) for one, other in pairs),
        "backends": [name for name, is_there in there.items() if is_there()],
    }
    print(json.dumps(offers))


if __name__ == "__main__":
    main()
