"""Pools the states of rows on the device: `Pooler` gathers what each row needs of the steps that
compute its prompt, and applies the layers of a `PoolingPlan` in float32.

    last       the state of the last token, in the last step
    cls, mean, weighted, max
               `_held` [rows, hidden] keeps the first token's state, or the sum of all (each times
               its place if weighted), or their maximum, from one step to the next
    token_…    each step's results go to the host, which puts them together

So a prompt in chunks gives what it gives at once. Steps without rows that pool cost one look at an
empty dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from dovetail.api.executor import (
    Batch,
    NewRow,
    Pooled,
    PoolingCapacity,
    PoolingRows,
    RowPooling,
)
from dovetail.api.model import HeadLayer
from dovetail.errors import DovetailError, ModelLoadError
from dovetail.nn.transfer import HostCopy, to_device
from dovetail.nn.weights import random_numbers, read_rows, tensors_named
from dovetail_executors.runtime.features import (
    FeaturePlan,
    FinalStates,
    Loaded,
    StepFeature,
    Wanted,
)
from dovetail_executors.runtime.pickled import pickled_tensors
from dovetail_executors.runtime.pooling import PoolingPlan, StoredLayer
from dovetail_executors.runtime.row_state import RowState, ranges
from dovetail_executors.runtime.step import Step
from dovetail_executors.runtime.step_inputs import HostInputs

Int64 = NDArray[np.int64]
Vectors = Callable[[torch.Tensor], torch.Tensor]  # [n, size] float32 -> [n, size] float32

ACTIVATIONS: Mapping[str, Vectors] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "identity": lambda x: x,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softmax": partial(torch.softmax, dim=-1),
    "tanh": torch.tanh,
}
OF_ALL_TOKENS = ("mean", "weighted", "max")  # methods
# of generators, if tied the embedding's
_HEADS = (
    "lm_head.weight",
    "model.embed_tokens.weight",
    "embed_tokens.weight",
)


class Part(NamedTuple):
    """Rows [start, end) of a matrix that is being copied to the host."""

    copy: HostCopy
    start: int
    end: int


class PooledResult(NamedTuple):
    """Result of a row; `value` may be read once the device has passed the step."""

    parts: Sequence[Part]
    of_each_token: bool

    def value(self) -> NDArray[np.float32]:
        """Return [tokens, size], or [size] of a whole prompt, in memory of its own."""
        values: NDArray[np.float32] = np.concatenate(
            [part.copy.value[part.start : part.end] for part in self.parts]
        )
        return values if self.of_each_token else values[0]


@dataclass(slots=True)
class _Row:
    """A row that pools."""

    pooling: RowPooling
    # of earlier steps, if the result has a vector for each token
    parts: list[Part] = field(default_factory=list)

    @property
    def of_each_token(self) -> bool:
        return self.pooling.task.startswith("token_")


@dataclass(frozen=True, slots=True)
class _Member:
    """A row that pools, in a step."""

    index: int  # in the batch
    number: int  # of the row
    row: _Row
    first: int  # where its wanted tokens are in the step's
    count: int  # of these; perhaps none
    place: int  # of the first of these in its row, from 0 on
    begins: bool
    due: bool


@dataclass(slots=True)
class PooledStep:
    """The rows of one step that pool."""

    indices: list[int]  # in the batch
    due: frozenset[int]  # those of them whose results are due
    members: list[_Member] = field(default_factory=list)
    results: dict[int, PooledResult] = field(default_factory=dict)  # that are due, by index


class Pooler(StepFeature[PooledStep]):
    """Rows that pool, of one device. Its memory is allocated when first needed."""

    part = PoolingRows
    reads_states = True

    def __init__(
        self,
        plan: PoolingPlan,
        layers: Sequence[Vectors],
        head: Sequence[Vectors],
        rows: RowState,
        *,
        token_layers: Sequence[Vectors] = (),
        reads_types: bool = False,
    ) -> None:
        """`layers`: from pooled states to embeddings; `head`: to scores; `token_layers`: from
        states to vectors of tokens, if by others than `layers`. `reads_types`: the model does."""
        self.plan = plan
        self._layers: Mapping[str, Sequence[Vectors]] = {
            "embed": layers,
            "token_embed": token_layers or layers,
            "classify": head,
            "token_classify": head,
        }
        self._state = rows
        self._reads_types = reads_types
        self.asking = self._rows = dict[int, _Row]()
        self._held: torch.Tensor | None = None

    @property
    def capacity(self) -> Mapping[str, PoolingCapacity]:
        return {"pooling": self.plan.capacity}

    @property
    def details(self) -> Mapping[str, str]:
        return {} if self.plan.capacity.generates else {"pooling": str(self.plan)}

    def biggest(self, batch: Batch) -> Iterator[Batch]:
        """Yield the step in which all rows pool, of a model that generates nothing: a vector for
        each token, if it can."""
        if not self.plan.capacity.generates:
            pooling = RowPooling(self.plan.capacity.tasks[-1])
            added = tuple(replace(new, sampling=None) for new in batch.added)
            index = np.arange(len(batch.rows), dtype=np.int32)
            none = np.zeros(len(added), np.bool_)
            rows = PoolingRows({new.row: pooling for new in added}, index)
            yield replace(batch, added=added, yields_token=none, parts=(rows,))

    def begin(self, step: Step) -> PooledStep | None:
        """Raises `DovetailError` if a row wants what this model can't serve, or the result of a row
        is due that doesn't pool."""
        batch = step.batch
        part = step.batch.part(PoolingRows)
        for row in batch.removed.tolist():
            self._rows.pop(row, None)
        if part is not None:
            for new in batch.added:
                if (pooling := part.added.get(new.row)) is not None:
                    self._check(new, pooling)
                    self._rows[new.row] = _Row(pooling)
        due = frozenset(() if part is None else part.due.tolist())
        if not self._rows and not due:
            return None
        indices = [i for i, number in enumerate(batch.rows.tolist()) if number in self._rows]
        if not due <= set(indices):
            raise DovetailError(
                f"step {batch.step}: the results of places {sorted(due - set(indices))} are due, "
                "whose rows don't pool"
            )
        return PooledStep(indices, due) if indices else None

    def _check(self, new: NewRow, pooling: RowPooling) -> None:
        can = self.plan.capacity
        if pooling.task not in can.tasks:
            raise DovetailError(
                f"request {new.request_id!r} wants {pooling.task}; this model serves "
                f"{', '.join(can.tasks)}"
            )
        if new.computed and can.needs_all_states(pooling.task):
            raise DovetailError(
                f"request {new.request_id!r} needs all states, and begins after {new.computed} "
                "tokens"
            )
        if pooling.seen is not None and not (can.hidden_tails and pooling.seen >= 1):
            raise DovetailError(
                f"request {new.request_id!r} hides all but {pooling.seen} of its tokens "
                "(PoolingCapacity.hidden_tails)"
            )

    def wants(self, step: Step, note: PooledStep, host: HostInputs) -> Wanted:
        """Raises `DovetailError` if a result is due before the row's last token is computed."""
        every = False
        firsts = list[int]()
        for index in note.indices:
            number = int(step.batch.rows[index])
            due = index in note.due
            if due and int(host.kv_lens[index]) != int(self._state.known[number]):
                raise DovetailError(
                    f"step {step.number}: the result of row {number} is due before its last token "
                    "is computed"
                )
            row = self._rows[number]
            begins = int(self._state.computed[number]) == 0
            begin, end = host.query_starts[index : index + 2].tolist()
            if row.of_each_token or self.plan.capacity.method in OF_ALL_TOKENS:
                every = True
            elif self.plan.capacity.method == "last":
                begin = end - 1
                end = end if due else end - 1
            else:
                end = begin + 1 if begins else begin
            last = note.members[-1] if note.members else None
            first = 0 if last is None else last.first + last.count
            place = int(host.kv_lens[index]) - int(host.query_starts[index + 1]) + begin
            note.members.append(_Member(index, number, row, first, end - begin, place, begins, due))
            firsts.append(begin)
        counts = np.array([member.count for member in note.members])
        tokens = ranges(np.array(firsts, np.int64), counts)
        seen = self._seen(note, host)
        types = self._types(step, host) if self._reads_types else None
        if types is None:
            return Wanted(tokens, every, seen=seen)
        return Wanted(tokens, every, {"types": to_device(types, self._state.device)}, seen=seen)

    def _seen(self, note: PooledStep, host: HostInputs) -> NDArray[np.int32] | None:
        """Return the tokens of each row that its tokens see; None if these are all."""
        seen = np.diff(host.query_starts).astype(np.int32)
        hides = False
        for member in note.members:
            if (count := member.row.pooling.seen) is not None and count < seen[member.index]:
                seen[member.index] = count
                hides = True
        return seen if hides else None

    def _types(self, step: Step, host: HostInputs) -> Int64 | None:
        """Return the tokens' types [tokens]: 1 from the second text of a pair on; None if all are
        0."""
        seconds = np.full(len(step.batch.rows), self._state.max_len)
        for index, number in enumerate(step.batch.rows.tolist()):
            row = self._rows.get(number)
            if row is not None and row.pooling.second is not None:
                seconds[index] = row.pooling.second
        if (seconds >= host.kv_lens).all():
            return None
        of_tokens = seconds.repeat(np.diff(host.query_starts))
        return (host.positions >= of_tokens).astype(np.int64)

    def after_model(self, step: Step, note: PooledStep, states: FinalStates) -> None:
        hidden = states.hidden
        places = states.places
        for group in _grouped(member for member in note.members if member.row.of_each_token):
            copy = HostCopy(
                self._finished(group[0].row.pooling, _taken(hidden, _places(group, places)).float())
            )
            end = 0
            for member in group:
                end += member.count
                member.row.parts.append(Part(copy, end - member.count, end))
                if member.due:
                    parts = tuple(member.row.parts)
                    note.results[member.index] = PooledResult(parts, of_each_token=True)
        whole = [
            member
            for member in note.members
            if not member.row.of_each_token and (member.due or self.plan.capacity.method != "last")
        ]
        if whole:
            self._pool_whole(note, whole, self._gathered(whole, hidden, places))

    def _pool_whole(
        self, note: PooledStep, whole: Sequence[_Member], vectors: torch.Tensor
    ) -> None:
        """Finish the vectors [n, hidden] of rows with one result each, where these are due."""
        where = {member.index: place for place, member in enumerate(whole)}
        for group in _grouped(member for member in whole if member.due):
            chosen = np.array([where[member.index] for member in group])
            copy = HostCopy(self._finished(group[0].row.pooling, _taken(vectors, chosen)))
            for place, member in enumerate(group):
                parts = (Part(copy, place, place + 1),)
                note.results[member.index] = PooledResult(parts, of_each_token=False)

    def collect(self, step: Step, note: PooledStep, failed: dict[int, str]) -> Pooled:
        results = {index: result.value() for index, result in note.results.items()}
        for index in [index for index, value in results.items() if not np.isfinite(value).all()]:
            failed[index] = "the model's hidden states hold NaN or infinity"
            del results[index]
        return Pooled(results)

    def _gathered(
        self, members: Sequence[_Member], hidden: torch.Tensor, places: Int64
    ) -> torch.Tensor:
        """Return what is pooled of each member's tokens up to now, [n, hidden] float32: of a mean
        that isn't due, the sum."""
        method = self.plan.capacity.method
        states = _taken(hidden, _places(members, places))
        counts = [member.count for member in members]
        if method == "weighted":
            weights = ranges(np.array([member.place + 1 for member in members]), np.array(counts))
            states = states.float() * to_device(weights, hidden.device)[:, None]
        vectors = _largest(states, counts) if method == "max" else _sums(states, counts)
        if self.plan.capacity.method != "last" and not all(
            member.begins and member.due for member in members
        ):
            if self._held is None:
                self._held = vectors.new_zeros(self._state.max_rows, vectors.shape[1])
            numbers = to_device(np.array([member.number for member in members]), hidden.device)
            begins = to_device(np.array([member.begins for member in members]), hidden.device)
            held = self._held.index_select(0, numbers)
            both = torch.maximum(vectors, held) if method == "max" else vectors + held
            vectors = torch.where(begins[:, None], vectors, both)
            self._held.index_copy_(0, numbers, vectors)
        if method in ("mean", "weighted"):
            lengths = np.array([self._state.known[member.number] for member in members], np.float32)
            shares = lengths * (lengths + 1) / 2 if method == "weighted" else lengths
            shares[[not member.due for member in members]] = 1
            vectors = vectors / to_device(shares, hidden.device)[:, None]
        return vectors

    def _finished(self, pooling: RowPooling, vectors: torch.Tensor) -> torch.Tensor:
        """Return the embeddings or scores [n, size] of vectors [n, hidden] float32."""
        for layer in self._layers[pooling.task]:
            vectors = layer(vectors)
        if not pooling.task.endswith("embed"):
            name = self.plan.pair_activation if pooling.of_pair else self.plan.activation
            return ACTIVATIONS[name](vectors) if pooling.activate else vectors
        vectors = vectors[:, : pooling.dimensions]
        vectors = (
            F.normalize(vectors, dim=-1) if pooling.activate and self.plan.normalize else vectors
        )
        # a stored size cuts after normalization
        return vectors[:, : self.plan.capacity.size_of(pooling.task)]


