"""`dovetail.compat.vllm`: programs in the shapes of vLLM's offline examples run once their imports
are changed, or are refused with what to do instead; the page lists which."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
import textwrap
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tools import docs_hooks
from tqdm import tqdm

import dovetail
from dovetail import LLM, AsyncLLMEngine, EngineArgs, LLMEngine
from dovetail.compat import vllm as compat
from dovetail.compat.vllm import (
    BeamSearchParams,
    PoolingParams,
    SamplingParams,
    gaps,
    pooling_params,
    sampling_params,
)
from dovetail.compat.vllm.sampling_params import RequestOutputKind
from dovetail.compat.vllm.usage.usage_lib import UsageContext
from dovetail.compat.vllm.utils.argparse_utils import FlexibleArgumentParser
from dovetail.errors import ConfigError, DovetailError, RequestError
from dovetail.front.engine_args import flag_of
from dovetail.front.vllm_args import ARGUMENTS, translated
from dovetail.front.vllm_calls import by_position
from dovetail.front.vllm_methods import METHOD_TABLE
from tests.docs.pages import DOCS
from tests.models.pooling_checkpoints import save
from tests.rounding import rounded
from tests.server.serving import DEMO

SMALL = "max_model_len=64, max_num_seqs=4, enforce_eager=True"
PARSED = """from vllm import LLM, EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())"""
RUNS: dict[str, str] = {
    "basic/basic": f"""
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo", {SMALL})
        outputs = llm.generate(["ROMEO:", "JULIET:"], SamplingParams(temperature=0.8, top_p=0.95))
        done = [output.outputs[0].text for output in outputs]
        llm.close()
    """,
    "basic/generate": """
        from vllm import LLM, EngineArgs
        from vllm.utils import FlexibleArgumentParser
        parser = FlexibleArgumentParser()
        group = parser.add_argument_group("engine")
        EngineArgs.add_cli_args(group)
        group.set_defaults(model="demo")
        parser.add_argument("--max-tokens", type=int)
        parser.add_argument("--temperature", type=float)
        args = vars(parser.parse_args(["--max_model_len", "64", "--max-tokens", "5", "--enforce-eager", "--no-enable-prefix-caching"]))
        most, temperature = args.pop("max_tokens"), args.pop("temperature")
        llm = LLM(**args)
        params = llm.get_default_sampling_params()
        if most is not None:
            params.max_tokens = most
        if temperature is not None:
            params.temperature = temperature
        done = llm.generate(["ROMEO:"], params)[0].outputs[0].token_ids
        assert len(done) == 5
        llm.close()
    """,
    "basic/chat": f"""
        {PARSED}
        from vllm import SamplingParams
        parser.set_defaults(model="demo", max_model_len=256)
        parser.add_argument("--chat-template-path", type=str, default=None)
        args = parser.parse_args([])
        del args.chat_template_path
        llm = LLM(**vars(args))
        talk = [{{"role": "user", "content": "Speak!"}}]
        done = llm.chat(talk, SamplingParams(max_tokens=4), use_tqdm=False) + llm.chat([talk, talk], SamplingParams(max_tokens=4), use_tqdm=True)
        assert len(done) == 3
        llm.close()
    """,
    "automatic_prefix_caching": f"""
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo", enable_prefix_caching=True, {SMALL})
        done = [llm.generate("ROMEO: a question", sampling_params=SamplingParams(temperature=0, max_tokens=4)) for _ in range(2)]
        assert llm.reset_prefix_cache()
        llm.close()
    """,
    "llm_engine_example": f"""
        {PARSED}
        from vllm import LLMEngine, RequestOutput, SamplingParams
        args = parser.parse_args(["--model", "demo", "--max-model-len", "64"])
        engine: LLMEngine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
        engine.add_request("0", "ROMEO:", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=4))
        engine.add_request("1", "JULIET:", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1, max_tokens=4))
        done = []
        while engine.has_unfinished_requests():
            outputs: list[RequestOutput] = engine.step()
            done += [output for output in outputs if output.finished]
        assert len(done) == 2
        engine.close()
    """,
    "async_llm_streaming": """
        import asyncio
        from vllm import SamplingParams
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM

        async def main():
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="demo", max_model_len=64, enforce_eager=True))
            params = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA)
            try:
                return [output async for output in engine.generate(request_id="a", prompt="ROMEO:", sampling_params=params)]
            finally:
                engine.shutdown()

        done = asyncio.run(main())
        assert sum(len(output.outputs[0].token_ids) for output in done) == 8
    """,
    "structured_outputs": f"""
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import StructuredOutputsParams
        params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"]))
        llm = LLM(model="demo", {SMALL})
        done = llm.generate(prompts="ROMEO:", sampling_params=params)[0].outputs[0].text
        assert done in ("Positive", "Negative")
        llm.close()
    """,
    "reproducibility": f"""
        import os
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo", seed=42, {SMALL})
        done = llm.generate(["ROMEO:"], SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4))
        llm.close()
    """,
    "qwen_1m": """
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo", max_model_len=128, tensor_parallel_size=1, enforce_eager=True, enable_chunked_prefill=True, max_num_batched_tokens=64)
        params = SamplingParams(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05, detokenize=True, max_tokens=8)
        done = llm.generate(["ROMEO: " * 20], params)
        llm.close()
    """,
}
_LORA = """
        import torch
        from safetensors.torch import save_file
        from pathlib import Path
        from tempfile import mkdtemp
        from vllm import EngineArgs, LLM, LLMEngine, SamplingParams
        from vllm.lora.request import LoRARequest
        path = Path(mkdtemp())
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
        save_file({name + "A.weight": torch.ones(2, 256), name + "B.weight": torch.ones(256, 2)}, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}')
