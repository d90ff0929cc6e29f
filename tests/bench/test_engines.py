"""The calls of the adapters in `bench/` to other engines, tested with stand-ins that accept the
same arguments."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from bench import engines
from bench.workloads import Workload

WORK = Workload("qwen3-0.6b", ((5, 3), (7, 2)), temperature=0.6)
DIRECTORY = Path("/nowhere/model")


class Engine:
    """Remembers how it was made and asked."""

    made: dict[str, Any]
    asked: list[Any]

    def __init__(self, model: str, **settings: Any) -> None:
        type(self).made, type(self).asked = {"model": model, **settings}, []

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool = True) -> list[Any]:
        assert not use_tqdm
        type(self).asked.append((prompts, params))
        return [self.output([0] * one.max_tokens) for one in params]

    def output(self, token_ids: list[int]) -> Any:
        raise NotImplementedError


class VLLM(Engine):
    def output(self, token_ids: list[int]) -> Any:
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=token_ids)])


class NanoVLLM(Engine):
    def __init__(self, model: str, **settings: Any) -> None:
        super().__init__(model, **settings)
        atexit.register(self.exit)

    def output(self, token_ids: list[int]) -> Any:
        return {"text": "", "token_ids": token_ids}

    def exit(self) -> None:
        type(self).asked.append("exit")


def params(*, temperature: float, ignore_eos: bool, max_tokens: int) -> Any:
    return SimpleNamespace(temperature=temperature, ignore_eos=ignore_eos, max_tokens=max_tokens)


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.torch.cuda, "synchronize", lambda: None)


def install(monkeypatch: pytest.MonkeyPatch, name: str, llm: type[Engine]) -> None:
    module = ModuleType(name)
    module.LLM, module.SamplingParams = llm, params  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)


def check_asked(llm: type[Engine], prompts_of: Any) -> None:
    calls = [call for call in llm.asked if call != "exit"]
    assert len(calls) == 1 + WORK.runs
    assert len({str(prompts) for prompts, _ in calls}) == len(calls), "each run has fresh prompts"
    for prompts, given in calls:
        assert [len(prompt) for prompt in prompts_of(prompts)] == [5, 7]
        assert [(one.temperature, one.ignore_eos, one.max_tokens) for one in given] == [
            (0.6, True, 3),
            (0.6, True, 2),
        ]


def test_vllm_gets_random_weights_the_lengths_and_room_for_all_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, "vllm", VLLM)
    measured = engines.run_vllm(WORK, DIRECTORY, {})
    expected = {
        "model": str(DIRECTORY),
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 9,
        "max_num_seqs": 2,
    }
    assert VLLM.made == expected | {"tensor_parallel_size": 1, "quantization": None}
    assert len(measured.seconds) == WORK.runs
    check_asked(VLLM, lambda prompts: [prompt["prompt_token_ids"] for prompt in prompts])


def test_nano_vllm_gets_weights_the_lengths_and_room_for_all_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, "nanovllm", NanoVLLM)
    filled: list[Path] = []
    monkeypatch.setattr(engines, "write_weights", filled.append)
    left: list[Any] = []
    monkeypatch.setattr(atexit, "register", left.append)
    monkeypatch.setattr(atexit, "unregister", left.remove)
    engines.run_nano_vllm(WORK, DIRECTORY, {})
    assert not left, "it isn't ended twice"
    assert filled == [DIRECTORY]
    assert NanoVLLM.made == {
        "model": str(DIRECTORY),
        "enforce_eager": False,
        "max_model_len": 9,
        "max_num_seqs": 2,
    }
    assert NanoVLLM.asked[-1] == "exit"
    check_asked(NanoVLLM, lambda prompts: prompts)


class Manager:
    """Returns results like transformers' continuous batching: in any order, including unfinished
    ones."""

    def __init__(self) -> None:
        self.requests: list[tuple[list[int], int]] = []
        self._results: list[Any] = []

    def add_request(self, input_ids: list[int], *, max_new_tokens: int) -> None:
        self.requests.append((input_ids, max_new_tokens))
        for tokens in (1, max_new_tokens):
            finished = tokens == max_new_tokens
            result = SimpleNamespace(
                error=None,
                generated_tokens=[0] * tokens,
                is_finished=lambda finished=finished: finished,
            )
            self._results.insert(0, result)

    def get_result(self, timeout: float) -> Any:
        return self._results.pop() if self._results else None


def test_transformers_gets_each_requests_length_and_never_stops_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import transformers

    manager, given = Manager(), []

    class Model:
        def eval(self) -> Model:
            return self

        @contextmanager
        def continuous_batching_context_manager(self, generation_config: Any) -> Iterator[Manager]:
            assert not engines.torch.is_inference_mode_enabled(), (
                "its thread changes tensors that are made here, and isn't in that mode"
            )
            given.append(generation_config)
            yield manager

    # any context
    monkeypatch.setattr(
        engines.torch, "device", lambda name: engines.torch.autocast("cpu", enabled=False)
    )
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda directory: "config")
    monkeypatch.setattr(
        transformers.AutoTokenizer,
        "from_pretrained",
        lambda directory: SimpleNamespace(batch_decode=lambda outputs: outputs),
    )
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_config", lambda config, dtype: Model()
    )
    engines.run_transformers(WORK, DIRECTORY, {})
    [config] = given
    assert (config.do_sample, config.temperature, config.top_k, config.eos_token_id) == (
        True,
        0.6,
        0,
        -1,
    )
    assert [(len(prompt), out) for prompt, out in manager.requests] == [(5, 3), (7, 2)] * (
        1 + WORK.runs
    )


@pytest.mark.parametrize("name", ["vllm", "nano-vllm"])
def test_an_engine_that_is_not_there_is_left_out_and_said_so(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, name.replace("-", ""), None)
    assert engines.run_engine(name, WORK, DIRECTORY, {}) is None
    assert f"{name}: left out, since it can't be imported: " in capsys.readouterr().out


def test_settings_are_read_as_the_command_line_reads_them() -> None:
    given = engines.settings_of(
        [
            "kv_cache_memory=4GiB",
            "overlap=false",
            "max_num_seqs=8",
            "scheduler={name: priority, aging_s: null}",
        ]
    )
    assert given == {
        "kv_cache_memory": "4GiB",
        "overlap": False,
        "max_num_seqs": 8,
        "scheduler": {"name": "priority", "aging_s": None},
    }
