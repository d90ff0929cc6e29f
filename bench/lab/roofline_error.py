"""Error of the roofline model on measured step times.

    python -m bench.lab.roofline_error --traces DIR             # half a minute
    python -m bench.lab.roofline_error --traces DIR --fit       # find its constants anew, on `FITTED` alone: two minutes

Its constants (`bandwidth_share`, `flops_share`, `attention_share`, `layer_s`) were found on
`FITTED` as `bench/lab/own_gpu.py` measured them on 2026-11-22, before the profiles that ship now;
everything else here is a prediction. Engines of 2023 launch their kernels one by one from Python,
and are bound by that: for them the table has a second line, with `launched_layer_s` as the quickest
measured decode of the same engine, model and number of GPUs has it.

Compared are steps of decodes alone, by rows and context, and of prompts alone, or beside decodes
where a profile knows them.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.lab.checks import arguments
from bench.lab.vllm_run import MODELS
from bench.lab.vtc_served import single_batches
from bench.shapes import SHAPES, config_of
from dovetail_lab.roofline import RooflineStepTime
from dovetail_lab.step_profile import StepTimeProfile
from dovetail_lab.step_time import StepShape

Config = Mapping[str, Any]
FITTED = ("h200-qwen3-0.6b", "h200-qwen3-8b")
CONSTANTS = ("bandwidth_share", "flops_share", "attention_share", "layer_s")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (256, 512, 1024, 2048, 4096)
MOST_CONTEXT = 131_072
PROMPTS = (64, 128, 256, 512, 1024, 2048)
CHUNKS = ((512, 512), (512, 1536), (512, 3584))  # (tokens, those before)
JOINED = ((8, 512), (32, 512), (64, 1024))  # (rows, context) of decodes beside a prompt


def opt(layers: int, hidden: int, heads: int) -> Config:
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
    }
    return {"model_type": "opt", "vocab_size": 50_272, **sizes}


def llama2(layers: int, hidden: int, heads: int, kv_heads: int, mlp: int) -> Config:
    of_attention = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        **of_attention,
        "intermediate_size": mlp,
        "vocab_size": 32_000,
    }


PROFILES: Mapping[str, tuple[Config, str, int]] = {  # shipped profile -> config.json, device, GPUs
    **{
        f"h200-{name}": (config_of(SHAPES[name]), "h200", 1)
        for name in ("qwen3-0.6b", "qwen3-8b", "llama-3.2-1b", "llama-3.1-8b")
    },
    "rtxpro6000-llama-3.1-8b": (MODELS["meta-llama/Llama-3.1-8B"], "rtx-pro-6000", 1),
    "rtxpro6000x2-qwen3-32b": (MODELS["Qwen/Qwen3-32B"], "rtx-pro-6000", 2),
}
LLAMA_2_7B = llama2(32, 4096, 32, 32, 11_008)
DISTSERVE = {"facebook/opt-13b": opt(40, 5120, 40), "facebook/opt-66b": opt(64, 9216, 72)}
SPLITWISE = {
    "llama2-70b": llama2(80, 8192, 64, 8, 28_672),
    "bloom-176b": {
        "model_type": "bloom",
        "n_layer": 70,
        "n_embed": 14_336,
        "n_head": 112,
        "vocab_size": 250_880,
    },
}


@dataclass(frozen=True, slots=True)
class Source:
    """Steps of one engine, model and machine. `launches`: without recorded graphs."""

    name: str
    model: Config
    device: str
    gpus: int
    steps: Sequence[tuple[StepShape, float]]  # measured seconds
    launches: bool = False

    def errors(self, **constants: float) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return (predicted - measured) / measured of decodes alone, and of the other steps."""
        model = RooflineStepTime(
            model=dict(self.model), device=self.device, gpus=self.gpus, **constants
        )  # type: ignore[arg-type]
        found: dict[bool, list[float]] = {False: [], True: []}
        for shape, seconds in self.steps:
            found[shape.prefill_rows > 0].append(model.seconds(shape) / seconds - 1.0)
        return np.array(found[False]), np.array(found[True])

    @property
    def quickest_layer_s(self) -> float:
        layers = RooflineStepTime(
            model=dict(self.model), device=self.device, gpus=self.gpus
        ).sizes.layers
        return min(seconds for shape, seconds in self.steps if not shape.prefill_rows) / layers


def shape(*rows: tuple[int, int]) -> StepShape:
    """Make the shape of rows that compute (new, after so many) tokens."""
    new, had = np.array(rows, np.int64).T
    return StepShape.of(new, had)


def decodes(rows: int, context: int) -> StepShape:
    return shape(*[(1, context)] * rows)


def of_profiles() -> Iterator[Source]:
    shapes = [
        decodes(rows, context)
        for rows in ROWS
        for context in CONTEXTS
        if rows * context <= MOST_CONTEXT
    ]
    shapes += [shape((tokens, 0)) for tokens in PROMPTS] + [shape(chunk) for chunk in CHUNKS]
    shapes += [
        shape((tokens, 0), *[(1, context)] * rows)
        for tokens in PROMPTS[::2]
        for rows, context in JOINED
    ]
    for name, (model, device, gpus) in PROFILES.items():
        measured = StepTimeProfile.load(name).make()
        yield Source(name, model, device, gpus, [(one, measured.seconds(one)) for one in shapes])


