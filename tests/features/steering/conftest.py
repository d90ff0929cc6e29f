"""Engines with the feature, a stranger's distribution, and what they should generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail import LLMEngine
from dovetail.api.clock import Clock
from tests.e2e.conftest import trusted_rules  # noqa: F401
from tests.e2e.drafting import Free
from tests.features.steering.executors import SteeredLocal, SteeredTensor
from tests.features.steering.parts import DISTRIBUTION
from tests.registry.fakes import Site, components, modules_forgotten
from tests.small_model import small_demo

LAYER = 1
NAMES = ("calm", "grim", "loud")  # of vectors
STRENGTH = 0.4  # of the vectors: tokens change, and still vary
_HERE = "tests.features.steering"
_OF_BOTH = f'request_extra="{_HERE}.parts:Steered"'
PLUGIN = components(
    f'kind="executor", name="steered", target="{_HERE}.executors:SteeredLocal", '
    f'options="{_HERE}.parts:LocalSteering", {_OF_BOTH}',
    f'kind="executor", name="steered-ranks", target="{_HERE}.executors:SteeredTensor", '
    f'options="{_HERE}.parts:TensorSteering", {_OF_BOTH}',
    f'kind="executor", name="steered-free", target="{_HERE}.conftest:FreelySteered", '
    f'options="{_HERE}.parts:LocalSteering", {_OF_BOTH}',
    f'kind="executor", name="steered-free-ranks", target="{_HERE}.conftest:FreelySteeredRanks", '
    f'options="{_HERE}.parts:TensorSteering", {_OF_BOTH}',
)


class FreelySteered(Free, SteeredLocal):
    """All of its steps take as long, so drafts are checked as long as there is hope."""


class FreelySteeredRanks(Free, SteeredTensor):
    """Likewise."""


@dataclass(frozen=True)
class Oracle:
    """Transformers' model, and the vectors that a hook adds after `LAYER`."""

    model: Any
    vectors: dict[str, torch.Tensor]

    @torch.inference_mode()
    def generated(self, prompt: Sequence[int], vector: str | None, count: int) -> list[int]:
        """Return the likeliest tokens after a prompt, alone."""

        def add(layer: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output if vector is None else output + self.vectors[vector]

        hook = self.model.model.layers[LAYER].register_forward_hook(add)
        try:
            ids = list(prompt)
            for _ in range(count):
                ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
            return ids[len(prompt) :]
        finally:
            hook.remove()


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(small_demo(), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(3)
    size = model.config.hidden_size
    vectors = {name: STRENGTH * torch.randn(size, generator=generator) for name in NAMES}
    return Oracle(model, vectors)


@pytest.fixture(scope="session")
def files(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("vectors")
    paths = {name: folder / f"{name}.npy" for name in oracle.vectors}
    for name, path in paths.items():
        np.save(path, oracle.vectors[name].numpy())
    return {name: str(path) for name, path in paths.items()}


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch, modules_forgotten(folder):
        patch.delenv("DOVETAIL_PLUGINS", raising=False)
        patch.syspath_prepend(str(folder))
        Site(folder).install(DISTRIBUTION, modules={"steering_plugin": PLUGIN})
        yield folder


Settings = Callable[..., dict[str, Any]]


@pytest.fixture
def settings(installed: Path, files: dict[str, str]) -> Settings:
    """Returns settings of an engine, with changes: of the executor's options, as `executor`."""

    def made(executor: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        own = {"name": "steered", "device": "cpu", "num_pages": 64, "layer": LAYER}
        own["vectors"] = files
        return {
            "model": small_demo(),
            "dtype": "float32",
            "max_model_len": 64,
            "max_num_seqs": 8,
            "generation_config": "none",
            "executor": own | (executor or {}),
            **changes,
        }

    return made


@pytest.fixture
def engine(settings: Settings) -> Iterator[Callable[..., LLMEngine]]:
    """Returns engines, which are closed at the end."""
    made: list[LLMEngine] = []

    def make(
        executor: dict[str, Any] | None = None, clock: Clock | None = None, **changes: Any
    ) -> LLMEngine:
        made.append(LLMEngine.from_config(settings(executor, **changes), clock=clock))
        return made[-1]

    yield make
    for one in made:
        one.close()
