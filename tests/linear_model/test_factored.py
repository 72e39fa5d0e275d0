"""Diagonal and Kronecker-factored curvature, against dense algebra."""

import pytest
import reference
import torch
from cases import Case, make_case
from snapshot import assert_unchanged, snapshot
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling import Categorical, Gaussian, LinearisedLaplace
from laplace_sampling.linear_model import kfac
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.factored import factored_curvature
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.kronecker import Kronecker
from laplace_sampling.linear_model.priors.isotropic_prior import IsotropicPrior
from laplace_sampling.linear_model.sampling import sample_posterior
from laplace_sampling.solvers.krylov import CG
from laplace_sampling.solvers.preconditioners import Factored


def curvature(case: Case, kind: str) -> tuple[Factored, GGN]:
    model = case.linear_model()
    ggn = model.ggn(model.network_outputs)
    return factored_curvature(kind, ggn, 0), ggn


def dense(found: Factored, size: int) -> Tensor:
    return found.matmul(torch.eye(size, dtype=torch.float64))


def reference_ggn(case: Case) -> Tensor:
    f = case.linear_model().network_outputs
    return reference.ggn(reference.jacobian(case.model, case.x), reference.curvature(case.likelihood, f, case.y))


def test_the_diagonal_is_that_of_the_dense_ggn(case: Case) -> None:
    found, _ = curvature(case, "diagonal")
    assert_close(found.eigenvalues(), reference_ggn(case).diagonal(), rtol=1e-6, atol=1e-10)


def test_factors_keep_what_factors_exactly(case: Case) -> None:
    """The diagonal of weights that are in no layer, and the rank and the sum of a layer's output factor."""
    found, ggn = curvature(case, "kfac")
    assert isinstance(found, Kronecker)
    assert found.size == ggn.size
    M = dense(found, ggn.size)
    assert_close(M, M.T)
    exact = reference_ggn(case)
    assert_close(M[found.rest][:, found.rest], torch.diag(exact.diagonal()[found.rest]), rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("bias", [True, False])
def test_kfac_is_exact_for_one_datum_and_linear_networks(bias: bool) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer, x = nn.Linear(3, 4, bias=bias).double(), torch.randn(9, 3).double()
        one = Case(layer, Categorical(), x[:1], torch.tensor([2]))
        many = Case(layer, Gaussian(2.0), x, torch.randn(9, 4).double())
        patches = nn.Conv2d(2, 3, 2, stride=2, bias=bias).double()
        image = Case(nn.Sequential(patches, nn.Flatten()), Categorical(), torch.randn(1, 2, 2, 2).double(), one.y)
    for case in (one, many, image):
        found, ggn = curvature(case, "kfac")
        assert isinstance(found, Kronecker)
        assert len(found.rest) == 0
        assert_close(dense(found, ggn.size), reference_ggn(case))


def test_blocks_are_the_formula() -> None:
    case = make_case("classification")
    found, ggn = curvature(case, "kfac")
    assert isinstance(found, Kronecker)
    first, _, last = case.model
    x = case.x
    h = first(x).detach()
    B = reference.curvature(case.likelihood, case.model(x).detach(), case.y)
    through = torch.stack([last.weight.detach() @ torch.diag(1 - row.tanh() ** 2) for row in h])  # ∂f/∂h of each datum
    expected = []
    for inputs, jacobians in ((x, through), (h.tanh(), torch.eye(4).double().expand(8, 4, 4))):
        a = torch.cat([inputs, torch.ones(8, 1).double()], dim=1).contiguous()
        G = torch.einsum("nca,ncd,ndb->ab", jacobians, B, jacobians)
        block = torch.kron(G.contiguous(), (a.T @ a / 8).contiguous())  # of [out, in + 1], row by row
        out, width = len(G), a.shape[1]
        order = torch.arange(out * width).reshape(out, width)
        order = torch.cat([order[:, :-1].reshape(-1), order[:, -1]])  # weights, then biases
        expected.append(block[order][:, order])
    assert_close(dense(found, ggn.size), torch.block_diag(*expected))


class Odd(nn.Module):
    """Layers that are not used as their classes say, or not at all, beside one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.tied, self.unused = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.grouped, self.norm = nn.Conv1d(3, 3, 1), nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.relu(self.plain(x), inplace=True)
        h = self.tied(h).tanh() @ self.tied.weight
        return self.norm(self.grouped(h[..., None])[..., 0])


def test_layers_that_are_used_in_other_ways_are_diagonal() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        case = Case(Odd().double(), Categorical(), torch.randn(6, 3).double(), torch.randint(3, (6,)))
    before = snapshot(case.model)
    found, ggn = curvature(case, "kfac")
    assert isinstance(found, Kronecker)
    assert [block.index.shape for block in found.blocks] == [(3, 4)]
    assert_close(
        dense(found, ggn.size).diagonal()[found.rest], reference_ggn(case).diagonal()[found.rest], rtol=1e-6, atol=1e-10
    )
    assert_unchanged(case.model, before)


def test_shared_layers_and_places_add_up_their_rows() -> None:
    """`expand`: each place is a datum, of which there are N·T."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x, y = torch.randn(4, 5, 2).double(), torch.zeros(4, 5, 3).double()
        tokens = Case(nn.Linear(2, 3, bias=False).double(), Gaussian(1.5), x, y)
        flat = Case(tokens.model, Gaussian(1.5), tokens.x.reshape(20, 2), torch.zeros(20, 3).double())
    left, right = (dense(curvature(case, "kfac")[0], 6) for case in (tokens, flat))
    assert_close(left, right)


class First(nn.Module):
    """The first of several places."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


class FirstOfLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)[:, 0]


def test_places_that_outputs_do_not_depend_on_do_not_count() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x, y, layer = torch.randn(4, 5, 2).double(), torch.zeros(4, 3).double(), nn.Linear(2, 3, bias=False).double()
    cases = Case(nn.Sequential(layer, First()), Gaussian(1.5), x, y), Case(layer, Gaussian(1.5), x[:, 0], y)
    left, right = (dense(curvature(case, "kfac")[0], 6) for case in cases)
    assert_close(left, right)


def test_a_linear_layer_that_returns_something_else_is_diagonal() -> None:
    model, x = FirstOfLinear(2, 3).double(), torch.ones(4, 5, 2).double()
    found = curvature(Case(model, Gaussian(1.5), x, torch.zeros(4, 3).double()), "kfac")[0]
    assert isinstance(found, Kronecker)
    assert found.num_factored == 0


def test_dilated_and_strided_convolutions_are_factored() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.Conv2d(1, 2, 2, stride=2, dilation=2, padding=1)
        model, x = nn.Sequential(layer, nn.Flatten()).double(), torch.randn(4, 1, 6, 6).double()
    found = curvature(Case(model, Gaussian(1.5), x, model(x).detach()), "kfac")[0]
    assert isinstance(found, Kronecker)
    assert found.num_factored == 10


class SequenceFirst(nn.Module):
    """Two layers in a row, with the places of a sequence before the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.movedim(0, 1)).tanh()).movedim(1, 0)


