"""Least counter first: a baseline of Sheng et al., Fairness in Serving Large Language Models (OSDI '24, arXiv:2401.00588), section 5."""

from __future__ import annotations

from dovetail.api.scheduler import Claims
from dovetail_schedulers.counters import CounterOptions
from dovetail_schedulers.vtc import VTC


class LCFOptions(CounterOptions, frozen=True):
    """Options of the scheduler `lcf`. Requests that name no client count as those of one more."""


class LCF(VTC):
    """As `vtc`, but counters are never lifted: who was away comes back with credit, and goes before all others until it is used up.

    So no client that was ever served can be forgotten: some 100 bytes and its name for each. Use it where clients are few.
    """

    claims = Claims(starves=True)
    lift = False
