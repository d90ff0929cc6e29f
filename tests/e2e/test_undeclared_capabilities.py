"""An engine works without a capability that a component doesn't declare, or rejects requests that
need it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dovetail import LLMEngine, SamplingParams, Structured
from dovetail.api.executor import ExecutorCapabilities
from dovetail.api.grammar import GrammarCapabilities
from dovetail.api.kv_cache import KVCapabilities
from dovetail.api.prefix_cache import PrefixCache
from dovetail.api.tokenizer import TokenizerCapabilities
from dovetail.errors import RequestError
from dovetail.front.component_tokenizer import ComponentTokenizer
from dovetail.registry.registry import Registry
from dovetail.request import Request
from dovetail_executors.local import LocalExecutor
from dovetail_grammars.llguidance_backend import LLGuidance
from tests.conformance.mutants.tokenizer import Normalizes
from tests.registry.fakes import Site, components
from tests.registry.site import site  # noqa: F401

SMALL: dict[str, Any] = {"model": "demo", "max_model_len": 64}
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, output_kind="final")


class QuietCache(PrefixCache):
    """Declares nothing, and must not be asked to fork."""

    capabilities = KVCapabilities()

    def fork(self, parent: Request, child: Request, num_tokens: int) -> Any:
        raise AssertionError("it can't")


class QuietExecutor(LocalExecutor):
    capabilities = ExecutorCapabilities()


class QuietGrammars(LLGuidance):
    capabilities = GrammarCapabilities()


class QuietTokenizer(Normalizes):
    """Changes texts, and doesn't claim otherwise."""

    capabilities = TokenizerCapabilities()


@pytest.fixture(autouse=True)
def installed(site: Site) -> None:  # noqa: F811
    made = {
        "kv_cache": ("QuietCache", "dovetail.api.prefix_cache:PrefixOptions"),
        "executor": ("QuietExecutor", "dovetail_executors.options:LocalOptions"),
        "grammar": ("QuietGrammars", "dovetail_grammars.options:GrammarOptions"),
    }
    declared = [
        f'kind={kind!r}, name="quiet", target="{__name__}:{name}", options={options!r}'
        for kind, (name, options) in made.items()
    ]
    declared.append(f'kind="tokenizer", name="quiet", target="{__name__}:QuietTokenizer"')
    site.install("dovetail-quiet", modules={"quiet_plugin": components(*declared)})


def answers(params: SamplingParams, **config: Any) -> list[list[int]]:
    """Return the token ids of the samples of one prompt."""
    with LLMEngine.from_config({**SMALL, **config}) as engine:
        engine.add_request("r", "a b c d e f g h i j k l m n o p q r s t", params)
        last = None
        while engine.has_unfinished_requests():
            for output in engine.step():
                last = output
    assert last is not None
    return [list(one.token_ids) for one in last.outputs]


def test_samples_of_one_prompt_are_computed_without_forks() -> None:
    params = replace(PARAMS, n=2, temperature=1.0, seed=3)
    assert answers(params, kv_cache="quiet") == answers(params)


@pytest.mark.parametrize("asked", [{"logprobs": 1}, {"prompt_logprobs": 1}])
def test_log_probabilities_of_an_executor_without_them_are_rejected(asked: dict[str, int]) -> None:
    with pytest.raises(RequestError, match=r"executor .*quiet can't return them"):
        answers(replace(PARAMS, **asked), executor="quiet")


def test_grammars_of_an_executor_without_masks_are_rejected() -> None:
    with pytest.raises(RequestError, match=r"executor .*quiet"):
        answers(replace(PARAMS, structured=Structured(regex="a")), executor="quiet")


def test_specs_of_kinds_that_no_backend_declares_are_rejected() -> None:
    with pytest.raises(RequestError, match="regex"):
        answers(replace(PARAMS, structured=Structured(regex="a")), grammar="quiet")


def test_a_tokenizer_that_changes_texts_and_does_not_claim_otherwise_is_accepted() -> None:
    resolved = Registry.discover().resolve("tokenizer", "quiet")
    assert ComponentTokenizer(resolved.ref(), "/").vocab_size
