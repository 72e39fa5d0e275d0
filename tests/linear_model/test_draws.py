import torch

from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.ggn import WhiteNoise


def test_noise_belongs_to_a_datum() -> None:
    noise = Draws(3, seed=0).noise(2)
    whole = noise(torch.arange(600))
    assert torch.equal(noise(torch.tensor([599, 3, 256])), whole[:, [599, 3, 256]])
    assert torch.equal(Draws(2, seed=0).noise(2)(torch.arange(600)), whole[:2])
    assert not torch.equal(Draws(3, seed=1).noise(2)(torch.arange(600)), whole)
    assert not torch.equal(Draws(3, seed=0, stream=1).noise(2)(torch.arange(600)), whole)
    assert isinstance(noise, WhiteNoise)
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
