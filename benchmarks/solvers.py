"""`python -m benchmarks.solvers [--data 10000] [--networks NAME ...] [--double] [--quick]`: passes for a sample.

Posterior samples of trained networks by the library's Jacobian products, at the prior precision that a fit by Kronecker
factors finds, in float32 unless `--double` is given: by SVRG, SGD as it is published (momentum, a decay of the step),
conjugate gradients and block Krylov of the library, and by dual steps, which are here alone. A pass is a JVP and a VJP
of all data for one of four samples. The error is that of the function on the training data, `‖Φ(ζ − ζ*)‖_B / ‖Φζ*‖_B`,
of all samples together. Runs are of 5, 10, … 160 passes, those of SVRG of 1 to 128 full products; between two of them
the logarithm of the error is interpolated.
"""

import argparse
import math
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from laplace_sampling import SGD, SVRG, Gaussian, LinearisedLaplace
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import tangent_model_of
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.krylov import CG, BlockKrylov
from laplace_sampling.solvers.operator import largest_of_batches
from laplace_sampling.solvers.solver import Quadratic, Solver

SAMPLES, BATCH, TARGETS, NOISE, MOMENTUM = 4, 100, (0.01, 0.001), 0.1, 0.9
LENGTHS, PRODUCTS, DENSE = (5, 10, 20, 40, 80, 160), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128), 4000

# The samples after a run of some length, and the passes that all of them took together.
Run = Callable[[int], tuple[Tensor, float]]
Problem = tuple[nn.Module, Likelihood, Tensor, Tensor]


def regression(num_data: int, inputs: int, width: int, steps: int) -> Problem:
    """A sum of waves, and two hidden layers."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(num_data, inputs, generator=g)
    waves = (2 * x @ torch.randn(inputs, 4, generator=g) / math.sqrt(inputs)).sin()
    y = waves.sum(1, keepdim=True) + NOISE * torch.randn(num_data, 1, generator=g)
    hidden = (nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
    return trained(nn.Sequential(*hidden, nn.Linear(width, 1)), Gaussian(NOISE**-2, learn=False), x, y, steps)


def classification(num_data: int, steps: int) -> Problem:
    """Ten patterns of 12 × 12 pixels under noise, and two convolutions."""
    g = torch.Generator().manual_seed(0)
    patterns = nn.functional.interpolate(torch.randn(10, 1, 5, 5, generator=g), size=12, mode="bilinear")
    y = torch.randint(10, (num_data,), generator=g)
    x = patterns[y] + 1.5 * torch.randn(num_data, 1, 12, 12, generator=g)
    first, second = nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
    net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    return trained(net, Categorical(), x, y, steps)


NETWORKS: dict[str, Callable[[int, int], Problem]] = {
    "MLP, 8 inputs": lambda num_data, steps: regression(num_data, 8, 50, steps),
    "convolutions": classification,
    "MLP, 784 inputs": lambda num_data, steps: regression(num_data, 784, 32, steps),
}


def trained(net: nn.Module, likelihood: Likelihood, x: Tensor, y: Tensor, steps: int) -> Problem:
    """By Adam on the negative log-posterior, with the prior precision of the samples."""
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    schedule, g = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps), torch.Generator().manual_seed(0)
    for _ in range(steps):
        some = torch.randint(len(x), (BATCH,), generator=g)
        prior = torch.stack([p.square().sum() for p in net.parameters()]).sum()
        optimiser.zero_grad()
        (likelihood.loss(net(x[some]), y[some]).mean() + 0.5 * prior / len(x)).backward()
        optimiser.step()
        schedule.step()
    return net, likelihood, x, y


def by_solver(make: Callable[[int], Solver], problem: Quadratic) -> Run:
    return lambda length: ((solution := make(length).solve(problem)).value, solution.passes)


def by_dual_steps(ggn: GGN, problem: Quadratic, noise: Tensor) -> Run:
    """Steps of random data on `(I + S)u = z − LᵀΦθ⁰`, `S = LᵀΦΦᵀL/α`, with momentum and an average of the last ones.

    Samples are `θ⁰ + q`, `q = ΦᵀLu/α`, which is kept with `u`, and so are their velocities `p` and `v`.
    """
    N, factor, alpha = ggn.num_data, ggn.num_data / BATCH, float(problem.precision[0])

    def forward(w: Tensor, some: Tensor) -> Tensor:
        return ggn.likelihood.root_transpose(ggn.outputs[some], ggn.features.jvp(w, some))

    wanted = noise - torch.cat([forward(problem.centre, some) for some in torch.arange(N).split(BATCH)], dim=1)
    g = torch.Generator().manual_seed(0)
    block = torch.randperm(N, generator=g)[:BATCH], torch.full((BATCH,), factor, dtype=torch.float64)
    largest, estimate = largest_of_batches(ggn, [block], 8, g)
    largest = largest / alpha

    def run(length: int) -> tuple[Tensor, float]:
        u, v = torch.zeros_like(wanted), torch.zeros_like(wanted)
        q, p, mean = (torch.zeros_like(problem.centre) for _ in range(3))
        batches = [some for _ in range(length) for some in torch.randperm(N, generator=g).split(BATCH)]
        for some in batches:
            gap = forward(q + MOMENTUM * p, some) + u[:, some] + MOMENTUM * v[:, some] - wanted[:, some]
            change = gap * factor / (largest + factor)
            v *= MOMENTUM
            v[:, some] -= change
            p = MOMENTUM * p - ggn.features.vjp(ggn.likelihood.root(ggn.outputs[some], change), some) / alpha
            u += v
            q = q + p
            mean += min(1.0, 100 / len(batches)) * (q - mean)
        # A JVP of the right-hand sides is half a pass.
        return problem.centre + mean, SAMPLES * (length + 0.5) + estimate

    return run


def exact(ggn: GGN, problem: Quadratic) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The samples, and products with `M`: by `M` in full, or by many conjugate gradients where that is large."""
    if ggn.size > DENSE:
        return CG(1e-5, 5000).solve(problem).value.double(), lambda v: ggn.matmul(v.to(problem.centre)).double()
    M = ggn.accumulated()
    shift = problem.precision.double()
    factor = torch.linalg.cholesky(M + shift.diag())
    return torch.cholesky_solve((problem.linear.double() + shift * problem.centre).T, factor).T, lambda v: v @ M


