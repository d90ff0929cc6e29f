"""Reproduces the figures of docs/several-gpus.md for two GPUs in one call: tests, faults and
measurements, like bench/everything.py.

    python -m bench.several_gpus --list                                     # the parts, and the seconds that each may take
    python -m bench.several_gpus --out DIR --seconds 570                    # those that may end in time; the rest in the next call
    python -m bench.several_gpus --out DIR --parts faults two --again

A fault that leaves something behind is reported by its own part, and what a part leaves behind is
killed before the next one.
"""

from __future__ import annotations

from bench.everything import FIGURES, Part, run_parts

TWO = ("executor.name=tensor", "executor.size=2")
START = (
    "--shape",
    "qwen3-8b",
    "--runs",
    "1",
    "--json",
    FIGURES,
    "--verbose",
    "--set",
    "load_format=dummy",
)


# one at a time: each has both GPUs
TESTS = ("tests/runtime/test_rank_shares.py", "tests/gpu/test_two_ranks.py")


def throughput(name: str, workloads: tuple[str, ...], limit_s: float, *settings: str) -> Part:
    command = ("-m", "bench.throughput", "--workload", *workloads, "--json", FIGURES)
    return Part(name, (*command, "--set", *TWO, *settings), limit_s)


PARTS = (
    Part("tests", ("-m", "pytest", "-x", "-n", "0", *TESTS), 300),
    Part("faults", ("-m", "bench.rank_faults", "--kills", "0", "--json", FIGURES), 400),
    Part("start-one", ("-m", "bench.startup", *START), 100),
    Part("start-two", ("-m", "bench.startup", *START, *TWO), 120),
    Part("sums", ("-m", "bench.all_reduce", "--json", FIGURES), 100),
    throughput("two", ("8b-one", "8b-64", "8b-prefill", "8b-256"), 300),
    throughput("two-fp8", ("8b-one", "8b-64", "8b-prefill"), 200, "quantization=fp8"),
    Part("equal", ("-m", "bench.equal_ranks", "--json", FIGURES), 300),
    throughput("two-experts", ("moe-one", "moe-64"), 160),
    throughput("two-recurrent", ("q35-one",), 100),
    Part("kills", ("-m", "bench.rank_faults", "--faults", "--kills", "20", "--json", FIGURES), 500),
)


def main() -> None:
    run_parts(PARTS, __doc__)


if __name__ == "__main__":
    main()
