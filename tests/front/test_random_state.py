"""Training after a fit is bit for bit the training without it, whatever the loader draws from."""

import random
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from flat_settings import QUICK
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Sampler,
    TensorDataset,
)

from laplace_sampling import Data, Evidence, LinearisedLaplace, Stochastic

DATA = torch.Generator().manual_seed(0)
X = torch.randn(20, 2, generator=DATA)
Y = X.sum(1, keepdim=True) + 0.1 * torch.randn(20, 1, generator=DATA)
DATASET = TensorDataset(X, Y)


class OfItsOwn(Sampler[int]):
    """Shuffles a list of its own by several generators, and counts its epochs."""

    def __init__(self) -> None:
        self.order, self.epoch, self.random = list(range(20)), 0, random.Random(3)

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        random.shuffle(self.order)
        self.order = [self.order[i] for i in np.random.permutation(20)]  # noqa: NPY002 as users write it
        return iter([*self.random.sample(self.order, 10), *self.order[: self.epoch]])

    def __len__(self) -> int:
        return 20


class Stream(IterableDataset):
    """In an order that a generator of its own begins anew in each pass, and draws as it goes."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.generator.manual_seed(7)
        for start in range(0, 20, 5):
            for i in (start + torch.randperm(5, generator=self.generator)).tolist():
                yield X[i], Y[i]


LOADERS: dict[str, Callable[[], DataLoader]] = {
    "shuffled": lambda: DataLoader(DATASET, 6, shuffle=True),
    "workers": lambda: DataLoader(
        DATASET, 6, shuffle=True, generator=torch.Generator(), num_workers=2, persistent_workers=True
    ),
    "its own": lambda: DataLoader(DATASET, 6, sampler=OfItsOwn()),
    "stream": lambda: DataLoader(Stream(), 6, generator=torch.Generator()),
}


def trained(name: str, between: Callable[[nn.Module, DataLoader], object]) -> list[torch.Tensor]:
    """The weights after two epochs, something else, and two more epochs with dropout."""
    torch.manual_seed(2), np.random.seed(2), random.seed(2)  # noqa: NPY002
    loader = LOADERS[name]()
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 1))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def epochs(count: int) -> None:
        for x, y in (batch for _ in range(count) for batch in loader):
            optimiser.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimiser.step()

    epochs(2)
    between(model, loader)
    epochs(2)
    return [p.detach().clone() for p in model.parameters()]


def fit_and_predict(model: nn.Module, loader: DataLoader) -> None:
    num_data = 20 if isinstance(loader.dataset, IterableDataset) else None
    la = LinearisedLaplace(model, "regression", num_samples=4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The sampler of the loader gives")
        la.fit_hyperparameters(loader, data=Data(num_data=num_data), progress=False)
        la.calibrate(loader, data=Data(num_data=num_data))
    la.predict(X).log_prob(Y)
    la.sample(2)


@pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning")
@pytest.mark.parametrize("name", LOADERS)
def test_training_goes_on_as_without_a_fit(name: str) -> None:
    expected = trained(name, lambda model, loader: None)
    for found, weight in zip(trained(name, fit_and_predict), expected, strict=True):
        assert torch.equal(found, weight)


def states() -> tuple:
    """Of the global generators."""
    torch_state, numpy_state = torch.get_rng_state().tolist(), np.random.get_state()  # noqa: NPY002
    return torch_state, numpy_state[1].tolist(), numpy_state[2], random.getstate()


@pytest.mark.parametrize(
    "method",
    [
        *("exact", "krylov", "dual", "kfac", "diagonal"),
        pytest.param(Stochastic(solver=QUICK), marks=pytest.mark.slow),
    ],
)
def test_no_method_draws_from_the_users_generators(method) -> None:
    la = LinearisedLaplace(nn.Linear(2, 1), "regression", num_samples=4, method=method)
    before = states()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether it converges is no matter here
        la.fit_hyperparameters(DataLoader(DATASET, 6, shuffle=True), progress=False, criterion=Evidence(max_steps=2))
    la.predict(X).samples  # noqa: B018
    assert states() == before


@pytest.mark.slow
def test_fits_in_two_threads_put_the_random_state_back() -> None:
    models = [nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(4)]

    def fit(model: nn.Module) -> None:
        shuffled = DataLoader(DATASET, batch_size=1, shuffle=True)
        LinearisedLaplace(model, "regression", method="krylov", num_samples=2).fit(shuffled, progress=False)

    for seed in range(8):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(fit, models))
        assert torch.equal(torch.get_rng_state(), before)
