"""Real models in pools that barely hold one request, with adapters, windows, states, samples,
drafts, policies and aborts: every request ends, with the tokens that it has in an engine with
memory for all, and no page stays held.

`tests/engine/test_every_request_ends.py` tries many more cases, with a device that only checks who
reads what.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MinistralConfig, Qwen3Config

from dovetail import LLMEngine, RequestOutput, SamplingParams
from dovetail.api.kv_cache import KVLayout
from dovetail.request.lora import LoRARequest
from tests.adapters import config_of, weights_of, write_adapter
from tests.models import hybrids
from tests.models.oracle import reference
from tests.support import FULL

torch.set_num_threads(1)

MAX_LEN = 96
ENGINES = 120 if FULL else 2  # of each model, with some eight requests each
POLICIES = ("fcfs", "fcfs", "sarathi", "vtc", "mlfq", "priority", "prefill_first", "lpm")
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_LEN,
}
MODELS: dict[str, Any] = {
    "full": Qwen3Config(**SIZES, num_hidden_layers=2),
    "windows": MinistralConfig(
        **SIZES,
        num_hidden_layers=3,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "states": hybrids.qwen3_5(),
}
ATTENTION = {"full": 0, "windows": 1, "states": 3}  # a layer with attention, by model


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    params: SamplingParams
    adapter: str | None


class Bench:
    """A model's files, its adapters, and the tokens that requests have where nothing is scarce."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        model = reference(MODELS[name], seed=5)
        model.save_pretrained(folder / "model")
        module = f"model.layers.{ATTENTION[name]}.self_attn.o_proj"
        layer = model.get_submodule(module)
        shapes = {module: (layer.in_features, layer.out_features)}
        self.adapters = {
            key: LoRARequest(
                key,
                1 + seed,
                str(
                    write_adapter(
                        folder / key,
                        config_of(target_modules=["o_proj"]),
                        weights_of(shapes, seed=seed),
                    )
                ),
            )
            for seed, key in enumerate(("x", "y"))
        }
        self.known: dict[Case, list[list[int]]] = {}
        self.free = self.engine(executor={"name": "local"})

    def engine(self, **config: Any) -> LLMEngine:
        base = {
            "model": str(self.folder / "model"),
            "dtype": "float32",
            "generation_config": "none",
            "max_model_len": MAX_LEN,
        }
        slots = config.pop("slots", 2)
        return LLMEngine.from_config({**base, "adapters": {"slots": slots}}, **config)

    def layout(self, block_size: int) -> KVLayout:
        with self.engine(block_size=block_size, executor={"name": "local"}) as engine:
            return engine.capacity.layout

    def expected(self, case: Case) -> list[list[int]]:
        """The tokens of each sample."""
        if case not in self.known:
            self.known[case] = run(self.free, self, [case], [])[0]
        return self.known[case]


@pytest.fixture(scope="module", params=MODELS)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    made = Bench(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    made.free.close()


def run(
    engine: LLMEngine, bench: Bench, cases: list[Case], aborts: list[tuple[int, int]]
) -> list[list[list[int]]]:
    """Return the tokens of each sample of each case. `aborts`: (step, index of a case)."""
    outputs: dict[str, RequestOutput] = {}
    for index, case in enumerate(cases):
        adapter = None if case.adapter is None else bench.adapters[case.adapter]
        engine.add_request(str(index), list(case.prompt), case.params, lora_request=adapter)
    steps = 0
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
        for _, index in (abort for abort in aborts if abort[0] == steps):
            engine.abort_request(str(index))
        steps += 1
        assert steps < 20_000
    assert engine.core.dead is None, engine.core.dead
    assert engine.stats().stalls == 0, "by the policy's own plans"
    engine.core.kv.check_integrity()
    assert engine.core.kv.counts.held == 0
    gone = {str(index) for _, index in aborts}
    for id, output in outputs.items():
        assert id in gone or {one.finish_reason for one in output.outputs} == {"length"}, output
    return [
        [list(one.token_ids) for one in outputs[str(i)].outputs]
        if str(i) in outputs and str(i) not in gone
        else []
        for i in range(len(cases))
    ]


def cases_of(chance: random.Random) -> list[Case]:
    """Requests of which half are nearly as long as may be, and share beginnings often."""
    found = []
    for _ in range(chance.randint(6, 9)):
        length = chance.choice([chance.randint(1, 70), chance.randint(60, 80)])
        start = chance.choice([(), (7,) * 20])
        prompt = (*start, *(chance.randrange(1, 97) for _ in range(length)))[:length]
        sampling: dict[str, Any] = (
            {"temperature": 0.0}
            if chance.random() < 0.5
            else {"temperature": 0.8, "seed": chance.randrange(100)}
        )
        params = SamplingParams(
            n=chance.choice([1, 1, 1, 2, 3]) if sampling["temperature"] else 1,
            max_tokens=chance.randint(1, 16),
            ignore_eos=True,
            detokenize=False,
            output_kind="final",
            **sampling,
        )
        found.append(Case(prompt, params, chance.choice([None, "x", "y"])))
    return found


@pytest.mark.slow("makes engines with pools of every kind")
def test_every_request_ends_with_the_tokens_that_it_has_where_nothing_is_scarce(
    bench: Bench,
) -> None:
    layouts = {size: bench.layout(size) for size in (4, 8)}
    for seed in range(ENGINES):
        chance = random.Random(seed)
        block_size, max_tokens = chance.choice([4, 8]), chance.choice([3, 7, 7, 16, 64])
        layout = layouts[block_size]
        config: dict[str, Any] = {
            "block_size": block_size,
            "max_num_batched_tokens": max_tokens,
            "max_num_seqs": chance.randint(1, min(7, max_tokens)),
            "overlap": chance.random() < 0.5,
            "scheduler": chance.choice(POLICIES),
            "kv_cache": {"name": "prefix", "reuse": chance.random() < 0.7},
            "slots": chance.choice([1, 1, 2]),
            "executor": {
                "name": "local",
                "num_pages": layout.most_pages(MAX_LEN, max_tokens)
                + layout.state_pages
                + chance.choice([0, 0, 1, 3]),
                "max_in_flight": chance.randint(1, 3),
            },
        }
        if chance.random() < 0.4:
            config["speculation"] = {"drafter": "ngram", "max_drafts": min(4, max_tokens - 1)}
        cases = cases_of(chance)
        aborts = [
            (chance.randint(0, 40), chance.randrange(len(cases)))
            for _ in range(chance.choice([0, 0, 2]))
        ]
        with bench.engine(**config) as engine:
            found = run(engine, bench, cases, aborts)
        for index, (case, tokens) in enumerate(zip(cases, found, strict=True)):
            if index not in {gone for _, gone in aborts}:
                assert tokens == bench.expected(case), (seed, index, config, case)