def test_rows_count_as_their_data_do() -> None:
    """Weights are in both factors; places that say nothing, and data of weight 0, in neither."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = SequenceFirst().double(), torch.randn(5, 3, 2).double()
        y, w = torch.randint(3, (5, 3)), torch.tensor([2.0, 0.3, 0.0, 1.0, 4.0]).double()
    y[0, 2] = y[3, 0] = -100
    la = LinearisedLaplace(model, Categorical(class_dim=-1), method="kfac", prior="isotropic", hessian_at="network")
    la.fit(DataLoader(TensorDataset(x, y), 2), weights=w, progress=False)
    found = la._fitted.fit.curvature
    assert isinstance(found, Kronecker)
    h = model.first(x).tanh().detach()
    p = model(x).softmax(-1).detach()
    rows = w[:, None] * (y != -100)
    B = rows[..., None, None] * (torch.diag_embed(p) - p[..., None] * p[..., None, :])
    W = model.last.weight.detach() * (1 - h**2)[..., None, :]
    of_first = torch.einsum("ntca,ntcd,ntdb->ab", W, B, W)
    for block, inputs, G in zip(found.blocks, (x, h), (of_first, B.sum((0, 1))), strict=True):
        a = torch.cat([inputs, torch.ones(5, 3, 1).double()], dim=-1)
        assert_close(block.A, torch.einsum("nt,nta,ntb->ab", rows, a, a) / rows.sum())
        assert_close(block.G, G)


class ByName(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(input=x)


def test_layers_may_be_called_by_the_names_of_arguments() -> None:
    case = make_case("classification_many_data")
    found = [
        curvature(Case(model, Categorical(), case.x, case.given[1]), "kfac")
        for model in (case.model, ByName(case.model))
    ]
    assert isinstance(found[1][0], Kronecker)
    assert len(found[1][0].blocks) == 1
    left, right = (dense(of, ggn.size) for of, ggn in found)
    assert_close(left, right)


class Watched(nn.Module):
    """Says in `seen` how many hooks a layer has that KFAC drops."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        # a list of the module would be put back
        self.tied, self.last, self.see = nn.Linear(3, 3), nn.Linear(3, 2), seen.append

    def forward(self, x: Tensor) -> Tensor:
        self.see(len(self.tied._forward_hooks))
        return self.last(self.tied(x).tanh() @ self.tied.weight)


