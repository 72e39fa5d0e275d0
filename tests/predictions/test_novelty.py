"""Novelty: p-values, invariance, a dense reference, networks of all kinds, files and messages."""

import io
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pretended_device import pretended_device
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import LinearisedLaplace, NotFittedError
from laplace_sampling.networks.layer_inputs import Features
from laplace_sampling.predictions.novelty import Novelty


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def network(seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))


def data(num: int = 200, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = normal(num, 5, seed=seed)
    return x, x[:, :3].argmax(1)


def prepared(model: nn.Module | None = None) -> LinearisedLaplace:
    la = LinearisedLaplace(model or network(), "classification", parameters="last_layer", num_samples=4)
    return la.calibrate_novelty([data()])


def features(num: int, seed: int, layers: int = 3, width: int = 6) -> Features:
    h = [normal(num, width, seed=100 * seed + n) @ normal(width, width, seed=n) for n in range(layers)]
    return Features.of(h)


def test_p_values_of_exchangeable_features_are_uniform() -> None:
    """Of 60 sets of training data, with the standard error between sets; with held-out data likewise."""
    levels = torch.tensor([0.1, 0.3, 0.5, 0.8])
    for held_out in (False, True):
        shares = []
        for seed in range(60):
            others = features(99, 2000 + seed) if held_out else None
            novelty = Novelty.of([], torch.zeros(0), features(99, seed), others)
            p = 1 - novelty([features(200, 1000 + seed)], 200)
            shares.append((p[:, None] <= levels + 1e-6).double().mean(0))
        found = torch.stack(shares)
        error = found.std(0) / math.sqrt(len(found))
        assert error.max() < 0.02
        assert ((found.mean(0) - levels).abs() < 3.5 * error + 0.005).all()


def dense_novelty(layers: list[Tensor], new: list[Tensor], labels: Tensor) -> Tensor:
    """By a loop over data, each left out of mean and scatter, and over reference data; ridges stay those of all."""
    n = len(layers[0])
    scales = [h.square().sum(1).mean().sqrt() for h in layers]

    def with_the_layer_before(of: list[Tensor]) -> list[Tensor]:
        scaled = [h / scale for h, scale in zip(of, scales, strict=True)]
        return [torch.cat(pair, 1) for pair in zip([torch.zeros_like(of[0]), *scaled[:-1]], scaled, strict=True)]

    both, both_new = with_the_layer_before(layers), with_the_layer_before(new)
    q, q_new = torch.zeros(len(both), n).double(), torch.zeros(len(both), len(new[0])).double()
    for number, (z, z_new) in enumerate(zip(both, both_new, strict=True)):
        d, S = z.shape[1], torch.cov(z.T, correction=0)
        t, s = S.trace(), (S @ S).trace()
        rho = min(1.0, float(((1 - 2 / d) * s + t**2) / ((n + 1 - 2 / d) * (s - t**2 / d))))
        ridge = rho * n * t / d * torch.eye(d).double()

        def distance(x: Tensor, rest: Tensor, rho: float = rho, ridge: Tensor = ridge) -> Tensor:
            r = rest - rest.mean(0)
            return (x - rest.mean(0)) @ torch.linalg.inv((1 - rho) * r.T @ r + ridge) @ (x - rest.mean(0))

        q[number] = torch.stack([distance(z[i], z[torch.arange(n) != i]) * (n - 1) / n for i in range(n)])
        q_new[number] = torch.stack([distance(x, z) for x in z_new])
    u, v = (h[-1] / h[-1].norm(dim=1, keepdim=True) for h in (layers, new))
    k = max(1, round(math.sqrt(n) / 7))
    near = torch.stack([(u[i] - u[torch.arange(n) != i]).norm(dim=1).sort().values[k - 1] for i in range(n)])
    unseen = torch.stack([(u[i] - u[labels != labels[i]]).norm(dim=1).sort().values[k - 1] for i in range(n)])
    p_unseen = torch.stack([(1 + (near >= d).sum()) / (n + 1) for d in unseen])
    w = max(0.1, 1 - (1 - 2 * float(p_unseen.mean())) ** 2)
    assert 0.2 < w < 0.9
    near_new = torch.stack([(x - u).norm(dim=1).sort().values[k - 1] for x in v])

    def p(reference: Tensor, value: Tensor, own: bool) -> float:
        return (int((reference >= value).sum()) + (not own)) / (n + (not own))

    def evidence(near_of: Tensor, sums_of: Tensor, own: bool) -> Tensor:
        ps = [(p(near, a, own), p(sums, b, own)) for a, b in zip(near_of, sums_of, strict=True)]
        return torch.tensor([(1 - w) / a + w / b for a, b in ps]).double()

    def sums_of(values: Tensor, own: bool) -> Tensor:
        logs = [[math.log(p(row, v, own)) for v in of] for row, of in zip(q, values, strict=True)]
        return -torch.tensor(logs).double().sum(0)

    sums = sums_of(q, True)
    reference, found = evidence(near, sums, True), evidence(near_new, sums_of(q_new, False), False)
    return torch.tensor([1 - p(reference, e - 1e-9, False) for e in found])


def test_it_is_what_a_loop_over_data_gives() -> None:
    model, x, new = (
        network().double(),
        data(120)[0].double(),
        torch.cat([normal(20, 5, seed=3), 3 * normal(20, 5, seed=4)]),
    )
    la = LinearisedLaplace(model, "classification").calibrate_novelty([(x, data(120)[1])])
    new = new.double()

    def inputs(x: Tensor) -> list[Tensor]:
        found = [x, model[:2](x), model[:4](x)]
        return [F.pad(h, (0, 12 - h.shape[1])) for h in found]

    with torch.no_grad():
        expected = dense_novelty(inputs(x), inputs(new), data(120)[1])
    assert_close(la.novelty_of(new), expected.double(), atol=1e-6, rtol=0)
    assert len(expected.unique()) > 10


def test_neighbours_count_by_how_well_classes_are_apart() -> None:
    """On clusters by class, of the same data with labels by chance, and of data without classes."""
    y = torch.arange(300) % 3
    x = 6 * F.one_hot(y, 5) + normal(300, 5)
    by_chance = y[torch.randperm(300, generator=torch.Generator().manual_seed(0))]
    apart, mixed, none = (
        LinearisedLaplace(nn.Linear(5, 3), likelihood).calibrate_novelty([(x, targets)])
        for likelihood, targets in (
            ("classification", y),
            ("classification", by_chance),
            ("regression", normal(300, 3)),
        )
    )
    weights = [float(la._novelty.weight) for la in (apart, mixed, none)]  # pyright: ignore
    assert weights[0] == weights[2] == pytest.approx(0.1)
    assert weights[1] > 0.95
    # The mean of all clusters is new by neighbours only.
    between = torch.tensor([[2.0, 2.0, 2.0, 0.0, 0.0]])
    assert apart.novelty_of(between) > 0.97
    assert mixed.novelty_of(between) < 0.9


def test_what_is_far_is_strange_and_training_data_are_not() -> None:
    la = prepared()
    x = data()[0]
    assert la.novelty_of(8 * normal(50, 5, seed=9)).quantile(0.1) > 0.95
    assert la.novelty_of(x).mean() < 0.7
    found = la.novelty_of(x)
    assert ((found >= 0) & (found <= 1)).all()


def test_it_hardly_depends_on_batches_their_order_and_the_scale_of_features() -> None:
    x, y = data()
    new, expected = 2 * normal(40, 5, seed=5), prepared().novelty_of(2 * normal(40, 5, seed=5))
    la = prepared()
    assert_close(torch.cat([la.novelty_of(part) for part in new.split(7)]), expected, atol=0.011, rtol=0)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    other = LinearisedLaplace(network(), "classification")
    batches = [(x[rows], y[rows]) for rows in order.split(33)]
    assert_close(other.calibrate_novelty(batches).novelty_of(new), expected, atol=0.011, rtol=0)
    scaled = network()
    with torch.no_grad():  # the hidden features are eight times as large, and the network computes the same
        for part, factor in ((scaled[0].weight, 8), (scaled[0].bias, 8), (scaled[2].weight, 1 / 8)):
            part.mul_(factor)
    assert_close(prepared(scaled).novelty_of(new), expected, atol=0.011, rtol=0)


def test_predictions_have_it_and_take_one_pass() -> None:
    model, (x, y), calls = network(), data(), []
    la = prepared(model)
    new = 2 * normal(30, 5, seed=5)
    expected = la.novelty_of(new)
    la.fit([(x, y)], progress=False)
    la.network.module.register_forward_hook(lambda *_: calls.append(1))
    assert_close(la.predict(new).novelty, expected)
    assert len(calls) == 1
    assert la.predict(new[:0]).novelty.shape == la.novelty_of(new[:0]).shape == (0,)
    found = la.predict_loader([new[:20], new[20:]], ["novelty", "probs"], progress=False)
    assert_close(found["novelty"], expected)
    everything = LinearisedLaplace(model, "classification", method="exact", num_samples=4).fit([(x, y)], progress=False)
    assert_close(everything.calibrate_novelty([(x, y)]).predict(new).novelty, expected)
    assert not any(part._forward_pre_hooks for part in la.network.module.modules())


def test_files_keep_it_and_fits_of_other_weights_undo_it() -> None:
    model, (x, y) = network(), data()
    la, new = prepared(model), 2 * normal(30, 5, seed=5)
    la.fit([(x, y)], progress=False)
    expected, file = la.novelty_of(new), io.BytesIO()
    la.save(file)
    file.seek(0)
    loaded = LinearisedLaplace.load(file, model)
    assert_close(loaded.predict(new).novelty, expected)
    assert_close(loaded.novelty_of(new), expected)
    la.fit([(x, y)], progress=False)
    assert_close(la.novelty_of(new), expected)
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    with pytest.raises(ValueError, match="changed in place"):
        la.novelty_of(new)
    la.fit([(x, y)], progress=False)
    with pytest.raises(NotFittedError, match="calibrate_novelty"):
        la.novelty_of(new)


def test_held_out_data_rank_inputs_of_a_network_that_knows_its_data() -> None:
    la, (x, y) = prepared(), data()
    held_out, new = 1.5 * normal(300, 5, seed=6), 1.5 * normal(500, 5, seed=7)
    assert la.novelty_of(new).mean() > 0.65
    la.calibrate_novelty([(x, y)], [(held_out, held_out[:, :3].argmax(1))])
    p = 1 - la.novelty_of(new)
    distance = (p.sort().values - torch.linspace(0, 1, 500)).abs().max()
    assert distance < 0.05 + 1.36 * math.sqrt(1 / 300 + 1 / 500)


class Functional(nn.Module):
    """A convolution, a recurrent layer with the time first, and functions in place of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.recurrent = nn.Conv1d(3, 6, 3, padding=1), nn.GRU(6, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.convolution(x), inplace=True)
        return self.head(self.recurrent(h.permute(2, 0, 1))[0][-1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 2), "b": nn.Linear(8, 1)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.layer(self.embed(x)).mean(1)
        return {name: head(h) for name, head in self.heads.items()}


def test_recurrent_and_functional_networks_have_features_of_each_datum() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Functional()
    la = LinearisedLaplace(model, "regression").calibrate_novelty([(normal(60, 3, 7), normal(60, 2))])
    layers = la._novelty.layers  # pyright: ignore
    assert [(layer.name, layer.axis) for layer in layers] == [("convolution", 0), ("recurrent", 1), ("head", 0)]
    assert la.novelty_of(20 * normal(8, 3, 7, seed=1)).median() > 0.9
    x = normal(7, 3, 7, seed=2)  # as many data as times
    assert_close(la.novelty_of(x), torch.cat([la.novelty_of(x[:3]), la.novelty_of(x[3:])]), atol=0.02, rtol=0)


def test_transformers_with_several_heads() -> None:
    x = torch.randint(4, (60, 6), generator=torch.Generator().manual_seed(0))
    y = {"a": x[:, 0] % 2, "b": normal(60, 1)}
    likelihood = {"a": "classification", "b": "poisson"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Attention()
    la = LinearisedLaplace(model, likelihood, num_samples=2)
    la.calibrate_novelty([(x, y | {"b": y["b"].exp().round()})])
    la.fit([(x, y | {"b": y["b"].exp().round()})], progress=False, budget=None)
    pred: Any = la.predict(torch.full((2, 6), 8))
    assert_close(pred.novelty, la.novelty_of(torch.full((2, 6), 8)))
    assert pred.novelty.min() > 0.9
    with pytest.raises(ValueError, match="several heads"):
        _ = pred["a"].novelty


def test_one_layer_missing_targets_and_constant_features_give_values() -> None:
    x = normal(300, 3)
    y = x.sum(1, keepdim=True)
    y[::3] = math.nan  # missing targets do not matter
    la = LinearisedLaplace(nn.Linear(3, 1), "regression").calibrate_novelty([(x, y)])
    assert la.novelty_of(torch.full((1, 3), 50.0)) > 0.9
    constant = LinearisedLaplace(nn.Linear(3, 1), "regression").calibrate_novelty([(torch.ones(300, 3), y)])
    assert_close(constant.novelty_of(torch.ones(2, 3)), torch.zeros(2))
    zero = LinearisedLaplace(nn.Linear(3, 1), "regression").calibrate_novelty([(torch.zeros(300, 3), y)])
    assert_close(zero.novelty_of(torch.zeros(2, 3)), torch.zeros(2))
    assert zero.novelty_of(torch.ones(1, 3)) > 0.9


def test_messages() -> None:
    x, y = data()
    la = LinearisedLaplace(network(), "classification", num_samples=2)
    with pytest.raises(NotFittedError, match="calibrate_novelty"):
        la.novelty_of(x)
    with pytest.raises(ValueError, match="10 or more"):
        la.calibrate_novelty([(x[:5], y[:5])])
    with pytest.raises(ValueError, match="two numbers or more"):
        LinearisedLaplace(nn.Linear(1, 1), "regression").calibrate_novelty([(x[:, :1], x[:, :1])])
    with pytest.raises(ValueError, match="NaN"):
        la.calibrate_novelty([(x, y)]).novelty_of(x * math.nan)
    with pytest.raises(ValueError, match=r"also for one datum, as `x\[None\]`"):
        la.novelty_of(x[0])
    with pytest.raises(TypeError, match=r"`novelty_of\(x\)` needs a tensor"):
        la.novelty_of("x")
    other = LinearisedLaplace(network(), "classification", method="exact", num_samples=2).fit([(x, y)], progress=False)
    with pytest.raises(ValueError, match=r"la.calibrate_novelty\(train_loader\)"):
        _ = other.predict(x).novelty
    with pytest.raises(ValueError, match="novelty"):
        other.calibrate_novelty([(x, y)]).to_module(outputs=["novelty"])


def test_data_on_the_cpu_and_a_network_on_a_device() -> None:
    x, y = data()
    expected = prepared().novelty_of(2 * x[:20])
    with pretended_device() as device:
        la = LinearisedLaplace(network().to(device), "classification", parameters="last_layer", num_samples=4)
        la.calibrate_novelty([(x, y)]).fit([(x, y)], progress=False)
        found = la.predict(2 * x[:20]).novelty
        assert found.device == device
        found = found.cpu()
    assert_close(found, expected, atol=0.011, rtol=0)
