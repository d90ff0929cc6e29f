"""The manager `prefix` over many more scripts than the conformance suite plays."""

from __future__ import annotations

from random import Random

import pytest

from dovetail.testing.suites.kv_cache import SCRIPTS
from dovetail.testing.suites.kv_model import KVWorld
from dovetail.testing.suites.kv_scripts import draw_script, draw_shape
from dovetail_kv_cache.prefix import PrefixCache, PrefixOptions
from tests.support import FULL


@pytest.mark.parametrize("reuse", [True, False])
def test_no_claim_of_the_kind_is_ever_broken(reuse: bool) -> None:
    for seed in range(SCRIPTS, 10_000 if FULL else SCRIPTS + 100):
        random = Random(seed)
        KVWorld(lambda context: PrefixCache(PrefixOptions(reuse=reuse), context), draw_shape(random)).run(draw_script(random))
