"""How far factored posteriors are from the dense one: standard deviations at test inputs, and effective dimensions.

`python -m benchmarks.methods.factors` prints a table for small networks on digits. The error is the root mean square
of `σ̂/σ − 1` over all outputs at 100 test inputs, `γ` the ratio of effective dimensions. Eigenvalues that are not
corrected are those of `G ⊗ A / Tr G`, of the same factors.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.methods.tangents import Trained, trained
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.linear_model import kfac
from laplace_sampling.linear_model.dense_curvature import DenseCurvature
from laplace_sampling.linear_model.factored import KroneckerFit, factored_curvature
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.kronecker import Kronecker
from laplace_sampling.linear_model.tangent_model_of import tangent_model_of
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.preconditioners import Factored

NAMES = ("digits, LeNet", "digits, tiny LeNet with batch norm", "1,400 digits, tiny LeNet")
ALPHAS = (0.01, 0.1, 1.0, 10.0, 100.0)


def ggn_of(network: Trained) -> GGN:
    """`M` at the network's outputs."""
    loader = network.data.train.loader()
    model = tangent_model_of(Linearisation(network.network), Categorical(), loader, kind="homogeneous").model
    return model.ggn(model.network_outputs)


def dense(ggn: GGN) -> Factored:
    """All of `M`."""
    M = torch.zeros(ggn.size, ggn.size, dtype=torch.float64)
    for rows in ggn.root_rows():
        M += rows.double().T @ rows.double()
    return DenseCurvature.of(M, 0.0)


def kronecker(ggn: GGN, dense_blocks: int = 0, seed: int = 0, **settings: int) -> Kronecker:
    """Corrected factors, of which layers of at most some weights have none."""
    before, kfac._DENSE = kfac._DENSE, dense_blocks
    try:
        found = factored_curvature("kfac", ggn, seed, None, KroneckerFit(**{"data": 10**6, **settings}))
    finally:
        kfac._DENSE = before
    assert isinstance(found, Kronecker)
    return found


def uncorrected(ggn: GGN) -> Kronecker:
    """The eigenvalues of a Kronecker product in place of corrected ones."""
    found = kronecker(ggn, outputs=64)
    blocks = []
    for block in found.blocks:
        # Sums of rows and columns of `Λ` are the eigenvalues of both factors.
        g, a = block.eigenvalues.sum(2), block.eigenvalues.sum(1)
        product = g[..., None] * a[:, None] / g.sum(1)[:, None, None].clamp_min(1e-300)
        blocks.append(replace(block, eigenvalues=product))
    return Kronecker(blocks, found.rest, found.diagonal, found.passes)


VARIANTS: dict[str, Callable[[GGN], Factored]] = {
    "diagonal": lambda ggn: factored_curvature("diagonal", ggn, 0),
    "factors, not corrected": uncorrected,
    "corrected, all outputs": partial(kronecker, outputs=64),
    "corrected, one random output": partial(kronecker, outputs=1),
    "and blocks up to 256 weights": partial(kronecker, dense_blocks=256, outputs=64),
    "and blocks up to 1,024 weights": partial(kronecker, dense_blocks=1024, outputs=64),
    "by default": lambda ggn: factored_curvature("kfac", ggn, 0),
}


def errors(found: Factored, exact: Factored, rows: Tensor) -> list[tuple[float, float]]:
    """The error of standard deviations and the ratio of effective dimensions at each `α`."""
    alphas = torch.tensor(ALPHAS, dtype=torch.float64)
    deviations = [m.covariances(rows, alphas).diagonal(dim1=2, dim2=3).sqrt() for m in (found, exact)]
    error = (deviations[0] / deviations[1] - 1).square().mean((1, 2)).sqrt()
    gammas = [[float((v := m.eigenvalues()).div(v + a).sum()) for a in ALPHAS] for m in (found, exact)]
    return [(float(e), g / of_exact) for e, g, of_exact in zip(error, *gammas, strict=True)]


def table(name: str, steps: int = 1000) -> Iterator[str]:
    """Lines of the table of one network."""
    network = trained(name, 0, steps)
    ggn, rows = ggn_of(network), network.test_features().double()
    exact = dense(ggn)
    yield f"\n{name}, P = {ggn.size}, N = {ggn.num_data}; error of σ, ratio of γ at α = {ALPHAS}\n"
    for variant, make in VARIANTS.items():
        found = make(ggn)
        figures = "  ".join(f"{error:.2f} {ratio:5.2f}" for error, ratio in errors(found, exact, rows))
        yield f"{variant:32} {figures}   {found.passes:.2f} passes\n"


if __name__ == "__main__":
    for case in sys.argv[1:] or NAMES:
        sys.stdout.writelines(table(case))
