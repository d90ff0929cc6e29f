"""Control of the model's reasoning, for all APIs: the request fields `thinking` and `effort` set
variables of the chat template, or limit how many tokens the reasoning takes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

from dovetail_server.protocol.decoding import unsupported

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# the most tokens of reasoning, for templates that know no effort; None: no limit
EFFORT_TOKENS: Mapping[str, int | None] = {
    "minimal": 512,
    "low": 2048,
    "medium": 8192,
    "high": 32_768,
    "xhigh": None,
    "max": None,
}
SWITCHES = ("enable_thinking", "thinking")  # variables of templates that turn reasoning on and off
EFFORT = "reasoning_effort"  # the variable of templates that know an effort: low, medium or high
_LEVELS = {"minimal": "low", "xhigh": "high", "max": "high"}

# code in a template
_OPENED = re.compile(r"{[{%]")
_CLOSED = re.compile(r"[%}]}")
_TEXT = re.compile(r"'[^']*'|\"[^\"]*\"")


class AskedReasoning(NamedTuple):
    """A request's demand."""

    on: bool | None = None  # None: as the model does by default
    tokens: int | None = None  # the most; None: no limit
    effort: Effort | None = None
    on_field: str = ""  # the API's field of `on` and `tokens`
    effort_field: str = ""

    @property
    def field(self) -> str:
        """The field that errors name."""
        return self.on_field or self.effort_field

    def variables(self, template: str, *, reasons: bool) -> Mapping[str, object]:
        """Return variables of a chat template that do what is asked, as far as it has any.
        `reasons`: the model may reason. Raises `HttpError` if reasoning can't be turned off."""
        switches = [name for name in SWITCHES if reads(template, name)]
        knows_effort = reads(template, EFFORT)
        if self.on is False:
            if not switches and knows_effort and "'none'" in template.replace('"', "'"):
                return {EFFORT: "none"}
            if not switches and (reasons or knows_effort):
                raise unsupported(
                    self.field,
                    "the model's chat template has no variable that turns its reasoning off: leave "
                    "it out",
                )
            return dict.fromkeys(switches, False)
        effort = (
            {EFFORT: _LEVELS.get(self.effort, self.effort)}
            if knows_effort and self.effort is not None
            else {}
        )
        return {**effort, **(dict.fromkeys(switches, True) if self.on else {})}

    def limit(self, variables: Mapping[str, object]) -> int | None:
        """Return the most tokens of reasoning; None: no limit. `variables`: those of the template,
        which may know the effort."""
        by_effort = (
            None if self.effort is None or EFFORT in variables else EFFORT_TOKENS.get(self.effort)
        )
        return min((limit for limit in (self.tokens, by_effort) if limit is not None), default=None)

    def unmet(self, variables: Mapping[str, object]) -> Collection[str]:
        """Return the fields that only variables of the template could honour, since there is no
        reasoning to limit, and don't."""
        if self.on is False:
            return ()
        switched = any(variables.get(name) is True for name in SWITCHES)
        by_switch = (self.on or self.tokens is not None) and not (switched and self.tokens is None)
        by_effort = (
            self.effort is not None
            and EFFORT not in variables
            and not (switched and EFFORT_TOKENS.get(self.effort) is None)
        )
        return [
            field
            for field, unmet in ((self.on_field, by_switch), (self.effort_field, by_effort))
            if unmet
        ]


def asked_effort(field: str, effort: Effort | None) -> AskedReasoning:
    """Return what OpenAI's effort asks for: `none` turns reasoning off, all others turn it on."""
    return (
        AskedReasoning()
        if effort is None
        else AskedReasoning(effort != "none", None, effort, effort_field=field)
    )


@lru_cache(maxsize=256)
def reads(template: str, variable: str) -> bool:
    """Return True if a chat template looks at a variable."""
    return any(
        re.search(rf"(?<![.\w]){variable}\b(?!\s*=[^=])", _TEXT.sub("''", code))
        for code in _codes(template)
    )


def _codes(template: str) -> Iterator[str]:
    """Yield the code of a template, in linear time also if it isn't closed."""
    start = 0
    while (opened := _OPENED.search(template, start)) and (
        closed := _CLOSED.search(template, opened.end())
    ):
        yield template[opened.end() : closed.start()]
        start = closed.end()
