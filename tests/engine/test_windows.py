"""Windows of deterministic requests: clients get the canonical tokens, whatever is decoded
provisionally, and nothing of what is provisional can be reused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dovetail.api.executor import Batch
from dovetail.api.scheduler import Step
from dovetail.engine.live_request import LiveRequest
from tests.engine.policies import RoundRobin, fcfs, scripted
from tests.engine.world import RecordingExecutor, Shape, Spec, World

SIZE = 8
WINDOWS = Shape(deterministic_window=SIZE, num_pages=200)
RIGHT = replace(WINDOWS, wrong_provisional=False, max_model_len=200)
PROMPT = tuple(range(1, SIZE + 1))  # the first window begins after it


def marked(id: str, prompt: tuple[int, ...] = PROMPT, **fields: object) -> Spec:
    return Spec(id, prompt, deterministic=True, **fields)  # type: ignore[arg-type]


def drafts_of(world: World) -> list[int]:
    """Return the number of drafts of each batch."""
    return [
        0 if batch.drafts is None else int(batch.drafts.counts.sum())
        for batch in world.executor.sent
    ]


def bursts(world: World, id: str = "one") -> list[int]:
    """Step until all requests have ended; return how many tokens of one each delivery has."""
    counts = []
    while world.core.has_unfinished():
        counts.append(sum(request.id == id for request in world.step().requests))
        world.check()
    world.check_end()
    return [count for count in counts if count]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_window_is_checked_by_one_step_and_delivered_at_once(overlap: bool) -> None:
    world = World(shape=replace(WINDOWS, overlap=overlap))
    world.add(marked("one", max_tokens=1 + 3 * SIZE))
    assert bursts(world) == [1, SIZE, SIZE, SIZE]
    assert [count for count in drafts_of(world) if count] == [SIZE - 1] * 3
    assert len(world.executor.sent) == 1 + 3 * SIZE


@pytest.mark.parametrize("prompt", [SIZE - 2, SIZE - 1, SIZE + 1])
def test_windows_end_at_multiples_of_their_size(prompt: int) -> None:
    world = World(shape=WINDOWS)
    world.add(marked("one", tuple(range(1, prompt + 1)), max_tokens=30))
    counts = bursts(world)
    ends = np.cumsum(counts) + prompt - 1  # of what is computed canonically
    assert (ends[1:-1] % SIZE == 0).all()
    assert max(counts) == SIZE


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("window", [None, 6])
def test_provisional_tokens_that_differ_are_decoded_again(
    overlap: bool, window: int | None
) -> None:
    world = World(shape=replace(WINDOWS, overlap=overlap, window=window, max_in_flight=3))
    world.add(marked("a", max_tokens=50))
    world.add(marked("three", (3, 1), max_tokens=33, n=3))
    world.add(Spec("b", PROMPT, max_tokens=50))
    world.add(marked("late", PROMPT, max_tokens=20, delay=0.1))
    world.drain(check=True)  # compares all tokens with the oracle
    stats = world.core.update_stats()
    assert sum(stats.accepted_drafts) < stats.draft_tokens, "the fake sampled wrong tokens"
    assert sum(stats.accepted_drafts) > stats.draft_tokens / 3


def check_steps(world: World) -> list[int]:
    """Return the numbers of the batches that check drafts."""
    return [number for number, count in enumerate(drafts_of(world)) if count]


def test_what_ends_beyond_its_window_is_checked_with_the_others() -> None:
    world = World(
        shape=replace(RIGHT, token_budget=512, max_lines=500, max_num_seqs=16, num_pages=900)
    )
    for number in range(16):  # which end at different times
        prompt = tuple(range(1, 8 + number))
        world.add(marked(str(number), prompt, max_tokens=33 + 35 * number % 97))
    world.drain(check=True)
    assert set(np.diff(check_steps(world))) == {SIZE}


@pytest.mark.parametrize("overlap", [True, False])
def test_the_windows_of_all_are_checked_in_few_steps(overlap: bool) -> None:
    world = World(shape=replace(RIGHT, overlap=overlap, token_budget=512, max_num_seqs=16))
    names = [str(length) for length in range(1, SIZE + 1)]  # each phase of a window
    for name in names:
        world.add(marked(name, tuple(range(1, int(name) + 1)), max_tokens=1 + 6 * SIZE))
    world.drain(check=True)
    assert len(check_steps(world)) <= 10, "one in `SIZE` steps, and a few as all end"
    assert len(world.executor.sent) <= 1 + 6 * SIZE + 2 * SIZE


def test_a_request_does_not_wait_for_the_windows_of_others() -> None:
    """A request whose window is ready continues to decode. The check keeps the tokens that it
    generated meanwhile."""
    counts = []
    for phases in ([0], [0, 3, 6]):
        world = World(shape=RIGHT)
        for phase in phases:
            world.add(marked(f"{phase}", PROMPT + PROMPT[:phase], max_tokens=5 * SIZE))
        while "0" not in world.finished:
            world.step()
        counts.append(len(world.executor.sent))
    alone, together = counts
    assert alone == 5 * SIZE
    assert together <= alone + 2 * SIZE, "only the end awaits the others' windows"


def test_arrivals_do_not_put_a_check_off() -> None:
    """There is always a window that isn't ready."""
    world = World(shape=replace(RIGHT, num_pages=2000))
    [first] = world.add(marked("first", max_tokens=20 * SIZE))
    known = 0
    steps = 0
    for number in range(20 * SIZE):
        if number % 2 == 0:
            world.add(marked(f"{number}", (number % 90 + 1, 2), max_tokens=SIZE))
        world.step()
        steps = 0 if first.generated > known else steps + 1
        known = first.generated
        assert steps <= 3 * SIZE
    world.drain(check=True)


