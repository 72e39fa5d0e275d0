"""Where to measure next, against dense matrices and fits with the measurements that were chosen."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import inverse
import pytest
import torch
from grids import covering
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import Gaussian, GPrior, IsotropicPrior, LinearisedLaplace, NotFittedError
from laplace_sampling.design import CRITERIA, greedy, scores

SIDE, NOISE, ALPHA = 6, 30.0, 0.5
PRIORS = {"isotropic": IsotropicPrior(ALPHA), "g-prior": GPrior(ALPHA), "layerwise": "layerwise"}


def blocks(side: int, num_angles: int) -> list[Tensor]:
    """The rows of each angle without those of zeros; they are not of one size."""
    T = torch.as_tensor(inverse.radon(side, num_angles).toarray())
    found = [rows[rows.any(1)] for rows in T.reshape(num_angles, side, -1)]
    return [found[0][1:], *found[1:]]


def eye(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


def fit(T: Tensor, *, side: int = SIDE, prior: Any = None, **settings: Any) -> LinearisedLaplace:
    """A fit of measurements of a picture at given precisions of prior and noise."""
    model, z = inverse.picture(side)
    prior, likelihood = prior or IsotropicPrior(ALPHA), Gaussian(NOISE, learn=False, observe=T)
    la = LinearisedLaplace(model, likelihood, prior=prior, num_samples=4, **settings)
    return la.fit([(z, inverse.noisy(model(z).detach().flatten(1) @ T.mT))], progress=False, budget=None)


def regression(x: Tensor, method: str = "exact", precision: Any = (10.0, 40.0)) -> LinearisedLaplace:
    """A fit of a network of two outputs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    likelihood = Gaussian(torch.tensor(precision, dtype=torch.float64), learn=False)
    la = LinearisedLaplace(model, likelihood, prior=IsotropicPrior(ALPHA), method=method, num_samples=4)
    return la.fit([(x, x.sin())], progress=False, budget=None)


