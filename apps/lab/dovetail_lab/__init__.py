"""The lab: one policy, unchanged, in a fast deterministic simulation and on the real engine."""

from __future__ import annotations

from dovetail.api.component import CommandSpec, ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            kind="executor",
            name="simulated",
            target="dovetail_lab.simulated:SimulatedExecutor",
            api="1.0",
            options="dovetail_lab.simulated_options:SimulatedOptions",
            summary="Simulation: a step-time model advances a virtual clock, without a model",
        ),
        ComponentSpec(
            kind="drafter",
            name="simulated",
            target="dovetail_lab.drafting:SimulatedDrafter",
            api="1.0",
            summary="Drafts of the executor `simulated`, right by chance",
        ),
        ComponentSpec(
            kind="kv_tier",
            name="simulated_disk",
            target="dovetail_lab.simulated_disk:SimulatedDisk",
            api="1.0",
            options="dovetail_lab.simulated_disk:SimulatedDiskOptions",
            summary="The time that a disk takes for K and V, in simulations",
        ),
        ComponentSpec(
            kind="observer",
            name="decision_log",
            api="1.0",
            target="dovetail_lab.decision_log:DecisionLog",
            options="dovetail_lab.decision_log:DecisionLogOptions",
            summary="Logs scheduling decisions to a file for Perfetto",
        ),
        ComponentSpec(
            kind="observer",
            name="trace",
            api="1.0",
            target="dovetail_lab.trace_recording:TraceRecorder",
            options="dovetail_lab.trace_recording:TraceRecorderOptions",
            summary="Records requests as a trace that the lab replays",
        ),
    ]


@hookimpl
def dovetail_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            name="lab",
            target="dovetail_lab.commands:app",
            summary="Simulate, compare and calibrate scheduling policies",
        )
    ]
