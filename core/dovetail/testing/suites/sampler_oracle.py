"""Oracle of samplers: one row, float64, plain loops; and the test of counts against probabilities.

Shares no code with any sampler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.sampler import RowSampling

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
NEVER = -math.inf
# smaller expected counts are merged: the test's approximation requires this minimum (Cochran,
# Biometrics 10, 1954)
RARE = 5


def changed_logits(
    logits: Sequence[float], sampling: RowSampling, prompt: Sequence[int], output: Sequence[int]
) -> Float64:
    """Return the logits after biases, bans and penalties."""
    values = [float(x) for x in logits]
    for token, bias in sampling.logit_bias:
        values[token] += bias
    if sampling.allowed_token_ids is not None:
        allowed = set(sampling.allowed_token_ids)
        values = [x if token in allowed else NEVER for token, x in enumerate(values)]
    banned = set(sampling.stop_token_ids) if len(output) < sampling.min_tokens else set()
    history = [*prompt, *output]
    for word in sampling.bad_words:
        prefix = list(word[:-1])
        if len(prefix) <= len(history) and history[len(history) - len(prefix) :] == prefix:
            banned.add(word[-1])
    without = [NEVER if token in banned else x for token, x in enumerate(values)]
    if any(x != NEVER for x in without):
        values = without
    for token in set(history):
        penalty = sampling.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token in set(output):
        values[token] -= sampling.presence_penalty + sampling.frequency_penalty * list(
            output
        ).count(token)
    return np.array(values, dtype=np.float64)


def distribution(
    logits: Sequence[float],
    sampling: RowSampling,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
) -> Float64:
    """Return the probability of each token. Of equal logits the lower ids come first."""
    values = changed_logits(logits, sampling, prompt, output)
    # most likely first
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if sampling.temperature == 0:
        return _normalised(len(values), {order[0]: 1.0})
    weights = {
        token: math.exp((values[token] - values[order[0]]) / sampling.temperature)
        for token in order
    }
    if sampling.top_k > 0:
        weights = {token: weights[token] for token in order[: sampling.top_k]}
    if sampling.top_p < 1:
        total = sum(weights.values())
        reached = 0.0
        kept: dict[int, float] = {}
        for token, weight in weights.items():
            if reached >= sampling.top_p * total and kept:
                break
            kept[token] = weight
            reached += weight
        weights = kept
    if sampling.min_p > 0:
        weights = {token: weight for token, weight in weights.items() if weight >= sampling.min_p}
    return _normalised(len(values), weights)


def _normalised(size: int, weights: dict[int, float]) -> Float64:
    result = np.zeros(size)
    for token, weight in weights.items():
        result[token] = weight
    return np.asarray(result / result.sum())


def p_value(counts: Int64, probabilities: Float64) -> float:
    """Return how likely counts so far from `probabilities` are by chance (Pearson's chi-square
    test); 0 if an impossible token came."""
    possible = probabilities > 0
    if counts[~possible].any():
        return 0.0
    observed = counts[possible].astype(np.float64)
    expected = probabilities[possible] * counts.sum()
    rare = expected < RARE
    if rare.any():
        observed = np.append(observed[~rare], observed[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    distance = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(observed) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(distance / 2, dtype=torch.float64)))
