"""Random small networks, fitted by every method and compared with dense algebra in float64.

`FUZZ_EXAMPLES` says how many are drawn for each method, and `FUZZ_SEED` which; hypothesis then looks for the simplest
one that fails. `check(Example(...))` repeats it.
"""

import os

import pytest

pytest.importorskip("hypothesis", reason="hypothesis, which draws the networks, is not installed")

from fuzz.comparison import check
from fuzz.random_problems import METHODS, Example, examples
from hypothesis import HealthCheck, Phase, given, seed, settings

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
