"""Measures drafters on edits of files, without a model: the answer is given, and each step accepts
the drafts that agree with it, plus one token.

    python -m bench.drafters
    python -m bench.drafters --drafter 'suffix' '{name: suffix, min_match: 3}' --max-drafts 4 8 16

The prompts are Python files of the standard library, as the demo model's tokenizer or as random ids
spell them; the answer is the same file with some lines left out, added or changed, and a name
replaced everywhere. For each drafter: tokens a step, the share of drafts that were right, and
microseconds of `propose` a step.
"""

from __future__ import annotations

import argparse
import random
import re
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from dovetail.api.drafter import DrafterContext
from dovetail.engine.live_request import LiveRequest
from dovetail.registry.models import resolve_model
from dovetail.registry.registry import Registry
from dovetail.request.sampling_params import SamplingParams

FILES = (
    "textwrap.py",
    "bisect.py",
    "heapq.py",
    "fnmatch.py",
    "sched.py",
    "queue.py",
    "colorsys.py",
    "cmd.py",
)
CHANGED = 0.05  # share of lines


class Work(NamedTuple):
    prompt: list[int]
    answer: list[int]


def edited(text: str, chance: random.Random) -> str:
    """Return a file with changed lines and a name replaced."""
    names = sorted(set(re.findall(r"\b[a-z_]{5,12}\b", text)))
    old = chance.choice(names)
    new = "".join(chance.choices("abcdefghij", k=7))
    lines = []
    for line in re.sub(rf"\b{old}\b", new, text).splitlines(keepends=True):
        kind = chance.random() / CHANGED
        if kind >= 1:
            lines.append(line)
        elif kind < 1 / 3:
            lines.append(line.replace("=", "+=", 1) if "=" in line else f"# {line}")
        elif kind < 2 / 3:
            lines += [
                line,
                line.split("(")[0].rstrip()
                + f"  # {''.join(chance.choices('abcdefghij ', k=20))}\n",
            ]
    return "".join(lines)


def edits() -> Iterator[Work]:
    from dovetail.front.tokenizer import Tokenizer

    registry = Registry.discover()
    tokenizer = Tokenizer.load(resolve_model("demo", registry))
    for number, name in enumerate(FILES):
        text = (Path(sysconfig.get_path("stdlib")) / name).read_text()[:6000]
        yield Work(
            list(tokenizer.encode(f"Edit this file:\n{text}\n")),
            list(tokenizer.encode(edited(text, random.Random(number)))),
        )


def random_ids() -> Iterator[Work]:
    """As `bench.speculation --work edit`: every 23rd token is replaced, every 64th left out."""
    for number in range(8):
        prompt = random.Random(number).choices(range(10_000), k=1000)
        answer = [(prompt[i] + (i % 23 == 22)) % 10_000 for i in range(1000) if i % 64 != 63]
        yield Work(prompt, answer)


def unrelated() -> Iterator[Work]:
    """Another file as the answer: drafts are seldom right."""
    works = list(edits())
    for one, other in zip(works, works[1:] + works[:1], strict=True):
        yield Work(one.prompt, other.answer)


def measure(drafter: str, works: Sequence[Work], max_drafts: int) -> tuple[float, float, float]:
    """Return tokens a step, the share of drafts that were right, and seconds a step."""
    choice = yaml.safe_load(drafter)
    options = (
        {key: value for key, value in choice.items() if key != "name"}
        if isinstance(choice, dict)
        else {}
    )
    resolved = Registry.discover().resolve(
        "drafter", choice["name"] if isinstance(choice, dict) else choice, options
    )
    subject = resolved.make(
        DrafterContext(vocab_size=2**17, max_drafts=max_drafts, max_model_len=2**17)
    )
    steps = tokens = proposed = right = 0
    took_s = 0.0
    for number, work in enumerate(works):
        request = LiveRequest(
            f"r{number}",
            work.prompt,
            SamplingParams(max_tokens=len(work.answer)),
            max_tokens=len(work.answer),
        )
        request.output.append(work.answer[0])  # by the prefill
        while left := len(work.answer) - request.generated:
            started = time.perf_counter()
            [drafts] = subject.propose([request], [min(max_drafts, left - 1)]) if left > 1 else [[]]
            took_s += time.perf_counter() - started
            expected = work.answer[request.generated :]
            agreed = next(
                (
                    i
                    for i, (draft, token) in enumerate(zip(drafts, expected, strict=False))
                    if draft != token
                ),
                len(drafts),
            )
            request.output.extend(expected[: agreed + 1])
            steps += 1
            tokens = tokens + min(agreed + 1, left)
            proposed = proposed + len(drafts)
            right = right + agreed
        subject.on_finished(request)
    return tokens / steps, right / max(1, proposed), took_s / steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--drafter", nargs="+", default=["ngram", "suffix"], help="names, or mappings in YAML"
    )
    parser.add_argument("--max-drafts", nargs="+", type=int, default=[4, 8, 16])
    args = parser.parse_args()
    for name, works in (
        ("edits", list(edits())),
        ("random ids", list(random_ids())),
        ("unrelated", list(unrelated())),
    ):
        for drafter in args.drafter:
            for most in args.max_drafts:
                rate, share, seconds = measure(drafter, works, most)
                print(
                    f"{name:10}  {drafter:40}  {most:2} drafts: {rate:5.2f} tokens a step, "
                    f"{share:4.0%} right, {1e6 * seconds:4.0f} µs a step"
                )


if __name__ == "__main__":
    main()
