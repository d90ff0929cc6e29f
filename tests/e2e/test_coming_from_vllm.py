"""Programs written for vLLM or nano-vllm run: each row of the tables in docs/coming-from-vllm.md is
a test here."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tools import docs_hooks

from dovetail import (
    LLM,
    AsyncLLMEngine,
    BeamSearchParams,
    EngineArgs,
    EngineConfig,
    LLMEngine,
    PoolingParams,
    SamplingParams,
)
from dovetail.errors import ConfigError, EngineDeadError, PluginError, RequestError
from dovetail.front import vllm_args
from dovetail.front.async_engine import _in_our_order
from dovetail.front.vllm_args import TABLE, Argument, translated
from dovetail.front.vllm_calls import CALL_TABLE, check_call
from tests.docs.pages import DOCS
from tests.rounding import rounded, roundings_of_demo

torch.set_num_threads(1)

PAGE = DOCS / "coming-from-vllm.md"
SETTINGS: dict[str, Any] = {
    "model": "demo",
    "max_model_len": 64,
    "max_num_seqs": 8,
    "tensor_parallel_size": 1,
    "enforce_eager": True,
}
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(autouse=True)
def nothing_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_args, "_logged", set())


# Arguments

# of those that have a name here: values and what they become
KEYS: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "device": [("auto", {}), ("cpu", {"executor.device": "cpu"})],
    "tensor_parallel_size": [
        (1, {}),
        (4, {"executor.name": "dovetail:tensor", "executor.size": 4}),
    ],
    "kv_cache_memory_bytes": [(4096, {"kv_cache_memory": 4096}), (None, {})],
    "num_gpu_blocks_override": [(512, {"executor.num_pages": 512}), (None, {})],
    "num_kvcache_blocks": [(512, {"executor.num_pages": 512}), (-1, {}), (None, {})],
    "kvcache_block_size": [(256, {"block_size": 256})],
    "max_num_seqs": [(8, {"max_num_seqs": 8}), (None, {})],
    "max_num_batched_tokens": [(64, {"max_num_batched_tokens": 64}), (None, {})],
    "max_model_len": [(64, {"max_model_len": 64}), (-1, {}), (None, {"max_model_len": None})],
    "block_size": [(32, {"block_size": 32}), (None, {}), ("auto", {"block_size": "auto"})],
    "kv_cache_dtype": [
        ("fp8", {"kv_cache_dtype": "fp8"}),
        ("auto", {"kv_cache_dtype": "auto"}),
        (None, {}),
    ],
    "calculate_kv_scales": [(True, {"kv_cache_scales": "calibrate"}), (False, {})],
    "mamba_ssm_cache_dtype": [("auto", {}), ("float32", {"state_dtype": "float32"})],
    "enable_prefix_caching": [
        (True, {"kv_cache.reuse": True}),
        (False, {"kv_cache.reuse": False}),
        (None, {}),
    ],
    "prefix_caching_hash_algo": [
        ("sha256", {"kv_cache.hash": "sha256"}),
        ("xxhash", {"kv_cache.hash": "xxh3"}),
    ],
    "max_logprobs": [(20, {"limits.max_logprobs": 20}), (None, {})],
    "limit_mm_per_prompt": [
        ({"image": 4}, {"limits.max_images": 4}),
        ({"image": 0, "video": 0, "audio": 0}, {"limits.max_images": 0}),
        ({}, {}),
        (None, {}),
    ],
    "mm_processor_kwargs": [
        ({"max_pixels": 10_000}, {"media.processor": {"max_pixels": 10_000}}),
        ({}, {}),
        (None, {}),
    ],
    "allowed_media_domains": [
        (["images.example.com"], {"media.hosts": ["images.example.com"]}),
        (None, {}),
    ],
    "language_model_only": [(True, {"media.images": False}), (False, {})],
    "enforce_eager": [(True, {"cuda_graphs": False}), (False, {"cuda_graphs": True})],
    "async_scheduling": [(True, {"overlap": True}), (False, {"overlap": False}), (None, {})],
    "scheduling_policy": [
        (policy, {"scheduler": f"dovetail:{policy}"}) for policy in ("fcfs", "priority")
    ],
    "attention_backend": [
        ("TRITON_ATTN", {"attention": "triton"}),
        ("FLASH_ATTN", {"attention": "flash_attn"}),
        (None, {}),
    ],
    "dtype": [
        ("half", {"dtype": "float16"}),
        (torch.bfloat16, {"dtype": "bfloat16"}),
        ("auto", {"dtype": "auto"}),
    ],
    "seed": [(7, {"seed": 7}), (None, {})],
    "generation_config": [
        ("vllm", {"generation_config": "none"}),
        ("auto", {"generation_config": "auto"}),
    ],
    "guided_decoding_backend": [
        ("xgrammar", {"grammar": "xgrammar"}),
        ("guidance", {"grammar": "llguidance"}),
        ("auto", {}),
        (None, {}),
    ],
    "enable_lora": [(True, {"adapters": {}}), (False, {"adapters": None}), (None, {})],
    "max_loras": [(4, {"adapters.slots": 4}), (None, {})],
    "max_lora_rank": [(64, {"adapters.max_rank": 64}), (None, {})],
    "max_cpu_loras": [(32, {"adapters.host_copies": 32}), (None, {})],
    "speculative_config": [
        (
            {"method": "ngram", "num_speculative_tokens": 4},
            {"speculation": {"drafter": {"name": "dovetail:ngram"}, "max_drafts": 4}},
        ),
        (
            {"model": "[ngram]", "prompt_lookup_max": 3},
            {
                "speculation": {
                    "drafter": {"name": "dovetail:ngram", "min_match": 3, "max_match": 3}
                }
            },
        ),
        (
            {
                "method": "suffix",
                "suffix_decoding_min_token_prob": 0.1,
                "suffix_decoding_max_cached_requests": 0,
            },
            {
                "speculation": {
                    "drafter": {"name": "dovetail:suffix", "min_share": 0.1, "kept_tokens": 0}
                }
            },
        ),
        (
            {"method": "mtp", "num_speculative_tokens": 1},
            {"speculation": {"drafter": {"name": "dovetail:mtp"}, "max_drafts": 1}},
        ),
        ({"method": "qwen3_next_mtp"}, {"speculation": {"drafter": {"name": "dovetail:mtp"}}}),
        (
            {"method": "eagle3", "model": "a/head"},
            {"speculation": {"drafter": {"name": "dovetail:eagle3", "model": "a/head"}}},
        ),
        (
            {"model": "a/Qwen3-8B-speculator.eagle3"},
            {
                "speculation": {
                    "drafter": {"name": "dovetail:eagle3", "model": "a/Qwen3-8B-speculator.eagle3"}
                }
            },
        ),
        (None, {}),
    ],
    **{
        name: [
            (None, {}),
            (
                {"pooling_type": "MEAN", "normalize": False},
                {"pooling.method": "mean", "pooling.normalize": False},
            ),
            (
                SimpleNamespace(seq_pooling_type="CLS", use_activation=None),
                {"pooling.method": "cls"},
            ),
        ]
        for name in ("pooler_config", "override_pooler_config")
    },
    "logits_processors": [(None, {}), ([], {"logits_processors": []})],
    "otlp_traces_endpoint": [
        ("http://a/v1", {"observers": [{"name": "dovetail:otlp", "endpoint": "http://a/v1"}]}),
        (None, {}),
    ],
    "tokenizer": [("demo", {"tokenizer": "demo"}), (None, {})],
    "load_format": [("dummy", {"load_format": "dummy"}), ("hf", {}), (None, {})],
    "quantization": [("fp8", {"quantization": "fp8"}), (None, {})],
    "gpu_memory_utilization": [(0.8, {"gpu_memory_utilization": 0.8}), (None, {})],
    "disable_log_stats": [(True, {}), (False, {"observers": ["log"]})],
}


def test_every_renamed_argument_is_in_the_tests() -> None:
    assert set(KEYS) == {row.name for row in TABLE.values() if row.key}


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.name)
def test_an_argument_becomes_what_its_row_says(row: Argument) -> None:
    for value, here in KEYS.get(row.name, [(value, {}) for value in row.accepted]):
        assert translated({row.name: value}) == here
        config = EngineConfig.load("demo", **translated({row.name: value}))
        if not here:
            assert config == EngineConfig.load("demo"), "what is left out changes nothing"


@pytest.mark.parametrize(
    "row", [row for row in TABLE.values() if row.rejected], ids=lambda row: row.name
)
def test_an_argument_that_cannot_be_honoured_is_refused_with_what_would_be_right(
    row: Argument,
) -> None:
    for value in row.rejected:
        with pytest.raises(ConfigError, match=f"^{row.name}") as caught:
            LLM("demo", **{row.name: value})
        assert row.advice in str(caught.value)
        with pytest.raises(ConfigError, match=f"^{row.name}"):
            EngineArgs("demo", **{row.name: value})


def test_a_grammar_backend_that_is_not_installed_is_refused_with_what_to_install() -> None:
    with pytest.raises(PluginError, match=r"pip install ./examples/plugins/dovetail-xgrammar"):
        LLM("demo", guided_decoding_backend="xgrammar")


def test_refusals_name_sections_of_the_roadmap_and_keys_that_there_are() -> None:
    sections = re.findall(r"^## (.+)$", (DOCS / "roadmap.md").read_text(), re.MULTILINE)
    for row in TABLE.values():
        assert set(re.findall(r'see "([^"]+)"', row.advice)) <= set(sections), row.name
        assert row.key is None or row.key.partition(".")[0] in EngineConfig.model_fields


@pytest.mark.parametrize("value", [True, 1.5, "1", [1]], ids=str)
def test_a_value_of_another_type_is_not_taken_for_what_is_so_anyway(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size"):
        translated({"tensor_parallel_size": value})


def test_each_translation_is_reported_in_one_line_and_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        translated({"enforce_eager": True, "swap_space": 4, "max_model_len": 64, "seed": 0})
    assert [(record.levelno, record.name, record.message) for record in caplog.records] == [
        (logging.WARNING, "dovetail", "enforce_eager=True: here cuda_graphs=False"),
        (
            logging.WARNING,
            "dovetail",
            "swap_space=4: ignored, preempted requests are recomputed, not swapped",
        ),
    ]


@pytest.mark.parametrize("name", ["enforce_eger", "tensor_paralel_size", "max_model_length"])
def test_a_misspelt_argument_is_answered_with_the_right_name(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=f"^{name}: unknown key, did you mean "
        f"(enforce_eager|tensor_parallel_size|max_model_len)",
    ):
        LLM("demo", **{name: 1})


def test_a_token_for_the_hub_is_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError) as caught:
        translated({"hf_token": "hf_secret"})
    translated({"hf_token": None})
    assert "secret" not in str(caught.value) + caplog.text


@pytest.mark.parametrize(
    "both",
    [
        {"enforce_eager": True, "cuda_graphs": True},
        {"cuda_graphs": True, "enforce_eager": True},
        {"enable_prefix_caching": True, "kv_cache": {"name": "prefix", "reuse": False}},
        {"num_gpu_blocks_override": 64, "num_kvcache_blocks": 64},
    ],
    ids=str,
)
def test_two_arguments_for_one_key_are_refused(both: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="which is also given: leave one of them out"):
        translated(both)


def test_unknown_arguments_are_rejected_by_the_config() -> None:
    with pytest.raises(ConfigError, match="max_num_seq: unknown key, did you mean max_num_seqs"):
        LLM("demo", max_num_seq=8)


def test_engine_args_are_a_config() -> None:
    args = EngineArgs(model=Path("demo"), enforce_eager=True, scheduling_policy="priority")  # type: ignore[arg-type]
    assert args.create_engine_config() == EngineConfig.load(
        "demo", cuda_graphs=False, scheduler="dovetail:priority"
    )
    assert (
        repr(args)
        == "EngineArgs(model=PosixPath('demo'), enforce_eager=True, scheduling_policy='priority')"
    )
    with pytest.raises(
        ConfigError,
        match=r"engine_args must be dovetail.EngineArgs or an EngineConfig, got \{'model': "
        r"'demo'\}",
    ):
        LLMEngine.from_engine_args({"model": "demo"})  # type: ignore[arg-type]


def test_every_argument_is_on_the_page() -> None:
    page = docs_hooks.fill_in(PAGE.read_text())
    grouped = {name for group in vllm_args.GROUPS for name in group.defaults}
    for row in TABLE.values():
        if row.name in grouped:
            continue
        [line] = [line for line in page.splitlines() if line.startswith(f"| `{row.name}` |")]
        assert row.meaning in line
        assert row.advice in line
        assert line.count("|") == 5


# Methods


@pytest.mark.parametrize("name", CALL_TABLE)
def test_an_argument_of_a_method_is_accepted_at_vllms_default_and_else_refused(name: str) -> None:
    row = CALL_TABLE[name]
    for value in (None, *row.default):
        check_call("generate", {name: value})
    if row.advisory:
        check_call("generate", {name: object()})
        return
    with pytest.raises(RequestError, match=rf"^generate\(\): {name}=\[1\]: ") as refused:
        check_call("generate", {name: [1]})
    assert row.instead in str(refused.value)


def test_every_method_checks_vllms_other_arguments(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "a"}]
    calls: list[Callable[..., Any]] = [
        partial(llm.generate, "a", GREEDY, False),
        partial(llm.chat, conversation, GREEDY, False),
        partial(llm.beam_search, "a", BeamSearchParams(1, 1)),
        partial(llm.encode, "a", use_tqdm=False),
        partial(llm.embed, "a", use_tqdm=False),
        partial(llm.score, "a", "b", use_tqdm=False),
    ]
    for call in calls:
        call(tokenization_kwargs={}, mm_processor_kwargs=None)
        with pytest.raises(RequestError, match="tokenization_kwargs"):
            call(tokenization_kwargs={"truncation": True})
    with pytest.raises(RequestError, match="tokenization_kwargs"):
        llm.engine.add_request("a", "a", tokenization_kwargs={"truncation": True})
    with pytest.raises(RequestError, match=r"from_engine_args\(\): stat_loggers=.*observers"):
        LLMEngine.from_engine_args(EngineArgs(), None, [object])
    with pytest.raises(RequestError, match=r"from_engine_args\(\): start_engine_loop=False"):
        AsyncLLMEngine.from_engine_args(EngineArgs(), start_engine_loop=False)


def test_an_argument_that_no_method_has_is_refused(llm: LLM) -> None:
    with pytest.raises(
        RequestError, match=r"^generate\(\): temperature: it is a field of SamplingParams"
    ):
        llm.generate("a", temperature=0.5)
    with pytest.raises(RequestError, match=r"^add_request\(\): nonsense: unknown argument"):
        llm.engine.add_request("a", "a", nonsense=1)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**SETTINGS) as llm:
        yield llm


def drained(engine: LLMEngine) -> list[Any]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def subscript(llm: LLM) -> None:
    [output] = llm.generate(["ROMEO:"], SamplingParams(n=2, seed=1, max_tokens=4), use_tqdm=False)
    for holder in (output, output.outputs[0]):
        assert holder["text"] == output.outputs[0].text
        assert holder["token_ids"] == list(output.outputs[0].token_ids)
        assert isinstance(holder["token_ids"], list)
        for key in ("logprobs", 0):
            with pytest.raises(KeyError, match="answers to 'text' and 'token_ids'"):
                holder[key]  # type: ignore[index]


def files(llm: LLM) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "engine.yaml")
        path.write_text("model: demo\nmax_num_seqs: 2\nmax_model_len: 32\n")
        for source in (path, str(path), EngineConfig.load(path)):
            with LLM(source, max_model_len=64) as other:
                assert (other.engine.config.max_num_seqs, other.engine.config.max_model_len) == (
                    2,
                    64,
                )


def takes_and_steps(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("a", "ROMEO:", GREEDY)
    engine.add_request("b", "ROMEO:", GREEDY)
    engine.add_request("c", "ROMEO:", GREEDY)
    assert engine.get_num_unfinished_requests() == 3
    assert engine.has_unfinished_requests_for_virtual_engine(0)
    with pytest.raises(RequestError, match="virtual_engine must be 0, got 1"):
        engine.has_unfinished_requests_for_virtual_engine(1)
    engine.abort_request(["b", "c"])
    assert {output.request_id for output in drained(engine)} == {"a"}
    assert not engine.has_unfinished_requests()


def metrics(llm: LLM) -> None:
    before = {metric.name: metric.value for metric in llm.get_metrics()}
    llm.generate("ROMEO:", GREEDY, use_tqdm=False)
    after = {metric.name: metric.value for metric in llm.get_metrics()}
    assert after["generation_tokens"] - before["generation_tokens"] == 4
    assert after["requests_finished"] - before["requests_finished"] == 1
    assert after["num_requests_running"] == after["kv_cache_usage"] == 0


def defaults(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(
        **llm.engine._assembly.defaults.sampling()
    )
    llm.generate("ROMEO:", llm.get_default_sampling_params(), use_tqdm=False)


def configs(llm: LLM) -> None:
    engine = llm.engine
    model, scheduler, cache, parallel = (
        engine.get_model_config(),
        engine.get_scheduler_config(),
        engine.get_cache_config(),
        engine.get_parallel_config(),
    )
    assert (model.model, model.tokenizer, model.max_model_len, model.get_vocab_size()) == (
        "demo",
        "demo",
        64,
        1024,
    )
    assert (model.dtype, model.architecture) == ("float32", engine.capacity.details["model"])
    assert (scheduler.policy, scheduler.max_num_seqs, scheduler.max_model_len) == ("fcfs", 8, 64)
    assert (cache.block_size, cache.num_gpu_blocks, cache.enable_prefix_caching) == (
        16,
        engine.capacity.num_pages,
        True,
    )
    assert cache.cache_dtype == "float32", "as the activations"
    assert (parallel.tensor_parallel_size, parallel.world_size) == (1, 1)
    assert engine.get_decoding_config().guided_decoding_backend == "llguidance"
    assert model.hf_config.vocab_size == model.get_vocab_size()


def tokenizers(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Speak!"}]
    assert llm.get_tokenizer() is llm.engine.get_tokenizer()
    text = llm.get_tokenizer().apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=True
    )
    assert "Speak!" in text
    assert llm.get_tokenizer().encode("ROMEO:") == llm.engine.tokenizer.encode("ROMEO:")


def logs(llm: LLM) -> None:
    records: list[logging.LogRecord] = []
    logger, handler = logging.getLogger("dovetail"), logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        llm.engine.do_log_stats()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert re.fullmatch(
        r"0 running, 0 waiting, \d+ finished; .* tokens prefilled, .* generated; 0 preemptions; K "
        r"and V in use: 0%",
        records[0].message,
    )


def from_args(llm: LLM) -> None:
    with LLMEngine.from_engine_args(EngineArgs(**SETTINGS)) as engine:
        engine.add_request("a", "ROMEO:", GREEDY)
        [*_, output] = drained(engine)
    assert output["token_ids"] == llm.generate("ROMEO:", GREEDY, use_tqdm=False)[0]["token_ids"]
    assert engine.config.cuda_graphs is False


def ids(llm: LLM) -> None:
    same = llm.generate([{"prompt_token_ids": [1, 2]}, [1, 2]], GREEDY, use_tqdm=False)
    assert same[0]["token_ids"] == same[1]["token_ids"]


def generates(llm: LLM) -> None:
    positional = llm.generate(["ROMEO:", "JULIET:"], [GREEDY, GREEDY], False)
    assert [output.prompt for output in positional] == ["ROMEO:", "JULIET:"]
    assert [
        output["text"]
        for output in llm.generate(prompts=["ROMEO:", "JULIET:"], sampling_params=GREEDY)
    ] == [o["text"] for o in positional]


def streams(llm: LLM) -> None:
    texts = ["", ""]
    for output in llm.stream(["ROMEO:", "JULIET:"], GREEDY):
        texts[output.prompt_index] += output["text"]
    assert texts == [
        output["text"] for output in llm.generate(["ROMEO:", "JULIET:"], GREEDY, use_tqdm=False)
    ]


def chats(llm: LLM) -> None:
    [answer] = llm.chat([{"role": "user", "content": "Speak!"}], GREEDY, use_tqdm=False)
    assert len(answer["token_ids"]) == 4


def beams(llm: LLM) -> None:
    best, other = llm.beam_search(
        [{"prompt": "ROMEO:"}], BeamSearchParams(beam_width=2, max_tokens=3)
    )[0].sequences
    assert best.cum_logprob >= other.cum_logprob
    assert best.text == llm.get_tokenizer().decode(best.tokens), "of the prompt, too"
    assert [
        entries[token].logprob <= 0
        for token, entries in zip(best.tokens[-3:], best.logprobs, strict=True)
    ] == [True] * 3


def pools(llm: LLM) -> None:
    [one], [other] = llm.embed("ROMEO:"), llm.encode("ROMEO:", pooling_task="embed")
    assert other.outputs.data.tolist() == rounded(one.outputs.embedding, roundings_of_demo())


def scores(llm: LLM) -> None:
    same, other = llm.score("ROMEO:", ["ROMEO:", "JULIET:"])
    assert same.outputs.score == rounded(1.0, 256)
    assert other.outputs.score < 1.0


def same_engine(llm: LLM) -> None:
    assert llm.llm_engine is llm.engine


def asynchronous(
    check: Callable[[AsyncLLMEngine], Coroutine[Any, Any, None]],
) -> Callable[[LLM], None]:
    async def main() -> None:
        async with (
            asyncio.timeout(60),
            AsyncLLMEngine.from_engine_args(EngineArgs(**SETTINGS)) as engine,
        ):
            await check(engine)

    def run(llm: LLM) -> None:
        asyncio.run(main())

    run.__name__ = check.__name__
    return run


@asynchronous
async def answers(engine: AsyncLLMEngine) -> None:
    outputs = [output async for output in engine.generate("ROMEO:", GREEDY, "a")]
    assert (outputs[-1].request_id, outputs[-1].prompt, len(outputs[-1]["token_ids"])) == (
        "a",
        "ROMEO:",
        4,
    )
    named = [
        output
        async for output in engine.generate(
            prompt="ROMEO:", sampling_params=GREEDY, request_id="a", priority=0
        )
    ]
    assert named[-1]["token_ids"] == outputs[-1]["token_ids"]


@asynchronous
async def encodes(engine: AsyncLLMEngine) -> None:
    [one] = [output async for output in engine.encode("ROMEO:", PoolingParams(), "a")]
    [other] = [output async for output in engine.encode("a", "ROMEO:", PoolingParams())]
    assert one.outputs.data.tolist() == other.outputs.data.tolist()


@asynchronous
async def aborts(engine: AsyncLLMEngine) -> None:
    await engine.abort("nobody")
    await engine.abort(["nobody", "none"])


@asynchronous
async def tells(engine: AsyncLLMEngine) -> None:
    await engine.do_log_stats()
    await engine.check_health()
    assert (await engine.get_model_config()).max_model_len == 64
    for kind in ("scheduler", "cache", "parallel", "decoding", "lora"):
        name = f"get_{kind}_config"
        assert await getattr(engine, name)() == getattr(engine.engine, name)()
    assert (await engine.get_tokenizer()).encode("ROMEO:")


@asynchronous
async def shuts_down(engine: AsyncLLMEngine) -> None:
    engine.shutdown()
    engine.shutdown(timeout=1.0)
    with pytest.raises(EngineDeadError):
        await engine.check_health()


def resets(llm: LLM) -> None:
    for one in (llm, llm.engine):
        llm.generate("ROMEO: what is there", GREEDY, use_tqdm=False)
        assert one.reset_prefix_cache() is True
        assert (
            llm.generate("ROMEO: what is there", GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
        )
        for name in ("reset_running_requests", "reset_connector"):
            with pytest.raises(RequestError, match=rf"reset_prefix_cache\(\): {name}"):
                one.reset_prefix_cache(**{name: True})


METHODS: dict[str, Callable[[LLM], None]] = {
    'LLM("engine.yaml")': files,
    "llm.generate(prompts, sampling_params, use_tqdm)": generates,
    'llm.generate([{"prompt_token_ids": [1, 2]}])': ids,
    "llm.chat(messages, sampling_params)": chats,
    "llm.beam_search(prompts, BeamSearchParams(beam_width=...": beams,
    "llm.embed(prompts)": pools,
    "llm.score(data_1, data_2)": scores,
    "llm.get_tokenizer()": tokenizers,
    "llm.get_default_sampling_params()": defaults,
    "llm.get_metrics()": metrics,
    "llm.llm_engine": same_engine,
    'output["text"]': subscript,
    "an iterator of tokens": streams,
    "LLMEngine.from_engine_args(EngineArgs(model=...))": from_args,
    "engine.add_request(request_id, prompt, params, arrival_time)": takes_and_steps,
    "engine.step()": takes_and_steps,
    "engine.has_unfinished_requests()": takes_and_steps,
    "engine.get_num_unfinished_requests()": takes_and_steps,
    "engine.abort_request(request_ids)": takes_and_steps,
    "engine.has_unfinished_requests_for_virtual_engine(0)": takes_and_steps,
    "engine.get_model_config()": configs,
    "engine.get_scheduler_config()": configs,
    "engine.get_cache_config()": configs,
    "engine.get_parallel_config()": configs,
    "engine.get_decoding_config()": configs,
    "engine.get_tokenizer()": tokenizers,
    "engine.do_log_stats()": logs,
    "AsyncLLMEngine.from_engine_args(EngineArgs(model=...))": answers,
    "engine.generate(prompt, sampling_params, request_id)": answers,
    "engine.encode(prompt, pooling_params, request_id)": encodes,
    "await engine.abort(request_id)": aborts,
    "await engine.get_tokenizer()": tells,
    "await engine.get_model_config()": tells,
    "await engine.do_log_stats()": tells,
    "await engine.check_health()": tells,
    "engine.shutdown()": shuts_down,
    "llm.reset_prefix_cache()": resets,
}


@pytest.mark.parametrize(
    "make",
    [lambda: LLMEngine("demo"), lambda: LLMEngine(model_config=1, cache_config=2), LLMEngine],  # type: ignore[arg-type]
    ids=["model", "configs", "nothing"],
)
def test_an_engine_made_without_its_class_methods_is_answered_with_them(
    make: Callable[[], LLMEngine],
) -> None:
    with pytest.raises(ConfigError, match=r"LLMEngine\.from_config\(\"demo\"\).*from_engine_args"):
        make()
    with pytest.raises(ConfigError, match=r"AsyncLLMEngine\.from_config\(\"demo\"\).* got 'demo'"):
        AsyncLLMEngine("demo")  # type: ignore[arg-type]


def test_every_method_on_the_page_is_tested() -> None:
    section = PAGE.read_text().partition("## Methods")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")][2:]
    assert [method for method, row in zip(METHODS, rows, strict=True) if method not in row] == []


@pytest.mark.parametrize("check", dict.fromkeys(METHODS.values()), ids=lambda check: check.__name__)
def test_a_method_does_what_its_row_says(llm: LLM, check: Callable[[LLM], None]) -> None:
    check(llm)
    assert not llm.engine.has_unfinished_requests()


# The order of `AsyncLLMEngine.generate`

ORDERS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (("id", "text", GREEDY), {}),
    (("id", "text"), {"params": GREEDY}),
    (("id", "text"), {"sampling_params": GREEDY}),
    (("id",), {"prompt": "text", "params": GREEDY}),
    (("id",), {"prompt": "text", "sampling_params": GREEDY}),
    (("text", GREEDY, "id"), {}),
    (("text", GREEDY), {"request_id": "id"}),
    (("text",), {"sampling_params": GREEDY, "request_id": "id"}),
    (("text",), {"params": GREEDY, "request_id": "id"}),
    ((), {"request_id": "id", "prompt": "text", "params": GREEDY}),
    ((), {"prompt": "text", "sampling_params": GREEDY, "request_id": "id"}),
]


@pytest.mark.parametrize(("args", "named"), ORDERS)
def test_every_order_of_generate_is_understood(
    args: tuple[Any, ...], named: dict[str, Any]
) -> None:
    assert _in_our_order(args, {**named, "priority": 1}) == ("id", "text", GREEDY, {"priority": 1})
    if "params" not in named and "sampling_params" not in named:
        return
    without = {
        key: value for key, value in named.items() if key not in ("params", "sampling_params")
    }
    assert _in_our_order(args, without) == ("id", "text", None, {})


UNCLEAR: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    (("a", "b", "c"), {}, "can't tell the id from the prompt"),
    (("a", None, "b"), {}, "can't tell the id from the prompt"),
    (("a", None), {}, "can't tell the id from the prompt"),
    (("a",), {}, "lacks prompt"),
    ((), {"prompt": "a"}, "lacks request_id"),
    (("a", GREEDY), {}, "lacks request_id"),
    (("a", "b", GREEDY), {"params": GREEDY}, "was given 3 arguments by position"),
    (("a", GREEDY, "b"), {"sampling_params": GREEDY}, "was given 3 arguments by position"),
    (("a", "b", GREEDY, 0.0), {}, "was given 4 arguments by position"),
    (
        ("a", "b"),
        {"params": GREEDY, "sampling_params": GREEDY},
        "params and sampling_params are the same",
    ),
]


@pytest.mark.parametrize(("args", "named", "said"), UNCLEAR)
def test_an_order_that_cannot_be_told_is_refused_at_once(
    args: tuple[Any, ...], named: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        _in_our_order(args, dict(named))
