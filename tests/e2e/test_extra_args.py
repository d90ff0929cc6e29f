"""Values for a third-party sampler: an invalid one fails only its own request, on arrival or in the
step."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from dovetail import LLMEngine, SamplingParams
from dovetail.errors import RequestError
from tests.executors.ranks import SETTINGS, generate
from tests.registry.fakes import Site, components
from tests.registry.site import site

__all__ = ["site"]  # a fixture

torch.set_num_threads(1)

SAMPLER = '''
import os
from dovetail.api.sampler import Sampler, SamplerCapabilities
from dovetail_samplers.default import DefaultSampler
from pydantic import BaseModel, Field, field_validator

PARENT = os.getpid()

class Args(BaseModel):
    rank: int = Field(0, ge=0, le=9, strict=True)
    words: list[str] = []
    odd: object = None

    @field_validator("odd")
    def refuse(cls, value):
        raise KeyError("a validator that is itself wrong")

class Strict(DefaultSampler):
    """Keeps its own books, and is told nothing twice."""

    def prepare(self, max_rows):
        super().prepare(max_rows)
        self.known = {}

    def update(self, removed, added):
        for row in removed:
            del self.known[row]
        for one in added:
            row, sampling = one.row, one.sampling
            assert row not in self.known
            self.known[row] = self.read(sampling)
        super().update(removed, added)

class Checked(Strict):
    capabilities = SamplerCapabilities(extra_args_model=Args)

    def read(self, sampling):
        given = sampling.extra_args
        assert type(given.get("rank", 0)) is int and type(given.get("words", ())) is tuple
        return given

class Unchecked(Strict):
    capabilities = SamplerCapabilities(logprobs=True, extra_args=("rank", "elsewhere"))

    def read(self, sampling):
        if sampling.extra_args.get("elsewhere") and os.getppid() == sampling.extra_args["elsewhere"]:
            raise RuntimeError("not on this rank")
        return int(sampling.extra_args.get("rank", 0)) + 1
'''
PROMPTS = [[5, 17, 200, 31], [9, 12], [1, 2, 3]]


@pytest.fixture
def samplers(site: Site) -> None:
    specs = (
        f'kind="sampler", name={name.lower()!r}, target="odd_samplers:{name}"'
        for name in ("Checked", "Unchecked")
    )
    site.install(
        "dovetail-odd", modules={"odd_plugin": components(*specs), "odd_samplers": SAMPLER}
    )


def engine(sampler: str, ranks: int = 1) -> LLMEngine:
    executor = (
        {"name": "local", "device": "cpu"}
        if ranks == 1
        else {"name": "tensor", "size": ranks, "device": "cpu"}
    )
    return LLMEngine.from_config({**SETTINGS, "sampler": sampler, "executor": executor})


def giving(**extra_args: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=10, ignore_eos=True, detokenize=False, extra_args=extra_args
    )


@pytest.mark.usefixtures("samplers")
def test_a_value_that_the_samplers_model_refuses_is_refused_at_arrival_by_its_name() -> None:
    with engine("checked") as one:
        for value, said in [
            ({"rank": "x"}, "extra_args.rank: expected a valid integer, got 'x'"),
            ({"rank": True}, "extra_args.rank: expected a valid integer, got True"),
            ({"rank": 10}, "extra_args.rank: expected less than or equal to 9, got 10"),
            ({"words": "x"}, "extra_args.words: expected a valid list, got 'x'"),
            ({"odd": 1}, "extra_args: KeyError: 'a validator that is itself wrong'"),
            (
                {"other": 1},
                "extra_args: 'other' means nothing to sampler checked; it understands: odd, rank, "
                "words",
            ),
        ]:
            with pytest.raises(RequestError) as caught:
                one.add_request("a", [1, 2], giving(**value))
            assert str(caught.value) == said
        assert not one.has_unfinished_requests()
        [output] = generate(one, [[1, 2]], giving(rank=3, words=["a", "b"]))
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.usefixtures("samplers")
def test_a_sampler_without_logprobs_has_requests_for_them_refused_on_arrival() -> None:
    with engine("checked") as one:
        wanted = SamplingParams(max_tokens=1, detokenize=False, logprobs=1)
        with pytest.raises(RequestError, match="logprobs: sampler checked can't return them"):
            one.add_request("a", [1, 2], wanted)


@pytest.mark.usefixtures("samplers")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.slow("makes several engines or many tokens")
def test_a_row_that_the_sampler_refuses_ends_its_own_request_alone(ranks: int) -> None:
    with engine("unchecked", ranks) as one:
        alone = generate(one, PROMPTS, giving())
        for index, prompt in enumerate(PROMPTS):
            one.add_request(f"fine {index}", prompt, giving())
            one.add_request(f"bad {index}", prompt, giving(rank=["x", [], {"a": 1}][index]))
        one.add_request(
            "bad samples",
            [4, 5],
            SamplingParams(
                n=3, logprobs=2, prompt_logprobs=1, extra_args={"rank": "x"}, detokenize=False
            ),
        )
        outputs: dict[str, Any] = {}
        while one.has_unfinished_requests():
            outputs |= {output.request_id: output for output in one.step()}
        for index in range(len(PROMPTS)):
            assert (
                outputs[f"fine {index}"].outputs[0].token_ids == alone[index].outputs[0].token_ids
            )
            [bad] = outputs[f"bad {index}"].outputs
            assert (bad.finish_reason, bad.token_ids) == ("error", ())
            assert str(bad.stop_reason).startswith(
                f"sampler Unchecked raised in update(): "
                f"{('ValueError', 'TypeError', 'TypeError')[index]}: "
            )
        assert [sample.finish_reason for sample in outputs["bad samples"].outputs] == ["error"] * 3
        assert [output.outputs[0].token_ids for output in generate(one, PROMPTS, giving())] == [
            output.outputs[0].token_ids for output in alone
        ]


@pytest.mark.usefixtures("samplers")
@pytest.mark.slow("starts ranks: processes that import torch")
def test_ranks_that_do_not_refuse_a_row_alike_end_the_engine_and_say_so() -> None:
    with engine("unchecked", ranks=2) as one:
        one.add_request("a", [1, 2], giving(elsewhere=os.getpid()))
        while one.has_unfinished_requests():
            one.step()
        assert (
            "request 'a' goes on, but not on every rank alike: here sampler Unchecked raised"
            in str(one.core.dead)
        )


@pytest.mark.parametrize(
    "value", [object(), lambda: 0, 1j, {"a": [object()]}, {object(): 1}, {object()}, type]
)
def test_a_value_that_other_processes_could_not_be_sent_is_refused_when_it_is_given(
    value: Any,
) -> None:
    with pytest.raises(
        RequestError, match="extra_args: expected a plain value, as JSON has them, got "
    ):
        SamplingParams(extra_args={"key": value})
