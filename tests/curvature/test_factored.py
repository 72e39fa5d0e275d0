"""Diagonal and Kronecker-factored curvature, against dense algebra."""

import copy
import itertools
from collections.abc import Callable

import pytest
import reference
import torch
from cases import Case, make_case
from snapshot import assert_unchanged, snapshot
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling import Categorical, Data, Gaussian, LinearisedLaplace
from laplace_sampling.curvature import kronecker as kfac
from laplace_sampling.curvature.closed_form import KroneckerFit, factored_curvature
from laplace_sampling.curvature.kronecker import Kronecker, KroneckerBlock, partial_traces, squares
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import features_at
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.priors.prior import IsotropicPrior
from laplace_sampling.linear_model.sampling import sample_posterior
from laplace_sampling.methods.closed_form import Factored as FactoredMethod
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.krylov import CG
from laplace_sampling.solvers.preconditioners import Curvature

ALL = KroneckerFit(outputs=64, data=10**6)


@pytest.fixture
def no_dense_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers have factors, too."""
    monkeypatch.setattr(kfac, "_DENSE", 0)


def curvature(
    case: Case, kind: str, scale: Tensor | None = None, kronecker: KroneckerFit = ALL
) -> tuple[Curvature, GGN]:
    model = case.linear_model()
    ggn = model.ggn(model.network_outputs)
    return factored_curvature(kind, ggn, 0, scale, kronecker), ggn


def factored(case: Case, scale: Tensor | None = None) -> Kronecker:
    found, ggn = curvature(case, "kfac", scale)
    assert isinstance(found, Kronecker)
    assert found.size == ggn.size
    return found


def seeded(make: Callable[[], Case]) -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def dense(found: Curvature, size: int) -> Tensor:
    return found.matmul(torch.eye(size, dtype=torch.float64))


def reference_ggn(case: Case) -> Tensor:
    f = case.linear_model().network_outputs
    return reference.ggn(reference.jacobian(case.model, case.x), reference.curvature(case.likelihood, f, case.y))


def test_the_diagonal_is_that_of_the_dense_ggn(case: Case) -> None:
    found, _ = curvature(case, "diagonal")
    assert_close(found.eigenvalues(), reference_ggn(case).diagonal(), rtol=1e-6, atol=1e-10)


def assert_diagonal_of_blocks(found: Kronecker, M: Tensor) -> None:
    """`Λ` is the diagonal of each block in its eigenvectors; other weights have that of `M`."""
    for block in found.blocks:
        for index, U_G, U_A, eigenvalues in zip(block.index, block.U_G, block.U_A, block.eigenvalues, strict=True):
            U = torch.kron(U_G.contiguous(), U_A.contiguous())
            assert_close(U.T @ U, torch.eye(len(U)).double())
            of_block = M[index.reshape(-1)][:, index.reshape(-1)]
            assert_close((U.T @ of_block @ U).diagonal(), eigenvalues.reshape(-1), rtol=1e-6, atol=1e-9)
    assert_close(found.diagonal, M.diagonal()[found.rest], rtol=1e-6, atol=1e-9)
    used = torch.cat([*(block.index.reshape(-1) for block in found.blocks), found.rest])
    assert torch.equal(used.sort().values, torch.arange(len(M)))


@pytest.mark.usefixtures("no_dense_blocks")
def test_eigenvalues_are_the_diagonal_of_blocks_in_their_eigenvectors(case: Case) -> None:
    assert_diagonal_of_blocks(factored(case), reference_ggn(case))


@pytest.mark.usefixtures("no_dense_blocks")
def test_factors_are_partial_traces_of_blocks(case: Case) -> None:
    model = case.linear_model()
    ggn = model.ggn(model.network_outputs)
    factors = kfac.kronecker_factors(ggn, Draws(64, 0).noise(ggn.features.num_outputs))
    M = reference_ggn(case)
    for layer, (G, A) in zip(factors.layers, factors.traces, strict=True):
        for index, of_outputs, of_inputs in zip(layer.index, G, A, strict=True):
            block = M[index.reshape(-1)][:, index.reshape(-1)].reshape(*index.shape, *index.shape)
            assert_close(torch.einsum("akbk->ab", block), of_outputs, rtol=1e-6, atol=1e-9)
            assert_close(torch.einsum("akal->kl", block), of_inputs, rtol=1e-6, atol=1e-9)


def test_small_layers_have_their_block(case: Case) -> None:
    found, M = factored(case), reference_ggn(case)
    expected = torch.diag(M.diagonal())
    for block in found.blocks:
        for index in block.index.reshape(len(block.index), -1):
            expected[index[:, None], index] = M[index[:, None], index]
    assert_close(dense(found, len(M)), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.usefixtures("no_dense_blocks")
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
        found = factored(case)
        assert len(found.rest) == 0
        assert_close(dense(found, found.size), reference_ggn(case))


class Odd(nn.Module):
    """Layers that are not used as their classes say, or not at all, beside some that are."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.tied, self.unused = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.of_places, self.norm, self.free = nn.Conv1d(3, 3, 1), nn.LayerNorm(3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.relu(self.plain(x), inplace=True)
        h = self.tied(h).tanh() @ self.tied.weight
        return self.norm(self.of_places(h[..., None])[..., 0]) * self.free


