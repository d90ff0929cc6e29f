"""The engine's process, started by the supervisor:
`python -m dovetail_server.engine_process DESCRIPTOR`.

It assembles the engine and runs an `EngineHost`. One thread obeys the supervisor, another sends it
heartbeats.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from dovetail_server.channel import BEAT_S, Channel, Message, channel_of_process, end_orphaned, heed

if TYPE_CHECKING:
    from dovetail_server.host import EngineHost
    from dovetail_server.links import ZmqPost
    from dovetail_server.step_watch import StepWatch


def main() -> int:
    """Return the exit code: 2 if the engine can't start, 1 if it failed later."""
    channel = channel_of_process(sys.argv[1])
    start, early = channel.first()
    orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
    for message in early:
        orders.put(message)
    heed(channel, orders.put, partial(end_orphaned, start["directory"]))
    from dovetail import EngineConfig
    from dovetail.errors import DovetailError, EngineDeadError
    from dovetail.serving import assemble, groups_in_words, ranks_in_words
    from dovetail_server.host import EngineHost
    from dovetail_server.links import ZmqPost
    from dovetail_server.step_watch import StepWatch

    try:
        config = EngineConfig.load_with(
            start["source"], EngineConfig.read_settings(start["set"]), origin="command line"
        )
        assembly = assemble(config, {})
    except DovetailError as error:
        channel.send(refused=str(error))
        return 2
    post = ZmqPost(start["address"])
    assembly.prepare_grammars()
    host = EngineHost(assembly, post)

    channel.send(
        ready=True,
        ranks=ranks_in_words(assembly.capacity),
        groups=groups_in_words(assembly.capacity),
    )
    for target in (partial(_beat, channel, StepWatch(host)), partial(_obey, orders, host, post)):
        threading.Thread(target=target, daemon=True).start()
    try:
        host.run()
    except EngineDeadError as error:
        channel.send(dead=str(error))
        return 1
    finally:
        post.close()
    return 0


def _obey(orders: queue.SimpleQueue[Message], host: EngineHost, post: ZmqPost) -> None:
    while True:
        message = orders.get()
        if "gone" in message:
            post.tell_gone(message["gone"].encode())
        elif "stop" in message:
            host.stop()
            post.wake()


def _beat(channel: Channel, steps: StepWatch) -> None:
    while True:
        channel.send(busy_s=steps.busy_s())
        time.sleep(BEAT_S)


if __name__ == "__main__":
    sys.exit(main())
