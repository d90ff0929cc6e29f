"""`GenerationDefaults`: the EOS ids and sampling parameters of a model's `generation_config.json`.

`GENERATION_CONFIG` says what each key of the file does here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.api.file_keys import FileKeys, KeyRule, NoEffect, Refused, Used
from dovetail.api.json_files import read_json_object
from dovetail.config.limits import Limits
from dovetail.errors import ModelLoadError, RequestError, shown
from dovetail.request.sampling_params import SamplingParams

Ids = tuple[int, ...]

_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_REMEDY = "remove the key, or set generation_config: none to ignore the file"

_BEAMS = NoEffect("of beam search, which `LLM.beam_search` configures")
_CACHE = NoEffect("how transformers keeps K and V and compiles; results are the same")
_DRAFTS = NoEffect("speculative decoding, which leaves the tokens as they are; see `speculation`")
_OUTPUTS = NoEffect("what transformers' `generate` returns")
_PLAIN_SAMPLING = "it changes which tokens are sampled"

KEYS: dict[str, KeyRule] = {
    "eos_token_id": Used("the tokens that end an answer"),
    "temperature": Used("the default of requests that don't set it"),
    "top_k": Used("the default of requests that don't set it"),
    "top_p": Used("the default of requests that don't set it"),
    "min_p": Used("the default of requests that don't set it"),
    "repetition_penalty": Used("the default of requests that don't set it"),
    "max_new_tokens": Used("the limit of requests whose `max_tokens` is null"),
    "min_new_tokens": Used("`min_tokens` of requests without one and without structured output"),
    "suppress_tokens": Used("tokens that are never sampled"),
    "bad_words_ids": Used("sequences of tokens that are never generated in full"),
    "do_sample": NoEffect("many models ship false beside a temperature; `temperature=0` is greedy"),
    "max_length": NoEffect("it counts the prompt, and old files have a default of 20"),
    "bos_token_id": NoEffect("the tokenizer adds BOS"),
    "pad_token_id": NoEffect("nothing is padded"),
    "decoder_start_token_id": NoEffect("of encoder-decoder models, which aren't served"),
    "renormalize_logits": NoEffect("a constant added to all logits changes no probability"),
    "remove_invalid_values": NoEffect("a request whose logits aren't finite is ended instead"),
    **dict.fromkeys(("early_stopping", "length_penalty", "diversity_penalty"), _BEAMS),
    **dict.fromkeys(("use_cache", "cache_implementation", "cache_config", "max_cache_len"), _CACHE),
    **dict.fromkeys(("return_legacy_cache", "prefill_chunk_size", "low_memory"), _CACHE),
    **dict.fromkeys(("compile_config", "disable_compile", "continuous_batching_config"), _CACHE),
    **dict.fromkeys(("is_assistant", "num_assistant_tokens"), _DRAFTS),
    **dict.fromkeys(("num_assistant_tokens_schedule", "assistant_early_exit"), _DRAFTS),
    **dict.fromkeys(("assistant_confidence_threshold", "assistant_ensemble_weight"), _DRAFTS),
    **dict.fromkeys(("assistant_lookbehind", "target_lookbehind"), _DRAFTS),
    **dict.fromkeys(("prompt_lookup_num_tokens", "max_matching_ngram_size"), _DRAFTS),
    **dict.fromkeys(("speculation_type", "use_mtp"), _DRAFTS),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_scores"), _OUTPUTS),
    **dict.fromkeys(("output_logits", "return_dict_in_generate"), _OUTPUTS),
    "_from_model_config": NoEffect("where transformers had the values from"),
    "transformers_version": NoEffect("the version that wrote the file"),
    "begin_suppress_tokens": Refused("tokens that can't begin an answer", ([],)),
    "constraints": Refused("constrained beam search", ([],)),
    "dola_layers": Refused("DoLa decoding"),
    "encoder_no_repeat_ngram_size": Refused("it bans n-grams of the prompt", (0,)),
    "encoder_repetition_penalty": Refused("it favours tokens of the prompt", (1.0,)),
    "epsilon_cutoff": Refused(_PLAIN_SAMPLING, (0.0,)),
    "eta_cutoff": Refused(_PLAIN_SAMPLING, (0.0,)),
    "exponential_decay_length_penalty": Refused("it raises the probability of EOS with the length"),
    "force_words_ids": Refused("constrained beam search", ([],)),
    "forced_bos_token_id": Refused("it forces the first token"),
    "forced_eos_token_id": Refused("it forces the last token"),
    "guidance_scale": Refused("classifier-free guidance", (1.0,)),
    "max_time": Refused("it ends an answer after some seconds; abort the request instead"),
    "min_length": Refused("it counts the prompt; `min_new_tokens` is served", (0,)),
    "no_repeat_ngram_size": Refused("it bans n-grams of the text so far", (0,)),
    "num_beam_groups": Refused("diverse beam search", (1,)),
    "num_beams": Refused("beam search; call `LLM.beam_search`", (1,)),
    "num_return_sequences": Refused("several answers; requests have `n`", (1,)),
    "penalty_alpha": Refused("contrastive search", (0.0,)),
    "sequence_bias": Refused("biases of sequences of tokens; requests have `logit_bias`", ([], {})),
    "stop_strings": Refused("default stop strings; requests have `stop`", ([],)),
    "token_healing": Refused("it replaces the prompt's last tokens", (False,)),
    "top_h": Refused(_PLAIN_SAMPLING),
    "typical_p": Refused(_PLAIN_SAMPLING, (1.0,)),
    "watermarking_config": Refused("it marks the text by a bias of tokens"),
}
GENERATION_CONFIG = FileKeys("generation_config.json", KEYS, unknown="logged")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """From `generation_config.json`. None: not set in the file, so the neutral value applies."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None  # of requests that set no limit
    min_tokens: int = 0  # of requests that set none
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences; a single token is never sampled

    @classmethod
    def read(cls, model_dir: Path, *, sampling: bool = True) -> GenerationDefaults:
        """Read a model directory. The EOS ids come from `config.json` if `generation_config.json`
        names none; without `sampling`, nothing but `config.json` is read.

        Raises `ModelLoadError` for a file that isn't JSON or has invalid values, and
        `UnsupportedError` for keys that can't be honoured."""
        path = model_dir / GENERATION_CONFIG.file
        generation = read_json_object(path, missing_ok=True) if sampling else {}
        GENERATION_CONFIG.check(generation, path, _REMEDY)
        values: dict[str, Any] = {name: generation.get(name) for name in _NUMBERS}
        try:
            SamplingParams(**values)
        except RequestError as error:
            raise ModelLoadError(f"{path}: {error}; {_REMEDY}") from None
        eos_token_ids = _eos(generation, path)
        if eos_token_ids is None:
            config = model_dir / "config.json"
            eos_token_ids = _eos(read_json_object(config, missing_ok=True), config)
        ids = eos_token_ids or ()
        return cls(
            ids,
            **values,
            max_tokens=_length(generation, "max_new_tokens", 1, path),
            min_tokens=_length(generation, "min_new_tokens", 0, path) or 0,
            bad_words=tuple(dict.fromkeys(_bad_words(generation, path, ids))),
        )

    def sampling(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that the file sets."""
        values = {name: getattr(self, name) for name in (*_NUMBERS, "max_tokens")}
        return {name: value for name, value in values.items() if value is not None}


def _eos(content: dict[str, Any], path: Path) -> Ids | None:
    """Return the EOS ids, or None if there are none."""
    eos = content.get("eos_token_id")
    if eos is None:
        return None
    ids = eos if isinstance(eos, list) else [eos]
    return _token_ids(ids, "eos_token_id", path, "a token id or a list of them")


def _bad_words(content: dict[str, Any], path: Path, eos: Ids) -> Iterator[Ids]:
    """Yield the sequences of tokens that are never generated. Like transformers, ignore a single
    EOS among the bad words."""
    listed = content.get("suppress_tokens") or []
    suppressed = _token_ids(listed, "suppress_tokens", path, "a list of token ids")
    words = content.get("bad_words_ids") or []
    expected = "a list of lists of token ids"
    if not isinstance(words, list) or not all(words):
        raise ModelLoadError(f"{path}: bad_words_ids must be {expected}, got {shown(words)}")
    banned = [_token_ids(word, "bad_words_ids", path, expected) for word in words]
    most = Limits().max_bad_word_tokens
    if sum(map(len, banned)) + len(suppressed) > most:
        what = "suppress_tokens and bad_words_ids must have"
        raise ModelLoadError(f"{path}: {what} at most {most} tokens together; {_REMEDY}")
    yield from ((token,) for token in suppressed)
    yield from (ids for ids in banned if len(ids) > 1 or ids[0] not in eos)


def _length(content: dict[str, Any], key: str, least: int, path: Path) -> int | None:
    value = content.get(key)
    if value is not None and (type(value) is not int or value < least):
        expected = f"an integer of {least} or more"
        raise ModelLoadError(f"{path}: {key} must be {expected}, got {shown(value)}; {_REMEDY}")
    return value


def _token_ids(values: Any, key: str, path: Path, expected: str) -> Ids:
    are_ids = isinstance(values, list) and all(type(one) is int and one >= 0 for one in values)
    if not are_ids:
        raise ModelLoadError(f"{path}: {key} must be {expected}, got {shown(values)}")
    return tuple(values)
