"""A package whose components are called as the built-ins are: nothing that ran before it was
installed changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail import LLM, EngineConfig, LLMEngine, SamplingParams
from dovetail.config.parts import find_problems
from dovetail.errors import ConfigError, DovetailError, PluginError, UnsupportedError
from dovetail.registry.registry import Registry
from tests.registry.fakes import Site, components
from tests.registry.site import site

__all__ = ["site"]  # a fixture

MODEL = """
from dovetail_models.llama import Llama

class Mine(Llama):
    def reasons_against(self, config):
        return ["it is mine"]

class Other:
    pass
"""
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture
def taken(site: Site) -> Site:
    specs = [
        f'kind="model", name="llama", target="my_models:Mine", architectures={ARCHITECTURES!r}',
        'kind="model", name="none", target="my_models:Mine", architectures=("NoneForCausalLM",)',
        *(
            f'kind="{kind}", api="{api}", name="{name}", target="my_models:Other"'
            for kind, api, name in (("scheduler", "1.0", "fcfs"), ("sampler", "1.0", "default"))
        ),
    ]
    site.install("dovetail-mine", modules={"mine_plugin": components(*specs), "my_models": MODEL})
    return site


def test_the_bundled_model_runs_whoever_else_serves_its_architecture(taken: Site) -> None:
    with LLM("demo", device="cpu", scheduler="fcfs", sampler="default") as llm:
        assert len(llm.generate("ROMEO:", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8


def test_the_component_that_the_config_names_serves_the_model(taken: Site, tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("model:\n  path: demo\n  component: dovetail-mine:llama\n")
    with pytest.raises(
        UnsupportedError, match=r"dovetail-mine:llama can't serve .*\n  - it is mine"
    ):
        LLMEngine.from_config(path)
    with pytest.raises(
        UnsupportedError,
        match=r"dovetail-mine:none doesn't serve Qwen3ForCausalLM; served are NoneForCausalLM",
    ):
        LLMEngine.from_config(path, **{"model.component": "dovetail-mine:none"})
    with LLMEngine.from_config(path, **{"model.component": "dovetail:qwen3"}) as engine:
        assert engine.config.in_full(Registry.discover())["model"] == {
            "path": "demo",
            "component": "dovetail:qwen3",
        }


def test_a_component_that_is_not_there_is_told_with_file_and_line(
    taken: Site, tmp_path: Path
) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("model:\n  path: demo\n  component: dovetail-mine:lama\n")
    [problem] = find_problems(EngineConfig.load(path), Registry.discover())
    assert isinstance(problem, PluginError)
    assert str(problem).startswith(
        f"{path}:3: model.component: unknown model 'dovetail-mine:lama', did you mean "
        f"dovetail-mine:llama?"
    )
    with pytest.raises(PluginError, match=r"model\.component: unknown model"):
        LLMEngine.from_config(path)


@pytest.mark.parametrize(
    "written", [{"path": "demo"}, {"path": "demo", "component": {"name": "dovetail:llama"}}, "demo"]
)
def test_a_config_that_is_written_out_is_read_back(written: object) -> None:
    config = EngineConfig.load({"model": written})
    assert EngineConfig.load(config.model_dump(mode="json")) == config == EngineConfig.load(config)
    assert str(config.model) == "demo"


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"component": "x"},
        {"path": "demo", "component": {"weight": 1}},
        {"path": 3},
        ["demo"],
        None,
    ],
)
def test_a_model_that_is_no_model_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"^model"):
        EngineConfig.load({"model": wrong})


def test_options_that_a_model_does_not_have_are_refused() -> None:
    with pytest.raises(DovetailError, match=r"model\.component\.weight: unknown option"):
        LLMEngine.from_config(
            {"model": {"path": "demo", "component": {"name": "dovetail:qwen3", "weight": 1}}}
        )
