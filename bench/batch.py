"""`dovetail batch run`: its speed compared with `LLM.generate`, and the correctness of a job that
is killed repeatedly.

    python -m bench.batch speed --workload nano                      # on a GPU, with random weights in the model's true shape
    python -m bench.batch speed --rows 200 --tokens 32               # the demo model, anywhere
    python -m bench.batch kills --rows 200000 --kills 20             # the executor `toy`, anywhere; some twenty minutes
    python -m bench.batch kills --on ray --rows 20000 --kills 1 --worker-kills 3 --engines 2   # with a Ray cluster of its own on this machine

`speed` runs the same rows through `LLM.generate`, after a call to warm up, and as jobs whose files
are read and written, each in a process of its own; of both the time is that of the work, without
the engine's start. `kills` runs a job once undisturbed and once with SIGKILLs at times drawn evenly
from the first's length, goes on with it after each, and compares every answer with the one that its
row's seed stands for. With `--on ray`, engines' processes in the cluster are killed too, and nobody
but Ray starts them again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bench.apart import apart
from bench.toy import answer_ids, installed_in
from bench.workloads import WORKLOADS, Workload

RUNS = 3
RAY_STORE_BYTES = 200_000_000
RAY_ENDS_S = 10  # how long a cluster may take to end by itself


# Speed


def generated(config: Mapping[str, Any], work: Workload) -> list[float]:
    """Return the seconds of `LLM.generate` for the workload, per run, after an uncounted one."""
    from dovetail import LLM, SamplingParams

    params = [
        SamplingParams(temperature=work.temperature, ignore_eos=True, max_tokens=out, seed=row)
        for row, (_, out) in enumerate(work.lens)
    ]
    times = []
    with LLM(**config) as llm:
        for run in range(RUNS + 1):
            prompts = work.prompts(seed=run)
            begun = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            times.append(time.perf_counter() - begun)
    return times[1:]


def batched(config: Mapping[str, Any], work: Workload, directory: Path, run: int) -> float:
    """Return the seconds of a job with the same workload, from the engine's readiness to the last
    file."""
    from dovetail_batch.job import load_plan
    from dovetail_batch.runner import run as run_job

    rows = zip(work.prompts(seed=run), work.lens, strict=True)
    with (directory / f"{run}.jsonl").open("w") as file:
        for row, (prompt, (_, out)) in enumerate(rows):
            file.write(
                json.dumps(
                    {"id": row, "token_ids": prompt, "sampling": {"max_tokens": out, "seed": row}}
                )
                + "\n"
            )
    job = written_job(
        directory,
        f"{run}.jsonl",
        f"answers-{run}",
        config,
        {"temperature": work.temperature, "ignore_eos": True},
    )
    summary = run_job(load_plan(str(job)))
    if (summary.failed, summary.output_tokens) != (0, work.output_tokens):
        raise SystemExit(
            f"{summary.output_tokens} tokens were generated, not {work.output_tokens}: "
            f"{summary.failures}"
        )
    return summary.seconds


def speed(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if args.workload is None:
            work = Workload(
                "demo",
                tuple((random.Random(row).randint(4, 64), args.tokens) for row in range(args.rows)),
                max_id=1000,
            )
            config: dict[str, Any] = {"model": "demo"}
        else:
            from bench.limits import require_gpu
            from bench.shapes import SHAPES, write_checkpoint

            require_gpu()
            work = WORKLOADS[args.workload]
            write_checkpoint(SHAPES[work.shape], directory / "model")
            config = {
                "model": str(directory / "model"),
                "load_format": "dummy",
                "dtype": "bfloat16",
                "max_num_seqs": work.seqs,
            }
            config["max_model_len"] = work.longest
        jobs = [apart(batched, config, work, directory, run) for run in range(1, RUNS + 1)]
        calls = apart(generated, config, work)
    rates = {
        name: work.output_tokens / statistics.median(times)
        for name, times in (("LLM.generate", calls), ("dovetail batch run", jobs))
    }
    for name, times in (("LLM.generate", calls), ("dovetail batch run", jobs)):
        print(
            f"{name:>20} {rates[name]:>9,.0f} tok/s   {'  '.join(f'{one:.3f}' for one in times)} s"
        )
    print(f"{rates['dovetail batch run'] / rates['LLM.generate']:.1%} of LLM.generate's")


# Kills


def command(
    job: Path,
    environment: Mapping[str, str],
    stdout: int | None = None,
    options: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "dovetail", "batch", "run", str(job), *options],
        env=environment,
        stdout=stdout,
    )


def verdict(answers: Path, rows: int, tokens: int) -> Counter[str]:
    """Count errors in the answers of a folder: rows that are lost, duplicated, or answered with
    other tokens than their seeds'."""
    times: Counter[int] = Counter()
    found: Counter[str] = Counter({"lost": 0, "doubled": 0, "wrong": 0})
    for path in sorted(answers.glob("part-*.jsonl")):
        for line in path.read_text().splitlines():
            answer = json.loads(line)
            times[answer["row"]] += 1
            right = answer_ids(answer["row"], np.arange(tokens)).tolist()
            found["wrong"] += (
                answer["id"] != str(answer["row"])
                or not answer["outputs"]
                or answer["outputs"][0]["token_ids"] != right
            )
    found["lost"] = rows - len(times)
    found["doubled"] = sum(times.values()) - len(times)
    return found


