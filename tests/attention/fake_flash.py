"""Stand-ins for FlashAttention's two packages: their documented calls, as far as the backend uses
them, in plain torch.

Signatures and shapes are those of flash_attn 2.8 (`flash_attn/flash_attn_interface.py`) and of
FlashAttention 3 (`hopper/flash_attn_interface.py`): an argument that a real one doesn't have is an
error here too, and so is a tensor that a real one would refuse.
"""

from __future__ import annotations

from types import ModuleType

import torch

Window = tuple[int, int]


def flash_attn_2() -> ModuleType:
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
        softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        refuse_others(dropout_p, softcap, alibi_slopes, deterministic, return_attn_probs)
        check_pages(k)
        check_starts(cu_seqlens_k, len(block_table))
        lens = cu_seqlens_k.diff()
        require(max_seqlen_k >= int(lens.max()), "max_seqlen_k is the longest row")
        return attend_rows(
            q,
            k,
            v,
            cu_seqlens_q,
            max_seqlen_q,
            lens,
            block_table,
            softmax_scale,
            causal,
            window_size,
        )

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None,
        block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None,
        num_splits=0, return_softmax_lse=False,
    ):  # fmt: skip
        refuse_others(
            k,
            v,
            rotary_cos,
            rotary_sin,
            cache_batch_idx,
            cache_leftpad,
            softcap,
            alibi_slopes,
            num_splits,
            return_softmax_lse,
        )
        check_pages(k_cache)
        return attend_rectangle(
            q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, causal, window_size
        )

    return module("flash_attn", flash_attn_varlen_func, flash_attn_with_kvcache)


def flash_attn_3() -> ModuleType:
    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
        cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None,
        k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
        rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
    ):  # fmt: skip
        refuse_others(
            k,
            v,
            qv,
            rotary_cos,
            rotary_sin,
            cache_batch_idx,
            cache_leftpad,
            cu_seqlens_k_new,
            rotary_seqlens,
            q_descale,
            k_descale,
        )
        refuse_others(
            v_descale,
            attention_chunk,
            softcap,
            scheduler_metadata,
            num_splits,
            pack_gqa,
            sm_margin,
            return_softmax_lse,
        )
        if cu_seqlens_q is None:
            return attend_rectangle(
                q, k_cache, v_cache, cache_seqlens, page_table, softmax_scale, causal, window_size
            )
        return attend_rows(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q,
            max_seqlen_q,
            cache_seqlens,
            page_table,
            softmax_scale,
            causal,
            window_size,
        )

    return module("flash_attn_interface", flash_attn_with_kvcache)


def module(name: str, *functions) -> ModuleType:
    fake = ModuleType(name)
    for function in functions:
        setattr(fake, function.__name__, function)
    return fake


def attend_rectangle(q, k, v, lens, table, scale, causal, window):
    """q [rows, queries, heads, size] -> the same."""
    rows, queries, *_ = q.shape
    starts = torch.arange(rows + 1, dtype=torch.int32) * queries
    return attend_rows(
        q.flatten(0, 1), k, v, starts, queries, lens, table, scale, causal, window
    ).view(q.shape)


def attend_rows(q, k, v, starts, longest, lens, table, scale: float, causal: bool, window: Window):
    """q [tokens, heads, size]; k, v [blocks, block_size, kv_heads, size] -> like q. Bottom-right
    aligned; a query that sees nothing gets zeros."""
    check_starts(starts, len(table))
    require(len(table) > 0, "batch size must be positive")
    require(q.dtype == k.dtype == v.dtype, "query, key and value must have the same dtype")
    require(
        q.shape[1] % k.shape[2] == 0,
        "the number of heads in key and value must divide that in query",
    )
    require(lens.dtype == table.dtype == torch.int32, "lengths and tables are int32")
    require(len(lens) == len(table) and table.stride(-1) == 1, "a length and a table a row")
    require(
        k.shape == v.shape and k.stride(-1) == v.stride(-1) == q.stride(-1) == 1,
        "the last dimension is contiguous",
    )
    require(longest >= int(starts.diff().max()), "max_seqlen_q is the longest row")
    out = torch.zeros_like(q)
    for row, (begin, end, length) in enumerate(
        zip(starts[:-1].tolist(), starts[1:].tolist(), lens.tolist(), strict=True)
    ):
        # tiles begin in the first page that is seen
        first_page = (
            0 if window[0] < 0 else max(0, length - (end - begin) - window[0]) // k.shape[1]
        )
        blocks, first = (
            table[row, first_page : -(-length // k.shape[1])].long(),
            first_page * k.shape[1],
        )
        keys, values = (
            cache[blocks]
            .flatten(0, 1)[: length - first]
            .repeat_interleave(q.shape[1] // k.shape[2], dim=1)
            for cache in (k, v)
        )
        position, token = (
            torch.arange(length - (end - begin), length)[:, None],
            torch.arange(first, length)[None],
        )
        seen = (token <= position) if causal else torch.ones(end - begin, length, dtype=torch.bool)
        if window[0] >= 0:
            seen = seen & (token >= position - window[0])
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].double(), keys.double()) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values.double()).to(q.dtype)
    return out


def check_pages(cache: torch.Tensor) -> None:
    require(cache.shape[1] % 256 == 0, "pages are multiples of 256 tokens")  # version 3 takes any


def check_starts(starts: torch.Tensor, rows: int) -> None:
    require(
        starts.dtype == torch.int32 and starts.is_contiguous(), "starts are int32, in one piece"
    )
    require(
        len(starts) == rows + 1 and int(starts[0]) == 0,
        "starts begin at 0 and have one more entry than there are rows",
    )


def refuse_others(*arguments: object) -> None:
    require(
        not any(argument is not None and argument != 0.0 for argument in arguments),
        "this stand-in doesn't know that argument",
    )


def require(condition: bool, rule: str) -> None:
    if not condition:
        raise RuntimeError(f"flash-attn would refuse or misread this: {rule}")
