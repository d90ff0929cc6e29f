"""No engine whose components conform is ended by how they are combined: of engines with random
configs, each is refused at its start, with a sentence, or each of its requests ends with the
tokens that it has in a plain engine, and no page stays held.

`test_every_request_ends.py` tries adapters, aborts and pools that barely hold one request.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MinistralConfig, Qwen3Config, Qwen3MoeConfig

from dovetail import LLMEngine, RequestOutput, SamplingParams
from dovetail.api.clock import VirtualClock, WallClock
from dovetail.api.kv_cache import KVLayout
from dovetail.errors import DovetailError
from dovetail.nn.model_files import read_config
from tests.e2e import drafting
from tests.models import hybrids
from tests.models.heads import (
    add_tensors,
    eagle3_fields,
    eagle3_tensors,
    mtp_model,
    mtp_tensors,
    write_eagle3,
)
from tests.models.oracle import reference
from tests.registry.fakes import Site
from tests.registry.site import site  # noqa: F401
from tests.small_model import small_demo
from tests.support import FULL

pytestmark = pytest.mark.usefixtures("trusted_rules")
torch.set_num_threads(1)

VOCAB = 1024  # of the demo model's tokenizer
ENGINES = 200 if FULL else 24
MOST_CALLS = 1_000_000  # of `step`: those that wait for a grammar's compilation do nothing
INTERNAL = re.compile(r"can't start: \w+Error|Traceback")  # in place of a sentence for users
REJECTING = ("edf", "slo", "rpm")  # policies that may reject requests
POLICIES = (
    *("andes", "fcfs", "lcf", "lightllm", "lpm", "mlfq", "prefill_first", "prefix_batch"),
    *("priority", "sarathi", "sjf", "srpt", "vtc"),
    *REJECTING,
)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "tie_word_embeddings": True,
}
MODELS: dict[str, Any] = {
    "dense": Qwen3Config(**SIZES, num_hidden_layers=3),
    "windows": MinistralConfig(
        **SIZES,
        num_hidden_layers=3,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "mixture": Qwen3MoeConfig(
        **SIZES, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "states": hybrids.qwen3_5(vocab_size=VOCAB, max_position_embeddings=96),
}
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": "[ab]{3,9}"},
    {"choice": ["yes", "no", "perhaps"]},
    {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
)


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    fields: dict[str, Any] = field(hash=False)

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(detokenize=False, output_kind="final", **self.fields)

    @property
    def key(self) -> str:
        return f"{self.prompt} {sorted(self.fields.items())}"


Answer = list[tuple[list[int], str | None]]  # of each sample: its tokens, and why it ended


class Plain:
    """A model's files, and the answers of an engine in which nothing is scarce or combined."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.directory = folder / "model"
        model = reference(MODELS[name], seed=5)
        model.save_pretrained(self.directory)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (self.directory / file).symlink_to(Path(small_demo(), file))
        self.heads: list[Any] = []
        if name == "dense":
            fields = eagle3_fields(read_config(self.directory))
            head = write_eagle3(folder / "head", fields, eagle3_tensors(fields))
            self.heads.append({"name": "eagle3", "model": str(head)})
        if name == "states":
            add_tensors(self.directory, mtp_tensors(mtp_model(model)))
            self.heads.append("mtp")
        self.engine = self.start(overlap=False)
        self.known: dict[str, Answer] = {}
        self.layouts: dict[int, KVLayout] = {}

    def start(self, **config: Any) -> LLMEngine:
        base: dict[str, Any] = {
            "model": str(self.directory),
            "dtype": "float32",
            "generation_config": "none",
            "max_model_len": 96,
            "executor": {"name": "local"},
        }
        config = base | config
        clock = VirtualClock() if config["executor"]["name"] == "free" else WallClock()
        return LLMEngine.from_config(config, clock=clock)

    def layout(self, block_size: int) -> KVLayout:
        if block_size not in self.layouts:
            with self.start(block_size=block_size) as engine:
                self.layouts[block_size] = engine.capacity.layout
        return self.layouts[block_size]

    def answer(self, case: Case) -> Answer:
        if case.key not in self.known:
            [self.known[case.key]] = answers(self.engine, [case])
        return self.known[case.key]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Plain]]:
    made = {name: Plain(name, tmp_path_factory.mktemp(name)) for name in MODELS}
    yield made
    for one in made.values():
        one.engine.close()


def answers(engine: LLMEngine, cases: Sequence[Case], late: Sequence[int] = ()) -> list[Answer]:
    """Return the answers; requests whose index is in `late` arrive after some steps."""
    outputs: dict[str, RequestOutput] = {}
    for index, case in enumerate(cases):
        if index not in late:
            engine.add_request(str(index), list(case.prompt), case.params)
    steps = 0
    waiting = list(late)
    while engine.has_unfinished_requests() or waiting:
        if waiting and (steps % 3 == 2 or not engine.has_unfinished_requests()):
            index = waiting.pop()
            engine.add_request(str(index), list(cases[index].prompt), cases[index].params)
        outputs |= {output.request_id: output for output in engine.step()}
        steps += 1
        assert steps < MOST_CALLS, "some request doesn't end"
    assert engine.core.dead is None, engine.core.dead
    engine.core.kv.check_integrity()
    assert engine.core.kv.counts.held == 0
    for index, case in enumerate(cases):
        require_logprobs(outputs[str(index)], case)
    return [
        [(list(one.token_ids), one.finish_reason) for one in outputs[str(index)].outputs]
        for index in range(len(cases))
    ]


