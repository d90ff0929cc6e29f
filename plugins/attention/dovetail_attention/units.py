"""Addresses of tokens in a layer's cache as the `torch` backend sees it: one list of slots.

A page's row may be longer than the layer's own part of it, and need not hold a whole number of its
tokens. So the cache is viewed in *units*, the largest number that both a row and a token are a
multiple of: entry i of the view is a token's K or V that begins i units into the memory. Usually
the unit is a token and the view is the pool's slots, one after the other.

      page stride 5, token stride 2    | token 0   token 1   - | token 2   token 3   - | ...
      (blocks of 2)                      0    1    2    3    4   5    6    7    8    9
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch

from dovetail.api.attention import AttentionBatch, LayerCache, LayerSpec


class Units(NamedTuple):
    """Location of a layer's tokens: its page within a block, and distances in units. Layers with
    equal `Units` share slots."""

    group: int
    page: int  # of a block
    block_size: int  # tokens
    of_page: int  # from one page to the next
    of_token: int
    entries: int  # of the view

    @classmethod
    def of(cls, cache: LayerCache, rows: torch.Tensor, spec: LayerSpec) -> Units:
        """rows [num_pages + 1, numbers of a row]: of K, or of V."""
        token = spec.kv_heads * spec.head_size
        row = rows.shape[1]
        unit = gcd(token, row)
        return cls(
            cache.group,
            cache.page,
            cache.block_size,
            row // unit,
            token // unit,
            (rows.numel() - token) // unit + 1,
        )

    def view(self, rows: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
        """Return a view [entries, kv_heads, head_size] of rows [num_pages + 1, numbers of a row];
        they overlap if a token is several units."""
        unit = spec.kv_heads * spec.head_size // self.of_token
        return rows.as_strided(
            (self.entries, spec.kv_heads, spec.head_size), (unit, spec.head_size, 1)
        )

    def of_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the entries of slots (page * block_size + offset), any integers."""
        if (self.of_page, self.of_token) == (self.block_size, 1):
            return slots
        return slots // self.block_size * self.of_page + slots % self.block_size * self.of_token

    def tables(self, batch: AttentionBatch) -> torch.Tensor:
        """Return the block tables of a batch, [rows, blocks]."""
        return batch.block_tables[self.group][self.page]

    def of_positions(self, tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the entries of positions [rows, n] int64; tables [rows, blocks], or [1, blocks] if
        all positions are of one row."""
        tables = tables.long().expand(len(positions), -1)
        pages = tables.gather(1, positions // self.block_size)
        return self.of_slots(pages * self.block_size + positions % self.block_size)
