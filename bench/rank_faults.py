"""Faults of engines with several ranks, and leaked resources: each engine runs in a separate
process, which this one watches.

    python -m bench.rank_faults                                  # on two GPUs: each fault once, and 20 kills at random moments
    python -m bench.rank_faults --faults normal-float32 kill-a-rank --kills 0
    python -m bench.rank_faults --kills 20 --seed 7 --json out.json
    python -m bench.rank_faults --device cpu                     # the same with ranks on the CPU

An engine must tell of the fault, close and end within their limits, and leave no process and no GPU
memory; what runs on two ranks must generate the tokens of one. The weights are random, in the shape
of Qwen3-0.6B; on the CPU it is the bundled model. An engine that doesn't end in time has its
threads' stacks written to stderr, and is killed. Ends with status 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from bench.shapes import SHAPES, write_checkpoint

START_S = 180.0  # that an engine may take to be ready: its first start compiles kernels
TOLD_S = 15.0  # from a fault until its engine's caller hears of it
CLOSED_S = 25.0  # that closing may take, and then ending
LEFT_S = 15.0  # that the system may take to release what a process had
LEFT_MIB = 64  # of a GPU, more than before
STOPPED_LIMIT_S = 10.0  # executor.step_timeout_s
PROMPTS = 48
MAX_TOKENS = 48
MOMENTS = {
    "loading": 4.0,
    "recording": 2.0,
    "steady": 1.5,
    "closing": 0.1,
}  # seconds within which a kill comes, from the moment's beginning
FAULTS = (
    "normal-float32",
    "normal-bfloat16",
    "one-rank",
    "forgotten",
    "kill-a-rank",
    "stop-a-rank",
    "kill-engine",
    "kill-starting",
    "interrupt-starting",
)


@dataclass
class Seen:
    """Result of one engine."""

    name: str
    wrong: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    error: str = ""  # that its caller was told
    tokens: Any = None

    def __str__(self) -> str:
        figures = "  ".join(f"{what} {figure:.2f}" for what, figure in self.figures.items())
        error = f"  {self.error[:110]!r}" if self.error else ""
        return f"{'WRONG' if self.wrong else 'right':5} {self.name:22} {figures}{error}" + "".join(
            f"\n      {what}" for what in self.wrong
        )


# The engine's process


def run_engine(spec: dict[str, Any]) -> None:
    """Start an engine, generate for `work_s`, close it, and report each stage on stdout as a line
    of JSON."""
    from dovetail import LLMEngine
    from dovetail.errors import DovetailError

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with_stdin, daemon=True).start()

    def say(stage: str, **more: Any) -> None:
        print(json.dumps({"stage": stage, **more}), flush=True)

    def progress(what: str, done: int, total: int) -> None:
        if done == 1:
            say(what)

    say("starting")
    try:
        engine = LLMEngine.from_config(spec["settings"], progress=progress)
        say("ready", details=dict(engine.capacity.details))
        until = time.monotonic() + spec["work_s"]
        tokens = generate(engine)
        say("steady", tokens=tokens)
        while time.monotonic() < until and engine.core.dead is None:
            generate(engine)
        if engine.core.dead is not None:
            say("told", error=str(engine.core.dead))
        if spec["forgotten"]:
            return
        say("closing")
        engine.close()
    except DovetailError as error:
        say("told", error=str(error))
    say("closed", gpu_mib=gpu_mib())


def _end_with_stdin() -> None:
    """End this process when its watcher is gone."""
    sys.stdin.read()
    os._exit(1)


def gpu_mib() -> int:
    """Return the memory in use of this process's GPU, of which a context takes some 600 MiB."""
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    free, total = torch.cuda.mem_get_info()
    return (total - free) >> 20


