"""Every name that vLLM's users bring is translated, accepted at vLLM's default, or refused with a
sentence.

`data/vllm_names_*.json` has the names and plain defaults of a version:
`python -m tools.vllm_names`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from tools import docs_hooks

from dovetail import EngineArgs, EngineConfig
from dovetail.base.checks import among
from dovetail.compat.vllm import (
    BeamSearchParams,
    PoolingParams,
    SamplingParams,
    pooling_params,
    sampling_params,
)
from dovetail.errors import ConfigError, DovetailError, RequestError
from dovetail.front import vllm_args
from dovetail.front.vllm_args import ARGUMENTS, TABLE, UNSET, translated
from dovetail_server import engine_flags, vllm_flags
from dovetail_server.command import app as serve_app
from tests.docs.pages import DOCS

VERSIONS = {
    path.stem.rpartition("_")[2]: json.loads(path.read_text())
    for path in (Path(__file__).parent / "data").glob("vllm_names_*.json")
}
UNKNOWN = {"unknown": True}  # a default that isn't plain
PARAMETERS: dict[str, Any] = {
    "SamplingParams": SamplingParams,
    "BeamSearchParams": partial(BeamSearchParams, 2, 2),
    "PoolingParams": PoolingParams,
}
ADVISORY = {
    name
    for rows in (pooling_params.VLLM_NAMES, sampling_params.VLLM_NAMES)
    for name, row in rows.items()
    if row.advisory
}

versions = pytest.mark.parametrize("names", VERSIONS.values(), ids=VERSIONS)


@pytest.fixture(autouse=True)
def nothing_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_args, "_logged", set())


def arguments_of(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return engine argument -> default, without the model."""
    return {name: default for name, default in names["EngineArgs"].items() if name != "model"}


def test_two_versions_are_listed() -> None:
    assert sorted(VERSIONS) == ["0.25.1", "0.33.0"]
    assert all(len(names["EngineArgs"]) > 200 < len(names["flags"]) for names in VERSIONS.values())


@versions
def test_every_argument_of_vllms_engine_is_known(names: dict[str, Any]) -> None:
    assert [name for name in arguments_of(names) if name not in TABLE] == []


@versions
def test_vllms_default_of_every_argument_is_accepted_and_changes_nothing(
    names: dict[str, Any],
) -> None:
    changing = {
        "disable_log_stats",
        "max_loras",
        "max_lora_rank",
        "prefix_caching_hash_algo",
        "gpu_memory_utilization",
    }  # which are asked for
    plain = EngineConfig.load("demo")
    for name, default in arguments_of(names).items():
        if default != UNKNOWN:
            overrides = translated({name: default})
            assert name in changing or EngineConfig.load("demo", **overrides) == plain, name


@versions
def test_an_argument_reads_as_vllms_default_or_none_where_the_engine_decides(
    names: dict[str, Any],
) -> None:
    args = EngineArgs()
    for name, default in arguments_of(names).items():
        value = getattr(args, name)
        if (
            default != UNKNOWN
            and name != "disable_log_stats"
            and name not in {"worker_extension_cls", *vllm_args.OLDER}
        ):
            assert value is None or among(value, (default,)), name


@versions
@pytest.mark.parametrize("kind", PARAMETERS)
def test_every_field_of_vllms_parameters_is_one_here_or_accepted_at_its_default(
    names: dict[str, Any], kind: str
) -> None:
    make = PARAMETERS[kind]
    for name, default in names[kind].items():
        if default != UNKNOWN and name not in ("beam_width", "max_tokens"):
            make(**{name: default})
        if name in ADVISORY:
            continue
        with (
            suppress(TypeError),
            pytest.raises(RequestError, match=f"^{name}(?!: unknown)"),
        ):  # TypeError: it is given already
            make(**{name: object()})


@pytest.fixture(scope="module")
def spellings() -> set[str]:
    """Options of `dovetail serve`."""
    command: Any = typer.main.get_command(serve_app)
    return {
        option
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }


@versions
def test_every_flag_of_vllms_server_is_known(names: dict[str, Any], spellings: set[str]) -> None:
    known = spellings | set(vllm_flags.RENAMED)
    assert [
        flag for flag in names["flags"] if flag not in known and not vllm_flags.is_known(flag)
    ] == []


def test_flags_are_renamed_to_those_that_there_are_and_no_name_is_in_two_places(
    spellings: set[str],
) -> None:
    grouped = [flag for group in vllm_flags.GROUPS for flag in group.defaults]
    assert [
        ours
        for ours in vllm_flags.RENAMED.values()
        if ours not in spellings and ours not in grouped
    ] == []
    assert not set(grouped) & (spellings | set(vllm_flags.RENAMED))
    assert len(set(grouped)) == len(grouped)
    rows = [name for group in vllm_args.GROUPS for name in group.defaults]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("group", vllm_flags.GROUPS, ids=lambda group: next(iter(group.defaults)))
