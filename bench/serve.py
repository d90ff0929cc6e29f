"""Throughput and latency of an OpenAI-compatible server under load, over `/v1/completions`,
streamed, with prompts of token ids (or `--chat`).

    python -m bench.serve --url http://127.0.0.1:8000 --workload nano --concurrency 256 --processes 4 --json out.json    # closed loop
    python -m bench.serve --url http://127.0.0.1:8000 --prompt 512 --output 128 --rate 4 16 60 --seconds 30              # Poisson arrivals
    python -m bench.serve --url http://127.0.0.1:8000 --trace AzureLLMInferenceTrace_conv.csv --requests 1000            # at the trace's own times

Metrics are defined as by vLLM's `bench serve`. They are of completed requests; an *event* is a
server-sent event with a choice, and may hold several tokens; times of a request begin when its
first byte is sent, on a connection that is open (`late`: how long after it was due).

* TTFT: until the first event. E2E: until the last one.
* ITL: each time between two events of an answer. TPOT: (E2E - TTFT) / (output tokens - 1), one
  value a request, of those with 2 tokens or more.
* Tokens are those of `usage`. Request throughput is completed requests by the duration, from the
  start of the run to its last event; output throughput is output tokens by it, and total throughput
  prompt and output tokens.

Answers have the workload's lengths (`ignore_eos`; an answer that is shorter all the same is told
of). Clients are processes of their own: the server should have other cores. What they cost is told,
too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np

from bench.streams import COMPLETED, HUNG_UP, Client, Outcome, Plan, Record
from bench.workloads import WORKLOADS, Workload
from dovetail_lab.traces import load_trace

START_S = 120.0  # until all client processes must be ready
_barrier: Barrier | None = None  # of a client process


def run(plan: Plan) -> list[Record]:
    """Run a plan's processes, and return their results."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(plan.processes)
    with ProcessPoolExecutor(
        plan.processes, context, initializer=_set_barrier, initargs=(barrier,)
    ) as pool:
        return list(pool.map(_run_process, [plan] * plan.processes, range(plan.processes)))


def _set_barrier(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def _run_process(plan: Plan, process: int) -> Record:
    import uvloop

    assert _barrier is not None
    wait = _barrier.wait
    try:
        record: Record = uvloop.run(Client(plan, process).run(lambda: wait(START_S)))
        return record
    except BaseException:
        _barrier.abort()  # nobody waits for this process
        raise


def run_here(plan: Plan) -> list[Record]:
    """Run a single-process plan in this process."""
    return [asyncio.run(Client(replace(plan, processes=1), 0).run(lambda: None))]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Figures of one metric, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Quantiles | None:
        values = 1e3 * np.fromiter(seconds, float)
        if not len(values):
            return None
        return cls(
            float(values.mean()),
            *(float(np.percentile(values, share)) for share in (50, 90, 99, 100)),
        )


def metrics(records: list[Record], wanted_tokens: int | None = None) -> dict[str, Any]:
    """Return the metrics of a run as plain values. `wanted_tokens`: of all answers, if none is
    short."""
    outcomes = [outcome for record in records for outcome in record.outcomes]
    done = [outcome for outcome in outcomes if outcome.kind == COMPLETED]
    failures: Counter[str] = sum((record.failures for record in records), Counter())
    began = min(record.began for record in records)
    ended = max((outcome.last for outcome in done), default=began)
    duration = max(ended - began, 1e-9)
    prompt_tokens = sum(o.prompt_tokens for o in done)
    output_tokens = sum(o.output_tokens for o in done)
    events = sum(record.events for record in records)
    cpu_s = sum(record.cpu_s for record in records)
    return {
        "requests": len(outcomes),
        "completed": len(done),
        "hung_up": sum(outcome.kind == HUNG_UP for outcome in outcomes),
        "failures": dict(failures),
        "examples": {kind: text for record in records for kind, text in record.examples.items()},
        "duration_s": duration,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(o.cached_tokens for o in done),
        "output_tokens": output_tokens,
        "missing_tokens": None if wanted_tokens is None else wanted_tokens - output_tokens,
        "requests_per_s": len(done) / duration,
        "output_tok_s": output_tokens / duration,
        "total_tok_s": (prompt_tokens + output_tokens) / duration,
        "tokens_per_event": output_tokens
        / max(1, sum(1 for _ in done) + sum(len(record.gaps) for record in records)),
        "ttft_ms": _plain(Quantiles.of(o.first - o.sent for o in done)),
        "tpot_ms": _plain(Quantiles.of(map(tpot, (o for o in done if o.output_tokens > 1)))),
        "itl_ms": _plain(Quantiles.of(gap for record in records for gap in record.gaps)),
        "e2e_ms": _plain(Quantiles.of(o.last - o.sent for o in done)),
        "late_ms": _plain(Quantiles.of(o.late for o in done)),
        "client_cpu_us_per_event": 1e6 * cpu_s / max(1, events),
        "client_cpu_share": cpu_s / duration / len(records),
    }


def tpot(outcome: Outcome) -> float:
    return (outcome.last - outcome.first) / (outcome.output_tokens - 1)


def _plain(quantiles: Quantiles | None) -> dict[str, float] | None:
    return (
        None
        if quantiles is None
        else {name: getattr(quantiles, name) for name in Quantiles.__slots__}
    )


def show(row: dict[str, Any]) -> None:
    """Print a run's metrics."""
    hung_up = f", {row['hung_up']} hung up by the client" if row["hung_up"] else ""
    print(
        f"{row['load']}: {row['completed']} of {row['requests']} requests completed{hung_up} in "
        f"{row['duration_s']:.2f} s"
    )
    for kind, number in row["failures"].items():
        print(
            f"  failed: {number} x {kind}: {' '.join(row['examples'].get(kind, '').split())[:300]}"
        )
    if row["missing_tokens"]:
        print(f"  answers are {row['missing_tokens']} tokens shorter than asked for")
    print(
        f"  output {row['output_tok_s']:,.0f} tok/s, total {row['total_tok_s']:,.0f} tok/s, "
        f"{row['requests_per_s']:.2f} requests/s"
    )
    print(
        f"  prompt tokens {row['prompt_tokens']:,} ({row['cached_tokens']:,} cached), output "
        f"{row['output_tokens']:,}"
    )
    print(f"  {'':8}" + "".join(f"{name:>11}" for name in Quantiles.__slots__))
    for key in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "late_ms"):
        if (told := row[key]) is not None and (key != "late_ms" or told["max"]):
            print(
                f"  {key[:-3].upper():4} ms " + "".join(f"{value:11.2f}" for value in told.values())
            )
    print(
        f"  clients: {row['client_cpu_us_per_event']:.1f} us of CPU an event, "
        f"{row['tokens_per_event']:.2f} tokens an event, "
        f"{100 * row['client_cpu_share']:.0f} % of a core each",
        flush=True,
    )


