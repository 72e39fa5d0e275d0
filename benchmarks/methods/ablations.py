"""What each choice of the paper and of the thesis changes, on small problems.

`python -m benchmarks.methods.ablations [NAME ...]` prints Markdown tables. Each ablation takes minutes on one core.
Dense algebra replaces the solvers wherever it gives the exact answer, so that only ablations about noise have noise.
"""

import argparse
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.comparison.report import table
from benchmarks.methods import ablated_settings
from benchmarks.methods.ablated_settings import SEEDS, spread
from benchmarks.methods.tangents import Spectrum, root, trained
from benchmarks.solvers import digits
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.solvers.sgd import SGD
from laplace_sampling.solvers.solver import ConvergenceWarning

__all__ = ["ABLATIONS", "UPDATES", "em_trace", "objective_errors", "spectrum", "updates"]

ALGORITHMS = ("wine, MLP", "digits, LeNet", "diabetes, tanh MLP")


@lru_cache(maxsize=16)
def spectrum(name: str, seed: int = 0) -> Spectrum:
    """The spectrum of the default linear model of a case, with the isotropic prior."""
    problem = trained(name, seed)
    model = problem.default
    return Spectrum.of(model, problem.prior(model))


def in_float32(name: str, seed: int = 0, steps: int = 1000) -> digits.Problem:
    """A case in the form that `benchmarks.solvers.digits` takes."""
    problem = trained(name, seed, steps)
    model = problem.default
    assert isinstance(model.features, DenseFeatures)
    single = LinearModel(
        DenseFeatures(model.features.matrix.float()),
        model.offset.float(),
        model.network_outputs.float(),
        model.targets,
        model.likelihood,
    )
    return digits.Problem(single, problem.layers, problem.test_features())


# Objectives ----------------------------------------------------------------------------------------------------------


def objective_errors(
    p: digits.Problem, prior: GaussianPrior, draws: Draws, truth: Tensor, batch: int, epochs: float = 10
) -> dict[str, float]:
    """Squared errors of the function by `L` and by `L'` after equally many products."""
    solver = SGD(epochs=epochs, min_steps=1, batch_size=batch, finish_passes=0, seed=draws.seed)
    return {
        objective: digits.function_error(
            p, prior, digits.solve(p, prior, draws, solver, objective=objective).value, truth
        )
        for objective in ("L", "L'")
    }


def objectives() -> Iterator[str]:
    """Table: error against batch size."""
    for name, alpha in (("1,400 digits, tiny LeNet", 1.0), ("digits, LeNet", 1.0)):
        p = in_float32(name)
        prior, num_data = p.prior(alpha), p.model.features.num_data
        truths = [(draws, digits.exact(p, prior, draws)) for draws in (Draws(8, seed) for seed in SEEDS)]
        leverage = sum(map(partial(leverage_of, p, prior), (truth for _, truth in truths))) / len(truths)
        yield (
            f"{name}, {num_data} data, `P = {p.model.features.size}`, g-prior at `α = {alpha:g}`, 10 epochs: mean "
            f"leverage `γ/N(C − 1) = {leverage:.2g}`; squared error of the function."
        )
        rows = []
        for batch in (*(b for b in (25, 50, 100, 200, 400, 800) if b < num_data), num_data):
            errors = [objective_errors(p, prior, draws, truth, batch) for draws, truth in truths]
            high, low = ([100 * e[objective] for e in errors] for objective in ("L", "L'"))
            ratio = [a / b for a, b in zip(high, low, strict=True)]
            rows.append([f"{batch}", *(spread(v, "{:.2g}") for v in (high, low, ratio))])
        yield table(["batch", "`L`, %", "`L'`, %", "`L` / `L'`"], rows)


def leverage_of(p: digits.Problem, prior: GaussianPrior, samples: Tensor) -> float:
    """The mean leverage `γ/N(C − 1)`, by exact samples."""
    v = samples * prior.scale
    degrees = p.model.features.num_data * max(1, p.model.features.num_outputs - 1)
    return float((v * p.ggn().matmul(v)).sum()) / len(v) / degrees


# EM ------------------------------------------------------------------------------------------------------------------


def em_trace(s: Spectrum, start: float, noise: tuple[Tensor, Tensor], steps: int) -> list[float]:
    """`α` after each step of EM with samples of frozen noise, `[K, r]` of the data and of the prior."""
    alpha, trace = start, []
    for _ in range(steps):
        alpha = s.sampled_gamma(alpha, *noise) / s.norm(alpha)
        trace.append(alpha)
    return trace


def em() -> Iterator[str]:
    """Table: where EM with few samples ends."""
    seeds, steps = 40, 20
    yield (
        f"`α` over the dense fixed point `α*`, from `α = 1`, exact samples of frozen noise; `log(α/α*)` over {seeds} "
        f"seeds at step {steps}."
    )
    rows = []
    for name in ALGORITHMS:
        s = spectrum(name)
        truth = s.fixed_point()
        for num in (1, 2, 4, 16):
            traces = []
            for seed in range(seeds):
                generator = torch.Generator().manual_seed(seed)
                noise = torch.randn(16, 2, len(s.values), generator=generator, dtype=torch.float64)[:num]
                traces.append([math.log(a / truth) for a in em_trace(s, 1.0, (noise[:, 0], noise[:, 1]), steps)])
            ends = [t[-1] for t in traces]
            settled = [steps_to([abs(v - t[-1]) for v in t], 0.03) + 1 for t in traces]
            first = ", ".join(f"{math.exp(v):.2f}" for v in traces[0][:5])
            problem = f"{name}: `γ = {s.gamma(truth):.1f}`, `α* = {truth:.3g}`" if num == 1 else ""
            mean, sd = statistics.mean(ends), statistics.stdev(ends)
            rows.append([problem, f"{num}", first, f"{mean:+.3f}", f"{sd:.3f}", f"{statistics.median(settled):.0f}"])
    head = ["problem", "samples", "seed 0, first steps", "mean", "sd", "steps to 3 % of the end"]
    yield table(head, rows)


