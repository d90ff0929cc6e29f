"""Speculative decoding beside plain decoding, on one GPU and in one run: tokens per second, and how
many tokens a step yields.

    python -m bench.speculation --rows 1 8 64 --drafter none oracle --max-drafts 4
    python -m bench.speculation --rows 1 8 64 256 --drafter none adversary
    python -m bench.speculation --work edit --rows 1 8 --drafter none suffix ngram --max-drafts 8 --json out.json
    python -m bench.speculation --drafter none eagle3 --max-drafts 4 --acceptance 0.85

Random weights in the model's true shape, bfloat16. With random weights no drafter could be right,
so the answers are fixed: the sampler draws as usual, but returns the token that the rule
`answer_id` determines. The oracle knows the rule, the adversary is always wrong. Answers of the work
`fixed` can't be found in the prompts; those of `edit` are the prompt, with every 23rd token
replaced and every 64th left out. `eagle3` is a head of random weights in the true shape of those
for the model; its drafts are right at a share of all positions (`--acceptance`): with four drafts
and 0.85, 3.7 tokens a step. One warm-up call, then three timed runs; each drafter runs in a process
of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.apart import apart
from bench.limits import require_gpu
from bench.shapes import SHAPES, Shape, write_checkpoint
from dovetail.api.component import ComponentSpec, hookimpl
from dovetail.api.drafter import Drafter
from dovetail.api.sampler import Lines, SampledTokens, SampleInputs
from dovetail.request import Request
from dovetail_samplers.default import DefaultSampler

MAX_ID = 10_000
REPLACED = 23
LEFT_OUT = 64
RUNS = 3
DRAFTERS = {
    "none": None,
    "oracle": "dovetail-bench-speculation:oracle",
    "adversary": "dovetail-bench-speculation:adversary",
}
EDITS = True  # set by `--work`
ACCEPTANCE = 1.0  # share of positions at which a draft of a head is right
DRAFT_VOCAB = 32_000
# an id that no head of random weights drafts: its ids are apart by vocab // DRAFT_VOCAB
NOT_DRAFTED = 1


def answer_id(prompt: Any, prompt_len: Any, position: Any, edits: bool) -> Any:
    """Return the id at `position` of an answer: of integers, or elementwise of arrays or tensors.
    `prompt(i)`: the prompt's id at i."""
    if not edits:
        return (position * 7919 + prompt_len * 31) % MAX_ID
    copied = prompt((position + position // LEFT_OUT) % prompt_len)
    return (copied + (position % REPLACED == REPLACED - 1)) % MAX_ID


class ForcedSampler(DefaultSampler):
    """Draws as the default sampler does, then returns the answers' ids."""

    def sample(self, inputs: SampleInputs) -> SampledTokens:
        is_draft = inputs.logits[:, NOT_DRAFTED].isneginf()
        sampled = super().sample(inputs)
        forced = self._forced(inputs.lines, sampled.token_ids, is_draft)
        return SampledTokens(forced, sampled.logprobs)

    def _forced(self, lines: Lines, drawn: torch.Tensor, is_draft: torch.Tensor) -> torch.Tensor:
        history = self.context.history
        prompt_lens = history.prompt_lens[lines.rows].long().clamp(min=1)
        positions = history.lengths(lines).long() - prompt_lens
        ids = history.token_ids
        right = (
            answer_id(
                lambda i: ids[lines.rows, i.clamp(min=0)].long(), prompt_lens, positions, EDITS
            )
            + 0 * drawn
        )
        if ACCEPTANCE == 1:
            return right
        chance = ((positions * 2_654_435_761 + lines.rows * 40_503) >> 8) % 1000
        return (right + (is_draft & (chance >= 1000 * ACCEPTANCE))) % MAX_ID


class Oracle(Drafter):
    """Always right."""

    off = 0  # added to each id

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> Sequence[Sequence[int]]:
        drafts = []
        for request, count in zip(requests, most, strict=True):
            prompt = request.prompt_token_ids
            at = range(request.generated, request.generated + count)
            drafts.append(
                [
                    (answer_id(prompt.__getitem__, len(prompt), i, EDITS) + self.off) % MAX_ID
                    for i in at
                ]
            )
        return drafts


class Adversary(Oracle):
    """Always wrong."""

    off = 1


@hookimpl
def dovetail_components() -> list[ComponentSpec]:
    here = "bench.speculation"
    return [
        ComponentSpec(
            kind="sampler",
            name="forced",
            target=f"{here}:ForcedSampler",
            api="1.0",
            summary="Answers of a rule",
        ),
        ComponentSpec(
            kind="drafter",
            name="oracle",
            target=f"{here}:Oracle",
            api="1.0",
            summary="Always right",
        ),
        ComponentSpec(
            kind="drafter",
            name="adversary",
            target=f"{here}:Adversary",
            api="1.0",
            summary="Always wrong",
        ),
    ]


def install(directory: Path) -> None:
    """Let this process, and those that it starts, find the components above."""
    info = directory / "dovetail_bench_speculation-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: dovetail-bench-speculation\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text("[dovetail.plugins]\nmain = bench.speculation\n")
    sys.path.insert(0, str(directory))


def write_head(shape: Shape, directory: Path) -> None:
    """config.json of an EAGLE-3 head for a model of this shape: one layer as the model's, without
    norms of heads."""
    layer = {
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_len,
    }
    config = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": True,
        "transformer_layer_config": layer,
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))


