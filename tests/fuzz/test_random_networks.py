"""Random small networks, fitted by every method and compared with dense algebra in float64.

`FUZZ_EXAMPLES` says how many are drawn for each method, and `FUZZ_SEED` which; hypothesis then looks for the simplest
one that fails. `check(Example(...))` repeats it.
"""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("hypothesis", reason="hypothesis, which draws the networks, is not installed")

from fuzz.comparison import check
from fuzz.random_problems import METHODS, Example, examples
from hypothesis import HealthCheck, Phase, given, seed, settings

from laplace_sampling import LinearisedLaplace
from laplace_sampling.predictions.dense_covariance import DenseCovariance

pytestmark = pytest.mark.fuzz

EXAMPLES, SEED = (int(os.environ.get(name, default)) for name, default in (("FUZZ_EXAMPLES", 25), ("FUZZ_SEED", 0)))
# With noise that is given and far too small the evidence has two maxima. Expectation maximisation climbs to the next.
TWO_MAXIMA, BY_EM = "another maximum of the evidence is higher", ("cg", "svrg", "sgd")
# One datum of several outputs, and two of more, under weak priors.
FEW_DATA = [
    Example(
        seed=528, network="heads", likelihood="heads", depth=0, steps=3, method="svrg", log_precision=-3,
        weighted=True, num_samples=20,
    ),
    Example(
        seed=9, network="tokens", likelihood="poisson", num_data=2, outputs=3, activation="silu", method="svrg",
        prior="layerwise", log_precision=-2, linear_model="affine", batch_size=20, weighted=True, num_samples=20,
        training=True,
    ),
]  # fmt: skip
SMALL = Example(num_data=12, width=3, likelihood="classification", outputs=2)


def is_known(example: Example, kind: str) -> bool:
    return kind == TWO_MAXIMA and example.noise == "given" and example.method in BY_EM


@pytest.mark.parametrize("method", METHODS)
def test_random_networks(method: str) -> None:
    @seed(SEED)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(examples(method))
    def compare(example: Example) -> None:
        assert not [defect for defect in check(example) if not is_known(example, defect[0])]

    compare()


@pytest.mark.parametrize("example", FEW_DATA, ids=lambda example: example.network)
def test_mini_batches_of_very_few_data(example: Example) -> None:
    assert not check(example)


def test_zeros_of_a_kernel_are_no_variance_beside_a_tiny_noise() -> None:
    """Its 48 observations have 14 weights: the other eigenvalues are zero, at `b = 10⁶` and `α = 10⁻⁸` as well."""
    example = Example(
        seed=906, network="image", num_data=6, outputs=2, width=6, activation="relu", log_noise=6, noise="given",
        parameters="head", linear_model="homogeneous",
    )  # fmt: skip
    assert not check(example)


def test_an_example_says_all_that_repeats_it() -> None:
    assert eval(repr(SMALL), {"Example": Example}) == SMALL
    assert repr(Example(seed=3)) == "Example(seed=3)"


@pytest.mark.parametrize("method", ["exact", "krylov", "diagonal"])
def test_a_wrong_variance_is_found(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = replace(SMALL, method=method, num_data=60)
    assert not check(example)
    predict, blocks = LinearisedLaplace.predict, DenseCovariance.blocks

    def wrong(self: LinearisedLaplace, x: Tensor) -> Any:
        pred = predict(self, x)
        return replace(pred, deviations=5 * pred.deviations)

    monkeypatch.setattr(DenseCovariance, "blocks", lambda self: 1.1 * blocks(self))
    monkeypatch.setattr(LinearisedLaplace, "predict", wrong)
    assert any("wrong" in kind for kind, _ in check(example))


def test_an_error_of_torch_is_no_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: LinearisedLaplace, x: Tensor) -> Any:
        raise ValueError(str(torch.linalg.cholesky(-torch.eye(2))))

    monkeypatch.setattr(LinearisedLaplace, "predict", fails)
    assert [kind for kind, _ in check(SMALL)] == ["_LinAlgError"]


@pytest.mark.filterwarnings("ignore")
def test_hyperparameters_off_the_evidence_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    example = Example(num_data=30, width=4, steps=100, noise="mode")
    assert not check(example)
    tuned = LinearisedLaplace.fit_hyperparameters

    def wrong(self: LinearisedLaplace, loader: Any, **arguments: Any) -> LinearisedLaplace:
        low = float(tuned(self, loader, **arguments).prior_precision_) * 1000
        return tuned(self, loader, **arguments, precision_bounds=(low, 2 * low))

    monkeypatch.setattr(LinearisedLaplace, "fit_hyperparameters", wrong)
    monkeypatch.setattr(LinearisedLaplace, "converged_", True)
    assert "fitted hyperparameters are not at a maximum of the evidence" in [kind for kind, _ in check(example)]