# Updates -------------------------------------------------------------------------------------------------------------


def mackay(s: Spectrum, alpha: float) -> float:
    """`γ(α)/‖θ̄‖²` (thesis eq. 6.4)."""
    return s.gamma(alpha) / s.norm(alpha)


def bound(s: Spectrum, alpha: float) -> float:
    """The largest `−½ α'‖θ̄‖² − ½ log|I + M/α'|` in `α'` at the present mode (thesis eq. 6.2)."""
    norm = s.norm(alpha)

    def slope(u: float) -> float:
        return s.gamma(math.exp(u)) - math.exp(u) * norm

    return math.exp(root(slope, math.log(1e-12), math.log(1e12)))


def decoupled(s: Spectrum, alpha: float) -> float:
    """`P/(‖θ̄‖² + Tr H⁻¹)`: the largest ELBO at the present Gaussian (thesis eq. 3.5)."""
    return s.size / (s.norm(alpha) + s.trace_of_inverse(alpha))


UPDATES: dict[str, Callable[[Spectrum, float], float]] = {
    "MacKay": mackay,
    "lower bound": bound,
    "decoupled ELBO": decoupled,
}


def iterate(s: Spectrum, update: str, start: float, most: int = 20_000) -> list[float]:
    """The values of `α` after each step, until it changes by less than 10⁻⁹ of itself."""
    trace = [start]
    for _ in range(most):
        trace.append(float(np.clip(UPDATES[update](s, trace[-1]), *s.span)))
        if abs(math.log(trace[-1] / trace[-2])) < 1e-9:
            break
    return trace


def updates() -> Iterator[str]:
    """Table: steps to the fixed point."""
    starts = (0.01, 1.0, 100.0)
    yield (
        "Steps until `α` stays within 1 % of the root `α*` of `α‖θ̄‖² = γ(α)`, for seeds 0, 1, 2; and the largest "
        "`|log(α/α*)|` of all where it ends."
    )
    rows = []
    for name in ALGORITHMS:
        spectra = [spectrum(name, seed) for seed in SEEDS]
        roots = ", ".join(f"{s.fixed_point():.3g}" for s in spectra)
        for update in UPDATES:
            paths = {start: [off(s, iterate(s, update, start)) for s in spectra] for start in starts}
            steps = [", ".join(str(steps_to(path, 0.01)) for path in paths[start]) for start in starts]
            end = max(path[-1] for seed_paths in paths.values() for path in seed_paths)
            rows.append([f"{name}: `α*` {roots}" if update == "MacKay" else "", update, *steps, f"{end:.0e}"])
    yield table(["problem", "update", *(f"from {start:g}" for start in starts), "end"], rows)


def off(s: Spectrum, trace: list[float]) -> list[float]:
    """`|log(α/α*)|` along a trace."""
    end = s.fixed_point()
    return [abs(math.log(alpha / end)) for alpha in trace]


def steps_to(path: list[float], tolerance: float) -> int:
    """The number of steps after which a trace stays within the tolerance; its length, if it never does."""
    return max((i + 1 for i, value in enumerate(path) if value >= tolerance), default=0)


# Warm starts ---------------------------------------------------------------------------------------------------------


def warm_starts() -> Iterator[str]:
    """Table: test variance after a jump of the precision."""
    yield "Test variance over the exact one for the same 8 draws, g-prior, after a jump of `α` and one E-step by SGD."
    rows = []
    for name in ("wine, MLP", "diabetes, tanh MLP"):
        p = in_float32(name)
        sizes = f"{p.model.network_outputs.numel()}", f"{p.model.features.size}"
        for before, after in ((100.0, 0.1), (0.1, 100.0)):
            ratios = [digits.jump(p, Draws(8, seed), before, after) for seed in SEEDS]
            cells = [spread([r[start] for r in ratios]) for start in ("delta", "raw")]
            rows.append([name, *sizes, f"{before:g} to {after:g}", *cells])
    yield table(["problem", "`N·C`", "`P`", "`α`", "`δ` kept", "`ζ` kept"], rows)


ABLATIONS: dict[str, Callable[[], Iterator[str]]] = {
    "objectives": objectives,
    "em": em,
    "updates": updates,
    "warm-starts": warm_starts,
    **ablated_settings.ABLATIONS,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.methods.ablations", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *ABLATIONS], help=", ".join(ABLATIONS))
    names = parser.parse_args().names or list(ABLATIONS)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ConvergenceWarning)  # what has not converged is in the tables
    for name in names:
        print(f"### {name}\n")
        for part in ABLATIONS[name]():
            print(part + "\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