def run(
    directory: str,
    drafter: Any,
    rows: int,
    lens: tuple[int, int],
    max_drafts: int,
    temperature: float,
    edits: bool,
    acceptance: float,
) -> dict[str, Any]:
    """Measure one engine. Its answers are checked against the rule. `drafter`: its name, or what
    `speculation.drafter` is."""
    import bench.speculation as home  # components are made from this module, not from `__main__`
    from dovetail import LLM, SamplingParams

    home.EDITS = edits
    home.ACCEPTANCE = acceptance
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_num_seqs": rows,
        "max_model_len": sum(lens),
        "sampler": "dovetail-bench-speculation:forced",
    }
    if drafter != "none":
        settings["speculation"] = {
            "drafter": drafter if isinstance(drafter, dict) else DRAFTERS.get(drafter, drafter),
            "max_drafts": max_drafts,
        }
    with LLM(directory, **settings) as llm:
        params = SamplingParams(
            temperature=temperature, ignore_eos=True, max_tokens=lens[1], detokenize=False
        )
        times = []
        wrong = 0
        steps = device = 0.0
        for index in range(1 + RUNS):
            rng = np.random.default_rng(index)
            prompts = rng.integers(0, MAX_ID, (rows, lens[0])).tolist()
            before = llm.engine.stats()
            before_steps = before.steps
            before_device = before.device_s
            begun = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - begun
            after = llm.engine.stats()
            if index:
                times.append(seconds)
                steps = after.steps - before_steps
                device = after.device_s - before_device
            for prompt, output in zip(prompts, outputs, strict=True):
                expected = [
                    answer_id(prompt.__getitem__, len(prompt), i, edits) for i in range(lens[1])
                ]
                wrong += list(output.outputs[0].token_ids) != expected
    if wrong:
        raise SystemExit(f"{drafter}, {rows} rows: {wrong} answers are wrong")
    median = statistics.median(times)
    return {
        "drafter": drafter["name"] if isinstance(drafter, dict) else drafter,
        "rows": rows,
        "lens": lens,
        "tok_s": rows * lens[1] / median,
        "seconds": times,
        "steps": steps,
        "tokens_a_step_and_row": lens[1] / steps,
        "device_ms_a_step": 1e3 * device / steps,
        "wall_ms_a_step": 1e3 * times[-1] / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=[1])
    parser.add_argument(
        "--lens", nargs=2, type=int, default=(500, 256), metavar=("PROMPT", "OUTPUT")
    )
    parser.add_argument(
        "--drafter",
        nargs="+",
        default=["none", "oracle"],
        help="oracle, adversary, eagle3, or another installed one",
    )
    parser.add_argument("--max-drafts", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--work", choices=("fixed", "edit"), default="fixed")
    parser.add_argument(
        "--acceptance",
        type=float,
        default=1.0,
        help="share of positions at which the drafts of eagle3 are right",
    )
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    require_gpu()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        install(Path(directory, "plugin"))
        checkpoint = Path(directory, "model")
        checkpoint.mkdir()
        write_checkpoint(SHAPES[args.shape], checkpoint, None)
        write_head(SHAPES[args.shape], Path(directory, "head"))
        eagle3 = {"name": "eagle3", "model": str(Path(directory, "head"))}
        for rows in args.rows:
            plain = 0.0
            for drafter in args.drafter:
                chosen = eagle3 if drafter == "eagle3" else drafter
                settings = (
                    tuple(args.lens),
                    args.max_drafts,
                    args.temperature,
                    args.work == "edit",
                    args.acceptance,
                )
                row = apart(run, str(checkpoint), chosen, rows, *settings)
                plain = row["tok_s"] if drafter == "none" else plain
                row["times_plain"] = row["tok_s"] / plain if plain else None
                results.append(row)
                print(json.dumps(row), flush=True)
                if args.json:
                    Path(args.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