"""
RUNS |= {
    "multilora_inference": f"""{_LORA}
        args = EngineArgs(model="demo", enable_lora=True, max_loras=1, max_lora_rank=8, max_cpu_loras=2, max_num_seqs=8, max_model_len=64)
        engine, done = LLMEngine.from_engine_args(args), []
        prompts = [("ROMEO:", None), ("ROMEO:", LoRARequest("one", 1, str(path))), ("JULIET:", LoRARequest("two", 2, str(path)))]
        for index, (prompt, lora_request) in enumerate(prompts):
            engine.add_request(str(index), prompt, SamplingParams(temperature=0.0, max_tokens=4), lora_request=lora_request)
        while engine.has_unfinished_requests():
            done += [output.outputs[0].finish_reason for output in engine.step() if output.finished]
        engine.close()
        assert done == ["length"] * 3, done
    """,
    "lora_with_quantization_inference": f"""{_LORA}
        llm = LLM(model="demo", enable_lora=True, max_lora_rank=64, {SMALL})
        done = llm.generate("ROMEO:", SamplingParams(max_tokens=4), lora_request=LoRARequest("lora-test-1", 1, str(path)))[0].outputs[0].token_ids
        llm.close()
        assert len(done) == 4
    """,
    "basic/embed": f"""
        {PARSED}
        parser.set_defaults(model="demo", runner="pooling", max_model_len=128)
        llm = LLM(**vars(parser.parse_args([])))
        done = llm.embed(["Hello, my name is", "The capital of France is"])
        assert all(len(output.outputs.embedding) == 256 for output in done)
        llm.close()
    """,
    "basic/score": f"""
        {PARSED}
        parser.set_defaults(model="demo", runner="pooling", max_model_len=128)
        llm = LLM(**vars(parser.parse_args([])))
        done = llm.score("What is the capital of France?", ["The capital of Brazil is Brasilia.", "The capital of France is Paris."])
        assert all(-1 <= output.outputs.score <= 1 for output in done)
        llm.close()
    """,
}
POOLING = """from vllm import LLM, EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.utils.print_utils import print_embeddings
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        parser.set_defaults(model=CLASSIFIER, runner="pooling", enforce_eager=True, max_model_len=32)
        llm = LLM(**vars(parser.parse_args([])))
        prompts = ["ROMEO:", "JULIET: my love"]"""
RUNS |= {
    "prefix_caching": f"""
        from vllm import LLM, SamplingParams
        from vllm.distributed import cleanup_dist_env_and_memory
        params, done = SamplingParams(temperature=0.0, max_tokens=4), []
        for caching in (False, True):
            llm = LLM(model="demo", enable_prefix_caching=caching, gpu_memory_utilization=0.4, {SMALL})
            done.append([output.outputs[0].text for output in llm.generate(["ROMEO: my love", "ROMEO: my lord"], params)])
            del llm
            cleanup_dist_env_and_memory()
        assert done[0] == done[1]
    """,
    "metrics": f"""
        from vllm import LLM, SamplingParams
        from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector
        llm = LLM(model="demo", disable_log_stats=False, {SMALL})
        llm.generate(["ROMEO:"], SamplingParams(max_tokens=4))
        done = {{metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, Counter)}}
        assert done["generation_tokens"] == 4
        assert all(isinstance(metric, (Counter, Gauge)) and not isinstance(metric, (Histogram, Vector)) for metric in llm.get_metrics())
        llm.close()
    """,
    "run_one_batch": """
        from vllm import LLM, EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        parser = FlexibleArgumentParser()
        EngineArgs.add_cli_args(parser)
        parser.set_defaults(model="demo", max_model_len=64)
        parser.add_argument_group("batch").add_argument("--batch-size", type=int, default=2)
        args = vars(parser.parse_args([]))
        size = args.pop("batch_size")
        llm = LLM(**args)
        params = llm.get_default_sampling_params()
        params.max_tokens = 4
        params.min_tokens = 4
        params.ignore_eos = True
        done = [output.outputs[0].token_ids for output in llm.generate(["ROMEO:"] * size, params)]
        assert [len(tokens) for tokens in done] == [4, 4]
        llm.close()
    """,
    "basic/classify": f"""
        {POOLING}
        done = llm.classify(prompts)
        assert all(len(output.outputs.probs) == 2 for output in done)
        llm.close()
    """,
    "basic/reward": f"""
        {POOLING}
        done = llm.reward(prompts)
        for output in done:
            print_embeddings(output.outputs.data, prefix="Reward")
            assert len(output.outputs.data) == len(output.prompt_token_ids)
        llm.close()
    """,
    "sequence_reward": f"""
        {POOLING}
        done = llm.encode(prompts, pooling_task="classify")
        for output in done:
            print_embeddings(output.outputs.data.tolist(), prefix="Reward")
        llm.close()
    """,
    "token_reward": f"""
        {POOLING}
        done = llm.encode(prompts, pooling_task="token_classify")
        for output in done:
            print_embeddings(output.outputs.data.tolist(), prefix="Reward")
        llm.close()
    """,
    "embed_matryoshka_fy": f"""
        {PARSED}
        from vllm import PoolingParams
        parser.set_defaults(model="demo", runner="pooling", max_model_len=128)
        llm = LLM(**vars(parser.parse_args([])))
        done = llm.embed(["Follow the white rabbit."], pooling_params=PoolingParams(dimensions=32))
        assert len(done[0].outputs.embedding) == 32
        llm.close()
    """,
    "speculative_decoding/test_ngram": f"""
        from vllm import LLM, SamplingParams
        speculative = {{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 5, "prompt_lookup_min": 2}}
        llm = LLM(model="demo", speculative_config=speculative, {SMALL})
        done = llm.generate(["ROMEO:"], SamplingParams(temperature=0, max_tokens=8))
        llm.close()
    """,
}
REFUSED: dict[str, tuple[str, str]] = {  # a program, what is said
    "manual_prompt_rendering": (
        "from vllm.renderers.inputs.preprocess import parse_model_prompt",
        "takes the text, or its token ids",
    ),
    "last_hidden_states": (
        "from vllm import SamplingParams\nSamplingParams(return_last_hidden_states=True)",
        "token_embed",
    ),
    "trace_replay": (
        "from vllm import SamplingParams\nSamplingParams(trace_decode_token_ids=[1, 2])",
        "prompt_logprobs",
    ),
    "late_chunking": (
        "from vllm.pooling_params import LateChunkingParams",
        "average those of each chunk",
    ),
    "multi_vector_retrieval": ("from vllm.config import PoolerConfig", "pooling_task"),
    "qwen3_reranker": (
        "from vllm import LLM\nLLM(model='demo', hf_overrides={'classifier_from_token': ['no', "
        "'yes'], 'is_original_qwen3_reranker': True})",
        "score_tokens",
    ),
    "extract_hidden_states": (
        "from vllm.config.kv_transfer import KVTransferConfig",
        "transferred between engines",
    ),
    "routed_experts": (
        "from vllm import LLM\nLLM(model='demo', enable_return_routed_experts=True)",
        "tokens and their log-probabilities",
    ),
    "llm_engine_reset_kv": (
        """
        from vllm import EngineArgs, LLMEngine
        engine = LLMEngine.from_engine_args(EngineArgs(model="demo"))
        engine.reset_prefix_cache(reset_running_requests=True)
        """,
        "running requests keep what they have computed",
    ),
    "pause_resume": (
        """
        import asyncio
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        async def main():
            async with AsyncLLM.from_engine_args(AsyncEngineArgs(model="demo")) as engine:
                await engine.pause_generation(mode="keep")

        asyncio.run(main())
        """,
        "abort the requests",
    ),
    "chat_with_tools": (
        "from vllm import LLM\nLLM(model='demo', tokenizer_mode='mistral', "
        "config_format='mistral')",
        "only auto",
    ),
    "spec_decode": (
        "from vllm.inputs import TokensPrompt\nfrom vllm.benchmarks.datasets import get_samples",
        "dovetail lab",
    ),
    "mlpspeculator": (
        "from vllm import LLM\nLLM(model='demo', speculative_config={'model': 'small'})",
        "speculative|draft",
    ),
    "prompt_embed_inference": (
        "from vllm import LLM\nLLM(model='demo', enable_prompt_embeds=True)",
        "prompts are texts or token ids",
    ),
    "simple_profiling": (
        "from vllm import LLM\nLLM(model='demo', profiler_config={'profiler': 'torch'})",
        "perfetto",
    ),
    "torchrun_example": (
        "from vllm import LLM\nLLM(model='demo', distributed_executor_backend='external_launcher')",
        "Several machines",
    ),
    "data_parallel": (
        "from vllm import LLM\nfrom vllm.utils.network_utils import get_open_port",
        "the engine opens no ports",
    ),
    "context_extension": (
        "from vllm import LLM\nLLM(model='demo', hf_overrides={'rope_parameters': {'factor': "
        "4.0}})",
        "config.json",
    ),
    "logits_processor/custom": (
        "from vllm.v1.sample.logits_processor import LogitsProcessor",
        "logits processors are plugins",
    ),
    "save_sharded_state": (
        "from vllm.model_executor.model_loader import ShardedStateLoader",
        "weight formats are plugins",
    ),
    "vision_language": ("from vllm.assets.image import ImageAsset", "pass images of Pillow"),
}


def changed(program: str) -> str:
    """Return a program with its imports changed."""
    return re.sub(r"\b(from|import) vllm\b", r"\1 dovetail.compat.vllm", textwrap.dedent(program))


def run(program: str, **given: Any) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__", **given}
    exec(compile(changed(program), "example", "exec"), names)
    return names


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with random weights and the demo's tokenizer."""
    path = tmp_path_factory.mktemp("classifier")
    save(path, "Qwen3ForSequenceClassification", num_labels=2, vocab_size=1024)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, path)
    return path


