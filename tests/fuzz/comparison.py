"""What is wrong with the fits of one random network, beside dense algebra.

A claim is checked where it is made: where `converged_` is true. Samples are random, so bounds on their sums of squares
are exceeded by chance less than once in `10⁹` comparisons.
"""

import math
import random
import traceback
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz.dense import Dense, Whitened
from fuzz.random_problems import Example, Problem, problem
from fuzz.tuned import dense_at, tuning_defects, with_factored_scale
from scipy.optimize import minimize_scalar
from snapshot import assert_unchanged, snapshot
from torch import Tensor, nn

import laplace_sampling
from benchmarks.time_limit import time_limit
from laplace_sampling import ConvergenceWarning, Evidence, LinearisedLaplace, NotFittedError

# Seconds of the processor after which an example counts as one that does not end: the longest take 25.
_LONGEST = 120.0
# The logarithm of one over the probability of a false alarm of one comparison.
_ALARM = math.log(1e9)
# Claimed relative error of standard deviations: the default tolerance of a fit.
_TAU = 0.015

# What is wrong, in a few words that are the same for all examples, and in figures.
Defect = tuple[str, str]


class DoesNotEndError(Exception):
    """An example took too long."""


def is_sentence(error: BaseException) -> bool:
    """Whether an error is one that the library explains."""
    frames = traceback.extract_tb(error.__traceback__)
    own = str(Path(laplace_sampling.__file__).parent)
    raised_here = bool(frames) and frames[-1].filename.startswith(own)
    return isinstance(error, TypeError | ValueError | FloatingPointError | NotFittedError) and raised_here


def check(example: Example) -> list[Defect]:
    """What is wrong with one example."""
    case = problem(example)
    before, others = snapshot(case.model), _others(case.model)
    defects: list[Defect] = []
    caught: list[warnings.WarningMessage] = []
    try:
        with time_limit(_LONGEST, DoesNotEndError), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            defects += _fit_defects(case)
            defects += _tuning_defects(case)
    except Exception as error:
        if not is_sentence(error):
            defects.append((type(error).__name__, _last_line(error)))
    strange = [w for w in caught if f"{Path(torch.__file__).parent}" in w.filename]
    defects += [("a warning of torch", f"{w.category.__name__}: {w.message!s:.90}") for w in strange[:1]]
    assert_unchanged(case.model, before)
    assert _others(case.model) == others
    return defects


def _others(model: nn.Module) -> list[Any]:
    """Objects that modules hold, and states of random generators."""
    held = [{n: _identity(value) for n, value in m.__dict__.items() if n != "training"} for m in model.modules()]
    return [held, torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()]  # noqa: NPY002


def _identity(value: Any) -> Any:
    """A list is told by its entries, since recurrent layers make a new list whenever a weight is set."""
    if isinstance(value, list):
        return [_identity(entry) for entry in value]
    return id(value() if isinstance(value, weakref.ref) else value)


def _last_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    own = [f for f in frames if "laplace_sampling" in f.filename]
    ours = f" from {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    return f"{type(error).__name__} at {at}{ours}: {str(error)[:160]}".replace("\n", " ")


def _fit_defects(case: Problem) -> list[Defect]:
    """Those of a fit at given hyperparameters."""
    alpha = 10.0**case.example.log_precision
    la = case.laplace()
    defects = _call("fit", lambda: la.fit(case.batches, progress=False, data=case.given))
    posterior, known, dense = None, False, with_factored_scale(case, la)
    if la.converged_:
        posterior, _, known = dense.posterior(alpha)
    defects += prediction_defects(case, la, posterior if known else None, dense, alpha)
    if known and posterior is not None and not defects:
        defects += _paired_defects(case, la, posterior)
    return defects


def _paired_defects(case: Problem, la: LinearisedLaplace, posterior: Whitened) -> list[Defect]:
    """The samples of a solver beside exact ones of the same draws: sampling noise is the same in both.

    Errors `ε` of samples are independent of these, so that they change standard deviations by `ε²/2`, which is claimed
    to be at most `τ`, and by chance by `ε/√(Kγ)`.
    """
    errors = {
        "krylov": 2 * _TAU,
        "cg": 2 * _TAU,
        "dual": 2 * _TAU,
        "svrg": math.sqrt(2 * _TAU),
        "sgd": math.sqrt(2 * _TAU),
    }
    if case.example.method not in errors or posterior.gamma < 1e-6:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exact = case.laplace("exact").fit(case.batches, progress=False, data=case.given)
    squares, expected = (_training_squares(each, posterior, case.dense) for each in (la, exact))
    ratio = math.sqrt(squares / expected)
    by_chance = errors[case.example.method] / math.sqrt(case.example.num_samples * posterior.gamma)
    if abs(ratio - 1) <= _TAU + 4 * by_chance:
        return []
    return [("standard deviations differ from those of exact samples of the same draws", f"by the factor {ratio:.3g}")]


