"""`dovetail config`: show, schema, check."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dovetail.base.roadmap import HEADINGS, PAGE
from dovetail.cli.app import app
from dovetail.config.engine import EngineConfig
from dovetail.errors import ConfigError
from dovetail.front.assembly import assemble
from dovetail.registry.registry import Registry
from dovetail.request.sampling_params import SamplingParams
from tests.registry.fakes import Site, components, scheduler


def dovetail(*args: str) -> Any:
    return CliRunner().invoke(app, ["config", *args])


@pytest.fixture
def engine_yaml(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config that names a third-party scheduler; relative names work from where it is."""
    site.install_scheduler("dovetail-fair", version="1.5")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "engine.yaml"
    path.write_text("model: demo\nscheduler:\n  name: fair\n  aging_s: 2\nobservers: [log]\n")
    return path


def test_show_prints_what_would_run_and_is_a_config_itself(engine_yaml: Path) -> None:
    text = dovetail(
        "show",
        "engine.yaml",
        "--set",
        "max_num_seqs=7",
        "--set",
        "kv_cache={name: prefix, reuse: false}",
    ).stdout
    assert "scheduler: {name: 'dovetail-fair:fair', aging_s: 2.0}  # dovetail-fair 1.5" in text
    shown = yaml.safe_load(text)
    assert shown["kv_cache"] == {"name": "dovetail:prefix", "reuse": False, "hash": "xxh3"}
    assert list(shown) == list(EngineConfig.model_fields)
    again = engine_yaml.with_name("again.yaml")
    again.write_text(text)
    assert dovetail("show", str(again)).stdout == text


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        (
            ("attention=auto",),
            r"attention: auto  # the first without a .*: dovetail:\S+ \d.*, doveta",
        ),
        (("attention=torch",), r"attention: 'dovetail:torch'  # dovetail-llm \d\S*$"),
        (("observers=[log, fair]",), r"observers: \[.*  # dovetail-llm \d\S*, dovetail-seen 2\.0$"),
        (("speculation.drafter=ngram",), r"speculation: \{drafter.*  # dovetail-llm \d\S*$"),
        (("observers=[]",), r"observers: \[\]$"),
        (("tokenizer=null",), r"tokenizer: null$"),
    ],
)
def test_show_says_whose_each_component_is(
    settings: tuple[str, ...], note: str, site: Site
) -> None:
    site.install(
        "dovetail-seen",
        "2.0",
        modules={"seen": components('kind="observer", name="fair", target="a:B"')},
    )
    text = dovetail("show", *(word for one in settings for word in ("--set", one))).stdout
    assert re.search(f"(?m)^{note}", text), text


def test_show_needs_no_file(site: Site) -> None:
    assert yaml.safe_load(dovetail("show").stdout)["model"] == "demo"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "scheduler: {name: fcfs, max_stretch: 3}",
            "engine.yaml:1: scheduler.max_stretch: unknown option: it is the engine's key `prefill_limit` "
            "now",
        ),
        (
            "executor: {name: local, num_blocks: 64}",
            "engine.yaml:1: executor.num_blocks: unknown option: it is called `num_pages` now",
        ),
        (
            "scheduler: {name: fair, agin_s: 1}",
            "engine.yaml:1: scheduler.agin_s: unknown option, did you mean aging_s?",
        ),
        (
            "scheduler: fare",
            "engine.yaml:1: scheduler: unknown scheduler 'fare', did you mean fair?",
        ),
        ("sched: fair", "engine.yaml:1: sched: unknown key, did you mean scheduler?"),
        (
            "observers: [{name: log, every: 1}]",
            "engine.yaml:1: observers.0.every: unknown option, did you mean every_s?",
        ),
        ("model: ./nowhere", "model: './nowhere' is not a directory"),
    ],
)
def test_show_and_check_tell_what_is_wrong(engine_yaml: Path, line: str, says: str) -> None:
    engine_yaml.write_text(line)
    for command in ("show", "check"):
        done = dovetail(command, "engine.yaml")
        assert done.exit_code == 2
        assert f"error: {says}" in done.stderr


def test_check_tells_everything_wrong_at_once(engine_yaml: Path, site: Site) -> None:
    lost = 'kind="observer", name="lost", target="there_is_no_such_module:X"'
    site.install("dovetail-lost", modules={"lost_plugin": components(lost)})
    engine_yaml.write_text(
        "scheduler: fare\nkv_cache: {name: prefix, x: 1}\nobservers: [lost, log]\n"
    )
    lines = [
        line
        for line in dovetail("check", "engine.yaml").stderr.splitlines()
        if line.startswith("error: engine.yaml:")
    ]
    assert [line.split(": ")[1:3] for line in lines] == [
        ["engine.yaml:1", "scheduler"],
        ["engine.yaml:2", "kv_cache.x"],
        ["engine.yaml:3", "observers.0"],
    ]


