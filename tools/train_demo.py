"""Trains the bundled demo model: a small Qwen3 that writes like Shakespeare.

    python tools/train_demo.py --data tinyshakespeare.txt --out DIR --device cuda

The first 90 % of the text trains a byte-level BPE tokenizer and the model; the last 10 % is held
out, decides when to stop, and is what the reported losses are measured on. The weights kept are the
moving average with the lowest held-out loss. DIR receives a Hugging Face model folder; nothing in
the engine imports this file.

A megabyte of text is far less than such a model could learn by heart, so most of the recipe is
against overfitting: dropout, weight decay, noise on the input tokens, averaged weights.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
IGNORED = -100  # the target that cross_entropy skips
ROPE_THETA = 10_000.0
TRAIN_SHARE = 0.9

# A conversation becomes a scene for two speakers; a system message is text that opens the scene.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'JULIET:\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'ROMEO:\\n' }}{% endif %}"
    "{{ message['content'] + '\\n\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ROMEO:\\n' }}{% endif %}"
)


def option(default: float, meaning: str) -> Any:
    """A field of `Recipe`: its default, and the help text of the command-line option it becomes."""
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the result, apart from the text and the device."""

    vocab_size: int = option(1024, "tokens in the vocabulary, the end-of-text token included")
    hidden_size: int = option(256, "width of the residual stream")
    intermediate_size: int = option(768, "width inside each MLP")
    num_layers: int = option(6, "transformer layers")
    num_heads: int = option(8, "query heads")
    num_kv_heads: int = option(4, "key/value heads")
    context_tokens: int = option(1024, "length of a training window, and the model's longest input")
    batch_windows: int = option(16, "windows a step")
    max_steps: int = option(1200, "length of the learning-rate schedule")
    warmup_steps: int = option(100, "steps over which the learning rate rises from zero")
    peak_lr: float = option(1.5e-3, "highest learning rate")
    weight_decay: float = option(2.0, "AdamW's decay of every matrix")
    dropout: float = option(
        0.15, "dropout on embeddings, attention weights and each block's output"
    )
    token_noise: float = option(0.05, "share of input tokens replaced by random ones")
    ema_decay: float = option(0.99, "decay of the moving average of the weights, a step")
    eval_every_steps: int = option(50, "steps between two looks at the held-out text")
    patience_evals: int = option(8, "stop after so many looks without a better held-out loss")
    seed: int = option(1, "seed of all randomness; a GPU's sums still vary in their last bits")


@dataclass(frozen=True, slots=True)
class Corpus:
    """The text as token ids.

    Attributes:
        train_ids: [num_train_tokens], ending with the end-of-text token.
        held_out_ids: [1 + num_held_out_tokens], starting with the end-of-text token, so that each
            token of the held-out text has something to be predicted from.
        held_out_bytes: length of the held-out text in UTF-8.
    """

    train_ids: Tensor
    held_out_ids: Tensor
    held_out_bytes: int

    def bits_per_byte(self, nats_per_token: float) -> float:
        """The held-out loss in a unit that does not depend on the vocabulary."""
        num_tokens = len(self.held_out_ids) - 1
        return nats_per_token * num_tokens / self.held_out_bytes / math.log(2)


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """Learns a byte-level BPE vocabulary in which `END_OF_TEXT` has the id `END_OF_TEXT_ID`."""
    tokenizer = Tokenizer(models.BPE())
    # GPT-2's word pattern keeps a newline apart from the punctuation before it, so a prompt may end
    # with "ROMEO:" and still be cut as the training text was.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def split_text(text: str) -> tuple[str, str]:
    """Cuts the text into (training, held-out) at `TRAIN_SHARE` of its length."""
    cut = int(len(text) * TRAIN_SHARE)
    return text[:cut], text[cut:]


def encode_corpus(train_text: str, held_out_text: str, tokenizer: Tokenizer) -> Corpus:
    """Turns both parts of the text into ids, each with its end-of-text token."""
    return Corpus(
        train_ids=torch.tensor([*tokenizer.encode(train_text).ids, END_OF_TEXT_ID]),
        held_out_ids=torch.tensor([END_OF_TEXT_ID, *tokenizer.encode(held_out_text).ids]),
        held_out_bytes=len(held_out_text.encode()),
    )


