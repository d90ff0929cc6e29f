"""Least counter first: a baseline of Sheng et al., Fairness in Serving Large Language Models (OSDI
'24, arXiv:2401.00588), section 5."""

from __future__ import annotations

from dovetail.api.scheduler import SchedulerCapabilities
from dovetail_schedulers.counters import CounterOptions
from dovetail_schedulers.vtc import VTC


class LCFOptions(CounterOptions, frozen=True):
    """Options of the scheduler `lcf`. Requests without a client count as one more client."""


class LCF(VTC):
    """Like `vtc` without lifting of counters: a client that was idle returns with credit, and
    precedes all others until it is used up.

    So no client that was ever served can be forgotten, which takes some 100 bytes plus its name for
    each. Use it if there are few clients.
    """

    capabilities = SchedulerCapabilities(starves=True)
    lift = False