def generate(engine: Any) -> list[list[int]]:
    """Return the tokens of each prompt; for an engine that dies, those received."""
    from dovetail import SamplingParams
    from dovetail.errors import EngineDeadError

    chance = random.Random(0)
    outputs = dict[str, list[int]]()
    with suppress(EngineDeadError):
        for index in range(PROMPTS):
            prompt = [chance.randint(1, 400) for _ in range(chance.randint(1, 60))]
            params = SamplingParams(
                temperature=float(index % 2),
                seed=index,
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                detokenize=False,
            )
            engine.add_request(str(index), prompt, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id] = list(output.outputs[0].token_ids)
    return [outputs.get(str(index), []) for index in range(PROMPTS)]


# Who watches it


class Watched:
    """An engine's process and its output."""

    def __init__(
        self, settings: dict[str, Any], work_s: float = 0.0, *, forgotten: bool = False
    ) -> None:
        spec = json.dumps({"settings": settings, "work_s": work_s, "forgotten": forgotten})
        self.begun = time.monotonic()
        command = [sys.executable, "-m", "bench.rank_faults", "--engine", spec]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        # by stage: when it was said first, and all of it
        self.said: dict[str, tuple[float, dict[str, Any]]] = {}
        self.ranks: set[int] = set()
        self._lines: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def wait_for(self, stages: tuple[str, ...], seconds: float) -> str | None:
        """Wait for one of these reports, or one that begins with one of `stages`. None on timeout,
        or if the process ends."""
        until = time.monotonic() + seconds
        while True:
            if found := next((stage for stage in self.said if stage.startswith(stages)), None):
                return found
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                return None
            if not line:
                self._lines.put(line)
                return None
            with suppress(ValueError):
                message = json.loads(line)
                self.said.setdefault(message["stage"], (time.monotonic(), message))

    def find_ranks(self, seconds: float) -> list[int]:
        """Return the processes of its ranks, once they exist."""
        until = time.monotonic() + seconds
        while (
            not (found := ranks_of(self.process.pid))
            and self.process.poll() is None
            and time.monotonic() < until
        ):
            time.sleep(0.005)
        self.ranks |= set(found)
        return found

    def stacks(self) -> None:
        """Let it write its threads' stacks."""
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(1)


def ranks_of(pid: int) -> list[int]:
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(child) for child in children.read_text().split()]
    return [
        child
        for child in found
        if b"dovetail_executors.rank_process" in _read_bytes(f"/proc/{child}/cmdline")
    ]


def is_alive(pid: int) -> bool:
    return _read_bytes(f"/proc/{pid}/stat").rpartition(b")")[2][:2].strip() not in (b"", b"Z", b"X")


def _read_bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def used_mib() -> list[int]:
    """Return the used memory of each GPU; empty without GPUs."""
    try:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return [
            int(line)
            for line in subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=30
            ).stdout.split()
        ]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