def training_batches(ids: Tensor, recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (inputs, targets) endlessly, both [batch_windows, context_tokens].

    The text is a ring, closed by its end-of-text token. Each epoch starts at another place of the
    ring, so the windows are never cut alike, and visits its windows in another order. Input tokens
    are random with probability `token_noise`; targets are always the text's.
    """
    rng = torch.Generator().manual_seed(recipe.seed)
    length = recipe.context_tokens
    while True:
        start = int(torch.randint(len(ids), (1,), generator=rng))
        ring = ids.roll(-start)
        # [num_windows, length + 1]: neighbours share one token, the target of one and input of the
        # next
        windows = ring.unfold(0, length + 1, length)
        order = torch.randperm(len(windows), generator=rng)
        for chosen in torch.split(order, recipe.batch_windows):
            batch = windows[chosen]
            inputs = batch[:, :-1]
            targets = batch[:, 1:]
            noise = torch.randint(recipe.vocab_size, inputs.shape, generator=rng)
            noisy = torch.rand(inputs.shape, generator=rng) < recipe.token_noise
            yield torch.where(noisy, noise, inputs), targets


def held_out_windows(ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cuts the held-out ids into (inputs, targets), both [num_windows, length].

    Windows overlap by half and only the second half of each is scored (the first window's whole),
    so every token is scored once, and all but the first few with half a context before it.
    """
    num_targets = len(ids) - 1
    half = length // 2
    starts = range(0, max(num_targets - half, 1), half)
    inputs = torch.full((len(starts), length), END_OF_TEXT_ID)
    targets = torch.full((len(starts), length), IGNORED)
    for row, start in enumerate(starts):
        stop = min(start + length, num_targets)
        first_scored = 0 if start == 0 else half
        inputs[row, : stop - start] = ids[start:stop]
        targets[row, first_scored : stop - start] = ids[start + first_scored + 1 : stop + 1]
    return inputs, targets


@torch.no_grad()
def held_out_loss(model: nn.Module, corpus: Corpus, recipe: Recipe, device: str) -> float:
    """Mean loss over every token of the held-out text, in nats a token, in float32.

    Leaves the model in evaluation mode.
    """
    model.eval()
    inputs, targets = held_out_windows(corpus.held_out_ids, recipe.context_tokens)
    total = 0.0
    for x, y in zip(torch.split(inputs, 32), torch.split(targets, 32), strict=True):
        logits = model(input_ids=x.to(device), use_cache=False).logits  # [windows, length, vocab]
        total += F.cross_entropy(
            logits.flatten(0, 1), y.to(device).flatten(), ignore_index=IGNORED, reduction="sum"
        ).item()
    return total / (len(corpus.held_out_ids) - 1)


def build_model(recipe: Recipe) -> Qwen3ForCausalLM:
    """A freshly initialised model with the recipe's shape and its dropout in place."""
    config = Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.hidden_size // recipe.num_heads,
        max_position_embeddings=recipe.context_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        attention_dropout=recipe.dropout,
        bos_token_id=None,
        eos_token_id=END_OF_TEXT_ID,
    )
    model = Qwen3ForCausalLM(config)
    add_dropout(model, recipe.dropout)
    return model


