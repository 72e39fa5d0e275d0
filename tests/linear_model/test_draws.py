import torch

from laplace_sampling.linear_model.draws import Draws, SeededNoise, Stream


def test_noise_belongs_to_a_datum() -> None:
    noise = Draws(3, seed=0).noise(2)
    whole = noise(torch.arange(600))
    assert torch.equal(noise(torch.tensor([599, 3, 256])), whole[:, [599, 3, 256]])
    assert torch.equal(Draws(2, seed=0).noise(2)(torch.arange(600)), whole[:2])
    assert not torch.equal(Draws(3, seed=1).noise(2)(torch.arange(600)), whole)
    assert not torch.equal(Draws(3, seed=0, stream=1).noise(2)(torch.arange(600)), whole)
    assert isinstance(noise, SeededNoise)
    assert abs(float(whole.mean())) < 5 / 3600**0.5
    # Rows are independent: no two samples share a draw, nor two data.
    assert len(whole.unique()) == whole.numel()


def test_groups_of_samples_are_the_samples() -> None:
    draws, batch = Draws(5, seed=2, stream=1), torch.tensor([3, 700])
    groups = draws.groups(2)
    assert [group.num_samples for group in groups] == [2, 2, 1]
    assert torch.equal(torch.cat([group.prior(4) for group in groups]), draws.prior(4))
    assert torch.equal(torch.cat([group.noise(3)(batch) for group in groups]), draws.noise(3)(batch))
    assert torch.equal(torch.cat([part(batch) for part in draws.noise(3).parts(2)]), draws.noise(3)(batch))


def test_noise_of_each_purpose_is_its_own() -> None:
    streams = [*Stream, *(Stream.SAMPLES + number for number in range(1, 100))]
    prior = [Draws(1, 0, stream).prior(4) for stream in streams]
    noise = [Draws(1, 0, stream).noise(4)(torch.arange(2))[0] for stream in streams]
    # Data of a part of all and their rows have keys that begin as those of other draws.
    parts = [SeededNoise(1, 4, 0, 2 * stream)(torch.arange(2))[0] for stream in (Stream.SUBSET, Stream.SUBSET_PROBES)]
    drawn = torch.cat([numbers.reshape(-1, 4) for numbers in (*prior, *noise, *parts)])
    by_seed = torch.stack([Draws(1, seed, Stream.SAMPLES).prior(4)[0] for seed in range(1, 50)])
    assert len(torch.cat([drawn, by_seed]).unique()) == 4 * (len(drawn) + len(by_seed))