class Faults:
    """Runs engines, injects faults, and checks for leaked resources."""

    def __init__(self, device: str, model: str, size: int, seed: int) -> None:
        self._device = device
        self._model = model
        self._size = size
        self._chance = random.Random(seed)
        self._before = used_mib()
        self._expected: dict[str, Any] = {}  # dtype -> tokens

    def settings(self, dtype: str, size: int, **executor: Any) -> dict[str, Any]:
        where = (
            {"name": "local", "device": self._device}
            if size == 1
            else {"name": "tensor", "size": size, "device": self._device, **executor}
        )
        dummy = (
            {} if self._model == "demo" else {"load_format": "dummy", "gpu_memory_utilization": 0.5}
        )
        limits = {"max_num_seqs": 64, "max_model_len": 128, "max_num_batched_tokens": 2048}
        return {
            "model": self._model,
            "dtype": dtype,
            "generation_config": "none",
            "executor": where,
            **limits,
            **dummy,
        }

    def run(self, name: str) -> Seen:
        seen = Seen(name)
        act: Callable[[Seen], Watched] = getattr(self, f"_{name.replace('-', '_')}")
        watched = act(seen)
        self._end(watched, seen)
        return seen

    def kill_at(self, moment: str) -> Seen:
        """Kill a rank at a random time of a stage."""
        delay = self._chance.uniform(0, MOMENTS[moment])
        seen = Seen(f"kill-{moment}+{delay:.2f}")
        watched = Watched(
            self.settings("bfloat16", self._size), 1.0 if moment == "closing" else 8.0
        )
        watched.find_ranks(START_S)
        begins = {
            "loading": ("starting",),
            "recording": ("capturing", "ready"),
            "steady": ("steady",),
            "closing": ("closing",),
        }[moment]
        if watched.wait_for((*begins, "told"), START_S) is None:
            seen.wrong.append(f"it never came to {moment}")
            watched.stacks()
        time.sleep(delay)
        self._kill(watched, seen, signal.SIGKILL, told=moment != "closing")
        self._end(watched, seen)
        return seen

    def _ready(
        self, seen: Seen, settings: dict[str, Any], work_s: float = 0.0, *, forgotten: bool = False
    ) -> Watched:
        watched = Watched(settings, work_s, forgotten=forgotten)
        if settings["executor"]["name"] == "tensor":
            watched.find_ranks(START_S)
        if watched.wait_for(("steady",), START_S) is None:
            seen.wrong.append("it wasn't ready in time")
            watched.stacks()
        else:
            seen.figures["start_s"] = watched.said["ready"][0] - watched.begun
            seen.tokens = watched.said["steady"][1]["tokens"]
        return watched

    def _normal(self, seen: Seen, dtype: str) -> Watched:
        watched = self._ready(seen, self.settings(dtype, self._size))
        watched.wait_for(("closed",), CLOSED_S)
        if dtype == "float32":
            self._expected[dtype] = seen.tokens
        return watched

    def _normal_float32(self, seen: Seen) -> Watched:
        return self._normal(seen, "float32")

    def _normal_bfloat16(self, seen: Seen) -> Watched:
        return self._normal(seen, "bfloat16")

    def _one_rank(self, seen: Seen) -> Watched:
        watched = self._ready(seen, self.settings("float32", 1))
        if (theirs := self._expected.get("float32")) is not None and seen.tokens is not None:
            equal = sum(ours == other for ours, other in zip(seen.tokens, theirs, strict=True))
            seen.figures["sequences_equal"] = equal
            if equal < PROMPTS:
                seen.wrong.append(
                    f"{PROMPTS - equal} of {PROMPTS} sequences differ from those of {self._size} "
                    f"ranks"
                )
        return watched

    def _forgotten(self, seen: Seen) -> Watched:
        """Run an engine that is never closed."""
        return self._ready(seen, self.settings("bfloat16", self._size), forgotten=True)

    def _kill(self, watched: Watched, seen: Seen, signum: int, *, told: bool = True) -> None:
        ranks = [pid for pid in watched.ranks if is_alive(pid)]
        if not ranks:
            seen.figures["ranks_left"] = 0.0
            return
        os.kill(self._chance.choice(ranks), signum)
        killed = time.monotonic()
        limit = TOLD_S if signum == signal.SIGKILL else STOPPED_LIMIT_S + TOLD_S
        if watched.wait_for(("told",), limit) is not None:
            seen.error = watched.said["told"][1]["error"]
            seen.figures["told_s"] = watched.said["told"][0] - killed
        elif told and "closing" not in watched.said:
            seen.wrong.append(f"nobody was told within {limit:g} s")
            watched.stacks()

    def _kill_ready(self, seen: Seen, signum: int) -> Watched:
        watched = self._ready(
            seen, self.settings("float32", self._size, step_timeout_s=STOPPED_LIMIT_S), 120.0
        )
        self._kill(watched, seen, signum)
        return watched

    def _kill_a_rank(self, seen: Seen) -> Watched:
        return self._kill_ready(seen, signal.SIGKILL)

    def _stop_a_rank(self, seen: Seen) -> Watched:
        return self._kill_ready(seen, signal.SIGSTOP)

    def _kill_engine(self, seen: Seen) -> Watched:
        watched = self._ready(seen, self.settings("float32", self._size), 120.0)
        watched.process.kill()
        return watched

    def _kill_starting(self, seen: Seen) -> Watched:
        return self._while_starting(seen, signal.SIGKILL)

    def _interrupt_starting(self, seen: Seen) -> Watched:
        return self._while_starting(seen, signal.SIGINT)

    def _while_starting(self, seen: Seen, signum: int) -> Watched:
        watched = Watched(self.settings("bfloat16", self._size), 120.0)
        watched.find_ranks(START_S)
        delay = seen.figures["after_s"] = self._chance.uniform(0, 6)
        time.sleep(delay)
        watched.find_ranks(0)
        watched.process.send_signal(signum)
        return watched

    def _end(self, watched: Watched, seen: Seen) -> None:
        """Check that it ends, and what it leaves behind."""
        begun = time.monotonic()
        try:
            watched.process.wait(CLOSED_S)
        except subprocess.TimeoutExpired:
            seen.wrong.append(
                f"its process was still there {CLOSED_S:g} s later; last it said: "
                f"{list(watched.said)[-1:]}"
            )
            watched.stacks()
            watched.process.kill()
            watched.process.wait()
        ended = time.monotonic()
        watched.wait_for(("closed",), 1.0)
        if "closing" in watched.said and "closed" in watched.said:
            seen.figures["close_s"] = watched.said["closed"][0] - watched.said["closing"][0]
            seen.figures["gpu_mib_then"] = watched.said["closed"][1]["gpu_mib"]
        seen.figures["end_s"] = ended - begun
        if (code := watched.process.returncode) > 0 and "after_s" not in seen.figures:
            seen.wrong.append(f"its process ended with status {code}")
        self._see_what_is_left(watched, seen, ended)

    def _see_what_is_left(self, watched: Watched, seen: Seen, ended: float) -> None:
        while (left := self._left(watched)) and time.monotonic() - ended < LEFT_S:
            time.sleep(0.1)
        seen.figures["all_gone_s"] = time.monotonic() - ended
        seen.wrong += left
        for pid in watched.ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _left(self, watched: Watched) -> list[str]:
        left = [f"rank process {pid} is alive" for pid in watched.ranks if is_alive(pid)]
        for index, (before, now) in enumerate(zip(self._before, used_mib(), strict=False)):
            if now > before + LEFT_MIB:
                left.append(f"GPU {index} has {now} MiB in use, and had {before} before")
        return left


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", type=int, default=2, help="ranks")
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=list(FAULTS))
    parser.add_argument(
        "--kills",
        type=int,
        default=20,
        help="number of kills of a rank, at random times of starting, working and closing in turn",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start nothing after this time"
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine is not None:
        run_engine(json.loads(args.engine))
        return
    begun = time.monotonic()
    all_seen = list[Seen]()
    with tempfile.TemporaryDirectory() as folder:
        if args.device == "cuda":
            write_checkpoint(SHAPES["qwen3-0.6b"], Path(folder))
        faults = Faults(
            args.device, "demo" if args.device == "cpu" else folder, args.size, args.seed
        )
        acts: list[Callable[[], Seen]] = [
            lambda name=name: faults.run(name) for name in args.faults
        ]
        acts += [
            lambda index=index: faults.kill_at(list(MOMENTS)[index % len(MOMENTS)])
            for index in range(args.kills)
        ]
        for done, act in enumerate(acts):
            if time.monotonic() - begun > args.seconds:
                print(f"{len(acts) - done} are left for another call", flush=True)
                break
            all_seen.append(act())
            print(all_seen[-1], flush=True)
            if args.json:
                Path(args.json).write_text(
                    json.dumps([{**asdict(seen), "tokens": None} for seen in all_seen], indent=1)
                )
    wrong = sum(bool(seen.wrong) for seen in all_seen)
    print(
        f"{len(all_seen) - wrong} of {len(acts)} right, {wrong} wrong, after "
        f"{time.monotonic() - begun:.0f} s",
        flush=True,
    )
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
