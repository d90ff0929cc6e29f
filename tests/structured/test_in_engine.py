"""Rules in an engine of the demo model: only requests with rules wait for them, and get a matching
answer or an error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from dovetail import LLM, AsyncLLMEngine, LLMEngine, SamplingParams, Structured
from dovetail.errors import RequestError, UnsupportedError
from dovetail.front.assembly import Assembly, assemble
from tests.structured.toy import Toy, ToyPart, ToyTrials

PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Romeo", "Juliet"]},
        "age": {"type": "integer", "minimum": 13, "maximum": 17},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", limits={"max_grammar_chars": 5000}) as llm:
        first = SamplingParams(max_tokens=1, structured=Structured(choice=["a"]))
        llm.generate("ROMEO:", first, use_tqdm=False)  # starts the process that tries rules
        yield llm


@pytest.fixture(autouse=True)
def no_processes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines that are made from now on, unlike `llm`, try no rules in processes."""
    monkeypatch.setattr("dovetail.front.grammars.GrammarTrials", ToyTrials)


def toy_engine(**config: Any) -> tuple[LLMEngine, Assembly]:
    assembly = assemble({"model": "demo", "max_num_seqs": 8, **config}, {})
    assembly.rules.backend = ToyPart()  # type: ignore[assignment]
    return LLMEngine(assembly), assembly


def toy_of(assembly: Assembly) -> Toy:
    backend = assembly.rules.compiler().backend
    assert isinstance(backend, Toy)
    return backend


def test_every_sample_follows_the_schema(llm: LLM) -> None:
    params = SamplingParams(max_tokens=80, n=8, seed=3, structured=Structured(json_schema=PERSON))
    for output in llm.generate(["ROMEO:", "JULIET:"], params, use_tqdm=False):
        for sample in output.outputs:
            value = json.loads(sample.text)
            assert (sample.finish_reason, sorted(value)) == ("stop", ["age", "name"])
            assert 13 <= value["age"] <= 17


@pytest.mark.slow("makes an engine of its own")
def test_the_rule_begins_behind_what_it_is_told_to_come_after(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=80, temperature=0, structured=Structured(choice=["yes", "no"], after="\n")
    )
    [output] = llm.generate("ROMEO: What", params, use_tqdm=False)
    thought, _, answer = output.outputs[0].text.partition("\n")
    assert answer in ("yes", "no")
    free = (
        llm.generate("ROMEO: What", SamplingParams(max_tokens=80, temperature=0), use_tqdm=False)[0]
        .outputs[0]
        .text
    )
    assert free.startswith(f"{thought}\n"), "what comes before is as if there were no rule"


@pytest.mark.slow("makes an engine of its own")
def test_what_must_come_is_forced_after_its_most_tokens(llm: LLM) -> None:
    bound = Structured(after="</think>", after_tokens=5)
    [output] = llm.generate(
        "ROMEO: What",
        SamplingParams(max_tokens=40, temperature=0, structured=bound, ignore_eos=True),
        use_tqdm=False,
    )
    [free] = llm.generate(
        "ROMEO: What", SamplingParams(max_tokens=5, temperature=0), use_tqdm=False
    )
    assert output.outputs[0].text.startswith(f"{free.outputs[0].text}</think>")
    assert len(output.outputs[0].token_ids) == 40, "any text may follow"
    ruled = Structured(choice=["yes", "no"], after="</think>", after_tokens=5)
    [output] = llm.generate(
        "ROMEO: What",
        SamplingParams(max_tokens=40, temperature=0, structured=ruled),
        use_tqdm=False,
    )
    assert output.outputs[0].text.removeprefix(f"{free.outputs[0].text}</think>") in ("yes", "no")