@pytest.mark.parametrize("name", RUNS)
def test_a_program_runs_once_its_imports_are_changed(
    name: str, classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["example.py"])
    assert run(RUNS[name], CLASSIFIER=str(classifier))["done"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_program_that_cannot_run_is_told_what_to_do_instead(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["example.py"])
    program, said = REFUSED[name]
    with pytest.raises((DovetailError, ImportError), match=said) as refused:
        run(program)
    assert "did you mean" not in str(refused.value)


def test_the_page_lists_what_became_of_each_example_and_none_is_broken() -> None:
    listed = json.loads((DOCS / "assets" / "vllm_examples.json").read_text(encoding="utf-8"))[
        "examples"
    ]
    page = docs_hooks.fill_in((DOCS / "coming-from-vllm.md").read_text(encoding="utf-8"))
    for name, row in listed.items():
        assert row["verdict"] in ("runs", "refused", "needs"), name
        assert bool(row["why"]) == (row["verdict"] != "runs"), name
        assert f"| `{name.removesuffix('_offline')}` | {row['verdict']} |" in page
    for name in ("embed_matryoshka_fy", "sequence_reward", "token_reward"):
        assert any(name in example and row["verdict"] == "runs" for example, row in listed.items())


# Modules and names


@pytest.mark.parametrize("prefix", gaps.INSTEAD)
def test_a_module_or_name_that_is_missing_is_answered(prefix: str) -> None:
    with pytest.raises(ImportError) as refused:
        exec(
            f"from dovetail.compat.vllm import {prefix}"
            if "." not in prefix and prefix[0].isupper()
            else f"import dovetail.compat.vllm.{prefix}.x"
        )
    assert gaps.INSTEAD[prefix] in str(refused.value)


def test_a_misspelt_name_is_answered_with_the_right_one() -> None:
    with pytest.raises(ImportError, match="did you mean SamplingParams"):
        exec("from dovetail.compat.vllm import SamplingParam")
    with pytest.raises(
        ModuleNotFoundError, match=r"compat\.vllm\.nonsense: Dovetail has no such name"
    ):
        import_module("dovetail.compat.vllm.nonsense")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'dovetail\.nonsense'"):
        import_module("dovetail.nonsense")


@pytest.mark.parametrize("module", ["", ".outputs", ".engine", ".v1.engine.async_llm"])
def test_a_missing_name_is_explained_by_import_and_by_lookup(module: str) -> None:
    name = f"dovetail.compat.vllm{module}"
    assert not hasattr(import_module(name), "PromptType")
    if module != ".engine":  # which has no names at all
        with pytest.raises(AttributeError, match="a prompt is a string"):
            import_module(name).PromptType  # noqa: B018
    with pytest.raises(ImportError, match="a prompt is a string"):
        exec(f"from {name} import PromptType")


@pytest.mark.parametrize(
    ("module", "name", "ours"),
    [
        ("entrypoints.llm", "LLM", compat.LLM),
        ("v1.engine.llm_engine", "LLMEngine", compat.LLMEngine),
        ("engine.llm_engine", "LLMEngine", compat.LLMEngine),
        ("v1.engine.async_llm", "AsyncLLM", compat.AsyncLLMEngine),
    ],
)
def test_an_engine_is_where_its_programs_look_for_it(module: str, name: str, ours: type) -> None:
    assert getattr(import_module(f"dovetail.compat.vllm.{module}"), name) is ours
    assert issubclass(ours, getattr(dovetail, ours.__name__))


def test_uses_of_an_engine_have_their_names() -> None:
    assert UsageContext.LLM_CLASS == "LLM_CLASS"
    with pytest.raises(ImportError, match="usage isn't reported"):
        exec("from dovetail.compat.vllm.usage.usage_lib import UsageMessage")


# Flags


def test_flags_that_are_not_given_leave_the_defaults() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    assert vars(parser.parse_args([])) == {}
    assert (
        EngineArgs.from_cli_args(parser.parse_args([])).create_engine_config()
        == EngineArgs().create_engine_config()
    )


def test_flags_are_read_as_those_of_the_server() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--mine_too", default=3)
    args = parser.parse_args(
        [
            "--max_model_len=1k",
            "--scheduler",
            "{name: priority}",
            "--enforce-eager",
            "--seed",
            "7",
            "--mine_too",
            "a_b",
        ]
    )
    assert vars(args) == {
        "max_model_len": 1000,
        "scheduler": {"name": "priority"},
        "enforce_eager": True,
        "seed": 7,
        "mine_too": "a_b",
    }
    assert repr(EngineArgs.from_cli_args(args)) == repr(
        EngineArgs(max_model_len=1000, scheduler={"name": "priority"}, enforce_eager=True, seed=7)
    )


def test_each_argument_is_a_flag() -> None:
    text = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="x")).format_help()
    assert all(flag_of(name) in text for name in ARGUMENTS)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--max-model-len", "1.0001k"], "isn't a whole number"),
        (["--max-model-len", ""], "needs a value"),
        (["--scheduler", "{a: "], "--scheduler"),
        (["--nonsense", "1"], "unrecognized arguments: --nonsense"),
        (["--seed"], "expected one argument"),
    ],
)
def test_a_wrong_flag_is_named(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(given)
    assert said in capsys.readouterr().err


def test_values_are_checked_by_the_engines_arguments() -> None:
    args = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(
        ["--pipeline-parallel-size", "2"]
    )
    with pytest.raises(ConfigError, match="Several machines"):
        EngineArgs.from_cli_args(args)


# Methods and hints


@pytest.mark.parametrize("name", METHOD_TABLE)
def test_a_method_that_is_missing_is_answered_with_what_to_do(llm: LLM, name: str) -> None:
    for one in (llm, llm.engine):
        with pytest.raises(DovetailError, match=rf"^{type(one).__name__}\.{name}: ") as refused:
            getattr(one, name)()
        assert METHOD_TABLE[name] in str(refused.value)
        assert not hasattr(one, name), "programs that ask may go on"
    assert not hasattr(AsyncLLMEngine, name)


def test_other_names_are_plain_attribute_errors(llm: LLM) -> None:
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'nonsense'") as refused:
        llm.nonsense  # noqa: B018
    assert not isinstance(refused.value, DovetailError)


@pytest.mark.parametrize("name", ["enable_nonsense", "disable_everything", "use_something"])
def test_a_name_that_only_begins_alike_gets_no_hint(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: unknown key") as refused:
        LLM("demo", **{name: True})
    assert "did you mean" not in str(refused.value)


# Parameters that are set


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM("demo", max_model_len=64) as llm:
        yield llm


def test_fields_may_be_set_and_a_request_keeps_those_that_it_was_given() -> None:
    params = SamplingParams(temperature=0)
    params.max_tokens = 4  # type: ignore[misc]
    params.stop = "x"  # type: ignore[misc]
    assert params == SamplingParams(temperature=0, max_tokens=4, stop=["x"])
    with LLMEngine.from_config({"model": "demo"}) as engine:
        engine.add_request("a", "ROMEO:", params)
        params.max_tokens = 1  # type: ignore[misc]
        engine.add_request("b", "ROMEO:", params)
        tokens = dict[str, int]()
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[output.request_id] = len(output.outputs[0].token_ids)
    assert tokens == {"a": 4, "b": 1}
    copy = params.clone()
    copy.max_tokens = 5  # type: ignore[misc]
    assert (params.max_tokens, copy.max_tokens) == (1, 5)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("max_tokens", 0, "max_tokens must be"),
        ("temperature", "hot", "temperature must be"),
        ("min_tokens", 20, "at most max_tokens"),
        ("max_token", 4, "did you mean max_tokens"),
    ],
)
def test_an_invalid_value_is_refused_and_changes_nothing(name: str, value: Any, said: str) -> None:
    params = SamplingParams(max_tokens=10)
    with pytest.raises(RequestError, match=said):
        setattr(params, name, value)
    assert params == SamplingParams(max_tokens=10)


