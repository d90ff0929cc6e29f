"""`SamplingParams`: how to choose the tokens of one request, and when to stop; `BeamSearchParams`:
the same for `LLM.beam_search`.

They check their own values. This file doesn't need torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from dovetail.base.checks import (
    BINARY,
    INT64,
    as_number,
    did_you_mean,
    plain_integer,
    unicode_error,
)
from dovetail.base.roadmap import not_yet
from dovetail.errors import RequestError, shown
from dovetail.request.frozen import FrozenDict, frozen
from dovetail.request.structured import Structured

# the allowed range: beyond it, logits in 16 or 32 bits become 0 or infinite
REPETITION_PENALTIES = (
    0.01,
    100.0,
)
NAMES_ELSEWHERE = {  # name in transformers or other engines -> name here
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "eos_token_id": "stop_token_ids",
    "top_logprobs": "logprobs",
    **dict.fromkeys(
        ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        "structured",
    ),
}
LENGTH_PENALTIES = (-10.0, 10.0)  # the allowed range: no length to this power overflows
BEAM_SEARCH = "use LLM.beam_search(prompts, BeamSearchParams(beam_width=…, max_tokens=…))"
# of requests in other engines
BEAM_NAMES = (
    "use_beam_search",
    "num_beams",
    "beam_width",
    "length_penalty",
    "early_stopping",
    "diversity_penalty",
)


class OutputKind(Enum):
    """The content of outputs: all text so far, only the new text, or one output at the end."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL = "final"


def check_names(named: Iterable[str], valid: Sequence[str], kind: str = "sampling") -> None:
    """Raise `RequestError` for a name that is none of the `valid` ones, with what may be meant.

    `kind`: of parameter, for the error.
    """
    for name in named:
        if name not in valid:
            raise RequestError(_unknown_name(name, valid, kind))