def _grouped(members: Any) -> list[list[_Member]]:
    """Return the members by what is to be made of their vectors."""
    groups: dict[tuple[Any, ...], list[_Member]] = {}
    for member in members:
        pooling = member.row.pooling
        kind = (pooling.task, pooling.dimensions, pooling.activate, pooling.of_pair)
        groups.setdefault(kind, []).append(member)
    return [*groups.values()]


def _places(members: Sequence[_Member], places: Int64) -> Int64:
    return places[
        ranges(
            np.array([member.first for member in members]),
            np.array([member.count for member in members]),
        )
    ]


def _taken(states: torch.Tensor, places: Int64) -> torch.Tensor:
    """Return states[places]; `places` are distinct, and if they are all, in order."""
    return (
        states
        if len(places) == len(states)
        else states.index_select(0, to_device(places, states.device))
    )


def _sums(states: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return the sums [n, hidden] float32 of n runs of states [sum of counts, hidden]."""
    states = states.float()
    if all(count == 1 for count in counts):
        return states
    if not len(states):  # which `segment_reduce` refuses
        return states.new_zeros(len(counts), states.shape[1])
    if states.device.type == "cpu":
        return torch.stack([run.sum(0) for run in torch.split(states, list(counts))])
    lengths = to_device(np.array(counts, np.int64), states.device)
    return torch.segment_reduce(states, "sum", lengths=lengths, initial=0, unsafe=True)


def _largest(states: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return the largest numbers [n, hidden] float32 of n runs of states [sum of counts, hidden],
    each of at least one."""
    states = states.float()
    if all(count == 1 for count in counts):
        return states
    if states.device.type == "cpu":
        return torch.stack([run.amax(0) for run in torch.split(states, list(counts))])
    lengths = to_device(np.array(counts, np.int64), states.device)
    return torch.segment_reduce(states, "max", lengths=lengths, unsafe=True)


@dataclass(frozen=True)
class PoolerPlan(FeaturePlan):
    """The layers of a model's pooling."""

    pooling: PoolingPlan

    def build(self, loaded: Loaded) -> Pooler:
        """Load the layers. Raises `ModelLoadError` if tensors are missing, or of other shapes than
        the config says."""
        plan = self.pooling
        device = loaded.device
        config = loaded.config
        seed = config.seed if config.load_format == "dummy" else None  # of random weights
        hidden_size = int(loaded.plan.config.hidden_size)
        vocab_size = loaded.plan.vocab_size
        layers = _loaded(plan.layers, hidden_size, device, seed)
        token_layers = _loaded(plan.token_layers, hidden_size, device, seed)
        if plan.score_tokens is None:
            head = _loaded(plan.head, hidden_size, device, seed)
        else:
            head = [_token_scores(plan, vocab_size, hidden_size, device, seed)]
        can = loaded.plan.arch.capabilities
        hides = can.hidden_tails and loaded.backend.capabilities.hidden_tails
        capacity = replace(plan.capacity, hidden_tails=hides and plan.capacity.indivisible)
        plan = replace(plan, capacity=capacity)
        return Pooler(
            plan, layers, head, loaded.rows, token_layers=token_layers, reads_types=can.types
        )


def _loaded(
    stored: Sequence[StoredLayer], size: int, device: torch.device, seed: int | None
) -> list[Vectors]:
    """Load layers that follow each other; `size`: of the first one's input."""
    made = list[Vectors]()
    for layer, folder, out in stored:
        shapes = {f"{layer.name}.weight": (out, size), f"{layer.name}.bias": (out,)}
        if layer.norm:
            shapes |= {f"{layer.norm}.weight": (out,), f"{layer.norm}.bias": (out,)}
        if seed is None and folder.is_file():
            tensors = pickled_tensors(folder, size)
        elif seed is None:
            tensors = dict(tensors_named(folder, shapes.__contains__))
        else:
            tensors = {
                name: random_numbers(shape, name, seed, device) for name, shape in shapes.items()
            }
        if missing := [name for name in shapes if name.endswith(".weight") and name not in tensors]:
            raise ModelLoadError(
                f"{folder}: the checkpoint lacks {' and '.join(missing)}, of its head"
            )
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != shapes.get(name) or not tensor.is_floating_point():
                raise ModelLoadError(
                    f"{folder}: tensor {name}: expected numbers of shape {list(shapes.get(name, ()))}, "
                    f"found {list(tensor.shape)}"
                )
        made.append(
            partial(
                _layer,
                layer,
                {name: tensor.to(device, torch.float32) for name, tensor in tensors.items()},
            )
        )
        size = out
    return made


def _layer(layer: HeadLayer, tensors: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    x = ACTIVATIONS[layer.activation](
        F.linear(x, tensors[f"{layer.name}.weight"], tensors.get(f"{layer.name}.bias"))
    )
    return (
        F.layer_norm(
            x,
            x.shape[-1:],
            tensors[f"{layer.norm}.weight"],
            tensors.get(f"{layer.norm}.bias"),
            layer.norm_eps,
        )
        if layer.norm
        else x
    )


def _token_scores(
    plan: PoolingPlan, vocab_size: int, hidden_size: int, device: torch.device, seed: int | None
) -> Vectors:
    """Return the layer that computes the logit of the first of `plan.score_tokens`, less that of
    the second."""
    ids = [token for token in plan.score_tokens or () if token is not None]
    if wrong := [token for token in ids if not 0 <= token < vocab_size]:
        raise ModelLoadError(f"scores of the tokens {wrong}: the vocabulary has {vocab_size}")
    if seed is None:
        found = read_rows(plan.directory, _HEADS, ids).to(device, torch.float32)
    else:
        found = random_numbers((len(ids), hidden_size), "scores", seed, device)
    weight = found[:1] - found[1:2] if len(ids) == 2 else found
    return lambda x: F.linear(x, weight)