def of_vtc(traces: Path) -> Iterator[Source]:
    batches = single_batches(traces / "vtc_arena" / "cost_profile_a10g_llama7b.json")
    # of decodes the middle one, and the mean
    steps = [(one.shapes[len(one.shapes) // 2], one.seconds / len(one.shapes)) for one in batches]
    yield Source("A10G Llama-2-7B, S-LoRA", LLAMA_2_7B, "a10g", 1, steps)


def of_distserve(traces: Path) -> Iterator[Source]:
    """Their fits, in milliseconds: of prompts over tokens and their squares, of decodes over
    context and rows."""
    for engine in ("distserve", "vllm"):
        fits = json.loads(
            (traces / "calibration" / f"distserve_profiler-a100-80g.{engine}.json").read_text()
        )
        for model, config in DISTSERVE.items():
            for gpus, fit in fits[model].items():
                base, of_tokens, of_squares = fit["prefill"]
                steps = [
                    (shape((n, 0)), 1e-3 * (base + of_tokens * n + of_squares * n * n))
                    for n in PROMPTS
                ]
                for rows in ROWS:
                    few = rows < fit["decoding_large_small_bs_threshold"]
                    base, of_context, of_rows = fit[
                        "decoding_smallbs" if few else "decoding_largebs"
                    ]
                    steps.append(
                        (
                            decodes(rows, 512),
                            1e-3 * (base + of_context * rows * 512 + of_rows * rows),
                        )
                    )
                if config["num_attention_heads"] % int(gpus) == 0:
                    yield Source(
                        f"A100 x {gpus} {model.partition('/')[2]}, {engine} 2023",
                        config,
                        "a100-80gb",
                        int(gpus),
                        steps,
                        launches=True,
                    )


def of_splitwise(traces: Path) -> Iterator[Source]:
    """Medians of repetitions: prompts of one request, since those of more were cut into several
    steps, and decodes of up to 32."""
    cells: dict[tuple[str, str, str], dict[tuple[int, int], list[tuple[float, float]]]] = (
        defaultdict(lambda: defaultdict(list))
    )
    with (traces / "calibration" / "splitwise_perf_model.csv").open() as file:
        for row in csv.DictReader(file):
            prompt = int(row["prompt_size"])
            batch = int(row["batch_size"])
            if (
                row["token_size"] == "128" and batch <= 32 and not row["hardware"].endswith("pcap")
            ):  # not those with capped power
                times = 1e-3 * float(row["prompt_time"]), 1e-3 * float(row["token_time"])
                cells[row["model"], row["hardware"], row["tensor_parallel"]][prompt, batch].append(
                    times
                )
    for (model, device, gpus), measured in cells.items():
        steps = []
        for (prompt, batch), repetitions in measured.items():
            prompt_s, token_s = np.median(np.array(repetitions), axis=0)
            steps.append((decodes(batch, prompt + 64), float(token_s)))
            if batch == 1:
                steps.append((shape((prompt, 0)), float(prompt_s)))
        name = f"{device.partition('-')[0].upper()} x {gpus} {model}, Splitwise 2023"
        yield Source(name, SPLITWISE[model], device, int(gpus), steps, launches=True)


def fitted(sources: Sequence[Source]) -> dict[str, float]:
    """Return the constants with the smallest mean of |log(predicted / measured)| over `FITTED`,
    each profile counting as much."""
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    chosen = [source for source in sources if source.name in FITTED]
    defaults = [RooflineStepTime.model_fields[name].default for name in CONSTANTS]

    def constants(logarithms: Any) -> dict[str, float]:
        return {
            name: min(float(np.exp(value)), 1.0)
            for name, value in zip(CONSTANTS, logarithms, strict=True)
        }

    def cost(logarithms: Any) -> float:
        errors = (np.concatenate(source.errors(**constants(logarithms))) for source in chosen)
        return float(np.mean([np.abs(np.log1p(own)).mean() for own in errors]))

    return constants(
        minimize(cost, np.log(defaults), method="Nelder-Mead", options={"maxfev": 250}).x
    )


def line(name: str, errors: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]) -> str:
    cells = (f"{np.abs(own).mean():7.1%} ({own.mean():+7.1%})" for own in errors)
    return f"{name:46}" + "".join(f"{cell:>22}" for cell in cells)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--fit", action="store_true", help="find the constants anew, and use them")
    args = parser.parse_args()
    sources = [
        *of_profiles(),
        *of_vtc(args.traces),
        *of_distserve(args.traces),
        *of_splitwise(args.traces),
    ]
    constants = fitted(sources) if args.fit else {}
    if constants:
        print(", ".join(f"{name} {value:.3g}" for name, value in constants.items()))
    print(f"{'mean of |off by| (and of off by)':46}{'decodes':>22}{'steps with prompts':>22}")
    for source in sources:
        print(
            line(
                source.name + (", fitted on" if constants and source.name in FITTED else ""),
                source.errors(**constants),
            )
        )
        if source.launches:
            print(
                line(
                    f"  launched in {1e3 * source.quickest_layer_s:.2f} ms a layer",
                    source.errors(**constants, launched_layer_s=source.quickest_layer_s),
                )
            )


if __name__ == "__main__":
    main()
