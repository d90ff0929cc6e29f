"""Each processor compared with a plain version for one line, in Python and numpy."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from dovetail.api.component import NoOptions
from dovetail.api.logits_processor import ArgumentContext, LogitsProcessor, LogitsProcessorContext, ProcessedRow
from dovetail.api.sampler import Lines, RowHistory, RowSampling
from pydantic import BaseModel, ValidationError

from dovetail_samplers_extra.dry import MAX_BREAKERS, MAX_MATCH, Dry, DryArguments
from dovetail_samplers_extra.records import total
from dovetail_samplers_extra.top_n_sigma import TopNSigma, TopNSigmaArguments
from dovetail_samplers_extra.xtc import Xtc, XtcArguments, uniform

VOCAB = 9
WIDTH = 80
CASES = 150


def plain_dry(logits: np.ndarray, tokens: list[int], asked: DryArguments) -> np.ndarray:
    if asked.penalty_last_n >= 0:
        tokens = tokens[len(tokens) - min(asked.penalty_last_n, len(tokens)) :]
    longest: dict[int, int] = {}
    breakers = asked.sequence_breakers
    for end in range(len(tokens) - 1):  # the last token of an earlier occurrence
        length = 0
        while length < MAX_MATCH and length <= end and tokens[end - length] == tokens[-1 - length] not in breakers:
            length += 1
        longest[tokens[end + 1]] = max(longest.get(tokens[end + 1], 0), length)
    logits = logits.copy()
    for token, length in longest.items():
        if length >= asked.allowed_length and token not in breakers:
            logits[token] -= asked.multiplier * asked.base ** (length - asked.allowed_length)
    return logits


def plain_xtc(logits: np.ndarray, asked: XtcArguments, number: float) -> np.ndarray:
    shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    top = [token for token in np.argsort(-shares, kind="stable") if shares[token] >= asked.threshold]
    logits = logits.copy()
    if number < asked.probability:
        stays = min((token for token in top if shares[token] == shares[top[-1]]), default=None)
        logits[[token for token in top if token != stays]] = -np.inf
    return logits


def plain_top_n_sigma(logits: np.ndarray, asked: TopNSigmaArguments) -> np.ndarray:
    return np.where(logits < logits.max() - asked.n * logits[np.isfinite(logits)].std(), -np.inf, logits)


def plain_uniform(seed: int, position: int) -> float:
    def mixed(x: int) -> int:
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) % 2**64
        return x ^ x >> 31

    return (mixed((mixed((seed + 0x58544358544358) % 2**64) + position * 0x9E3779B97F4A7C15) % 2**64) >> 11) * 2.0**-53


def processed(
    kind: type[LogitsProcessor], logits: np.ndarray, texts: list[list[int]], asked: list[BaseModel], seeds: list[int], prompts: list[int]
) -> np.ndarray:
    """Return the logits [n, vocab] of lines after texts, each of which has a row."""
    count = len(texts)
    width = max(map(len, texts))
    history = RowHistory(*(torch.full(shape, 1, dtype=torch.int32) for shape in ((count + 1, width), (count + 1,), (count + 1,))))
    for row, text in enumerate(texts):
        history.token_ids[row, : len(text)] = torch.tensor(text)
        history.num_tokens[row], history.prompt_lens[row] = len(text), prompts[row]
    processor = kind(NoOptions(), LogitsProcessorContext("cpu", logits.shape[1], history))
    processor.prepare(count)
    added = [
        ProcessedRow(row=row, arguments=arguments, sampling=RowSampling(seed=seed))
        for row, (arguments, seed) in enumerate(zip(asked, seeds, strict=True))
    ]
    processor.update([], added)
    result = torch.tensor(logits, dtype=torch.float32)
    processor.apply(result, Lines(rows=torch.arange(count), ahead=torch.zeros(count, dtype=torch.int32)))
    return result.numpy()


def cases() -> tuple[np.random.Generator, np.ndarray, list[list[int]]]:
    """Random logits, of which some are -inf, and texts of few different tokens, some of them of one
    token always."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(CASES, VOCAB)) * rng.choice([0.5, 3.0], size=(CASES, 1))
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[:, 3] = 0.25
    logits[::7] = logits[::7].round()  # ties
    texts = [rng.integers(0, int(rng.choice([1, 2, 3, VOCAB])), int(rng.integers(1, WIDTH + 1))).tolist() for _ in range(CASES)]
    return rng, logits.astype(np.float32).astype(np.float64), texts


