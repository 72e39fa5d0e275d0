"""The temperature that the accuracy on new data gives, by folds that are left out."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from laplace_sampling import Accuracy, ClassificationPrediction, Data, LinearisedLaplace
from laplace_sampling.hyperparameters.left_out_folds import FOLDS, accuracy_of, left_out_steps, lengths_at
from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.likelihoods.weighted import weighted
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.solvers.solver import ConvergenceWarning

N, C, P = 50, 3, 12


def linear_model(likelihood: Likelihood) -> LinearModel:
    generator = torch.Generator().manual_seed(0)
    outputs = C if isinstance(likelihood, Categorical) else 2
    J = torch.randn(N, outputs, P, generator=generator, dtype=torch.float64)
    f = 2 * torch.randn(N, outputs, generator=generator, dtype=torch.float64)
    shape = (N,) if isinstance(likelihood, Categorical) else (N, outputs)
    y = torch.randint(outputs, shape, generator=generator)
    y = y if isinstance(likelihood, Categorical) else y.double()
    return LinearModel(DenseFeatures(J, batch_size=8), torch.zeros_like(f), f, y, likelihood)


def newton_steps(model: LinearModel, scale: Tensor, alpha: float) -> Tensor:
    """`φ_i (M_{−F} + αA₁)⁻¹ g_F` by dense algebra, from the derivatives of torch's own loss."""
    J, f, y = model.features.rows(torch.arange(N)), model.network_outputs, model.targets

    def loss(f: Tensor, i: int) -> Tensor:
        if isinstance(model.likelihood, Categorical):
            return F.cross_entropy(f[None], y[i][None])
        return F.binary_cross_entropy_with_logits(f, y[i], reduction="sum")

    g = torch.stack([torch.func.grad(loss)(f[i], i) for i in range(N)])
    B = torch.stack([torch.func.hessian(loss)(f[i], i) for i in range(N)])
    fold = torch.randperm(N, generator=torch.Generator().manual_seed(0)) % FOLDS
    steps = torch.zeros_like(f)
    for k in range(FOLDS):
        left, rest = fold == k, fold != k
        M = torch.einsum("icp,icd,idq->pq", J[rest], B[rest], J[rest])
        delta = torch.linalg.solve(M + alpha * torch.diag(scale**-2), torch.einsum("icp,ic->p", J[left], g[left]))
        steps[left] = J[left] @ delta
    return steps


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
@pytest.mark.parametrize("in_order", [False, True])
def test_steps_are_those_of_newton_without_each_fold_where_the_prior_decides(
    likelihood: Likelihood, in_order: bool
) -> None:
    model = linear_model(likelihood)
    scale = torch.linspace(0.5, 2, P, dtype=torch.float64)
    some = torch.arange(0, N, 2)
    found, all_found = (left_out_steps(model, scale, part, 0, in_order) for part in (some, torch.arange(N)))
    torch.testing.assert_close(found, all_found[some])
    expected = newton_steps(model, scale, 1e9)
    ratio = expected.norm() / all_found.norm()
    torch.testing.assert_close(ratio * all_found, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


def test_steps_are_of_a_length_at_which_labels_are_right_so_often() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(C, (20_000,), generator=generator)
    f = 5 * F.one_hot(y, C).double()
    steps = torch.randn(len(y), C, generator=generator, dtype=torch.float64)
    wanted = [0.95, 0.7, 0.45]
    lengths = lengths_at(Categorical(), f, steps, y, wanted)
    assert lengths == sorted(lengths)
    for length, accuracy in zip(lengths, wanted, strict=True):
        # The accuracy is curved between two lengths of the grid.
        assert accuracy_of(Categorical(), f + length * steps, y) == pytest.approx(accuracy, abs=0.015)
    never, always = lengths_at(Categorical(), f, steps, y, [1.01, 0.2])
    assert accuracy_of(Categorical(), f + never * steps, y) == 1
    assert accuracy_of(Categorical(), f + always * steps, y) == pytest.approx(1 / C, abs=0.02)


def test_accuracies_count_weights_missing_and_soft_labels() -> None:
    f = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 1.0], [0.0, 4.0]], dtype=torch.float64)
    y = torch.tensor([0, 0, -100, 1])
    assert accuracy_of(Categorical(), f, y) == pytest.approx(2 / 3)
    heavy, targets = weighted(Categorical(), y, torch.tensor([1.0, 2.0, 5.0, 1.0]))
    assert accuracy_of(heavy, f, targets) == pytest.approx(2 / 4)
    soft = torch.tensor([[0.9, 0.1], [0.5, 0.5], [math.nan, math.nan], [0.2, 0.8]], dtype=torch.float64)
    assert accuracy_of(Categorical(), f, soft) == pytest.approx((0.9 + 0.5 + 0.8) / 3)
    several = torch.tensor([[1.0, 1.0], [math.nan, 1.0], [0.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    assert accuracy_of(Bernoulli(), f - 0.5, several) == pytest.approx(4 / 7)


# A planted temperature ------------------------------------------------------------------------------------------------

INPUTS, NEW = 40, 20_000


def drawn(num: int, seed: int) -> tuple[Tensor, Tensor]:
    """Labels drawn from a softmax of linear logits."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(INPUTS, C, generator=torch.Generator().manual_seed(7)) / 3
    x = torch.randn(num, INPUTS, generator=generator)
    return x, torch.multinomial((x @ W).softmax(1), 1, generator=generator)[:, 0]


def overfitted(num: int, divisor: float = 1.0) -> tuple[nn.Module, DataLoader]:
    """A linear classifier at its least training loss, whose logits are then divided; and its training data."""
    x, y = drawn(num, 0)
    model = nn.Linear(INPUTS, C).requires_grad_(True)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=200)

    def loss() -> Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(model(x), y) + 1e-4 * model.weight.square().sum()
        loss.backward()
        return loss.detach()

    optimiser.step(loss)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        for weight in model.parameters():
            weight /= divisor
    return model, DataLoader(TensorDataset(x, y), 100)


def fitted(model: nn.Module, loader: Iterable[Any], **options: Any) -> LinearisedLaplace:
    la = LinearisedLaplace(model, "classification", num_samples=8)
    return la.fit_hyperparameters(loader, progress=False, **options)


def probs(la: LinearisedLaplace, x: Tensor) -> Tensor:
    pred = la.predict(x)
    assert isinstance(pred, ClassificationPrediction)
    return pred.probs


@pytest.mark.parametrize(("num", "divisor"), [(400, 1.0), (250, 1.0), (400, 5.0)])
def test_a_planted_temperature_is_found(num: int, divisor: float) -> None:
    model, loader = overfitted(num, divisor)
    x, y = drawn(NEW, 1)
    with torch.no_grad():
        f = model(x).double()
    accuracy = float((f.argmax(1) == y).double().mean())
    grid = torch.logspace(-1.5, 1.5, 301, dtype=torch.float64)
    losses = torch.stack([F.cross_entropy(f / T, y) for T in grid])
    best = float(grid[losses.argmin()])
    assert abs(math.log(best)) > 0.2  # there is something to find
    la = fitted(model, loader, accuracy=accuracy)
    # The accuracy of some hundred labels has a standard error of .02 to .03, and the temperature one of a tenth.
    assert math.log(la.temperature_) == pytest.approx(math.log(best), abs=0.25)
    gained = F.cross_entropy(f, y) - F.cross_entropy(f / la.temperature_, y)
    assert gained > 0.75 * (F.cross_entropy(f, y) - losses.min())
    # Probabilities are those at this temperature, apart from error bars.
    expected = (f[:50] / la.temperature_).softmax(1).float()
    torch.testing.assert_close(probs(la, x[:50]), expected, atol=0.1, rtol=0)
    assert la.calibration_.scale == 1


def test_it_is_one_mechanism_with_criteria_plans_files_and_later_fits(tmp_path: Path) -> None:
    model, loader = overfitted(250)
    la = fitted(model, loader, accuracy=0.6)
    assert fitted(model, loader, criterion=Accuracy(0.6)).temperature_ == la.temperature_
    # The more errors on new data, the less sure it is.
    assert fitted(model, loader, accuracy=0.5).temperature_ > la.temperature_ > 1
    assert fitted(model, loader).temperature_ == 1
    assert la.plan(loader, accuracy=0.6).epochs > la.plan(loader).epochs + 1
    la.save(tmp_path / "la.pt")
    loaded = LinearisedLaplace.load(tmp_path / "la.pt", model)
    assert loaded.temperature_ == la.temperature_
    x = drawn(20, 1)[0]
    torch.testing.assert_close(probs(loaded, x), probs(la, x))
    again = la.temperature_
    assert la.fit_hyperparameters(loader, accuracy=0.6, warm_start=True, progress=False).temperature_ == again
    # An accuracy that is known does not change which error bars are possible, only how sure predictions are.
    assert "accuracy=" not in str(la)
    assert "pass `val_loader`, or `accuracy=`" in str(fitted(model, loader))


def test_a_stream_gives_the_same_temperature() -> None:
    model, loader = overfitted(250)
    x, y = loader.dataset.tensors  # pyright: ignore[reportAttributeAccessIssue]

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return zip(x, y, strict=True)

    by_index = fitted(model, loader, accuracy=0.6)
    in_order = fitted(model, DataLoader(Stream(), 100), data=Data(num_data=250), accuracy=0.6)
    assert in_order.temperature_ == pytest.approx(by_index.temperature_, rel=1e-4)


@pytest.mark.parametrize("value", [93, 0, -0.5, math.nan, "0.9", True])
def test_it_is_a_part_of_one(value: Any) -> None:
    with pytest.raises(ValueError, match="`accuracy` must be positive and finite, and at most 1, a part of one"):
        Accuracy(value)


def test_what_says_nothing_is_refused_or_told() -> None:
    model, loader = overfitted(250)
    with pytest.raises(ValueError, match="above chance, 1/3 of 3 classes"):
        fitted(model, loader, accuracy=0.3)
    with pytest.raises(ValueError, match="give it or `val_loader`"):
        fitted(model, loader, accuracy=0.6, val_loader=loader)
    with pytest.raises(ValueError, match="give `accuracy` or `criterion`"):
        fitted(model, loader, accuracy=0.6, criterion="evidence")
    regression = LinearisedLaplace(nn.Linear(2, 1), "regression")
    with pytest.raises(ValueError, match="`accuracy` is that of labels"):
        regression.fit_hyperparameters([(torch.randn(9, 2), torch.randn(9, 1))], accuracy=0.9)
    x, _ = drawn(250, 0)
    others = DataLoader(TensorDataset(x, drawn(250, 5)[1]), 100)  # labels that the network was not trained on
    with pytest.warns(ConvergenceWarning, match="more than the network has on the training data"):
        fitted(model, others, accuracy=0.95)
    # Of certain labels a softmax in float64 leaves no gradient.
    with torch.no_grad():
        y = model(x).argmax(1)
        for weight in model.parameters():
            weight *= 1e6
    with pytest.warns(ConvergenceWarning, match="certain of all training labels"):
        assert fitted(model, DataLoader(TensorDataset(x, y), 100), accuracy=0.9).temperature_ == 1
