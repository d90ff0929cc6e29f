"""How fast the lab is: the whole Azure conversation trace of 2023, 19,366 requests in 58 minutes,
in one process; and whether it repeats itself.

    python -m bench.lab.speed --traces DIR
    python -m bench.lab.speed --traces DIR --requests 2000 --twice      # a part, twice, compared byte by byte
    python -m bench.lab.speed --traces DIR --trace-calls                # where the time goes

Llama-3.1-8B's shipped step times (vLLM on an RTX PRO 6000), `fcfs`, 256 sequences, overlap on, prefix
reuse on, blocks of 16.
"""

from __future__ import annotations

import cProfile
import hashlib
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.lab.checks import arguments

ENGINE = {
    "scheduler": "fcfs",
    "executor": {"name": "simulated", "step_time": "rtxpro6000-llama-3.1-8b", "num_pages": 30_000},
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "max_model_len": 32_768,
}
BUDGET_S = 60.0
START_BUDGET_S = 1.0


def start_seconds() -> float:
    """Return the time from process start to the first simulated token."""
    code = (
        "from dovetail_lab.simulate import replay; from dovetail_lab.traces import Trace, "
        "TraceRequest; "
        f"replay({ENGINE!r}, Trace('one', 'one', (TraceRequest('0', 0.0, 10, 1),)))"
    )
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - begun


def run_seconds(path: Path, requests: int | None) -> tuple[float, str]:
    """Wall time of one replay, reading the trace and writing the result included; and a digest of
    the result's bytes."""
    from dovetail_lab.simulate import replay
    from dovetail_lab.traces import load_trace, slice_trace

    begun = time.perf_counter()
    trace = load_trace(path)
    result = replay(ENGINE, trace if requests is None else slice_trace(trace, f"0:{requests}"))
    with tempfile.TemporaryDirectory() as folder:
        result.save(Path(folder) / "run.json")
        seconds = time.perf_counter() - begun
        digest = hashlib.sha256((Path(folder) / "run.json").read_bytes()).hexdigest()
    tokens = sum(record.output_tokens for record in result)
    print(
        f"{len(result)} requests, {tokens} tokens, {len(result.timeline)} steps: {seconds:.1f} s, "
        f"sha256 {digest[:16]}"
    )
    return seconds, digest


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, help="number of requests to simulate")
    parser.add_argument("--twice", action="store_true", help="run twice and compare the bytes")
    parser.add_argument(
        "--trace-calls", action="store_true", help="profile it, which takes three times as long"
    )
    args = parser.parse_args()
    path = args.traces / "azure" / "AzureLLMInferenceTrace_conv.csv"
    if args.trace_calls:
        profiler = cProfile.Profile()
        profiler.runcall(run_seconds, path, args.requests)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
        return
    started = min(start_seconds() for _ in range(3))
    print(f"start: {started:.2f} s")
    seconds, digest = run_seconds(path, args.requests)
    same = not args.twice or run_seconds(path, args.requests)[1] == digest
    if args.twice:
        print("byte-identical" if same else "the two differ")
    raise SystemExit(not (seconds <= BUDGET_S and started <= START_BUDGET_S and same))


if __name__ == "__main__":
    main()
