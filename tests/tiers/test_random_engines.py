"""Engines of random configs with tiers answer as a plain engine, whatever is restored in between.

Each engine gets several rounds of prompts with common beginnings, more than its device's cache
holds: some are aborted, preempted, sampled several times, have an adapter or a salt, or come while
others are being restored. Some engines have two ranks.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLMEngine, LoRARequest, RequestOutput, SamplingParams
from dovetail.engine.tiers.feature import TierFeature
from dovetail.engine.tiers.prospect import Pace
from tests.adapters import config_of, weights_of, write_adapter
from tests.e2e.test_random_engines import POLICIES, REJECTING, Answer, Case, Plain
from tests.executors.rank_threads import ranks_as_threads
from tests.support import FULL

# Of the 200 random cases of a full run; the suite tries a few
FEW = "3,6,27" if FULL else "6,27"
SEEDS = [int(seed) for seed in os.environ.get("DOVETAIL_TIER_SEEDS", FEW).split(",")]
FAMILIES = ("dense", "windows", "mixture", "states")
VOCAB = 1024
ADAPTERS = {"slots": 2, "max_rank": 4}


@dataclass(frozen=True)
class Tried(Case):
    """A case with what else names its K and V."""

    salt: str | None = None
    adapter: LoRARequest | None = None

    @property
    def key(self) -> str:
        return f"{self.adapter} {super().key}"

    def add_to(self, engine: LLMEngine, name: str) -> None:
        engine.add_request(
            name,
            [*self.prompt],
            self.params,
            cache_salt=self.salt,
            lora_request=self.adapter,
        )


class Adapted(Plain):
    """The dense model, whose engines have adapters."""

    def __init__(self, folder: Path) -> None:
        super().__init__("dense", folder)
        self.name = "adapted"
        capacity = self.engine.capacity.adapters
        assert capacity is not None
        config = config_of(target_modules="all-linear")
        self.adapters = [
            LoRARequest(
                str(number),
                number,
                str(
                    write_adapter(
                        folder / str(number), config, weights_of(capacity.modules, seed=number)
                    )
                ),
            )
            for number in (1, 2)
        ]

    def start(self, **config: Any) -> LLMEngine:
        return super().start(adapters=ADAPTERS, **config)

    def answer(self, case: Case) -> Answer:
        assert isinstance(case, Tried)
        if case.key not in self.known:
            case.add_to(self.engine, "plain")
            [output] = [
                output
                for _ in iter(self.engine.has_unfinished_requests, False)
                for output in self.engine.step()
            ]
            self.known[case.key] = [([*one.token_ids], one.finish_reason) for one in output.outputs]
        return self.known[case.key]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Plain]]:
    made = {name: Plain(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}
    made["adapted"] = Adapted(tmp_path_factory.mktemp("adapted"))
    yield made
    for one in made.values():
        one.engine.close()


@pytest.fixture(autouse=True)
def restores_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore in frames of 16 tokens, even what is computed sooner, as in a tiny model."""
    monkeypatch.setattr("dovetail.engine.tiers.keys.FRAME_TOKENS", 16)
    monkeypatch.setattr(Pace, "loading_s", lambda *_: 0.0)
    monkeypatch.setattr(Pace, "patience_s", lambda *_: 5.0)


def tier_feature(engine: LLMEngine) -> TierFeature:
    return next(one for one in engine.core.features if isinstance(one, TierFeature))


def random_config(chance: random.Random, one: Plain, folder: Path) -> dict[str, Any]:
    block_size = chance.choice([4, 8, 16])
    max_tokens = chance.choice([7, 16, 64, 512])
    config: dict[str, Any] = {
        "block_size": block_size,
        "max_num_batched_tokens": max_tokens,
        "max_num_seqs": chance.choice([1, 2, min(4, max_tokens), min(7, max_tokens)]),
        "overlap": chance.random() < 0.6,
        "scheduler": chance.choice([name for name in POLICIES if name not in REJECTING]),
        "kv_host_memory": chance.choice([1 << 16, 1 << 18, 1 << 22]),
        "executor": {
            "name": "local",
            "num_pages": one.layout(block_size).most_pages(96, max_tokens)
            + one.layout(block_size).state_pages
            + chance.choice([0, 1, 3, 10, 30]),
        },
    }
    if chance.random() < 0.5:
        config["kv_tiers"] = [{"name": "disk", "path": str(folder), "size": "64MiB"}]
    if chance.random() < 0.25 and one.name not in ("states", "adapted"):
        config["executor"] |= {"name": "tensor", "size": 2, "device": "cpu"}
    elif chance.random() < 0.3:
        drafter = chance.choice(["ngram", "suffix", *one.heads])
        config["speculation"] = {"drafter": drafter, "max_drafts": chance.choice([1, 3])}
    return config


