"""Calls a function in a separate process, so that leftovers of one engine don't slow down another.

A default device of torch's, say: each of its calls takes some microseconds longer from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")


def apart(function: Callable[..., T], *args: Any) -> T:
    """`function(*args)`, in a new interpreter. The function, its arguments and its result must
    pickle. Ends the program if the process ends without a result, which it tells of itself; ends
    the process if the program is interrupted."""
    receiver, sender = Pipe(duplex=False)
    process = get_context("spawn").Process(target=_send, args=(sender, function, args))
    process.start()
    sender.close()  # so that the pipe ends with the process
    try:
        result: T = receiver.recv()
    except EOFError:
        process.join()
        raise SystemExit(
            f"{function.__name__} ended with status {process.exitcode}, and no result"
        ) from None
    except BaseException:
        process.terminate()
        raise
    finally:
        process.join()
    return result


def _send(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    sender.send(function(*args))
