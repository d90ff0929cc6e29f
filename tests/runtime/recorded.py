"""CUDA graphs played on the CPU: a recording keeps its operations, and the tensors that they read and wrote; a replay runs them on these again.

So a replay sees of the present what lies in those tensors, and nothing else: a number that the host knew when it recorded stays what it was. Kernels
in Triton's interpreter are operations too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class Recording(TorchDispatchMode):
    """Keeps every operation while it is active."""

    active: ClassVar[Recording | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Sequence[Any], Mapping[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, outputs))
        return outputs


class GraphOnCpu:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self._recording = Recording()

    def capture_begin(self, pool: Any = None) -> None:
        self._recording.__enter__()
        Recording.active = self._recording

    def capture_end(self) -> None:
        Recording.active = None
        self._recording.__exit__(None, None, None)

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        for func, args, kwargs, outputs in self._recording.operations:
            _overwrite(outputs, func(*args, **kwargs))


@contextmanager
def capturing(graph: GraphOnCpu, pool: Any = None) -> Iterator[None]:
    """Stands for `torch.cuda.graph`."""
    graph.capture_begin(pool)
    yield
    graph.capture_end()


def _overwrite(kept: Any, new: Any) -> None:
    """What later operations read becomes what was just computed. Views, and what was changed in place, are so already."""
    if isinstance(kept, torch.Tensor):
        if kept.data_ptr() != new.data_ptr():
            kept.copy_(new)
    elif isinstance(kept, tuple | list):
        for old, fresh in zip(kept, new, strict=True):
            _overwrite(old, fresh)


def keep_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels in Triton's interpreter, which isn't itself made of operations to keep."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            run(kernel, *args, **kwargs)
        if Recording.active is not None:
            Recording.active.operations.append((partial(run, kernel), args, kwargs, None))

    monkeypatch.setattr(InterpretedFunction, "run", launch)


def play_graphs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What recording asks of `torch.cuda`."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = {
        "CUDAGraph": GraphOnCpu,
        "graph": capturing,
        "graph_pool_handle": lambda: None,
        "Stream": lambda device: stream,
        "current_stream": lambda: stream,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda device: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
