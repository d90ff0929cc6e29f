"""`lora_request`: adapters read beside the engine, whose requests wait; rewritten, deleted and
damaged ones; what is kept on the host."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, EngineArgs, LoRARequest, RequestOutput, SamplingParams
from dovetail.api.executor import AdapterCapacity
from dovetail.config.engine import EngineConfig
from dovetail.errors import ConfigError, RequestError, UnsupportedError
from dovetail.front.adapters import AdapterStore
from dovetail.front.lora_files import WEIGHTS, AdapterFiles, read_adapter
from dovetail.front.vllm_args import translated
from dovetail.testing.fake_executor import ADAPTED, FakeExecutor, expected_tokens
from tests.adapters import config_of, install_fake, write_adapter
from tests.registry.fakes import Site

CAPACITY = AdapterCapacity(2, 16, ADAPTED)
PROMPT = [5, 6, 7, 8, 9]
PARAMS = SamplingParams(max_tokens=6, seed=0, detokenize=False, ignore_eos=True)


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        install_fake(Site(folder))
        yield


@pytest.fixture
def make(fake: None) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def llm(**overrides: Any) -> LLM:
        settings = {
            "executor": {"name": "fake", "num_pages": 400},
            "sampler": "default",
            "enable_lora": True,
            "max_num_seqs": 8,
        }
        made.append(LLM("demo", **(settings | overrides)))
        return made[-1]

    yield llm
    for one in made:
        one.close()


def digest(folder: Path) -> str:
    return read_adapter(AdapterFiles.find(str(folder)), CAPACITY).digest


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [[*output.outputs[0].token_ids] for output in outputs]


def expected(folder: Path | None) -> list[int]:
    return expected_tokens(PROMPT, 6, digest="" if folder is None else digest(folder))


@pytest.mark.slow("makes models with merged adapters")
def test_each_prompt_is_computed_with_its_own_adapter(
    make: Callable[..., LLM], tmp_path: Path
) -> None:
    folders = [write_adapter(tmp_path / name, seed=seed) for seed, name in enumerate("abc")]
    each = [
        LoRARequest(folder.name, 1 + place, str(folder)) for place, folder in enumerate(folders)
    ]
    found = make(max_loras=2).generate(
        [PROMPT] * 5, PARAMS, use_tqdm=False, lora_request=[*each, None, each[0]]
    )
    assert tokens_of(found) == [expected(folder) for folder in (*folders, None, folders[0])]


def test_one_adapter_for_all(make: Callable[..., LLM], tmp_path: Path) -> None:
    folder, llm = write_adapter(tmp_path / "a"), make()
    one = LoRARequest("a", 1, str(folder))
    assert (
        tokens_of(llm.generate([PROMPT] * 3, PARAMS, use_tqdm=False, lora_request=one))
        == [expected(folder)] * 3
    )
    with llm.stream([PROMPT], PARAMS, lora_request=one) as stream:
        assert [token for output in stream for token in output.outputs[0].token_ids] == expected(
            folder
        )


@pytest.mark.slow("makes an engine and generates with adapters")
def test_add_request_takes_one_and_samples_share_it(
    make: Callable[..., LLM], tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a")
    engine = make().llm_engine
    engine.add_request(
        "r",
        PROMPT,
        SamplingParams(max_tokens=6, n=2, seed=0, detokenize=False, ignore_eos=True),
        lora_request=LoRARequest("a", 1, str(folder)),
    )
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [*outputs[-1].outputs[0].token_ids] == expected(folder)
    assert outputs[-1].outputs[1].token_ids != outputs[-1].outputs[0].token_ids


@pytest.mark.slow("makes an engine of its own")
def test_a_rewritten_adapter_is_read_again_and_a_deleted_one_serves_who_runs(
    make: Callable[..., LLM], tmp_path: Path
) -> None:
    llm, folder, found = make(), tmp_path / "a", list[list[int]]()
    wanted = []
    for seed in (0, 1, 2, 2):
        write_adapter(folder, seed=seed)
        wanted.append(expected(folder))
        found += tokens_of(
            llm.generate(
                [PROMPT], PARAMS, use_tqdm=False, lora_request=LoRARequest("a", 1, str(folder))
            )
        )
    assert found == wanted
    long = SamplingParams(max_tokens=100, seed=0, detokenize=False, ignore_eos=True)
    with llm.stream([PROMPT], long, lora_request=LoRARequest("a", 1, str(folder))) as stream:
        tokens = [*next(stream).outputs[0].token_ids]
        before = expected_tokens(PROMPT, 100, digest=digest(folder))
        shutil.rmtree(folder)
        tokens += [token for output in stream for token in output.outputs[0].token_ids]
    assert tokens == before
    (gone,) = llm.generate(
        [PROMPT], PARAMS, use_tqdm=False, lora_request=LoRARequest("a", 1, str(folder))
    )
    assert gone.outputs[0].finish_reason == "rejected"
    assert "is no directory here" in str(gone.outputs[0].stop_reason)


@pytest.mark.slow("makes an engine of its own")
def test_a_damaged_adapter_fails_its_own_requests(make: Callable[..., LLM], tmp_path: Path) -> None:
    good, bad = write_adapter(tmp_path / "good"), write_adapter(tmp_path / "bad")
    whole = (bad / WEIGHTS).read_bytes()
    (bad / WEIGHTS).write_bytes(whole[:-5])
    llm = make()
    each = [LoRARequest("good", 1, str(good)), LoRARequest("bad", 2, str(bad)), None]
    found = llm.generate([PROMPT] * 3, PARAMS, use_tqdm=False, lora_request=each)
    assert [output.outputs[0].finish_reason for output in found] == ["length", "rejected", "length"]
    assert str(found[1].outputs[0].stop_reason).startswith(
        "lora_request 'bad': adapter_model.safetensors isn't a whole safetensors file"
    )
    (bad / WEIGHTS).write_bytes(whole)
    assert tokens_of(llm.generate([PROMPT], PARAMS, use_tqdm=False, lora_request=each[1])) == [
        expected(bad)
    ]


@pytest.mark.slow("starts several processes")
def test_host_copies_are_bounded_and_go_with_the_engine(
    make: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    llm = make(max_loras=1, max_cpu_loras=3)
    each = [
        LoRARequest(f"{seed}", 1 + seed, str(write_adapter(tmp_path / f"{seed}", seed=seed)))
        for seed in range(8)
    ]
    for _ in range(2):
        llm.generate([PROMPT] * 8, PARAMS, use_tqdm=False, lora_request=each)
    assert len([*scratch.rglob("*.safetensors")]) == 3
    assert len(llm.llm_engine.list_loras()) == 3
    llm.close()
    assert not [*scratch.iterdir()]


def test_vllms_methods(make: Callable[..., LLM], tmp_path: Path) -> None:
    engine = make(max_cpu_loras=2).llm_engine
    a, b, c, d = (
        LoRARequest(name, 1 + seed, str(write_adapter(tmp_path / name, seed=seed)))
        for seed, name in enumerate("abcd")
    )
    assert engine.add_lora(a)
    assert engine.pin_lora(1)
    assert engine.add_lora(b)
    assert engine.add_lora(c)
    assert engine.list_loras() == {1, 3}
    assert engine.remove_lora(1)
    assert not engine.remove_lora(1)
    assert not engine.pin_lora(7)
    assert engine.add_lora(d)
    assert engine.list_loras() == {3, 4}
    with pytest.raises(RequestError, match="is no directory here"):
        engine.add_lora(LoRARequest("e", 5, str(tmp_path / "e")))
    with pytest.raises(
        RequestError,
        match=r"lora_name: its characters must be at most 512 \(limits.max_name_chars\), got 513",
    ):
        engine.add_lora(LoRARequest("e" * 513, 5, str(tmp_path / "e")))
    config = engine.get_lora_config()
    assert config is not None
    assert (config.max_loras, config.max_lora_rank, config.max_cpu_loras) == (8, 16, 2)


def test_without_adapters_a_request_for_one_is_refused_with_what_would_be_right(
    make: Callable[..., LLM],
) -> None:
    llm = make(enable_lora=False)
    for call in (
        lambda: llm.generate(PROMPT, PARAMS, lora_request=LoRARequest("a", 1, "a")),
        lambda: llm.llm_engine.list_loras(),
    ):
        with pytest.raises(
            RequestError, match="this engine takes no adapters: make it with enable_lora=True"
        ):
            call()
    assert llm.llm_engine.get_lora_config() is None


@pytest.mark.parametrize("wrong", ["a", 1, {"lora_name": "a"}])
def test_anything_but_a_lora_request_is_refused(wrong: Any, make: Callable[..., LLM]) -> None:
    with pytest.raises(RequestError, match=r"lora_request must be a dovetail\.LoRARequest"):
        make().generate(PROMPT, PARAMS, lora_request=wrong)


@pytest.mark.parametrize(
    "fields",
    [("", 1, "a"), ("a", 0, "a"), ("a", 1, ""), ("a", True, "a"), (1, 1, "a"), ("a", 1, None)],
    ids=str,
)
def test_wrong_fields_are_named(fields: tuple[Any, ...]) -> None:
    with pytest.raises(RequestError, match="lora_"):
        LoRARequest(*fields)


def test_an_executor_without_adapters_is_refused(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = FakeExecutor.start
    monkeypatch.setattr(FakeExecutor, "start", lambda self: replace(start(self), adapters=None))
    with pytest.raises(UnsupportedError, match="can't use LoRA adapters"):
        make()


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        ({"enable_lora": True}, {"adapters": {}}),
        (
            {"enable_lora": True, "max_loras": 4, "max_lora_rank": 64, "max_cpu_loras": 32},
            {"adapters": {"slots": 4, "max_rank": 64, "host_copies": 32}},
        ),
        ({"max_loras": 4, "enable_lora": True}, {"adapters": {"slots": 4}}),
        ({"max_loras": 4, "enable_lora": False}, {}),
        ({"enable_lora": None, "lora_dtype": "auto", "fully_sharded_loras": False}, {}),
    ],
    ids=str,
)
def test_vllms_arguments(arguments: dict[str, Any], config: dict[str, Any]) -> None:
    assert EngineConfig.load("demo", **translated(arguments)) == EngineConfig.load("demo", **config)
    assert EngineArgs("demo", **arguments).create_engine_config() == EngineConfig.load(
        "demo", **config
    )


@pytest.mark.parametrize(
    "key",
    [
        "adapters.slots",
        "adapters.max_rank",
        "adapters.host_copies",
        "adapters.slot_wait_s",
        "adapters.slot",
    ],
)
def test_wrong_settings_name_their_key(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        EngineConfig.load("demo", **{key: -1})


def test_requests_that_come_at_once_share_a_look(tmp_path: Path) -> None:
    store, request = (
        AdapterStore(CAPACITY, 4),
        LoRARequest("a", 1, str(write_adapter(tmp_path / "a"))),
    )
    try:
        each = [store.get(request) for _ in range(1_000)]
        assert {one.digest for one in each} == {digest(tmp_path / "a")}
        assert len(set(map(id, each))) < 1_000
    finally:
        store.close()


def test_a_name_whose_directory_changes_is_its_newest(tmp_path: Path) -> None:
    store = AdapterStore(CAPACITY, 4)
    one, other = (write_adapter(tmp_path / f"{seed}", seed=seed) for seed in range(2))
    try:
        for folder in (one, other, one):
            assert store.get(LoRARequest("a", 1, str(folder))).digest == digest(folder)
        assert len({store.get(LoRARequest(name, 1, str(one))).path for name in "ab"}) == 1, (
            "equal adapters share a copy"
        )
    finally:
        store.close()


def test_a_look_for_which_there_was_no_thread_holds_up_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    store, request = (
        AdapterStore(CAPACITY, 4),
        LoRARequest("a", 1, str(write_adapter(tmp_path / "a"))),
    )
    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "submit", no_thread)
        with pytest.raises(RuntimeError, match="can't start"):
            store.get(request)
    assert store.get(request).copy.result(60).digest == digest(tmp_path / "a")
    store.close()


def test_a_closed_store_forgets_what_was_pinned(tmp_path: Path) -> None:
    store = AdapterStore(CAPACITY, 4)
    for number, name in enumerate("ab", 1):
        store.get(
            LoRARequest(name, number, str(write_adapter(tmp_path / name, seed=number)))
        ).copy.result()
        assert store.pin(number)
    store.close()
    assert [store.remove(number) for number in (1, 2)] == [False, False]


def test_closing_ends_all_waits(tmp_path: Path) -> None:
    store, folder = AdapterStore(CAPACITY, 4, threads=1), write_adapter(tmp_path / "a")
    each = [store.get(LoRARequest(f"{number}", 1, str(folder))) for number in range(50)]
    each += [store.get(LoRARequest("0", 1, str(folder))) for _ in range(3)]
    store.close()
    assert all(not one.closed() for one in each)
    assert all(one.failed() is None or "closed" in str(one.failed()) for one in each)


@pytest.mark.slow("asks from many threads")
def test_many_threads_get_what_they_ask_for(tmp_path: Path) -> None:
    store = AdapterStore(CAPACITY, 2)
    folders = [write_adapter(tmp_path / f"{seed}", seed=seed) for seed in range(6)]
    wanted, wrong = [digest(folder) for folder in folders], list[str]()

    def ask(start: int) -> None:
        for turn in range(60):
            number = (start + turn) % 6
            adapter = store.get(LoRARequest(f"{number}", 1, str(folders[number])))
            if adapter.digest != wanted[number] or not Path(adapter.path).is_file():
                wrong.append(adapter.name)

    threads = [threading.Thread(target=ask, args=(start,)) for start in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    assert not wrong


SLOW_PATTERNS = {f"\\w{{100}}{number}": 4 for number in range(100)}


@pytest.mark.parametrize(
    ("bound", "value", "said"),
    [
        ("MEMORY_BYTES", 1 << 20, "takes more than 1 MiB of memory"),
        pytest.param(
            "CPU_S",
            0.0,
            "takes more than 0 s",
            marks=pytest.mark.slow("a process has 1 s in any case"),
        ),
    ],
)
def test_reading_an_adapter_is_bounded_and_the_next_is_read(
    bound: str, value: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = AdapterStore(CAPACITY, 4, threads=1)
    good, bad = (
        write_adapter(tmp_path / "a"),
        write_adapter(tmp_path / "b", config_of(rank_pattern=SLOW_PATTERNS)),
    )
    try:
        with monkeypatch.context() as patch:
            patch.setattr(f"dovetail.front.adapters.{bound}", value)
            patch.setattr(
                "dovetail.front.adapters.MEMORY_A_BYTE", 0 if bound == "MEMORY_BYTES" else 8
            )
            assert said in str(store.get(LoRARequest("a", 1, str(bad))).copy.exception())
        assert store.get(LoRARequest("b", 2, str(good))).digest == digest(good)
    finally:
        store.close()


KILLED = """
import sys, time
from dovetail.api.executor import AdapterCapacity
from dovetail.front.adapters import AdapterStore
from dovetail.request.lora import LoRARequest
from dovetail.testing.fake_executor import ADAPTED
store = AdapterStore(AdapterCapacity(2, 16, ADAPTED), 4)
print(store.get(LoRARequest("a", 1, sys.argv[1])).path, flush=True)
time.sleep(600)
"""


def test_no_copy_outlives_an_engine_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(write_adapter(tmp_path / "a"))]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as process:
        assert process.stdout is not None
        copy = Path(process.stdout.readline().strip())
        assert copy.is_relative_to(tmp_path)
        assert copy.is_file()
        process.kill()
    deadline = time.monotonic() + 60
    while copy.parent.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_path_that_no_system_opens_is_refused_before_it_is_resolved() -> None:
    with pytest.raises(RequestError, match="lora_path must have at most 4096 characters, got 4098"):
        LoRARequest("a", 1, "a/" * 2049)
