"""Every error that Dovetail raises on purpose: one family, so that a caller can catch `DovetailError` and be done.

The texts are written for the person who reads them: what was wrong, where, and what would be right.
"""

from __future__ import annotations

DISTRIBUTION = "dovetail-llm"  # what pip calls Dovetail: `dovetail` is somebody else's on the package index


class DovetailError(Exception):
    """Base of all errors raised by Dovetail."""


class ConfigError(DovetailError, ValueError):
    """A setting in `engine.yaml`, an override or a component's options is wrong; the text names file, line and key."""


class PluginError(DovetailError):
    """A component can't be had: unknown or ambiguous name, a plugin that failed to load, another api version."""


class UnsupportedError(DovetailError):
    """The parts that were named don't go together, or can't do what was asked; the text lists each reason."""


class ModelLoadError(DovetailError):
    """A model directory, its config or its weights can't be used; the text names the file or the tensor."""


class MissingExtraError(DovetailError, ImportError):
    """A package of an optional extra isn't installed; the text holds the pip line that installs it."""

    @classmethod
    def naming(cls, extra: str, lack: str) -> MissingExtraError:
        """The sentence `lack`, and the pip line for the extra of Dovetail's that mends it."""
        return cls(f'{lack}; install with: pip install "{DISTRIBUTION}[{extra}]"')


class RequestError(DovetailError, ValueError):
    """A request was refused on arrival (parameters, length, token ids). Nothing else is affected."""


class PolicyError(DovetailError):
    """A scheduler broke a rule of its contract, or raised; the text names the policy, the request and the rule."""


class SchedulerStalled(DovetailError):
    """Unfinished requests, nothing granted, nothing in flight and no `wake_at`: the policy would wait for ever."""


class EngineDeadError(DovetailError):
    """The engine stopped after an error (its cause, `__cause__`) and takes no more work."""


def describe(error: BaseException) -> str:
    """Its type and its text. Also of an error that somebody else has written, whose `__str__` may raise."""
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException as another:
        text = f"(its text can't be had: {type(another).__name__})"
    return f"{name}: {text}" if text else name
