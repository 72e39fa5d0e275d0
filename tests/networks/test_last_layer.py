import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flat_settings import laplace_of
from snapshot import assert_unchanged, snapshot
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from laplace_sampling import SGD, Categorical, Data, Gaussian, LinearisedLaplace
from laplace_sampling import predict as module_of_predict
from laplace_sampling.data.training_data import TrainingData
from laplace_sampling.networks import last_layer as module_of_last_layer
from laplace_sampling.networks.last_layer import LastLayer
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.random_weights import linearise


class Counted(nn.Module):
    """Adds to `counts` how many data go through it; a list among its attributes would be put back."""

    def __init__(self, body: nn.Module, counts: list[int]) -> None:
        super().__init__()
        self.body, self.count = body, counts.append

    def forward(self, x: Tensor) -> Tensor:
        self.count(len(x))
        return self.body(x)


def body(width: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, width), nn.Tanh())


class BackToFront(nn.Module):
    """Registered in another order than it is called in."""

    def __init__(self, counts: list[int] | None = None) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.body = Counted(body(), [] if counts is None else counts)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class NormAfter(nn.Module):
    """What follows the layer, a norm with weights of its own, is in one module with it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = body()
        self.top = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.body(x))


class ClassToken(nn.Module):
    """A matrix of the module around the layer, which finishes after it, is used before it."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.body, self.head = nn.Parameter(torch.zeros(1, 5)), body(), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x) + self.token)


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).squeeze(-1)


class Scaled(BackToFront):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 1.5


class Tied(nn.Module):
    """The weights of the last layer are used before it as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
        self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).tanh())


class Twice(nn.Module):
    """The last layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.head(self.body(x)).tanh())


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = body(), nn.Linear(5, 3), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x)
        return {"a": self.a(h), "b": self.b(h)}