def require_logprobs(output: RequestOutput, case: Case) -> None:
    """Check that each token that asked for log-probabilities has them."""
    if "rejected" in [one.finish_reason for one in output.outputs]:
        return
    if case.fields.get("prompt_logprobs") is not None:
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(case.prompt)
    for one in output.outputs:
        if case.fields.get("logprobs") is not None:
            assert one.logprobs is not None
            assert len(one.logprobs) == len(one.token_ids)


def random_case(chance: random.Random) -> Case:
    length = chance.choice([1, 2, chance.randint(3, 40), chance.randint(40, 70)])
    start = chance.choice([(), (7,) * 20, (5, 6) * 12])  # repeated: drafts are found in it
    prompt = (*start, *(chance.randrange(1, VOCAB) for _ in range(length)))[:length]
    fields: dict[str, Any] = {"max_tokens": chance.randint(1, 20), "temperature": 0.0}
    fields["ignore_eos"] = chance.random() < 0.7
    if chance.random() < 0.3:
        fields |= {"temperature": 0.8, "seed": chance.randrange(9), "n": chance.choice([1, 2, 3])}
        fields |= chance.choice([{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}])
    if chance.random() < 0.3:
        fields |= chance.choice(
            [
                {"repetition_penalty": 1.3},
                {"presence_penalty": 0.9, "frequency_penalty": 0.5},
                {"logit_bias": {11: 5.0, 12: -100.0}},
                {"allowed_token_ids": [3, 4, 5, 900]},
                {"min_tokens": fields["max_tokens"] // 2, "stop_token_ids": list(range(400))},
            ]
        )
    if chance.random() < 0.25:
        fields["logprobs"] = chance.choice([0, 1, 4])
    if chance.random() < 0.15:
        fields["prompt_logprobs"] = chance.choice([0, 2])
    if chance.random() < 0.2:
        for contradicting in ("allowed_token_ids", "min_tokens", "ignore_eos"):
            fields.pop(contradicting, None)
        fields["structured"] = chance.choice(GRAMMARS)
    if chance.random() < 0.1:
        fields["max_drafts"] = chance.choice([0, 1])
    return Case(prompt, fields)


def random_config(chance: random.Random, one: Plain, others: dict[str, Plain]) -> dict[str, Any]:
    block_size = chance.choice([1, 4, 8, 16, 32])
    max_tokens = chance.choice([1, 3, 7, 16, 64, 512])
    layout = one.layout(block_size)
    config: dict[str, Any] = {
        "block_size": block_size,
        "max_num_batched_tokens": max_tokens,
        "max_num_seqs": chance.choice([1, 2, min(4, max_tokens), min(7, max_tokens), 9]),
        "overlap": chance.random() < 0.6,
        "scheduler": chance.choice(POLICIES),
        "kv_cache": {"name": "prefix", "reuse": chance.random() < 0.7},
        "prefill_limit": chance.choice([None, 2.0]),
        "executor": {
            "name": chance.choice(["local", "free", "free"]),
            "num_pages": layout.most_pages(96, max_tokens)
            + layout.state_pages
            + chance.choice([-3, 0, 0, 1, 1, 3, 3, 30, 200]),
            "max_in_flight": chance.randint(1, 3),
        },
    }
    if chance.random() < 0.5:
        drafter: Any = chance.choice(
            [
                "ngram",
                "suffix",
                {"name": "model", "model": str(others["dense"].directory)},
                *(one.heads * 2 or ["mtp"]),
            ]
        )
        config["speculation"] = {"drafter": drafter, "max_drafts": chance.choice([1, 1, 2, 4])}
    return config


def require_sentence(error: str, told: str) -> None:
    assert len(error.split()) > 4, told
    assert not INTERNAL.search(error), f"{error}: {told}"


def tried(seed: int, plain: dict[str, Plain]) -> str:
    """Try an engine; return "refused" or the name of its model."""
    chance = random.Random(seed)
    one = plain[chance.choice(sorted(MODELS))]
    config = random_config(chance, one, plain)
    cases = [random_case(chance) for _ in range(chance.randint(2, 6))]
    late = [index for index in range(len(cases)) if chance.random() < 0.3]
    told = f"seed {seed}, {one.name}: {config}"
    try:
        engine = one.start(**config)
    except DovetailError as error:
        require_sentence(str(error), told)
        return "refused"
    with engine:
        found = answers(engine, cases, late)
    for case, answer in zip(cases, found, strict=True):
        reasons = [reason for _, reason in answer]
        if config["scheduler"] in REJECTING and reasons == ["rejected"] * len(reasons):
            continue
        assert answer == one.answer(case), f"{told}: {case}"
    return one.name


@pytest.mark.slow("makes several engines")
def test_no_combination_of_components_ends_an_engine(
    plain: dict[str, Plain],
    site: Site,  # noqa: F811
) -> None:
    drafting.install(site)
    ends = Counter(tried(seed, plain) for seed in range(ENGINES))
    assert 0 < ends["refused"] < ENGINES / (4 if FULL else 2), ends
