"""Records of runs: reading returns what was written, and other files are rejected by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import ConfigError
from dovetail_lab.records import RunResult, Timeline
from tests.lab.made_runs import record, rejected, run
from tests.support import examples


def same(one: RunResult, other: RunResult) -> bool:
    times = all(
        np.array_equal(a.token_times_s, b.token_times_s) for a, b in zip(one, other, strict=True)
    )
    plain = all(
        getattr(a, name) == getattr(b, name)
        for a, b in zip(one, other, strict=True)
        for name in a.__slots__
        if name != "token_times_s"
    )
    columns = all(
        np.array_equal(getattr(one.timeline, name), getattr(other.timeline, name))
        for name in one.timeline.__slots__
    )
    names = ("name", "trace", "trace_source", "seed", "settings", "step_times", "notes", "window")
    head = all(getattr(one, name) == getattr(other, name) for name in names)
    return times and plain and columns and head


@given(st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.25, 1 / 3]), max_size=6), max_size=6))
@examples(quick=50, full=500)
def test_a_saved_run_comes_back_as_it_was(tmp_path: Path, gaps: list[list[float]]) -> None:
    result = run(
        [*(record(index, 0.2, gaps_s=own) for index, own in enumerate(gaps)), rejected(99)],
        notes=("a note",),
        window=(0.0, 99.5),
    )
    result.save(tmp_path / "one.json")
    loaded = RunResult.load(tmp_path / "one.json")
    assert same(result, loaded)
    loaded.save(tmp_path / "two.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "can't be read"),
        ("[1]", "not a run"),
        ('{"dovetail_lab_run": 1}', "not a run"),
        ('{"dovetail_lab_run": 2, "requests": {"id": ["a"]}}', "damaged"),
        ('{"dovetail_lab_run": 2, "requests": 3}', "damaged"),
    ],
)
def test_a_file_that_is_no_run_is_rejected_by_name(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"run\.json: .*{says}"):
        RunResult.load(path)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            lambda document: document["requests"]["prompt_tokens"].__setitem__(0, "ten"),
            r"requests\.prompt_tokens\.0: .*, got 'ten'",
        ),
        (
            lambda document: document["tokens"].__setitem__(0, [7, 99]),
            "tokens beyond the last instant",
        ),
        (lambda document: document["settings"].pop("scheduler"), "settings lack scheduler"),
        (lambda document: document["timeline"].pop("kv_held"), "kv_held"),
    ],
)
def test_a_damaged_run_is_rejected_by_name(
    tmp_path: Path, damage: Callable[[Any], object], says: str
) -> None:
    path = tmp_path / "run.json"
    run([record(0, 0.2)]).save(path)
    document = json.loads(path.read_text())
    damage(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=rf"run\.json: .*damaged: .*{says}"):
        RunResult.load(path)


def test_a_storm_is_a_stretch_in_which_more_was_recomputed_than_computed_anew() -> None:
    calm, storm = (
        (0.0, 0.1, 0, 1, 4, 1, 1, 0, 2, 0, 9, 1, 0, 0.0, 0, 0, 0),
        (0.0, 0.1, 0, 1, 4, 1, 1, 0, 3, 1, 9, 1, 0, 0.0, 0, 0, 0),
    )
    assert [
        Timeline.of_rows(rows).storms(2)
        for rows in ([], [storm], [storm, calm], [storm, storm], [storm, storm, calm, calm])
    ] == [0, 0, 0, 1, 1]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json: can't be read"):
        RunResult.load(tmp_path / "nowhere.json")
