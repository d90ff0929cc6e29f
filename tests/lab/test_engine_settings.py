"""`--set` of a command that takes several engines: for all, or for one by its name in tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.errors import ConfigError
from dovetail_lab.command_options import open_engines
from tests.lab.commands import lab, write_engine


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return [write_engine(Path(f"{name}.yaml")).name for name in ("a", "b")]


def test_a_setting_is_for_all_or_for_the_engine_that_it_names(engines: list[str]) -> None:
    opened = open_engines(
        engines,
        ["max_num_seqs=4", "b:max_num_seqs=5", "b:scheduler=vtc", "a:executor.num_pages=7"],
    )
    assert {
        name: (config.max_num_seqs, config.scheduler.name) for name, config in opened.items()
    } == {"a": (4, "fcfs"), "b": (5, "vtc")}
    assert [config.executor.options["num_pages"] for config in opened.values()] == [7, 60]


def test_a_repeated_file_is_named_with_its_number(engines: list[str]) -> None:
    opened = open_engines([engines[0]] * 2, ["a (2):scheduler=vtc"])
    assert {name: config.scheduler.name for name, config in opened.items()} == {
        "a (1)": "fcfs",
        "a (2)": "vtc",
    }


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("b:seed=x", "b: --set: seed: expected a valid integer"),
        ("seed=x", "a: --set: seed: expected a valid integer"),
        ("c:seed=1", "--set: 'c:seed=1': there is no engine 'c'; engines are a, b"),
        ("b:seed", "--set: expected key=value, got 'seed'"),
    ],
)
def test_an_error_names_the_engine(engines: list[str], setting: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        open_engines(engines, [setting])
    assert str(raised.value).startswith(says)


def test_an_option_that_its_component_refuses_names_the_engine_too(engines: list[str]) -> None:
    workload = "requests=3 arrivals=poisson(2) prompt=fixed(100) output=fixed(20)"
    said = lab(
        "compare", *engines, "--trace", workload, "--set", "b:scheduler.agin_s=1", fails=True
    )
    assert "b: --set: scheduler.agin_s: unknown option" in said
