"""One rank, two and four give the same hyperparameters, samples, evidence and predictions, by every method."""

import functools
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_processes import run_on_ranks
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling import SVRG, Evidence, Krylov, LinearisedLaplace, Stochastic

# Of 37 data four ranks have 9, 9, 9 and 10.
N, D = 37, 3
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}


def network(dtype: torch.dtype, num_outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, num_outputs)).to(dtype)


def dataset(dtype: torch.dtype, likelihood: str, num: int = N) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num, D, generator=generator, dtype=torch.float64)
    signal = (x @ torch.randn(D, 3, generator=generator, dtype=torch.float64)).sin()
    if likelihood == "classification":
        return TensorDataset(x.to(dtype), (signal + 0.5 * torch.randn(num, 3, generator=generator)).argmax(1))
    return TensorDataset(x.to(dtype), (signal[:, :1] + 0.1 * torch.randn(num, 1, generator=generator)).to(dtype))


def fitted(
    likelihood: str, dtype: torch.dtype, options: dict[str, Any], fit: dict[str, Any], **where: Any
) -> LinearisedLaplace:
    model = network(dtype, 3 if likelihood == "classification" else 1)
    la = LinearisedLaplace(model, likelihood, num_samples=8, **options, **where)
    data = dataset(dtype, likelihood)
    return la.fit_hyperparameters(DataLoader(data, batch_size=10), progress=False, **fit)


def numbers(la: LinearisedLaplace, dtype: torch.dtype) -> dict[str, Tensor]:
    x = torch.linspace(-2, 2, 4 * D, dtype=dtype).reshape(4, D)
    if dist.is_initialized() and dist.get_rank() == 0:
        # One process may do this by itself: it waits for nobody.
        la.predict(x)
        la.state_dict()
    pred = la.predict(x)
    evidence = la.log_marginal_likelihood()
    return {
        "prior precision": la.prior_precision_,
        "noise": torch.zeros(1) if la.noise_precision_ is None else la.noise_precision_,
        "scale": torch.tensor(la.scale_),
        "effective dimension": la.effective_dimension_,
        "samples": la.samples_,
        "evidence": torch.tensor(float(evidence), dtype=torch.float64),
        "stddev": pred.stddev if hasattr(pred, "stddev") else pred.probs,
        "mode": la.mode_,
    }


METHODS = {
    "exact": {"method": "exact"},
    "krylov": {"method": Krylov()},
    "stochastic": {"method": Stochastic(solver=SVRG(max_snapshots=4))},
    "kfac": {"method": "kfac"},
    "diagonal": {"method": "diagonal"},
    "last layer": {"parameters": "last_layer"},
    "auto": {},
}
Case = tuple[str, str, torch.dtype]
ALL: list[Case] = list(itertools.product(METHODS, ("regression", "classification"), BOUNDS))
DOUBLE = [case for case in ALL if case[2] == torch.float64]
# Each method once, both likelihoods, and both precisions.
FEW: list[Case] = [
    ("exact", "regression", torch.float64),
    ("krylov", "classification", torch.float64),
    ("stochastic", "regression", torch.float64),
    ("kfac", "classification", torch.float64),
    ("diagonal", "regression", torch.float64),
    ("last layer", "classification", torch.float64),
    ("last layer", "regression", torch.float64),
    ("auto", "regression", torch.float32),
]
# Processes on the axes of the data and of the samples, and what they fit in one start. One shape runs by default.
STARTS: list[tuple[int, list[Case], list[pytest.MarkDecorator]]] = [
    (2, FEW, []),
    (4, DOUBLE, [pytest.mark.slow]),
    (2, [case for case in ALL if case not in FEW], [pytest.mark.nightly]),
    (4, [case for case in ALL if case not in DOUBLE], [pytest.mark.nightly]),
]


def of_case(method: str, likelihood: str, dtype: torch.dtype, **where: Any) -> dict[str, Tensor]:
    fit = {"budget": None, "criterion": Evidence(max_steps=2)}
    if method == "krylov":
        # Vectors that are solved for together help each other: without them a sample is another one within a tolerance.
        fit["tolerance"] = 1e-11 if dtype == torch.float64 else 1e-6
    return numbers(fitted(likelihood, dtype, METHODS[method], fit, **where), dtype)


def on_rank(cases: list[Case]) -> list[dict[str, Tensor]]:
    warnings.simplefilter("ignore")
    torch.manual_seed(dist.get_rank())  # nothing depends on global generators
    return [of_case(*case, process_group=dist.group.WORLD) for case in cases]


@functools.cache
def alone(case: Case) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return of_case(*case)


@pytest.fixture(scope="module")
def together(request: pytest.FixtureRequest) -> dict[Case, list[dict[str, Tensor]]]:
    """What each rank has, case by case: all in one start of the processes, which takes longer than the fits."""
    num, cases, _ = STARTS[request.param]
    found = run_on_ranks(on_rank, num, cases, timeout=300.0)
    return dict(zip(cases, zip(*found, strict=True), strict=True))


@pytest.mark.parametrize(
    ("together", "case"),
    [
        pytest.param(
            number,
            case,
            id=f"{num}-{', '.join(map(str, case))}",
            marks=[*marks, pytest.mark.xdist_group(f"same numbers, start {number}")],
        )
        for number, (num, cases, marks) in enumerate(STARTS)
        for case in cases
    ],
    indirect=["together"],
    scope="module",
)
def test_as_many_ranks_as_you_like(case: Case, together: dict[Case, list[dict[str, Tensor]]]) -> None:
    dtype = case[2]
    for of_rank in together[case]:
        for name, value in alone(case).items():
            bound = BOUNDS[dtype]
            if name == "mode" and dtype == torch.float32:
                bound = 1e-4  # the gradient vanishes there only up to rounding
            atol = bound * float(value.abs().max())
            assert_close(of_rank[name], value, rtol=bound, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
