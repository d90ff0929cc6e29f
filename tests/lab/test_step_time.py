"""Step-time models: their formulas, their files, and what is said of a wrong one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dovetail.errors import ConfigError
from dovetail_lab.fitting import Measurement, fit_linear, fit_piecewise, relative_errors
from dovetail_lab.step_profile import (
    BUILT_IN,
    LEVELS,
    Spread,
    StepTimeProfile,
    chance,
    shipped_profiles,
)
from dovetail_lab.step_time import (
    Grid,
    LaunchRule,
    LinearStepTime,
    PiecewiseStepTime,
    Regime,
    StepShape,
    TableStepTime,
)
from dovetail_lab.step_timing import spread
from tests.support import examples

LINEAR = LinearStepTime(
    base_s=0.01, per_token_s=2e-5, per_context_s=3e-8, per_pair_s=1e-9, per_row_s=4e-5
)


def shape(*rows: tuple[int, int]) -> StepShape:
    new, had = np.array(rows, np.int64).T
    return StepShape.of(new, had)


rows = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 5000)), min_size=1, max_size=20)


@given(rows)
@examples(quick=100, full=1000)
def test_a_shape_counts_what_each_row_does(rows: list[tuple[int, int]]) -> None:
    pairs = sum(
        sum(had + position for position in range(1, new + 1)) for new, had in rows if new > 1
    )
    prefills = [new for new, _ in rows if new > 1]
    longest = max((new + had for new, had in rows if new > 1), default=0)
    read = sum(new + had for new, had in rows)
    assert shape(*rows) == StepShape(
        len(rows), sum(new for new, _ in rows), len(prefills), sum(prefills), read, pairs, longest
    )


def test_linear_is_the_sum_of_its_terms() -> None:
    assert LINEAR.seconds(shape((1, 99), (10, 5))) == pytest.approx(
        0.01 + 11 * 2e-5 + 115 * 3e-8 + 105 * 1e-9 + 2 * 4e-5
    )


def test_piecewise_goes_through_its_points_and_on_beyond_them() -> None:
    model = PiecewiseStepTime(points=((1, 0.01), (64, 0.01), (128, 0.02)))
    seconds = [model.seconds(shape(*[(1, 0)] * rows)) for rows in (1, 32, 64, 96, 128, 192)]
    assert seconds == pytest.approx([0.01, 0.01, 0.01, 0.015, 0.02, 0.03])


def test_tokens_are_padded_to_the_next_size_that_is_recorded() -> None:
    model = PiecewiseStepTime(points=((32, 0.01), (64, 0.02), (128, 0.04)), sizes=(32, 64, 96))
    seconds = [model.seconds(shape((tokens, 0))) for tokens in (5, 32, 33, 64, 65, 96, 97, 128)]
    assert seconds == pytest.approx([0.01, 0.01, 0.02, 0.02, 0.03, 0.03, 0.04 - 31 / 3200, 0.04])


def test_how_long_rows_are_counts_beside_how_much_they_read() -> None:
    model = PiecewiseStepTime(points=((1, 0.01), (64, 0.01)), per_context_s=1e-6, per_length_s=1e-5)
    assert model.seconds(shape((1, 499))) == pytest.approx(0.01 + 500e-6 + 500e-5)
    assert model.seconds(shape((1, 399), (1, 599))) == pytest.approx(0.01 + 1000e-6 + 500e-5)


def test_prefills_beside_decodes_take_longer() -> None:
    model = PiecewiseStepTime(points=((1, 0.01), (64, 0.01)), beside_s=0.002)
    seconds = [
        model.seconds(shape(*rows))
        for rows in ([(1, 5)], [(20, 0)], [(20, 0), (1, 5)], [(20, 0), (1, 5), (1, 5)])
    ]
    assert seconds == pytest.approx([0.01, 0.01, 0.012, 0.012])


RULE = LaunchRule(recorded_tokens=100, sampling_share=0.25, after_launch_s=0.001)
DECODES, SMALL, BIG = shape((1, 50), (1, 60)), shape((99, 0), (1, 60)), shape((100, 0), (1, 60))


@pytest.mark.parametrize(
    ("step", "late_s", "occupied_s"),
    [
        (DECODES, -0.5, 0.1),  # launched while the device was busy
        (DECODES, 0.02, 0.12),
        (SMALL, -0.5, 0.1),
        (SMALL, 0.02, 0.11),  # a quarter of 0.04 s is sampling's, launched later
        (SMALL, 0.005, 0.1),
        (BIG, 0.02, 0.1),  # computed meanwhile
        (BIG, 0.3, 0.301),
    ],
)
def test_graphs_begin_when_launched_and_the_rest_is_computed_meanwhile(
    step: StepShape, late_s: float, occupied_s: float
) -> None:
    assert RULE.occupied_s(step, 0.1, late_s, 0.04) == pytest.approx(occupied_s)


@given(rows, st.floats(0.01, 1), st.floats(-1, 0.01))
@examples(quick=50, full=500)
def test_what_a_step_computes_follows_from_how_long_it_kept_the_device(
    rows: list[tuple[int, int]], seconds: float, late_s: float
) -> None:
    occupied_s = RULE.occupied_s(shape(*rows), seconds, late_s, 0.04)
    computed_s = RULE.computed_s(shape(*rows), occupied_s, late_s, 0.04)
    # what ends before that can't be told from what ends then, but for a step that is one graph
    launched_s = late_s + RULE.after_launch_s
    assert computed_s == pytest.approx(
        seconds if RULE.regime(shape(*rows)) is Regime.DECODE else max(seconds, launched_s)
    )


def test_what_a_recorded_step_computes_is_known_up_to_when_its_launching_ended() -> None:
    occupied_s = RULE.occupied_s(SMALL, 0.0100, 0.0098, 0.04)
    assert occupied_s == pytest.approx(0.0108)
    assert RULE.computed_s(SMALL, occupied_s, 0.0098, 0.04) == pytest.approx(0.0108)


def test_decodes_do_not_wait_for_what_is_launched_after_their_graph() -> None:
    rule = LaunchRule(copying_share=0.25)
    times = [
        rule.occupied_s(DECODES, 0.01, late_s, 0.04) for late_s in (-0.01, 0.005, 0.01, 0.02, 0.04)
    ]
    assert times == pytest.approx([0.01, 0.01, 0.01, 0.02, 0.04])
    assert [
        rule.computed_s(DECODES, seconds, late_s, 0.04)
        for seconds, late_s in zip(times[2:], (0.01, 0.02, 0.04), strict=True)
    ] == pytest.approx([0.01] * 3)


def test_what_is_done_before_a_graph_of_prefills_hides_behind_its_launching() -> None:
    rule = LaunchRule(recorded_tokens=SMALL.tokens, setup_s=0.003)
    times = [rule.occupied_s(SMALL, 0.01, late_s, 0.04) for late_s in (-0.01, 0.002, 0.004)]
    assert times == pytest.approx([0.013, 0.013, 0.014])
    assert [
        rule.computed_s(SMALL, seconds, late_s, 0.04)
        for seconds, late_s in zip(times, (-0.01, 0.002, 0.004), strict=True)
    ] == pytest.approx([0.01] * 3)
    assert rule.occupied_s(DECODES, 0.01, -0.01, 0.04) == 0.01


def test_a_profile_that_says_nothing_of_graphs_has_prefills_computed_while_launched() -> None:
    rule = StepTimeProfile.load("a10g-llama-2-7b").rule
    assert [rule.regime(step) for step in (DECODES, SMALL, BIG)] == [
        Regime.DECODE,
        Regime.LAUNCHED,
        Regime.LAUNCHED,
    ]


def test_chance_is_the_same_everywhere_and_has_no_order() -> None:
    assert [chance(1, step, 2) for step in range(3)] == [
        0.9006109088931584,
        0.05081380623834486,
        0.545963299984951,
    ]
    draws = np.array(
        [
            chance(seed, step, stream)
            for seed in range(4)
            for step in range(2000)
            for stream in (1, 2)
        ]
    )
    assert np.abs(np.histogram(draws, 16, (0, 1))[0] / 1000 - 1).max() < 0.15
    assert abs(np.corrcoef(draws[::2], draws[1::2])[0, 1]) < 0.03
    assert abs(np.corrcoef(draws[:-2], draws[2:])[0, 1]) < 0.03


@given(st.integers(50, 3000), st.integers(0, 10_000))
@examples(quick=30, full=300)
def test_a_spread_has_the_mean_and_the_quantiles_of_what_was_measured(
    count: int, seed: int
) -> None:
    ratios = np.random.default_rng(seed).lognormal(sigma=0.5, size=count)
    found = spread((Regime.RECORDED, ratio * 2e-3, 2e-3) for ratio in ratios.tolist())
    draws = np.array(
        [found.drawn(Regime.RECORDED, (draw + 0.5) / 20_000) for draw in range(20_000)]
    )
    assert draws.mean() == pytest.approx(ratios.mean(), rel=0.01)
    assert np.percentile(draws, [8, 47, 92]) == pytest.approx(
        np.percentile(ratios, [7.5, 47.5, 92.5]), rel=0.15
    )
    assert draws.max() <= ratios.max() * 1.001
    assert found.drawn(Regime.DECODE, 0.5) == 1.0
    assert len(found.recorded) == len(LEVELS) - 1


def test_how_a_few_steps_vary_is_not_known() -> None:
    assert spread([(Regime.DECODE, 0.002, 0.001)] * 49) == Spread()


def test_a_table_gives_what_was_measured_and_shares_the_weights_among_mixed_batches() -> None:
    decode = Grid(across=(1, 8), down=(0, 100), seconds=((0.010, 0.012), (0.011, 0.020)))
    prefill = Grid(across=(16, 64), down=(0, 100), seconds=((0.015, 0.030), (0.016, 0.034)))
    model = TableStepTime(decode=decode, prefill=prefill)
    assert model.seconds(shape(*[(1, 99)] * 8)) == pytest.approx(0.020)
    assert model.seconds(shape((64, 0))) == pytest.approx(0.030)
    assert model.seconds(shape((32, 100), (32, 100))) == pytest.approx(0.034)
    assert model.seconds(shape((64, 0), *[(1, 99)] * 8)) == pytest.approx(0.030 + 0.020 - 0.010)


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (PiecewiseStepTime, {"points": ((64, 0.1), (1, 0.2))}),
        (PiecewiseStepTime, {"points": ((64, 0.1),)}),
        (PiecewiseStepTime, {"points": ((1, 0.1), (64, 0.2)), "sizes": (64, 32)}),
        (Spread, {"decode": (1.0, 2.0)}),
        (Grid, {"across": (1, 2), "down": (2, 1), "seconds": ((1, 1), (1, 1))}),
        (Grid, {"across": (1, 2), "down": (1, 2), "seconds": ((1, 1),)}),
        (LinearStepTime, {"base_s": -1}),
        (LinearStepTime, {"base_s": 1, "per_tokn_s": 1}),
    ],
)
def test_nonsense_is_refused(model: type, values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        model(**values)


@given(st.lists(rows, min_size=12, max_size=20))
@examples(quick=20, full=200)
def test_a_fit_predicts_the_steps_that_it_was_made_of(batches: list[list[tuple[int, int]]]) -> None:
    measurements = [
        Measurement((shape(*batch),), LINEAR.seconds(shape(*batch))) for batch in batches
    ]
    assert np.abs(relative_errors(fit_linear(measurements), measurements)).max() < 1e-4


def test_steps_that_were_timed_together_are_fitted_together() -> None:
    true = PiecewiseStepTime(points=((1, 0.01), (64, 0.02), (1000, 0.3)), per_context_s=1e-6)
    groups = [
        tuple(shape(*[(1, context + done)] * count) for done in range(5))
        for count in (1, 30, 64, 200)
        for context in (10, 400)
    ]
    groups += [(shape((tokens, 0)),) for tokens in (64, 500, 1000)]
    measurements = [Measurement(group, sum(map(true.seconds, group))) for group in groups]
    found = fit_piecewise(measurements, (1, 64, 1000), ("per_context_s",))
    assert [seconds for _, seconds in found.points] == pytest.approx([0.01, 0.02, 0.3], rel=1e-6)
    assert found.per_context_s == pytest.approx(1e-6)


def test_too_few_measurements_or_no_durations_are_refused() -> None:
    one = Measurement((shape((1, 1)),), 0.01)
    with pytest.raises(ConfigError, match="can't determine 5"):
        fit_linear([one] * 4)
    with pytest.raises(ConfigError, match="positive and finite"):
        fit_linear([one] * 4 + [Measurement(one.shapes, 0.0)])


@pytest.mark.parametrize("name", shipped_profiles())
def test_every_shipped_profile_says_what_it_is_and_works(name: str) -> None:
    profile = StepTimeProfile.load(name)
    assert profile.name == name
    assert all((profile.machine, profile.model, profile.source))
    assert 1e-4 < profile.make().seconds(shape((1, 100))) < 1


@pytest.mark.parametrize("kind", BUILT_IN)
def test_a_profile_survives_its_file(tmp_path: Path, kind: str) -> None:
    step_time = {
        "linear": {"base_s": 0.1},
        "piecewise": {"points": [[1, 0.1], [2, 0.25]]},
        "regimes": {key: {"points": [[1, 0.1], [2, 0.25]]} for key in ("decode", "mixed")},
        "table": {
            key: {"across": [1, 2], "down": [1, 2], "seconds": [[0.1, 0.1], [0.2, 0.2]]}
            for key in ("decode", "prefill")
        },
        "roofline": {
            "device": "h200",
            "model": {
                "num_hidden_layers": 2,
                "hidden_size": 8,
                "num_attention_heads": 2,
                "vocab_size": 9,
            },
        },
    }[kind]
    profile = StepTimeProfile(name="mine", step_time={"kind": kind, **step_time}, error=0.02)  # type: ignore[dict-item]
    profile.save(tmp_path / "mine.json")
    loaded = StepTimeProfile.load(str(tmp_path / "mine.json"))
    assert loaded == profile
    assert loaded.make().seconds(shape((1, 9))) == profile.make().seconds(shape((1, 9)))


class Constant:
    """Somebody else's model."""

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s

    def seconds(self, shape: StepShape) -> float:
        return self.every_s


