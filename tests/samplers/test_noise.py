"""The noise: uniform, exponential, independent across ids, positions and seeds, and a function of
only these three."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import numpy as np
import pytest
import torch

from dovetail_samplers import noise
from dovetail_samplers.noise import exponentials, id_hashes, noise_bits, seed_state, stream_keys
from tests.rounding import allowed

IDS = 4096
ALPHA = 1e-5
GOLDEN_BITS = [
    [649539806, 1829353461, 1069585102],
    [2089106234, 1363757467, 1631489937],
    [1539924736, 1282043675, 598470114],
]


@pytest.fixture(scope="module")
def stats() -> ModuleType:
    """Return `scipy.stats`, whose import takes longer than a test."""
    return import_module("scipy.stats")


def streams(seeds: list[int], positions: list[int]) -> torch.Tensor:
    return stream_keys(torch.tensor([seed_state(s) for s in seeds]), torch.tensor(positions))


def bits(seeds: list[int], positions: list[int], ids: int = IDS) -> np.ndarray:
    return noise_bits(streams(seeds, positions), id_hashes(ids)).numpy()


ALONG = {
    "ids": bits([3], [5], 2**17)[0],
    "positions": bits([3] * 4096, list(range(4096)), 32)[:, 7],
    "seeds": bits(list(range(4096)), [0] * 4096, 32)[:, 7],
    "all": bits(list(range(64)) * 4, [p for p in range(4) for _ in range(64)]).ravel(),
}


@pytest.mark.parametrize("x", ALONG.values(), ids=ALONG)
def test_each_byte_is_uniform(stats: ModuleType, x: np.ndarray) -> None:
    for shift in (0, 8, 16, 23):
        assert stats.chisquare(np.bincount((x >> shift) & 255, minlength=256)).pvalue > ALPHA


@pytest.mark.parametrize("x", ALONG.values(), ids=ALONG)
def test_neighbours_are_unrelated(stats: ModuleType, x: np.ndarray) -> None:
    """Pairs of successive values fall uniformly into 16 x 16 squares, by their high bits and by
    their low ones."""
    for shift in (0, 27):
        nibbles = (x >> shift) & 15
        assert (
            stats.chisquare(np.bincount(nibbles[:-1] * 16 + nibbles[1:], minlength=256)).pvalue
            > ALPHA
        )


@pytest.mark.parametrize(
    "shape", [([1] * 64, list(range(64))), (list(range(64)), [9] * 64)], ids=["positions", "seeds"]
)
def test_streams_are_uncorrelated(stats: ModuleType, shape: tuple[list[int], list[int]]) -> None:
    x = bits(*shape).astype(np.float64)
    # standard normal, 2016 of them
    off_diagonal = np.corrcoef(x)[np.triu_indices(64, 1)] * np.sqrt(IDS)
    assert np.abs(off_diagonal).max() < 5.5
    assert stats.kstest(off_diagonal, "norm").pvalue > ALPHA


def test_one_input_bit_changes_half_of_the_output_bits() -> None:
    seeds = [int(s) for s in np.random.default_rng(0).integers(0, 2**62, 200)]
    base = bits(seeds, [0] * 200, 64)
    for changed in (bits([s ^ (1 << b) for s in seeds], [0] * 200, 64) for b in range(0, 64, 7)):
        # the top bit is always 0
        flips = np.unpackbits((base ^ changed).view(np.uint8)).mean() * 32 / 31
        assert abs(flips - 0.5) < 0.01


def test_no_two_ids_share_their_noise() -> None:
    hashes = id_hashes(200_000)
    assert len(hashes.unique()) == 200_000
    same = sum(
        len(row) - len(row.unique()) for row in noise_bits(streams([1, 2, 3, 4], [0] * 4), hashes)
    )
    assert same < 60  # 4 * 200,000**2 / 2 / 2**31 = 37 expected of random numbers


def test_exponentials_are_exponential(stats: ModuleType) -> None:
    x = exponentials(streams(list(range(50)), [0] * 50), id_hashes(IDS)).numpy()
    assert x.dtype == np.float32
    assert stats.kstest(x.ravel(), "expon").pvalue > ALPHA


def test_small_exponentials_keep_their_precision() -> None:
    keys, hashes = streams(list(range(100)), [1] * 100), id_hashes(20_000)
    u = (noise_bits(keys, hashes).numpy().astype(np.float64) + 0.5) / 2**31
    e = exponentials(keys, hashes).numpy()
    assert u.min() < 2.0**-19
    exact = -np.log1p(-u)
    np.testing.assert_allclose(e[u < 0.9], exact[u < 0.9], rtol=allowed(4))
    # above, 1 - u has few bits left, and never wins a race
    np.testing.assert_allclose(e[u < 0.999], exact[u < 0.999], rtol=2e-5)


@pytest.mark.parametrize("extreme", [0, 1, 2**31 - 1, 2**31 - 64, 2**31 - 65])
def test_no_bits_make_zero_or_infinity(extreme: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.full((1, 1), extreme, dtype=torch.int32)
    monkeypatch.setattr(noise, "_noise_bits", lambda keys, hashes: (made, torch.empty_like(made)))
    e = exponentials(torch.zeros((1, 2), dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    assert 0 < e.item() < 17


def plain_bits(seed: int, position: int, token: int) -> int:
    """The noise's definition, in plain integers."""

    def mix_64(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    def mix_32(x: int, added: int, shifts: tuple[int, ...]) -> int:
        for step, (multiplier, shift) in enumerate(
            zip((0xED5AD4BB, 0xAC4C1B51, 0x31848BAB), shifts, strict=True)
        ):
            x = (x * multiplier + (added if step == 0 else 0)) % 2**32
            x ^= x >> shift
        return x

    def signed_32(x: int) -> int:
        return x - 2**32 if x >= 2**31 else x

    golden = 0x9E3779B97F4A7C15
    key = mix_64((mix_64((seed + golden) % 2**64) + position * golden) % 2**64)
    hashed = mix_32(token ^ (token >> 17), 0, (11, 15, 14))
    x = mix_32(hashed ^ (key % 2**32), key >> 32, (11, 15, 32))
    return (x ^ (signed_32(x) >> 14)) % 2**31


def test_the_bits_are_those_of_the_definition() -> None:
    generator = np.random.default_rng(5)
    seeds, positions = (
        [int(s) for s in generator.integers(-(2**63), 2**63, 30)],
        [int(p) for p in generator.integers(0, 2**20, 30)],
    )
    plain = [
        [plain_bits(s, p, token) for token in range(200)]
        for s, p in zip(seeds, positions, strict=True)
    ]
    assert bits(seeds, positions, 200).tolist() == plain


def test_the_bits_never_change() -> None:
    """A seed promises the same tokens from release to release: these numbers are written in
    stone."""
    assert bits([0, 1, -1], [0, 1, 2], 3).tolist() == GOLDEN_BITS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_makes_the_same_bits() -> None:
    states, positions = (
        torch.tensor([seed_state(s) for s in range(-32, 32)]),
        torch.arange(64) * 1000,
    )
    keys, hashes = stream_keys(states, positions), id_hashes(50_000)
    on_gpu = noise_bits(stream_keys(states.cuda(), positions.cuda()), hashes.cuda())
    assert torch.equal(on_gpu.cpu(), noise_bits(keys, hashes))


def test_seeds_that_share_64_bits_are_the_same() -> None:
    assert seed_state(-1) == seed_state(2**64 - 1)


@pytest.mark.parametrize("scale", [0.1, 0.5, 2.0])
def test_samples_of_two_distributions_with_the_same_noise_agree_as_often_as_the_formula_says(
    scale: float,
) -> None:
    """The acceptance of drafts that are drawn with the noise of the model that checks them: see
    docs/speculation.md."""
    logits, difference = np.random.default_rng(1).normal(size=(2, 300)) * 2
    p, q = (np.exp(x) / np.exp(x).sum() for x in (logits, logits + scale * difference))
    formula = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(len(p)))
    draws = 20_000
    race = (
        exponentials(streams([11] * draws, list(range(draws))), id_hashes(len(p))).double().numpy()
    )
    measured = np.mean((race / p).argmin(1) == (race / q).argmin(1))
    assert abs(measured - formula) < 4 * np.sqrt(formula * (1 - formula) / draws)
    assert formula < np.minimum(p, q).sum(), (
        "rejection sampling would accept more, and give up that a seed has its tokens"
    )
