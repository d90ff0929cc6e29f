"""Token ids and log-probabilities of a deterministic request have the same bits in any company: of
a request alone in a plain engine, and among others in engines with random configs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dovetail import LLMEngine, SamplingParams
from dovetail.engine.flight import InFlightStep
from dovetail.engine.live_request import LiveRequest
from dovetail.engine.windows import Windows
from dovetail.errors import DovetailError, RequestError
from dovetail.front.determinism import Asked, Bits, serve
from dovetail_executors.runtime.slabs import LINES, MORE_PLACES, PLACES, SLAB
from tests.models.tiny_configs import random_model, tiny
from tests.support import FULL

torch.set_num_threads(1)

LENGTH = 160
VOCAB = 128
SCHEDULES = 300 if FULL else 1
POLICIES = ("fcfs", "lcf", "lpm", "mlfq", "prefill_first", "sarathi", "srpt", "vtc")
# types with every kind of layer: windows, mixtures, latent, selecting, through transformers
FAMILIES = (
    *("mistral", "gemma3_text", "gemma4_text", "cohere2", "gpt2", "phi"),
    *("qwen3_moe", "gpt_oss", "llama4_text", "olmoe", "deepseek_v3", "deepseek_v32"),
)

PROVISIONAL_TOKENS = InFlightStep.provisional_tokens
World_of = Callable[[str, str], "World"]


class World:
    """A checkpoint, and the bits of requests that an engine computes one after the other."""

    def __init__(self, model_type: str, dtype: str, folder: Path) -> None:
        self.dtype = dtype
        self.folder = folder
        config = tiny(model_type)
        if model_type == "mistral":
            config.sliding_window = 24
        random_model(config, seed=3).save_pretrained(folder)
        with patch("dovetail.engine.core.Windows", lambda size, **_: Windows(0)):
            self.alone = self.start()  # computes each token canonically
        self._known: dict[tuple[Any, ...], Bits] = {}

    def start(self, **config: Any) -> LLMEngine:
        base: dict[str, Any] = {
            "model": str(self.folder),
            "dtype": self.dtype,
            "generation_config": "none",
            "max_model_len": LENGTH,
            "executor": {"name": "local", "num_pages": 400},
        }
        return LLMEngine.from_config({**base, **config})

    def bits(self, asked: Asked) -> Bits:
        if asked not in self._known:
            self.alone.reset_prefix_cache()
            [self._known[asked]] = serve(self.alone, [asked], random.Random(0))
        return self._known[asked]


def random_request(chance: random.Random) -> Asked:
    length = chance.choice([1, chance.randint(2, 31), chance.randint(32, 100)])
    start = chance.choice([(), (7,) * 40, (5, 6, 9) * 16])  # shared, and found by drafts
    prompt = (*start, *(chance.randrange(3, VOCAB) for _ in range(length)))[:length]
    fields = chance.choice(
        [
            {"temperature": 0.0},
            {"temperature": 0.9, "seed": chance.randrange(9), "n": chance.choice([1, 2])},
            {"temperature": 0.9, "seed": 1, "top_k": 9, "top_p": 0.8},
            {"temperature": 1.2, "seed": 2, "repetition_penalty": 1.3, "min_p": 0.05},
            {"temperature": 0.0, "prompt_logprobs": 2},
        ]
    )
    params = SamplingParams(
        max_tokens=chance.choice([chance.randint(1, 24), chance.randint(25, 60)]),
        stop_token_ids=chance.choice([None, [chance.randrange(VOCAB) for _ in range(4)]]),
        logprobs=chance.choice([0, 3]),
        ignore_eos=True,
        detokenize=False,
        output_kind="final",
        deterministic=True,
        **fields,
    )
    return Asked(prompt, params)


def random_config(chance: random.Random, least_tokens: int = 32) -> dict[str, Any]:
    block_size = chance.choice([4, 16, 32])
    config: dict[str, Any] = {
        "block_size": block_size,
        "max_num_batched_tokens": max(least_tokens, chance.choice([32, 47, 512])),
        "max_num_seqs": chance.choice([2, 5, 9]),
        "overlap": chance.random() < 0.7,
        "scheduler": chance.choice(POLICIES),
        "kv_cache": {"name": "prefix", "reuse": chance.random() < 0.7},
        "prefill_limit": chance.choice([None, 2.0]),
    }
    if chance.random() < 0.5:
        config["speculation"] = {"drafter": "ngram", "max_drafts": chance.choice([1, 4])}
    return config


def some_wrong(
    flight: InFlightStep, chance: random.Random, share: float
) -> Iterator[tuple[LiveRequest, int]]:
    """Yield the provisional tokens of a step, of which this share is wrong."""
    for request, token in PROVISIONAL_TOKENS(flight):
        yield request, (token + (chance.random() < share)) % VOCAB


def require_equal_bits(world: World, seed: int, least_tokens: int = 32) -> None:
    """Serve requests in a random engine, first some of them without the promise, then all, which
    find prefixes."""
    chance = random.Random(seed)
    config = random_config(chance, least_tokens)
    asked = [random_request(chance) for _ in range(chance.randint(3, 7 if FULL else 4))]
    company = [one if chance.random() < 0.7 else one.unmarked() for one in asked]
    pages = -(-LENGTH // config["block_size"]) * chance.choice([4, 12])
    wrong = chance.choice([0.0, 0.05, 0.7])
    with (
        world.start(**config, executor={"name": "local", "num_pages": pages}) as engine,
        patch.object(InFlightStep, "provisional_tokens", partialmethod(some_wrong, chance, wrong)),
    ):
        found = serve(engine, company, chance)
        again = serve(engine, asked, chance)
        engine.core.kv.check_integrity()
    told = f"seed {seed}: {config}, {pages} pages, {wrong} wrong"
    for one, first, second, served in zip(asked, found, again, company, strict=True):
        assert second == world.bits(one), f"{told}: {one}"
        if served.params.deterministic:
            assert first == second, f"{told}: {one}"


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World_of]:
    made: dict[tuple[str, str], World] = {}

    def world(model_type: str, dtype: str) -> World:
        key = model_type, dtype
        if key not in made:
            made[key] = World(model_type, dtype, tmp_path_factory.mktemp(model_type))
        return made[key]

    yield world
    for one in made.values():
        one.alone.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["qwen3", *FAMILIES])
@pytest.mark.slow("engines of each family of models")
def test_a_request_has_the_same_bits_in_any_engine(
    worlds: World_of, model_type: str, dtype: str
) -> None:
    for seed in range(SCHEDULES):
        require_equal_bits(worlds(model_type, dtype), seed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "qwen3_moe", "deepseek_v32"])
@pytest.mark.slow("engines of some families of models")
def test_so_it_has_where_slabs_and_lines_are_computed_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_type: str, dtype: str
) -> None:
    monkeypatch.setitem(PLACES, "cpu", 4)
    monkeypatch.setitem(MORE_PLACES, "cpu", (1, 2))
    monkeypatch.setitem(LINES, "cpu", 8)
    world = World(model_type, dtype, tmp_path)
    with world.alone:
        for seed in range(SCHEDULES):
            require_equal_bits(world, seed, least_tokens=4 * SLAB)


@pytest.mark.slow("computes until bits differ")
def test_company_changes_the_bits_of_other_requests(worlds: World_of) -> None:
    world = worlds("qwen3", "bfloat16")
    chance = random.Random(0)
    asked = [random_request(chance) for _ in range(3)]
    plain = [one.unmarked() for one in asked]
    alone = [world.bits(one) for one in plain]
    assert serve(world.alone, plain, chance) != alone
    together = [world.bits(one) for one in asked]
    assert serve(world.alone, asked, chance) == together


def test_an_engine_that_cannot_promise_it_says_why(worlds: World_of) -> None:
    world = worlds("qwen3", "bfloat16")
    small = {"max_num_batched_tokens": 16, "max_num_seqs": 2}
    with world.start(**small) as engine, pytest.raises(RequestError, match="at least 32"):
        engine.add_request("a", [3, 4], SamplingParams(deterministic=True))
    fp8 = {"kv_cache_dtype": "fp8", "kv_cache_scales": "calibrate"}
    with world.start(**fp8) as engine, pytest.raises(RequestError, match="calibrate fits"):
        engine.add_request("a", [3, 4], SamplingParams(deterministic=True))
    with pytest.raises(DovetailError, match="max_num_batched_tokens is 16"):
        world.start(deterministic="always", **small)


@pytest.mark.slow("answers many requests")
def test_all_requests_may_be_deterministic(worlds: World_of) -> None:
    world = worlds("qwen3", "bfloat16")
    asked = random_request(random.Random(2))
    with world.start(deterministic="always") as engine:
        assert serve(engine, [asked.unmarked()], random.Random(0)) == [world.bits(asked)]