class Lengths(nn.Module):
    """The layer is called with the whole sequence, padded to the longest of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).tanh())


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).tanh())


def randomised(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for p in model.double().parameters():
        p.data = 0.7 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return model


def data(num: int = 20, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num, 2, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (num,), generator=generator)


def numbers(la: LinearisedLaplace, loader, x: Tensor, tune: bool, **arguments) -> list[Tensor]:
    fit = la.fit_hyperparameters if tune else la.fit
    fit(loader, progress=False, tolerance=0.05, **arguments)
    pred = la.predict(x[:4])
    evidence = torch.tensor(float(la.log_marginal_likelihood()), dtype=torch.float64)
    return [la.samples_, la.mode_, la.prior_precision_, pred.samples, pred.variance, pred.covariance(), evidence]


def assert_same(
    model: nn.Module,
    names: list[str],
    loader,
    x: Tensor,
    likelihood="classification",
    tune=False,
    arguments=None,
    **settings,
) -> LinearisedLaplace:
    """All numbers of a fit with `"last_layer"` and by name are those of masks, whose products take the network."""
    weights = dict(model.named_parameters())
    masks = {name: torch.ones(weights[name].shape, dtype=torch.bool) for name in names}
    las = [
        laplace_of(model, likelihood, parameters=parameters, num_samples=8, **settings)
        for parameters in ("last_layer", names, masks)
    ]
    expected, *others = (numbers(la, loader, x, tune, **(arguments or {})) for la in reversed(las))
    for found in others:
        for left, right in zip(found, expected, strict=True):
            assert_close(left, right, rtol=1e-8, atol=1e-9)
    assert las[0].network.names == las[1].network.names == names
    return las[0]


@pytest.mark.parametrize("method", ["exact", "krylov"])
def test_equal_to_the_same_weights_by_name(method: str) -> None:
    model, (x, y) = randomised(BackToFront()), data()
    before = snapshot(model)
    la = assert_same(
        model,
        ["head.weight", "head.bias"],
        DataLoader(TensorDataset(x, y), 6, shuffle=True),
        x,
        tune=True,
        method=method,
    )
    assert la.network.layer == "head"
    assert_unchanged(model, before)


NETWORKS = {
    "norm_after": (NormAfter, ["top.0.weight", "top.0.bias"], "top"),
    "class_token": (ClassToken, ["head.weight", "head.bias"], "head"),
    "class_token_inside": (lambda: nn.Sequential(ClassToken()), ["0.head.weight", "0.head.bias"], "0.head"),
    "sequential": (lambda: nn.Sequential(body(), nn.Linear(5, 3)), ["1.weight", "1.bias"], "1"),
    "weight_norm": (
        lambda: nn.Sequential(body(), nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))),
        ["1.bias", "1.parametrizations.weight.original0", "1.parametrizations.weight.original1"],
        "1",
    ),
}


@pytest.mark.parametrize("name", list(NETWORKS))
def test_the_layer_and_what_is_run_again(name: str) -> None:
    make, names, root = NETWORKS[name]
    model, (x, y) = randomised(make()), data()
    la = assert_same(model, names, [(x, y)], x, method="krylov")
    assert la.network.head is not None
    assert la.network.head.module is la.network.module.get_submodule(root)


def test_outputs_of_another_shape_and_convolutions() -> None:
    model, (x, y) = randomised(Squeezed()), data()
    la = assert_same(model, ["head.weight", "head.bias"], [(x, y.double())], x, "regression", method="krylov")
    assert la.network.head is not None
    model, images = randomised(Convolution()), torch.randn(5, 1, 3, 3, dtype=torch.float64)
    loader = [(images, torch.randint(2, (5, 3, 3)))]
    la = assert_same(model, ["head.weight", "head.bias"], loader, images, method="krylov")
    assert la.network.head is not None


@pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning")
def test_every_datum_goes_through_the_body_once() -> None:
    counts: list[int] = []
    model, (x, y) = randomised(BackToFront(counts)), data(40)
    la = LinearisedLaplace(model, "classification", parameters="last_layer", method="krylov")
    la.fit_hyperparameters(DataLoader(TensorDataset(x, y), 4), progress=False)
    # Besides: the first batch again, to see whether outputs are random, and a few data, to find the layer, to compare
    # forward with reverse mode, and for the fingerprint of the function; and four to count operations of a gradient.
    assert 40 < sum(counts) <= 40 + 4 + 40 + 4
    counts.clear()
    la.log_marginal_likelihood()
    la.sample(3)
    assert counts == []


def test_weights_and_noise_variances_and_streams() -> None:
    model, (x, y) = randomised(BackToFront()), data()
    names, weights = ["head.weight", "head.bias"], torch.rand(20) + 0.5
    loader = DataLoader(TensorDataset(x, y), 6)
    assert_same(model, names, loader, x, method="krylov", arguments={"data": Data(weights=weights)})
    loader = DataLoader(TensorDataset(x, torch.randn(20, 3).double()), 6)
    assert_same(
        model, names, loader, x, "regression", method="exact", arguments={"data": Data(noise_variances=weights)}
    )

    class Stream(IterableDataset):
        def __iter__(self):
            return zip(x, y, strict=True)

    assert_same(model, names, DataLoader(Stream(), 6), x, method="krylov", arguments={"data": Data(num_data=20)})


def test_a_stream_whose_features_are_kept_has_mini_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = randomised(BackToFront()), data()
    monkeypatch.setattr("laplace_sampling.data.training_data.DEFAULT_CACHE_BYTES", 0)

    class Stream(IterableDataset):
        def __iter__(self):
            return zip(x, y, strict=True)

    settings = {"method": "sgd", "solver": SGD(tolerance=0.9, epochs=1, min_steps=20), "num_samples": 4}
    found = []
    for loader, num_data in ((DataLoader(Stream(), 6), 20), (DataLoader(TensorDataset(x, y), 6), None)):
        la = laplace_of(model, "classification", parameters="last_layer", **settings)
        found.append(la.fit(loader, data=Data(num_data=num_data), progress=False).samples_)
    assert_close(*found)


@pytest.mark.parametrize(
    ("make", "names", "why"),
    [
        (Scaled, ["head.weight", "head.bias"], "what `head` returns is changed before the network returns it"),
        (Twice, ["head.weight", "head.bias"], "what `head` returns is changed before the network returns it"),
        (Tied, ["first.weight", "head.bias"], "weights of `head` are used outside of `head` as well"),
    ],
)
def test_where_inputs_cannot_be_kept_products_take_the_network_and_say_so(make, names: list[str], why: str) -> None:
    model = randomised(make())
    x, y = data(classes=2)
    with pytest.warns(UserWarning, match="`head`") as w:
        la = assert_same(model, names, [(x, y)], x, method="krylov")
    assert [str(warning.message).endswith(f": {why}.") for warning in w] == [True]
    assert la.network.head is None


def test_inputs_of_different_shapes_or_too_large_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomised(Lengths())
    rows = [(torch.arange(1, 3 + n), torch.arange(2 + n) % 3) for n in range(4)]

    def padded(batch):
        x, y = zip(*batch, strict=True)
        pad = nn.utils.rnn.pad_sequence
        return pad(x, batch_first=True), pad(y, batch_first=True, padding_value=-100)

    loader = DataLoader(rows, 2, collate_fn=padded)
    la = LinearisedLaplace(model, Categorical(class_dim=-1), parameters="last_layer", method="krylov")
    with pytest.warns(UserWarning, match="rows"):
        la.fit(loader, progress=False)
    monkeypatch.setattr(module_of_last_layer, "free_memory", lambda device: 1000.0)
    model, (x, y) = randomised(BackToFront()), data(40)
    la = LinearisedLaplace(model, "classification", parameters="last_layer", method="krylov")
    with pytest.warns(UserWarning, match="bytes"):
        la.fit([(x, y)], progress=False)


def test_errors() -> None:
    x, _ = data()
    model = randomised(TwoHeads())
    la = LinearisedLaplace(model, {"a": "classification", "b": Gaussian(1.0, learn=False)}, parameters="last_layer")
    y = {"a": torch.zeros(20, dtype=torch.long), "b": torch.zeros(20, 1).double()}
    with pytest.raises(ValueError, match="heads"):
        la.fit([(x, y)], progress=False)
    with pytest.raises(ValueError, match="module"):
        LinearisedLaplace(nn.Tanh(), "regression", parameters="last_layer")


def test_products_of_the_whole_network_are_those_of_the_head() -> None:
    model, (x, _) = randomised(BackToFront()), data(6)
    network = LastLayer(model)
    whole = Linearisation(model, ["head.*"])
    generator = torch.Generator().manual_seed(2)
    v = torch.randn(3, 18, generator=generator, dtype=torch.float64)
    u = torch.randn(3, 6, 3, generator=generator, dtype=torch.float64)
    assert network.layer == "body.body.0"  # as yet, the one registered last
    network.find(x, 6, math.inf)
    assert network.layer == "head"
    head = network.head
    for network.head in (head, None):
        assert_close(network.jvp(x, v), whole.jvp(x, v))
        assert_close(network.vjp(x, u), whole.vjp(x, u))
        assert_close(network.vjp_each(x, u[0]), whole.vjp_each(x, u[0]))
        assert_close(network.jacobian(x), whole.jacobian(x))
        assert_close(network.ggn(x, v, lambda u: 2 * u), whole.ggn(x, v, lambda u: 2 * u))
        assert_close(network.in_float64().jvp(x, v), whole.jvp(x, v))
    # Autograd in the inputs goes through the whole network.
    x.requires_grad_()
    gradients = [torch.autograd.grad(n.jvp(x, v, graph=True).sum(), x)[0] for n in (network, whole)]
    assert_close(*gradients)
    gradients = [torch.autograd.grad((n.vjp(x, u, graph=True) ** 2).sum(), x)[0] for n in (network, whole)]
    assert_close(*gradients)
    gradients = [torch.autograd.grad((n.jacobian(x, graph=True) ** 2).sum(), x)[0] for n in (network, whole)]
    assert_close(*gradients)


def test_float32_keeps_its_features_and_predicts(tmp_path) -> None:
    model, (x, y) = randomised(BackToFront()).float(), data()
    la = LinearisedLaplace(model, "classification", parameters="last_layer", method="exact")
    la.fit([(x.float(), y)], progress=False)
    other = LinearisedLaplace(model, "classification", parameters=["head.*"], method="exact")
    other.fit([(x.float(), y)], progress=False)
    assert_close(la.predict(x.float()).variance, other.predict(x.float()).variance, rtol=1e-3, atol=1e-6)
    la.save(tmp_path / "posterior.pt")
    loaded = LinearisedLaplace(model, "classification", parameters="last_layer")
    loaded.load_state_dict(la.state_dict())
    assert loaded.network.layer == "head"
    assert_close(loaded.predict(x.float()).samples, la.predict(x.float()).samples)
    loaded = LinearisedLaplace.load(tmp_path / "posterior.pt", model)
    assert_close(loaded.predict(x.float()).samples, la.predict(x.float()).samples)


def test_a_linear_layer_by_name_keeps_its_inputs_where_it_can(tmp_path) -> None:
    model, (x, y) = randomised(BackToFront()), data()
    la = LinearisedLaplace(model, "classification", parameters=["head.*"], num_samples=4).fit([(x, y)], progress=False)
    assert isinstance(la.network, LastLayer)
    assert la.network.head is not None
    la.save(tmp_path / "head.pt")
    loaded = LinearisedLaplace.load(tmp_path / "head.pt", model)
    assert_close(loaded.predict(x).samples, la.predict(x).samples, rtol=1e-10, atol=1e-10)
    assert isinstance(loaded.network, LastLayer)
    assert loaded.network.named
    # A layer in the middle, and one of two heads: products take the whole network, as for any weights.
    first = LinearisedLaplace(model, "classification", parameters=["body.body.0.*"], num_samples=4)
    first.fit([(x, y)], progress=False).predict(x)
    assert first.network.names == ["body.body.0.weight", "body.body.0.bias"]
    assert isinstance(first.network, LastLayer)
    assert first.network.head is None
    heads = Linearisation(randomised(TwoHeads()), ["a.*"])
    network = linearise(heads.module, ["a.*"])
    with network.keep_inputs(TrainingData([(x, y)])) as kept:
        assert kept == []
    v = torch.ones(2, heads.num_parameters, dtype=torch.float64)
    assert_close(network.jvp(x, v), heads.jvp(x, v))


def test_a_fit_after_loading_keeps_inputs_too(tmp_path) -> None:
    counts: list[int] = []
    model, (x, y) = randomised(BackToFront(counts)), data()
    la = LinearisedLaplace(model, "classification", parameters="last_layer", method="krylov", prior="isotropic")
    la.fit([(x, y)], progress=False).save(tmp_path / "posterior.pt")
    loaded = LinearisedLaplace.load(tmp_path / "posterior.pt", model)
    assert_close(loaded.predict(x).samples, la.predict(x).samples)
    runs = []
    for each in (la, loaded):
        counts.clear()
        each.fit([(x, y)], progress=False)
        runs.append(sum(counts))
        assert each.network.head is not None
    assert runs[1] <= runs[0] + 2 * len(x)  # the layer is found again
    assert_close(loaded.samples_, la.samples_)


def test_inputs_of_the_layer_are_kept_from_all_parts_that_memory_holds() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = (x[:, 0] > 0).long()
    la = LinearisedLaplace(model, "classification", method="krylov", parameters="last_layer", num_samples=3)
    expected = la.fit([(x, y)], progress=False).predict(x).deviations
    la.network.batching.max_rows = 7
    assert_close(la.predict(x).deviations, expected)


class Changed(nn.Module):
    """A body and a head, whose output `forward` changes."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.change = nn.Sequential(nn.Linear(3, 8), nn.Tanh()), nn.Linear(8, 3), change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.head(self.body(x)), x)


