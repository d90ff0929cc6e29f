"""The features of an engine: a new one is named here, or by its executor, and nowhere else in the
loop."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.api.executor import Capacity
from dovetail.engine.adapters import AdapterSlots
from dovetail.engine.feature import EngineFeature
from dovetail.engine.media import EncoderSlots
from dovetail.engine.pooling import Pooling
from dovetail.engine.prompt_logprobs import DeliversPromptLogprobs


def features_of(
    capacity: Capacity, slot_wait_s: float = 0.0, tiers: Sequence[EngineFeature] = ()
) -> list[EngineFeature]:
    """Return the features that an executor of this capacity serves, in the order of their calls.

    `slot_wait_s`: an adapter that waits longer than this for a slot is preferred. `tiers`: those
    that the caller has made, `tiers.feature.TierFeature`.
    """
    features: list[EngineFeature] = [DeliversPromptLogprobs()]
    if capacity.pooling is not None:
        features.append(Pooling())
    if capacity.adapters is not None:
        features.append(AdapterSlots(capacity.adapters.slots, slot_wait_s))
    if capacity.media is not None:
        features.append(EncoderSlots(capacity.media))
    return [*features, *(part.feature() for part in capacity.parts), *tiers]
