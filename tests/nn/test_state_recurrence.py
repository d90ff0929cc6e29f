"""Recurrent layers compute the recurrence, however tokens come: in chunks, batches, from
checkpoints; and touch no other state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from dovetail.api.state import StateBatch
from dovetail.errors import UnsupportedError
from dovetail.nn.state import DeltaShape, Mamba2Shape, conv, delta, gated_norm, mamba, norm
from dovetail.testing.memory import BoundStates
from tests.kernels import DEVICE, DTYPES, INTERPRETED, ON_GPU, take_kernels
from tests.nn.states import Net, Tokens, net, serve, state_of
from tests.support import examples

some = examples(quick=40 if ON_GPU else 4 if INTERPRETED else 20, full=400 if ON_GPU else 60)
seeds = st.integers(0, 2**31)
kinds = pytest.mark.parametrize("kind", ["delta", "mamba2"])
HOWS = (
    ["float32", "in chunks"]
    if INTERPRETED
    else [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    if ON_GPU
    else ["float32"]
)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@pytest.fixture(params=HOWS)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Dtype of the inputs. The interpreter also runs the kernels for chunks of 16-bit numbers in
    float32, where they must be exact."""
    take_kernels(monkeypatch, conv, delta, mamba, norm)
    if request.param == "in chunks":
        from dovetail.nn.kernels import delta_rule, mamba2

        for module in (delta_rule, mamba2):
            monkeypatch.setattr(module, "fits_matrix_units", lambda x, size: 16 <= size <= 128)
        return torch.float32
    result: torch.dtype = getattr(torch, request.param)
    return result


@pytest.fixture
def tokens(request: pytest.FixtureRequest, dtype: torch.dtype) -> int:
    """Tokens of a sequence: more than a chunk, except where the interpreter computes one token
    after the other."""
    return 10 if INTERPRETED and request.node.callspec.params["dtype"] == "float32" else 70