def _unknown_name(name: str, valid: Sequence[str], kind: str) -> str:
    if NAMES_ELSEWHERE.get(name) in valid:
        return f"{name}: use the name {NAMES_ELSEWHERE[name]}"
    if name in BEAM_NAMES and kind == "sampling":
        return f"{name}: {BEAM_SEARCH}"
    if planned := not_yet(name):
        return f"{name}: unknown {kind} parameter: {planned}"
    hint = did_you_mean(name, valid) or f"; valid are {', '.join(valid)}"
    return f"{name[:80]}: unknown {kind} parameter{hint}"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of one request: how to choose its tokens, and when to stop.

    Frozen: `dataclasses.replace` makes a changed copy. Checked when made: a wrong value raises
    `RequestError` with the name and the allowed range. Equal ones have equal hashes.

    A field left `None` in `temperature`, `top_k`, `top_p`, `min_p` or `repetition_penalty` takes
    the model's default (its `generation_config.json`, if the engine uses it), else the neutral
    value.
    """

    n: int = 1  # samples, 1 or more; they share the prompt's blocks
    temperature: float | None = None  # 0 is greedy; neutral: 1
    top_k: int | None = None  # keep the k most likely; 0 or -1: all
    top_p: float | None = None  # keep the smallest set whose probability reaches p, 0 < p <= 1
    # keep tokens at least min_p times as likely as the likeliest, 0 <= p <= 1
    min_p: float | None = None
    seed: int | None = None  # same seed, same tokens, whatever else runs
    # None: `max_new_tokens` of the model's defaults; its length always holds
    max_tokens: int | None = 16
    min_tokens: int = 0  # nothing but lack of room stops it before this many tokens
    stop: str | Sequence[str] | None = None  # stop strings
    stop_token_ids: Sequence[int] | None = None  # stop when one of these is generated
    # keep the stop string, or the stop token's text, at the end of the text
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False  # go on after the model's EOS, unless it is in stop_token_ids
    # penalty on tokens in prompt and output, 0.01 to 100 (CTRL, arXiv:1909.05858 section 4.1);
    # neutral: 1
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0  # subtracted once from a generated token's logit, -2 to 2
    frequency_penalty: float = 0.0  # subtracted for each time it was generated, -2 to 2
    logit_bias: Mapping[int, float] | None = None  # token id -> added to its logit, -100 to 100
    allowed_token_ids: Sequence[int] | None = None  # only these can be sampled
    # Words that the model can't write with the tokens by which the tokenizer spells them, as they
    # are and after a space, unless no other token is allowed. Other tokens may still have the same
    # letters: "ll" bans the token "ll", not "'ll" nor "l", "l".
    bad_words: Sequence[str] | None = None
    # return log-probabilities of the sampled token and of the k likeliest
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    skip_special_tokens: bool = True  # leave special tokens out of the text
    detokenize: bool = True  # False: token ids only, no text
    # a string becomes an `OutputKind`
    output_kind: OutputKind | Literal["cumulative", "delta", "final"] = OutputKind.CUMULATIVE
    # for the sampler; keys that its capabilities don't name are refused
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    # names of the engine's logits processors -> their arguments
    logits_processors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # keep the prompt's last k tokens; -1: as many as fit the model
    truncate_prompt_tokens: int | None = None
    # a rule that the answer follows; a mapping of its fields becomes a `Structured`
    structured: Structured | Mapping[str, Any] | None = None
    # most drafts that it checks in a step (speculative decoding), at most the engine's own number;
    # 0: none
    max_drafts: int | None = None
    # The same token ids and log-probabilities, bit by bit, whatever else the engine computes, with
    # equal versions, devices and options; slower. See the page "The same bits"
    deterministic: bool = False

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        def integer(name: str, low: int, high: int = INT64[1], *, optional: bool = False) -> None:
            put(name, _integer(name, getattr(self, name), low, high, optional=optional))

        def number(
            name: str,
            low: float,
            high: float = math.inf,
            *,
            optional: bool = False,
            open_low: bool = False,
        ) -> None:
            put(
                name,
                _number(name, getattr(self, name), low, high, optional=optional, open_low=open_low),
            )

        put("stop", _texts("stop", [self.stop] if isinstance(self.stop, str) else self.stop))
        put("bad_words", _texts("bad_words", self.bad_words))
        put("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise RequestError(
                    "allowed_token_ids must name at least one token id, got an empty list"
                )
        put("output_kind", _output_kind(self.output_kind))
        _check_bools(
            self,
            "include_stop_str_in_output",
            "ignore_eos",
            "skip_special_tokens",
            "detokenize",
            "deterministic",
        )
        integer("n", 1)
        integer("max_tokens", 1, optional=True)
        integer("min_tokens", 0)
        integer("top_k", -1, optional=True)
        integer("truncate_prompt_tokens", -1, optional=True)
        integer("seed", INT64[0], 2**64 - 1, optional=True)
        integer("logprobs", 0, optional=True)
        integer("prompt_logprobs", 0, optional=True)
        integer("max_drafts", 0, optional=True)
        number("temperature", 0.0, optional=True)
        number("top_p", 0.0, 1.0, optional=True, open_low=True)
        number("min_p", 0.0, 1.0, optional=True)
        number("repetition_penalty", *REPETITION_PENALTIES, optional=True)
        number("presence_penalty", -2.0, 2.0)
        number("frequency_penalty", -2.0, 2.0)
        put("logit_bias", _logit_bias(self.logit_bias))
        put("extra_args", _extra_args(self.extra_args))
        put("logits_processors", _logits_processors(self.logits_processors))
        if self.structured is not None:
            put("structured", Structured.of(self.structured))
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        """Raise `RequestError` for fields that exclude each other."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens ({shown(self.max_tokens)}), got "
                f"{shown(self.min_tokens)}"
            )
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                "truncate_prompt_tokens must be 1 or more, -1 or None, got 0: a prompt needs at "
                "least one token"
            )
        if self.structured is not None:
            has_rule = Structured.of(self.structured).kind is not None
            for name in ("min_tokens", "ignore_eos", "allowed_token_ids"):
                value = getattr(self, name)
                contradicts = has_rule or name == "allowed_token_ids"
                if value and contradicts:
                    raise RequestError(
                        f"{name} and structured contradict each other: the rule says which tokens "
                        f"may come, and where the end; got {shown(value)}"
                    )
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop strings need text: set detokenize to true, or use stop_token_ids"
            )

    @classmethod
    def of(cls, named: Mapping[str, Any]) -> SamplingParams:
        """Make parameters of names and values from outside.

        Raises `RequestError` for an unknown name, too, with the one that may be meant.
        """
        check_names(named, cls.__match_args__)
        return cls(**named)


def changed_unchecked(params: SamplingParams, **changes: Any) -> SamplingParams:
    """Return a copy with other values in some fields, without checking them: the caller must.

    `dataclasses.replace` takes four times as long, checks aside, and a call with many prompts or
    samples makes a copy for each. Of a subclass it is a plain `SamplingParams`.
    """
    other = object.__new__(SamplingParams)
    for name in SamplingParams.__match_args__:
        object.__setattr__(other, name, changes[name] if name in changes else getattr(params, name))
    return other


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """The parameters of `LLM.beam_search`: frozen, and checked when made, as `SamplingParams` are.

    Beams are compared by the model's own probabilities: nothing else changes them, and a model's
    default sampling parameters don't apply.
    """

    beam_width: int  # beams kept after each token, and answers returned for each prompt
    max_tokens: int  # the most tokens of an answer; the model's length always holds
    ignore_eos: bool = False  # go on after the model's EOS
    temperature: float = 0.0  # only 0: nothing is drawn
    # score: log-probability / length ** length_penalty, -10 to 10; larger values favour longer
    # answers
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False  # keep the text of EOS at the end
    skip_special_tokens: bool = True  # leave special tokens out of the text
    detokenize: bool = True  # False: token ids only, no text

    def __post_init__(self) -> None:
        object.__setattr__(self, "beam_width", _integer("beam_width", self.beam_width, 1, INT64[1]))
        object.__setattr__(self, "max_tokens", _integer("max_tokens", self.max_tokens, 1, INT64[1]))
        object.__setattr__(
            self,
            "length_penalty",
            _number("length_penalty", self.length_penalty, *LENGTH_PENALTIES),
        )
        _check_bools(
            self, "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"
        )
        if as_number(self.temperature) != 0:
            raise RequestError(
                "temperature must be 0: beam search draws nothing, it keeps the most probable "
                f"answers; got {shown(self.temperature)}"
            )


