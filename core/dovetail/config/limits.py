"""`Limits`: upper bounds for the parts of one request. They are the keys of `limits` in `engine.yaml`, enforced by the front end."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(gt=0)]
CountOrZero = Annotated[int, Field(ge=0)]  # 0: no request may ask for any

MAX_CUT_CHARS = (
    1_000_000  # of a text that `truncate_prompt_tokens` cuts, unless more would fit the model uncut
)


class Limits(BaseModel):
    """Upper bounds for the parts of one request. An error names the limit and its value."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )

    max_waiting: Count | None = 65536
    """The most unfinished requests that were given one by one (`LLMEngine.add_request`, `AsyncLLMEngine.generate`); samples of `n` > 1 count once.
    Those of a list (`LLM.generate`) don't count, since its caller holds all of its prompts anyway. `null`: as many as memory holds."""

    max_n: Count = 1024
    """The most samples of one request (`n`)."""

    max_prompt_chars: Count | None = None
    """The longest text that is tokenized, in characters. A conversation, tools included, may have twice as many before it is rendered. `null`:
    `max_model_len` times the characters of the tokenizer's longest token, which no text that fits the model exceeds; for a text that
    `truncate_prompt_tokens` cuts, 1,000,000 if that is more."""

    max_request_chars: Count = 16 * 2**20
    """The most characters that are tokenized for one HTTP request, over all its prompts. A query or a template counts once for each document that
    it is joined with."""

    max_answer_bytes: Count = 128 * 2**20
    """The most bytes of the numbers of one HTTP answer. A number of an embedding counts 16 as text, and 16/3 as base64; a log-probability counts 128
    unless it is streamed, and a prompt's token that the answer repeats counts 8."""

    max_samples: Count = 4096
    """The most samples of one HTTP request: its prompts times `n`."""

    max_name_chars: Count = 512
    """The longest `request_id`, `client`, `cache_salt` and name of an adapter."""

    max_extra_size: CountOrZero = 65536
    """The most items and characters, with all that is nested in them, of `extra_args`, of `logits_processors` and of `extra`."""

    max_json_parts: Count = 200_000
    """The most lists, objects and keys, together, in the JSON body of an HTTP request. They are counted before the body is parsed."""

    max_json_depth: Count = 128
    """The deepest nesting of lists and objects in the JSON body of an HTTP request."""

    max_inputs: Count = 2048
    """The most texts of one HTTP request that embeds, classifies or scores."""

    max_stop_strings: CountOrZero = 256
    """The most stop strings (`stop`)."""

    max_stop_chars: CountOrZero = 8192
    """The most characters of all stop strings together."""

    max_stop_token_ids: CountOrZero = 1024
    """The most stop tokens (`stop_token_ids`)."""

    max_bad_words: CountOrZero = 256
    """The most texts in `bad_words`."""

    max_bad_word_chars: CountOrZero = 4096
    """The most characters of all bad words together, before they are tokenized."""

    max_bad_word_tokens: CountOrZero = 4096
    """The most tokens of all bad words together, spelled both as at the start of a line and behind a space."""

    max_logit_bias: CountOrZero = 1024
    """The most tokens in `logit_bias`."""

    max_allowed_token_ids: CountOrZero = 4096
    """The most tokens in `allowed_token_ids`."""

    max_grammar_chars: CountOrZero = 262_144
    """The most characters of a structured-output spec (`structured`): of a JSON Schema, a grammar, all choices together."""

    max_grammar_depth: CountOrZero = 100
    """The deepest nesting of brackets in a structured-output spec."""

    max_grammar_s: Annotated[float, Field(gt=0, le=86_400)] = 10.0
    """The longest time to compile a structured-output spec on trial, in a process of its own, in seconds."""

    max_logprobs: CountOrZero = 20
    """The most alternatives a token (`logprobs`, `prompt_logprobs`)."""

    max_chat_chars: Count = 10_000_000
    """The most characters of a conversation, before and after the chat template."""

    max_template_chars: Count = 100_000
    """The most characters of a chat template."""

    max_template_s: Annotated[float, Field(gt=0, le=86_400)] = 2.0
    """The longest that a chat template may take to render a conversation, in seconds."""

    max_template_bytes: Annotated[int, Field(ge=2**27, lt=2**63)] = 2**30
    """The most memory that a process which renders chat templates may take, in bytes."""