def test_a_flag_of_the_server_is_accepted_with_vllms_default_and_else_refused(group: Any) -> None:
    for flag, default in group.defaults.items():
        is_switch = isinstance(default, bool)
        if is_switch:
            neutral = [flag if default else f"--no-{flag[2:]}"]
            other = [f"--no-{flag[2:]}" if default else flag]
        else:
            neutral = [flag, json.dumps(default)]
            other = [f"{flag}=another"]
        assert [*engine_flags.rewritten([*neutral, "--port", "1"])] == ["--port", "1"]
        if group.advisory:
            assert [*engine_flags.rewritten(other)] == []
            continue
        with pytest.raises(ConfigError, match=f"^{other[0].partition('=')[0]}: ") as refused:
            [*engine_flags.rewritten(other)]
        assert group.reason in str(refused.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["--compilation-config.cudagraph_mode", "FULL"],
            "--compilation-config '{cudagraph_mode: …}'",
        ),
        (["-cc.mode=3"], "--compilation-config '{mode: …}'"),
        (["--response-role"], "needs a value"),
        (["--headless=1"], "takes no value"),
        (["--response-role", "[user"], "role assistant"),
    ],
)
def test_other_spellings_are_answered(given: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        [*engine_flags.rewritten(given)]
    assert said in str(refused.value)


def test_short_levels_are_read() -> None:
    assert [*engine_flags.rewritten(["-O3", "-O", "2", "--max_model_len=8", "--", "-O3"])] == [
        "--optimization-level=3",
        "--optimization-level",
        "2",
        "--max-model-len=8",
        "--",
        "-O3",
    ]


def test_every_group_is_on_the_page() -> None:
    page = docs_hooks.fill_in((DOCS / "coming-from-vllm.md").read_text(encoding="utf-8"))
    for group in (*vllm_args.GROUPS, *vllm_flags.GROUPS):
        [line] = [line for line in page.splitlines() if f"| `{next(iter(group.defaults))}`" in line]
        assert group.reason in line


# `EngineArgs`, a dataclass in use


def test_fields_are_read_set_and_honoured() -> None:
    args = EngineArgs("demo", max_num_seqs=4)
    assert (args.model, args.max_num_seqs, args.tensor_parallel_size, args.scheduler) == (
        "demo",
        4,
        1,
        UNSET,
    )
    args.max_num_seqs = 3
    args.scheduler = "sjf"
    assert args.create_engine_config() == EngineConfig.load("demo", max_num_seqs=3, scheduler="sjf")
    args.nnodes = 2
    with pytest.raises(ConfigError, match="nnodes=2"):
        args.create_engine_config()


def test_asdict_and_replace_keep_what_was_given() -> None:
    args = EngineArgs("demo", max_model_len=64, cuda_graphs=False, enable_lora=True)
    changed = dataclasses.replace(args, max_num_seqs=2)
    assert changed == EngineArgs(
        "demo", max_model_len=64, cuda_graphs=False, enable_lora=True, max_num_seqs=2
    )
    assert pickle.loads(pickle.dumps(changed)) == changed
    given = dataclasses.asdict(changed)
    assert (
        EngineConfig.load({"model": given.pop("model")}, **translated(given))
        == changed.create_engine_config()
    )


def test_asdict_of_nothing_given_is_the_default_and_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = dataclasses.asdict(EngineArgs())
    assert EngineConfig.load(
        {"model": given.pop("model")}, **translated(given)
    ) == EngineConfig.load("demo")
    assert caplog.records == []


@pytest.mark.parametrize("name", ["max_num_seq", "nonsense"])
def test_an_unknown_name_is_refused(name: str) -> None:
    args = EngineArgs()
    with pytest.raises(AttributeError, match=name) as on_get:
        getattr(args, name)
    with pytest.raises(AttributeError, match=name) as on_set:
        setattr(args, name, 3)
    assert isinstance(on_get.value, DovetailError)
    assert isinstance(on_set.value, DovetailError)
    with pytest.raises(ConfigError, match=name):
        EngineArgs(**{name: 3})
    assert not hasattr(args, name)


def test_a_misspelt_name_is_refused_with_the_right_one() -> None:
    with pytest.raises(ConfigError, match="max_num_seq: unknown key, did you mean max_num_seqs"):
        EngineArgs("demo", max_num_seq=4)


def test_two_objects_share_no_default() -> None:
    one, other = EngineArgs(), EngineArgs()
    one.eplb_config["a"] = 1
    assert other.eplb_config == {}


def test_a_token_for_the_hub_is_not_in_the_repr() -> None:
    args = EngineArgs()
    args.hf_token = "hf_secret"
    assert "secret" not in repr(args)
    with pytest.raises(ConfigError) as refused:
        args.create_engine_config()
    assert "secret" not in str(refused.value)


def test_what_is_left_out_at_its_default_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        translated({name: row.default for name, row in TABLE.items()})
    assert caplog.records == []


def test_every_argument_is_a_field() -> None:
    assert {one.name for one in dataclasses.fields(EngineArgs)} == {"model", *ARGUMENTS}


def test_trust_in_remote_code_is_left_out_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    assert translated({"trust_remote_code": True}) == {}
    [line] = [record.message for record in caplog.records]
    assert "code in checkpoints never runs" in line
