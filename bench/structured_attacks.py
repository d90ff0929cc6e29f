"""Tokens of ordinary streams while requests with hostile grammars arrive: huge, deeply nested or
exponential ones. Each must be rejected or served.

    python -m bench.structured_attacks
    python -m bench.structured_attacks --grammar llguidance --rounds 3

Eight streams of the demo model, first undisturbed, then with some twenty hostile requests at once,
a round after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

import numpy as np

STREAMS = 8
TOKENS = 400


def attacks(salt: int) -> dict[str, dict[str, Any]]:
    """Return hostile grammars by name. `salt` avoids cache hits."""
    salted = {"title": f"round {salt}"}
    deep: Any = {"type": "string"}
    for _ in range(90):
        deep = {"type": "array", "items": deep}
    wide = {f"key {n} {salt}": {"type": "string", "maxLength": n} for n in range(2000)}
    return {
        "1 MB": {"json_schema": {**salted, "enum": [f"{n:0100d}" for n in range(10_000)]}},
        "200 KB": {"json_schema": {**salted, "enum": [f"{n:0100d}" for n in range(1800)]}},
        "10,000 levels": {"json_schema": '{"items":' * 10_000 + "{}" + "}" * 10_000},
        "90 levels": {"json_schema": {**salted, **deep}},
        "$ref loop": {"json_schema": {**salted, "$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
        "$ref doubling": {"json_schema": {**salted, "$ref": "#/$defs/n0", "$defs": {
            f"n{n}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/n{n + 1}"}] * 2} if n < 40 else {"type": "null"} for n in range(41)}}},
        "2,000 properties": {"json_schema": {**salted, "type": "object", "properties": wide, "additionalProperties": False}},
        "allOf of anyOf": {"json_schema": {**salted, "allOf": [{"anyOf": [{"minimum": n}, {"maximum": -n}]} for n in range(30)]}},
        "maxLength 10**9": {"json_schema": {**salted, "type": "string", "maxLength": 10**9}},
        "maxItems 10**9": {"json_schema": {**salted, "type": "array", "minItems": 10**6, "maxItems": 10**9}},
        "repetitions": {"regex": f"(a{{1,1000}}){{1,1000}}{salt}"},
        "more repetitions": {"regex": f"((a{{1,200}}){{1,200}}){{1,200}}{salt}"},
        "ambiguous": {"regex": f"(a|aa)+{salt}"},
        "states": {"regex": f"(a|b)*a(a|b){{40}}{salt}"},
        "lookaround": {"regex": f"(?=a)b{salt}"},
        "brackets": {"regex": "(" * 10_000 + ")" * 10_000},
        "5,000 alternatives": {"choice": [f"number {n} of {salt}" for n in range(5000)]},
        "half a surrogate": {"json_schema": {"const": "\\ud800", "pattern": "\ud800"}},
        "pattern of a surrogate": {"json_schema": {**salted, "type": "string", "pattern": "^\\ud800$"}},
        "left recursion": {"grammar": f'start: start start | "{salt}"'},
        "2,500 rules": {"grammar": "start: " + " | ".join(f'"a" x{n}' for n in range(2500)) + "".join(f'\nx{n}: "b"+ "{salt}"' for n in range(2500))},
    }  # fmt: skip


async def stream(engine: Any, name: str, gaps: list[float], begun: asyncio.Event) -> None:
    from dovetail import SamplingParams

    last = None
    async for _ in engine.generate(
        name, "ROMEO:", SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.8)
    ):
        now = time.perf_counter()
        if last is not None:
            gaps.append(1e3 * (now - last))
            begun.set()
        last = now


async def attack(engine: Any, name: str, rule: dict[str, Any]) -> str:
    from dovetail import SamplingParams, Structured
    from dovetail.errors import DovetailError

    try:
        outputs = [
            output
            async for output in engine.generate(
                name, "ROMEO:", SamplingParams(max_tokens=16, structured=Structured(**rule))
            )
        ]
    except DovetailError as error:
        return f"refused: {str(error)[:140]}"
    sample = outputs[-1].outputs[0]
    return f"{sample.finish_reason}: {str(sample.stop_reason)[:140]}"


async def run(grammar: str, rounds: int) -> None:
    from dovetail import AsyncLLMEngine

    async with AsyncLLMEngine.from_config({"model": "demo", "grammar": grammar}) as engine:
        await attack(engine, "warm", {"choice": ["a"]})
        for way in ("undisturbed", "attacked"):
            gaps: list[float] = []
            said: dict[str, str] = {}
            for number in range(rounds):
                begun = asyncio.Event()
                streams = [
                    asyncio.create_task(stream(engine, f"{way} {number} {n}", gaps, begun))
                    for n in range(STREAMS)
                ]
                await begun.wait()
                if way == "attacked":
                    rules = attacks(number)
                    answers = await asyncio.gather(
                        *(
                            attack(engine, f"attack {number} {name}", rule)
                            for name, rule in rules.items()
                        )
                    )
                    said = dict(zip(rules, answers, strict=True))
                await asyncio.gather(*streams)
            p50, p99, worst = np.percentile(gaps, [50, 99, 100])
            print(
                f"{grammar}, {way}: ITL p50 {p50:.2f} ms, p99 {p99:.2f} ms, at most {worst:.1f} ms"
            )
            for name, answer in said.items():
                print(f"    {name:24} {json.dumps(answer)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grammar", default="llguidance")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    asyncio.run(run(args.grammar, args.rounds))


if __name__ == "__main__":
    main()