def test_a_model_of_ones_own_is_named_by_its_class() -> None:
    assert (
        StepTimeProfile.load({"kind": "tests.lab.test_step_time:Constant", "every_s": 0.5})
        .make()
        .seconds(shape((1, 1)))
        == 0.5
    )


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"kind": "cubic"}, "linear, piecewise, "),
        ({"kind": "no.such:Model"}, "can't be imported"),
        ({"kind": "linear", "base_s": "fast"}, "base_s"),
        ({"name": "x"}, "step_time"),
        ({"name": "x", "step_time": {}}, "kind"),
    ],
)
def test_a_wrong_profile_says_what_is_wrong(values: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        StepTimeProfile.load(values).make()


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"broken\.json"):
        StepTimeProfile.load(str(path))
    path.write_text(json.dumps({"name": "x"}))
    with pytest.raises(ConfigError, match=r"broken\.json: step_time"):
        StepTimeProfile.load(str(path))


def test_decodes_are_corrected_by_what_was_measured_around_them() -> None:
    plain = PiecewiseStepTime(points=((1, 0.01), (8, 0.01)), per_context_s=1e-5)
    model = plain.model_copy(
        update={"corrections": ((2, ((200, 1.1), (600, 1.3))), (6, ((1200, 0.9),)))}
    )

    def ratio(rows: int, context: int) -> float:
        decodes = shape(*[(1, context - 1)] * rows)
        return model.seconds(decodes) / plain.seconds(decodes)

    assert [ratio(2, context) for context in (50, 100, 200, 300, 900)] == pytest.approx(
        [1.1, 1.1, 1.2, 1.3, 1.3]
    )
    assert [ratio(rows, 200) for rows in (1, 2, 3, 4, 6, 8)] == pytest.approx(
        [1.1, 1.2, 1.2, 1.1, 0.9, 0.9]
    )
    assert model.seconds(SMALL) == plain.seconds(SMALL)
