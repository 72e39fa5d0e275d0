"""Products that solvers and samplers need on glyphs, the images of `benchmarks/data/glyphs.py`.

`python -m benchmarks.solvers.glyphs solvers` and `python -m benchmarks.solvers.glyphs samples`. A product is one JVP
and one VJP of one datum for one vector; a pass is one product of all data. The commands time nothing.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy import stats
from torch import Tensor, nn

from benchmarks.data.glyphs import glyphs
from benchmarks.solvers.glyph_networks import lenet, small_cnn, train
from benchmarks.solvers.stored_features import StoredFeatures
from laplace_sampling.__main__ import Data
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures, Features, ScaledFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.priors.g_prior import GPrior
from laplace_sampling.linear_model.priors.isotropic_prior import IsotropicPrior
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.linear_model.sampling import sample_posterior
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers import krylov
from laplace_sampling.solvers.krylov import CG, BlockKrylov
from laplace_sampling.solvers.preconditioners import Nystrom
from laplace_sampling.solvers.sgd import SGD
from laplace_sampling.solvers.solver import Quadratic, Solution, Solver
from laplace_sampling.solvers.svrg import SVRG


@dataclass(frozen=True)
class Comparison:
    """Equations of the same draws for all solvers, in scaled coordinates, and their solution."""

    problem: Quadratic
    truth: Tensor
    truth_product: Tensor
    features: StoredFeatures

    @property
    def rows(self) -> int:
        return len(self.truth)

    def error(self, value: Tensor, product: Tensor) -> float:
        """`‖Φ(ζ − ζ*)‖²_B / ‖Φζ*‖²_B` over all rows, from `ζ` and `Mζ`."""
        gap = (value - self.truth).double() * (product - self.truth_product).double()
        return float(gap.sum()) / float((self.truth.double() * self.truth_product.double()).sum())

    def spent(self) -> float:
        """Passes for each row since the counter was reset, with half a pass for the right-hand side."""
        products = self.features.products
        return (products["jvp"] + products["vjp"]) / (2 * self.features.num_data * self.rows) + 0.5

    def reset(self) -> None:
        self.features.products.update(jvp=0, vjp=0)


def g_prior(features: StoredFeatures, model: nn.Module, precision: float) -> GaussianPrior:
    f = features.outputs_of_network
    return GPrior(precision).build(GGN(features, Categorical(), f), Linearisation(model).layers(), _probes(features))


def _probes(features: StoredFeatures):
    return Draws(64, 0, 1).noise(features.num_outputs)


def compare(features: StoredFeatures, prior: GaussianPrior, rows: int, tolerance: float = 0.02) -> Comparison:
    """The reference solution comes from preconditioned conjugate gradients with an error bound of `tolerance`."""
    ggn = GGN(ScaledFeatures(features, prior.scale), Categorical(), features.outputs_of_network)
    draws = Draws(rows, 0)
    centre = draws.prior(ggn.size) / prior.spread().sqrt()
    problem = Quadratic(ggn, prior.spread(), centre, ggn.root_matmul(draws.noise(features.num_outputs)))
    solution = CG(tolerance, preconditioner=rows_preconditioner(ggn)).solve(problem)
    assert solution.converged
    print(
        f"truth: squared error at most {float(solution.error.max()) ** 2:.1e}, effective dimension "
        f"{float(solution.leverage.sum(1).mean()):.0f}",
        flush=True,
    )
    return Comparison(problem, solution.value, ggn.matmul(solution.value), features)


def rows_preconditioner(operator: GGN, num_rows: int = 2048, max_rank: int = 512) -> Nystrom:
    generator = torch.Generator().manual_seed(1)
    sizes = operator.sizes()
    chances = sizes + 0.1 * sizes.mean()
    data = torch.multinomial(chances, num_rows, replacement=True, generator=generator)
    weights = chances.sum() / (num_rows * chances[data])
    return Nystrom.of_rows(operator, data, weights, max_rank=max_rank, generator=generator)


class _ReachedError(Exception):
    pass


@contextmanager
def _traced(comparison: Comparison, trace: list[tuple[float, float]], goal: float) -> Iterator[None]:
    """Errors of the iterates of Krylov solvers, which have `Mζ` of each; ends the solve at the goal."""
    update = krylov._Iterates.update_error

    def traced(iterates: krylov._Iterates, rows: Tensor) -> Tensor:
        value = iterates.problem.centre + iterates.delta
        trace.append((comparison.spent(), comparison.error(value, iterates.product)))
        if trace[-1][1] < goal:
            raise _ReachedError
        return update(iterates, rows)

    krylov._Iterates.update_error = traced  # type: ignore[method-assign]
    try:
        yield
    finally:
        krylov._Iterates.update_error = update  # type: ignore[method-assign]


def krylov_trace(comparison: Comparison, solver: Solver, goal: float = 0.01) -> list[tuple[float, float]]:
    """Passes for each row and error after each iteration, until the error is below the goal."""
    trace: list[tuple[float, float]] = []
    comparison.reset()
    with _traced(comparison, trace, goal), suppress(_ReachedError):
        solver.solve(comparison.problem)
    return trace


def stochastic(comparison: Comparison, solver: Solver) -> tuple[float, float, Solution]:
    """Passes for each row, error and solution."""
    comparison.reset()
    solution = solver.solve(comparison.problem)
    spent = comparison.spent()
    return spent, comparison.error(solution.value, comparison.problem.operator.matmul(solution.value)), solution


def solvers(model: nn.Module, data: Data, precision: float, rows: int, sgd_epochs: tuple[int, ...]) -> None:
    assert isinstance(model, nn.Sequential)
    features = StoredFeatures(model, data.x)
    prior = g_prior(features, model, precision)
    print(f"N = {features.num_data}, P = {features.size}, {rows} rows, g-prior at α = {precision}, B at the network")
    comparison = compare(features, prior, rows)
    spent, error, solution = stochastic(comparison, SVRG())
    estimate = float(solution.error.square().mean())
    print(f"SVRG: error {error:.2%} (estimate {estimate:.2%}), {spent:.1f} passes a row", flush=True)
    preconditioner = rows_preconditioner(comparison.problem.operator)  # type: ignore[arg-type]
    for name, solver in (
        ("CG preconditioned by rows", CG(1e-6, preconditioner=preconditioner)),
        ("BlockKrylov", BlockKrylov(1e-6)),
        ("CG", CG(1e-6)),
    ):
        passes, error = krylov_trace(comparison, solver)[-1]
        print(f"{name}: error {error:.2%}, {passes:.1f} passes a row", flush=True)
    for epochs in sgd_epochs:
        passes, error, _ = stochastic(comparison, SGD(epochs=epochs, finish_passes=0))
        print(f"SGD, {epochs} epochs: error {error:.2%}, {passes:.1f} passes a row", flush=True)


def energies(ggn: GGN, prior: GaussianPrior, samples: Tensor) -> tuple[Tensor, Tensor]:
    """`ζᵀMζ` and `ζᵀHζ` of samples in scaled coordinates, by products."""
    scaled = replace(ggn, features=ScaledFeatures(ggn.features, prior.scale))
    fit = (samples.double() * scaled.matmul(samples).double()).sum(1)
    return fit, fit + (prior.spread() * samples.double() ** 2).sum(1)


def tests_of(ggn: GGN, prior: GaussianPrior, solution: Solution, reference: Tensor) -> tuple[Any, Any]:
    """Kolmogorov–Smirnov tests of the total energy, and of the data energy against that of other samples."""
    fit, total = energies(ggn, prior, solution.value)
    return stats.kstest(total.cpu().numpy(), stats.chi2(ggn.size).cdf), stats.ks_2samp(fit.cpu(), reference.cpu())


def samples(features: Features, f: Tensor, num_samples: int, precision: float, seeds: int) -> None:
    ggn = GGN(features, Categorical(), f)
    prior = IsotropicPrior(precision).build(ggn, ([], torch.zeros(0)), Draws(1, 0).noise(features.num_outputs))
    print(f"N = {features.num_data}, P = {features.size}, isotropic prior, α = {precision}, {num_samples} samples")
    reference, _ = energies(ggn, prior, sample_posterior(ggn, prior, Draws(num_samples, 1000), BlockKrylov()).value)
    for seed in range(seeds):
        solution = sample_posterior(ggn, prior, Draws(num_samples, seed), BlockKrylov())
        passes = solution.passes / num_samples + 0.5
        total, fit = tests_of(ggn, prior, solution, reference)
        bound = float(solution.error.max()) ** 2
        print(
            f"BlockKrylov, seed {seed}: p = {total.pvalue:.2f} of the total energy, {fit.pvalue:.2f} of that of the "
            f"data; squared error at most {bound:.3%}, {passes:.2f} passes a row",
            flush=True,
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("comparison", choices=("solvers", "samples"))
    parser.add_argument("--num-train", type=int, help="data to train on; by default 60,000")
    parser.add_argument("--num-data", type=int, help="data of the posterior, of those; by default all, 200 for samples")
    parser.add_argument(
        "--alpha", type=float, help="prior precision; by default 1 of the g-prior, 0.1 of the isotropic"
    )
    parser.add_argument("--rows", type=int, help="that the solvers solve (4)")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3, help="of the samples that are tested")
    parser.add_argument("--epochs", type=int, default=5, help="of training")
    parser.add_argument("--sgd-epochs", type=int, nargs="*", default=[10, 40])
    options = parser.parse_args(arguments)
    torch.set_flush_denormal(True)  # the curvature at certain data is so small that products would slow down
    data = glyphs(options.num_train or 60_000)
    few = options.comparison == "samples"
    model = train(small_cnn if few else lenet, data, options.epochs)
    num = options.num_data or (200 if few else len(data.y))
    data = Data(data.x[:num], data.y[:num], data.x_test, data.y_test)
    if few:
        assert isinstance(model, nn.Sequential)
        stored = StoredFeatures(model, data.x)
        features, alpha = DenseFeatures.of(stored, torch.float32), options.alpha or 0.1
        samples(features, stored.outputs_of_network, options.samples, alpha, options.seeds)
    else:
        solvers(model, data, options.alpha or 1.0, options.rows or 4, tuple(options.sgd_epochs))


if __name__ == "__main__":
    main()
