"""Page of a capacity search: each objective's value at every rate tried, by engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dovetail_lab.capacity import Capacity
from dovetail_lab.report.curves import Curves, Panel, Point, Table, draw
from dovetail_lab.report.engine import Engine
from dovetail_lab.report.style import Drawing
from dovetail_lab.slo import Objective
from dovetail_lab.summary import title_of


def capacity_page(
    found: Mapping[str, Capacity],
    objectives: Sequence[Objective],
    own_rate: float,
    engines: Sequence[Engine],
    *,
    trace: str,
    answers: Sequence[str],
    cautions: Sequence[str],
    table: Table,
    command: str,
    files: Mapping[str, str],
) -> Curves:
    """Create the page. `own_rate`: requests per second of the unscaled trace."""
    wanted = ", ".join(map(str, objectives))
    return Curves(
        title=f"{', '.join(found)} on {trace}: rates that meet {wanted}",
        command=command,
        introduction=f"The trace's own rate is {own_rate:.4g} requests/s. Latencies count from "
        f"arrival; requests never served miss every objective.",
        answers=answers,
        cautions=cautions,
        engines=engines,
        drawings=_drawings(found, objectives, own_rate),
        table=table,
        files=files,
    )


def _drawings(
    found: Mapping[str, Capacity], objectives: Sequence[Objective], own_rate: float
) -> list[Drawing]:
    def curves(place: int, figure: str) -> dict[str, list[Point]]:
        """Return the curves of the objective at index `place`. `figure`: "value" or "share"."""
        return {
            name: [
                Point(
                    trial.scale * own_rate,
                    getattr(trial.judged[place], figure),
                    trial.judged[place].met,
                )
                for trial in of_engine.trials
            ]
            for name, of_engine in found.items()
        }

    values = []
    within = []
    for place, objective in enumerate(objectives):
        title = title_of(objective.metric, objective.name.partition("_")[2])
        values.append(Panel(f"{title}, s", curves(place, "value"), objective.limit_s))
        if objective.q is not None:
            within.append(
                Panel(
                    f"{title_of(objective.metric)} within {objective.limit_s:g} s",
                    curves(place, "share"),
                    objective.q,
                    share=True,
                )
            )
    answers = {
        name: of_engine.scale * own_rate
        for name, of_engine in found.items()
        if of_engine.scale is not None
    }
    how = (
        "Hollow: the objective is missed. Vertical lines: the highest rate found at which all "
        "objectives are met."
    )
    asked = "The share of all requests sent; a dotted line is the required share."
    x_label = "requests/s that arrive"
    made = (
        draw(
            "rates",
            "Latency by rate",
            f"Of all requests sent. A dotted line is the limit. {how}",
            x_label,
            values,
            answers,
        ),
        draw("objectives", "Objectives by rate", f"{asked} {how}", x_label, within, answers),
    )
    return [drawing for drawing in made if drawing is not None]
