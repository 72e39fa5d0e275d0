"""Bad settings, data and models, and use before a fit."""

import copy

import pytest
import torch
from cases import make_case
from flat_settings import fitted, loader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from laplace_sampling import (
    Dual,
    Factored,
    IsotropicPrior,
    LinearisedLaplace,
    NotFittedError,
    Stochastic,
)

CLASSES = make_case("classification_many_data")


@pytest.mark.parametrize(
    "use",
    [
        lambda la: la.predict(torch.zeros(1, 3)),
        lambda la: la.sample(1),
        lambda la: la.samples_,
        lambda la: la.history_,
        lambda la: la.state_dict(),
        lambda la: la.save("nowhere"),
    ],
)
def test_use_before_fit(use) -> None:
    la = LinearisedLaplace(make_case("classification").model, "classification")
    with pytest.raises(NotFittedError, match="fit_hyperparameters"):
        use(la)
    assert not hasattr(la, "samples_")  # as scikit-learn's checks expect of fitted attributes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"likelihood": "ordinal"}, "ordinal"),
        ({"prior": "flat"}, "flat"),
        ({"linear_model": "quadratic"}, "linear_model"),
        ({"method": "adam"}, "adam"),
        ({"seed": -1}, "seed"),
        ({"num_samples": 1}, "num_samples"),
        ({"parameters": "nothing"}, "parameters"),
    ],
)
def test_bad_settings(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearisedLaplace(make_case("classification").model, **{"likelihood": "classification", **settings})


def test_bad_settings_of_parts() -> None:
    with pytest.raises(TypeError, match="solver"):
        Stochastic(solver="adam")
    with pytest.raises(ValueError, match="precision"):
        IsotropicPrior(precision=0.0)
    with pytest.raises(ValueError, match="rank"):
        Dual(rank=-1)
    with pytest.raises(ValueError, match="kind"):
        Factored(kind="full")


class Augmented(Dataset):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, i: int):
        return CLASSES.x[i] + torch.rand(2), CLASSES.y[i]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([(CLASSES.x, CLASSES.y.double())], TypeError, r"y\.long"),
        ([(CLASSES.x, CLASSES.y + 5)], ValueError, "range"),
        ([(CLASSES.x, CLASSES.y[:, None])], ValueError, "shape"),
        ([(CLASSES.x / 0, CLASSES.y)], ValueError, "inputs"),
        ([], ValueError, "empty"),
        (iter([(CLASSES.x, CLASSES.y)]), TypeError, "iterator"),
        (DataLoader(Augmented(), batch_size=3), ValueError, "augmentation"),
    ],
)  # fmt: skip
def test_bad_data_are_refused_and_nothing_is_lost(data, error, message: str) -> None:
    la = fitted(CLASSES)
    expected = la.samples_
    with pytest.raises(error, match=message):
        la.fit_hyperparameters(data, progress=False)
    assert la.samples_ is expected


def test_regression_targets_of_another_shape() -> None:
    case = make_case("regression")
    with pytest.raises(ValueError, match="shape"):
        LinearisedLaplace(case.model, "regression").fit([(case.x, case.y[:, 0])], progress=False)


def test_nan_in_weights_outputs_and_loss() -> None:
    case = make_case("classification_many_data")
    broken = copy.deepcopy(case.model)
    with torch.no_grad():
        broken.bias[0] = float("nan")
    with pytest.raises(ValueError, match=r"weights.*NaN"):
        LinearisedLaplace(broken, "classification").fit(loader(case), progress=False)

    class Overflowing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / (x[:, :1] - case.x[7, :1])

    model = Overflowing(2, 3).double()
    with pytest.raises(ValueError, match="batch 2"):
        LinearisedLaplace(model, "classification").fit(loader(case, 3), progress=False)
    huge = copy.deepcopy(make_case("regression"))
    with pytest.raises(ValueError, match="loss"):
        LinearisedLaplace(huge.model, "regression").fit([(huge.x, huge.y + 1e300)], progress=False)