@pytest.mark.parametrize("place", range(2, 3 * SIZE))
@pytest.mark.parametrize("ends_by", ["stop", "length"])
def test_an_ended_request_waits_for_one_window_at_most(place: int, ends_by: str) -> None:
    world = World(shape=RIGHT)
    world.add(marked("long", (5, 6, 7), max_tokens=8 * SIZE))
    allowed = place + 1 if ends_by == "length" else 60
    [one] = world.add(marked("one", max_tokens=allowed))
    if ends_by == "stop":
        one.stop_ids = frozenset([world.expected("one")[0][place]])
    while "one" not in world.finished:
        world.step()
        world.check()
    assert world.finished["one"].reason == ends_by
    assert len(world.executor.sent) <= one.generated + SIZE + 3
    world.drain(check=True)


def provisional_tokens(world: World) -> int:
    """Return the number of tokens that rows without the mark have computed."""
    count = 0
    marks: dict[int, bool] = {}
    for batch in world.executor.sent:
        for new in batch.added:
            marks[new.row] = new.sampling is not None and new.sampling.deterministic
        count += sum(not marks[row] for row in batch.rows.tolist())
    return count


@pytest.mark.parametrize("budget", [1, SIZE, 5 * SIZE])
@pytest.mark.parametrize("ends_by", ["stop", "length"])
def test_nothing_is_decoded_after_the_end_however_late_it_is_checked(
    budget: int, ends_by: str
) -> None:
    """Steps of few tokens check few windows, and requests reach their ends before."""
    length = len(PROMPT) + 5 * SIZE
    world = World(shape=replace(RIGHT, token_budget=budget, max_model_len=length))
    requests = []
    for number in range(5):
        [request] = world.add(marked(str(number), PROMPT[number:], max_tokens=5 * SIZE))
        if ends_by == "stop":
            request.stop_ids = frozenset([world.expected(request.id)[0][4 * SIZE]])
        requests.append(request)
    world.drain(check=True)
    # The first token is canonical, and so is the last one, unless it may follow a stop token: then
    # a step more may be in flight
    least = sum(request.generated - 2 for request in requests)
    assert provisional_tokens(world) <= least + 2 * len(requests) * (ends_by == "stop")


@pytest.mark.parametrize("steps", range(3, 2 * SIZE))
def test_a_request_can_be_aborted_while_its_end_is_uncertain(steps: int) -> None:
    world = World(shape=RIGHT)
    world.add(marked("long", (5, 6, 7), max_tokens=8 * SIZE))
    world.add(marked("one", max_tokens=4))
    for _ in range(steps):
        world.step()
    if "one" not in world.finished:
        world.abort("one")
    world.drain(check=True)


def test_others_need_not_wait_for_the_memory_of_an_ended_request() -> None:
    waited = []
    for deterministic in (False, True):
        world = World(shape=replace(WINDOWS, num_pages=14, block_size=2))
        world.add(Spec("ends", PROMPT, max_tokens=4, deterministic=deterministic))
        world.add(marked("stays", (3, 4), max_tokens=2 * SIZE))
        [late] = world.add(Spec("late", (9,) * 12, max_tokens=2, delay=1e-6))
        while "late" not in world.finished:
            world.step()
        waited.append(len(world.executor.sent))
    assert late.first_scheduled_time is not None
    assert waited[1] <= waited[0] + 2


