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
    with pytest.raises(NotFittedError, match=r"needs a fitted posterior: call `fit_hyperparameters\(loader\)`, `fit"):
        use(la)
    assert not hasattr(la, "samples_")  # as scikit-learn's checks expect of fitted attributes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"likelihood": "ordinal"}, "`likelihood='ordinal'` is not known"),
        ({"prior": "flat"}, "`prior='flat'` is not known"),
        ({"linear_model": "quadratic"}, r"`linear_model='quadratic'` is not known; use one of \['auto', 'affine'"),
        ({"hessian_at": "map"}, "`hessian_at='map'` is not known"),
        ({"method": "adam"}, "`method='adam'` is not known"),
        ({"seed": -1}, "`seed` must be a whole number of at least 0, but is -1"),
        ({"num_samples": 1}, "`num_samples` must be a whole number of at least 2, but is 1"),
        ({"parameters": "nothing"}, "match no parameter of the model"),
    ],
)
def test_bad_settings(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearisedLaplace(make_case("classification").model, **{"likelihood": "classification", **settings})


def test_bad_settings_of_parts() -> None:
    with pytest.raises(TypeError, match=r"`Stochastic\(solver=...\)` must be an SGD or an SVRG, but is a str"):
        Stochastic(solver="adam")
    with pytest.raises(ValueError, match=r"`IsotropicPrior\(precision=...\)` must be positive and finite, but is 0.0"):
        IsotropicPrior(precision=0.0)
    with pytest.raises(ValueError, match=r"`Dual\(rank=...\)` must be a whole number of at least 0, but is -1"):
        Dual(rank=-1)
    with pytest.raises(ValueError, match="is not known; use one of"):
        Factored(kind="full")


class Augmented(Dataset):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, i: int):
        return CLASSES.x[i] + torch.rand(2), CLASSES.y[i]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([(CLASSES.x, CLASSES.y.double())], TypeError, r"labels must be integers, but have dtype torch.float64"),
        ([(CLASSES.x, CLASSES.y + 5)], ValueError, r"must lie between 0 and 2 for 3 outputs"),
        ([(CLASSES.x, CLASSES.y[:, None])], ValueError, r"must have shape \[25\] for outputs .*, but have \[25, 1\]"),
        ([(CLASSES.x / 0, CLASSES.y)], ValueError, r"Batch 0 .* has NaN or infinity in its inputs"),
        ([], ValueError, "The loader is empty"),
        (iter([(CLASSES.x, CLASSES.y)]), TypeError, "one-shot iterator"),
        (DataLoader(Augmented(), batch_size=3), ValueError, "different data at each pass"),
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
    with pytest.raises(ValueError, match=r"must have the shape of the model's output, \[7, 1\], but have \[7\]"):
        LinearisedLaplace(case.model, "regression").fit([(case.x, case.y[:, 0])], progress=False)


def test_nan_in_weights_outputs_and_loss() -> None:
    case = make_case("classification_many_data")
    broken = copy.deepcopy(case.model)
    with torch.no_grad():
        broken.bias[0] = float("nan")
    with pytest.raises(ValueError, match="weights of the model contain NaN or infinity"):
        LinearisedLaplace(broken, "classification").fit(loader(case), progress=False)

    class Overflowing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / (x[:, :1] - case.x[7, :1])

    model = Overflowing(2, 3).double()
    with pytest.raises(ValueError, match=r"gives NaN or infinity on batch 2 \(counted from 0\)"):
        LinearisedLaplace(model, "classification").fit(loader(case, 3), progress=False)
    huge = copy.deepcopy(make_case("regression"))
    with pytest.raises(ValueError, match="loss of the model on the data is not finite"):
        LinearisedLaplace(huge.model, "regression").fit([(huge.x, huge.y + 1e300)], progress=False)


def test_a_model_that_is_random_in_evaluation_mode() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.5, training=True)

    case = make_case("classification_many_data")
    with pytest.raises(ValueError, match=r"different outputs for the same input in evaluation mode.*F.dropout"):
        LinearisedLaplace(Noisy(2, 3).double(), "classification").fit(loader(case), progress=False)


