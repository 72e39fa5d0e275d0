"""Every form of inputs and loaders gives the posterior of the same data as one tensor."""

import itertools
from collections import UserDict
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from flat_settings import laplace_of
from grids import covering
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from laplace_sampling import SGD, Categorical, Data, LinearisedLaplace
from laplace_sampling.data.training_data import TrainingData
from laplace_sampling.linear_model import linear_model as tangent_model

generator = torch.Generator().manual_seed(0)
A = torch.randn(9, 2, generator=generator, dtype=torch.float64)
B = torch.randn(9, 1, generator=generator, dtype=torch.float64)
Y = torch.randint(3, (9,), generator=generator)
VALUES = torch.randn(9, 3, generator=generator, dtype=torch.float64)


class Inputs(nn.Module):
    """A network of `a` and `b`, whatever form they come in."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, a: Any, b: Tensor | None = None, scale: float = 1.0) -> Tensor:
        if isinstance(a, dict):
            a, b = a["a"], a["b"]
        return self.body(a if b is None else scale * torch.cat([a, b], dim=1))


def network(seed: int = 0) -> Inputs:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Inputs(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))).double()


def fit(loader: Any, likelihood: str = "classification", **settings: Any) -> LinearisedLaplace:
    options = {name: settings.pop(name) for name in ("unpack", "num_data", "weights") if name in settings}
    given = settings.pop("data", Data(**options))
    la = laplace_of(network(), likelihood, prior="isotropic", num_samples=4, **settings)
    return la.fit(loader, progress=False, data=given)


class Rows(Dataset):
    """A map-style dataset of samples made by a function of the index."""

    def __init__(self, make: Any, num: int = 9) -> None:
        self.make, self.num = make, num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> Any:
        return self.make(i)


class Stream(IterableDataset):
    def __init__(self, endless: bool = False) -> None:
        self.endless = endless

    def __iter__(self) -> Iterator[Any]:
        yield from zip(torch.cat([A, B], 1), Y, strict=True)
        while self.endless:
            yield torch.zeros(3).double(), torch.tensor(0)


X = torch.cat([A, B], dim=1)
FORMS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "dataset": (TensorDataset(X, Y), {}, X),
    "triples": (TensorDataset(A, B, Y), {"unpack": lambda batch: (batch[:2], batch[2])}, (A, B)),
    "nested": (
        DataLoader(Rows(lambda i: (({"a": A[i], "b": B[i]},), Y[i])), batch_size=2),
        {},
        ({"a": A, "b": B},),
    ),
    "labels": (DataLoader(Rows(lambda i: {"a": A[i], "b": B[i], "labels": Y[i]}), batch_size=4), {}, {"a": A, "b": B}),
    "mapping": ([UserDict(a=A, b=B, labels=Y, scale=1.0)], {}, UserDict(a=A, b=B)),
    "list": (list(zip(X.split(4), Y.split(4), strict=True)), {}, X),
    "stream": (DataLoader(Stream(), batch_size=4), {"num_data": 9}, X),
    "endless": (Stream(endless=True), {"num_data": 9}, X),
}


# The same few steps for all: they need not have converged.
HASTY = SGD(epochs=1, mode_epochs=1, min_steps=20, batch_size=4)


@pytest.mark.filterwarnings("ignore:The posterior has not converged:laplace_sampling.ConvergenceWarning")
@covering(form=FORMS, method=["exact", "krylov", "sgd"])
def test_every_form_is_the_same_posterior(form: str, method: str) -> None:
    data, options, x = FORMS[form]
    settings = {"method": method, "solver": HASTY if method == "sgd" else None}
    plain, other = fit([(X, Y)], **settings), fit(data, **settings, **options)
    exactness = {"rtol": 1e-6, "atol": 1e-8}
    assert_close(other.samples_, plain.samples_, **exactness)
    found, expected = other.predict(x), plain.predict(X)
    assert torch.equal(found.outputs, expected.outputs)
    assert_close(found.samples, expected.samples, **exactness)
    assert_close(found.variance, expected.variance, **exactness)


@pytest.mark.parametrize("form", ["triples", "nested", "labels"])
def test_exact_regressions_are_saved_with_inputs_of_every_form(form: str, tmp_path) -> None:
    _, options, x = FORMS[form]
    data = {
        "triples": TensorDataset(A, B, VALUES),
        "nested": [(({"a": A, "b": B},), VALUES)],
        "labels": [{"a": A, "b": B, "labels": VALUES, "scale": 2.0}],
    }[form]
    la = fit(data, "regression", method="exact", **options)
    assert len(la.state_dict()["posterior"]["exact"]["inputs"]) > 0
    la.save(tmp_path / "la.pt")
    loaded = LinearisedLaplace.load(tmp_path / "la.pt", network())
    assert torch.equal(loaded.predict(x).variance, la.predict(x).variance)
    assert torch.equal(loaded.predict(x).samples, la.predict(x).samples)


def test_half_precision_inputs_are_widened() -> None:
    half = X.half()
    found, expected = fit([(half, Y)], method="exact"), fit([(half.double(), Y)], method="exact")
    assert_close(found.samples_, expected.samples_)
    assert torch.equal(found.predict(half).outputs, expected.predict(half.double()).outputs)


# Streams -----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tangent_model, "TrainingData", partial(TrainingData, cache_bytes=0))


@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("method", ["exact", "krylov", "dual"])
def test_a_stream_that_is_not_kept_is_read_again(method: str) -> None:
    likelihood, targets = ("regression", VALUES) if method == "dual" else ("classification", Y)

    class Pairs(Stream):
        def __iter__(self) -> Iterator[Any]:
            return iter(zip(X, targets, strict=True))

    la = fit(DataLoader(Pairs(), batch_size=4), likelihood, method=method, data=Data(num_data=9))
    assert la._fitted.tangent.data.in_order
    plain = fit([(X, targets)], likelihood, method=method)
    assert_close(la.samples_, plain.samples_, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("no_cache")
def test_a_stream_that_is_not_kept_has_no_mini_batches() -> None:
    loader = DataLoader(Stream(), batch_size=4)
    with pytest.raises(ValueError, match="krylov"):
        fit(loader, method="sgd", data=Data(num_data=9))
    data = TrainingData(loader, num_data=9, cache_bytes=0)
    assert torch.equal(data.inputs(torch.arange(5, 8)), X[5:8])
    assert torch.equal(data.inputs(torch.arange(2)), X[:2])
    # In any order, by a pass.
    assert torch.equal(data.inputs(torch.tensor([3, 8, 1, 3])), X[[3, 8, 1, 3]])


@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_default_fits_take_a_stream_that_is_not_kept(likelihood: str) -> None:
    """Rules that look at some of the data, and parts of the data, take others than neighbours."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 3, generator=generator)
    y = x[:, :2].argmax(1) if likelihood == "classification" else x[:, :2].sin()

    class Pairs(IterableDataset):
        def __iter__(self) -> Any:
            return iter(zip(x, y, strict=True))

    torch.manual_seed(0)
    la = LinearisedLaplace(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), likelihood, num_samples=4)
    la.fit_hyperparameters(DataLoader(Pairs(), batch_size=32), data=Data(num_data=300), progress=False)
    assert la._fitted.tangent.data.in_order
    assert bool(la.samples_.isfinite().all())