def inputs(num: int, seed: int) -> Tensor:
    return torch.randn(num, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense_scores(
    la: LinearisedLaplace, x: Tensor, measured: Tensor, noise: Tensor, candidates: list[Tensor], targets: Tensor
) -> dict[str, Tensor]:
    """All criteria from the Jacobian of all outputs at `x`, of which the others are matrices."""
    model = la.network.module
    weights = {name: p.detach() for name, p in model.named_parameters()}
    J = torch.func.jacrev(lambda w: torch.func.functional_call(model, w, (x,)).flatten())(weights)
    J = torch.cat([g.flatten(1) for g in J.values()], 1)
    H = la.posterior_.prior.diagonal().double().diag() + (measured @ J).T @ (noise[0] * (measured @ J))
    found = {name: [] for name in CRITERIA}
    for rows in candidates:
        b, C = noise[1][: len(rows)], rows @ J @ torch.linalg.solve(H, (rows @ J).T)
        cross = targets @ J @ torch.linalg.solve(H, (rows @ J).T)
        found["eig"].append(0.5 * torch.logdet(eye(len(C)) + C * b))
        found["ese"].append(C.trace())
        found["variance"].append((cross @ torch.linalg.solve(C + (1 / b).diag_embed(), cross.T)).trace())
    return {name: torch.stack(values) for name, values in found.items()}


@covering(prior=PRIORS, method=["exact", "dual", "krylov"])
def test_scores_of_measurements_are_those_of_dense_matrices(prior: str, method: str) -> None:
    """Exact ones to rounding, others up to the noise of their samples."""
    candidates, targets, pilots = blocks(SIDE, 5), eye(SIDE**2)[::2], torch.cat(blocks(SIDE, 2))
    la, ones = fit(pilots, prior=PRIORS[prior], method=method), torch.full((SIDE, 1), NOISE, dtype=torch.float64)
    expected = dense_scores(la, inverse.picture(SIDE)[1], pilots, (ones[:1], ones[:, 0]), candidates, targets)
    for criterion in CRITERIA:
        given = {"targets": targets} if criterion == "variance" else {}
        samples = {"exact": None, "dual": 1000, "krylov": 100}[method]
        found = scores(la, candidates, criterion, **given, num_samples=samples)
        if samples is None:
            assert_close(found, expected[criterion], rtol=1e-7, atol=0)
            continue
        # Three standard errors of a sum over one direction. Of the angle that a pilot has seen, products of samples
        # leave noise of what the others have.
        error = 3 * math.sqrt(2 / samples)
        assert_close(found, expected[criterion], rtol=error, atol=0.1 * error * float(expected[criterion].max()))


@covering(method=["exact", "kfac"], targets=[True, False])
def test_scores_of_inputs_are_those_of_dense_matrices(method: str, targets: bool) -> None:
    """Blocks of two outputs of unequal noise; `"kfac"`, whose posterior is another one, by its own covariances."""
    x, new, at = inputs(12, 0), inputs(5, 1), inputs(7, 2)
    la, noise = regression(x, method), torch.tensor([10.0, 40.0], dtype=torch.float64)
    both = torch.cat([x, new, at])
    parts = list(eye(2 * len(both)).split([24, *[2] * 5, 14]))
    if method == "exact":
        expected = dense_scores(la, both, parts[0], (noise.repeat(12)[:, None], noise), parts[1:-1], parts[-1])
    else:
        joint = la.predict(torch.cat([new, at])).joint_covariance()
        C = [joint[2 * i : 2 * i + 2] for i in range(5)]
        own = [rows[:, 2 * i : 2 * i + 2] for i, rows in enumerate(C)]
        expected = {
            "eig": torch.stack([0.5 * torch.logdet(eye(2) + c * noise) for c in own]),
            "ese": torch.stack([c.trace() for c in own]),
            "variance": torch.stack(
                [
                    (rows[:, 10:].T @ torch.linalg.solve(c + (1 / noise).diag_embed(), rows[:, 10:])).trace()
                    for c, rows in zip(own, C, strict=True)
                ]
            ),
        }
    if targets:
        assert_close(scores(la, new, "variance", targets=at), expected["variance"], rtol=1e-7, atol=1e-12)
        found = scores(la, new, "variance", targets=at, num_samples=4000)
        assert_close(found, expected["variance"], rtol=0.15, atol=0.02 * float(expected["variance"].max()))
    else:
        for criterion in ("eig", "ese"):
            assert_close(scores(la, new, criterion), expected[criterion], rtol=1e-7, atol=1e-12)
            assert_close(scores(la, new, criterion, num_samples=4000), expected[criterion], rtol=0.1, atol=0)


@covering(method=["exact", "dual", "krylov"], criterion=CRITERIA)
def test_greedy_is_what_fits_with_the_chosen_measurements_say(method: str, criterion: str) -> None:
    """Each gain is the score after a fit of the blocks before it, and the best one; by samples up to their noise."""
    candidates, pilots = blocks(SIDE, 7), torch.cat(blocks(SIDE, 2))
    given = {"targets": eye(SIDE**2)} if criterion == "variance" else {}
    la = fit(pilots, method=method)
    design = greedy(la, candidates, 4, criterion, **given, num_samples=200 if method == "krylov" else None)
    assert len(set(design.chosen)) == 4
    for step, (best, gain) in enumerate(zip(design.chosen, design.gains, strict=True)):
        T = torch.cat([pilots, *(candidates[number] for number in design.chosen[:step])])
        refit = scores(fit(T, method="exact"), candidates, criterion, **given)
        refit[design.chosen[:step]] = -math.inf
        exact = method == "exact"
        assert_close(gain, float(refit[best]), rtol=1e-7 if exact else 0.3, atol=0)
        assert float(refit[best]) >= (1 - 1e-9 if exact else 0.8) * float(refit.max())


@covering(method=["exact", "subset"], samples=[None, 2000])
def test_a_batch_of_inputs_is_what_fits_with_them_say(method: str, samples: int | None) -> None:
    x, new, at = inputs(10, 0), inputs(15, 1), inputs(20, 2)
    la = regression(x, method)
    design = greedy(la, new, 4, "variance", targets=at, num_samples=samples)
    # A part of the data keeps as many eigenvectors as its tolerance of 1.5 % needs, of which variances have twice that.
    error = 0.2 if samples else {"exact": 1e-6, "subset": 0.03}[method]
    for step, (best, gain) in enumerate(zip(design.chosen, design.gains, strict=True)):
        refit = scores(regression(torch.cat([x, new[design.chosen[:step]]])), new, "variance", targets=at)
        refit[design.chosen[:step]] = -math.inf
        assert_close(gain, float(refit[best]), rtol=error, atol=0)
        assert float(refit[best]) >= (1 - error) * float(refit.max())


@pytest.mark.parametrize("criterion", ["eig", "ese"])
def test_choices_by_a_thousand_samples_are_the_exact_ones(criterion: str) -> None:
    """On 9 of 10 steps at least, each after the same choices: 30 angles of 10 × 10 pixels."""
    side = 10
    candidates = blocks(side, 30)
    la, same = fit(torch.cat(candidates[::10]), side=side, method="exact"), 0
    for seed in range(10):
        exact = scores(la, candidates, criterion)
        found = scores(la, candidates, criterion, num_samples=1000)
        best = int(exact.argmax())
        same += best == int(found.argmax())
        la = fit(torch.cat([la.settings.observation, candidates[best]]), side=side, method="exact", seed=seed)
    assert same >= 9


def test_the_posterior_stays_as_it_is() -> None:
    pilots, candidates = torch.cat(blocks(SIDE, 2)), blocks(SIDE, 3)
    la, other = (fit(pilots, method="exact") for _ in range(2))
    greedy(la, candidates, 2, num_samples=100)
    scores(la, candidates)
    assert torch.equal(la.samples_, other.samples_)
    assert torch.equal(la.sample(2), other.sample(2))


@pytest.mark.parametrize("samples", [None, 50])
def test_a_file_goes_on_where_it_ended(tmp_path: Path, samples: int | None) -> None:
    la, candidates, file = fit(torch.cat(blocks(SIDE, 2)), method="exact"), blocks(SIDE, 9), tmp_path / "design.jsonl"
    whole = greedy(la, candidates, 6, num_samples=samples)
    assert greedy(la, candidates, 3, num_samples=samples, file=file).chosen == whole.chosen[:3]
    with file.open("a") as lines:
        lines.write('{"chosen": 1, "ga')  # of a process that was killed
    found = greedy(la, candidates, 6, num_samples=samples, file=str(file))
    assert found.chosen == whole.chosen
    assert_close(found.gains, whole.gains, rtol=1e-9, atol=0)
    assert [json.loads(line)["chosen"] for line in file.read_text().splitlines()[1:]] == whole.chosen
    written = file.read_bytes()
    assert greedy(la, candidates, 2, num_samples=samples, file=file).chosen == whole.chosen[:2]
    assert file.read_bytes() == written
    with pytest.raises(ValueError, match="of another call, whose criterion"):
        greedy(la, candidates, 2, "ese", num_samples=samples, file=file)


def test_a_file_of_another_call_is_neither_used_nor_changed(tmp_path: Path) -> None:
    """Other candidates, posteriors and targets of the same shapes are told by the scores before any choice."""
    la, x, file = regression(inputs(30, 0)), inputs(8, 1), tmp_path / "design.jsonl"
    targets = inputs(5, 3)
    greedy(la, x, 2, "variance", targets=targets, file=file)
    written = file.read_bytes()
    for posterior, candidates, wanted in (
        (la, inputs(8, 2), targets),
        (regression(torch.cat([inputs(30, 0), x[:2]])), x, targets),
        (la, x, inputs(5, 4)),
        (la, x[:7], targets),
    ):
        with pytest.raises(ValueError, match="of another call, whose scores differ"):
            greedy(posterior, candidates, 2, "variance", targets=wanted, file=file)
        assert file.read_bytes() == written
    for text in ("my notes", "my\nnotes\n", "[1, 2]\n", '{"criterion": "variance"}\n', written.decode().split("\n")[0]):
        file.write_text(text)
        with pytest.raises(ValueError, match="something else than choices"):
            greedy(la, x, 2, "variance", targets=targets, file=file)
        assert file.read_text() == text
    file.write_text(written.decode() + '{"chosen": 99, "gain": 1.0}\n')
    with pytest.raises(ValueError, match="of another call, whose candidates differ"):
        greedy(la, x, 2, "variance", targets=targets, file=file)


def test_a_loaded_regression_scores_inputs_without_its_data(tmp_path: Path) -> None:
    la = regression(inputs(60, 0))
    la.save(tmp_path / "la.pt", include_data=False)
    loaded = LinearisedLaplace.load(tmp_path / "la.pt", la.network.module)
    assert_close(scores(loaded, inputs(5, 1)), scores(la, inputs(5, 1)))
    with pytest.raises(NotFittedError, match="`scores` needs the training data"):
        scores(loaded, inputs(5, 1), num_samples=10)


def test_bad_arguments_are_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        classes = LinearisedLaplace(nn.Linear(2, 3).double(), "classification", method="exact")
        classes.fit([(inputs(9, 0), torch.arange(9) % 3)], progress=False)
    pilots, x = torch.cat(blocks(SIDE, 2)), inputs(9, 0)
    la, of_inputs, candidates = fit(pilots, method="exact"), regression(x), blocks(SIDE, 3)
    calls: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "needs a regression with Gaussian noise", lambda: greedy(classes, x, 1)),
        (ValueError, "is not known; use one of eig, ese, variance", lambda: greedy(la, candidates, 1, "entropy")),
        (ValueError, "give both, or neither", lambda: greedy(la, candidates, 1, "variance")),
        (ValueError, "give both, or neither", lambda: scores(la, candidates, "eig", targets=eye(36))),
        (ValueError, "there are 3 candidates to choose from", lambda: greedy(la, candidates, 4)),
        (ValueError, "whole number of at least 1", lambda: greedy(la, candidates, 0)),
        (ValueError, "whole number of at least 2", lambda: scores(la, candidates, num_samples=1)),
        (ValueError, r"candidates\[1\].*has 35 columns, but the model gives 36", lambda: greedy(
            la, [candidates[0], candidates[1][:, 1:]], 1)),
        (ValueError, r"targets.*has 5 columns", lambda: scores(la, candidates, "variance", targets=eye(5))),
        (TypeError, "needs a fitted `LinearisedLaplace`", lambda: greedy(nn.Linear(2, 1), x, 1)),
        (ValueError, "`scores\\(targets\\)` needs inputs", lambda: scores(of_inputs, x, "variance", targets=x[:0])),
        (TypeError, "takes a list of operators", lambda: greedy(la, (lambda f: f, lambda u: u), 1)),
        (ValueError, "it is empty", lambda: greedy(la, [], 1)),
        (ValueError, "shape", lambda: greedy(of_inputs, x[:, :1], 1)),
        (ValueError, "contains NaN", lambda: greedy(of_inputs, x / 0 * 0, 1)),
        (NotFittedError, "`greedy` needs a fitted posterior", lambda: greedy(
            LinearisedLaplace(nn.Linear(2, 1), "regression"), x, 1)),
    ]  # fmt: skip
    for kind, message, call in calls:
        with pytest.raises(kind, match=message):
            call()