def add_dropout(model: Qwen3ForCausalLM, probability: float) -> None:
    """Adds dropout to the embeddings and to the output of each block while training.

    Qwen3 itself only has dropout on attention weights. Hooks add the rest without a parameter or a
    module of their own, so what is saved is a plain Qwen3.
    """

    def drop(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        return F.dropout(output, probability, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves the gains of the norms alone."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    gains = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak_lr, betas=(0.9, 0.99))


def learning_rate(step: int, progress: float, recipe: Recipe) -> float:
    """Linear warm-up by `step`, then a cosine down to 2 % of the peak as `progress` goes to 1."""
    warmup = min(1.0, (step + 1) / recipe.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    return recipe.peak_lr * warmup * (0.02 + 0.98 * cosine)


def train_step(
    model: nn.Module, inputs: Tensor, targets: Tensor, optimizer: torch.optim.Optimizer
) -> Tensor:
    """One update of `model` in bfloat16 autocast; returns the loss before it, still on the
    device."""
    model.train()
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=inputs, use_cache=False).logits  # [windows, length, vocab]
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    optimizer.zero_grad(set_to_none=True)
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def train(corpus: Corpus, recipe: Recipe, device: str, limit_s: float) -> Qwen3ForCausalLM:
    """Trains until the held-out loss stops falling, the schedule ends, or `limit_s` have passed.

    The learning rate follows the steps or the clock, whichever is further along, so that a run cut
    short by the clock has still cooled down. Returns the averaged model with the lowest loss.
    """
    torch.manual_seed(recipe.seed)
    model = build_model(recipe).to(device)
    moving_average = get_ema_multi_avg_fn(recipe.ema_decay)  # type: ignore[no-untyped-call]
    average = AveragedModel(model, multi_avg_fn=moving_average)
    optimizer = build_optimizer(model, recipe)
    batches = training_batches(corpus.train_ids, recipe)
    best_loss = math.inf
    best_model = model
    evals_since_best = 0
    started = time.monotonic()
    for step in range(1, recipe.max_steps + 1):
        elapsed_s = time.monotonic() - started
        progress = max(step / recipe.max_steps, elapsed_s / limit_s)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, progress, recipe)
        inputs, targets = next(batches)
        loss = train_step(model, inputs.to(device), targets.to(device), optimizer)
        average.update_parameters(model)

        if step % recipe.eval_every_steps and progress < 1.0:
            continue
        held_out = held_out_loss(average.module, corpus, recipe, device)
        print(
            f"step {step:5d}  {elapsed_s:6.1f} s  training loss {loss.item():.4f}"
            f"  held-out {held_out:.4f} nats/token  {corpus.bits_per_byte(held_out):.4f} bits/byte",
            flush=True,
        )
        evals_since_best += 1
        if held_out < best_loss:
            best_loss = held_out
            best_model = copy.deepcopy(average.module)
            evals_since_best = 0
        if progress >= 1.0 or evals_since_best >= recipe.patience_evals:
            break
    return best_model


def save_model(model: Qwen3ForCausalLM, out: Path) -> None:
    """Writes `config.json`, `generation_config.json` and `model.safetensors` (bfloat16)."""
    model.config.attention_dropout = 0.0
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=END_OF_TEXT_ID,
    )
    model.to(torch.bfloat16).save_pretrained(out)
    # transformers 5 moved this key into `rope_parameters`; readers of the older form look here.
    config_path = out / "config.json"
    config = json.loads(config_path.read_text()) | {"rope_theta": ROPE_THETA}
    write_json(config_path, dict(sorted(config.items())))


def save_tokenizer(tokenizer: Tokenizer, recipe: Recipe, out: Path) -> None:
    """Writes `tokenizer.json` and a `tokenizer_config.json` that `AutoTokenizer` reads."""
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": recipe.context_tokens,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(out / "tokenizer_config.json", settings)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes `value` as indented JSON with a newline at its end."""
    path.write_text(json.dumps(value, indent=2) + "\n")


@torch.no_grad()
def sample(model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompt: str, max_tokens: int) -> str:
    """Continues `prompt` with the settings of the model's `generation_config.json`."""
    ids = torch.tensor([tokenizer.encode(prompt).ids], device=model.device)
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens)
    return tokenizer.decode(tokens[0].tolist())


def parse_arguments() -> tuple[argparse.Namespace, Recipe]:
    """Reads the command line; each field of `Recipe` is an option of the same name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="the training text, UTF-8")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--device", default="cuda", help="a torch device (default: cuda)")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="longest training time (default: no limit)"
    )
    for knob in fields(Recipe):
        parser.add_argument(
            "--" + knob.name.replace("_", "-"),
            type=type(knob.default),
            default=knob.default,
            help=f"{knob.metadata['help']} (default: {knob.default})",
        )
    arguments = parser.parse_args()
    return arguments, Recipe(
        **{knob.name: getattr(arguments, knob.name) for knob in fields(Recipe)}
    )


def main() -> None:
    """Trains tokenizer and model, saves both, and reports what the saved files score."""
    arguments, recipe = parse_arguments()
    train_text, held_out_text = split_text(arguments.data.read_text(encoding="utf-8"))
    tokenizer = train_tokenizer(train_text, recipe.vocab_size)
    corpus = encode_corpus(train_text, held_out_text, tokenizer)
    print(
        f"{recipe}\n{len(corpus.train_ids)} training tokens, {len(corpus.held_out_ids)} held out",
        flush=True,
    )

    model = train(corpus, recipe, arguments.device, 60.0 * arguments.minutes)
    arguments.out.mkdir(parents=True, exist_ok=True)
    save_model(model, arguments.out)
    save_tokenizer(tokenizer, recipe, arguments.out)

    saved = AutoModelForCausalLM.from_pretrained(arguments.out, dtype=torch.float32).to(
        arguments.device
    )
    loss = held_out_loss(saved, corpus, recipe, arguments.device)
    print(sample(saved, tokenizer, "ROMEO:", max_tokens=200))
    print(f"saved model: {saved.num_parameters()} parameters")
    print(f"held-out loss {loss:.4f} nats/token, {corpus.bits_per_byte(loss):.4f} bits/byte")


if __name__ == "__main__":
    main()