def model_of(url: str, api_key: str | None) -> str:
    """Return the name of the first model that the server serves."""
    request = Request(
        f"{url.rstrip('/')}/v1/models",
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
    )
    with urlopen(request, timeout=30) as answer:
        name: str = json.load(answer)["data"][0]["id"]
    return name


def poisson(rate: float, requests: int, seed: int) -> tuple[float, ...]:
    """Return the times of `count` arrivals, with `rate` per second on average; the first is
    immediate."""
    rng = random.Random(seed)
    times = [0.0]
    while len(times) < requests:
        times.append(times[-1] + rng.expovariate(rate))
    return tuple(times[:requests])


def drawn_workload(prompt: int, output: int, requests: int, seed: int, max_id: int) -> Workload:
    """Return requests of about this many tokens: uniform from half to one and a half times that, as
    in `bench/latency.py`."""
    rng = random.Random(seed)
    means = (prompt, output)
    lens = tuple(
        tuple(max(1, rng.randint(mean // 2, 3 * mean // 2)) for mean in means)
        for _ in range(requests)
    )
    return Workload("any", lens, max_id=max_id)  # type: ignore[arg-type]


def plans_of(args: argparse.Namespace) -> list[tuple[str, Plan]]:
    """Return the requested runs: (name, plan)."""
    base = Plan(
        url=args.url,
        model=args.model or model_of(args.url, args.api_key),
        work=None,
        processes=args.processes,
        disconnects=args.disconnects,
        checked=args.check_toy,
        chat=args.chat,
        params={"temperature": args.temperature, **params_of(args.param)},
        api_key=args.api_key,
        timeout_s=args.timeout,
        seed=args.seed,
    )
    if args.trace:
        trace = load_trace(args.trace).requests[: args.requests]
        arrivals = tuple((one.arrival_time - trace[0].arrival_time) / args.speed for one in trace)
        return [
            (
                f"trace {Path(args.trace).name}",
                replace(base, trace=trace, arrivals=arrivals, requests=len(trace)),
            )
        ]
    if args.workload is None:
        work = drawn_workload(
            args.prompt, args.output, args.requests or 10_000, args.seed, args.max_id
        )
    else:
        work = WORKLOADS[args.workload]
        work = replace(work, max_id=min(work.max_id, args.max_id))
    name = args.workload or f"{args.prompt} + {args.output} tokens"
    plans = []
    for rate in args.rate:
        requests = args.requests or (
            len(work.lens) if args.workload else max(1, int(rate * args.seconds))
        )
        plan = replace(
            base, work=work, requests=requests, arrivals=poisson(rate, requests, args.seed)
        )
        plans.append((f"{name}, {rate:g} requests a second", plan))
    for concurrency in args.concurrency:
        requests = args.requests or (len(work.lens) if args.workload and not args.seconds else None)
        plan = replace(
            base, work=work, requests=requests, concurrency=concurrency, seconds=args.seconds
        )
        plans.append((f"{name}, {concurrency} streams", plan))
    return plans


def wanted_tokens(plan: Plan) -> int | None:
    """Return the output tokens of all requests, or None if their number isn't fixed."""
    if plan.requests is None or plan.disconnects:
        return None
    if plan.work is None:
        return sum(one.output_tokens for one in plan.trace)
    lens = plan.work.lens
    return sum(lens[index % len(lens)][1] for index in range(plan.requests))


def params_of(texts: list[str]) -> dict[str, Any]:
    """Return the `KEY=VALUE`s of `--param`. Exits on a syntax error."""
    from dovetail import EngineConfig

    for text in texts:
        if not text.partition("=")[1]:
            raise SystemExit(f"--param {text}: expected KEY=VALUE, as in --param top_p=0.9")
    return EngineConfig.read_settings(texts)


def warm_up(plan: Plan, requests: int) -> None:
    """Send some requests one after the other, so that one-time work of the server is done. Exits if
    one fails."""
    if not requests:
        return
    warm = replace(
        plan,
        requests=requests,
        arrivals=(),
        concurrency=1,
        processes=1,
        disconnects=0.0,
        seed=plan.seed + 1,
    )
    (record,) = run_here(
        warm if warm.work is not None else replace(warm, requests=min(requests, len(warm.trace)))
    )
    if record.failures:
        kind, text = next(iter(record.examples.items()))
        raise SystemExit(f"{plan.url}: a request before the run failed: {kind}: {text}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="URL of the server, without /v1"
    )
    parser.add_argument("--model", help="name of the model; default: the server's first")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"))
    what = parser.add_argument_group("requests")
    what.add_argument("--workload", choices=WORKLOADS)
    what.add_argument(
        "--trace", metavar="FILE", help="a trace in any format that `dovetail lab` reads"
    )
    what.add_argument(
        "--speed", type=float, default=1.0, help="speed of a trace: 2 sends it in half the time"
    )
    what.add_argument(
        "--prompt", type=int, default=512, help="tokens on average, without a workload"
    )
    what.add_argument(
        "--output", type=int, default=128, help="tokens on average, without a workload"
    )
    what.add_argument(
        "--requests",
        type=int,
        help="number of requests; default: those of the workload, or of --seconds",
    )
    what.add_argument("--max-id", type=int, default=10_000, help="largest token id of a prompt")
    what.add_argument(
        "--chat",
        action="store_true",
        help="/v1/chat/completions, with messages of about one letter per prompt token",
    )
    what.add_argument("--temperature", type=float, default=0.6)
    what.add_argument(
        "--param",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a further field of each request",
    )
    how = parser.add_argument_group("load")
    how.add_argument(
        "--concurrency",
        nargs="+",
        type=int,
        default=[],
        help="closed loop: number of concurrent streams, a run each",
    )
    how.add_argument(
        "--rate",
        nargs="+",
        type=float,
        default=[],
        help="Poisson arrivals: requests per second, a run each",
    )
    how.add_argument(
        "--seconds",
        type=float,
        default=0.0,
        help="duration of arrivals, unless their number is given",
    )
    how.add_argument("--processes", type=int, default=1, help="of clients")
    how.add_argument(
        "--disconnects",
        type=float,
        default=0.0,
        help="share of requests whose client disconnects early",
    )
    how.add_argument("--timeout", type=float, default=600.0, help="timeout per request in seconds")
    how.add_argument("--warm-up", type=int, default=1, help="requests before the run")
    how.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--check-toy",
        action="store_true",
        help="the server runs `bench/toy.py`: find lost and duplicated tokens",
    )
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if not (args.trace or args.rate or args.concurrency):
        parser.error("give --concurrency, --rate or --trace")
    if args.trace and (args.rate or args.concurrency or args.workload):
        parser.error("--trace has requests and times of its own")
    if not args.trace and not args.workload and not args.requests and not args.seconds:
        parser.error("give --requests or --seconds, or a --workload")
    return args


def main() -> None:
    args = parse()
    rows = []
    for name, plan in plans_of(args):
        warm_up(plan, args.warm_up)
        row = {
            "load": name,
            "url": args.url,
            "at": time.strftime("%Y-%m-%d %H:%M:%S"),
            "processes": plan.processes,
        }
        rows.append({**row, **metrics(run(plan), wanted_tokens(plan))})
        show(rows[-1])
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=2))
    raise SystemExit(1 if any(row["failures"] for row in rows) else 0)


if __name__ == "__main__":
    main()
