import numpy as np
import pytest
import torch
from dovetail.api.component import NoOptions
from dovetail.api.sampler import Lines, RowHistory, RowSampling, SampledRow, SampleInputs, SamplerContext

from dovetail_gumbel.noise import gumbel
from dovetail_gumbel.sampler import RANK, GumbelSampler

VOCAB = 16


def test_the_ranks_of_one_seed_are_samples_without_replacement() -> None:
    drawn = [sample(RowSampling(seed=3, extra_args={RANK: rank})) for rank in range(VOCAB)]
    assert sorted(drawn) == list(range(VOCAB))
    filtered = [sample(RowSampling(seed=3, top_k=2, extra_args={RANK: rank})) for rank in range(3)]
    assert len(set(filtered[:2])) == 2
    assert filtered[2] == filtered[1], "there is no third"


@pytest.mark.parametrize("wrong", ["x", -1, 2**31, 1.0, True, None])
def test_a_rank_that_is_none_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=RANK):
        GumbelSampler.capabilities.extra_args_model(gumbel_rank=wrong)


def test_noise_is_of_the_gumbel_distribution() -> None:
    noise = gumbel(np.array([1], np.uint64), np.array([0], np.uint64), vocab_size=100_000)
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - np.euler_gamma) < 0.02
    assert abs(noise.var() - np.pi**2 / 6) < 0.05


def sample(sampling: RowSampling) -> int:
    history = RowHistory(torch.zeros((1, 4), dtype=torch.int32), torch.ones(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    sampler = GumbelSampler(NoOptions(), SamplerContext("cpu", VOCAB, history))
    sampler.prepare(1)
    sampler.update([], [SampledRow(row=0, sampling=sampling)])
    row = np.zeros(1, np.int64)
    lines = Lines(rows=torch.from_numpy(row), ahead=torch.zeros(1, dtype=torch.int32))
    inputs = SampleInputs(logits=torch.linspace(-1, 1, VOCAB)[None], lines=lines, host_rows=row)
    return int(sampler.sample(inputs).token_ids)
