"""`tune`: searches a policy's options on one part of a trace, and evaluates the gain on the rest.

The search is optuna's TPE (Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS
2011). A journal keeps the trials, so a killed search can be resumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import xxhash
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from dovetail import EngineConfig
from dovetail.errors import ConfigError, DovetailError, shown
from dovetail_lab.block_length import block_length
from dovetail_lab.command_options import progress_bar
from dovetail_lab.compare import paired
from dovetail_lab.draws import BlockDraws
from dovetail_lab.metrics import Slo, measure
from dovetail_lab.option_space import Dimension
from dovetail_lab.pairs import MEAN, Pairs, Statistic
from dovetail_lab.records import RunResult
from dovetail_lab.simulate import replay
from dovetail_lab.statistics import Change, changes
from dovetail_lab.traces import Trace
from dovetail_lab.until import FIGURES, parts_of
from dovetail_lab.verdict import RATES

GOODPUT = "goodput"
OBJECTIVES = (GOODPUT, *FIGURES)
RESAMPLES = 2_000
STATES = optuna.trial.TrialState


@dataclass(frozen=True, slots=True)
class Goal:
    """The figure to optimize. `slo`: the objectives that goodput counts."""

    figure: str
    slo: Slo | None

    def __post_init__(self) -> None:
        if self.figure not in OBJECTIVES:
            raise ConfigError(
                f"--objective: there is no {shown(self.figure)}; there are {', '.join(OBJECTIVES)}"
            )
        if (self.figure == GOODPUT) != (self.slo is not None):
            raise ConfigError(
                "--objective goodput needs --goodput ttft<0.5,tpot<50ms or the like, which no "
                "other objective takes"
            )

    @property
    def rises(self) -> bool:
        """True if more is better."""
        return self.figure == GOODPUT or self.figure in RATES

    @property
    def says(self) -> str:
        """Name of the figure that `change` compares."""
        return "share of requests that meet --goodput" if self.figure == GOODPUT else self.figure

    def value(self, run: RunResult) -> float:
        """Return the figure of a run."""
        metrics = measure(run, self.slo)
        if self.rises:
            return float(getattr(metrics, self.figure))
        metric, statistic = parts_of(self.figure)
        return metrics.latencies[metric].named(statistic.name)

    def change(self, base: RunResult, other: RunResult) -> Change:
        """Return the change of the figure on the same requests, with a 95 % interval from
        resampled blocks of requests. For goodput, compare the share of requests that meet the
        objectives. Rates have no interval."""
        if self.figure in RATES:
            a = self.value(base)
            b = self.value(other)
            return Change(a, b, b / a - 1 if a else math.nan, math.nan, math.nan)
        pairs, statistic = self._pairs(base, other)
        length = block_length([pairs], statistic)
        draws = BlockDraws(length.requests, len(base), RESAMPLES, seed=0)
        [change] = changes([pairs], [statistic], draws)
        return change

    def _pairs(self, base: RunResult, other: RunResult) -> tuple[Pairs, Statistic]:
        if self.slo is not None:
            met = [np.array([float(self.slo.met_by(one)) for one in run]) for run in (base, other)]
            return Pairs.of(*met), MEAN
        metric, statistic = parts_of(self.figure)
        return paired([base], [other], metric)[0], statistic

    def better(self, change: Change) -> bool:
        """Return True for a gain whose interval excludes zero; rates have none."""
        gain = change.relative > 0 if self.rises else change.relative < 0
        return gain and (change.measurable or self.figure in RATES)


@dataclass(frozen=True, slots=True)
class Search:
    """A policy's options, tried on a trace."""

    engine: EngineConfig
    policy: str
    defaults: Mapping[str, Any]  # its options as they are
    space: Sequence[Dimension]
    goal: Goal
    trace: Trace
    seed: int

    def config(self, options: Mapping[str, Any]) -> EngineConfig:
        """Return the engine with these options. Raises `ConfigError`."""
        scheduler = {"name": self.policy, **self.defaults, **options}
        return EngineConfig.load_with(self.engine, {"scheduler": scheduler})

    @property
    def name(self) -> str:
        """Name of the study, which is different if anything that affects a trial changes."""
        parts = (self.config({}).scheduler, self.engine, self.space, self.goal, self.seed)
        return xxhash.xxh64_hexdigest(repr((parts, self.trace.requests)).encode())

    def run(self, folder: Path, trials: int) -> optuna.Study:
        """Search until `trials` trials have ended, and return the study. Resumes from the trials in
        `folder`, even if an earlier call was killed."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(folder / "trials.log"))),
            study_name=self.name,
            direction="maximize" if self.goal.rises else "minimize",
            load_if_exists=True,
        )
        base = replay(self.config({}), self.trace, seed=self.seed)
        with progress_bar("tune", "trial") as progress:
            while (done := _ended(study)) < trials:
                progress(done, trials)
                # the same trials, whether or not the search was stopped before this one
                study.sampler = optuna.samplers.TPESampler(seed=self.seed + done)
                self._try(study, base)
        return study

    def _try(self, study: optuna.Study, base: RunResult) -> None:
        """Run one trial. It fails if the policy rejects the options, or, for latencies, if fewer
        requests complete than with the current options: latencies are of completed requests."""
        trial = study.ask()
        options = {one.name: one.suggest(trial) for one in self.space}
        try:
            run = replay(self.config(options), self.trace, seed=self.seed)
        except DovetailError as error:
            trial.set_user_attr("refused", str(error))
            study.tell(trial, state=STATES.FAIL)
            return
        value = self.goal.value(run)
        fewer = measure(run).completed < measure(base).completed and not self.goal.rises
        if fewer or not math.isfinite(value):
            study.tell(trial, state=STATES.FAIL)
        else:
            study.tell(trial, value)


def _ended(study: optuna.Study) -> int:
    return len(study.get_trials(deepcopy=False, states=(STATES.COMPLETE, STATES.FAIL)))