def doubled_in_place(f: Tensor, x: Tensor) -> Tensor:
    f[x[:, 0] > 1] *= 2
    return f


CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "factor": lambda f, x: 2 * f,
    "temperature": lambda f, x: f / torch.tensor(1.7),
    "log_softmax": lambda f, x: f.log_softmax(-1),
    "in place": lambda f, x: f.mul_(2),
    # The data by which the layer is found are not changed by these, and others are.
    "bound": lambda f, x: torch.where(x[:, :1] > 1, f.clamp(-0.1, 0.1), f),
    "some data": lambda f, x: torch.where(x[:, :1] > 1, 2 * f, f),
    "some data in place": doubled_in_place,
}


def inputs_of_which_some_are_changed() -> Tensor:
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[:2, 0], x[2:4, 0] = 0.0, 1.5
    return x


def expected_deviations(model: nn.Module, x: Tensor, samples: Tensor) -> Tensor:
    """By forward mode through the whole network."""
    weights = {f"head.{name}": weight.detach() for name, weight in model.head.named_parameters()}
    tangents = {"head.weight": samples[:, :24].unflatten(1, (3, 8)), "head.bias": samples[:, 24:]}
    return vmap(lambda t: jvp(lambda w: functional_call(model, w, (x,)), (weights,), (t,))[1])(tangents)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("parameters", ["last_layer", ["head.*"]])
