"""Sequences that check drafts in a model's recurrent layers, beside others; uses `model_bench`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from dovetail.testing.suites.model_bench import Bench, Chunk

PROMPT = 9  # tokens of the prompt that siblings share
LENGTH = 26  # tokens of each text


@dataclass(frozen=True, slots=True)
class Compared:
    """Logits, or a state, that drafts led to, and those of the same tokens in one step."""

    what: str
    found: torch.Tensor
    expected: torch.Tensor


@dataclass
class Drafting:
    """Computes `texts` [tokens] in steps that check drafts. `expected`: the logits [tokens, vocab]
    of each text. The results that are compared are in `compared`."""

    bench: Bench
    texts: Mapping[str, torch.Tensor]
    expected: Mapping[str, torch.Tensor]
    vocab_size: int
    done: dict[str, int] = field(default_factory=dict)  # tokens of each text that are computed
    compared: list[Compared] = field(default_factory=list)

    def compute(self, name: str, tokens: int, *, checkpoint: int = 0) -> None:
        """Compute the next tokens of a text in a step without drafts."""
        start = self.done.get(name, 0)
        self.bench.step(Chunk(name, self.texts[name][start : start + tokens], start, checkpoint))
        self.done[name] = start + tokens

    def check(
        self,
        drafts: Mapping[str, tuple[int, int]],
        chunk: tuple[str, int] | None = None,
        *,
        when: str,
    ) -> None:
        """Compute a step in which sequences check drafts, (their number, how many of them are
        right), and perhaps a chunk of another text, (its name, tokens)."""
        parts = [self._guessed(name, *counts) for name, counts in drafts.items()]
        counted = [1 + right for _, right in drafts.values()]
        if chunk is not None:
            name, tokens = chunk
            start = self.done.get(name, 0)
            parts.append(Chunk(name, self.texts[name][start : start + tokens], start))
            counted.append(tokens)
        hidden = self.bench.step(*parts)
        self.bench.accept({name: right for name, (_, right) in drafts.items()})
        at = 0
        for part, count in zip(parts, counted, strict=True):
            logits = self.bench.logits(hidden[at : at + count])
            expected = self.expected[part.sequence][part.start : part.start + count]
            self.compared.append(Compared(f"logits {when}", logits, expected))
            self.done[part.sequence] = part.start + count
            at += len(part.token_ids)

    def _guessed(self, name: str, drafts: int, right: int) -> Chunk:
        """The known token of a text and drafts after it, of which the first `right` are right."""
        start = self.done[name]
        ids = self.texts[name][start : start + 1 + drafts].clone()
        ids[1 + right :] = (ids[1 + right :] + 1) % self.vocab_size
        return Chunk(name, ids, start, drafts=drafts)

    def run(self) -> None:
        """Compute the texts a, b, c, and d and e, which begin with the first `PROMPT` tokens of
        c."""
        self.compute("a", 5)
        self.compute("b", 1)
        self.check({"a": (3, 3), "b": (3, 0)}, when="of drafts that count, and of none that do")
        self.check({"b": (0, 0), "a": (2, 1)}, when="of drafts beside a row without any")
        self.compute("c", PROMPT, checkpoint=PROMPT)
        self.check({"a": (1, 1), "b": (2, 1)}, ("c", 4), when="of drafts beside a chunk")
        for sibling in "de":
            self.bench.fork("c", sibling, PROMPT)
            self.done[sibling] = PROMPT
        self.check({"d": (3, 2), "e": (3, 1)}, when="of drafts of two samples of one prompt")
        self.check({"d": (2, 2), "e": (0, 0)}, ("c", 2), when="of drafts after accepted ones")
        tokens = self.done.pop("a")
        self.bench.forget("a")
        self.compute("a", tokens)
        self.check({"a": (3, 2), "b": (1, 0)}, when="of drafts after a preemption")
        self.check({"a": (0, 0), "e": (0, 0)}, when="of single tokens after drafts")

    def compare_states(self, whole: Bench) -> None:
        """Compare the states with those of `whole`, which computes each text in one step."""
        for name, tokens in self.done.items():
            whole.step(Chunk(name, self.texts[name][:tokens], 0))
            pairs = zip(self.bench.states_of(name), whole.states_of(name), strict=True)
            for found, expected in pairs:
                self.compared.append(Compared("states after drafts", found, expected))
