from dataclasses import replace

import pytest
import reference
import torch
from cases import CASES, Case, make_case
from flat_settings import laplace_of
from grids import covering
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import Data, LinearisedLaplace, largest_variance
from laplace_sampling.linear_model.priors.as_prior import as_prior
from laplace_sampling.networks.memory import Batching
from laplace_sampling.networks.random_weights import Subnetwork


def chosen(case: Case, share: float = 0.4) -> tuple[dict[str, Tensor], Tensor]:
    """Random masks, and the indices of their elements in the flat vector of all trainable weights."""
    generator = torch.Generator().manual_seed(0)
    trainable = {name: p for name, p in case.model.named_parameters() if p.requires_grad}
    masks = {name: torch.rand(p.shape, generator=generator) < share for name, p in trainable.items()}
    return masks, torch.cat([mask.reshape(-1) for mask in masks.values()]).nonzero()[:, 0]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@covering(indirect=["case"], case=CASES, chunk_size=[1, 16])
def test_products_are_those_of_some_columns_of_the_jacobian(case: Case, chunk_size: int, monkeypatch) -> None:
    monkeypatch.setattr("laplace_sampling.networks.random_weights.NUMBERS_TOGETHER", 50)
    masks, index = chosen(case)
    monkeypatch.setattr(Batching, "chunk_size", chunk_size)
    network = Subnetwork(case.model, masks)
    J = reference.jacobian(case.model, case.x)[..., index]
    N, C, P = J.shape
    v, u = random(5, P), random(5, N, C)
    assert network.num_parameters == P == len(network.weights)
    assert_close(network.jvp(case.x, v), torch.einsum("ncp,kp->knc", J, v), rtol=1e-6, atol=1e-9)
    assert_close(network.vjp(case.x, u), torch.einsum("ncp,knc->kp", J, u), rtol=1e-6, atol=1e-9)
    assert_close(network.jacobian(case.x), J, rtol=1e-6, atol=1e-9)
    assert_close(network.vjp_each(case.x, u[0]), torch.einsum("ncp,nc->np", J, u[0]), rtol=1e-6, atol=1e-9)
    for rows in (v, v[:1]):
        expected = torch.einsum("ncp,ncq,kq->kp", J, 2 * J, rows)
        assert_close(network.ggn(case.x, rows, lambda u: 2 * u), expected, rtol=1e-6, atol=1e-9)
    assert_close(network.in_float64().jvp(case.x, v), network.jvp(case.x, v))


def test_weights_layers_and_unflatten() -> None:
    case = make_case("classification")
    masks, index = chosen(case)
    masks["2.weight"], masks["2.bias"] = torch.zeros_like(masks["2.weight"]), torch.zeros_like(masks["2.bias"])
    network = Subnetwork(case.model, masks)
    flat = torch.cat([p.detach().reshape(-1) for p in case.model.parameters()])
    assert torch.equal(network.weights, flat[index[index < 24]])
    assert network.names == ["0.weight", "0.bias"]
    names, groups = network.layers()
    assert names == ["0"]
    assert groups.tolist() == [0] * network.num_parameters
    back = network.unflatten(network.weights)
    assert torch.equal(back["0.weight"], case.model[0].weight * masks["0.weight"])


@pytest.mark.parametrize("method", ["exact", "krylov"])
def test_posterior_is_the_dense_one_of_these_columns(method: str) -> None:
    case = make_case("classification")
    masks, index = chosen(case)
    la = laplace_of(
        case.model, case.likelihood, parameters=masks, prior="isotropic", method=method,
        prior_precision=0.7, num_samples=1500,
    )  # fmt: skip
    la.fit([(case.x, case.y)], progress=False, tolerance=1e-4)
    J = reference.jacobian(case.model, case.x)
    M = reference.ggn(J[..., index], reference.curvature(case.likelihood, case.model(case.x).detach(), case.y))
    expected = J[:3][..., index].flatten(0, 1)
    expected = expected @ torch.linalg.solve(M + 0.7 * torch.eye(len(M)).double(), expected.T)
    error = ((expected.diagonal()[:, None] * expected.diagonal() + expected**2) / 1500).sqrt()
    found = la.predict(case.x[:3]).joint_covariance()
    if method == "exact":
        assert_close(found, expected, rtol=1e-8, atol=1e-10)
    else:
        assert ((found - expected).abs() < 5 * error).all()
    # It is that of all weights given that the others are at zero: what is left of H are its rows and columns.
    H = reference.ggn(J, reference.curvature(case.likelihood, case.model(case.x).detach(), case.y))
    H = H + 0.7 * torch.eye(len(H)).double()
    assert_close(H[index][:, index], M + 0.7 * torch.eye(len(M)).double())
    assert la.samples_.shape == (1500, len(index))