def test_a_model_that_is_random_in_evaluation_mode() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.5, training=True)

    case = make_case("classification_many_data")
    with pytest.raises(ValueError, match=r"F\.dropout"):
        LinearisedLaplace(Noisy(2, 3).double(), "classification").fit(loader(case), progress=False)


def test_a_model_whose_output_is_not_a_tensor() -> None:
    case = make_case("classification_many_data")

    class Tuple(nn.Linear):
        def forward(self, x: Tensor):  # pyright: ignore
            return super().forward(x), x

    with pytest.raises(TypeError, match=r"\btuple\b"):
        LinearisedLaplace(Tuple(2, 3).double(), "classification").fit(loader(case), progress=False)


def test_one_datum_without_the_axis_of_the_batch() -> None:
    x, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    la = LinearisedLaplace(nn.Linear(3, 3), "classification", num_samples=2).fit([(x, y)], progress=False)
    with pytest.raises(ValueError, match=r"x\[None\]"):
        la.predict(x[0])
    assert la.predict(x[0][None]).probs.shape == (1, 3)


def test_bad_predictions_and_samples() -> None:
    la = fitted(CLASSES)
    with pytest.raises(TypeError, match=r"\blist\b"):
        la.predict(CLASSES.x.tolist())
    with pytest.raises(ValueError, match="NaN"):
        la.predict(CLASSES.x / 0)
    with pytest.raises(ValueError, match="num_samples=65"):
        la.predict(CLASSES.x, num_samples=65)
    with pytest.raises(ValueError, match="num_samples"):
        la.sample(0)
    with pytest.raises(ValueError, match="max_steps"):
        la.fit_hyperparameters(loader(CLASSES), max_steps=0)


def test_a_path_of_evidence_needs_a_range() -> None:
    case = make_case("classification_many_data")
    la = LinearisedLaplace(case.model, "classification").fit(case.batches, progress=False)
    with pytest.raises(ValueError, match="decades"):
        la.evidence_path(decades=0)


def test_arrays_are_taken_as_inputs() -> None:
    la = fitted(CLASSES)
    assert torch.equal(la.predict(CLASSES.x.numpy()).outputs, la.predict(CLASSES.x).outputs)
    with pytest.raises(TypeError, match="complex128"):
        la.predict(CLASSES.x.numpy() + 0j)


def test_predictions_inside_of_transforms_are_refused() -> None:
    la = fitted(CLASSES)
    with pytest.raises(TypeError, match="vmap"):
        torch.func.vmap(lambda x: la.predict(x[None]).outputs)(CLASSES.x)
    with pytest.raises(TypeError, match=r"torch\.func"):
        torch.func.grad(lambda x: la.predict(x).outputs.sum())(CLASSES.x)


@pytest.mark.parametrize("value", [2.5, True, 0, "3"])
def test_numbers_of_samples_are_whole(value) -> None:
    with pytest.raises(ValueError, match="num_samples"):
        fitted(CLASSES).predict(CLASSES.x, num_samples=value)


def test_switches_are_true_or_false() -> None:
    with pytest.raises(TypeError, match="progress"):
        LinearisedLaplace(CLASSES.model, "classification").fit(loader(CLASSES), progress="no")  # pyright: ignore


def test_weights_that_are_too_large() -> None:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 1e38)
    with pytest.raises(ValueError, match=r"1e\+38"):
        LinearisedLaplace(model, "regression").fit([(torch.eye(2), torch.zeros(2, 1))], progress=False)


def test_weights_that_are_shared_out_over_processes() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, model = init_device_mesh("cpu", (1,)), nn.Linear(2, 1)
        for name, p in list(model.named_parameters()):
            model.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate()])))
        with pytest.raises(TypeError, match="DTensor"):
            LinearisedLaplace(model, "regression")
    finally:
        dist.destroy_process_group()