def test_a_stream_needs_its_length() -> None:
    with pytest.raises(ValueError, match="Data\\(num_data="):
        fit(Stream())
    with pytest.raises(ValueError, match="num_data=12"):
        fit(Stream(), data=Data(num_data=12))
    with pytest.raises(ValueError, match="`num_data`"):
        fit([(X, Y)], data=Data(num_data=9))


def test_errors_in_data_that_are_not_used_are_ignored() -> None:
    class Torn(IterableDataset):
        def __iter__(self):
            yield from zip(X[:6], Y[:6], strict=True)
            raise OSError("the tape is torn")

    assert TrainingData(DataLoader(Torn(), batch_size=3), num_data=6).num_data == 6


# Sequences ---------------------------------------------------------------------------------------------------

LENGTHS = [2, 5, 3, 4, 1, 5, 2]
IDS = [torch.randint(1, 7, (length,), generator=generator) for length in LENGTHS]
TAGS = [torch.randint(3, (length,), generator=generator) for length in LENGTHS]


class Tagger(nn.Module):
    """A label for each token, from its embedding and the mean of all that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.embedding(ids)
        mean = (h * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        return self.head((h + mean).tanh())


def padded(rows: list[int], length: int) -> tuple[Any, Tensor]:
    ids, tags = torch.zeros(len(rows), length, dtype=torch.long), torch.full((len(rows), length), -100)
    for n, i in enumerate(rows):
        ids[n, : LENGTHS[i]], tags[n, : LENGTHS[i]] = IDS[i], TAGS[i]
    return {"ids": ids, "mask": (ids > 0).double()}, tags


def collate(rows: list[int]) -> tuple[Any, Tensor]:
    return padded(rows, max(LENGTHS[i] for i in rows))


def tagger(data: Any, **settings: Any) -> LinearisedLaplace:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Tagger().double()
    la = laplace_of(model, Categorical(class_dim=-1), num_samples=3, **settings)
    return la.fit(data, progress=False)


@pytest.mark.filterwarnings("ignore:The posterior has not converged:laplace_sampling.ConvergenceWarning")
@pytest.mark.parametrize("method", ["exact", "krylov", "sgd", "diagonal", "kfac"])
def test_padding_and_batching_do_not_matter(method: str) -> None:
    everything = padded(list(range(7)), 5)
    expected = tagger([everything], method=method, solver=HASTY if method == "sgd" else None)
    exactness = {"rtol": 1e-5, "atol": 1e-6}
    for batch_size, shuffle in ((2, True), (3, False)):
        loader = DataLoader(Rows(lambda i: i, 7), batch_size=batch_size, shuffle=shuffle, collate_fn=collate)
        found = tagger(loader, method=method, solver=HASTY if method == "sgd" else None)
        assert found._fitted.tangent.data.ragged
        assert_close(found.samples_, expected.samples_, **exactness)
    if method in ("diagonal", "kfac"):  # samples of others are of noise in each output, of which there are more
        assert_close(tagger([padded(list(range(7)), 9)], method=method).samples_, expected.samples_, **exactness)
    short = found.predict(collate([0, 4])[0])
    assert short.samples.shape == (3, 2, 2, 3)
    assert_close(short.samples[:, 0], found.predict(everything[0]).samples[:, 0, :2])


def test_ready_made_batches_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="collate_fn"):
        tagger([collate([0, 1]), collate([2, 4])])


def test_labels_in_bytes_are_padded_as_others() -> None:
    def targets(dtype: torch.dtype) -> Tensor:
        def collated(rows: list[int]) -> tuple[Any, Tensor]:
            x, tags = collate(rows)
            return x, tags.clamp(min=0).to(dtype)

        return TrainingData(DataLoader(Rows(lambda i: i, 7), batch_size=2, collate_fn=collated), fill=-100).targets

    assert torch.equal(targets(torch.uint8), targets(torch.long))
    assert int(targets(torch.uint8).min()) == -100


def test_targets_of_different_lengths_are_padded_for_labels_only() -> None:
    loader = DataLoader(Rows(lambda i: i, 7), batch_size=2, collate_fn=lambda rows: (collate(rows)[0]["mask"],) * 2)
    with pytest.raises(ValueError, match="ignore_index"):
        fit(loader, "regression")


# Weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("likelihood", "method"),
    [
        *itertools.product(["classification", "regression", "binary", "poisson"], ["exact", "krylov"]),
        *itertools.product(["classification", "binary"], ["diagonal", "kfac"]),
    ],
)
def test_a_weight_of_two_is_the_datum_twice(likelihood: str, method: str) -> None:
    targets = {
        "classification": Y,
        "regression": VALUES,
        "binary": (VALUES > 0).double(),
        "poisson": VALUES.abs().round(),
    }[likelihood]
    twice = [(torch.cat([X, X[:3]]), torch.cat([targets, targets[:3]]))]
    weights = torch.tensor([2.0] * 3 + [1.0] * 6)
    settings = {"method": method, "num_samples": 2, "linear_model": "homogeneous"}
    found = laplace_of(network(), likelihood, prior="isotropic", **settings)
    found.fit([(X, targets)], data=Data(weights=weights), progress=False)
    expected = laplace_of(network(), likelihood, prior="isotropic", **settings).fit(twice, progress=False)
    assert_close(found.mode_, expected.mode_, rtol=1e-4, atol=1e-5)
    assert_close(found.effective_dimension_.sum() > 0, torch.tensor(True))
    if method != "krylov":
        assert_close(found.predict(X).variance, expected.predict(X).variance, rtol=1e-4, atol=1e-6)
    if method == "exact":
        assert_close(found.predict(X).variance, expected.predict(X).variance)
        if likelihood != "regression":
            values = [float(la.log_marginal_likelihood().value) for la in (found, expected)]
            assert values[0] == pytest.approx(values[1], rel=1e-6)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"weights": torch.ones(4)}, "shape"),
        ({"weights": -torch.ones(9)}, r"weights.*finite"),
        ({"weights": torch.zeros(9)}, r"weights.*finite"),
        ({"weights": torch.full((9,), torch.nan)}, r"weights.*finite"),
        ({"weights": "balanced"}, "balanced"),
        ({"unpack": lambda batch: batch[0]}, "Tensor"),
        ({"unpack": lambda batch: (*batch, 1)}, r"\['Tensor', 'Tensor', 'int'\]"),
    ],
)
def test_weights_and_batches_that_are_none_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        fit([(X, Y)], **wrong)


def test_weights_of_a_regression_are_no_noise_variances() -> None:
    ones = torch.ones(9)
    with pytest.raises(ValueError, match="Subset"):
        fit([(X, VALUES)], "regression", data=Data(weights=torch.tensor([0.0] + [1.0] * 8)))
    with pytest.raises(ValueError, match="1/noise_variances"):
        LinearisedLaplace(network(), "regression").fit([(X, VALUES)], data=Data(weights=ones, noise_variances=ones))


def test_numbers_of_numpy_for_a_network_in_float32() -> None:
    la = LinearisedLaplace(nn.Linear(3, 3), "classification", num_samples=4)
    with pytest.raises(ValueError, match="numpy"):
        la.fit([(X, Y)], progress=False)
    la.fit([(X.float(), Y)], progress=False)
    with pytest.raises(ValueError, match="float64"):
        la.predict(X)


def test_weights_do_not_scale_densities() -> None:
    settings = {"method": "exact", "data": Data(weights=torch.full((9,), 2.0))}
    la = fit([(X, Y)], **settings)
    assert la.predict(X).log_prob(Y).mean() > -2
    loo = la.leave_one_out().log_prob
    assert_close(loo.exp() <= 1, torch.ones(9, dtype=torch.bool))
    assert float(loo.mean()) > 2 * float(la.predict(X).log_prob(Y).mean())
