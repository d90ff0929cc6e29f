"""Observers that do what no component should, in the one run of their suite that fails. (`import`
this: other processes have to.)"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from dovetail.api.observer import EngineStopped, Observer, RequestArrived
from dovetail.testing.checks import Absent


class Unruly(Observer):
    def on_stopped(self, event: EngineStopped) -> None:
        if event.error is not None:
            self.misbehave()

    def misbehave(self) -> None: ...


class Exits(Unruly):
    def misbehave(self) -> None:
        os._exit(0)


class ExitsPolitely(Unruly):
    def misbehave(self) -> None:
        sys.exit(0)


class Raises(Unruly):
    def misbehave(self) -> None:
        raise RuntimeError("on purpose")


class RaisesWithTheTime(Observer):
    def on_arrived(self, event: RequestArrived) -> None:
        raise RuntimeError(f"on purpose, at {time.perf_counter()}")


class SaysHowManyThreads(Observer):
    def on_arrived(self, event: RequestArrived) -> None:
        raise RuntimeError(f"threads: {os.environ.get('OMP_NUM_THREADS')}")


class BlocksOnce(Observer):
    def on_stopped(self, event: EngineStopped) -> None:
        time.sleep(0.2)


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words for it")


class RaisesWithoutWords(Unruly):
    def misbehave(self) -> None:
        raise Wordless


class WritesToAnyFile(Unruly):
    def misbehave(self) -> None:
        for file in range(3, 64):
            with suppress(OSError):
                os.write(file, b'\xff\n{"event": "ended"\n[]\n')


class ForksItself(Unruly):
    def misbehave(self) -> None:
        os.fork()


class SaysThatItIsAbsent(Observer):
    def __init__(self, *args: object) -> None:
        raise Absent("anything")


class RaisesNoText(Observer):
    def __init__(self, *args: object) -> None:
        raise ValueError("no text: \udcff")


class Prints(Unruly):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.misbehave()

    def misbehave(self) -> None:
        print('{"conformant": false}')
        os.write(1, b"noise")
        sys.stderr.write("noise")


class DiesAtOnce(Observer):
    def __init__(self, *args: object) -> None:
        os._exit(3)


class Interrupts(Observer):
    def __init__(self, *args: object) -> None:
        raise KeyboardInterrupt


class Crashes(Unruly):
    def misbehave(self) -> None:
        ctypes.string_at(0)


class HangsInC(Unruly):
    """Once."""

    def misbehave(self) -> None:
        if not (hung := Path("hung")).exists():
            hung.touch()
            ctypes.PyDLL(None).sleep(1000)  # and keeps the GIL meanwhile