def _tuning_defects(case: Problem) -> list[Defect]:
    """Those of a fit of hyperparameters."""
    la = case.laplace()
    # Steps of mini-batches take seconds each.
    steps = 2 if case.example.method in ("sgd", "svrg") else 10
    arguments = {"criterion": Evidence(max_steps=steps), "progress": False, "data": case.given}
    defects = _call("tuning", lambda: la.fit_hyperparameters(case.batches, **arguments))
    problems = tuning_defects(case, la)
    dense, alpha = dense_at(case, la), float(la.prior_precision_[0]) if len(la.prior_precision_) == 1 else 1.0
    posterior, known = None, False
    if la.converged_:
        posterior, _, known = dense.posterior(alpha)
    after = prediction_defects(case, la, posterior if known else None, dense, alpha)
    return defects + problems + [(f"{what}, at fitted hyperparameters", figures) for what, figures in after]


def _call(what: str, fit: Callable[[], LinearisedLaplace]) -> list[Defect]:
    """Fits, and compares `converged_` with the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        la = fit()
    for warning in caught:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if la.converged_ == any(issubclass(w.category, ConvergenceWarning) for w in caught):
        return [(f"`converged_` and the warnings of {what} disagree", f"converged_={la.converged_}")]
    return []


def prediction_defects(
    case: Problem, la: LinearisedLaplace, posterior: Whitened | None, dense: Dense, alpha: float
) -> list[Defect]:
    """Those of predictions at a posterior that is known, or of what is not finite where it is not."""
    pred, name = la.predict(case.test), case.example.method
    covariance, deviations = pred.covariance().double(), pred.deviations.flatten(2).double()
    for what, tensor in (("samples", la.samples_), ("a covariance", covariance), ("an output", pred.outputs)):
        if not bool(tensor.isfinite().all()):
            return [(f"{what} is not finite", f"converged_={la.converged_}")]
    if posterior is None or not la.converged_ or name == "kfac":
        return []
    if name == "diagonal":
        return _diagonal_defects(case, posterior, dense.features(case.test_J, alpha), covariance)
    defects = []
    test = dense.features(case.test_J, alpha)
    expected = torch.stack([posterior.covariance(rows) for rows in test])
    if pred.function is not None:
        defects += _covariance_defects(case, covariance, expected)
    K = len(deviations)
    variance = expected.diagonal(dim1=1, dim2=2)
    for n, c in torch.cartesian_prod(torch.arange(len(test)), torch.arange(variance.shape[1])):
        squares, scale = float(deviations[:, n, c].square().sum()), float(variance[n, c])
        if scale > 1e-12 * float(variance.max()):  # else rounding decides
            defects += _size_defect("a sample variance", squares, torch.full((K,), scale), _TAU)
    total, leverage = _training_squares(la, posterior, dense), posterior.leverage
    return [*defects[:1], *_size_defect("the size of the samples", total, leverage.repeat(K), _TAU)]


def _training_squares(la: LinearisedLaplace, posterior: Whitened, dense: Dense) -> float:
    """`Σ_k ‖Φζ_k‖²_B`, whose mean is `K γ`."""
    J, B = dense.J, posterior.B
    outputs = torch.einsum("ncp,kp->knc", J, la.samples_.double())
    return float(torch.einsum("knc,ncd,knd->", outputs, B, outputs))


def _size_defect(what: str, value: float, scales: Tensor, tau: float) -> list[Defect]:
    """Whether `Σ a_i z_i²` is what standard normal `z` may give, beside a claimed error of `τ` of its root."""
    mean = float(scales.sum())
    if not mean > 0:  # data without effect
        return []
    ratio = value / mean
    nearer = ratio / (1 + tau) ** 2 if ratio > 1 else min(1.0, ratio / (1 - tau) ** 2)
    if log_probability(nearer, scales / mean) > -_ALARM:
        return []
    return [(f"{what} is wrong", f"{ratio:.3g} times what it should be, of {len(scales)} squares")]


def log_probability(value: float, scales: Tensor) -> float:
    """A bound on the log probability that `Σ a_i z_i²`, whose mean is one, is as far off as a value, by Chernoff."""
    a = scales.numpy()
    side = 1.0 if value < 1 else -1.0
    largest = math.log(1e9) if value < 1 else math.log(0.5 / a.max() * (1 - 1e-9))

    def bound(log_rate: float) -> float:
        rate = math.exp(log_rate)
        return side * rate * value - 0.5 * float(np.log1p(side * 2 * rate * a).sum())

    lowest: Any = minimize_scalar(bound, bounds=(largest - 40, largest), method="bounded")
    return min(0.0, float(lowest.fun))


def _covariance_defects(case: Problem, covariance: Tensor, expected: Tensor) -> list[Defect]:
    allowed = 1e-6 if case.example.dtype == "float64" else 1e-3
    scale = expected.diagonal(dim1=1, dim2=2).sqrt()
    outer = scale[:, :, None] * scale[:, None, :]
    error = float(((covariance - expected).abs() / outer.clamp_min(1e-300)).max())
    # The mode of a factored posterior, at which `B` is taken, is known to the tolerance of a fit.
    allowed = 0.03 if case.example.method == "diagonal" else allowed
    if error <= allowed:
        return []
    return [("an exact covariance is wrong", f"relative error {error:.2g}")]


def _diagonal_defects(case: Problem, posterior: Whitened, test: Tensor, covariance: Tensor) -> list[Defect]:
    """`(diag(M) + A)⁻¹` in place of `H⁻¹`."""
    diagonal = ((posterior.V * posterior.s) ** 2).sum(1)
    test = test / (1 + diagonal).sqrt()
    return _covariance_defects(case, covariance, torch.einsum("ncp,ndp->ncd", test, test))