@pytest.mark.parametrize("half", [{"dtype": torch.bfloat16}, {"dtype": torch.float16}, {"autocast": torch.bfloat16}])
def test_layers_of_less_precision_have_their_factors(half: dict[str, torch.dtype]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).to(half.get("dtype"))
    x, M = torch.randn(30, 4), []
    for model, autocast in ((module, half.get("autocast")), (copy.deepcopy(module).float(), None)):
        features = features_at(Linearisation(model, autocast=autocast), x)
        ggn = GGN(features, Categorical(), torch.zeros(30, 3), torch.arange(30) % 3)
        found = factored_curvature("kfac", ggn, 0, None, ALL)
        M.append(found.matmul(torch.eye(ggn.size)))
    assert_close(*M, rtol=0.05, atol=0.02 * float(M[1].max()))


@pytest.mark.usefixtures("no_dense_blocks")
def test_weights_that_are_used_in_other_ways_are_diagonal() -> None:
    case = seeded(lambda: Case(Odd().double(), Categorical(), torch.randn(6, 3).double(), torch.randint(3, (6,))))
    before = snapshot(case.model)
    found = factored(case)
    assert sorted(block.index.shape for block in found.blocks) == [(1, 3, 4), (1, 3, 4), (3, 1, 2)]
    assert len(found.rest) == 2 * 12 + 3
    assert_diagonal_of_blocks(found, reference_ggn(case))
    assert_unchanged(case.model, before)


class SequenceFirst(nn.Module):
    """Two layers in a row, with the places of a sequence before the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.movedim(0, 1)).tanh()).movedim(1, 0)


class PlacesInFrontOfData(nn.Module):
    """The places of a sequence and the data along one axis, after which one is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x.movedim(0, 1).flatten(0, 1))).tanh()
        return self.last(h.unflatten(0, (-1, len(x))).sum(0))


class Windows(nn.Module):
    """Each datum as several images of a network of convolutions in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding="same", groups=2)
        self.norm, self.last = nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 2, stride=2, dilation=2, padding=1, bias=False)
        self.depthwise, self.head = nn.Conv2d(4, 4, 2, groups=4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.depthwise(self.last(self.norm(self.first(x.flatten(0, 1))).tanh()).sin())
        return self.head(h.mean((2, 3)).unflatten(0, (len(x), -1)).sum(1))


class Twice(nn.Module):
    """One layer in two places, by its function in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.last = nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.layer(x)).tanh()
        h = self.norm(nn.functional.linear(input=h, weight=self.layer.weight, bias=self.layer.bias))
        return self.last(h.relu_())


class FirstOfLinear(nn.Linear):
    """A layer that returns something else than its class does."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)[:, 0]


def _along_one_axis() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 3, 2, bias=False), nn.BatchNorm1d(3).eval(), nn.Flatten(), nn.Linear(9, 3))


def _in_space() -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, 2, 2, stride=(1, 2, 1), padding=(1, 0, 0)), nn.Tanh(), nn.Flatten(1))


class SelfAttention(nn.Module):
    """Attention whose weights are given to `F.linear` by torch."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inside(x, x, x, need_weights=False)[0].mean(1))