def test_vllms_names_of_output_kinds() -> None:
    kinds = (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY)
    assert [SamplingParams(output_kind=kind).output_kind.value for kind in kinds] == [
        "cumulative",
        "delta",
        "final",
    ]  # type: ignore[union-attr]


def test_translations_of_examples_are_no_surprise() -> None:
    assert translated({"profiler_config": None, "kv_transfer_config": None}) == {}


# Positions, types and defaults of vLLM's


@pytest.fixture(scope="module")
def theirs() -> Any:
    with compat.LLM("demo", max_model_len=64) as llm:
        yield llm


FOUR = SamplingParams(temperature=0, max_tokens=4)


@pytest.mark.parametrize(
    "more",
    [
        (None, None, None, 0),
        (None, {}, {}, 1),
        (None, {}, None, 1),
        (),
    ],
    ids=str,
)
def test_add_request_takes_vllms_positions(theirs: Any, more: tuple[Any, ...]) -> None:
    engine = theirs.llm_engine
    assert engine.add_request("a", "ROMEO:", FOUR, time.time(), *more) == "a"
    assert engine.add_request("b", inputs="ROMEO:", params=FOUR) == "b"
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    assert outputs["a"].outputs[0].token_ids == outputs["b"].outputs[0].token_ids


def test_add_request_tells_the_two_orders_of_vllms_releases_apart() -> None:
    headers = {"traceparent": "00-1-2-01"}
    assert by_position("add_request", [None, headers], {}) == {
        "lora_request": None,
        "trace_headers": headers,
    }
    assert by_position("add_request", [None, {}, headers, 3], {})["trace_headers"] is headers
    with pytest.raises(
        RequestError, match=r"add_request\(\): priority is given by position and by name"
    ):
        by_position("add_request", [None, None, None, 3], {"priority": 4})
    with pytest.raises(RequestError, match=r"chat\(\) takes at most 9 more arguments by position"):
        by_position("chat", [None] * 10, {})


