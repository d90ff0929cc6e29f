"""Mooncake's conversation trace through the KV-cache manager `prefix`, one request at a time: hit
rates by cache size.

    python -m bench.lab.mooncake_cache --traces DIR                 # a minute or two
    python -m bench.lab.mooncake_cache --traces DIR --blocks 2929

No engine and no clock: each request looks its prompt up, takes its blocks, commits prompt and
answer and lets go, before the next one comes. Blocks of 512 tokens, as the trace has its hash ids;
only full ones are ever found, and the end of a chain goes before its beginning. An answer is text
of its own: no later prompt holds it, since the trace doesn't say what was answered.
"""

from __future__ import annotations

from bench.lab.checks import Figure, arguments, print_figures
from dovetail.api.kv_cache import CacheGroup, KVContext, KVLayout
from dovetail.api.prefix_cache import PrefixCache, PrefixOptions
from dovetail.engine.live_request import LiveRequest
from dovetail.request.sampling_params import SamplingParams
from dovetail_lab.token_ids import output_ids, prompt_ids
from dovetail_lab.traces import Trace, load_trace

BLOCK_SIZE = 512
ENDLESS = 500_000  # blocks: more than the trace can fill
VOCAB_SIZE = 2**31 - 1
SHARE_OF_PROMPTS = 0.374  # found by an endless cache, of all prompt tokens
SHARE_OF_ENDLESS = {5_859: 0.377}  # blocks -> hits, of an endless cache's


def hits(trace: Trace, num_blocks: int) -> tuple[int, int]:
    """Return the prompt tokens found in the cache, and their total."""
    manager = PrefixCache(
        PrefixOptions(reuse=True),
        KVContext(KVLayout((CacheGroup((0,), BLOCK_SIZE),), 1, "none"), num_blocks),
    )
    params = SamplingParams(max_tokens=1)
    found = total = 0
    for one in trace:
        request = LiveRequest(
            one.id, prompt_ids(one, VOCAB_SIZE).tolist(), params, max_tokens=one.output_tokens
        )
        found += manager.lookup(request)
        total += one.prompt_tokens
        # the last token's K and V are never needed
        computed = one.prompt_tokens + one.output_tokens - 1
        manager.allocate(request, computed)
        # what the engine's core does when ids arrive
        request.output.extend(output_ids(one, VOCAB_SIZE).tolist())
        manager.commit(request, computed)
        manager.free(request)
    return found, total


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=list(SHARE_OF_ENDLESS), help="sizes of the cache"
    )
    args = parser.parse_args()
    trace = load_trace(args.traces / "mooncake" / "conversation_trace.jsonl")
    endless, total = hits(trace, ENDLESS)
    figures = [Figure("endless, of all prompt tokens", endless / total, SHARE_OF_PROMPTS, 0.005)]
    for blocks in args.blocks:
        share = hits(trace, blocks)[0] / endless
        expected = SHARE_OF_ENDLESS.get(blocks)
        if expected is None:
            print(f"{blocks} blocks: {share:.2%} of the hits of an endless cache")
        else:
            figures.append(
                Figure(f"{blocks} blocks, of endless", share, expected, 0.005 / expected)
            )
    raise SystemExit(not print_figures(f"{len(trace)} requests, {total} prompt tokens", figures))


if __name__ == "__main__":
    main()