def test_dry_is_the_plain_one() -> None:
    rng, logits, texts = cases()
    asked = [
        DryArguments(
            multiplier=float(rng.choice([0.0, 0.8, 5.0, 9.0])),
            base=float(rng.choice([1.0, 1.2, 1.75])),
            allowed_length=int(rng.choice([1, 2, 3, MAX_MATCH])),
            penalty_last_n=int(rng.choice([-1, 0, 1, 10, 500])),
            sequence_breakers=tuple(rng.integers(0, 3 * VOCAB, int(rng.integers(0, 4))).tolist()),
        )
        for _ in texts
    ]
    found = processed(Dry, logits, texts, asked, [0] * CASES, [1] * CASES)
    expected = [plain_dry(*case) for case in zip(logits, texts, asked, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert sum((found[index] != logits[index]).any() for index in range(CASES)) > CASES // 6


def test_dry_lowers_the_token_that_would_continue_a_repetition() -> None:
    told = {"multiplier": 1.0, "base": 2.0, "allowed_length": 2, "sequence_breakers": [8]}
    for text, penalties in (
        ([1, 2, 3, 4, 0, 1, 2, 3], {4: 2.0}),  # three tokens: one more than allowed
        ([1, 2, 5, 1, 2, 6, 1, 2], {5: 1.0, 6: 1.0}),
        ([1, 8, 2, 5, 1, 8, 2], {}),  # a breaker ends the repetition after one token
        ([1, 2, 8, 1, 2], {}),  # a breaker isn't lowered
        ([3], {}),
        ([1, 1, 1, 1], {1: 2.0}),
    ):
        found = processed(Dry, np.zeros((1, VOCAB)), [text], [DryArguments(**told)], [0], [1])[0]
        assert {token: -value for token, value in enumerate(found) if value} == penalties, text


def test_top_n_sigma_is_the_plain_one() -> None:
    rng, logits, texts = cases()
    asked = [TopNSigmaArguments(n=float(rng.choice([0.1, 1.0, 2.0, 1000.0]))) for _ in texts]
    found = processed(TopNSigma, logits, texts, asked, [0] * CASES, [1] * CASES)
    np.testing.assert_array_equal(found, [plain_top_n_sigma(*case) for case in zip(logits, asked, strict=True)])


def test_xtc_is_the_plain_one() -> None:
    rng, logits, texts = cases()
    asked = [XtcArguments(threshold=float(rng.choice([0.013, 0.11, 0.3, 1.0])), probability=float(rng.choice([0.0, 0.5, 1.0]))) for _ in texts]
    seeds = [int(rng.integers(0, 2**63)) * int(rng.choice([1, 2])) for _ in texts]
    prompts = [int(rng.integers(1, len(text) + 1)) for text in texts]
    numbers = [plain_uniform(seed, len(text) - prompt) for seed, text, prompt in zip(seeds, texts, prompts, strict=True)]
    found = processed(Xtc, logits, texts, asked, seeds, prompts)
    np.testing.assert_array_equal(found, [plain_xtc(*case) for case in zip(logits, asked, numbers, strict=True)])


def test_xtc_leaves_the_least_probable_top_choice() -> None:
    logits = np.log([[0.4, 0.3, 0.2, 0.06, 0.04], [0.2] * 5, [0.9, 0.025, 0.025, 0.025, 0.025]])
    found = processed(Xtc, logits, [[0]] * 3, [XtcArguments(threshold=0.1, probability=1.0)] * 3, [0] * 3, [1] * 3)
    assert [np.flatnonzero(np.isfinite(row)).tolist() for row in found] == [[2, 3, 4], [0], [0, 1, 2, 3, 4]]


def test_xtc_happens_as_often_as_asked() -> None:
    numbers = uniform(torch.arange(100)[:, None].expand(100, 200).contiguous(), torch.arange(200).expand(100, 200).contiguous())
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs((numbers < 0.3).double().mean() - 0.3) < 5 * math.sqrt(0.3 * 0.7 / numbers.numel())
    assert len(numbers.unique()) == numbers.numel()
    assert uniform(torch.tensor([-1]), torch.tensor([3])).item() == plain_uniform(2**64 - 1, 3)


def test_a_sum_is_that_of_all_and_the_same_in_any_batch() -> None:
    values = torch.randn(5, 1001)
    np.testing.assert_allclose(total(values)[:, 0], values.double().sum(1), rtol=1e-4, atol=1e-4)
    assert torch.equal(total(values[2:3]), total(values)[2:3])
    assert total(values[:, :1]).tolist() == values[:, :1].tolist()


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


def test_breakers_are_encoded_when_a_request_arrives() -> None:
    def validated(values: object, encode: Callable[[str], list[int]] | None = bytes_of) -> tuple[int, ...]:
        context = ArgumentContext(encode=encode, vocab_size=1000)
        return DryArguments.model_validate({"sequence_breakers": values}, context=context).sequence_breakers

    assert validated(["\n", "ab", 7]) == (10, ord("b"), 7)
    assert DryArguments.model_validate({}, context=ArgumentContext(encode=bytes_of, vocab_size=1000)).sequence_breakers == (10, 58, 34, 42)
    assert DryArguments.model_validate({"sequence_breakers": []}).sequence_breakers == ()
    for wrong, says in (
        ([""], "has no token"),
        (["x"] * (MAX_BREAKERS + 1), "at most 128"),
        ([True], "valid integer"),
        ([-1], "greater than or equal to 0"),
        (["x", None], "valid integer"),
        ("x", "valid tuple"),
    ):
        with pytest.raises(ValidationError, match=says):
            validated(wrong)
    with pytest.raises(ValidationError, match="has no token"):
        validated(["x"], lambda text: [])
    with pytest.raises(ValidationError, match="need a tokenizer"):
        validated(["x"], None)


@pytest.mark.parametrize(
    ("model", "wrong"),
    [
        (model, {key: value})
        for model, keys in ((DryArguments, ("multiplier", "base", "allowed_length", "penalty_last_n")), (TopNSigmaArguments, ("n",)))
        for key in keys
        for value in (-2, math.nan, math.inf, "1", None, 2**70)
    ]
    + [(XtcArguments, {key: value}) for key in ("threshold", "probability") for value in (-0.1, 1.1, math.nan, "1", None)]
    # 0.0 as float32
    + [(TopNSigmaArguments, {"n": 1e-300}), (XtcArguments, {"threshold": 1e-300})],
)
def test_a_number_that_makes_no_sense_is_refused(model: type[BaseModel], wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        model.model_validate({"sequence_breakers": [], **wrong} if model is DryArguments else wrong)
