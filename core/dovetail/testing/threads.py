"""`one_thread`: runs torch on one thread, for checks that make many small calls.

On a busy machine threads of one process wait for each other in loops, and take many times the CPU
time of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch's operations use one thread of the CPU; as a decorator, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
