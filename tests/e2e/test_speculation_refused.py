"""An engine that can't check drafts refuses to start with speculation, and says why and what would
be right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from dovetail import LLMEngine, SamplingParams
from dovetail.api.drafter import Drafter, DrafterContext, ModelDrafter
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


class OfAnotherTokenizer(Drafter):
    def __init__(self, options: Any, context: Any) -> None:
        if context.encode("a b") != [1, 2]:
            raise UnsupportedError("these drafts are ids of another tokenizer")

    def propose(self, requests: Any, most: Any) -> Any:
        return []


class Told(Drafter):
    """Notes its context."""

    contexts: ClassVar[list[DrafterContext]] = []

    def __init__(self, options: Any, context: DrafterContext) -> None:
        super().__init__(options, context)
        self.contexts.append(context)

    def propose(self, requests: Any, most: Any) -> Any:
        return [()] * len(requests)


class ToldOfAModel(Told, Small):
    """Likewise, before models are loaded."""


@pytest.fixture
def installed(site: Site) -> None:  # noqa: F811
    here = __name__
    drafters = [
        f'kind="drafter", name={name.lower()!r}, target="{here}:{name}"'
        for name in ("Small", "Broken", "Gone", "OfAnotherTokenizer", "Told", "ToldOfAModel")
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
        (
            {"speculation": {"drafter": "ofanothertokenizer"}},
            UnsupportedError,
            "these drafts are ids of another tokenizer",
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


@pytest.mark.usefixtures("installed")
def test_a_drafter_is_given_the_sizes_the_tokenizer_and_the_ends_of_answers() -> None:
    config = {"model": "demo", "max_model_len": 64, "speculation": {"drafter": "told"}}
    with LLMEngine.from_config(config) as engine:
        context = Told.contexts.pop()
        assert (context.vocab_size, context.max_model_len) == (engine.capacity.vocab_size, 64)
        tokenizer = engine.get_tokenizer()
        assert context.encode("a b c") == tokenizer.encode("a b c", add_special_tokens=False)
        assert tokenizer.eos_token_id in context.eos_ids


@pytest.mark.slow("loads a draft model, too")
@pytest.mark.usefixtures("installed")
def test_a_drafter_with_a_model_has_a_tokenizer_but_no_sizes_yet() -> None:
    config = {"model": "demo", "max_model_len": 64, "speculation": {"drafter": "toldofamodel"}}
    with LLMEngine.from_config(config):
        context = Told.contexts.pop()
    assert (context.vocab_size, context.max_model_len) == (None, None)
    assert context.encode("a b c")


ONE_TOKEN = {"model": "demo", "max_num_batched_tokens": 1, "max_model_len": 64}
DRAFT_MODEL = {"drafter": {"name": "model", "model": "demo-draft"}, "max_drafts": 1}


def test_steps_of_one_token_have_no_room_for_drafts() -> None:
    with pytest.raises(UnsupportedError, match="raise max_num_batched_tokens"):
        LLMEngine.from_config({**ONE_TOKEN, "max_num_seqs": 1}, speculation=DRAFT_MODEL)


def test_costs_of_drafts_are_measured_with_no_more_rows_than_a_step_has() -> None:
    with LLMEngine.from_config({**ONE_TOKEN, "max_num_seqs": 9}, speculation=DRAFT_MODEL) as engine:
        assert engine.capacity.max_lines == 9