def test_saved_and_loaded(tmp_path) -> None:
    case = make_case("classification")
    masks, _ = chosen(case)
    la = LinearisedLaplace(case.model, case.likelihood, parameters=masks).fit([(case.x, case.y)], progress=False)
    la.save(tmp_path / "posterior.pt")
    loaded = LinearisedLaplace.load(tmp_path / "posterior.pt", case.model)
    assert_close(loaded.predict(case.x).samples, la.predict(case.x).samples)
    other = LinearisedLaplace(case.model, case.likelihood, parameters={name: ~mask for name, mask in masks.items()})
    with pytest.raises(ValueError, match="`parameters=`"):
        other.load_state_dict(la.state_dict())


def test_errors_say_what_to_do() -> None:
    model = nn.Linear(2, 3)
    with pytest.raises(ValueError, match="'head'"):
        Subnetwork(model, {"head": torch.ones(2)})
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        Subnetwork(model, {"weight": torch.ones(2, 3, dtype=torch.bool)})
    for wrong in ([0, 6], [1, 1], [-1]):
        with pytest.raises(ValueError, match=r"indices.*\b5\b"):
            Subnetwork(model, {"weight": wrong})
    with pytest.raises(ValueError, match="masks"):
        Subnetwork(model, {"bias": torch.zeros(3, dtype=torch.bool)})


# The choice ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", ["isotropic", "g-prior"])
def test_the_largest_marginal_variances_of_the_diagonal_posterior(prior: str) -> None:
    case = make_case("classification")
    masks = largest_variance(
        case.model,
        case.likelihood,
        [(case.x, case.y)],
        11,
        prior=replace(as_prior(prior), precision=0.3),
    )
    found = torch.cat([masks.get(n, torch.zeros_like(p)).reshape(-1) for n, p in case.model.named_parameters()]).bool()
    B = reference.curvature(case.likelihood, case.model(case.x).detach(), case.y)
    diagonal = reference.ggn(reference.jacobian(case.model, case.x), B).diagonal()
    variance = 1 / (diagonal + (0.3 if prior == "isotropic" else 0.3 * diagonal))
    assert int(found.sum()) == 11
    assert float(variance[found].min()) > float(variance[~found].max())
    la = LinearisedLaplace(case.model, case.likelihood, parameters=masks).fit([(case.x, case.y)], progress=False)
    assert la.network.num_parameters == 11


def test_weights_that_the_data_do_not_see_come_last() -> None:
    """An input that is always zero, and a unit that is never on."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double()
        x, y = torch.randn(20, 3).double(), torch.randn(20, 1).double()
    x[:, 1] = 0
    with torch.no_grad():
        model[0].bias[2] = -50
    masks = largest_variance(model, "regression", [(x, y)], 13)
    assert not masks["0.weight"][:, 1].any()
    assert not masks["0.weight"][2].any()
    assert not masks["0.bias"][2]
    assert not masks["2.weight"][:, 2].any()
    assert sum(int(mask.sum()) for mask in largest_variance(model, "regression", [(x, y)], 21).values()) == 21


def test_another_method_than_the_diagonal_is_refused() -> None:
    case = make_case("classification")
    with pytest.raises(ValueError, match="kfac"):
        largest_variance(case.model, case.likelihood, [(case.x, case.y)], 3, method="kfac")


def test_settings_go_to_the_posterior_and_k_is_checked() -> None:
    case = make_case("classification")
    data = [(case.x, {"y": case.y})]
    masks = largest_variance(
        case.model,
        case.likelihood,
        data,
        3,
        parameters="2.*",
        data=Data(unpack=lambda batch: (batch[0], batch[1]["y"])),
    )
    assert set(masks) <= {"2.weight", "2.bias"}
    with pytest.raises(ValueError, match="k=53"):
        largest_variance(case.model, case.likelihood, [(case.x, case.y)], 53)


def test_masks_are_numbers() -> None:
    model = nn.Linear(2, 3)
    for wrong in ("all", None):
        with pytest.raises(TypeError, match="numbers"):
            Subnetwork(model, {"weight": wrong})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"indices.*\b5\b"):
        Subnetwork(model, {"weight": [0.5, 1.5]})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="'epochs'"):
        largest_variance(model, "regression", [], 1, epochs=3)
    with pytest.raises(ValueError, match="k="):
        largest_variance(model, "regression", [], 2.5)  # pyright: ignore[reportArgumentType]
