"""`dovetail lab run`, as a user types it."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from dovetail_lab.records import RunResult
from dovetail_schedulers.priority import PriorityOptions
from tests.lab import trace_files
from tests.lab.commands import lab, write_engine
from tests.registry.fakes import Site, components

DEMO_TOKENIZER = files("dovetail_models") / "demo" / "tokenizer.json"
WORKLOAD = "requests=12 arrivals=poisson(8) prompt=uniform(20, 200) output=fixed(10)"


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return write_engine(tmp_path / "mine.yaml")


def test_a_run_prints_its_figures_and_keeps_every_request(engine: Path, tmp_path: Path) -> None:
    output = lab(
        "run",
        engine,
        "--trace",
        WORKLOAD,
        "--out",
        tmp_path / "deep" / "out",
        "--max-tokens",
        "50",
        "--seed",
        3,
    )
    result = RunResult.load(tmp_path / "deep" / "out" / "run.json")
    assert (result.name, result.seed, len(result)) == ("mine", 3, 12)
    assert {(record.max_tokens, record.output_tokens) for record in result} == {(50, 10)}
    for text in (
        "TTFT",
        "TPOT",
        "ITL",
        "E2E",
        "12 of 12 requests completed",
        "overlap on",
        "blocks of 16",
        "never validated against measurements",
    ):
        assert text in output


def test_settings_name_every_component_in_full(engine: Path, tmp_path: Path) -> None:
    """As `dovetail config show` does: a default that nobody wrote down is a setting too."""
    lab(
        "run",
        engine,
        "--trace",
        WORKLOAD,
        "--out",
        tmp_path,
        "--set",
        "observers=[{name: log, every_s: .inf}]",
        "--set",
        "scheduler=priority",
    )
    config = RunResult.load(tmp_path / "run.json").settings["config"]
    assert config["scheduler"] == {
        "name": "dovetail:priority",
        **PriorityOptions().model_dump(mode="json"),
    }
    assert config["executor"]["name"] == "dovetail:simulated"
    assert {"num_pages", "plans_late", "core_s"} <= set(config["executor"])
    assert config["kv_cache"]["name"] == "dovetail:prefix"
    assert config["observers"] == [{"name": "dovetail:log", "every_s": ".inf"}]


def test_chats_are_counted_in_tokens_where_a_tokenizer_is_named(
    engine: Path, tmp_path: Path
) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "chats.json").write_text(trace_files.OPENAI)
    said = lab(
        "run",
        engine,
        "--trace",
        tmp_path / "chats.json",
        "--tokenizer",
        DEMO_TOKENIZER,
        "--out",
        tmp_path,
    )
    assert "counted in words" not in said
    assert RunResult.load(tmp_path / "run.json").requests[0].prompt_tokens > 2


def test_goodput_counts_the_requests_that_keep_their_limits(engine: Path) -> None:
    assert "goodput 0 requests/s: 0.0% of all requests" in lab(
        "run", engine, "--trace", WORKLOAD, "--goodput", "ttft<1e-9"
    )
    assert "100.0% of all requests met the objectives" in lab(
        "run", engine, "--trace", WORKLOAD, "--goodput", "ttft<99,tpot<9000ms,e2e<=99s"
    )


def test_the_same_command_writes_the_same_bytes(engine: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        lab("run", engine, "--trace", WORKLOAD, "--out", tmp_path / name)
    assert (tmp_path / "one" / "run.json").read_bytes() == (
        tmp_path / "two" / "run.json"
    ).read_bytes()


def test_an_engine_for_a_gpu_is_simulated_with_the_step_times_that_are_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "gpu.yaml"
    path.write_text(
        "model: some/Model-8B\nexecutor: {name: local, device: cuda}\nmax_model_len: 512\n"
    )
    output = lab(
        "run",
        path,
        "--trace",
        WORKLOAD,
        "--step-time",
        "a10g-llama-2-7b",
        "--set",
        "executor.num_pages=100",
        "--out",
        tmp_path,
    )
    assert "step times a10g-llama-2-7b: off by 3.0%" in output
    assert RunResult.load(tmp_path / "run.json").settings["config"]["model"] == "some/Model-8B"


DRIFTING = """
from pydantic import Field
from dovetail_lab.simulated import SimulatedExecutor
from dovetail_lab.simulated_options import SimulatedOptions

