"""`Limits`: upper bounds of one request, which the front enforces. Keys of `engine.yaml`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(gt=0)]
CountOrZero = Annotated[int, Field(ge=0)]  # 0: not allowed

# of a text that `truncate_prompt_tokens` cuts, unless more would fit the model uncut
MAX_CUT_CHARS = 1_000_000


class Limits(BaseModel):
    """Upper bounds for the parts of one request. An error names the limit and its value."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )

    max_waiting: Count | None = 65536
    """Maximum number of unfinished requests that were added individually (`LLMEngine.add_request`,
    `AsyncLLMEngine.generate`); the samples of `n` > 1 count once. Lists (`LLM.generate`) don't
    count, since their prompts are in the caller's memory already. `null`: no limit."""

    max_n: Count = 1024
    """Maximum number of samples of one request (`n`)."""

    max_prompt_chars: Count | None = None
    """Maximum length of a text to tokenize, in characters. A conversation, including tools, may
    have twice as many before it is rendered. `null`: `max_model_len` times the length of the
    tokenizer's longest token, which no text that fits the model exceeds; for a text that
    `truncate_prompt_tokens` truncates, 1,000,000 if that is more."""

    max_request_chars: Count = 16 * 2**20
    """Maximum number of characters to tokenize for one HTTP request, over all its prompts. A query
    or template counts once for each document that it is joined with."""

    max_answer_bytes: Count = 128 * 2**20
    """Maximum number of bytes for the numbers of one HTTP answer. A number of an embedding counts
    16 as text, and 16/3 as base64; a log-probability counts 128 unless it is streamed, and a token
    of an echoed prompt counts 8."""

    max_samples: Count = 4096
    """Maximum number of samples of one HTTP request: its prompts times `n`."""

    max_name_chars: Count = 512
    """Maximum length of `request_id`, `client`, `cache_salt` and adapter names."""

    max_extra_size: CountOrZero = 65536
    """Maximum number of items and characters, including nested ones, in each of `extra_args`,
    `logits_processors` and `extra`."""

    max_json_parts: Count = 200_000
    """Maximum number of lists, objects and keys together in the JSON body of an HTTP request,
    counted before the body is parsed."""

    max_json_depth: Count = 128
    """Maximum nesting of lists and objects in the JSON body of an HTTP request."""

    max_inputs: Count = 2048
    """Maximum number of texts of one HTTP request that embeds, classifies or scores."""

    max_stop_strings: CountOrZero = 256
    """Maximum number of stop strings (`stop`)."""

    max_stop_chars: CountOrZero = 8192
    """Maximum number of characters of all stop strings together."""

    max_stop_token_ids: CountOrZero = 1024
    """Maximum number of stop tokens (`stop_token_ids`)."""

    max_bad_words: CountOrZero = 256
    """Maximum number of texts in `bad_words`."""

    max_bad_word_chars: CountOrZero = 4096
    """Maximum number of characters of all bad words together, before they are tokenized."""

    max_bad_word_tokens: CountOrZero = 4096
    """Maximum number of tokens of all bad words together, with and without a leading space."""

    max_logit_bias: CountOrZero = 1024
    """Maximum number of tokens in `logit_bias`."""

    max_allowed_token_ids: CountOrZero = 4096
    """Maximum number of tokens in `allowed_token_ids`."""

    max_grammar_chars: CountOrZero = 262_144
    """Maximum number of characters of a structured-output spec (`structured`): of a JSON Schema, a
    grammar, or all choices together."""

    max_grammar_depth: CountOrZero = 100
    """Maximum nesting of brackets in a structured-output spec."""

    max_grammar_s: Annotated[float, Field(gt=0, le=86_400)] = 10.0
    """Timeout of the trial compilation of a structured-output spec, in a separate process, in
    seconds."""

    max_logprobs: CountOrZero = 20
    """Maximum number of alternatives per token (`logprobs`, `prompt_logprobs`)."""

    max_images: CountOrZero = 16
    """Maximum number of images of one prompt."""

    max_image_bytes: Count = 20 * 2**20
    """Maximum size of an image's file, in bytes, before it is decoded."""

    max_image_pixels: Count = 50_000_000
    """Maximum number of pixels of an image, read from its header before it is decoded."""

    max_image_s: Annotated[float, Field(gt=0, le=86_400)] = 10.0
    """Timeout for decoding and preparing one image, in a separate process, in seconds."""

    max_image_memory: Annotated[int, Field(ge=2**29, lt=2**63)] = 4 * 2**30
    """Memory limit of a process that decodes images, in bytes."""

    max_chat_chars: Count = 10_000_000
    """Maximum number of characters of a conversation, before and after the chat template."""

    max_template_chars: Count = 100_000
    """Maximum number of characters of a chat template."""

    max_template_s: Annotated[float, Field(gt=0, le=86_400)] = 2.0
    """Timeout for rendering a conversation with a chat template, in seconds."""

    max_template_bytes: Annotated[int, Field(ge=2**27, lt=2**63)] = 2**30
    """Memory limit of a process that renders chat templates, in bytes."""
