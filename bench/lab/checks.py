"""Helpers of the checks: command line, and a table of actual and expected figures."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """With `--traces`; a check adds its own."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--traces",
        type=Path,
        required=True,
        metavar="DIR",
        help="the folder of public traces and measurements",
    )
    return parser


@dataclass(frozen=True, slots=True)
class Figure:
    """A simulated and a measured number. `within`: maximum relative difference."""

    name: str
    simulated: float
    measured: float
    within: float

    @property
    def difference(self) -> float:
        return self.simulated / self.measured - 1.0

    @property
    def holds(self) -> bool:
        return abs(self.difference) <= self.within


def print_figures(title: str, figures: list[Figure]) -> bool:
    """Print every figure; return True if all are within bounds."""
    print(f"\n{title}")
    print(f"  {'':34}{'simulated':>12}{'measured':>12}{'off by':>9}")
    for figure in figures:
        verdict = "" if figure.holds else f"   more than {figure.within:.0%}"
        print(
            f"  {figure.name:34}{figure.simulated:12.4g}{figure.measured:12.4g}{figure.difference:+9.1%}{verdict}"
        )
    return all(figure.holds for figure in figures)
