"""The books that outlive a step: who waits, who runs, whose blocks are whose. `PlannedStep` changes them on a policy's behalf, `EngineCore`
when requests arrive, when results come in and when requests finish."""

from __future__ import annotations

from dovetail.api.kv_cache import KVCacheManager
from dovetail.engine.estimator import StepTimeFit
from dovetail.engine.queue import RequestQueue
from dovetail.engine.rows import RowTable
from dovetail.request import Request, Status


class Books:
    """Queues, rows and blocks, kept consistent: a request holds blocks exactly while it is RUNNING or DRAINING (or lingers)."""

    def __init__(self, kv: KVCacheManager, block_size: int, window: int | None, max_seqs: int, policy_name: str) -> None:
        self.kv = kv
        self.block_size = block_size
        self.window = window
        self.policy_name = policy_name
        self.waiting = RequestQueue()
        self.running = RequestQueue()
        self.rows = RowTable(max_seqs)
        self.fit = StepTimeFit()
        self.known: set[Request] = set()  # arrived and not finished: whom a policy may name
        self.lingering: list[Request] = []  # finished, blocks kept for one more planning so that siblings can fork them

    def arrive(self, request: Request) -> None:
        """It waits from now on; a sample whose prompt a sibling is computing isn't shown yet."""
        family = request._family
        shown = family is None or family.may_wait(request)
        request._status = Status.WAITING
        self.known.add(request)
        if shown:
            self.waiting.add(request)
        else:
            family.held[request] = None

    def extend(self, request: Request, blocks: tuple[int, ...]) -> None:
        """Append blocks that the manager has given to it."""
        request._blocks.extend(blocks)
        request._capacity = len(request._blocks) * self.block_size

    def commit(self, request: Request) -> None:
        """Let others find its full blocks whose tokens are known and planned; of a preempted request, take note of what is known."""
        if not request._blocks:
            request._prefill_end = request.num_tokens
            return
        upto = min(request._computed, request.prompt_tokens + len(request._output_ids))
        if upto >= request._next_commit:
            self.kv.commit(request, upto)
            request._next_commit = (upto // self.block_size + 1) * self.block_size

    def trim(self, request: Request) -> None:
        """Let go of the blocks that no window can see any more, unless a sample of the same prompt will need them."""
        if self.window is None or request._computed < self.window:
            return
        needed, family = request._computed - self.window + 1, request._family
        if family is not None and needed > request.prompt_tokens - self.window:
            if family.has_fresh():
                needed = max(0, request.prompt_tokens - self.window)
            else:
                family.trimmed.add(request)
        self.kv.trim(request, needed)

    def drop_blocks(self, request: Request) -> None:
        """It holds no blocks and no row from now on."""
        if request._family is not None:
            request._family.trimmed.discard(request)
        self.rows.release(request)
        self.kv.free(request)
        request._blocks = []
        request._capacity = 0
        request._computed = 0
        request._next_commit = 0

    def requeue(self, request: Request) -> None:
        """Preempted: back to the waiting, without blocks; its tokens will be prefilled again."""
        self.running.remove(request)
        request._lost = max(request._lost, request._computed)
        self.drop_blocks(request)
        request._status = Status.WAITING
        request._preemptions += 1
        request._prefill_end = request.num_tokens
        self.waiting.add(request)

    def remove(self, request: Request, *, sound: bool = True) -> None:
        """Finished: out of the queues; its blocks go, unless they are `sound` and samples of the same prompt are about to fork them."""
        family = request._family
        if request._status is Status.WAITING:
            if family is not None and request in family.held:
                del family.held[request]
            else:
                self.waiting.remove(request)
        elif request._status is Status.RUNNING:
            self.running.remove(request)
        request._status = Status.FINISHED
        self.known.discard(request)
        if sound and family is not None and self.kv.capabilities.fork and family.wants_blocks_of(request):
            self.rows.release(request)
            self.lingering.append(request)
        else:
            self.drop_blocks(request)
        if family is not None and not family.has_fresh():
            self.drop_lingering([r for r in self.lingering if r._family is family])

    def drop_lingering(self, requests: list[Request]) -> None:
        """Nobody will fork these any more."""
        for request in requests:
            self.lingering.remove(request)
            self.drop_blocks(request)