def test_a_prompt_is_given_once(theirs: Any) -> None:
    for named in ({}, {"prompt": "a", "inputs": "b"}):
        with pytest.raises(RequestError, match="give the prompt, once"):
            theirs.llm_engine.add_request("a", **named)


def test_chat_and_beam_search_take_vllms_positions(theirs: Any) -> None:
    talk = [{"role": "user", "content": "a"}]
    by_name = theirs.chat(talk, FOUR, False, add_generation_prompt=False)
    assert (
        theirs.chat(talk, FOUR, False, None, None, "auto", False)[0]["token_ids"]
        == by_name[0]["token_ids"]
    )
    [found] = theirs.beam_search(["ROMEO:"], BeamSearchParams(2, 2), None, False, 1)
    assert len(found.sequences) == 2


def test_token_ids_are_lists_and_pooled_data_are_tensors(theirs: Any) -> None:
    for kind in ("cumulative", "delta", "final"):
        theirs.llm_engine.add_request(
            kind, "ROMEO:", SamplingParams(max_tokens=3, output_kind=kind)
        )
    while theirs.llm_engine.has_unfinished_requests():
        for output in theirs.llm_engine.step():
            assert type(output.prompt_token_ids) is type(output.outputs[0].token_ids) is list
    [pooled] = theirs.encode("ROMEO:", pooling_task="embed")
    assert pooled.outputs.data.shape == torch.Size(
        [len(theirs.embed("ROMEO:")[0].outputs.embedding)]
    )
    assert theirs.score("ROMEO:", "ROMEO:")[0].outputs.score == rounded(1.0, 256)