def passes_to(target: float, runs: Sequence[tuple[float, float]]) -> str:
    """Passes at which the error is some target, from those of runs and their errors."""
    for (before, high), (after, low) in zip([(0.0, math.inf), *runs], runs, strict=False):
        if low <= target:
            share = math.log(high / target) / math.log(high / low) if math.isfinite(high) else 1.0
            return f"{before + share * (after - before):.1f}"
    return f"> {runs[-1][0]:.0f}"


def rows(name: str, num_data: int, longest: int, steps: int) -> Iterator[list[str]]:
    """A row for each solver."""
    torch.manual_seed(0)  # initial weights
    net, likelihood, x, y = NETWORKS[name](num_data, steps)
    batches = list(zip(x.split(500), y.split(500), strict=True))
    model = tangent_model_of(Linearisation(net), likelihood, batches, kind="homogeneous").model
    ggn, draws = model.ggn(model.network_outputs), Draws(SAMPLES, seed=0)
    noise = draws.noise(model.features.num_outputs)
    la = LinearisedLaplace(net, likelihood, method="kfac").fit_hyperparameters(batches, progress=False)
    alpha = la.prior_precision_.to(x)
    centre = draws.prior(ggn.size) / alpha.sqrt()
    problem = Quadratic(ggn, alpha.expand(ggn.size), centre, ggn.root_matmul(noise))
    truth, product = exact(ggn, problem)
    contenders: dict[str, Run] = {
        "SVRG": by_solver(lambda n: SVRG(max_snapshots=n, tolerance=1e-12), problem),
        "SGD, published": by_solver(lambda n: SGD(epochs=n, finish_passes=0), problem),
        "dual steps": by_dual_steps(ggn, problem, noise(torch.arange(num_data))),
        "conjugate gradients": by_solver(lambda n: CG(1e-6, n), problem),
        "block Krylov": by_solver(lambda n: BlockKrylov(1e-6, n), problem),
    }
    for solver, run in contenders.items():
        found: list[tuple[float, float]] = []
        for length in PRODUCTS if solver == "SVRG" else [n for n in LENGTHS if n <= longest]:
            value, passes = run(length)
            squares = [float((part * product(part)).sum()) for part in (value.double() - truth, truth)]
            found.append((passes / SAMPLES, math.sqrt(squares[0] / squares[1])))
            if found[-1][1] <= TARGETS[-1]:
                break
        yield [
            f"{ggn.size:,}",
            f"{float(alpha):.2g}",
            solver,
            *(passes_to(target, found) for target in TARGETS),
            f"{found[-1][1]:.2g}",
        ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=int, default=10_000)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--double", action="store_true", help="float64")
    parser.add_argument("--quick", action="store_true", help="few data and short runs of one network")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64 if options.double else torch.float32)
    num_data, longest, steps = (500, 10, 100) if options.quick else (options.data, LENGTHS[-1], 3000)
    heads = (
        "network",
        "data",
        "weights",
        "α",
        "solver",
        *(f"passes to {target:.1%}" for target in TARGETS),
        "last error",
    )
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for name in ["MLP, 8 inputs"] if options.quick else options.networks:
        for row in rows(name, num_data, longest, steps):
            print(f"| {name} | {num_data:,} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