@pytest.mark.parametrize("place", range(1, SIZE + 2))
def test_a_stop_token_ends_a_window_early(place: int) -> None:
    world = World(shape=WINDOWS)
    [request] = world.add(marked("one", max_tokens=60))
    request.stop_ids = frozenset([world.expected("one")[0][place]])
    world.drain(check=True)
    assert world.finished["one"].reason == "stop"
    # one step more may be in flight when the stop token comes, and the check follows
    assert len(world.executor.sent) <= len(world.tokens["one"]) + 2


@pytest.mark.parametrize("tokens", range(1, SIZE + 3))
def test_the_last_allowed_token_ends_a_window(tokens: int) -> None:
    world = World(shape=WINDOWS)
    world.add(marked("one", max_tokens=tokens))
    assert sum(bursts(world)) == tokens
    assert len(world.executor.sent) == tokens, "each step computes a token that is needed"


@pytest.mark.parametrize("steps", range(1, 2 * SIZE + 2))
def test_an_aborted_window_leaves_nothing_to_reuse(steps: int) -> None:
    world = World(shape=WINDOWS)
    [aborted] = world.add(marked("aborted", max_tokens=60))
    world.add(marked("beside", (9, 9, 9), max_tokens=60))
    for _ in range(steps):
        world.step()
    [tokens] = [world.expected("aborted")[0]]
    world.abort("aborted")
    world.check()
    # The fake fails if this one reads K and V of a provisional step.
    [again] = world.add(marked("again", (*PROMPT, *tokens[: 2 * SIZE]), max_tokens=5))
    world.drain(check=True)
    assert again.cached_tokens <= len(PROMPT) + aborted.generated


def test_a_preempted_window_is_checked_when_it_is_back() -> None:
    def preempt(step: Step) -> None:
        step.preempt(step.running[0])

    steps = 1 + SIZE // 2
    world = World(scripted(*[fcfs] * steps, preempt), replace(WINDOWS, overlap=False))
    world.add(marked("one", max_tokens=1 + 2 * SIZE))
    world.drain(check=True)
    first = next(count for count in drafts_of(world) if count)
    # the prefill has sampled the first of them again
    assert first == steps - 2
    assert len(world.executor.sent) <= 1 + 2 * SIZE + 2


def test_a_request_that_is_preempted_after_a_check_finds_what_that_has_computed() -> None:
    def preempt(step: Step) -> None:
        step.preempt(step.running[0])

    steps = 1 + SIZE  # the last one is the check
    world = World(scripted(*[fcfs] * steps, preempt), replace(RIGHT, overlap=False))
    [request] = world.add(marked("one", max_tokens=1 + 2 * SIZE))
    world.drain(check=True)
    assert request.preemptions == 1
    assert world.core.update_stats().cached_tokens == len(PROMPT) + SIZE


class Breaks(RecordingExecutor):
    """Writes NaN in the steps of a request that compute its token of number `at`."""

    request: LiveRequest
    at: int

    def submit(self, batch: Batch) -> int:
        drafts = 0 if batch.drafts is None else int(batch.drafts.counts.sum())
        self.writes_nan = self.request.num_computed + drafts > self.at
        return super().submit(batch)


@pytest.mark.parametrize("at", range(len(PROMPT), len(PROMPT) + 2 * SIZE + 1))
@pytest.mark.parametrize("window", [None, 6])
def test_a_request_that_breaks_gets_the_tokens_before(at: int, window: int | None) -> None:
    shape = replace(RIGHT, window=window, changes_rows=at % 2 == 0)
    world = World(shape=shape, executor=Breaks)
    [world.executor.request] = world.add(marked("one", max_tokens=at))
    world.executor.at = at
    while world.core.has_unfinished():
        world.step()
        world.kv.check_integrity()
    assert world.finished["one"].reason == "error"
    assert world.tokens["one"] == world.expected("one")[0][: at - len(PROMPT) + 1]
    assert not world.kv.counts.held


class FailsACheck(RecordingExecutor):
    """Writes NaN in the first step that checks drafts, once."""

    checked = False

    def submit(self, batch: Batch) -> int:
        self.writes_nan = batch.drafts is not None and not self.checked
        self.checked |= self.writes_nan
        return super().submit(batch)