def test_stop_strings_and_limits_of_length_hold_within_a_rule(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=80, temperature=0, structured=Structured(regex="[a-c]{3}x[a-c]{3}"), stop="x"
    )
    [output] = llm.generate("ROMEO:", params, use_tqdm=False)
    assert (
        len(output.outputs[0].text),
        output.outputs[0].finish_reason,
        output.outputs[0].stop_reason,
    ) == (3, "stop", "x")
    cut = llm.generate(
        "ROMEO:",
        SamplingParams(max_tokens=2, structured=Structured(json_schema=PERSON)),
        use_tqdm=False,
    )[0].outputs[0]
    assert cut.finish_reason == "length"


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"regex": "a" * 6000}, "limits.max_grammar_chars"),
        ({"regex": "(" * 200}, "limits.max_grammar_depth"),
    ],
)
def test_what_is_found_wrong_on_arrival_is_raised(
    llm: LLM, rule: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        llm.generate("ROMEO:", SamplingParams(structured=rule), use_tqdm=False)


def test_what_is_found_wrong_in_compiling_ends_its_request_alone(llm: LLM) -> None:
    params = [
        SamplingParams(structured=Structured(regex="(?=a)b")),
        SamplingParams(structured=Structured(choice=["a"])),
    ]
    wrong, right = (
        output.outputs[0] for output in llm.generate(["ROMEO:", "ROMEO:"], params, use_tqdm=False)
    )
    assert (wrong.finish_reason, wrong.text, list(wrong.token_ids)) == ("rejected", "", [])
    assert str(wrong.stop_reason).startswith("structured.regex: lookarounds")
    assert right.text == "a"


def test_a_request_that_waits_for_a_grammar_does_not_delay_others() -> None:
    engine, assembly = toy_engine()
    with engine:
        engine.add_request("slow", "ROMEO:", SamplingParams(structured={"choice": ["hangs"]}))
        engine.add_request("quick", "ROMEO:", SamplingParams(max_tokens=4))
        finished = []
        while engine.has_unfinished_requests():
            finished += [output.request_id for output in engine.step() if output.finished]
            if finished == ["quick"]:
                toy_of(assembly).release.set()
        assert finished == ["quick", "slow"]


def test_who_goes_away_while_it_waits_leaves_nothing() -> None:
    engine, assembly = toy_engine()
    with engine:
        engine.add_request("slow", "ROMEO:", SamplingParams(n=2, structured={"choice": ["hangs"]}))
        engine.step()
        engine.abort_request("slow")
        assert not engine.has_unfinished_requests()
        toy_of(assembly).release.set()


def test_rules_of_requests_that_were_aborted_are_not_compiled() -> None:
    engine, assembly = toy_engine()

    def add(request_id: str, word: str) -> None:
        params = SamplingParams(n=2, max_tokens=2, structured=Structured(choice=[word]))
        engine.add_request(request_id, [1, 2], params)

    with engine:
        for index in range(8):  # at least as many as there are threads
            add(f"hanging {index}", f"hangs {index}")
        toy = toy_of(assembly)
        assert toy.begun.acquire(timeout=30)
        for index in range(20):
            add("left", f"left {index}")
            engine.step()
            engine.abort_request("left")
        add("last", "last")
        toy.release.set()
        while engine.has_unfinished_requests():
            engine.step()
        assert '["last"]' in toy.compiled
        left = [text for text in toy.compiled if "left" in text]
        assert len(left) <= 1, "an engine may keep the request that ended last"


def test_a_panic_of_the_library_ends_its_request_alone() -> None:
    engine, _ = toy_engine()
    with engine:
        engine.add_request("bad", "ROMEO:", SamplingParams(structured={"choice": ["panics"]}))
        engine.add_request("good", "ROMEO:", SamplingParams(structured={"choice": ["Hello"]}))
        ends = {}
        while engine.has_unfinished_requests():
            ends |= {
                output.request_id: output.outputs[0] for output in engine.step() if output.finished
            }
        assert "Panic: the native library is beside itself" in str(ends["bad"].stop_reason)
        assert ends["good"].text == "Hello"


def test_a_time_limit_is_reported_by_its_name() -> None:
    engine, _ = toy_engine(limits={"max_grammar_s": 0.05})
    with engine:
        engine.add_request("slow", "ROMEO:", SamplingParams(structured={"choice": ["endless"]}))
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert "limits.max_grammar_s" in str(outputs[-1].outputs[0].stop_reason)


def test_without_a_backend_a_request_that_needs_one_is_refused_and_no_other() -> None:
    engine, assembly = toy_engine()
    assembly.rules.backend = None
    with engine:
        with pytest.raises(UnsupportedError, match="no grammar backend"):
            engine.add_request("a", "ROMEO:", SamplingParams(structured={"choice": ["a"]}))
        engine.add_request("a", "ROMEO:", SamplingParams(max_tokens=1))


def test_an_executor_without_masks_is_named() -> None:
    engine, assembly = toy_engine()
    assembly.has_masks = False
    with (
        LLMEngine(assembly) as other,
        pytest.raises(RequestError, match="structured: executor local can't mask tokens"),
    ):
        other.add_request("a", "ROMEO:", SamplingParams(structured={"choice": ["a"]}))
    engine.close()


def test_the_async_engine_follows_rules_too() -> None:
    async def main() -> list[str]:
        async with AsyncLLMEngine.from_config({"model": "demo"}) as engine:

            async def one(name: str) -> str:
                params = SamplingParams(structured=Structured(choice=[name]), max_tokens=20)
                return (
                    [output async for output in engine.generate(name, "ROMEO:", params)][-1]
                    .outputs[0]
                    .text
                )

            return list(await asyncio.gather(*(one(f"answer {index}") for index in range(5))))

    assert asyncio.run(main()) == [f"answer {index}" for index in range(5)]
