"""`CHANGES`: the changes between versions of the interfaces, and which older components still run.

The registry accepts or rejects components by this table, `dovetail plugins doctor` prints its
lines, and the page on versions shows it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.api.component import API_VERSIONS, TARGET, Kind


@dataclass(frozen=True, slots=True)
class ApiChange:
    """Step of one kind's interface from a version to the next. A component written for `before`
    runs unless `refused`: unchanged if the interface only grew, otherwise through `bridge`, a
    function that takes its class and returns a subclass for `after`. Raises `ValueError` if refused
    and bridged."""

    kind: Kind
    before: str  # "0.3"
    after: str  # "0.4"
    upgrade: str  # what an author does to move to `after`, in one line
    bridge: str | None = None  # "package.module:function"
    refused: bool = False  # its old meaning can't be kept

    def __post_init__(self) -> None:
        if self.bridge is not None and (self.refused or not TARGET.fullmatch(self.bridge)):
            raise ValueError(
                f"{self.kind} {self.after}: bridge {self.bridge!r} must be a target of a step that "
                f"isn't refused"
            )


CHANGES: tuple[ApiChange, ...] = (
    ApiChange(
        "scheduler",
        "0.3",
        "0.4",
        "use Step.blocks_at where total_blocks * block_size was computed; Step.blocks_of is gone, "
        "as grant(evict=…) asks itself",
        refused=True,
    ),
    ApiChange(
        "kv_cache",
        "0.3",
        "0.4",
        "nothing; declare KVCapabilities.states to serve models with recurrent layers",
    ),
    ApiChange(
        "attention",
        "0.4",
        "0.5",
        "refuse layers whose LayerSpec.causal is False in a reasons_against that doesn't call "
        "super(), or declare bidirectional and serve them",
        bridge="dovetail.registry.bridges:attention_0_4",
    ),
    ApiChange(
        "model", "0.3", "0.4", "nothing; ModelArch.pooling and the capability taps are optional"
    ),
    ApiChange(
        "sampler",
        "0.2",
        "0.3",
        "name the argument of sample and sample_captured lines, and use lines.rows for the rows",
        refused=True,
    ),
    ApiChange(
        "sampler",
        "0.3",
        "0.4",
        "nothing; declare SamplerCapabilities.processors to be used with logits processors",
    ),
    ApiChange(
        "sampler",
        "0.4",
        "0.5",
        "make sample, sample_processed, sample_captured and sample_processed_captured one method: "
        "sample(logits, lines, host_rows=None, *, process=None, capture=None)",
        refused=True,
    ),
    ApiChange(
        "executor",
        "0.6",
        "0.7",
        "in a step with drafts, leave a row's live state as it is after its computed tokens, or "
        "leave Capacity.max_lines at 0 for models with states",
        bridge="dovetail.registry.bridges:executor_0_6",
    ),
    ApiChange("executor", "0.7", "0.8", "nothing; Result.graphs is optional"),
    ApiChange(
        "executor",
        "0.8",
        "0.9",
        "read PoolingRows and AdapterRows from Batch.part(), return Pooled and PromptLogprobs in "
        "Result.parts; NewRow.sampling may be None; "
        "import Worker from dovetail_executors.runtime.worker",
        refused=True,
    ),
    ApiChange(
        "observer",
        "0.1",
        "0.2",
        "nothing; StepFinished has graphs, page_copies, checkpoints and adapter_loads",
    ),
    ApiChange("drafter", "0.1", "0.2", "nothing; ModelDrafter.head is optional"),
)


def changes_since(kind: Kind, api: str) -> tuple[ApiChange, ...] | None:
    """Return the steps from version `api` of a kind to this release's, in order. None if `api` is
    newer, or if the table has no such version."""
    steps: list[ApiChange] = []
    while api != API_VERSIONS[kind]:
        step = next(
            (change for change in CHANGES if (change.kind, change.before) == (kind, api)), None
        )
        if step is None:
            return None
        steps.append(step)
        api = step.after
    return tuple(steps)