def _integer(name: str, value: Any, low: int, high: int, *, optional: bool = False) -> int | None:
    if value is None and optional:
        return None
    number = plain_integer(value)
    if number is None or not low <= number <= high:
        raise RequestError(
            f"{name} must be an integer >= {low} and <= {high}{' or None' if optional else ''}, "
            f"got {shown(value)}"
        )
    return number


def _number(
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    optional: bool = False,
    open_low: bool = False,
) -> float | None:
    if value is None and optional:
        return None
    number = as_number(value)
    is_within = number is not None and low <= number <= high
    if not is_within or (open_low and number == low):
        upper = "" if high == math.inf else f" and <= {high:g}"
        sign = ">" if open_low else ">="
        raise RequestError(
            f"{name} must be a finite number {sign} "
            f"{low:g}{upper}{' or None' if optional else ''}, got {shown(value)}"
        )
    return number


def _texts(name: str, values: Any) -> tuple[str, ...]:
    texts = []
    for value in _items(name, values, "non-empty strings"):
        if not isinstance(value, str) or not value or unicode_error(value):
            raise RequestError(
                f"{name} must be a list of non-empty strings, got {shown(value)} in it"
            )
        texts.append(value)
    return tuple(texts)


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    token_ids = []
    for value in _items(name, values, "token ids >= 0"):
        token = plain_integer(value)
        if token is None or token < 0:
            raise RequestError(f"{name} must be a list of token ids >= 0, got {shown(value)} in it")
        token_ids.append(token)
    return tuple(token_ids)


def _items(name: str, values: Any, what: str) -> Collection[Any]:
    if values is None:
        return ()
    if isinstance(values, str | BINARY) or not isinstance(values, Sequence | Set):
        raise RequestError(f"{name} must be a list of {what}, got {shown(values)}")
    return values


def _check_bools(params: SamplingParams | BeamSearchParams, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(params, name), bool):
            raise RequestError(f"{name} must be true or false, got {shown(getattr(params, name))}")


def _output_kind(value: Any) -> OutputKind:
    try:
        return value if isinstance(value, OutputKind) else OutputKind(value)
    except ValueError:
        raise RequestError(
            f"output_kind must be one of {', '.join(k.value for k in OutputKind)}, got "
            f"{shown(value)}"
        ) from None


def _logit_bias(bias: Any) -> Mapping[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {shown(bias)}")
    checked: dict[int, float] = {}
    for key, value in bias.items():
        token = plain_integer(key)
        if token is None or token < 0:
            raise RequestError(f"logit_bias: token id must be an integer >= 0, got {shown(key)}")
        number = as_number(value)
        if number is None or not -100 <= number <= 100:
            raise RequestError(
                f"logit_bias[{shown(token)}] must be a finite number >= -100 and <= 100, got "
                f"{shown(value)}"
            )
        checked[token] = number
    return FrozenDict(checked)


def _extra_args(extra: Any) -> Mapping[str, Any]:
    if extra is None:
        return FrozenDict()
    if not isinstance(extra, Mapping) or not all(isinstance(key, str) for key in extra):
        raise RequestError(f"extra_args must map names to values, got {shown(extra)}")
    try:
        return FrozenDict({name: frozen(value) for name, value in extra.items()})
    except ValueError as error:
        raise RequestError(f"extra_args: {error}") from None


def _logits_processors(asked: Any) -> Mapping[str, Mapping[str, Any]]:
    if asked is None:
        return FrozenDict()
    if not isinstance(asked, Mapping) or not all(
        isinstance(name, str) and isinstance(values, Mapping) for name, values in asked.items()
    ):
        raise RequestError(
            "logits_processors must map names of the engine's, which are plugins "
            "(docs/plugins/logits_processor.md), to their arguments, as in "
            f'{{"dry": {{"multiplier": 0.8}}}}, got {shown(asked)}'
        )
    try:
        return FrozenDict({name: frozen(values) for name, values in asked.items()})
    except ValueError as error:
        raise RequestError(f"logits_processors: {error}") from None