def test_request_ids_of_a_list_are_numbers_in_order_and_never_those_in_use(theirs: Any) -> None:
    [first] = theirs.generate("ROMEO:", FOUR)
    taken = str(int(first.request_id) + 2)
    theirs.llm_engine.add_request(taken, "ROMEO:", FOUR)
    outputs = theirs.generate(["ROMEO:", "JULIET:", "a"], FOUR)
    assert taken not in [output.request_id for output in outputs]
    assert sorted(outputs, key=lambda output: int(output.request_id)) == outputs
    theirs.llm_engine.abort_request(taken)


def test_unix_time_is_taken_as_a_time_on_the_engines_clock(theirs: Any) -> None:
    engine = theirs.llm_engine
    engine.add_request("a", "ROMEO:", FOUR, time.time() - 5, deadline=time.time() + 1000)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert 5 <= engine.now() - outputs[0].metrics.arrival_time < 60
    with pytest.raises(RequestError, match="arrival_time must be a finite number of seconds"):
        engine.add_request("a", "ROMEO:", FOUR, 1e18)


def test_the_async_engine_takes_vllms_positions() -> None:
    async def run() -> Any:
        engine = compat.AsyncLLMEngine.from_engine_args(
            EngineArgs("demo", max_model_len=64), True, None, None
        )
        async with engine:
            async for output in engine.generate("ROMEO:", FOUR, "a", None, None, 0):
                last = output
        return last

    assert type(asyncio.run(run()).outputs[0].token_ids) is list


