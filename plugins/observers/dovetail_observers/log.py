"""Observer `log`: writes a line about the engine's work to the logger "dovetail" every few seconds.

It uses two clocks. Wall time decides *when a line is due*, so that a simulated hour doesn't flood a
terminal. *Rates* use the times of events, which are on the engine's clock: in simulation, that of
the simulated device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from dovetail.api.observer import (
    EngineStarted,
    EngineStopped,
    Observer,
    ObserverContext,
    RequestPreempted,
    StepFinished,
)

logger = logging.getLogger("dovetail")


class LogOptions(BaseModel):
    """Options of the observer `log`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every_s: float = Field(default=5.0, gt=0, description="Wall time in seconds between two lines.")


@dataclass(slots=True)
class Tally:
    """Totals of some steps. Times are on the engine's clock."""

    began: float | None = None  # when the device started the first one; None: no steps
    ended: float = 0.0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    draft_rows: int = 0
    accepted_drafts: int = 0

    def add(self, step: StepFinished) -> None:
        if self.began is None:
            self.began = step.started
        self.ended = step.ended
        self.steps += 1
        self.prefill_tokens += step.prefill_tokens
        self.decode_tokens += step.decode_tokens
        self.cached_tokens += step.cached_tokens
        self.draft_rows += step.draft_rows
        self.accepted_drafts += sum(step.accepted_drafts)

    def per_second(self, tokens: int) -> float:
        return (
            tokens / (self.ended - self.began)
            if self.began is not None and self.ended > self.began
            else 0.0
        )

    @property
    def hit_share(self) -> float:
        """Share of prompt tokens found in the prefix cache."""
        needed = self.cached_tokens + self.prefill_tokens
        return self.cached_tokens / needed if needed else 0.0

    @property
    def drafts(self) -> str:
        """Mean number of tokens that rows with drafts yielded, as a part of a line; empty if there
        were none."""
        return (
            f", acceptance length {1 + self.accepted_drafts / self.draft_rows:.2f}"
            if self.draft_rows
            else ""
        )


class LogObserver(Observer):
    """Logs at level INFO: a line at the start, at most one every `every_s` while steps finish, and
    the totals at the end."""

    options: LogOptions

    def __init__(
        self,
        options: LogOptions,
        context: ObserverContext,
        wall: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(options, context)
        self._wall = wall
        self._due = wall() + options.every_s
        # counts since the last line, and since the start
        self._recent, self._total = (
            Tally(),
            Tally(),
        )
        self._last_step: StepFinished | None = None
        self._groups: tuple[str, ...] = ()  # names of the cache groups

    def on_started(self, event: EngineStarted) -> None:
        self._due = self._wall() + self.options.every_s
        self._groups = tuple(group.name for group in event.cache_groups)
        details = ", ".join(
            f"{name} {value}" for name, value in event.details.items() if name != "kv_groups"
        )
        logger.info(
            "started: scheduler %s, kv_cache %s (%d pages, blocks of %d), executor %s%s",
            event.scheduler,
            event.kv_cache,
            event.total_pages,
            event.block_size,
            event.executor,
            f" ({details})" if details else "",
        )
        for group in filter(None, event.details.get("kv_groups", "").split("; ")):
            logger.info("cache group: %s", group)

    def on_preempted(self, event: RequestPreempted) -> None:
        self._recent.preemptions += 1
        self._total.preemptions += 1

    def on_step(self, event: StepFinished) -> None:
        self._recent.add(event)
        self._total.add(event)
        self._last_step = event
        if self._wall() >= self._due:
            self._write(event)
            self._due = self._wall() + self.options.every_s

    def on_stopped(self, event: EngineStopped) -> None:
        if self._recent.steps and self._last_step is not None:
            self._write(self._last_step)
        total = self._total
        logger.info(
            "stopped%s: %d steps, %d prefill and %d decode tokens, prefix hits %.0f%%, %d "
            "preemptions%s",
            f" by {type(event.error).__name__}: {event.error}" if event.error else "",
            total.steps,
            total.prefill_tokens,
            total.decode_tokens,
            100 * total.hit_share,
            total.preemptions,
            total.drafts,
        )

    def _write(self, step: StepFinished) -> None:
        recent = self._recent
        self._recent = Tally()
        pages = step.pages
        share = 100 / max(1, pages.empty + pages.held + pages.cached)
        by_group = (
            zip(self._groups, pages.held_by_group, strict=False) if len(self._groups) > 1 else ()
        )
        groups = ", ".join(f"{name} {share * held:.1f}%" for name, held in by_group)
        logger.info(
            "running %d, waiting %d | prefill %.0f tok/s, decode %.0f tok/s%s | KV %.1f%% used%s, "
            "prefix hits %.0f%% | %d preemptions",
            step.running,
            step.waiting,
            recent.per_second(recent.prefill_tokens),
            recent.per_second(recent.decode_tokens),
            recent.drafts,
            share * pages.held,
            f" ({groups})" if groups else "",
            100 * recent.hit_share,
            recent.preemptions,
        )