def test_a_check_that_failed_is_made_again_token_by_token() -> None:
    world = World(shape=RIGHT, executor=FailsACheck)
    world.add(marked("one", max_tokens=4 * SIZE))
    world.add(marked("two", (3, 4), max_tokens=4 * SIZE))
    world.drain(check=True)
    assert sum(finish.reason == "length" for finish in world.finished.values()) == 2


def test_a_request_that_loses_its_row_keeps_its_window() -> None:
    world = World(RoundRobin, replace(WINDOWS, max_num_seqs=2, token_budget=32))
    for name in "abcde":
        world.add(marked(name, (*PROMPT, ord(name) % 97), max_tokens=20))
    world.drain(check=True)
    assert max(drafts_of(world)) > 1


def test_a_request_that_fits_alone_ends() -> None:
    """A window holds back blocks that have left a sliding window; it closes if they are needed."""
    shape = replace(WINDOWS, window=3, block_size=2, num_pages=4, token_budget=2, max_model_len=40)
    for deterministic in (False, True):
        world = World(shape=replace(shape, strict=True))
        world.add(Spec("one", (1, 2), max_tokens=30, deterministic=deterministic))
        world.drain(check=True)
        assert len(world.tokens["one"]) == 30


def test_checks_get_their_share_of_a_step_full_of_prompts() -> None:
    world = World(shape=replace(WINDOWS, token_budget=2 * SIZE, max_model_len=128))
    world.add(marked("one", (1,), max_tokens=3 * SIZE))
    for number in range(6):
        world.add(Spec(f"long{number}", (number + 2,) * 100, max_tokens=2))
    assert max(bursts(world)) > SIZE // 2


def test_a_drafter_proposes_nothing_for_a_window() -> None:
    shape = replace(WINDOWS, drafter="oracle", seconds_per_token=0.0, max_lines=64)
    world = World(shape=shape)
    world.add(marked("marked", max_tokens=40))
    world.add(Spec("plain", (4, 5), max_tokens=40))
    world.drain(check=True)
    rows = {new.request_id: new.row for batch in world.executor.sent for new in batch.added}
    for batch in world.executor.sent:
        if batch.drafts is not None:
            places = np.flatnonzero(batch.rows == rows["marked"])
            assert (batch.drafts.counts[places] <= SIZE - 1).all()
    assert max(drafts_of(world)) > 0


def test_steps_overlap_inside_a_window() -> None:
    world = World(shape=WINDOWS)
    world.add(marked("one", max_tokens=1 + 4 * SIZE))
    overlapped = 0
    while world.core.has_unfinished():
        world.step()
        overlapped += world.core.is_computing
    assert overlapped >= 4 * (SIZE - 2)


@pytest.mark.parametrize("changes_rows", [True, False])
def test_rows_change_their_mark_in_place_if_the_executor_can(changes_rows: bool) -> None:
    world = World(shape=replace(RIGHT, changes_rows=changes_rows))
    world.add(marked("one", max_tokens=1 + 3 * SIZE))
    world.drain(check=True)
    sent = world.executor.sent
    added = sum(len(batch.added) for batch in sent)
    changed = sum(batch.changes is not None for batch in sent)
    # three windows open, and close
    assert (added, changed) == ((1, 6) if changes_rows else (7, 0))


def test_a_row_that_is_lost_before_its_change_is_added_anew() -> None:
    """Others take memory and rows from requests whose windows open and close."""
    world = World(shape=replace(WINDOWS, num_pages=24, max_num_seqs=4))
    for number in range(8):
        world.add(marked(f"m{number}", (number, 1, 2), max_tokens=40))
        world.add(Spec(f"p{number}", (number, 3), max_tokens=30, delay=0.05 * number))
    world.drain(check=True)
    assert any(batch.changes is not None for batch in world.executor.sent)
    assert world.core.update_stats().preemptions > 0


def test_an_executor_without_windows_computes_each_token_canonically() -> None:
    world = World(shape=replace(WINDOWS, deterministic_window=0))
    world.add(marked("one", max_tokens=30))
    assert bursts(world) == [1] * 30
    assert [len(batch.added) for batch in world.executor.sent] == [1] + [0] * 29


def test_a_request_with_a_grammar_decodes_without_windows() -> None:
    world = World(shape=WINDOWS)
    world.add(marked("ruled", max_tokens=30, rule=5))
    world.add(marked("other", max_tokens=30))
    world.drain(check=True)
    marks = {
        new.sampling.deterministic
        for batch in world.executor.sent
        for new in batch.added
        if new.request_id == "ruled" and new.sampling is not None
    }
    assert marks == {True}
