"""Workloads of docs/performance.md: prompts and output lengths. Each call of `prompts` draws new
token ids of the same lengths."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Workload:
    shape: str
    lens: tuple[tuple[int, int], ...]  # (prompt, output) tokens of each request
    shared_prefix: int = 0
    max_id: int = 10_000
    temperature: float = 0.6
    # further sampling parameters, as Dovetail and vLLM call them
    params: dict[str, Any] = field(default_factory=dict)
    max_num_seqs: int | None = None  # None: as many as there are requests
    runs: int = 3  # that are timed
    warm: int | None = None  # requests of the run before these; None: all
    seed: int = 0  # of the token ids: engines keep the prefixes of workloads with the same

    def prompts(self, seed: int) -> list[list[int]]:
        rng = random.Random(self.seed + seed)
        shared = [rng.randint(0, self.max_id) for _ in range(self.shared_prefix)]
        return [
            shared + [rng.randint(0, self.max_id) for _ in range(prompt - self.shared_prefix)]
            for prompt, _ in self.lens
        ]

    @property
    def output_tokens(self) -> int:
        return sum(out for _, out in self.lens)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt plus output."""
        return max(prompt + out for prompt, out in self.lens)

    @property
    def seqs(self) -> int:
        """Number of concurrent requests."""
        return self.max_num_seqs or len(self.lens)

    @property
    def prompt_tokens(self) -> int:
        return sum(prompt for prompt, _ in self.lens)


def _nano() -> tuple[tuple[int, int], ...]:
    """nano-vllm's benchmark: 256 requests of 100 to 1,024 tokens in and out, drawn as it draws
    them."""
    rng = random.Random(0)
    prompts = [
        len([rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))]) for _ in range(256)
    ]
    return tuple((prompt, rng.randint(100, 1024)) for prompt in prompts)


WORKLOADS = {
    "nano": Workload("qwen3-0.6b", _nano()),
    "one": Workload("qwen3-0.6b", ((500, 512),)),
    "eight": Workload("qwen3-0.6b", ((30, 2000),) * 8),
    "thousand": Workload("qwen3-0.6b", ((128, 128),) * 1024),
    "shared": Workload("qwen3-0.6b", ((2050, 16),) * 2048, shared_prefix=2000, max_num_seqs=2048),
    "long": Workload("qwen3-0.6b", ((8000, 300),) * 64),
    "8b-64": Workload("qwen3-8b", ((1024, 512),) * 64),
    "8b-256": Workload("qwen3-8b", ((1024, 512),) * 256),
    "8b-one": Workload("qwen3-8b", ((500, 256),)),
    "moe-one": Workload("qwen3-30b-a3b", ((500, 256),)),
    "moe-64": Workload("qwen3-30b-a3b", ((1024, 512),) * 64),
    "moe-256": Workload("qwen3-30b-a3b", ((1024, 512),) * 256),
    "gemma-64": Workload("gemma-3-4b", ((8000, 300),) * 64),
    "gemma-32k": Workload("gemma-3-4b", ((32_000, 300),) * 16),
    "oss-64": Workload("gpt-oss-20b", ((8000, 300),) * 64),
    # All requests of a run are queued at once, in the lengths of TensorRT-LLM's tables.
    "oss-1k-1k": Workload("gpt-oss-20b", ((1000, 1000),) * 512, runs=1, warm=64),
    "oss-1k-8k": Workload("gpt-oss-20b", ((1024, 8192),) * 128, runs=1, warm=4),
    "oss-8k-1k": Workload("gpt-oss-20b", ((8192, 1024),) * 192, runs=1, warm=8),
    "oss-32k-1k": Workload("gpt-oss-20b", ((32_768, 1024),) * 24, runs=1, warm=2),
    "8b-prefill": Workload("qwen3-8b", ((8192, 1),) * 16),
    "q35-one": Workload("qwen3.5-4b", ((500, 256),)),
    "q35-64": Workload("qwen3.5-4b", ((1024, 512),) * 64),
    "q35-prefill": Workload("qwen3.5-4b", ((8192, 1),) * 8),
    "next-one": Workload("qwen3-next", ((500, 256),)),
    "next-64": Workload("qwen3-next", ((1024, 512),) * 64),
    "next-prefill": Workload("qwen3-next", ((8192, 1),) * 8),
}