def killed(args: argparse.Namespace) -> None:
    rng = random.Random(args.seed)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = installed_in(directory / "site")
        cluster = (
            stack.enter_context(RayCluster(environment, args.engines)) if args.on == "ray" else None
        )
        options = ["--on", "ray", "--address", cluster.address] if cluster is not None else []
        with (directory / "rows.jsonl").open("w") as file:
            for row in range(1, args.rows + 1):
                file.write(
                    json.dumps(
                        {"id": row, "prompt": f"Row {row} of them", "sampling": {"seed": row}}
                    )
                    + "\n"
                )
        config = {"model": "demo", "executor": {"name": "toy", "step_s": args.step_s}}
        sampling = {"max_tokens": args.tokens, "ignore_eos": True}

        job = written_job(directory, "rows.jsonl", "undisturbed", config, sampling, args.engines)
        begun = time.perf_counter()
        process = command(job, environment, subprocess.PIPE, options)
        told = process.communicate()[0].decode()
        alone = time.perf_counter() - begun
        if (computing := re.search(r" tokens in ([0-9.]+) s", told)) is None:
            raise SystemExit(f"the undisturbed job has failed: {told}")
        start = alone - float(computing[1])
        right = dict(verdict(directory / "undisturbed", args.rows, args.tokens))
        print(
            f"undisturbed: {args.rows:,} rows in {alone:.1f} s, of which {start:.1f} s until the "
            f"engine was ready; {right}",
            flush=True,
        )

        job = written_job(directory, "rows.jsonl", "killed", config, sampling, args.engines)
        moments = [(rng.uniform(0, alone), "command") for _ in range(args.kills)]
        moments += [(rng.uniform(start, alone), "worker") for _ in range(args.worker_kills)]
        begun = time.perf_counter()
        kills = Counter[str]()
        process = command(job, environment, options=options)
        for moment, victim in sorted(moments):
            try:
                process.wait(max(begun + moment - time.perf_counter(), 0.0))
                break
            except subprocess.TimeoutExpired:
                if victim == "worker":
                    kills[victim] += cluster is not None and cluster.kill_engine(rng)
                    continue
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                kills[victim] += 1
                process = command(job, environment, options=options)
        code = process.wait()
        took = time.perf_counter() - begun
        print(
            f"with kills ({dict(kills)}): {took:.1f} s, exit code {code}; "
            f"{dict(verdict(directory / 'killed', args.rows, args.tokens))}"
        )
        less = took - kills["command"] * start
        print(
            f"{took / alone:.3f} times as long; without the starts that the kills of the command "
            f"cost, {less / alone:.3f}"
        )


class RayCluster:
    """Ray cluster on this machine for the duration of the `with` block. Ray listens on all
    addresses, and requires its token."""

    def __init__(self, environment: Mapping[str, str], cpus: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        ray = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--head",
            "--block",
            f"--port={port}",
            f"--num-cpus={cpus}",
        ]
        # or others would take it for the machine's own
        self._directory = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        options = [
            "--include-dashboard=false",
            "--disable-usage-stats",
            f"--object-store-memory={RAY_STORE_BYTES}",
        ]
        options.append(f"--temp-dir={self._directory.name}")
        environment = {**environment, "RAY_AUTH_MODE": "token"}
        subprocess.run(
            [*ray[:1], "get-auth-token", "--generate"],
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._process = subprocess.Popen(
            [*ray, *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        said = []
        for line in self._process.stdout:
            said.append(line)
            if "--block" in line:  # the last that it says, when all of it has started
                break
        else:
            raise SystemExit(f"Ray didn't start: {''.join(said)}")

    def kill_engine(self, rng: random.Random) -> bool:
        """Kill the process of one engine. Return False if there is none."""
        if engines := sorted(
            pid for pid in _descendants(self._process.pid) if b"BatchEngine" in _command_line(pid)
        ):
            os.kill(rng.choice(engines), signal.SIGKILL)
        return bool(engines)

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        processes = _descendants(self._process.pid)
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(RAY_ENDS_S)
        for pid in [self._process.pid, *processes]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._directory.cleanup()


def _descendants(pid: int) -> list[int]:
    """Return the descendants of a process."""
    parents = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            with suppress(OSError):
                parents[int(directory.name)] = int(
                    (directory / "stat").read_text().rpartition(")")[2].split()[1]
                )
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def _command_line(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def written_job(
    directory: Path,
    rows: str,
    answers: str,
    config: Mapping[str, Any],
    sampling: Mapping[str, Any],
    engines: int = 1,
) -> Path:
    """Write a job file, and return its path."""
    path = directory / f"{answers}.yaml"
    files = {"input": str(directory / rows), "output": str(directory / answers)}
    job = {"engine": dict(config), "engines": engines, **files, "sampling": dict(sampling)}
    path.write_text(yaml.safe_dump(job))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(required=True)
    fast = kinds.add_parser("speed")
    fast.add_argument("--workload", choices=WORKLOADS, help="on a GPU; without it the demo model")
    fast.add_argument("--rows", type=int, default=200)
    fast.add_argument("--tokens", type=int, default=32)
    fast.set_defaults(run=speed)
    dying = kinds.add_parser("kills")
    dying.add_argument("--rows", type=int, default=200_000)
    dying.add_argument("--kills", type=int, default=20)
    dying.add_argument("--on", choices=("ray",), help="where the engines run; default: here")
    dying.add_argument("--engines", type=int, default=1)
    dying.add_argument(
        "--worker-kills", type=int, default=0, help="with --on ray: kills of processes of engines"
    )
    dying.add_argument("--tokens", type=int, default=32)
    dying.add_argument(
        "--step-s", type=float, default=0.02, help="seconds per step of the fake device"
    )
    dying.add_argument("--seed", type=int, default=0)
    dying.set_defaults(run=killed)
    args = parser.parse_args()
    # so that nothing that was started is left
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    args.run(args)


if __name__ == "__main__":
    main()