def assert_near(ours: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert ours.isfinite().all()
    scale = exact.abs().max().clamp(min=1e-3)
    error = ((ours.double() - exact).abs().max() / scale).item()
    assert error <= TOLERANCE[dtype], error


def assert_state(bound: BoundStates, place: int, model: Net, s: Tokens) -> None:
    _, inputs, after = model.exact(s)
    kept, state = state_of(bound, place)
    assert torch.equal(kept.double(), inputs)
    assert_near(state, after, model.weight.dtype)


def in_steps(length: int, sizes: list[int]) -> list[list[tuple[int, int, int]]]:
    """Steps of row 0, of these sizes over and over."""
    steps, done = list[list[tuple[int, int, int]]](), 0
    while done < length:
        steps.append([(0, min(sizes[len(steps) % len(sizes)], length - done), 0)])
        done += steps[-1][0][1]
    return steps


@kinds
@pytest.mark.parametrize("sizes", [[1], [33, 1], [64], [1000]])
def test_any_chunks_give_the_recurrence(
    kind: str, sizes: list[int], dtype: torch.dtype, tokens: int
) -> None:
    torch.manual_seed(0)
    model = net(kind, dtype)
    s, bound = model.sequence(min(tokens, 12) if sizes == [1] else tokens), model.bound(1)
    [outputs] = serve(model, bound, [s], in_steps(len(s), sizes))
    assert_near(outputs, model.exact(s)[0], dtype)
    assert_state(bound, 0, model, s)


@kinds
@pytest.mark.skipif(
    not INTERPRETED, reason="a GPU computes all with each dtype, and a CPU these as it does float32"
)
def test_float16_is_near(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_kernels(monkeypatch, conv, delta, mamba, norm)
    torch.manual_seed(0)
    model = net(kind, torch.float16)
    s, bound = model.sequence(70), model.bound(1)
    [outputs] = serve(model, bound, [s], in_steps(70, [69, 1]))
    assert_near(outputs, model.exact(s)[0], torch.float16)
    assert_state(bound, 0, model, s)


@kinds
@given(data=st.data(), seed=seeds)
@some
def test_rows_compute_what_each_computes_alone(
    kind: str, dtype: torch.dtype, tokens: int, data: st.DataObject, seed: int
) -> None:
    """Whatever their order, their chunks, the rows of a unit, and where checkpoints are; and those
    hold the state at their place."""
    torch.manual_seed(seed)
    model = net(kind, dtype)
    lengths = data.draw(
        st.lists(st.integers(1, tokens + tokens // 4), min_size=1, max_size=3), "lengths"
    )
    sequences, bound = (
        [model.sequence(n) for n in lengths],
        model.bound(len(lengths), data.draw(st.sampled_from([64, 128, 256, 4096]), "slot bytes")),
    )
    done, steps = [0] * len(lengths), list[list[tuple[int, int, int]]]()
    while len(steps) < 3 and (rows := [row for row, n in enumerate(lengths) if done[row] < n]):
        step = []
        for row in data.draw(st.permutations(rows), "order"):
            most = lengths[row] - done[row]
            length = data.draw(st.sampled_from([1, most, (most + 1) // 2]), "tokens")
            step.append(
                (
                    row,
                    length,
                    data.draw(st.sampled_from([0, 1, length, min(length, 65)]), "checkpoint"),
                )
            )
        steps.append(step)
        for row, length, _ in step:
            done[row] += length
    outputs = serve(model, bound, sequences, steps)
    for row, s in enumerate(sequences):
        assert_near(outputs[row], model.exact(s.part(0, done[row]))[0], dtype)
        assert_state(bound, row, model, s.part(0, done[row]))
    for index, (row, length, at) in enumerate(steps[-1]):
        if at:
            assert_state(
                bound,
                bound.checkpoint_place(index),
                model,
                sequences[row].part(0, done[row] - length + at),
            )


@kinds
def test_a_restored_checkpoint_goes_on_as_its_row_did(
    kind: str, dtype: torch.dtype, tokens: int
) -> None:
    torch.manual_seed(1)
    model = net(kind, dtype)
    s, bound, at = model.sequence(tokens + 8), model.bound(2), tokens - 4
    serve(model, bound, [s], [[(0, tokens, at)]])
    state, checkpoint, row = (
        bound.layers[5],
        torch.tensor([bound.checkpoint_place(0)], device=DEVICE),
        torch.tensor([1], device=DEVICE),
    )
    for tensor in (0, 1):
        state.write(tensor, row, state.read(tensor, checkpoint))
    bound.plan([1], [12], [at])
    assert_near(model.compute(bound, s.part(at, at + 12)), model.exact(s)[0][at:], dtype)
    assert_state(bound, 1, model, s)


@kinds
def test_a_new_sequence_starts_from_zero_where_another_was(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    model, bound = net(kind, dtype), None
    bound = model.bound(1)
    for length in (5, 1, 3):
        s = model.sequence(length)
        assert_near(serve(model, bound, [s], [[(0, length, 0)]])[0], model.exact(s)[0], dtype)


def padded(batch: StateBatch, bound: BoundStates, rows: int) -> StateBatch:
    """With as many rows of padding, and two chunks."""

    def more(x: torch.Tensor | None, value: int, count: int = rows) -> torch.Tensor | None:
        return None if x is None else torch.cat([x, x.new_full((count, *x.shape[1:]), value)])

    starts = batch.query_starts.tolist()
    ends = [starts[-1] + i + 1 for i in range(rows)] if batch.decodes else [starts[-1]] * rows
    return replace(
        batch,
        places=more(batch.places, bound.waste_place),
        query_starts=torch.cat([batch.query_starts, batch.query_starts.new_tensor(ends)]),
        kv_lens=more(batch.kv_lens, 0),
        checkpoint_at=more(batch.checkpoint_at, 0),
        checkpoint_places=more(batch.checkpoint_places, bound.waste_place),
        chunks=more(batch.chunks, 0, 2),
        chunk_starts=more(batch.chunk_starts, 0 if batch.chunks is None else len(batch.chunks)),
    )


@kinds
@pytest.mark.parametrize("length", [1, 3])
def test_a_step_changes_the_states_of_its_rows_only(
    kind: str, length: int, dtype: torch.dtype
) -> None:
    """States of other rows hold NaN throughout, and padding changes only the waste page."""
    torch.manual_seed(3)
    model, others = net(kind, dtype), (0, 2)
    bound, s = model.bound(3), model.sequence(length + 2)
    batch = bound.plan([1], [length], [0], [min(2, length - 1)])
    bound.states.steps.plan(padded(batch, bound, 2))
    written = [1, *([bound.checkpoint_place(0)] if length > 1 else [])]
    pages = {
        int(page)
        for units in bound.layers[5].units
        for page in units[written].flatten() % bound.pool.shape[1]
    }
    outputs = model.compute(bound, s)
    exact = model.exact(s.part(0, length))[0]
    assert_near(outputs[:length], exact, dtype)
    assert outputs.isfinite().all()
    untouched = [page for page in range(bound.pool.shape[1] - 1) if page not in pages]
    assert (bound.pool[:, untouched] == 255).all()
    assert all(state.isnan().all() for row in others for state in state_of(bound, row))


@kinds
@pytest.mark.parametrize(
    ("decay", "shift", "size"),
    [(8.0, 30.0, 1.0), (-20.0, -20.0, 1.0), (0.0, 0.0, 0.0), (-4.0, 0.0, 6.0)],
    ids=["forgets at once", "never forgets", "zeros", "large"],
)
def test_extreme_gates_and_inputs_compute_the_recurrence(
    kind: str, decay: float, shift: float, size: float, dtype: torch.dtype, tokens: int
) -> None:
    torch.manual_seed(4)
    model = net(kind, dtype)
    model = replace(
        model,
        A_log=torch.full_like(model.A_log, decay),
        dt_bias=torch.full_like(model.dt_bias, shift),
        bias=model.bias * min(size, 1),
    )
    s = model.sequence(tokens)
    s = Tokens(s.x * size, s.a * size, s.b * size)
    [outputs] = serve(model, model.bound(1), [s], [[(0, tokens, 0)]])
    assert_near(outputs, model.exact(s)[0], dtype)


def test_equal_keys_that_are_replaced_each_time_stay_exact(dtype: torch.dtype, tokens: int) -> None:
    """Then powers of a chunk's system grow to 10^18, while its inverse stays near 1."""
    torch.manual_seed(5)
    model = net("delta", dtype)
    model = replace(model, A_log=torch.full_like(model.A_log, -30.0))
    s = model.sequence(min(tokens, 64))
    s = Tokens(s.x[:1].expand_as(s.x).contiguous(), s.a, torch.full_like(s.b, 20.0))
    [outputs] = serve(model, model.bound(1), [s], [[(0, len(s), 0)]])
    assert_near(outputs, model.exact(s)[0], dtype)


@kinds
@pytest.mark.skipif(INTERPRETED, reason="takes minutes there")
def test_a_long_sequence_stays_exact(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    model = net(kind, dtype)
    s = model.sequence(2000)
    [outputs] = serve(model, model.bound(1), [s], [[(0, 1999, 0)], [(0, 1, 0)]])
    assert_near(outputs, model.exact(s)[0], dtype)


@kinds
@pytest.mark.parametrize(
    "sizes",
    [
        {"k_heads": 2, "v_heads": 4, "v_size": 24},
        {"k_size": 64, "v_size": 64},
        {"k_size": 128, "v_size": 80},
        {"k_size": 256},
    ],
)
def test_other_sizes_compute_the_recurrence(
    kind: str, sizes: dict[str, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(7)
    names = {"k_heads": "groups", "v_heads": "heads", "k_size": "state_size", "v_size": "head_size"}
    model = net(
        kind,
        dtype,
        **(sizes if kind == "delta" else {names[name]: size for name, size in sizes.items()}),
    )
    s, bound = model.sequence(6), model.bound(1, 4096)
    [outputs] = serve(model, bound, [s], [[(0, 5, 2)], [(0, 1, 0)]])
    assert_near(outputs, model.exact(s)[0], dtype)
    assert_state(bound, 0, model, s)


@kinds
def test_states_of_bfloat16_lose_a_percent(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding at the end of each step: here after each token, at worst."""
    take_kernels(monkeypatch, conv, delta, mamba, norm)
    torch.manual_seed(8)
    model = net(kind)
    s = model.sequence(12 if INTERPRETED else 40)
    [outputs] = serve(model, model.bound(1, state_dtype=torch.bfloat16), [s], in_steps(len(s), [1]))
    exact = model.exact(s)[0]
    error = ((outputs.double() - exact).norm() / exact.norm()).item()
    assert 1e-5 < error < 2e-2, error


def test_inputs_may_be_slices_of_a_wider_tensor(dtype: torch.dtype) -> None:
    torch.manual_seed(9)
    model = net("delta", dtype)
    s = model.sequence(6)
    assert s.x.stride(0) > s.x.shape[1]
    for steps in (in_steps(6, [6]), in_steps(6, [1])):
        bound, done, parts = model.bound(1), 0, []
        for [(row, length, _)] in steps:
            bound.plan([row], [length], [done])
            parts.append(model.compute(bound, s.part(done, done + length)))
            done += length
        assert_near(torch.cat(parts), model.exact(s)[0], dtype)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_gated_norm_norms_groups(shared: bool, first: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(10)
    x, z = torch.randn(5, 96).to(DEVICE, dtype), torch.randn(5, 200).to(DEVICE, dtype)[:, 4:100]
    weight = torch.randn(24 if shared else 96).to(DEVICE, dtype)
    gate = torch.nn.functional.silu(z.double())
    exact = x.double() if first else x.double() * gate
    exact = (
        exact.view(5, 4, 24)
        / (exact.view(5, 4, 24).square().mean(-1, keepdim=True) + 1e-6).sqrt()
        * weight.double().view(-1, 24)
    )
    exact = exact.view(5, 96) * (gate if first else 1)
    assert_near(gated_norm(x, z, weight, 1e-6, 24, norm_before_gate=first), exact, dtype)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: DeltaShape(2, 4, 96, 64, 4), "key head size of 96 .* power of two"),
        (lambda: DeltaShape(2, 4, 512, 64, 4), "key head size of 512 .* at most 256"),
        (lambda: DeltaShape(2, 3, 64, 64, 4), "3 value heads can't be shared by 2 key heads"),
        (lambda: DeltaShape(2, 4, 64, 300, 4), "value head size of 300"),
        (lambda: Mamba2Shape(4, 64, 100, 1, 4), "state size of 100 .* power of two"),
        (lambda: Mamba2Shape(4, 64, 128, 3, 4), "4 heads can't be shared by 3 groups"),
        (lambda: Mamba2Shape(4, 64, 128, 1, 1), "convolution over 1 tokens"),
    ],
)
def test_sizes_that_are_not_implemented_are_refused(make: object, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        make()  # type: ignore[operator]


def test_a_steps_arrays_of_the_host_suffice_to_find_its_pieces() -> None:
    """`bind_states` makes what an executor makes: chunks that begin anew at rows and
    checkpoints."""
    bound = net("delta").bound(2)
    batch = bound.plan([1, 0], [70, 3], [0, 9], [65, 0])
    assert batch.chunks is not None
    assert batch.chunk_starts is not None
    assert batch.chunks.tolist() == [[0, 64], [64, 65], [65, 70], [70, 73]]
    assert batch.chunk_starts.tolist() == [0, 3, 4]
    assert np.array_equal(batch.kv_lens.cpu(), [70, 12])