def test_a_head_whose_output_is_changed_takes_the_whole_network(change: str, parameters: Any) -> None:
    model, x = randomised(Changed(CHANGES[change])), inputs_of_which_some_are_changed()
    la = LinearisedLaplace(model, "classification", parameters=parameters, num_samples=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        la.fit([(x, torch.arange(30) % 3)], progress=False)
    assert isinstance(la.network, LastLayer)
    assert la.network.head is None
    assert any("inputs of `head` are not kept" in str(w.message) for w in caught) == (parameters == "last_layer")
    assert_close(la.predict(x).deviations, expected_deviations(model, x, la.samples_), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("change", ["bound", "some data"])
def test_outputs_that_are_changed_after_the_fit_only(
    change: str, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = randomised(Changed(CHANGES[change])), inputs_of_which_some_are_changed()
    seen = x[x[:, 0] <= 1]
    la = LinearisedLaplace(model, "classification", parameters=["head.*"], num_samples=4)
    la.fit([(seen, torch.arange(len(seen)) % 3)], progress=False)
    assert isinstance(la.network, LastLayer)
    assert la.network.head is not None
    assert_close(
        la.network.jvp(seen, la.samples_), expected_deviations(model, seen, la.samples_), rtol=1e-9, atol=1e-12
    )
    if in_parts:  # of which only the last is changed
        monkeypatch.setattr(module_of_predict, "_DATA_OF_OUTPUTS", 1)
        x = torch.cat([seen, x[x[:, 0] > 1]])
    pred = la.predict(x)
    assert_close(pred.deviations, expected_deviations(model, x, la.samples_), rtol=1e-9, atol=1e-12)
    rows = la.network.jacobian(x)
    assert_close(la.network.jvp(x, la.samples_), torch.einsum("ncp,kp->knc", rows, la.samples_), rtol=1e-9, atol=1e-12)
    # The posterior is that of the data of the fit, for which the closed form holds; dense algebra says the same.
    phi, p = la.network.jacobian(seen), model(seen).detach().softmax(-1)
    hessian = torch.einsum("ncp,ncd,ndq->pq", phi, torch.diag_embed(p) - p[:, :, None] * p[:, None], phi)
    inverse = (hessian + la.prior_precision_ * torch.eye(27, dtype=torch.float64)).inverse()
    assert_close(pred.covariance(), rows @ inverse @ rows.mT, rtol=1e-7, atol=1e-10)


class OfLessPrecision(nn.Module):
    """A network that lowers the precision of its own operations."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.head(self.body(x).tanh()).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_heads_of_less_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    low = OfLessPrecision() if dtype == torch.float32 else nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    names, weights = ["head.*" if dtype == torch.float32 else "2.*"], low.to(dtype).state_dict()
    full = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    full.load_state_dict(dict(zip(full.state_dict(), weights.values(), strict=True)))
    x = inputs_of_which_some_are_changed().float()
    of_both = []
    for model, of_head in ((low, names), (full, ["2.*"])):
        la = LinearisedLaplace(model, "classification", parameters=of_head, method="exact", num_samples=4)
        of_both.append(la.fit([(x, torch.arange(30) % 3)], progress=False).predict(x).covariance())
    assert_close(*of_both, rtol=0.05, atol=0.02 * float(of_both[1].max()))
