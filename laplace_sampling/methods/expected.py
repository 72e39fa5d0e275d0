"""What error bars gave the networks of the benchmark, for `Plan` to print beside what they cost.

Each number is a mean over cases in `benchmarks/records/means.csv`, of fits within the default budget; a test of
the benchmark compares them with it.
"""

import textwrap

from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood

# Without and with validation data; `None` where it was not measured.
Pair = tuple[float | None, float | None]
# By the method, over the classifications of the second half: the gain in log-likelihood of test data over the network
# alone, in nats; the same of corrupted ones, severity 3 to 5; and the AUROC of images of other things by `epistemic`.
CLASSIFICATION: dict[str, tuple[Pair, Pair, Pair]] = {
    "subset": ((0.046, 0.128), (0.36, 0.48), (0.80, 0.81)),
    "kfac": ((0.042, None), (0.29, None), (0.78, None)),
    "last_layer": ((0.021, 0.125), (0.09, 0.51), (0.77, 0.80)),
}
# The AUROC by the entropy of the network alone.
ALONE = 0.65
# Over its regressions, the gain in log-likelihood.
REGRESSION: dict[str, Pair] = {"all weights": (0.12, 0.32), "the last layer": (0.00, 0.02)}


def columns(likelihood: Likelihood | None) -> tuple[str, ...]:
    """The heads of `expected`."""
    return ("gain", "corrupted", "other data") if _is(likelihood, Categorical) else ()


def expected(likelihood: Likelihood | None, method: str) -> tuple[str, ...]:
    """What a method gave, without / with validation data; empty where it was not measured."""
    found = CLASSIFICATION.get(method, ((None, None),) * 3)
    return tuple(_text(pair) for _, pair in zip(columns(likelihood), found, strict=False))


def in_words(likelihood: Likelihood | None) -> str:
    """What the columns are; for a regression, what was gained. Empty, or with an empty line before it."""
    text = ""
    if _is(likelihood, Categorical):
        text = (
            "The last columns are means over 20 classifiers of images, without / with `val_loader`: gains in "
            "log-likelihood over the network alone, in nats, on test images and on corrupted ones, and the area under "
            f"the ROC curve of `epistemic` for images of other things ({ALONE} by the entropy of the network). With "
            "`val_loader` the last layer gives nearly all of it."
        )
    elif _is(likelihood, Gaussian):
        gains = " and ".join(f"{_text(pair)} by {name}" for name, pair in REGRESSION.items())
        text = (
            f"Three regressions of the benchmark gained {gains}, in nats of log-likelihood a datum over the network "
            "alone, without / with `val_loader`: the last layer is not enough."
        )
    return "\n" + textwrap.fill(text, 120) if text else ""


def _is(likelihood: Likelihood | None, kind: type[Likelihood]) -> bool:
    return likelihood is not None and isinstance(likelihood.unweighted, kind)


def _text(pair: Pair) -> str:
    return "" if pair == (None, None) else " / ".join("–" if value is None else f"{value:.2f}" for value in pair)
