"""`dovetail.compat.nanovllm`: programs in the shapes of nano-vllm's examples and benchmark run once
their imports are changed."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail.compat import nanovllm
from dovetail.compat.nanovllm import LLM, LLMEngine, SamplingParams
from dovetail.errors import ConfigError, DovetailError, EngineDeadError, RequestError
from dovetail.front.vllm_methods import NANOVLLM_TABLE
from tests.docs.pages import DOCS

torch.set_num_threads(1)

SETTINGS: dict[str, Any] = {
    "enforce_eager": True,
    "tensor_parallel_size": 1,
    "max_model_len": 128,
    "max_num_seqs": 4,
}
CONFIG: dict[str, Any] = {  # fields of nano-vllm's config
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "max_model_len": 128,
    "gpu_memory_utilization": 0.5,
    "tensor_parallel_size": 1,
    "enforce_eager": True,
    "hf_config": None,
    "eos": -1,
    "kvcache_block_size": 256,
    "num_kvcache_blocks": -1,
}
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM("demo", **SETTINGS)
    yield llm
    llm.exit()


@pytest.fixture(scope="module")
def ours() -> Iterator[dovetail.LLM]:
    with dovetail.LLM("demo", **SETTINGS) as llm:
        yield llm


def drained(llm: LLM) -> tuple[dict[int, list[int]], list[int]]:
    """Return the tokens of each request, and the number of tokens of each step."""
    finished: dict[int, list[int]] = {}
    counts = []
    while not llm.is_finished():
        outputs, num_tokens = llm.step()
        finished |= dict(outputs)
        counts.append(num_tokens)
    return finished, counts


def test_the_engine_is_the_llm() -> None:
    assert issubclass(LLM, LLMEngine)
    assert set(nanovllm.__all__) == {"LLM", "LLMEngine", "SamplingParams"}


def test_a_program_in_the_shape_of_the_example_runs(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    prompts = ["who are you", "what is love"]
    rendered = []
    for prompt in prompts:
        message = {"role": "user", "content": prompt}
        rendered.append(
            tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        )
    outputs = llm.generate(rendered, SamplingParams(temperature=0.6, max_tokens=12))
    assert len(outputs) == 2
    for output in outputs:
        assert output["text"] == tokenizer.decode(output["token_ids"])


def test_a_program_in_the_shape_of_the_benchmark_runs(llm: LLM) -> None:
    source = random.Random(0)
    prompts = [[source.randint(0, 1000) for _ in range(source.randint(5, 40))] for _ in range(5)]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=source.randint(3, 8))
        for _ in prompts
    ]
    llm.generate(["Benchmark: "], SamplingParams(max_tokens=2))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [one.max_tokens for one in params]


def test_tokens_are_those_of_dovetails_llm_in_the_order_of_the_prompts(
    llm: LLM, ours: dovetail.LLM
) -> None:
    prompts: list[Any] = ["ROMEO:", [5, 6, 7, 8], "JULIET: my love"]
    params = [SamplingParams(temperature=0, max_tokens=most) for most in (9, 2, 5)]
    wanted = [output["token_ids"] for output in ours.generate(prompts, params, use_tqdm=False)]
    assert [
        output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)
    ] == wanted
    ids = [llm.add_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    finished, _ = drained(llm)
    assert [finished[seq_id] for seq_id in ids] == wanted


@pytest.mark.parametrize("budget", [16, 256])
def test_steps_count_prompt_tokens_above_zero_and_generated_ones_below(budget: int) -> None:
    source = random.Random(budget)
    llm = LLM("demo", **SETTINGS, max_num_batched_tokens=budget, enable_prefix_caching=False)
    lengths = [source.randint(2, 40) for _ in range(7)]
    wanted = [source.randint(1, 9) for _ in lengths]
    for length, most in zip(lengths, wanted, strict=True):
        prompt = [source.randint(0, 1000) for _ in range(length)]
        llm.add_request(prompt, SamplingParams(max_tokens=most, ignore_eos=True))
    finished, counts = drained(llm)
    llm.exit()
    assert [len(tokens) for _, tokens in sorted(finished.items())] == wanted
    assert 0 not in counts
    assert sum(count for count in counts if count > 0) == sum(lengths)
    assert -sum(count for count in counts if count < 0) == sum(wanted) - len(wanted), (
        "prefills sample the first tokens"
    )


def test_a_text_has_the_special_tokens_that_the_answer_has(llm: LLM) -> None:
    eos = llm.tokenizer.eos_token_id
    bias = {eos: 100.0}
    [output] = llm.generate(
        "ROMEO:", SamplingParams(temperature=0, logit_bias=bias), use_tqdm=False
    )
    assert output == {"text": llm.tokenizer.decode([eos]), "token_ids": [eos]}


def test_parameters_have_nano_vllms_order_and_defaults() -> None:
    params = SamplingParams(0.6, 256, True)
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (0.6, 256, True)
    assert (
        SamplingParams().temperature,
        SamplingParams().max_tokens,
        SamplingParams().ignore_eos,
    ) == (1.0, 64, False)
    assert (params.top_k, params.top_p, params.min_p, params.repetition_penalty) == (
        0,
        1.0,
        0.0,
        1.0,
    )
    params.max_tokens = 8  # type: ignore[misc]
    assert params.clone() == params == SamplingParams(0.6, 8, True)
    with pytest.raises(
        RequestError, match="max_token: unknown sampling parameter, did you mean max_tokens"
    ):
        SamplingParams(max_token=8)


def test_each_argument_of_nano_vllm_is_honoured() -> None:
    llm = LLM("demo", **CONFIG)
    config = llm.engine.config
    assert (config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len) == (
        256,
        8,
        128,
    )
    assert (config.gpu_memory_utilization, config.cuda_graphs, config.block_size) == (
        0.5,
        False,
        256,
    )
    assert config.scheduler.label == "prefill_first"
    llm.exit()


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ({"hf_config": {"rope_theta": 1}}, "edit the config.json"),
        ({"eos": 7}, "stop_token_ids"),
        ({"tensor_parallel_size": 0}, "1 or more"),
        ({"enforce_eagre": True}, "did you mean enforce_eager"),
        ({"nonsense": 1}, "unknown key"),
    ],
    ids=str,
)
def test_an_argument_that_cannot_be_honoured_is_refused_by_name(
    argument: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(argument))}.*{said}"):
        LLM("demo", **argument)


def test_a_config_file_is_accepted_with_its_scheduler(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("model: demo\nscheduler: fcfs\nmax_model_len: 64\n")
    llm = LLM(path, max_num_seqs=2)
    assert llm.engine.config.scheduler.label == "fcfs"
    assert llm.engine.config.max_num_seqs == 2
    llm.exit()


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ("a", SamplingParams(n=2), "n must be 1, got 2"),
        ("a", {"temperature": 1}, "sampling_params must be SamplingParams"),
        ("a", None, "sampling_params must be SamplingParams"),
        ([-1], GREEDY, "token"),
        (3.5, GREEDY, "prompt"),
    ],
    ids=["n", "dict", "none", "id", "number"],
)
def test_a_wrong_request_is_refused_and_leaves_nothing(
    llm: LLM, prompt: Any, params: Any, said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        llm.add_request(prompt, params)
    if params is not None:
        with pytest.raises(RequestError, match=said):
            llm.generate([prompt], params, use_tqdm=False)
    assert llm.is_finished()
    assert llm.step() == ([], 0)


def test_steps_return_what_was_added_while_another_thread_generates(llm: LLM) -> None:
    texts: list[Any] = []
    other = threading.Thread(
        target=lambda: texts.append(llm.generate(["ROMEO:"] * 6, GREEDY, use_tqdm=False))
    )
    alone = llm.generate("JULIET:", GREEDY, use_tqdm=False)[0]["token_ids"]
    other.start()
    ids = [llm.add_request("JULIET:", GREEDY) for _ in range(3)]
    finished, _ = drained(llm)
    other.join()
    assert finished == dict.fromkeys(ids, alone)
    assert len({output["text"] for output in texts[0]}) == 1


def test_the_bar_shows_the_speed_of_prompts_that_fit_one_step(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate([[7, 8, 9] * 30, [9, 8, 7] * 30], GREEDY)
    shown = capsys.readouterr().err
    assert "decode" in shown
    assert "prefill 0 tok/s" not in shown


def test_an_engine_that_has_ended_says_so() -> None:
    llm = LLM("demo", **SETTINGS)
    llm.add_request("ROMEO:", GREEDY)
    llm.exit()
    llm.exit()
    assert llm.is_finished()
    for call in (llm.step, lambda: llm.add_request("a", GREEDY), lambda: llm.generate("a", GREEDY)):
        with pytest.raises(EngineDeadError, match="the engine was closed"):
            call()


def test_names_that_are_elsewhere_are_answered_with_where(llm: LLM, ours: dovetail.LLM) -> None:
    for name in NANOVLLM_TABLE:
        with pytest.raises(DovetailError, match=rf"^LLM\.{name}: use dovetail\.compat\.nanovllm"):
            getattr(ours, name)
        assert not hasattr(ours, name)
    with pytest.raises(DovetailError, match=r"LLM\.chat: .*use dovetail\.LLM"):
        llm.chat([])
    with pytest.raises(DovetailError, match=r"LLM\.model_runner: .*inside of nano-vllm"):
        llm.model_runner  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        llm.nonsense  # noqa: B018


def test_the_page_names_each_method() -> None:
    page = (DOCS / "coming-from-nano-vllm.md").read_text(encoding="utf-8")
    for name in ("generate", *NANOVLLM_TABLE, "tokenizer", *CONFIG):
        assert f"`{name}" in page, name


@pytest.mark.slow("two processes import torch")
def test_the_loop_runs_on_two_ranks_which_end_with_the_interpreter(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            from dovetail.compat.nanovllm import LLM, SamplingParams

            llm = LLM("demo", tensor_parallel_size=2, enforce_eager=True, max_model_len=64)
            for prompt in ("ROMEO:", "JULIET: my"):
                llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=6))
            finished = {}
            while not llm.is_finished():
                outputs, num_tokens = llm.step()
                finished |= dict(outputs)
            print([finished[seq_id] for seq_id in sorted(finished)])
            """
        )
    )
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=120, check=True
    )
    with dovetail.LLM("demo", max_model_len=64) as llm:
        alone = [
            output["token_ids"]
            for output in llm.generate(["ROMEO:", "JULIET: my"], GREEDY, use_tqdm=False)
        ]
    assert done.stdout.strip() == str(alone)
    assert "Traceback" not in done.stderr
