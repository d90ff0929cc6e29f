"""Generation defaults from a model's files: EOS ids and sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.api.sampler import RowSampling
from dovetail.checks import shown
from dovetail.errors import ModelLoadError, RequestError
from dovetail.json_files import read_json_object
from dovetail.sampling_params import SamplingParams

_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """From `generation_config.json`. None: the file is silent, and the neutral value holds.

    `do_sample` isn't read: many models ship `false` beside a temperature, and a request that wants greedy decoding says `temperature=0`.
    """

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def read(cls, model_dir: Path, *, sampling: bool = True) -> GenerationDefaults:
        """Read a model directory. The EOS ids come from `config.json` if `generation_config.json` names none; without `sampling`, nothing but
        `config.json` is read. Raises `ModelLoadError` for a file that isn't JSON or holds nonsense."""
        path = model_dir / "generation_config.json"
        generation = _read_json(path) if sampling else {}
        values: dict[str, Any] = {name: generation.get(name) for name in _NUMBERS}
        try:
            SamplingParams(**values)
        except RequestError as error:
            raise ModelLoadError(f"{path}: {error}; generation_config: none ignores the file") from None
        eos_token_ids = _eos(generation, path)
        if eos_token_ids is None:
            eos_token_ids = _eos(_read_json(model_dir / "config.json"), model_dir / "config.json")
        return cls(eos_token_ids or (), **values)

    def sampling(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that the file sets."""
        return {name: value for name in _NUMBERS if (value := getattr(self, name)) is not None}


def _eos(content: dict[str, Any], path: Path) -> tuple[int, ...] | None:
    """Return the EOS ids, or None if there are none."""
    eos = content.get("eos_token_id")
    if eos is None:
        return None
    ids: list[Any] = eos if isinstance(eos, list) else [eos]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ModelLoadError(f"{path}: eos_token_id must be a token id or a list of them, got {shown(eos)}")
    return tuple(ids)


def resolve_sampling(params: SamplingParams, defaults: GenerationDefaults, seed: int, bad_words: tuple[tuple[int, ...], ...] = ()) -> RowSampling:
    """Resolve a request's sampling: its own values, else the model's, else neutral ones.

    `seed`: 64 bits. `bad_words`: as token sequences. Stop ids are those of the request and, unless `ignore_eos`, the model's EOS ids.
    """

    def pick(name: str, neutral: Any) -> Any:
        value = getattr(params, name)
        if value is None:
            value = getattr(defaults, name)
        return neutral if value is None else value

    stop_ids = (params.stop_token_ids or ()) if params.ignore_eos else (*(params.stop_token_ids or ()), *defaults.eos_token_ids)
    return RowSampling(
        temperature=float(pick("temperature", 1.0)),
        top_k=max(0, pick("top_k", 0)),
        top_p=float(pick("top_p", 1.0)),
        min_p=float(pick("min_p", 0.0)),
        seed=seed,
        repetition_penalty=float(pick("repetition_penalty", 1.0)),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        logit_bias=tuple((params.logit_bias or {}).items()),
        allowed_token_ids=None if params.allowed_token_ids is None else tuple(params.allowed_token_ids),
        bad_words=bad_words,
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(dict.fromkeys(stop_ids)),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        extra_args=params.extra_args,
    )


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}
