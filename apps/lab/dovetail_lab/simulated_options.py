"""Options of the executor `simulated`, and the step times and host that they describe."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from dovetail_lab.host_times import HOSTS, HostTimes, host_times
from dovetail_lab.step_profile import StepTimeProfile
from dovetail_lab.step_time import Seconds, ascending

# options that replace a profile's times of features
FEATURES = (
    "image_s",
    "image_row_s",
    "adapter_load_s",
    "adapter_step_s",
    "adapter_token_s",
    "pooled_s",
)


class SimulatedOptions(BaseModel):
    """Options of the executor `simulated`: the device to simulate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step_time: str | dict[str, Any] = Field(
        "a10g-llama-2-7b",
        description="A profile's .json file, the name of a shipped one, or an inline model: {kind: "
        "linear, base_s: 0.01, …}.",
    )
    engine: str | HostTimes | None = Field(
        None,
        description=f"The engine whose host times are added: {', '.join(HOSTS)}, or the times "
        "themselves. Those of its core only if the step times don't state them. Unset: none.",
    )
    step_time_factor: float = Field(
        1.0,
        gt=0,
        le=1e3,
        description="Multiplies the device time of every step, to test the effect of errors.",
    )
    num_pages: int | None = Field(
        None,
        ge=1,
        description="Pages in the KV pool. Unset: as in the measured engine; for a "
        "roofline, as many as fit on the device.",
    )
    model: str | dict[str, Any] | None = Field(
        None,
        description="A config.json, its folder, or its content: which layers have sliding windows, "
        "and release blocks. "
        "Unset: the roofline's model, or as in the measured engine.",
    )
    max_in_flight: int | None = Field(
        None,
        ge=1,
        le=8,
        description="Steps submitted before the oldest is collected; 1 if overlap is off. Unset: "
        "as measured, or 2.",
    )
    plans_late: bool | None = Field(
        None,
        description="False: plan each step as soon as another may be in flight, as other engines "
        "do. Unset: as `engine` does, or True.",
    )
    core_s: float | None = Field(
        None,
        ge=0,
        description="The core's time per step, hidden if it overlaps. Unset: the profile's.",
    )
    core_per_row_s: float | None = Field(
        None,
        ge=0,
        description="Additional core time per request in the step. Unset: the profile's.",
    )
    vocab_size: int = Field(32_000, ge=2, description="Size of the vocabulary.")
    compile_s: Seconds = Field(2.5e-3, description="Median time to compile a grammar.")
    compile_sigma: float = Field(
        0.157,
        ge=0,
        le=10,
        description="Variation of compile_s: exp(compile_sigma z), z standard normal.",
    )
    mask_row_s: Seconds = Field(
        1e-4,
        description="Time of a CPU core to fill a row's mask, with all cores busy.",
    )
    mask_cores: int = Field(16, ge=1, description="CPU cores that fill masks.")
    image_s: Seconds | None = Field(
        None,
        description="Time of a step for each image that it encodes. Unset: the profile's.",
    )
    image_row_s: Seconds | None = Field(
        None,
        description="Additional time for each row of these images. Unset: the profile's.",
    )
    adapter_read_s: Seconds = Field(
        0.1,
        description="Time to read an adapter to the host, when a request first names it.",
    )
    adapter_load_s: Seconds | None = Field(
        None,
        description="Time of a step for each adapter that it loads to a slot. Unset: the "
        "profile's.",
    )
    adapter_step_s: Seconds | None = Field(
        None,
        description="Additional time of a step in which a request has an adapter. Unset: the "
        "profile's.",
    )
    adapter_token_s: Seconds | None = Field(
        None,
        description="Additional time for each token of such requests. Unset: the profile's.",
    )
    pooled_s: Seconds | None = Field(
        None,
        description="Time of a step for each prompt that it pools, besides computing it. Unset: "
        "the profile's.",
    )
    accept_s: Seconds = Field(2.2e-6, description="Time to pass a token to a row's grammar.")
    acceptance: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(
        (0.8,),
        min_length=1,
        description="Probability that a draft of the drafter `simulated` is accepted if those "
        "before it are: a number, or a list by place in the "
        "step, the last of which holds for all further places. A request of the trace with "
        "`acceptance` has its own.",
    )
    line_costs: Annotated[tuple[tuple[int, Seconds], ...], AfterValidator(ascending)] = Field(
        (),
        description="(lines, seconds) by which the engine chooses how many drafts to check, "
        "however long such steps take. If all seconds are "
        "equal, it checks as many as it may. Unset: as the step times have them.",
    )
    draft_s: Seconds | None = Field(
        None,
        description="Device time of the drafter `simulated` for each draft of the row with most. "
        "Unset: the profile's.",
    )
    max_lines: int | None = Field(
        None,
        ge=1,
        description="Tokens that a step with drafts can sample. Unset: as executor `local`.",
    )
    transfer_gbps: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="10^9 bytes per second that are saved to host memory, and as many that are "
        "restored. Nothing is copied: every restore is right. Unset: no transfers.",
    )
    page_bytes: int | None = Field(
        None,
        ge=8,
        multiple_of=8,
        description="Bytes that a transfer copies for each page. Unset: as in the model's layout.",
    )
    late_sampling_s: Seconds = Field(
        3.5e-4,
        description="Time to submit the sampling of a step with grammars.",
    )

    @field_validator("acceptance", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int | float) else value

    def host(self) -> HostTimes | None:
        """Return the host times of `engine`; None if it isn't set. Raises `ConfigError` for an
        unknown engine."""
        return None if self.engine is None else host_times(self.engine)

    def profile(self) -> StepTimeProfile:
        """Load the profile of `step_time`, with the times that other options replace. Raises
        `ConfigError` if it can't be loaded, or for an unknown engine."""
        profile = StepTimeProfile.load(self.step_time)
        profile = profile.model_copy(update=self._given(*FEATURES))
        host = self.host()
        if host is not None and not profile.states_core:
            profile = profile.model_copy(update=_core_of(host))
        given = self._given("core_s", "core_per_row_s")
        if given:  # the measured variation doesn't apply to given times
            profile = profile.model_copy(update={**given, "core_spread": None})
        return profile

    def _given(self, *names: str) -> dict[str, float]:
        """Return the options of these names that are set."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def _core_of(host: HostTimes) -> dict[str, Any]:
    """Return the fields of a profile that are the core's times."""
    return {
        "launch": host.launch.model_dump(),
        "joining_s": host.joining_s,
        "max_in_flight": host.max_in_flight,
    }
