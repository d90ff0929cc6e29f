"""An engine that can't check drafts refuses to start with speculation, and says why and what would
be right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dovetail import LLMEngine, SamplingParams
from dovetail.api.drafter import Drafter, ModelDrafter
from dovetail.api.executor import Capacity, ExecutorCapabilities
from dovetail.api.sampler import SamplerCapabilities
from dovetail.errors import PluginError, UnsupportedError
from dovetail.nn.state import DeltaShape
from dovetail_executors.local import LocalExecutor
from dovetail_samplers.default import DefaultSampler
from tests.e2e.reference import checkpoint
from tests.models import hybrids
from tests.registry.fakes import Site, components
from tests.registry.site import site  # noqa: F401


class WithoutDrafts(DefaultSampler):
    capabilities = SamplerCapabilities()


class Modest(LocalExecutor):
    capabilities = ExecutorCapabilities(masks=True)

    def start(self) -> Capacity:
        return replace(super().start(), max_lines=0)


class Small(ModelDrafter):
    @property
    def model(self) -> str:
        return "demo"


class Broken(Drafter):
    def __init__(self, options: Any, context: Any) -> None:
        raise ValueError(f"no drafts of {context.max_drafts}")

    def propose(self, requests: Any, most: Any) -> Any:
        return []


@pytest.fixture
def installed(site: Site) -> None:  # noqa: F811
    here = __name__
    drafters = [
        f'kind="drafter", name={name.lower()!r}, target="{here}:{name}"'
        for name in ("Small", "Broken", "Gone")
    ]
    sampler = f'kind="sampler", name="without", target="{here}:WithoutDrafts"'
    executor = (
        f'kind="executor", name="modest", target="{here}:Modest", '
        f'options="dovetail_executors.options:LocalOptions"'
    )
    site.install(
        "dovetail-refused", modules={"refused_plugin": components(*drafters, sampler, executor)}
    )


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        (
            {"sampler": "without"},
            UnsupportedError,
            r"sampler dovetail-refused:without can't sample after drafts.*use the sampler `def",
        ),
        (
            {"max_num_batched_tokens": 8, "max_num_seqs": 1},
            UnsupportedError,
            r"speculation.max_drafts is 8, but a step .* can check 7 drafts",
        ),
        (
            {"executor": "modest"},
            UnsupportedError,
            r"executor dovetail-refused:modest can't check drafts",
        ),
        (
            {"speculation": {"drafter": "small"}, "executor": "modest"},
            UnsupportedError,
            r"speculation.drafter: dovetail-refused:small drafts with a model, which executor "
            r"dovetail-refused:modest can't run.*`suffix`",
        ),
        (
            {"speculation": {"drafter": "broken"}},
            PluginError,
            "drafter dovetail-refused:broken .*no drafts of 8",
        ),
        ({"speculation": {"drafter": "gone"}}, PluginError, r"speculation.drafter: .*gone"),
        (
            {"speculation": {"drafter": "sufix"}},
            PluginError,
            r"speculation.drafter: unknown drafter 'sufix', did you mean suffix\?",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    config: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        LLMEngine.from_config(
            {"model": "demo", "max_model_len": 64, "speculation": {"max_drafts": 8}, **config}
        )


def test_a_model_whose_recurrent_layers_declare_no_drafts_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = DeltaShape.spec
    monkeypatch.setattr(
        DeltaShape, "spec", lambda shape, index: replace(spec(shape, index), drafts=False)
    )
    with (
        checkpoint(hybrids.qwen3_next()) as (directory, _),
        pytest.raises(UnsupportedError, match="recurrent layer 0 of the model can't check drafts"),
    ):
        LLMEngine.from_config({"model": str(directory), "max_model_len": 64, "speculation": {}})


@pytest.mark.parametrize("max_drafts", [None, 0, 1, 10**9])
def test_a_request_lowers_its_drafts_and_has_the_same_tokens(max_drafts: int | None) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=12, max_drafts=max_drafts, output_kind="final"
    )
    with LLMEngine.from_config(
        {"model": "demo", "max_model_len": 64, "speculation": {"drafter": "ngram", "max_drafts": 4}}
    ) as engine:
        engine.add_request("r", "a b c a b c a b", params)
        while engine.has_unfinished_requests():
            [output] = engine.step() or [None]
        assert output is not None
        assert len(output.outputs[0].token_ids) == 12
        assert engine.stats().draft_tokens == 0 or max_drafts != 0