def test_layers_that_are_dropped_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they hold inputs and graphs."""
    layers, seen = [], []
    found_in = kfac._layers
    monkeypatch.setattr(kfac, "_layers", lambda network: layers.extend(found_in(network)) or list(layers))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        case = Case(Watched(seen).double(), Categorical(), torch.randn(9, 3).double(), torch.randint(2, (9,)))
    seen.clear()
    found, _ = curvature(case, "kfac")
    assert isinstance(found, Kronecker)
    assert len(found.blocks) == 1
    assert sum(hooks > 0 for hooks in seen) == 1  # in the first batch
    assert [layer.calls for layer in layers] == [[], []]


@pytest.mark.parametrize("name", ["classification", "conv_batch_norm"])
@pytest.mark.parametrize("kind", ["diagonal", "kfac"])
def test_functions_of_the_matrix(name: str, kind: str) -> None:
    case = make_case(name)
    found, ggn = curvature(case, kind)
    P = ggn.size
    M, eye = dense(found, P), torch.eye(P, dtype=torch.float64)
    layers = case.linear_model().features.network.layers()[1]
    per_layer = torch.linspace(0.3, 2.0, int(layers.max()) + 1, dtype=torch.float64)[layers]
    for shift in (0.7, per_layer):
        H = M + torch.diag(torch.as_tensor(shift).double().expand(P))
        inverse = torch.linalg.inv(H)
        assert_close(found.solve(eye, shift), inverse)
        root = found.solve_root(eye, shift)
        assert_close(root, root.T)
        assert_close(root @ root, inverse)
        assert_close(found.variance(shift), inverse.diagonal())
        assert_close(found.leverage(shift), (inverse @ M).diagonal(), rtol=1e-7, atol=1e-10)
    assert_close(found.eigenvalues().sort().values, torch.linalg.eigvalsh(M), rtol=1e-6, atol=1e-10)
    assert_close(dense(found.congruent(per_layer), P), per_layer[:, None] * M * per_layer)


def test_scales_and_precisions_that_do_not_factor_are_refused() -> None:
    case = make_case("classification")
    found, ggn = curvature(case, "kfac")
    w = torch.rand(ggn.size, dtype=torch.float64) + 0.5
    with pytest.raises(
        ValueError, match='one factor for each output and one for each input of a layer: use prior="iso'
    ):
        found.congruent(w)
    with pytest.raises(ValueError, match="takes one prior precision for the weights of a layer: use prior="):
        found.solve(w[None], w)


@pytest.mark.parametrize("kind", ["diagonal", "kfac"])
def test_preconditioned_conjugate_gradients(kind: str) -> None:
    """The same solution in fewer iterations, where data outnumber weights and inputs differ in scale."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "diagonal":
            x, y = torch.randn(300, 30).double() * torch.logspace(-2, 2, 30).double(), torch.zeros(300, 1).double()
            case = Case(nn.Linear(30, 1).double(), Gaussian(1.0), x, y, 300)
        else:
            x = torch.randn(300, 4).double() * torch.tensor([0.01, 1, 10, 0.1]).double()
            network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
            case = Case(network, Categorical(), x, torch.randint(3, (300,)), 300)
    found, ggn = curvature(case, kind)
    prior = IsotropicPrior(1e-4).build(ggn, ([], torch.zeros(0)), Draws(1, 0).noise(3))
    plain, helped = (
        sample_posterior(ggn, prior, Draws(3, 0), CG(1e-2, preconditioner=preconditioner))
        for preconditioner in (None, found)
    )
    error = (ggn.features.outputs(helped.value - plain.value)).norm() / ggn.features.outputs(plain.value).norm()
    assert float(error) < 0.03
    assert helped.converged
    assert helped.passes < 0.6 * plain.passes


def test_many_outputs_take_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of outputs; in expectation the same."""
    case = make_case("classification")
    exact = [dense(curvature(case, kind)[0], 52) for kind in ("diagonal", "kfac")]
    monkeypatch.setattr("laplace_sampling.linear_model.factored._PROBES", 3)  # fewer than four outputs
    model = case.linear_model()
    ggn = model.ggn(model.network_outputs)
    for kind, expected in zip(("diagonal", "kfac"), exact, strict=True):
        draws = torch.stack([dense(factored_curvature(kind, ggn, seed), 52) for seed in range(150)])
        error = draws.std(0) / 150**0.5
        assert float(error.max()) > 0
        assert ((draws.mean(0) - expected).abs() < 5 * error + 1e-9).all()


@pytest.mark.filterwarnings("ignore")
def test_laplace_torch_has_the_same_curvature_of_a_classifier() -> None:
    laplace = pytest.importorskip("laplace", reason="laplace-torch is not installed")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Tanh(), nn.Linear(5, 4, bias=False)).double()
        x, y = torch.randn(12, 3).double(), torch.randint(4, (12,))
    case = Case(model, Categorical(), x, y, 12)
    shift = torch.eye(35, dtype=torch.float64) * 0.9
    for kind, structure in (("diagonal", "diag"), ("kfac", "kron")):
        theirs = laplace.Laplace(
            model, "classification", subset_of_weights="all", hessian_structure=structure, prior_precision=0.9
        )
        theirs.fit(DataLoader(TensorDataset(x, y), 12))
        precision = theirs.posterior_precision
        dense_theirs = torch.diag(precision) if kind == "diagonal" else precision.to_matrix()
        assert_close(dense(curvature(case, kind)[0], 35) + shift, dense_theirs.detach(), rtol=1e-5, atol=1e-8)
