"""Reproduces all GPU figures of docs/performance.md and its two companion pages in one call: the
tests that need a GPU, then every measurement.

    python -m bench.everything --list                                      # the parts, and the seconds that each may take
    python -m bench.everything --out DIR                                   # all of them
    python -m bench.everything --out DIR --parts gpu-tests nano stall      # some: `nano` is nano-triton and nano-flash_attn
    python -m bench.everything --out DIR --seconds 570                     # begin no part that may not end in time

Each part is a process of its own. What it prints goes to DIR/<part>.txt while it runs, and its
figures to DIR/<part>.json where it has some; what ended, and how, is in DIR/parts.json. Called
again with the same DIR it goes on with the parts that haven't passed yet.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.workloads import WORKLOADS

ROOT = Path(__file__).parents[1]
BACKENDS = ("triton", "flash_attn")
BESIDE_OTHERS = ("nano", "one", "thousand", "shared")  # workloads
KERNEL_TESTS = (
    "nn/test_kernels",
    "samplers/test_fused",
    "runtime/test_decode_rows",
    "attention/test_triton_backend",
)
GRACE_S = 15.0
# in a command: the part's JSON file, and a folder of its own
FIGURES = "{json}"
FOLDER = "{folder}"


@dataclass(frozen=True, slots=True)
class Part:
    """A Python command, without `python`, and its time limit in seconds."""

    name: str
    command: tuple[str, ...]
    limit_s: float

    def matches(self, wanted: str) -> bool:
        return self.name == wanted or self.name.startswith(f"{wanted}-")


@dataclass(frozen=True, slots=True)
class Ended:
    """Result of a part: its exit status, or None if it timed out."""

    status: int | None
    seconds: float

    def __str__(self) -> str:
        how = (
            "passed"
            if self.status == 0
            else "ran out of time"
            if self.status is None
            else f"failed with status {self.status}"
        )
        return f"{how} after {self.seconds:.0f} s"


def throughput(workload: str, attention: str) -> Part:
    command = (
        "-m",
        "bench.throughput",
        "--workload",
        workload,
        "--attention",
        attention,
        "--json",
        FIGURES,
    )
    return Part(f"{workload}-{attention}", command, 200 if workload == "8b-256" else 120)


PARTS = (
    Part("host", ("-m", "bench.host"), 10),
    Part("gpu-tests", ("-m", "pytest", "-m", "gpu", "-s", "tests/gpu", "tests/samplers"), 500),
    *(throughput("nano", attention) for attention in BACKENDS),
    Part("stall", ("-m", "bench.latency", "--workload", "stall", "--json", FIGURES), 180),
    *(throughput(workload, "triton") for workload in WORKLOADS if workload != "nano"),
    Part(
        "latency",
        ("-m", "bench.latency", "--rate", "4", "16", "--seconds", "15", "--json", FIGURES),
        240,
    ),
    Part("startup", ("-m", "bench.startup", "--json", FIGURES), 180),
    Part("calibration", ("-m", "bench.lab.own_gpu", "--out", FOLDER), 360),
    Part(
        "8b-calibration", ("-m", "bench.lab.own_gpu", "--out", FOLDER, "--shape", "qwen3-8b"), 200
    ),
    Part("kernel-tests", ("-m", "pytest", *(f"tests/{file}.py" for file in KERNEL_TESTS)), 500),
    *(throughput(workload, "flash_attn") for workload in WORKLOADS if workload != "nano"),
    Part(
        "others",
        (
            "-m",
            "bench.throughput",
            "--workload",
            *BESIDE_OTHERS,
            "--engine",
            "dovetail",
            "nano-vllm",
            "vllm",
            "--json",
            FIGURES,
        ),
        500,
    ),
    Part("attention", ("-m", "bench.attention"), 300),
    Part("profile", ("-m", "bench.profile_decode", "--rows", "1", "8", "64", "256"), 200),
    Part("products", ("-m", "bench.products"), 100),
    Part("kernels", ("-m", "bench.kernels"), 300),
)


class Folder:
    """Folder of results."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parts = path / "parts.json"
        path.mkdir(parents=True, exist_ok=True)
        told = json.loads(self._parts.read_text()) if self._parts.exists() else {}
        self.ended = {name: Ended(**fields) for name, fields in told.items()}

    def passed(self, part: Part) -> bool:
        return part.name in self.ended and self.ended[part.name].status == 0

    def run(self, part: Part) -> Ended:
        """Run a part, and record how it ended."""
        places = {FIGURES: str(self.path / f"{part.name}.json"), FOLDER: str(self.path / part.name)}
        command = [sys.executable, *(places.get(word, word) for word in part.command)]
        begun = time.monotonic()
        with open(self.path / f"{part.name}.txt", "w") as text:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=text, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status: int | None = process.wait(part.limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                stop(process)
        self.ended[part.name] = Ended(status, time.monotonic() - begun)
        self._parts.write_text(
            json.dumps({name: asdict(ended) for name, ended in self.ended.items()}, indent=1)
        )
        return self.ended[part.name]

    def last_line(self, part: Part) -> str:
        lines = (self.path / f"{part.name}.txt").read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate it, so that it can stop its children; then kill the rest of its session."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def chosen(wanted: Sequence[str] | None, among: Sequence[Part]) -> list[Part]:
    """Return the requested parts, in the order of `among`. Exits if a name is unknown."""
    for name in wanted or ():
        if not any(part.matches(name) for part in among):
            raise SystemExit(
                f"--parts {name}: no such part; there are {', '.join(part.name for part in among)}"
            )
    return [part for part in among if wanted is None or any(part.matches(name) for name in wanted)]


def main() -> None:
    run_parts(PARTS, __doc__)


def run_parts(among: Sequence[Part], description: str | None) -> None:
    """Read the command line, and run the requested parts."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of results")
    parser.add_argument("--parts", nargs="+", metavar="PART")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="time limit of all parts together"
    )
    parser.add_argument(
        "--again", action="store_true", help="run parts that have passed already, too"
    )
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    parts = chosen(args.parts, among)
    if args.list or args.out is None:
        print(
            "\n".join(
                f"{part.name:24} {part.limit_s:5.0f} s  python {' '.join(part.command)}"
                for part in parts
            )
        )
        raise SystemExit(None if args.list else "--out DIR is needed to run them")
    folder = Folder(args.out)
    end = time.monotonic() + args.seconds
    for part in parts:
        if folder.passed(part) and not args.again:
            print(f"{part.name:24} has passed before", flush=True)
        elif time.monotonic() + part.limit_s > end:
            print(
                f"{part.name:24} left for another call: it may take {part.limit_s:.0f} s",
                flush=True,
            )
        else:
            print(f"{part.name:24} {folder.run(part)}: {folder.last_line(part)}", flush=True)
    raise SystemExit(not all(folder.passed(part) for part in parts))


if __name__ == "__main__":
    main()