def test_an_import_that_fails_is_reported_once_with_file_and_line(
    engine_yaml: Path, site: Site
) -> None:
    site.install(
        "dovetail-fairer",
        modules={
            "fairer_plugin": components(scheduler("fairer", "fairer_plugin")),
            "fairer_plugin_policy": "import os\nos.environ['gone']\n",
        },
    )
    engine_yaml.write_text("scheduler: fairer\n")
    (line,) = dovetail("check", "engine.yaml").stderr.splitlines()
    assert line.endswith(
        f"importing fairer_plugin_policy failed: KeyError: 'gone' "
        f"({site.path / 'fairer_plugin_policy.py'}:2)"
    )


@pytest.mark.parametrize("group", ["dovetail_plugins", "dovetial.plugins", "dovetail.plugin"])
def test_what_a_misspelt_group_hides_is_looked_for_by_the_doctor(
    engine_yaml: Path, site: Site, group: str
) -> None:
    site.install(
        "dovetail-fairer",
        modules={"fairer_plugin": ""},
        raw_entry_points=f"[{group}]\nmain = fairer_plugin\n",
    )
    site.install(
        "docs-theme", modules={"theme": ""}, raw_entry_points="[mkdocs.plugins]\nmain = theme\n"
    )
    engine_yaml.write_text("scheduler: fairer\n")
    told = dovetail("check", "engine.yaml").stderr
    assert (
        f"dovetail-fairer 1.0: its entry points are in the group '{group}'; `dovetail plugins "
        f"doctor dovetail-fairer` says what to do" in told
    )
    assert "docs-theme" not in told


def test_keys_and_options_that_are_wrong_are_told_together_by_check_show_and_the_engine(
    engine_yaml: Path,
) -> None:
    engine_yaml.write_text(
        "seed: x\nschedulr: fcfs\nkv_cache: {name: prefix, x: 1}\nobservers: [{name: log, every: "
        "1}]\nmodel: ./nowhere\n"
    )
    told = [
        "engine.yaml:1: seed: expected a valid integer, got 'x'",
        "engine.yaml:2: schedulr: unknown key, did you mean scheduler?",
        "model: './nowhere' is not a directory",
        "engine.yaml:3: kv_cache.x: unknown option",
        "engine.yaml:4: observers.0.every: unknown option, did you mean every_s?",
    ]
    for command in ("check", "show"):
        done = dovetail(command, "engine.yaml")
        assert done.exit_code == 2
        lines = [line.removeprefix("error: ") for line in done.stderr.splitlines()]
        assert all(line.startswith(expected) for line, expected in zip(lines, told, strict=True)), (
            lines
        )
    with pytest.raises(ConfigError) as caught:
        assemble("engine.yaml", {})
    assert all(
        line.startswith(expected)
        for line, expected in zip(str(caught.value).splitlines(), told, strict=True)
    )


def test_nothing_is_imported_if_the_plugins_that_may_be_are_not_known(engine_yaml: Path) -> None:
    engine_yaml.write_text("plugins: {denny: [dovetail-fair]}\nscheduler: nobody\n")
    assert (
        dovetail("check", "engine.yaml").stderr
        == "error: engine.yaml:1: plugins.denny: unknown key, did you mean deny?\n"
    )


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "medusa"])
def test_keys_of_things_to_come_point_to_the_roadmap(name: str) -> None:
    done = dovetail("show", "--set", f"{name}=2")
    assert f"--set: {name}: unknown key: not there yet; " in done.stderr
    assert "is on the roadmap, docs/roadmap.md" in done.stderr


def test_the_roadmap_has_what_names_point_to() -> None:
    page = (Path(__file__).parents[2] / PAGE).read_text()
    assert all(f"\n## {heading}\n" in page for heading in HEADINGS.values())
    assert not set(HEADINGS) & (
        {*EngineConfig.model_fields} | {field.name for field in fields(SamplingParams)}
    )


def test_unmet_require_stops_show_and_check(engine_yaml: Path) -> None:
    done = dovetail("check", "engine.yaml", "--set", "plugins.require=['dovetail-fair>=9']")
    assert done.exit_code == 2
    assert "plugins.require: dovetail-fair>=9: 1.5 is installed" in done.stderr


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("seed", "expected key=value"),
        ("=1", "expected key=value"),
        ("seed=[", "--set:1: not valid YAML"),
    ],
)
def test_malformed_settings_are_reported(setting: str, says: str) -> None:
    done = dovetail("show", "--set", setting)
    assert done.exit_code == 2
    assert says in done.stderr
    assert (
        "error: --set: seed: expected a valid integer, got 'x'"
        in dovetail("show", "--set", "seed=x").stderr
    )


def test_check_of_the_default_config_passes() -> None:
    done = dovetail("check")
    if Registry.discover().failures:
        pytest.skip("a built-in plugin doesn't load")
    assert (done.exit_code, done.stdout) == (0, "demo: ok\n"), done.stderr


def test_schema_is_json(site: Site) -> None:
    assert json.loads(dovetail("schema").stdout)["$schema"].startswith("https://json-schema.org/")
