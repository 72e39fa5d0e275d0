"""Predictions of a loader are those of its batches, one after the other."""

from collections.abc import Iterator

import pytest
import torch
from exported import fitted
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling import Categorical, Data, LinearisedLaplace, NotFittedError

NAMES = ("probs", "stddev", "samples", "mutual_information")


def test_batches_of_all_forms() -> None:
    la, x = fitted("mlp")
    pred, y = la.predict(x), torch.arange(8)
    data = TensorDataset(x, y)
    loaders = {
        "pairs": DataLoader(data, batch_size=3),
        "alone": x.split(3),
        "tuples of one": DataLoader(TensorDataset(x), batch_size=5),
        "arrays": [x[:4].numpy(), x[4:].numpy()],
        "labels": [({"input": x, "labels": y})],
        "dataset": data,
        "generator": (part for part in x.split(2)),
    }
    for loader in loaders.values():
        found = la.predict_loader(loader, NAMES, progress=False)
        assert tuple(found) == NAMES
        for name, value in found.items():
            assert value.device.type == "cpu"
            assert_close(value, getattr(pred, name))
    unpacked = la.predict_loader(
        [{"features": x}], "probs", progress=False, data=Data(unpack=lambda b: (b["features"], None))
    )
    assert_close(unpacked["probs"], pred.probs)


def test_a_posterior_with_exact_covariances_and_the_usual_names() -> None:
    la, x = fitted("mlp", "regression", method="exact")
    found, pred = la.predict_loader(x.split(3), progress=False), la.predict(x)
    assert tuple(found) == ("mean", "stddev", "epistemic")
    assert_close(found["stddev"], pred.stddev)


class Two(nn.Module):
    """A network of two inputs, one of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        return self.layer(a if b is None else a + b)


def test_a_pair_is_inputs_and_targets_also_of_a_network_of_two_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(6, 3, generator=generator), torch.randn(6, 3, generator=generator)
    la = LinearisedLaplace(Two(), "regression").fit([((a, b), a[:, :2])], progress=False)
    both, first = la.predict((a, b)).mean, la.predict(a).mean
    assert_close(la.predict_loader([((a, b),)], "mean", progress=False)["mean"], both)
    assert_close(la.predict_loader([((a, b), a)], "mean", progress=False)["mean"], both)
    assert_close(la.predict_loader([(a, b)], "mean", progress=False)["mean"], first)


def test_one_batch_is_in_memory_at_a_time() -> None:
    la, x = fitted("mlp")
    read: list[int] = []
    rows: list[int] = []
    la.network.module.register_forward_pre_hook(lambda module, args: rows.append(len(read)))

    def batches() -> Iterator[Tensor]:
        for n, part in enumerate(x.split(2)):
            read.append(n)
            yield part

    la.predict_loader(batches(), progress=False)
    assert set(rows) == {1, 2, 3, 4}  # the network runs before the next batch is read


def test_errors() -> None:
    with pytest.raises(NotFittedError, match="predict_loader"):
        LinearisedLaplace(torch.nn.Linear(2, 2), "classification").predict_loader([torch.zeros(1, 2)])
    la, x = fitted("mlp")

    def raises(error: type[Exception], message: str, *args, **kwargs) -> None:
        with pytest.raises(error, match=message):
            la.predict_loader(*args, progress=False, **kwargs)

    raises(ValueError, "'nothing'", [x], "nothing")
    raises(TypeError, "Tensor", x)
    raises(TypeError, "tuple of 3", [(x, x, x)])
    raises(ValueError, "batch", [])
    raises(ValueError, "NaN", [x, x * torch.nan])
    la, x = fitted("mlp", "regression")
    raises(ValueError, "'noise_variance'", [x], "noise_variance")  # one for all data


def test_outputs_of_several_shapes_are_refused() -> None:
    model, x = torch.nn.Conv1d(1, 2, 3), torch.randn(6, 1, 5)
    la = LinearisedLaplace(model, Categorical(), method="krylov", num_samples=3)
    la.fit([(x, torch.randint(2, (6, 3)))], tolerance=0.1, progress=False)
    with pytest.raises(ValueError, match="shape"):
        la.predict_loader([x, torch.randn(6, 1, 6)], "probs", progress=False)
