"""Times two revisions of Dovetail on one GPU, in turns: what a change of the code costs or gains.

    python -m bench.pairs --before TREE SITE --after TREE SITE --json pairs.json
    python -m bench.pairs --before TREE SITE --after TREE SITE --groups small 8b --rounds 5

TREE is a checkout, SITE a folder that `pip install --target` installed it into. A group is an
engine and the workloads that it runs. Both engines of a group are ready at the same time, each in
a process of its own, and run each workload in turns, first one, then the other: clock and
temperature are the same for both. Printed are medians, and the median of the rounds' ratios. Each
engine also answers eight requests greedily: as equal weights are drawn, the tokens should be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

GREEDY = ((200, 100),) * 8
ENOUGH_S = 8.0  # of a workload's runs
MOST_ROUNDS = 20
FIRST_TOKENS = 20  # prompts of the workload ttft, one after the other
SLOTS = {"slots": 8, "max_rank": 16}
IDLE_PROCESSORS = ["dovetail-processing:shun", "dovetail-processing:clip"]
FORCED = {"sampler": "dovetail-bench-speculation:forced"}
ORACLE = {"drafter": "dovetail-bench-speculation:oracle", "max_drafts": 4}


@dataclass(frozen=True, slots=True)
class Group:
    """An engine, and its workloads: names in `bench.workloads` or `own_workloads`."""

    shape: str
    works: tuple[str, ...]
    max_num_seqs: int
    max_model_len: int
    kv_gib: int
    settings: dict[str, Any]
    layers: int | None = None  # fewer than the model has, so that two engines fit one GPU


GROUPS = {
    "small": Group(
        "qwen3-0.6b",
        ("ttft", "one", "eight", "thousand", "shared", "nano"),
        2048,
        2100,
        40,
        {},
    ),
    "idle": Group(
        "qwen3-0.6b",
        ("ttft", "one", "nano", "lora"),
        256,
        2100,
        40,
        {"adapters": SLOTS, "logits_processors": IDLE_PROCESSORS},
    ),
    "8b": Group("qwen3-8b", ("ttft", "8b-one", "8b-prefill", "8b-64"), 64, 8200, 24, {}),
    "drafts": Group(
        "qwen3-8b",
        ("draft-1", "draft-8", "draft-64"),
        64,
        800,
        12,
        {**FORCED, "speculation": ORACLE},
    ),
    "moe": Group("qwen3-30b-a3b", ("moe-one",), 1, 800, 2, {}, layers=24),
    "q35": Group("qwen3.5-4b", ("ttft", "q35-one", "q35-64"), 64, 1600, 16, {}),
}


# The process of one revision -------------------------------------------------------------------


def own_workloads() -> dict[str, Any]:
    """Return the workloads of `bench.workloads`, and those that only this module has."""
    from bench.workloads import WORKLOADS, Workload

    small = "qwen3-0.6b"
    drafted = {f"draft-{rows}": Workload("qwen3-8b", ((500, 256),) * rows) for rows in (1, 8, 64)}
    return {
        **WORKLOADS,
        **drafted,
        "greedy": Workload(small, GREEDY, temperature=0.0),
        "lora": WORKLOADS["nano"],
        "ttft": Workload(small, ((500, 1),)),
    }


@contextmanager
def engine_of(group: Group, directory: Path) -> Iterator[tuple[Any, dict[str, float]]]:
    """Yield an `LLM`, and the seconds at which its stages ended."""
    from tests.e2e.processing import install as install_processors
    from tests.registry.fakes import Site

    from bench.routing import uniform_routing
    from bench.shapes import SHAPES, write_checkpoint
    from bench.speculation import install as install_drafters
    from dovetail import LLM, LLMEngine

    shape = SHAPES[group.shape]
    if group.layers is not None:
        shape = replace(shape, layers=group.layers)
    checkpoint = directory / "model"
    checkpoint.mkdir()
    write_checkpoint(shape, checkpoint)
    install_drafters(directory / "drafters")
    site = directory / "processors"
    site.mkdir()
    install_processors(Site(site))
    sys.path.insert(0, str(site))
    stages: dict[str, float] = {}
    begun = time.perf_counter()

    def progress(what: str, done: int, total: int) -> None:
        stages[f"{what}, first"] = stages.get(f"{what}, first", time.perf_counter() - begun)
        stages[what] = time.perf_counter() - begun
        stages[f"{what}, number"] = total

    settings = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_num_seqs": group.max_num_seqs,
        "max_model_len": group.max_model_len,
        "kv_cache_memory": f"{group.kv_gib}GiB",
        **group.settings,
    }
    told = partial(LLMEngine.from_config, progress=progress)
    with (
        uniform_routing(shape),
        patch.object(LLMEngine, "from_config", told),
        LLM(str(checkpoint), **settings) as llm,
    ):
        stages["ready"] = time.perf_counter() - begun
        yield llm, stages


def adapters_of(llm: Any, directory: Path) -> list[Any]:
    from bench.adapters import write_adapter
    from dovetail import LoRARequest

    modules = dict(llm.engine.capacity.adapters.modules)
    requests = []
    for index in range(SLOTS["slots"]):
        path = directory / f"adapter-{index}"
        write_adapter(path, modules, SLOTS["max_rank"], index)
        requests.append(LoRARequest(f"adapter-{index}", index + 1, str(path)))
    return requests


def run(llm: Any, name: str, work: Any, seed: int, adapters: list[Any]) -> dict[str, Any]:
    """Run a workload once. Returns its seconds, a checksum of its tokens, and how many steps it
    took, with the seconds of the device and of the core."""
    import torch

    from dovetail import SamplingParams

    params = [
        SamplingParams(temperature=work.temperature, ignore_eos=True, max_tokens=out)
        for _, out in work.lens
    ]
    given: dict[str, Any] = {}
    if name == "lora":
        given["lora_request"] = [adapters[i % len(adapters)] for i in range(len(params))]
    prompts = work.prompts(seed)
    old = llm.engine.stats()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    if name == "ttft":
        several = [work.prompts(1000 * seed + i) for i in range(FIRST_TOKENS)]
        begun = time.perf_counter()
        outputs = [llm.generate(one, params, use_tqdm=False)[0] for one in several]
    else:
        outputs = llm.generate(prompts, params, use_tqdm=False, **given)
    seconds = time.perf_counter() - begun
    new = llm.engine.stats()
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    expected = work.output_tokens * (FIRST_TOKENS if name == "ttft" else 1)
    if sum(map(len, tokens)) != expected:
        raise SystemExit(f"{name}: {sum(map(len, tokens))} tokens, not {expected}")
    return {
        "seconds": seconds,
        "tokens": zlib.crc32(json.dumps(tokens).encode()),
        "steps": new.steps - old.steps,
        "device_s": new.device_s - old.device_s,
        "core_s": new.core_s - old.core_s,
    }


def work_off(name: str) -> None:
    """Serve one group's engine: a line `<workload> <seed>` on stdin is a run, its answer a line of
    JSON on stdout."""
    import torch

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print isn't an answer
    group = GROUPS[name]
    works = own_workloads()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        llm, stages = stack.enter_context(engine_of(group, Path(folder)))
        adapters = adapters_of(llm, Path(folder)) if "lora" in group.works else []
        torch.cuda.synchronize()
        facts = {
            **stages,
            "reserved GiB": torch.cuda.memory_reserved() / 2**30,
            "allocated GiB": torch.cuda.memory_allocated() / 2**30,
            "details": llm.engine.capacity.details,
        }
        print(json.dumps(facts), file=answers, flush=True)
        for line in sys.stdin:
            work, seed = line.split()
            answer = run(llm, work, works[work], int(seed), adapters)
            print(json.dumps(answer), file=answers, flush=True)


# The process that compares them ----------------------------------------------------------------


class Revision:
    """A revision's process, of one group."""

    def __init__(self, name: str, tree: str, site: str, group: str) -> None:
        path = os.pathsep.join([tree, site, os.environ.get("PYTHONPATH", "")])
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--serve", group],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.facts: dict[str, Any] = {}

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self._process.wait()}")
        return json.loads(line)

    def run(self, work: str, seed: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{work} {seed}\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = self.answer()
        return answer

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_both(before: Revision, after: Revision) -> None:
    def wait_for(revision: Revision) -> None:
        revision.facts = revision.answer()

    threads = [threading.Thread(target=wait_for, args=(each,)) for each in (before, after)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not (before.facts and after.facts):
        raise SystemExit("an engine didn't start")


def rounds_of(least: int, seconds: float) -> int:
    """Return how often to run a workload that takes so long: short ones vary more."""
    return max(least, min(MOST_ROUNDS, round(ENOUGH_S / seconds)))


def median_of(runs: list[dict[str, Any]], field: str) -> float:
    return statistics.median(run[field] for run in runs)


def compare(
    before: Revision, after: Revision, group: Group, least: int, without: list[str]
) -> list[dict[str, Any]]:
    """Run the group's workloads in turns, and print each one's figures."""
    rows: list[dict[str, Any]] = []
    if not group.settings.get("speculation"):
        equal = before.run("greedy", 0)["tokens"] == after.run("greedy", 0)["tokens"]
        print(f"  greedy tokens {'are equal' if equal else 'DIFFER'}", flush=True)
        rows.append({"work": "greedy", "equal": equal})
    for work in group.works:
        if work in without:
            continue
        first = [before.run(work, 0), after.run(work, 0)]  # they warm up
        rounds = rounds_of(least, max(answer["seconds"] for answer in first))
        answers: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
        for index in range(1, 1 + rounds):
            for revision in (before, after) if index % 2 else (after, before):
                answers[revision.name].append(revision.run(work, index))
        pairs = list(zip(answers["before"], answers["after"], strict=True))
        equal = all(a["tokens"] == b["tokens"] for a, b in pairs)
        ratios = [a["seconds"] / b["seconds"] for a, b in pairs]
        medians = {name: median_of(runs, "seconds") for name, runs in answers.items()}
        best = min(a["seconds"] for a, _ in pairs) / min(b["seconds"] for _, b in pairs)
        print(
            f"  {work:>10}  before {medians['before']:8.4f} s  after {medians['after']:8.4f} s  "
            f"speed after/before {medians['before'] / medians['after']:.4f}, "
            f"of each round {statistics.median(ratios):.4f} ({min(ratios):.4f} to "
            f"{max(ratios):.4f}), of the best {best:.4f}, {rounds} rounds, "
            f"tokens {'equal' if equal else 'differ'}",
            flush=True,
        )
        for name, runs in answers.items():
            steps = median_of(runs, "steps")
            device_ms = 1e3 * median_of(runs, "device_s") / steps
            core_ms = 1e3 * median_of(runs, "core_s") / steps
            print(f"{name:>20}: {steps} steps, device {device_ms:.3f} ms, core {core_ms:.3f} ms")
        rows.append({"work": work, "answers": answers, "ratios": ratios, "equal": equal})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", nargs=2, metavar=("TREE", "SITE"))
    parser.add_argument("--after", nargs=2, metavar=("TREE", "SITE"))
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=GROUPS)
    parser.add_argument("--rounds", type=int, default=5, help="at least; short ones run more often")
    parser.add_argument("--without", nargs="+", default=[], metavar="WORKLOAD")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--serve", choices=GROUPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        work_off(args.serve)
        return
    if args.before is None or args.after is None:
        parser.error("--before and --after are needed")
    told: dict[str, Any] = {}
    for name in args.groups:
        before = Revision("before", args.before[0], args.before[1], name)
        after = Revision("after", args.after[0], args.after[1], name)
        try:
            start_both(before, after)
            facts = {each.name: each.facts for each in (before, after)}
            print(f"{name}: {json.dumps(facts)}", flush=True)
            rows = compare(before, after, GROUPS[name], args.rounds, args.without)
            told[name] = {"facts": facts, "rows": rows}
        except SystemExit as error:
            print(f"{name}: {error}", flush=True)
            told[name] = {"error": str(error)}
        finally:
            before.end()
            after.end()
        if args.json:
            Path(args.json).write_text(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
