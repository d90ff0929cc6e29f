"""The manager `prefix` over many more scripts than the conformance suite plays."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from dovetail.api.prefix_cache import PrefixCache, PrefixOptions
from dovetail.testing.suites.kv_cache import GROUP_SCRIPTS, SCRIPTS
from dovetail.testing.suites.kv_model import KVWorld, Shape
from dovetail.testing.suites.kv_scripts import draw_groups, draw_script, draw_shape, draw_states
from tests.support import FULL

FIRST = SCRIPTS + GROUP_SCRIPTS  # seed


@pytest.mark.parametrize("draw", [draw_shape, draw_groups, *([draw_states] if FULL else [])])
@pytest.mark.parametrize("reuse", [True, False])
def test_no_claim_of_the_kind_is_ever_broken(reuse: bool, draw: Callable[[Random], Shape]) -> None:
    for seed in range(FIRST, 5_000 if FULL else FIRST + 40):
        random = Random(seed)
        world = KVWorld(
            lambda context: PrefixCache(PrefixOptions(reuse=reuse), context), draw(random)
        )
        world.run(draw_script(random))
        assert not world.breaches, seed
