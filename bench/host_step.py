"""The engine process's own time per step, with all running requests streamed to a front end,
compared with the offline engine's.

    python bench/host_step.py            # 256 and 1,024 running decodes over an executor that does nothing, ids only

"Offline" is the median wall time of `LLMEngine.step()`, "host" that of a turn of `EngineHost`'s
loop: to hear, to step, to make, encode and send the frame. The frames go through a ZeroMQ socket to
a thread that reads and drops them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time

import zmq

from bench.core_overhead import make_engine, measure
from dovetail.request.request import RequestFields
from dovetail.request.sampling_params import SamplingParams
from dovetail_server.frames import Hello, add_of, encode
from dovetail_server.host import EngineHost
from dovetail_server.links import ZmqPost


def read_and_drop(address: str, messages: list[bytes], over: threading.Event) -> None:
    """Send the messages, and read the responses."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    for message in messages:
        socket.send(message)
    while not over.is_set():
        if socket.poll(100):
            socket.recv()
    context.destroy(linger=0)


def measure_host(num_seqs: int, context: int, steps: int) -> float:
    """Return the median milliseconds of a turn of the host's loop in which all `num_seqs` requests
    decode."""
    engine = make_engine(num_seqs, context)
    core = engine.core
    intake = engine._intake
    params = SamplingParams(max_tokens=1000, ignore_eos=True, detokenize=False)
    prompts = [[index % 512 + 1] + [5] * (context - 1) for index in range(num_seqs)]
    checked = [
        intake.check(str(index), prompt, params, RequestFields()).request
        for index, prompt in enumerate(prompts)
    ]
    messages = [
        encode(Hello()),
        *(encode(add_of(number, request)) for number, request in enumerate(checked)),
    ]
    with tempfile.TemporaryDirectory() as directory:
        address = f"ipc://{directory}/engine"
        over = threading.Event()
        post = ZmqPost(address)
        host = EngineHost(engine._assembly, post)
        core.plan_timing.expects_arrivals = False  # planning late would be waiting
        thread = threading.Thread(target=read_and_drop, args=(address, messages, over))
        thread.start()
        times: list[float] = []
        while len(times) < steps:
            begun = time.perf_counter()
            host._hear()
            if core.has_unfinished():
                host._deliver(core.step())
            if core.stats.decode_tokens > num_seqs * 20:
                times.append(time.perf_counter() - begun)
        over.set()
        thread.join()
        post.close()
    return statistics.median(times) * 1e3


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for num_seqs in (256, 1024):
        offline = measure(num_seqs, 100, False, 300)
        host = measure_host(num_seqs, 100, 300)
        print(
            f"{num_seqs:>5} requests: offline {offline:.2f} ms, host {host:.2f} ms a step: "
            f"{host / offline:.2f} times"
        )


if __name__ == "__main__":
    main()
