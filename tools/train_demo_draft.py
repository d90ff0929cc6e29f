"""Trains the bundled draft model: a tiny Qwen3 that imitates the demo model, to draft for it.

    python tools/train_demo_draft.py --data tinyshakespeare.txt --out DIR

It has the demo model's vocabulary, and learns the demo model's distribution at each position of the
training text (knowledge distillation): what counts is how often both draw the same token, not how
well it writes. Those logits are computed once, so that some minutes on a CPU suffice.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from train_demo import (
    Recipe,
    build_model,
    build_optimizer,
    encode_corpus,
    learning_rate,
    save_model,
    split_text,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

DEMO = Path(__file__).parents[1] / "plugins" / "models" / "dovetail_models" / "demo"
RECIPE = Recipe(
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    dropout=0.0,
    batch_windows=8,
    max_steps=800,
    peak_lr=6e-3,
    weight_decay=0.01,
)
WINDOW = 256  # tokens


@torch.no_grad()
def targets(teacher: Qwen3ForCausalLM, windows: Tensor) -> Tensor:
    """Return the teacher's logits [num_windows, WINDOW, vocab] float16 for windows [num_windows,
    WINDOW]."""
    return torch.cat(
        [teacher(input_ids=some, use_cache=False).logits.half() for some in torch.split(windows, 8)]
    )


def divergence(student: Qwen3ForCausalLM, windows: Tensor, logits: Tensor) -> Tensor:
    """Return the mean KL divergence of the student from the teacher with these `logits`, in nats a
    token."""
    own = student(input_ids=windows, use_cache=False).logits.float()
    return F.kl_div(
        own.log_softmax(-1).flatten(0, 1),
        logits.float().log_softmax(-1).flatten(0, 1),
        reduction="batchmean",
        log_target=True,
    )


@torch.no_grad()
def agreement(student: Qwen3ForCausalLM, windows: Tensor, logits: Tensor) -> float:
    """Return how often both draw the same token with the same noise, at temperature 1."""
    noise = torch.empty(logits.shape).exponential_(generator=torch.Generator().manual_seed(1)).log()
    own = student(input_ids=windows, use_cache=False).logits.float()
    return float(((own - noise).argmax(-1) == (logits.float() - noise).argmax(-1)).float().mean())


def main() -> None:
    """Train, save, and report how often the draft model draws the demo model's token on the
    held-out text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="the training text, UTF-8")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    arguments = parser.parse_args()
    corpus = encode_corpus(
        *split_text(arguments.data.read_text(encoding="utf-8")),
        AutoTokenizer.from_pretrained(DEMO).backend_tokenizer,
    )
    teacher = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    learned, held_out = (
        ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
        for ids in (corpus.train_ids, corpus.held_out_ids)
    )
    learned = learned[::2]
    held_out = held_out[::8]
    logits = targets(teacher, learned)
    held_out_logits = targets(teacher, held_out)
    torch.manual_seed(RECIPE.seed)
    student = build_model(RECIPE)
    optimizer = build_optimizer(student, RECIPE)
    order = torch.Generator().manual_seed(RECIPE.seed)
    for step in range(RECIPE.max_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, step / RECIPE.max_steps, RECIPE)
        chosen = torch.randint(len(learned), (RECIPE.batch_windows,), generator=order)
        loss = divergence(student, learned[chosen], logits[chosen])
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            print(
                f"step {step + 1}  training {loss.item():.3f}  held-out agreement "
                f"{agreement(student, held_out, held_out_logits):.3f}",
                flush=True,
            )
            arguments.out.mkdir(parents=True, exist_ok=True)
    save_model(student, arguments.out)
    print(f"{student.num_parameters()} parameters")


if __name__ == "__main__":
    main()