@pytest.mark.usefixtures("no_dense_blocks")
@pytest.mark.parametrize(
    ("make", "shape", "blocks"),
    [
        (SequenceFirst, (6, 5, 2), 2),
        (PlacesInFrontOfData, (5, 6, 2), 3),
        (Windows, (4, 2, 2, 5, 5), 5),
        (Twice, (6, 3), 3),
        (lambda: FirstOfLinear(2, 3), (4, 5, 2), 1),
        (_along_one_axis, (5, 2, 4), 3),
        (_in_space, (3, 1, 3, 4, 3), 1),
        (SelfAttention, (6, 3, 4), 3),
    ],
)
@pytest.mark.parametrize("few", [True, False])
def test_gradients_of_data_are_sums_over_places(
    make: Callable[[], nn.Module], shape: tuple[int, ...], blocks: int, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the data are; whether gradients are formed of few data at a time or of all."""
    if few:
        monkeypatch.setattr("laplace_sampling.curvature.kronecker.NUMBERS_TOGETHER", 20)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = make().double().eval(), torch.randn(shape).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
            y = torch.randn_like(model(x))
    case = Case(model, Gaussian(1.5), x, y, 4)
    found = factored(case)
    assert len(found.rest) == 0
    assert len(found.blocks) == blocks
    assert_diagonal_of_blocks(found, reference_ggn(case))


@pytest.mark.parametrize("places", [1, 2, 40])
def test_all_orders_of_summation_give_the_same(places: int) -> None:
    """Few places are multiplied by each other, or turned first; of many the gradients are formed first."""
    generator = torch.Generator().manual_seed(0)
    g, a, left, right = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((5, 2, 3, places), (5, 2, 4, places), (2, 3, 3), (2, 4, 4))
    )
    D = torch.einsum("nqmt,nqkt->nqmk", g, a)
    G, A = partial_traces((g, a))
    assert_close(G, torch.einsum("nqmk,nqlk->qml", D, D))
    assert_close(A, torch.einsum("nqmk,nqml->qkl", D, D))
    turned = torch.einsum("nqmk,qma,qkb->nqab", D, left, right)
    assert_close(squares((g, a), left, right), turned.square().sum(0))


@pytest.mark.usefixtures("no_dense_blocks")
def test_data_count_as_often_as_their_weights_say() -> None:
    """And labels that are ignored not at all."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = SequenceFirst().double(), torch.randn(5, 3, 2).double()
        y, w = torch.randint(3, (5, 3)), torch.tensor([2.0, 0.3, 0.0, 1.0, 4.0]).double()
    y[0, 2] = y[3, 0] = -100
    method = FactoredMethod(kind="kfac", outputs=64)
    la = LinearisedLaplace(model, Categorical(class_dim=-1), method=method, prior="isotropic")
    la.fit(DataLoader(TensorDataset(x, y), 2), data=Data(weights=w), progress=False)
    found = la._fitted.fit.curvature
    assert isinstance(found, Kronecker)
    p, J = model(x).softmax(-1).detach(), reference.jacobian(model, x).unflatten(1, (3, 3))
    B = (w[:, None] * (y != -100))[..., None, None] * (torch.diag_embed(p) - p[..., None] * p[..., None, :])
    assert_diagonal_of_blocks(found, torch.einsum("ntcp,ntcd,ntdq->pq", J, B, J))


def test_random_outputs_are_unbiased(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of 400 draws of `Λ`, of one random output of each datum, is within five standard errors."""
    monkeypatch.setattr(kfac, "_DENSE", 30)  # one layer with factors, one without
    case = make_case("classification")
    model = case.linear_model()
    ggn = model.ggn(model.network_outputs)
    factors = kfac.kronecker_factors(ggn, Draws(64, 0).noise(4))
    exact = kfac.corrected(ggn, Draws(64, 0).noise(4), factors)
    v = torch.randn(2, ggn.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = torch.stack([kfac.corrected(ggn, Draws(1, seed).noise(4), factors).matmul(v) for seed in range(400)])
    error = draws.std(0) / 400**0.5
    assert float(error.max()) > 0
    assert ((draws.mean(0) - exact.matmul(v)).abs() < 5 * error + 1e-9).all()


def test_part_of_the_data_stands_for_all() -> None:
    """In the mean over random parts, and at their cost."""
    case = make_case("classification_many_data")
    model = case.linear_model()
    ggn = model.ggn(model.network_outputs)
    exact = dense(factored_curvature("kfac", ggn, 0, None, ALL), ggn.size)
    part = KroneckerFit(outputs=64, data=16)
    draws = torch.stack([dense(factored_curvature("kfac", ggn, seed, None, part), ggn.size) for seed in range(60)])
    error = draws.std(0) / 60**0.5
    assert ((draws.mean(0) - exact).abs() < 5 * error + 1e-9).all()
    passes = factored_curvature("kfac", ggn, 0, None, part).passes
    share = 16 / ggn.num_data
    assert passes == pytest.approx(2 * ggn.features.num_outputs * share / 2)


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


@pytest.mark.parametrize("name", ["classification", "conv_batch_norm"])
@pytest.mark.parametrize("kind", ["diagonal", "kfac"])
@pytest.mark.usefixtures("no_dense_blocks")
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


def scales_of_rank_one(found: Kronecker) -> Tensor:
    """Random scales, a product of two factors in each block."""
    generator = torch.Generator().manual_seed(1)
    scale = torch.rand(found.size, generator=generator, dtype=torch.float64) + 0.5
    for block in found.blocks:
        q, m, k = block.index.shape
        of_outputs, of_inputs = (torch.rand(q, n, generator=generator, dtype=torch.float64) + 0.5 for n in (m, k))
        scale[block.index] = of_outputs[..., None] * of_inputs[:, None]
    return scale


@pytest.mark.usefixtures("no_dense_blocks")
@pytest.mark.parametrize("name", ["classification", "conv_batch_norm"])
def test_eigenvalues_in_scaled_coordinates_are_those_of_the_scaled_matrix(name: str) -> None:
    case = make_case(name)
    plain = factored(case)
    s = scales_of_rank_one(plain)
    found = factored(case, s)
    assert_diagonal_of_blocks(found, s[:, None] * reference_ggn(case) * s)
    turned = [float((a.U_A - b.U_A).abs().max()) for a, b in zip(plain.blocks, found.blocks, strict=True)]
    assert max(turned) > 0.01  # other eigenvectors: eigenvalues could not be carried over


@pytest.mark.usefixtures("no_dense_blocks")
@pytest.mark.parametrize("name", ["classification", "conv_batch_norm"])
def test_a_congruence_is_the_diagonal_of_the_congruent_matrix(name: str) -> None:
    """In the eigenvectors of its partial traces; blocks of one row are congruent exactly."""
    found = factored(make_case(name))
    s = scales_of_rank_one(found)
    expected = s[:, None] * dense(found, found.size) * s
    congruent = found.congruent(s)
    assert_diagonal_of_blocks(congruent, expected)
    M = dense(congruent, found.size)
    assert float(M.trace()) == pytest.approx(float(expected.trace()))
    for block in found.blocks:
        if block.index.shape[1] == 1:
            for index in block.index[:, 0]:
                assert_close(M[index][:, index], expected[index][:, index])
    assert float((M - expected).norm() / expected.norm()) < 0.3


@pytest.mark.parametrize("numbers", [1, 2**22])
def test_covariances_for_many_shifts(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laplace_sampling.curvature.kronecker.NUMBERS_TOGETHER", numbers)
    monkeypatch.setattr(kfac, "_DENSE", 0)
    case = make_case("conv_batch_norm")
    found = factored(case)
    rows, shifts = reference.jacobian(case.model, case.x), torch.tensor([0.01, 1.0, 30.0]).double()
    M, eye = dense(found, found.size), torch.eye(found.size).double()
    expected = torch.stack([rows @ torch.linalg.inv(M + shift * eye) @ rows.mT for shift in shifts])
    assert_close(found.covariances(rows, shifts), expected)
    assert found.covariances(rows.float(), shifts).dtype == torch.float64


@pytest.mark.usefixtures("no_dense_blocks")
def test_scales_and_precisions_that_do_not_factor_are_refused() -> None:
    case = make_case("classification")
    found, ggn = curvature(case, "kfac")
    w = torch.rand(ggn.size, dtype=torch.float64) + 0.5
    with pytest.raises(ValueError, match="scales"):
        found.congruent(w)
    with pytest.raises(ValueError, match="precision"):
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
    """In place of outputs; in expectation the same. With probes, eigenvectors are random, but not the trace."""
    case = make_case("classification")
    model = case.linear_model()
    ggn = model.ggn(model.network_outputs)
    diagonal, M = dense(curvature(case, "diagonal")[0], 52), reference_ggn(case)
    monkeypatch.setattr("laplace_sampling.curvature.closed_form.PROBES", 3)  # fewer than four outputs
    draws = torch.stack([dense(factored_curvature("diagonal", ggn, seed), 52) for seed in range(150)])
    error = draws.std(0) / 150**0.5
    assert float(error.max()) > 0
    assert ((draws.mean(0) - diagonal).abs() < 5 * error + 1e-9).all()
    probes = KroneckerFit(outputs=3)
    traces = torch.stack(
        [factored_curvature("kfac", ggn, seed, None, probes).eigenvalues().sum() for seed in range(150)]
    )
    assert float((traces.mean() - M.trace()).abs()) < 5 * float(traces.std()) / 150**0.5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_laplace_torch_has_the_same_curvature_of_a_classifier() -> None:
    laplace = pytest.importorskip("laplace", reason="laplace-torch is not installed")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Tanh(), nn.Linear(5, 4, bias=False)).double()
        x, y = torch.randn(12, 3).double(), torch.randint(4, (12,))
    case = Case(model, Categorical(), x, y, 12)
    shift = torch.eye(35, dtype=torch.float64) * 0.9
    theirs = laplace.Laplace(
        model, "classification", subset_of_weights="all", hessian_structure="diag", prior_precision=0.9
    )
    theirs.fit(DataLoader(TensorDataset(x, y), 12))
    expected = torch.diag(theirs.posterior_precision).detach()
    assert_close(dense(curvature(case, "diagonal")[0], 35) + shift, expected, rtol=1e-5, atol=1e-8)


def test_blocks_of_the_inverse_are_of_the_positions_the_shift_and_the_dtype_asked_for() -> None:
    """One after another, each beside the dense inverse."""
    generator = torch.Generator().manual_seed(0)
    first, second = torch.arange(6).reshape(1, 2, 3), torch.arange(6, 18).reshape(1, 3, 4)
    blocks = []
    for index in (first, second):
        U_G, U_A = (
            torch.linalg.qr(torch.randn(1, n, n, generator=generator, dtype=torch.float64))[0] for n in index.shape[1:]
        )
        eigenvalues = torch.rand(index.shape, generator=generator, dtype=torch.float64)
        blocks.append(KroneckerBlock(index, U_G, U_A, eigenvalues))
    nothing = torch.zeros(0, dtype=torch.long)
    curvature = Kronecker(blocks, nothing, nothing.double(), 0.0)
    eye = torch.eye(18, dtype=torch.float64)
    M = curvature.matmul(eye)
    asked = [(first, 0.5), (second, 0.5), (first, 2.0), (first.clone(), 2.0), (second, 2.0)]
    for dtype, (index, shift) in itertools.product((torch.float64, torch.float32), asked):
        block = curvature.inverse_at(index, shift, dtype)
        assert block is not None
        assert block.U_A.dtype == dtype
        turned = block.turned(eye.to(dtype))[:, 0].flatten(1)
        positions = index.flatten()
        found = ((turned * block.eigenvalues.flatten()) @ turned.T)[positions][:, positions].double()
        expected = torch.linalg.inv(M + shift * eye)[positions][:, positions]
        assert_close(found, expected, rtol=0, atol=1e-10 if dtype == torch.float64 else 1e-5)
    assert curvature.inverse_at(first[:, :1], 0.5, torch.float64) is None
