"""Problems with the settings of their networks, and the contenders of each."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tomography import contenders, problems
from benchmarks.tomography.contenders import Prior, Settings
from benchmarks.tomography.networks import residuals
from benchmarks.tomography.problems import Problem
from benchmarks.tomography.scores import Estimate, constants
from laplace_sampling import Prior as WeightPrior

DROPOUT = 0.05
# Reconstructions from other initial weights, and parts of the angles that networks are trained without in turn.
_NETWORKS, _FOLDS = 5, 5


@dataclass(frozen=True)
class Study:
    """A problem by the `key` that its results are kept under, and what several contenders share."""

    what: str
    key: dict[str, Any]
    make: Callable[[], Problem] = field(compare=False)
    settings: Settings

    @cached_property
    def problem(self) -> Problem:
        return self.make()

    @cached_property
    def prior(self) -> Prior:
        return Prior.of(self.problem, self.settings)

    @cached_property
    def noise(self) -> float:
        """Variance of the measurements: what it is known to be, else of residuals."""
        if self.problem.noise is not None:
            return self.problem.noise**2
        return float(np.mean(residuals(self.prior.net, self.prior.z, self.problem)[0] ** 2))

    @cached_property
    def linearised(self) -> Estimate:
        return contenders.linearised(self.problem, self.prior, self.settings, self.noise)

    @cached_property
    def left_out_noise(self) -> float:
        """Variance of the residuals at angles that a network was trained without, each angle once."""
        squares = []
        for fold in range(_FOLDS):
            part = self.problem.left_out(fold, _FOLDS)
            prior = Prior.of(part, self.settings)
            squares.append(residuals(prior.net, prior.z, part)[1] ** 2)
        return float(np.mean(np.concatenate(squares)))

    def several_networks(self) -> Estimate:
        """The spread of reconstructions from other initial weights, added to the covariance of one."""
        others = [self.prior.mean] + [Prior.of(self.problem, self.settings, n).mean for n in range(1, _NETWORKS)]
        return contenders.with_spread(self.linearised, others, 1 / (_NETWORKS - 1))

    def contenders(self) -> dict[str, Callable[[], Estimate]]:
        """What makes each estimate, by its name."""
        problem, settings = self.problem, self.settings

        def again(prior: str | WeightPrior = settings.prior, **other: Any) -> Estimate:
            """Linearised with another prior, or about another network."""
            net = Prior.of(problem, settings, **other) if other else self.prior
            return contenders.linearised(problem, net, replace(settings, prior=prior), self.noise)

        found = {
            "linearised, g-prior": lambda: self.linearised,
            "linearised, isotropic": lambda: again("isotropic"),
            "linearised, noise of left-out angles": lambda: contenders.linearised(
                problem, self.prior, settings, self.left_out_noise
            ),
            "linearised, five networks": self.several_networks,
            "one constant": lambda: constants(problem, self.prior.mean)["one constant"],
            "two constants": lambda: constants(problem, self.prior.mean)["two constants"],
            "dropout": lambda: contenders.dropout(
                problem, Prior.of(problem, settings, dropout=DROPOUT), settings, self.noise
            ),
            "pixel process": lambda: contenders.pixel_process(problem, settings, self.noise),
        }
        if self.what == "letters":
            found["linearised, noise as input"] = lambda: again(noise=True)
            found["linearised, filter-wise"] = lambda: again(contenders.filterwise(settings))
        return found


def studies(options: argparse.Namespace) -> Iterator[Study]:
    """The problems of a part of the benchmark, with fewer and smaller ones if they are to be quick."""
    what, side = options.what, options.side or (32 if options.quick else 128)
    quick: dict[str, Any] = {"steps": 200, "samples": 32, "width": 8} if options.quick else {}
    if what == "letters":
        for noise, smoothness in ((0.05, 1e-4), (0.1, 3e-4)):
            for number in (0, 5) if options.quick else range(10):
                name = f"letter {problems.LETTERS[number]}" if number < 5 else f"digit {problems.DIGITS[number - 5]}"
                image = problems.letter(number) if number < 5 else problems.digit(number - 5, options.data)
                make = partial(problems.measured, name, image, 20, noise, number)
                key = {"name": name, "angles": 20, "noise": noise}
                yield Study(what, key, make, replace(Settings(smoothness=smoothness), **quick))
    elif what == "phantom":
        settings = Settings(**({"norm": True, "steps": 1000} | quick))
        for seed in range(1 if options.quick else 3):
            name = f"phantom {seed} of {side}"
            make = partial(problems.measured, name, problems.phantom(side, seed), 20, 0.05, seed)
            yield Study(what, {"name": name, "angles": 20, "noise": 0.05}, make, settings)
    else:
        file = (options.data or Path()) / "ct" / "tooth.h5"
        values: dict[str, Any] = {"norm": True, "sigmoid": False, "smoothness": 1e-3}
        # Intervals of the smaller network hold two thirds of the object, those of the larger one nearly all that they
        # promise.
        values |= {"steps": 1000} if options.small else {"scales": 4, "width": 32, "steps": 2000}
        name = f"tooth {side}, small" if options.small else f"tooth {side}"
        for angles in (20,) if options.quick else options.angles:
            make = partial(problems.tooth, file, side, angles)
            yield Study(what, {"name": name, "angles": angles}, make, Settings(**(values | quick)))
