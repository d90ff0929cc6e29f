"""Counter-based noise: a number for each (seed, output position, vocabulary id), computed only from
these.

There is no generator and no state, so a request's noise doesn't depend on its row, on the batch or
on preemptions, and every rank computes the same. Integers only until the last step: the bits are
the same on every device.

Seed and position are mixed to two 32-bit keys a row as SplitMix64 does (Steele, Lea, Flood: "Fast
Splittable Pseudorandom Number Generators", OOPSLA 2014). Each vocabulary id is hashed once for all;
its hash and the keys go through three rounds of multiply and xor-shift, with the constants of
Wellons' `triple32`, found by search for the least bias (https://nullprogram.com/blog/2018/07/31/,
public domain).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

MASK_64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # of SplitMix64: 2**64 / golden ratio, odd


def _signed(value: int, bits: int) -> int:
    """Return the signed integer, in two's complement, with the same bits."""
    return value - 2**bits if value >= 2 ** (bits - 1) else value


MIX_64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MIX_32 = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)
SIGNED_64 = tuple(_signed(m, 64) for m in (*MIX_64, GOLDEN))
SIGNED_32 = tuple(_signed(m, 32) for m in MIX_32)
SEEDS = 4096  # whose states are kept
BELOW_ONE = 1 - 2.0**-24  # float32 rounds the largest u up to this, never to 1


@lru_cache(SEEDS)  # deterministic requests take a row again and again
def seed_state(seed: int) -> int:
    """A request's seed (any integer; 64 bits count), mixed so that neighbouring seeds have
    unrelated streams. A signed 64-bit integer."""
    x = (seed + GOLDEN) & MASK_64
    x = ((x ^ (x >> 30)) * MIX_64[0]) & MASK_64
    x = ((x ^ (x >> 27)) * MIX_64[1]) & MASK_64
    return _signed(x ^ (x >> 31), 64)


def stream_keys(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """From `seed_state`s [n] int64 and output positions [n] int64, return the two keys [n, 2] int32
    of each row in this step."""
    x = torch.add(states, positions, alpha=SIGNED_64[2])  # [n] int64, wraps around
    x = (x ^ _shift_64(x, 30)) * SIGNED_64[0]
    x = (x ^ _shift_64(x, 27)) * SIGNED_64[1]
    x = x ^ _shift_64(x, 31)
    return x.view(torch.int32).view(-1, 2)


def _shift_64(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; torch's is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def id_hashes(vocab_size: int) -> torch.Tensor:
    """Return [vocab_size] int32: a strong hash of each vocabulary id; computed once."""
    x = np.arange(vocab_size, dtype=np.uint32)
    x ^= x >> 17
    for multiplier, shift in zip(MIX_32, (11, 15, 14), strict=True):
        x *= np.uint32(multiplier)
        x ^= x >> shift
    return torch.from_numpy(x.view(np.int32))


def noise_bits(keys: torch.Tensor, hashes: torch.Tensor) -> torch.Tensor:
    """From keys [n, 2] int32 and the `id_hashes` of the ids that take part, [ids] or [n, ids]
    int32, return [n, ids] int32 in [0, 2**31).

    For a fixed hash each step but the last is a bijection of 32 bits, and the last (whose shift
    repeats the sign) takes two numbers to one: over random keys the bits are exactly uniform.
    """
    return _noise_bits(keys, hashes)[0]


def _noise_bits(keys: torch.Tensor, hashes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bits, and a scratch tensor of their shape: on the CPU, allocating memory costs as
    much as the arithmetic."""
    x = torch.bitwise_xor(hashes, keys[:, :1])  # [n, ids] int32
    torch.add(keys[:, 1:], x, alpha=SIGNED_32[0], out=x)
    shifted = torch.empty_like(x)
    for multiplier, shift in ((SIGNED_32[1], 11), (SIGNED_32[2], 15)):
        torch.bitwise_right_shift(x, shift, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_((1 << (32 - shift)) - 1)).mul_(multiplier)
    torch.bitwise_right_shift(x, 14, out=shifted)
    return x.bitwise_xor_(shifted).bitwise_and_(2**31 - 1), shifted


def exponentials(keys: torch.Tensor, hashes: torch.Tensor) -> torch.Tensor:
    """Exponential noise, rate 1, in (0, 16.7): [n, ids] float32, for the arguments of `noise_bits`.

    e = -log(1 - u) with u = (bits + 0.5) / 2**31. The small e decide who wins a race, so they keep
    float32's relative precision: the logarithm sees 1 - u rounded to w, and what rounding lost is
    added back (near 1 the logarithm's slope is 1; where it isn't, nothing is lost).
    """
    bits, free = _noise_bits(keys, hashes)
    one = torch.ones((), device=keys.device)
    u = free.view(torch.float32).copy_(bits)  # [n, ids]
    torch.add(one * 2.0**-32, u, alpha=BELOW_ONE * 2.0**-31, out=u)
    w = torch.sub(one, u, out=bits.view(torch.float32))
    u.sub_(torch.sub(one, w))
    return u.sub_(w.log_())
