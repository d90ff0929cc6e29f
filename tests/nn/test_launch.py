"""`dovetail.nn.kernels.launch`: kernels are launched, or compiled ahead and not launched, each kind
once."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.nn.kernels import available
from dovetail.nn.kernels.launch import (
    KernelUnavailable,
    _kind,
    compiling_ahead,
    is_compiling_ahead,
    launch,
    launching,
)
from tests.support import examples

CPU = torch.device("cpu")


class Kernel:
    """Records its launches, in place of a Triton kernel."""

    def __init__(self, *any_number: bool) -> None:
        self.params = [SimpleNamespace(do_not_specialize=it) for it in any_number or (False,) * 4]
        self.launched: list[tuple[Any, ...]] = []
        self.compiled: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.loaded = 0
        self.may_compile = threading.Event()
        self.may_compile.set()
        self.error: Exception | None = None  # of compiling it
        self.launch_error: Exception | None = None
        self.fn = SimpleNamespace(__qualname__="_kernel", __module__="some.module")

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **options: Any) -> None:
            if (error := self.launch_error or self.error) is not None:
                raise error
            self.launched.append((grid, args, options))

        return run

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Any:
        assert self.may_compile.wait(60)
        self.compiled.append((args, options))
        if self.error is not None:
            raise self.error
        return self

    @property
    def run(self) -> None:
        self.loaded += 1


def test_a_kernel_is_launched() -> None:
    kernel = Kernel()
    launch(kernel, (3, 2))(1, 2, N=4)
    assert kernel.launched == [((3, 2), (1, 2), {"N": 4})]
    assert not kernel.compiled


def test_ahead_each_kind_is_compiled_and_loaded_once_and_none_is_launched() -> None:
    kernel, other = Kernel(), Kernel()
    with compiling_ahead(CPU, 4):
        for _ in range(3):
            for n in (8, 16):
                launch(kernel, (1,))(torch.zeros(3), 5, N=n)
            launch(other, (1,))(torch.zeros(3), 5, N=8)
    assert sorted(options["N"] for _, options in kernel.compiled) == [8, 16]
    assert (kernel.loaded, len(other.compiled), other.loaded) == (2, 1, 1)
    assert not kernel.launched
    launch(kernel, (1,))()
    assert kernel.launched, "afterwards they are launched"


def test_the_launch_returns_at_once_and_the_end_waits() -> None:
    kernels = [Kernel() for _ in range(8)]
    for kernel in kernels:
        kernel.may_compile.clear()
    with compiling_ahead(CPU, 2):
        for kernel in kernels:
            launch(kernel, (1,))(1)
        assert not any(kernel.compiled for kernel in kernels)
        for kernel in kernels:
            kernel.may_compile.set()
    assert all(kernel.loaded for kernel in kernels)


def test_who_waits_is_told_how_far_it_is() -> None:
    broken, told = Kernel(), []
    broken.error = RuntimeError("no such instruction")
    with compiling_ahead(CPU, 2, lambda done, total: told.append((done, total))):
        for kernel in (Kernel(), broken, Kernel()):
            launch(kernel, (1,))(1)
        assert not told
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_many_are_compiled_at_once() -> None:
    meeting = threading.Barrier(4)
    kernels = [Kernel() for _ in range(4)]
    for kernel in kernels:
        kernel.may_compile.wait = lambda timeout: meeting.wait(timeout) >= 0  # type: ignore[method-assign,assignment,misc]
    with compiling_ahead(CPU, 4):
        for kernel in kernels:
            launch(kernel, (1,))(1)
    assert all(kernel.loaded for kernel in kernels)


def test_what_cannot_be_compiled_is_left_to_its_launch() -> None:
    broken, sound = Kernel(), Kernel()
    broken.error = RuntimeError("no such instruction")
    with compiling_ahead(CPU, 1):
        launch(broken, (1,))(1)
        launch(sound, (1,))(1)
    assert (broken.loaded, sound.loaded) == (0, 1)


def test_an_unavailable_kernel_is_reported_once_and_not_tried_again(
    caplog: pytest.LogCaptureFixture, forgetting_kernels: None
) -> None:
    broken, sound = Kernel(), Kernel()
    broken.error = RuntimeError("out of resource: shared memory,\n Required: 147456")
    for _ in range(3):
        with pytest.raises(
            KernelUnavailable,
            match=r"_kernel of some.module is unavailable .* RuntimeError: out of resource: shared "
            r"memory, R",
        ):
            launch(broken, (1,))(1)
    launch(sound, (1,))(1)
    assert (len(broken.compiled), len(caplog.records), len(sound.launched)) == (1, 1, 1)


def test_an_error_of_a_launch_whose_kernel_is_there_stays_what_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernel = Kernel()
    kernel.launch_error = RuntimeError("an illegal memory access was encountered")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            launch(kernel, (1,))(1)
    assert not caplog.records


def test_an_error_amidst_ends_it_and_what_was_begun_is_still_compiled() -> None:
    kernel = Kernel()
    with pytest.raises(ValueError, match="amidst"), compiling_ahead(CPU, 1):  # noqa: PT012 (what the launch does is the test)
        launch(kernel, (1,))(1)
        raise ValueError("amidst")
    assert kernel.loaded == 1
    assert not is_compiling_ahead()


def test_launching_launches_after_all_and_only_when_all_so_far_is_compiled() -> None:
    kernel = Kernel()
    with compiling_ahead(CPU, 1):
        launch(kernel, (1,))(1)
        with launching():
            assert (kernel.loaded, is_compiling_ahead()) == (1, False)
            launch(kernel, (1,))(2)
        assert is_compiling_ahead()
        launch(kernel, (1,))(16)
    assert [args for _, args, _ in kernel.launched] == [(2,)]
    assert len(kernel.compiled) == 2


def test_a_kernel_that_is_tried_is_launched() -> None:
    kernel = Kernel()
    with compiling_ahead(CPU, 1):
        assert available.works("some layers", lambda: launch(kernel, (1,))(1))
    assert (len(kernel.launched), len(kernel.compiled)) == (1, 0)


def test_other_threads_launch() -> None:
    kernel = Kernel()
    with compiling_ahead(CPU, 1):
        other = threading.Thread(target=lambda: launch(kernel, (1,))(1))
        other.start()
        other.join()
    assert len(kernel.launched) == 1


def test_what_waits_to_be_compiled_keeps_no_memory() -> None:
    kernel = Kernel()
    kernel.may_compile.clear()
    with compiling_ahead(CPU, 1):
        tensor = torch.zeros(1000)
        launch(kernel, (1,))(tensor)
        gone = weakref.ref(tensor)
        del tensor
        gc.collect()
        assert gone() is None
        kernel.may_compile.set()
    [((stand_in,), _)] = kernel.compiled
    assert (stand_in.dtype, stand_in.numel()) == (torch.float32, 0)


def test_a_number_that_a_kernel_is_not_specialised_for_makes_no_kind() -> None:
    kernel = Kernel(True, False)
    with compiling_ahead(CPU, 1):
        for number in (1, 2, 16):
            launch(kernel, (1,))(number, 5)
        launch(kernel, (1,))(1, 16)
    assert [args for args, _ in kernel.compiled] == [(1, 5), (1, 16)]


memory = torch.zeros(64, dtype=torch.uint8)
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int32])
tensors = st.builds(
    lambda dtype, start: memory[start * 4 : 32 + start * 4].view(dtype), dtypes, st.integers(0, 6)
)
alike = st.lists(st.integers(0, 6), min_size=2, max_size=2).map(
    lambda starts: [memory[start * 4 : 32 + start * 4] for start in starts]
)
numbers = st.sampled_from([0, 1, 2, 15, 16, 32, 1 << 31, 1 << 40])
anything = tensors | numbers | st.booleans() | st.floats(0, 2)


@examples(quick=300, full=3000)
@given(
    alike | st.lists(numbers, min_size=2, max_size=2) | st.lists(anything, min_size=2, max_size=2)
)
def test_what_triton_compiles_anew_for_is_another_kind(arguments: list[Any]) -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    compiler = pytest.importorskip("triton.compiler")
    backend = compiler.make_backend(
        pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    )
    first, second = (
        jit.native_specialize_impl(backend, argument, False, True, True) for argument in arguments
    )
    assert first == second or _kind(arguments[0]) != _kind(arguments[1])


def test_a_compiler_for_a_device_makes_it_current_in_each_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made_current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    with compiling_ahead(torch.device("cuda", 1), 1):
        launch(Kernel(), (1,))(1)
    assert made_current == [torch.device("cuda", 1)]


def test_a_check_never_runs_in_two_threads_at_once() -> None:
    """Two threads must not load the same kernel."""
    together = threading.Barrier(4)
    running: list[torch.device] = []
    most: list[int] = []

    @available.shared
    def check(device: torch.device) -> bool:
        running.append(device)
        most.append(len(running))
        running.pop()
        return True

    def ask(_: int) -> bool:
        together.wait()
        return check(CPU)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(4)))
    assert {*most} == {1}


def test_a_check_that_raises_raises_for_all_who_wait_and_is_tried_again() -> None:
    fails = [True]

    @available.shared
    def check(device: torch.device) -> bool:
        if fails:
            raise ValueError("no")
        return True

    with pytest.raises(ValueError, match="no"):
        check(CPU)
    fails.clear()
    assert check(CPU)
