"""Host times of engines (`dovetail_lab.host_times`): what they were fitted to, and how far runs are
off that nobody fitted.

    python -m bench.lab.host_times                       # every run below, with the shipped times: a minute
    python -m bench.lab.host_times --fit vllm-0.25       # find the times of one engine anew: ten minutes

All runs are simulated by a roofline of the model and the data sheet, with `executor.engine`. Their
figures are copied from the sources named; the requests' lengths are those of the sources, or their
means.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.lab.checks import Figure, print_figures
from bench.lab.roofline_error import llama2
from bench.lab.vllm_scheduling import NAME, registry
from bench.shapes import SHAPES, config_of
from dovetail_lab import host_times
from dovetail_lab.host_times import HostTimes
from dovetail_lab.metrics import e2e_s, tpot_s, ttft_s
from dovetail_lab.records import RunResult
from dovetail_lab.simulate import replay
from dovetail_lab.workloads import load_workload

WITHIN = 0.15
Config = Mapping[str, Any]
QWEN3_600M = config_of(SHAPES["qwen3-0.6b"])
QWEN2_1500M = {
    "num_hidden_layers": 28,
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151_936,
}
QWEN3_4B = {
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151_936,
}
LLAMA3_8B = {**llama2(32, 4096, 32, 8, 14_336), "vocab_size": 128_256}
LLAMA3_1B = {**llama2(16, 2048, 32, 8, 8192), "vocab_size": 128_256, "head_dim": 64}


@dataclass(frozen=True, slots=True)
class Run:
    """A measured run. `measured`: name of a figure -> milliseconds, or a rate per second."""

    engine: str  # of `HOSTS`
    name: str
    source: str
    model: Config
    device: str
    workload: str
    measured: Mapping[str, float]
    fitted: bool = False
    ids: bool = False  # prompts are sent as token ids, and not tokenized
    max_num_seqs: int = 1024
    budget: int = 8192

    def figures(self, known: dict[str, dict[str, float]]) -> list[Figure]:
        """Return the figures. `known`: of runs that were simulated; this one is added."""
        key = repr((self.engine, self.model, self.device, self.workload, self.ids))
        found = known.setdefault(key, {}) or figures_of(self.simulated())
        known[key] = found
        return [
            Figure(name, found[name], measured, WITHIN) for name, measured in self.measured.items()
        ]

    def simulated(self) -> RunResult:
        host = host_times.HOSTS[self.engine]
        if self.ids:
            host = host.model_copy(update={"prompt_token_s": 0.0})
        config = {
            "scheduler": "fcfs" if self.engine == "dovetail" else NAME,
            "prefill_limit": 2 if self.engine == "dovetail" else None,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.budget,
            "max_model_len": 8192,
            "executor": {
                "name": "simulated",
                "engine": host,
                "step_time": {
                    "kind": "roofline",
                    "device": self.device,
                    "model": dict(self.model),
                },
            },
        }
        return replay(config, load_workload(self.workload), registry=registry())


def figures_of(result: RunResult) -> dict[str, float]:
    """Return all figures that sources state, by name: times in ms."""
    done = [record for record in result if record.completed]
    seconds = max(record.token_times_s[-1] for record in done) - min(
        record.arrival_s for record in done
    )
    found = {
        "requests/s": len(done) / seconds,
        "tokens/s": sum(record.output_tokens for record in done) / seconds,
    }
    for name, of_record in (("TTFT", ttft_s), ("TPOT", tpot_s), ("E2E", e2e_s)):
        times = 1e3 * np.array([of_record(record) for record in done])
        found[f"{name} mean, ms"] = float(np.mean(times))
        found[f"{name} p50, ms"] = float(np.median(times))
    return found


OWN = "docs/performance.md, Streamed from an H200"
NANO = "requests=256 arrivals=at_once prompt=uniform(100, 1024) output=uniform(100, 1024)"
RATE = "requests={} arrivals=poisson({}) prompt=512 output=128"
KVCACHED = "github.com/ovg-project/kvcached, pull request 331, H100_results.md, row"
IOG = "github.com/IOG-Foundation/llm-inference-benchmarks, results/vllm_200prompts"
CHATS = "requests=200 arrivals=poisson({}) prompt=208 output=215"


def own(engine: str, rate: int, ttft: float, tpot: float) -> Run:
    return Run(
        engine,
        f"H200, Qwen3-0.6B, {rate} requests/s",
        OWN,
        QWEN3_600M,
        "h200",
        RATE.format(min(12 * rate, 300), rate),
        {"TTFT p50, ms": ttft, "TPOT p50, ms": tpot},
        fitted=True,
        ids=True,
        max_num_seqs=256,
    )


def nano(engine: str, date: str, rate: float, ttft: float | None = None) -> Run:
    return Run(
        engine,
        f"H200, Qwen3-0.6B, nano-vllm's workload, {date}",
        OWN,
        QWEN3_600M,
        "h200",
        NANO,
        {"tokens/s": rate} | ({} if ttft is None else {"TTFT p50, ms": ttft}),
        fitted=True,
        ids=True,
        max_num_seqs=256,
    )


def iog(name: str, model: Config, rate: int, ttft: float, tpot: float, fitted: bool) -> Run:
    return Run(
        "vllm-0.8",
        f"H100 PCIe, {name}, {rate} requests/s",
        f"{IOG}{rate}qps",
        model,
        "h100-pcie",
        CHATS.format(rate),
        {"TTFT mean, ms": ttft, "TPOT mean, ms": tpot},
        fitted,
        budget=2048,
    )


def alone(prompt: int, output: int, ttft: float, tpot: float) -> Run:
    return Run(
        "vllm-0.8",
        f"A100, Qwen3-0.6B, one at a time, {prompt} tokens in and {output} out",
        "github.com/tenstorrent/tt-inference-server, issue 340",
        QWEN3_600M,
        "a100-80gb",
        f"requests=8 arrivals=poisson(0.2) prompt={prompt} output={output}",
        {"TTFT mean, ms": ttft, "TPOT mean, ms": tpot},
        fitted=True,
        budget=2048,
    )


RUNS = (
    own("dovetail", 4, 5.4, 0.72),
    own("dovetail", 16, 4.7, 0.80),
    own("dovetail", 60, 7.6, 1.18),
    nano("dovetail", "2026-11-23", 27_162, 439),
    nano("dovetail", "2026-11-28", 26_488),
    own("vllm-0.25", 4, 12.8, 1.64),
    own("vllm-0.25", 16, 11.9, 1.72),
    own("vllm-0.25", 60, 25.0, 3.30),
    nano("vllm-0.25", "2026-11-23", 22_580, 333),
    nano("vllm-0.25", "2026-11-28", 17_795),
    Run(
        "vllm-0.25",
        "H100, Qwen3-0.6B, vLLM 0.19.0, all at once",
        f"{KVCACHED} A",
        QWEN3_600M,
        "h100-80gb",
        "requests=500 arrivals=at_once prompt=512 output=128",
        {"requests/s": 94.91, "TTFT mean, ms": 2905, "TPOT mean, ms": 5.45},
    ),
    Run(
        "vllm-0.25",
        "H100, Qwen3-0.6B, vLLM 0.19.0, 16 requests/s",
        f"{KVCACHED} F",
        QWEN3_600M,
        "h100-80gb",
        RATE.format(500, 16),
        {"requests/s": 15.87, "TTFT mean, ms": 38.9, "TPOT mean, ms": 2.39},
    ),
    alone(128, 128, 12.4, 4.2),
    alone(1024, 128, 21.0, 4.4),
    Run(
        "vllm-0.8",
        "A100, Llama-3.2-1B, 400 streams",
        "github.com/vllm-project/vllm, pull request 12287, before",
        LLAMA3_1B,
        "a100-80gb",
        "requests=400 arrivals=at_once prompt=225 output=202",
        {"tokens/s": 12_850},
        fitted=True,
        max_num_seqs=256,
    ),
    iog("Qwen2-1.5B", QWEN2_1500M, 1, 10.93, 4.08, True),
    iog("Qwen2-1.5B", QWEN2_1500M, 8, 11.13, 4.28, True),
    iog("Qwen2-1.5B", QWEN2_1500M, 16, 11.85, 4.39, False),
    iog("Qwen2-1.5B", QWEN2_1500M, 32, 21.03, 5.40, True),
    iog("Llama-3-8B", LLAMA3_8B, 1, 20.49, 10.65, False),
    iog("Llama-3-8B", LLAMA3_8B, 8, 22.50, 11.70, False),
    iog("Llama-3-8B", LLAMA3_8B, 16, 24.15, 12.24, False),
)
FREE = ("step_s", "row_s", "joining_s", "request_s", "prompt_token_s", "token_s")
# prompts of its runs are ids, or its core was calibrated
GIVEN: Mapping[str, tuple[str, ...]] = {
    "vllm-0.25": ("prompt_token_s",),
    "dovetail": ("step_s", "row_s", "joining_s", "prompt_token_s"),
}


def fit(engine: str, runs: Sequence[Run], rounds: int) -> HostTimes:
    """Return the times with the smallest sum of a robust loss of log(simulated / measured) over the
    figures of `runs`."""
    from scipy.optimize import least_squares  # type: ignore[import-untyped]

    first = host_times.HOSTS[engine]
    free = [name for name in FREE if name not in GIVEN.get(engine, ())]

    def with_times(logarithms: Any) -> HostTimes:
        return first.model_copy(
            update={
                name: float(np.exp(value)) for name, value in zip(free, logarithms, strict=True)
            }
        )

    def residuals(logarithms: Any) -> list[float]:
        host_times.HOSTS = {**host_times.HOSTS, engine: with_times(logarithms)}
        known: dict[str, dict[str, float]] = {}
        figures = [figure for run in runs for figure in run.figures(known)]
        found = [float(np.log1p(figure.difference)) for figure in figures]
        mean = np.abs(found).mean()
        print(f"{mean:.4f}", *(f"{value:.3g}" for value in np.exp(logarithms)), flush=True)
        return found

    start = np.log([max(getattr(first, name), 1e-6) for name in free])
    best = least_squares(
        residuals, start, diff_step=0.02, loss="soft_l1", f_scale=0.1, max_nfev=rounds
    )
    return with_times(best.x)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", help="runs of this engine only")
    parser.add_argument("--fit", metavar="ENGINE", help="find its times anew, and use them")
    parser.add_argument("--rounds", type=int, default=5, help="of a fit")
    args = parser.parse_args()
    runs = [run for run in RUNS if run.engine == (args.fit or args.engine or run.engine)]
    if args.fit:
        found = fit(args.fit, [run for run in runs if run.fitted], args.rounds)
        host_times.HOSTS = {**host_times.HOSTS, args.fit: found}
        print(found)
    known: dict[str, dict[str, float]] = {}
    for run in runs:
        print_figures(
            f"{run.engine}: {run.name}, {'fitted on' if run.fitted else 'predicted'} ({run.source})",
            run.figures(known),
        )


if __name__ == "__main__":
    main()
