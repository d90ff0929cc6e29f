"""Fairness by counters that are never lifted."""

from __future__ import annotations

from dovetail.testing import make_request, plan
from dovetail_schedulers.lcf import LCF, LCFOptions
from dovetail_schedulers.vtc import VTC, VTCOptions


def test_a_client_that_was_away_has_credit_for_it() -> None:
    policy = plan(
        LCF,
        options=LCFOptions(),
        waiting=[make_request(f"a{i}", 8, client="a") for i in range(4)],
        token_budget=24,
    ).policy
    # b comes when a has had three prompts
    waiting = [make_request(id, 8, client=id[0]) for id in ("a4", "b1", "b2", "b3")]
    assert list(plan(policy, waiting=waiting, token_budget=16).granted) == ["b1", "b2"]


def test_among_clients_that_always_wait_it_is_vtc() -> None:
    waiting = [(f"{client}{i}", 3 + (i * 5) % 7, client) for i in range(6) for client in "abc"]
    plans = [
        plan(
            policy,
            options=options,
            waiting=[make_request(id, tokens, client=client) for id, tokens, client in waiting],
            token_budget=60,
        )
        for policy, options in ((LCF, LCFOptions()), (VTC, VTCOptions()))
    ]
    assert list(plans[0].granted) == list(plans[1].granted)
