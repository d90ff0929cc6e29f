"""Time to first token of prefixes that are restored from host memory or a disk, beside computing
them; and agents' turns with and without KV beyond the device.

    python -m bench.kv_tiers prefix --shape qwen3-8b --tokens 10000
    python -m bench.kv_tiers agents --shape qwen3-8b --users 16 --turns 8
    python -m bench.kv_tiers prefix --model demo --tokens 400 --dtype float32      # on a CPU
    python -m bench.kv_tiers itl --model demo --tokens 400 --dtype float32 --host-memory 1GiB
    python -m bench.kv_tiers enqueue --shape qwen3-0.6b --host-memory 8GiB
    python -m bench.kv_tiers prefix --shape wide-kv --tokens 4000 --cold --disk /a/real/disk
    python -m bench.kv_tiers rounds --shape tiny --tokens 260 --dtype float32 --rounds 10000

`prefix`: a prompt is computed; then the prefix cache forgets it, and the host pool restores it; then
another engine loads it from the disk. Medians of `--runs` runs with fresh prompts each. `--cold`: a
third engine loads it after the page cache has forgotten the files, beside reading them in as many
threads; `--disk` must be a real disk. `agents`:
users take turns, and each turn adds tokens to a user's prompt; the device's cache holds a part of
the prompts only. `itl`: the inter-token latency of running requests while prompts of others are
saved, stored, loaded and restored, beside an engine without tiers, in alternate rounds; a second
one of these shows how much the machine itself varies. CPU times of the engine's thread vary less
on a busy machine. `enqueue`: the host's time per frame for enqueuing saves and restores one by one,
and together; on a CPU it includes the copies, which are done at once. `rounds`: the memory of the
process while fresh prompts are stored, and earlier ones loaded, from the disk and from host memory in
turns; both have room for a few. Random weights in the model's true shape.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.shapes import SHAPES, write_checkpoint
from dovetail import LLMEngine, SamplingParams
from dovetail.api.kv_transfers import Transfer
from dovetail.engine.tiers.feature import TierFeature
from dovetail.engine.tiers.prospect import Pace

ANSWER = 64  # tokens of an agent's turn
READERS = 4  # threads, as the disk tier has by default


def fresh(chance: random.Random, count: int) -> list[int]:
    """Return token ids that no prompt had before, in all likelihood."""
    return [chance.randrange(5, 1000) for _ in range(count)]


def first_token_s(engine: LLMEngine, name: str, prompt: list[int], tokens: int = 1) -> float:
    """Run one request to its end; return its time to first token."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, detokenize=False)
    engine.add_request(name, prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            metrics = output.metrics
    assert metrics is not None
    assert metrics.first_token_time is not None
    while engine.core.idle(finish_start=True):  # saves and stores end
        pass
    return metrics.first_token_time - metrics.arrival_time


def settings_of(args: argparse.Namespace, directory: str) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model": directory,
        "load_format": "dummy" if args.model is None else "auto",
        "dtype": args.dtype,
        "max_num_seqs": 16,
        "generation_config": "none",
    }
    if args.kv_cache_memory is not None:
        settings["kv_cache_memory"] = args.kv_cache_memory
    return settings


