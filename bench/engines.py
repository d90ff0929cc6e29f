"""Engines that `bench/throughput.py` can compare in one run: Dovetail, and other importable ones.

Each adapter says its engine's own words for the same work: random weights in the model's true
shape, bfloat16, the workload's lengths whatever the tokens, and as many requests at once as the
workload asks for; everything else is the engine's default.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench.power import PowerWatch
from bench.routing import uniform_routing
from bench.shapes import SHAPES, write_weights
from bench.workloads import Workload
from dovetail import EngineConfig

Generate = Callable[[list[list[int]]], int]  # prompts -> how many tokens were generated


@dataclass
class Measured:
    seconds: list[float]
    start_s: float  # until the engine was ready
    details: dict[str, Any] = field(default_factory=dict)


def settings_of(texts: list[str]) -> dict[str, Any]:
    """`KEY=VALUE`s, as of the command line's `--set`. Ends the program if one is something else."""
    for text in texts:
        if not text.partition("=")[1]:
            raise SystemExit(f"--set {text}: expected KEY=VALUE, as in --set max_num_seqs=64")
    return EngineConfig.read_settings(texts)


def params_of(texts: list[str]) -> dict[str, Any]:
    """The same of sampling parameters, of `--param`."""
    for text in texts:
        if not text.partition("=")[1]:
            raise SystemExit(
                f"--param {text}: expected KEY=VALUE, as in --param repetition_penalty=1.05"
            )
    return EngineConfig.read_settings(texts)


def warm_up(work: Workload, generate: Generate) -> None:
    generate(work.prompts(seed=100)[: work.warm])


def timed(work: Workload, generate: Generate) -> tuple[list[float], dict[str, float]]:
    """Seconds of each run, with fresh prompts for each, or a prefix cache would help; and what the
    GPU's clock and power were meanwhile."""
    times = []
    with PowerWatch() as power:
        for run in range(work.runs):
            prompts = work.prompts(seed=run)
            torch.cuda.synchronize()
            begun = time.perf_counter()
            produced = generate(prompts)
            times.append(time.perf_counter() - begun)
            if produced != work.output_tokens:
                raise SystemExit(f"{produced} tokens were generated, not {work.output_tokens}")
    return times, power.summary()


def generator(api: Any, llm: Any, work: Workload) -> Generate:
    """Generate with an `LLM` of `api`, a module with vLLM's names: `dovetail`, or vLLM's own."""
    samples = work.params.get("n", 1)
    params = [
        api.SamplingParams(
            temperature=work.temperature, ignore_eos=True, max_tokens=out, **work.params
        )
        for _, out in work.lens
    ]

    def generate(prompts: list[list[int]]) -> int:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            params[: len(prompts)],
            use_tqdm=False,
        )
        tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        return tokens // samples

    return generate


def run_dovetail(
    work: Workload, directory: Path, overrides: dict[str, Any], component: str | None = None
) -> Measured:
    import dovetail

    model: Any = (
        directory if component is None else {"path": str(directory), "component": component}
    )
    begun = time.perf_counter()
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_num_seqs": work.seqs,
        "max_model_len": work.longest,
    }
    several = overrides.get("executor.size", 1) > 1  # whose processes have the model's own router
    shape = replace(SHAPES[work.shape], experts=0) if several else SHAPES[work.shape]
    with uniform_routing(shape) as routing, dovetail.LLM(model, **{**settings, **overrides}) as llm:
        started = time.perf_counter() - begun
        generate = generator(dovetail, llm, work)
        warm_up(work, generate)
        before = llm.engine.stats()
        times, power = timed(work, generate)
        stats = llm.engine.stats()
        steps = stats.steps - before.steps
        details = {
            **llm.engine.capacity.details,
            "steps": steps // work.runs,
            "device_ms_a_step": 1e3 * (stats.device_s - before.device_s) / steps,
            "core_ms_a_step": 1e3 * (stats.core_s - before.core_s) / steps,
            "wall_ms_a_step": 1e3 * sum(times) / steps,
            "gap_ms_a_step": 1e3 * (sum(times) - stats.device_s + before.device_s) / steps,
            "device_busy_share": (stats.device_s - before.device_s) / sum(times),
            "preemptions": stats.preemptions - before.preemptions,
            **routing.details(work.seqs),
            **power,
        }
    return Measured(times, started, details)


