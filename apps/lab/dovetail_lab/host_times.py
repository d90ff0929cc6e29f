"""`HostTimes`: what an engine's host takes, by engine and version, for step times that don't include
it: a roofline, or measurements of the device alone.

An engine has two hosts. Its core plans and launches steps, before or beside the device; its front
end accepts requests and streams tokens, one after the other (`FrontEnd`).

`bench/lab/host_times.py` found these values; `docs/lab/host-times.md` has the runs, and how far
others are off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from pydantic import Field

from dovetail.errors import ConfigError
from dovetail_lab.step_time import Described, PiecewiseStepTime, RegimeStepTime, Seconds


class HostTimes(Described):
    """Seconds that an engine's host takes, on the CPU of a GPU server."""

    step_s: Seconds = Field(description="The core's time per step.")
    row_s: Seconds = Field(default=0.0, description="Additional core time per row of a step.")
    joining_s: Seconds = Field(
        default=0.0, description="Additional core time of a step in which requests take rows."
    )
    request_s: Seconds = Field(default=0.0, description="The front end's time per new request.")
    prompt_token_s: Seconds = Field(
        default=0.0, description="Additional time per token of its prompt: tokenizing text."
    )
    token_s: Seconds = Field(default=0.0, description="The front end's time per streamed token.")
    max_in_flight: int = Field(
        default=2, ge=1, le=8, description="Steps in flight: 1 if the core waits for the device."
    )
    plans_late: bool = Field(
        default=False, description="True: the core plans as late as the device allows."
    )
    source: str = Field(default="", description="The runs that the times were fitted to.")

    def core_seconds(self, rows: int) -> float:
        """Return the core's time for a step of `rows` requests, none of them new."""
        return self.step_s + self.row_s * rows

    @property
    def front_end(self) -> FrontEnd:
        """A front end that takes these times, and has done nothing yet."""
        return FrontEnd(self.request_s, self.prompt_token_s, self.token_s)

    @property
    def launch(self) -> RegimeStepTime:
        """The core's time as a model of the time to submit a step."""
        decode, mixed = (
            PiecewiseStepTime(points=((0, base_s), (1, base_s)), per_row_s=self.row_s)
            for base_s in (self.step_s, self.step_s + self.joining_s)
        )
        return RegimeStepTime(decode=decode, mixed=mixed)


HOSTS: Mapping[str, HostTimes] = {
    "dovetail": HostTimes(
        step_s=5.3e-4,
        row_s=3.8e-6,
        joining_s=1.5e-3,
        request_s=2.0e-3,
        token_s=5.4e-6,
        plans_late=True,
        source="Core: profile h200-qwen3-0.6b. Front end: docs/performance.md, streamed from an "
        "H200, and its cost of a token without a GPU.",
    ),
    "vllm-0.8": HostTimes(
        step_s=2.0e-3,
        row_s=2.0e-5,
        joining_s=3.0e-3,
        request_s=4.0e-3,
        prompt_token_s=6.5e-6,
        token_s=5.0e-5,
        max_in_flight=1,
        source="vllm 0.8.5 on an H100 PCIe (IOG-Foundation/llm-inference-benchmarks), vllm of June "
        "2025 on an A100 (tenstorrent/tt-inference-server, issue 340), vllm of January 2025 on an "
        "A100 (vllm-project/vllm, pull request 12287).",
    ),
    "vllm-0.25": HostTimes(
        step_s=1.5e-3,
        row_s=2.5e-5,
        joining_s=7.3e-3,
        request_s=1.7e-3,
        prompt_token_s=6.5e-6,
        token_s=4.4e-5,
        source="vllm 0.25.1 on an H200 (docs/performance.md, streamed from an H200); "
        "prompt_token_s is that of vllm-0.8.",
    ),
    "sglang": HostTimes(
        step_s=3.1e-4,
        request_s=5.8e-3,
        max_in_flight=1,
        source="step_s: sglang with a simulated device (tenstorrent/tt-inference-server, issue "
        "3560). request_s: an upper bound, by 171.8 requests/s of 64 tokens in and out "
        "(sgl-project/sglang, issue 1857), which has the time of tokens in it.",
    ),
}


def host_times(engine: str | HostTimes) -> HostTimes:
    """Return the times of an engine's host. Raises `ConfigError` with the known names."""
    if isinstance(engine, HostTimes):
        return engine
    found = HOSTS.get(engine)
    if found is None:
        raise ConfigError(f"executor.engine {engine!r}: expected one of {', '.join(HOSTS)}")
    return found


@dataclass(slots=True)
class FrontEnd:
    """One process that accepts requests and streams tokens, in turn. Times are seconds on the
    engine's clock. Without costs it changes nothing.

    Tokens of a step are sent together. A request is accepted as soon as the process is free:
    tokens that come later wait for it, and tokens that came earlier delay it.
    """

    request_s: float = 0.0
    prompt_token_s: float = 0.0
    token_s: float = 0.0
    _free: float = -inf  # when it has ended what it has begun
    _accepting: tuple[float, float] | None = None  # when it accepts the last request: from, to
    _sent: float = -inf  # when it last sent something
    _arrivals: dict[str, float] = field(default_factory=dict)

    @property
    def costs(self) -> bool:
        """False if it takes no time, so that no request waits for earlier tokens."""
        return bool(self.request_s or self.prompt_token_s or self.token_s)

    def accept(self, request_id: str, arrival: float, prompt_tokens: int) -> float:
        """Accept a request that arrives at `arrival`; return when the core has it."""
        if not self.costs:
            return arrival
        self._arrivals[request_id] = arrival
        self._begin(inf)
        begun = max(arrival, self._free)
        ended = begun + self.request_s + self.prompt_token_s * prompt_tokens
        self._accepting = begun, ended
        return ended

    def send(self, ended: float, tokens: int) -> float:
        """Send the tokens that the core delivers at `ended`; return when clients have them."""
        if self.costs and tokens:
            self._begin(max(ended, self._free))
            self._free = max(ended, self._free) + self.token_s * tokens
            self._sent = self._free
        return self.last_sent(ended)

    def _begin(self, now: float) -> None:
        """Count the last request as begun if its turn comes by `now`: tokens that come before it
        don't wait."""
        if self._accepting is not None and self._accepting[0] <= now:
            self._free = max(self._free, self._accepting[1])
            self._accepting = None

    def last_sent(self, now: float) -> float:
        """Return when clients have everything that the core has delivered by `now`."""
        return max(now, self._sent)

    def arrival(self, request_id: str, seen: float) -> float:
        """Forget a request that the core saw from `seen` on; return when it arrived."""
        return self._arrivals.pop(request_id, seen)
