"""The projector and the scores of the benchmark of tomography, against formulas."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import norm

from benchmarks.tomography import contenders, problems
from benchmarks.tomography.contenders import Settings, pixel_process, with_spread
from benchmarks.tomography.networks import objective
from benchmarks.tomography.problems import Problem, measured
from benchmarks.tomography.projector import back_projected, projector
from benchmarks.tomography.scores import Estimate, constants, held_out_coverage, scores
from laplace_sampling.likelihoods.measurement import as_measurement

ANGLES = np.arange(12) * np.pi / 12


def noise_variance(problem: Problem) -> float:
    assert problem.noise is not None
    return problem.noise**2


def disc(side: int) -> np.ndarray:
    grid = np.arange(side) - (side - 1) / 2
    return (np.hypot(grid, grid[:, None]) < 0.3 * side).astype(np.float32)


def estimate(problem: Problem, num: int = 40) -> Estimate:
    random = np.random.default_rng(1)
    mean = problem.truth + 0.1 * random.standard_normal(problem.truth.shape)
    return Estimate(mean, 0.1 * random.standard_normal((num, *problem.truth.shape)), 0.04)


def test_shadows_of_a_disc_are_its_chords_and_move_with_the_centre_of_rotation() -> None:
    side, chord = 64, 2 * 0.3 * 64
    y = (projector(side, ANGLES, 92) @ disc(side).ravel()).reshape(12, 92)
    np.testing.assert_allclose(y.sum(1), disc(side).sum(), rtol=1e-5)
    assert np.abs(y[:, 45:47].mean(1) - chord).max() < 0.06 * chord
    moved = (projector(side, ANGLES, 92, (92 - 1) / 2 - 5) @ disc(side).ravel()).reshape(12, 92)
    np.testing.assert_allclose(moved[:, :-5], y[:, 5:], atol=1e-4)


def test_opposite_views_mirror_each_other() -> None:
    random = np.random.default_rng(0).random(20**2)
    one, other = projector(20, np.array([0.4, 0.4 + np.pi]), 31) @ random.reshape(-1), None
    one, other = one.reshape(2, 31)
    np.testing.assert_allclose(one, other[::-1], rtol=1e-4, atol=1e-5)


def test_back_projections_from_many_angles_are_the_image() -> None:
    angles = np.arange(180) * np.pi / 180
    T, image = projector(48, angles, 68), disc(48)
    found = back_projected(T, T @ image.ravel(), 180)
    inner = np.hypot(*np.mgrid[-23.5:24, -23.5:24]) < 10
    assert abs(found[inner].mean() - 1) < 0.03
    assert np.sqrt(((found - image) ** 2).mean()) < 0.15


def test_the_gradient_of_training_is_that_of_the_dense_matrix() -> None:
    problem, y = measured("disc", disc(16), 6, 0.05, 0), torch.randn(6 * 23)
    image = torch.randn(1, 1, 16, 16, requires_grad=True)
    found = torch.autograd.grad(objective(image, as_measurement(problem.T, image), y, 0.1), image)[0]
    pixels = image[0, 0]
    variation = (pixels[1:] - pixels[:-1]).abs().sum() + (pixels[:, 1:] - pixels[:, :-1]).abs().sum()
    dense = (torch.as_tensor(problem.T.toarray()) @ image.flatten() - y).square().mean() + 0.1 * variation
    torch.testing.assert_close(found, torch.autograd.grad(dense, image)[0])


def test_scores_are_those_of_independent_normal_distributions() -> None:
    problem = measured("disc", disc(20), 6, 0.05, 0)
    found, given = scores(problem, estimate(problem)), estimate(problem)
    total = np.sqrt((given.deviations**2).mean(0) + problem.pixel_noise)
    density = norm.logpdf(problem.truth, given.mean, total)
    assert found["ll"] == pytest.approx(density.mean())
    assert found["ll_object"] == pytest.approx(density[problem.truth > 0].mean())
    inside = np.abs(problem.truth - given.mean) <= norm.ppf(0.95) * total
    assert found["coverage_outside"] == pytest.approx(inside[problem.regions["outside"]].mean())
    # errors and standard deviations are alike by construction
    assert found["factor"] == pytest.approx(1, abs=0.1)
    assert found["ll_factor"] >= found["ll"]


def test_patches_take_half_of_the_diagonal_and_of_all_correlations() -> None:
    problem = measured("disc", disc(20), 6, 0.05, 0)
    given, expected = estimate(problem), 0.0
    for row in (slice(0, 10), slice(10, 20)):
        for column in (slice(0, 10), slice(10, 20)):
            flat = given.deviations[:, row, column].reshape(40, -1)
            C = flat.T @ flat / 40
            C = (C + np.diag(np.diag(C))) / 2 + problem.pixel_noise * np.eye(100)
            error = (problem.truth - given.mean)[row, column].ravel()
            expected += -0.5 * (error @ np.linalg.solve(C, error) + np.linalg.slogdet(2 * np.pi * C)[1]) / 400
    assert scores(problem, given)["ll_patches"] == pytest.approx(expected)


def test_constants_are_the_best_of_their_kind() -> None:
    problem = measured("disc", disc(20), 6, 0.05, 0)
    mean = estimate(problem).mean * 0.9
    found = {name: scores(problem, given)["ll"] for name, given in constants(problem, mean).items()}
    for name, given in constants(problem, mean).items():
        for factor in (0.9, 1.1):
            other = replace(given, deviations=factor * given.deviations)
            assert scores(problem, other)["ll"] < found[name]
    assert found["two constants"] > found["one constant"]


def test_held_out_measurements_are_covered_by_their_own_distribution() -> None:
    """Deviations and noise of the right size cover 90 % of 6 × 29 measurements, up to four standard errors."""
    problem, random = measured("disc", disc(20), 6, 0.05, 0), np.random.default_rng(2)
    shift, draws = 0.1 * random.standard_normal((1, 20, 20)), 0.1 * random.standard_normal((2000, 20, 20))
    given = Estimate(problem.truth + shift[0], draws, noise_variance(problem))
    assert abs(held_out_coverage(problem, given) - 0.9) < 4 * (0.09 / 174) ** 0.5


def test_the_spread_of_reconstructions_is_added_to_the_covariance() -> None:
    random = np.random.default_rng(3)
    others, num = 0.3 * random.standard_normal((4, 8, 8)), 20_000
    given = Estimate(others[0], 0.1 * random.standard_normal((num, 8, 8)), 0.04)
    found = with_spread(given, list(others), 1 / 3)
    np.testing.assert_allclose(found.mean, others.mean(0), atol=1e-6)
    flat, expected = found.deviations.reshape(num, -1), 0.01 * np.eye(64) + np.cov(others.reshape(4, -1).T)
    assert np.abs(flat.T @ flat / num - expected).max() < 6 * expected.max() * (2 / num) ** 0.5


def test_the_process_of_pixels_is_that_of_dense_algebra() -> None:
    """Mean and variance by transforms on the torus, against its kernel matrix at the pixels."""
    problem, settings = measured("disc", disc(12), 8, 0.05, 0), Settings(samples=4000)
    found = pixel_process(problem, settings, noise_variance(problem))
    psi, a = found.facts["psi"], found.facts["a"]
    where = np.moveaxis(np.mgrid[:12, :12], 0, -1).reshape(-1, 2).astype(float)
    K = a * np.exp(-np.hypot(*np.moveaxis(where[:, None] - where, -1, 0)) / psi)
    T = problem.T.toarray().astype(float)
    gain = K @ T.T @ np.linalg.inv(T @ K @ T.T + noise_variance(problem) * np.eye(len(T)))
    # the torus of twice the side has a kernel whose few negative eigenvalues are set to zero
    np.testing.assert_allclose(found.mean.ravel(), gain @ problem.y, atol=0.02)
    variance = np.diag(K - gain @ T @ K)
    np.testing.assert_allclose(found.stddev.ravel() ** 2, variance, rtol=0.15, atol=0.02 * variance.max())


def test_problems_are_what_their_names_say() -> None:
    assert (
        {problems.letter(k).shape for k in range(5)} == {problems.digit(k, None).shape for k in range(5)} == {(28, 28)}
    )
    image = problems.phantom(32, 0)
    assert 0.8 < image.max() <= 1
    problem = measured("phantom", image, 10, 0.1, 0)
    error = problem.y - problem.T @ image.ravel()
    assert error.std() == pytest.approx(0.1 * (problem.T @ image.ravel()).mean(), rel=0.15)
    part = problem.left_out(1, 5)
    assert len(part.angles) == 8
    np.testing.assert_allclose(part.held_y, problem.y.reshape(10, -1)[[1, 6]].ravel())


def test_a_linearised_network_scores_its_own_image() -> None:
    problem = measured("disc", disc(12), 6, 0.05, 0)
    settings = Settings(scales=2, width=4, steps=30, samples=16)
    prior = contenders.Prior.of(problem, settings)
    found = scores(problem, contenders.linearised(problem, prior, settings))
    assert all(np.isfinite(value) for value in found.values())