def test_a_model_whose_output_is_not_a_tensor() -> None:
    case = make_case("classification_many_data")

    class Tuple(nn.Linear):
        def forward(self, x: Tensor):  # pyright: ignore
            return super().forward(x), x

    with pytest.raises(TypeError, match="returned a tuple, not a tensor"):
        LinearisedLaplace(Tuple(2, 3).double(), "classification").fit(loader(case), progress=False)


def test_one_datum_without_the_axis_of_the_batch() -> None:
    x, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    la = LinearisedLaplace(nn.Linear(3, 3), "classification", num_samples=2).fit([(x, y)], progress=False)
    with pytest.raises(
        ValueError, match=r"gives outputs \[3\] for x, but those of the training data were \[N, 3\]. .*`x\[None\]`"
    ):
        la.predict(x[0])
    assert la.predict(x[0][None]).probs.shape == (1, 3)


def test_bad_predictions_and_samples() -> None:
    la = fitted(CLASSES)
    with pytest.raises(TypeError, match=r"`predict\(x\)` needs a tensor, .* but got list"):
        la.predict(CLASSES.x.tolist())
    with pytest.raises(ValueError, match=r"x contains NaN or infinity"):
        la.predict(CLASSES.x / 0)
    with pytest.raises(ValueError, match=r"needs a batch of inputs .* got \[0, 2\]"):
        la.predict(CLASSES.x[:0])
    with pytest.raises(ValueError, match=r"`predict\(num_samples=65\)`: there are 64 samples, .* construct"):
        la.predict(CLASSES.x, num_samples=65)
    with pytest.raises(ValueError, match=r"`sample\(num_samples\)` must be a whole number of at least 1, but is 0"):
        la.sample(0)
    with pytest.raises(
        ValueError, match=r"`fit_hyperparameters\(max_steps=...\)` must be a whole number of at least 1"
    ):
        la.fit_hyperparameters(loader(CLASSES), max_steps=0)


def test_a_path_of_evidence_needs_a_range() -> None:
    case = make_case("classification_many_data")
    la = LinearisedLaplace(case.model, "classification").fit(case.batches, progress=False)
    with pytest.raises(ValueError, match=r"`evidence_path\(decades=...\)` must be positive and finite, and at most 12"):
        la.evidence_path(decades=0)


def test_arrays_are_taken_as_inputs() -> None:
    la = fitted(CLASSES)
    assert torch.equal(la.predict(CLASSES.x.numpy()).outputs, la.predict(CLASSES.x).outputs)
    with pytest.raises(TypeError, match=r"weights are in torch.float64, fails on inputs in torch.complex128"):
        la.predict(CLASSES.x.numpy() + 0j)


def test_predictions_inside_of_transforms_are_refused() -> None:
    la = fitted(CLASSES)
    with pytest.raises(TypeError, match=r"does not work inside a transform of `torch.func`, such as `vmap`"):
        torch.func.vmap(lambda x: la.predict(x[None]).outputs)(CLASSES.x)
    with pytest.raises(TypeError, match=r"does not work inside a transform of `torch.func`"):
        torch.func.grad(lambda x: la.predict(x).outputs.sum())(CLASSES.x)


@pytest.mark.parametrize("value", [2.5, True, 0, "3"])
def test_numbers_of_samples_are_whole(value) -> None:
    with pytest.raises(ValueError, match=r"`predict\(num_samples=...\)` must be a whole number of at least 1, but is"):
        fitted(CLASSES).predict(CLASSES.x, num_samples=value)


def test_switches_are_true_or_false() -> None:
    with pytest.raises(TypeError, match="`progress` must be True or False, but is 'no'"):
        LinearisedLaplace(CLASSES.model, "classification").fit(loader(CLASSES), progress="no")  # pyright: ignore


def test_weights_that_are_too_large() -> None:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 1e38)
    with pytest.raises(
        ValueError, match=r"loss of the model on the data is not finite.* whose largest output is 1e\+38"
    ):
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
        with pytest.raises(TypeError, match=r"`weight` of the model is a DTensor.*`fully_shard` alone.*full weights"):
            LinearisedLaplace(model, "regression")
    finally:
        dist.destroy_process_group()