def random_cases(chance: random.Random, one: Plain) -> list[Tried]:
    """Return prompts of which many begin as others do."""
    beginnings = [
        tuple(chance.randrange(1, VOCAB) for _ in range(chance.choice([16, 33, 48, 64])))
        for _ in range(3)
    ]
    adapters = [None, *one.adapters] if isinstance(one, Adapted) else [None]
    cases = []
    for _ in range(chance.randint(6, 10)):
        begun = chance.choice(beginnings)
        rest = tuple(chance.randrange(1, VOCAB) for _ in range(chance.randint(0, 76 - len(begun))))
        fields: dict[str, Any] = {"max_tokens": chance.randint(1, 20), "ignore_eos": True}
        fields["temperature"] = 0.0
        if chance.random() < 0.3:
            fields |= {"temperature": 0.8, "seed": chance.randrange(9)}
            fields["n"] = chance.choice([1, 2, 3])
        if chance.random() < 0.1:
            fields["prompt_logprobs"] = 1
        salt = chance.choice([None, None, None, "salt"])
        cases.append(Tried((*begun, *rest)[:76], fields, salt, chance.choice(adapters)))
    return cases


def answers(
    engine: LLMEngine, cases: Sequence[Tried], chance: random.Random, names: str
) -> dict[int, Answer]:
    """Return the answers of the requests that aren't aborted; some come late, some at once."""
    outputs: dict[str, RequestOutput] = {}
    waiting = [*range(len(cases))]
    aborted: set[int] = set()
    steps = 0
    while waiting or engine.has_unfinished_requests():
        if waiting and (chance.random() < 0.4 or not engine.has_unfinished_requests()):
            index = waiting.pop(0)
            cases[index].add_to(engine, f"{names}{index}")
        if chance.random() < 0.04 and len(waiting) < len(cases):
            index = chance.randrange(len(cases) - len(waiting))
            if f"{names}{index}" not in outputs:
                engine.abort_request(f"{names}{index}")
                aborted.add(index)
        outputs |= {output.request_id: output for output in engine.step()}
        steps += 1
        assert steps < 100_000, "some request doesn't end"
        if chance.random() < 0.05:
            engine.core.kv.check_integrity()
    assert engine.core.dead is None, engine.core.dead
    while engine.core.idle():
        pass
    engine.core.kv.check_integrity()
    assert engine.core.kv.counts.held == 0
    return {
        index: [([*one.token_ids], one.finish_reason) for one in outputs[f"{names}{index}"].outputs]
        for index in range(len(cases))
        if index not in aborted
    }


def is_near_tie(one: Plain, case: Tried, answer: Answer) -> bool:
    """Return True if a greedy answer parts from the plain engine's where that could as well have
    chosen the other token: the order of sums differs with the size of steps."""
    expected = one.answer(case)[0][0]
    given = answer[0][0]
    same = next(at for at, pair in enumerate(zip(given, expected, strict=True)) if len({*pair}) > 1)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=4, detokenize=False)
    prompt = [*case.prompt, *expected[:same]]
    one.engine.add_request("tie", prompt, params, lora_request=case.adapter)
    [output] = [
        output
        for _ in iter(one.engine.has_unfinished_requests, False)
        for output in one.engine.step()
        if output.finished
    ]
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    found = [logprobs[0].get(token) for token in (given[same], expected[same])]
    values = [each.logprob for each in found if each is not None]
    greedy = case.fields["temperature"] == 0.0
    return greedy and len(values) == 2 and abs(values[0] - values[1]) < 1e-4


def tried(seed: int, plain: dict[str, Plain], folder: Path) -> Counter[str]:
    """Try an engine; return what its tiers have done."""
    chance = random.Random(seed)
    one = plain[chance.choice([*plain])]
    config = random_config(chance, one, folder)
    cases = random_cases(chance, one)
    ranks = config["executor"].get("size", 1)
    told = f"seed {seed}, {one.name}: {config}"
    done = Counter[str]()
    for _ in range(chance.choice([1, 2]) if "kv_tiers" in config else 1):
        with ranks_as_threads() if ranks > 1 else nullcontext(), one.start(**config) as engine:
            for number in range(3):
                chosen = chance.sample(cases, len(cases))
                found = answers(engine, chosen, chance, f"{number}:")
                for index, answer in found.items():
                    case = chosen[index]
                    assert answer == one.answer(case) or is_near_tie(one, case, answer), (
                        f"{told}: {case}"
                    )
            stats = tier_feature(engine).stats
            assert not stats.damaged_frames, told
            done["restored"] += stats.restored_tokens
            done["loaded"] += sum(stats.loaded_frames.values())
            done["engines"] += 1
            done[one.name] += stats.restored_tokens
            done[f"{ranks} ranks"] += stats.restored_tokens
            done["drafts"] += engine.core.stats.draft_tokens and stats.restored_tokens
            done["preempted"] += engine.core.stats.preemptions and stats.restored_tokens
            done.update({f"missed {why}": count for why, count in stats.missed.items()})
    return done


@pytest.mark.slow("makes several engines")
def test_answers_are_those_of_an_engine_without_tiers(
    plain: dict[str, Plain], tmp_path: Path
) -> None:
    done = Counter[str]()
    for seed in SEEDS:
        done += tried(seed, plain, tmp_path / str(seed))
        print(seed, dict(done), flush=True)
    assert done["restored"] > 0