class Options(SimulatedOptions, frozen=True):
    drift: float = Field(0.0, description="Nothing.")

class Drifting(SimulatedExecutor):
    options: Options
"""


@pytest.fixture
def drifting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of an engine whose executor is a plugin's, which simulates a device, too."""
    monkeypatch.syspath_prepend(tmp_path)
    spec = (
        'kind="executor", name="drifting", target="drifting_device:Drifting", '
        'options="drifting_device:Options"'
    )
    modules = {"drifting_plugin": components(spec), "drifting_device": DRIFTING}
    Site(tmp_path).install("dovetail-drifting", modules=modules)
    path = write_engine(tmp_path / "drifting.yaml")
    path.write_text(path.read_text().replace("name: simulated", "name: drifting, drift: 0.5"))
    return path


def test_step_times_are_given_to_any_executor_that_simulates_a_device(
    drifting: Path, tmp_path: Path
) -> None:
    lab("run", drifting, "--trace", WORKLOAD, "--step-time", "a10g-llama-2-7b", "--out", tmp_path)
    config = RunResult.load(tmp_path / "run.json").settings["config"]
    assert config["executor"]["name"] == "dovetail-drifting:drifting"
    assert config["executor"]["step_time"] == "a10g-llama-2-7b"
    assert config["executor"]["drift"] == 0.5


def test_no_executor_that_simulates_a_device_is_real(drifting: Path, tmp_path: Path) -> None:
    assert "--real" in lab("run", drifting, "--trace", WORKLOAD, "--real", fails=True)
    said = lab("calibrate", drifting, "--out", tmp_path / "times.json", fails=True)
    assert "the executor drifting simulates a device and can't be calibrated" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--trace", "nowhere.csv"), "nowhere.csv: can't be read"),
        (("--trace", WORKLOAD, "--slice", "9:3"), "9:3"),
        (("--trace", WORKLOAD, "--window", "5"), "expected a window like 60s:600s"),
        (
            ("--trace", WORKLOAD, "--window", "999s:"),
            "no request of synthetic arrives in the window 999s:",
        ),
        (("--trace", WORKLOAD, "--scale-rate", "0"), "rate"),
        (
            ("--trace", WORKLOAD, "--max-tokens", "some"),
            "max_tokens must be 'trace' or a whole number",
        ),
        (("--trace", WORKLOAD, "--step-time", "h9000"), "step times 'h9000'"),
        (("--trace", WORKLOAD, "--set", "scheduler"), "--set: expected key=value"),
        (("--trace", WORKLOAD, "--set", "max_num_sqs=3"), "max_num_seqs"),
        (("--trace", WORKLOAD, "--set", "executor.core_s=-1"), "core_s"),
        (("--trace", WORKLOAD, "--real"), "--real"),
        (("--trace", WORKLOAD, "--goodput", "ttft"), "expected METRIC<SECONDS, like ttft<0.5"),
        (("--trace", WORKLOAD, "--goodput", "tftt<1"), "unknown metric 'tftt', did you mean ttft?"),
        (("--trace", WORKLOAD, "--goodput", "ttft<1,ttft<2"), "ttft is limited twice"),
        (("--trace", WORKLOAD, "--goodput", "ttft<0"), "the limit must be more than 0"),
        (("--trace", WORKLOAD, "--goodput", "ttft<1e"), "'1e' is no number"),
    ],
)
def test_bad_input_says_what_is_wrong(engine: Path, arguments: tuple[str, ...], says: str) -> None:
    assert says in lab("run", engine, *arguments, fails=True)


def test_a_folder_that_cannot_be_made_is_named_before_the_run(engine: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "--out" in lab(
        "run", engine, "--trace", WORKLOAD, "--out", tmp_path / "file" / "below", fails=True
    )