def test_a_progress_bar_may_be_the_callers(theirs: Any) -> None:
    made: list[Any] = []

    def bar(**options: Any) -> Any:
        made.append(tqdm(**options, disable=True))
        return made[0]

    theirs.generate("ROMEO:", FOUR, use_tqdm=bar)
    assert made[0].total == 1


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (SamplingParams, sampling_params.VLLM_NAMES),
        (partial(BeamSearchParams, 1, 1), sampling_params.VLLM_BEAM_NAMES),
        (PoolingParams, pooling_params.VLLM_NAMES),
    ],
    ids=["sampling", "beams", "pooling"],
)
def test_vllms_fields_are_accepted_at_their_default_and_else_refused(kind: Any, rows: Any) -> None:
    for name, row in rows.items():
        for value in (None, *row.default):
            assert kind(**{name: value}) == kind()
        if not row.advisory:
            with pytest.raises(RequestError, match=f"^{name}: ") as refused:
                kind(**{name: "something"})
            assert row.instead in str(refused.value)


def test_prompts_may_have_keys_without_a_value(theirs: Any) -> None:
    [one] = theirs.generate(
        {"prompt": "ROMEO:", "multi_modal_data": None, "prompt_token_ids": None}, FOUR
    )
    assert one["token_ids"] == theirs.generate("ROMEO:", FOUR)[0]["token_ids"]
    with pytest.raises(RequestError, match="multi_modal_data"):
        theirs.generate({"prompt": "ROMEO:", "multi_modal_data": {"image": 1}}, FOUR)


def test_each_prompt_may_have_a_priority(theirs: Any) -> None:
    assert len(theirs.generate(["ROMEO:", "JULIET:"], FOUR, priority=[1, 0])) == 2
    assert len(theirs.generate(["ROMEO:", "JULIET:"], FOUR, priority=3)) == 2
    with pytest.raises(RequestError, match="priority must be one or one for each prompt"):
        theirs.generate(["ROMEO:", "JULIET:"], FOUR, priority=[1])