def run_dovetail_transformers(
    work: Workload, directory: Path, overrides: dict[str, Any]
) -> Measured:
    """Dovetail with transformers' module code instead of the native model."""
    return run_dovetail(work, directory, overrides, "transformers")


def run_nano_vllm(work: Workload, directory: Path, overrides: dict[str, Any]) -> Measured:
    """It has no random weights of its own: without a checkpoint, it computes with uninitialized
    memory."""
    from nanovllm import LLM, SamplingParams

    if not list(directory.glob("*.safetensors")):
        write_weights(directory)
    begun = time.perf_counter()
    llm = LLM(
        str(directory), enforce_eager=False, max_model_len=work.longest, max_num_seqs=work.seqs
    )
    started = time.perf_counter() - begun
    params = [
        SamplingParams(temperature=work.temperature, ignore_eos=True, max_tokens=out)
        for _, out in work.lens
    ]

    def generate(prompts: list[list[int]]) -> int:
        return sum(
            len(output["token_ids"])
            for output in llm.generate(prompts, params[: len(prompts)], use_tqdm=False)
        )

    warm_up(work, generate)
    times, power = timed(work, generate)
    llm.exit()
    # it asked to be ended once more when the program ends, and would fail
    atexit.unregister(llm.exit)
    return Measured(times, started, {"version": version_of("nano-vllm"), **power})


def run_vllm(work: Workload, directory: Path, overrides: dict[str, Any]) -> Measured:
    import vllm

    begun = time.perf_counter()
    llm = vllm.LLM(
        str(directory),
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=work.longest,
        max_num_seqs=work.seqs,
        tensor_parallel_size=overrides.get("executor.size", 1),
        quantization=overrides.get("quantization"),
    )
    started = time.perf_counter() - begun
    generate = generator(vllm, llm, work)
    warm_up(work, generate)
    times, power = timed(work, generate)
    return Measured(times, started, {"version": version_of("vllm"), **power})


def run_transformers(work: Workload, directory: Path, overrides: dict[str, Any]) -> Measured:
    """Its continuous batching, with its default attention; tokens are decoded to text at the
    end."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    begun = time.perf_counter()
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(directory), dtype=torch.bfloat16
        ).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    sampling: dict[str, Any] = (
        {"do_sample": True, "temperature": work.temperature, "top_k": 0}
        if work.temperature
        else {"do_sample": False}
    )
    config = GenerationConfig(
        max_new_tokens=work.longest, eos_token_id=-1, pad_token_id=0, **sampling
    )
    with model.continuous_batching_context_manager(
        generation_config=config
    ) as manager:  # its thread has an inference mode of its own
        started = time.perf_counter() - begun

        def generate(prompts: list[list[int]]) -> int:
            for prompt, (_, out) in zip(prompts, work.lens[: len(prompts)], strict=True):
                manager.add_request(prompt, max_new_tokens=out)
            outputs: list[list[int]] = []
            while len(outputs) < len(prompts):
                result = manager.get_result(timeout=60)
                if result is None or result.error is not None:
                    raise SystemExit(
                        f"transformers: "
                        f"{'nothing came for a minute' if result is None else result.error}"
                    )
                if result.is_finished():
                    outputs.append(result.generated_tokens)
            tokenizer.batch_decode(outputs)
            return sum(map(len, outputs))

        warm_up(work, generate)
        times, power = timed(work, generate)
    return Measured(times, started, {"version": version_of("transformers"), **power})


def version_of(distribution: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"


TAKE_PARAMS = ("dovetail", "dovetail-transformers", "vllm")
ENGINES = {
    "dovetail": run_dovetail,
    "dovetail-transformers": run_dovetail_transformers,
    "nano-vllm": run_nano_vllm,
    "vllm": run_vllm,
    "transformers": run_transformers,
}


def run_engine(
    name: str, work: Workload, directory: Path, overrides: dict[str, Any]
) -> Measured | None:
    """None, having said so, if the engine isn't importable here, or isn't told of `work.params`."""
    if work.params and name not in TAKE_PARAMS:
        print(f"{name}: left out with {work.params}", flush=True)
        return None
    try:
        return ENGINES[name](work, directory, overrides)
    except ImportError as error:
        if name.startswith("dovetail"):
            raise
        print(f"{name}: left out, since it can't be imported: {error}", flush=True)
        return None