def tiers_of(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    return {
        "kv_host_memory": args.host_memory,
        "kv_tiers": [{"name": "disk", "path": folder, "size": "200GiB"}],
    }


def files_of(folder: str) -> list[Path]:
    """Return the files of all frames."""
    return [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]


def forget_pages(folder: str) -> None:
    """Let the page cache forget the files of a folder, which must be on a real disk."""
    for path in files_of(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # what isn't written yet can't be forgotten
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_rate(folder: str) -> float:
    """Read all files of a folder, in as many threads as the disk tier; return bytes per second."""
    files = files_of(folder)
    local = threading.local()

    def read(path: Path) -> int:
        size = path.stat().st_size
        if not hasattr(local, "buffer"):  # new memory for each file would be measured, too
            local.buffer = bytearray(size)
        with path.open("rb", buffering=0) as file:
            return file.readinto(memoryview(local.buffer)[:size]) or 0

    with ThreadPoolExecutor(READERS) as pool:
        begun = time.perf_counter()
        total = sum(pool.map(read, files))
        return total / (time.perf_counter() - begun)


def prefix(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Measure one prompt: computed, restored from host memory, and loaded from a disk."""
    chance = random.Random(args.seed)
    prompts = [fresh(chance, args.tokens) for _ in range(args.runs)]
    times: dict[str, list[float]] = {"computed": [], "host": [], "disk": []}
    rates: list[float] = []
    if args.cold:
        times["disk_cold"] = []
    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        made = settings | tiers_of(args, str(Path(folder, "frames")))
        with LLMEngine.from_config(made) as engine:
            first_token_s(engine, "warm", fresh(chance, args.tokens), ANSWER)
            for number, prompt in enumerate(prompts):
                times["computed"].append(first_token_s(engine, f"a{number}", prompt, ANSWER))
                engine.core.kv.reset()
                times["host"].append(first_token_s(engine, f"b{number}", prompt, ANSWER))
            stats = engine.core.stats.tiers
            assert stats is not None
            saved = stats.saved_bytes // (args.runs + 1)
        for kind in [*times][2:]:
            with LLMEngine.from_config(made) as engine:
                first_token_s(engine, "warm", fresh(chance, args.tokens), ANSWER)
                for number, prompt in enumerate(prompts):
                    if kind == "disk_cold":
                        forget_pages(folder)
                        rates.append(read_rate(folder))
                        forget_pages(folder)
                    times[kind].append(first_token_s(engine, f"{kind} {number}", prompt, ANSWER))
                stats = engine.core.stats.tiers
                loaded = dict(stats.loaded_bytes) if stats else {}
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {
        "prompt_tokens": args.tokens,
        "frame_bytes_of_a_prompt": saved,
        "ttft_ms": {name: round(1e3 * value, 2) for name, value in medians.items()},
        "host_gb_per_s": round(saved / medians["host"] / 1e9, 2),
        "loaded_bytes": loaded,
        **({"cold": cold(saved, medians["disk_cold"], rates)} if rates else {}),
    }


def cold(size: int, seconds: float, rates: list[float]) -> dict[str, float]:
    """Return how loading `size` bytes in `seconds` compares with plain reads at these rates."""
    rate = statistics.median(rates)
    return {
        "read_gb_per_s": round(rate / 1e9, 3),
        "read_ms": round(1e3 * size / rate, 1),
        "ttft_by_read": round(seconds / (size / rate), 2),
    }


class Always(Pace):
    """Finds that each prefix is restored sooner than computed."""

    def loading_s(self, *arguments: Any) -> float:
        return 0.0


def memory() -> dict[str, int]:
    """Return what the process has, that could grow."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident_mib": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
        "threads": threading.active_count(),
        "open_files": len(os.listdir("/proc/self/fd")),
    }


def rounds(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Store fresh prompts and load them again; report memory after each tenth of the rounds."""
    chance = random.Random(args.seed)
    seen: dict[int, dict[str, int]] = {}
    before: deque[list[int]] = deque(maxlen=100)  # as many have left host memory, but not the disk
    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        tiers = tiers_of(args, str(Path(folder, "frames")))
        tiers["kv_tiers"][0]["size"] = "16MiB"
        with LLMEngine.from_config(settings | tiers | {"kv_host_memory": "4MiB"}) as engine:
            [tier] = [one for one in engine.core.features if isinstance(one, TierFeature)]
            tier.wait_until_open()
            tier.pace = Always()
            tier.measure(engine.core.books.fit)
            for number in range(1, args.rounds + 1):
                prompt = fresh(chance, args.tokens)
                before.append(prompt)
                first_token_s(engine, f"store {number}", prompt)
                engine.core.kv.reset()
                first_token_s(engine, f"load {number}", before[0 if number % 2 else -1])
                engine.core.kv.reset()
                if number % max(1, args.rounds // 10) == 0:
                    kept = {"host_frames": tier.pool.frames, "host_bytes": tier.pool.bytes}
                    kept["files"] = len(files_of(folder))
                    seen[number] = memory() | kept
                    print(number, json.dumps(seen[number]), flush=True)
            stats = tier.stats
    return {
        "saved_frames": stats.saved_frames,
        "stored_frames": dict(stats.stored_frames),
        "loaded_frames": dict(stats.loaded_frames),
        "restored_frames": stats.restored_frames,
        "dropped_frames": dict(stats.dropped_frames),
        "missed": dict(stats.missed),
        "after_rounds": seen,
    }


def agents(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Measure agents' turns, without tiers and with a host pool."""
    results: dict[str, Any] = {}
    for name, more in (("without", {}), ("with", {"kv_host_memory": args.host_memory})):
        chance = random.Random(args.seed)
        prompts = [fresh(chance, args.tokens) for _ in range(args.users)]
        times: list[float] = []
        with LLMEngine.from_config(settings | more) as engine:
            first_token_s(engine, "warm", fresh(chance, 64))
            begun = time.perf_counter()
            for turn in range(args.turns):
                for user, prompt in enumerate(prompts):
                    took = first_token_s(engine, f"{turn}:{user}", prompt, ANSWER)
                    if turn:
                        times.append(took)
                    prompt += fresh(chance, args.added)
            seconds = time.perf_counter() - begun
        results[name] = {
            "ttft_p50_ms": round(1e3 * statistics.median(times), 2),
            "tokens_per_s": round(args.users * args.turns * ANSWER / seconds, 1),
        }
    return results


def gaps_s(engine: LLMEngine, name: str, prompts: list[list[int]]) -> list[tuple[float, float]]:
    """Return the times between the tokens of two running requests while `prompts` are answered one
    after the other, and the engine thread's CPU times between them. The device then forgets all."""
    params = SamplingParams(max_tokens=100_000, ignore_eos=True, temperature=0.0, detokenize=False)
    short = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0, detokenize=False)
    running = [f"{name} running {number}" for number in (1, 2)]
    for number, one in enumerate(running):
        engine.add_request(one, [7 + number, 8, 9], params)
    latest: dict[str, tuple[float, float]] = {}
    gaps: list[tuple[float, float]] = []
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{name} {number}", prompt, short)
        ended = False
        while not ended:
            outputs = engine.step()
            now = time.perf_counter(), time.thread_time()
            for output in outputs:
                if output.request_id in running:
                    if output.request_id in latest:
                        before = latest[output.request_id]
                        gaps.append((now[0] - before[0], now[1] - before[1]))
                    latest[output.request_id] = now
                ended = ended or (output.finished and output.request_id not in running)
    for one in running:
        engine.abort_request(one)
    while engine.has_unfinished_requests():
        engine.step()
    engine.core.kv.reset()
    return gaps


def itl(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Measure gaps between tokens: of prompts that were answered before, and of new ones."""
    chance = random.Random(args.seed)
    prompts = [fresh(chance, args.tokens) for _ in range(args.users)]
    gaps: dict[str, list[tuple[float, float]]] = {"without": [], "without_again": [], "with": []}
    with (
        tempfile.TemporaryDirectory(dir=args.disk) as folder,
        LLMEngine.from_config(settings) as plain,
        LLMEngine.from_config(settings) as again,
        LLMEngine.from_config(settings | tiers_of(args, str(Path(folder, "frames")))) as tiered,
    ):
        engines = [("without", plain), ("without_again", again), ("with", tiered)]
        for turn in range(args.turns + 1):
            some = [*prompts, *(fresh(chance, args.tokens) for _ in prompts)]
            for name, engine in engines:
                found = gaps_s(engine, str(turn), some)
                if turn:
                    gaps[name] += found
            engines = [*engines[1:], engines[0]]
        stats = tiered.core.stats.tiers
    assert stats is not None
    result: dict[str, Any] = {"restored_tokens": stats.restored_tokens}
    result |= {"stored_frames": dict(stats.stored_frames), "missed": dict(stats.missed)}
    for name, each in gaps.items():
        result[name] = {"gaps": len(each)}
        for what, values in zip(("wall", "cpu"), zip(*each, strict=True), strict=True):
            ordered = sorted(values)
            result[name][f"{what}_p50_ms"] = round(1e3 * ordered[len(each) // 2], 3)
            result[name][f"{what}_p99_ms"] = round(1e3 * ordered[int(0.99 * len(each))], 3)
    for name in ("without_again", "with"):
        for what in ("wall_p99_ms", "cpu_p99_ms"):
            result[f"{name}_{what}_ratio"] = round(result[name][what] / result["without"][what], 3)
    return result


def enqueue(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Measure the host's time for enqueuing a frame, of 1, 4 and 8 at a time."""
    result: dict[str, Any] = {}
    with LLMEngine.from_config(settings | {"kv_host_memory": args.host_memory}) as engine:
        own = engine.core.executor.transfers()
        assert own is not None
        pages = engine.capacity.layout.pages(256)
        size = pages * own.page_bytes
        slab = own.allocate(8 * size)
        for kind in ("save", "restore"):
            for number in (1, 4, 8):
                frames = [
                    Transfer(1000 + at, slab.number, at * size, tuple(range(1, 1 + pages)), at)
                    for at in range(number)
                ]
                times: dict[str, list[float]] = {"one_by_one": [], "together": []}
                for _ in range(20 * args.runs):
                    for way, found in times.items():
                        begun = time.perf_counter()
                        if way == "together":
                            getattr(own, f"{kind}_all")(frames)
                        else:
                            for frame in frames:
                                getattr(own, kind)(frame)
                        found.append((time.perf_counter() - begun) / number)
                        left = number
                        while left:
                            left -= len(own.finished())
                result[f"{kind} {number}"] = {
                    f"{way}_us": round(1e6 * statistics.median(found), 1)
                    for way, found in times.items()
                }
    return {"frame_bytes": size, **result}


MEASURES = {
    "prefix": prefix,
    "agents": agents,
    "itl": itl,
    "enqueue": enqueue,
    "rounds": rounds,
}


@contextmanager
def directory_of(args: argparse.Namespace) -> Iterator[str]:
    """Yield the model given, or the folder of a temporary checkpoint with random weights."""
    if args.model is not None:
        yield args.model
        return
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(SHAPES[args.shape], Path(folder, "model"))
        yield str(Path(folder, "model"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=tuple(MEASURES))
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--model", help="instead of a shape: a model with weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=10_000, help="of the first prompt")
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--added", type=int, default=2_000, help="tokens added in each turn")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--host-memory", default="48GiB")
    parser.add_argument("--kv-cache-memory", help="of the device; default: as the engine's")
    parser.add_argument("--cold", action="store_true", help="also from a disk without page cache")
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--disk", help="parent of the disk tier's temporary folder")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with directory_of(args) as directory:
        print(json.dumps(MEASURES[args.what](args, settings_of(args, directory)), indent=2))


if __name__ == "__main__":
    main()
