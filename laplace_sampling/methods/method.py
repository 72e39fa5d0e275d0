"""`Method`: how a posterior is found; the interface that each file of this room implements."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from numbers import Real

import torch
from torch import Tensor

from laplace_sampling.evidence.bounds import check_bounds
from laplace_sampling.evidence.step import Step
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.cost import Cost
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.methods.fit import PRIOR_STREAM, Fit, Task, Tuned
from laplace_sampling.methods.problem import Memory, Problem
from laplace_sampling.solvers.checks import check_positive, check_whole

__all__ = ["Choice", "Method", "Tuning"]


@dataclass(frozen=True)
class Tuning:
    """Arguments of `LinearisedLaplace.fit_hyperparameters` that a method needs.

    Attributes:
        max_steps: at most so many steps.
        tolerance: relative error of predicted standard deviations.
        num_samples: samples of EM.
        precision_bounds: within which `α` is kept.
        noise_bounds: within which the noise precision is kept.
        callback: called with the record of each step.
    """

    max_steps: int
    tolerance: float
    num_samples: int
    precision_bounds: tuple[float, float]
    noise_bounds: tuple[float, float]
    callback: Callable[[Step], object] | None = None

    def __post_init__(self) -> None:
        check_whole("`fit_hyperparameters(max_steps=...)`", self.max_steps, 1)
        check_whole("`fit_hyperparameters(num_samples=...)`", self.num_samples, 1)
        check_positive("`fit_hyperparameters(tolerance=...)`", self.tolerance)
        check_bounds(self.precision_bounds, self.noise_bounds)
        if self.callback is not None and not callable(self.callback):
            raise TypeError(f"`callback` must be a function of a `Step`, but is {self.callback!r:.80}.")

    def shifted(self, loss: float) -> "Tuning":
        """The same, whose callback gets losses of the targets in place of those of the model, which are smaller."""
        callback = self.callback
        if callback is None or loss == 0:
            return self
        return replace(self, callback=lambda step: callback(step.shifted(loss)))


@dataclass(frozen=True)
class Choice:
    """A method for a problem, and why.

    Attributes:
        method: one that can fit.
        asked: the one that was asked for, `Auto` or the same.
        reason: in words.
        cost: of products, if it was measured.
    """

    method: "Method"
    asked: "Method"
    reason: str = "as asked for"
    cost: Cost | None = None


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """How a posterior is found: settings, and what follows from them for a problem.

    To write one, subclass this in a file of its own, give `name`, `stacks`, `tune` and `fit`, and add a line to the
    table in `laplace_sampling/methods/__init__.py`. `SolverMethod` has `tune` and `fit` for a solver of linear systems.

    Args:
        max_memory: bytes that solvers may take for vectors of `P` numbers, the samples among them; half of what is
            free by default. Where it is short, samples are solved for in groups. Activations of the network may take as
            much again, and 64 MiB at least: where the loader's batches are larger, they go through it in pieces, which
            are halved after an out-of-memory error.
        autocast: `torch.bfloat16` or `torch.float16`, to which `torch.autocast` lowers operations of the network inside
            Jacobian products, to about 1 %; sums over data, solvers and samples stay in float32, and so does the
            network's own output.
        compile: whether Jacobian products are compiled by `torch.compile` (or the name of one of its backends), each
            shape of batches and number of vectors when it comes for the fourth time: small networks are then up to a
            few times faster, after tens of seconds for each. A program is first compared with the product that is not
            compiled; where it is wrong or fails, a notice says so, and nothing more is compiled.

    Raises:
        ValueError: for settings that are not possible.
    """

    max_memory: float | None = None
    autocast: torch.dtype | None = None
    compile: bool | str = field(default=False)

    def __post_init__(self) -> None:
        number = isinstance(self.max_memory, Real) and not isinstance(self.max_memory, bool)
        if self.max_memory is not None and not (number and self.max_memory > 0):
            raise ValueError(f"`max_memory` must be a positive number of bytes, but is {self.max_memory!r}.")
        if not isinstance(self.compile, bool | str):
            raise TypeError(f"`compile` must be True, False or the name of a backend, but is {self.compile!r:.80}.")

    @property
    @abstractmethod
    def name(self) -> str:
        """The string that stands for the method."""

    @property
    def stacks(self) -> int:
        """Vectors of `P` numbers that are alive for each row of a solve; 0 if there are no solves."""
        return 0

    @property
    def advice(self) -> str:
        """What to do about a solve that did not converge."""
        return "Float64 weights help where the problem is badly conditioned, a larger prior precision too."

    @property
    def residual_kind(self) -> str:
        """What the residuals of the samples measure."""
        return "relative gradient"

    def check_likelihood(self, likelihood: Likelihood) -> None:  # noqa: B027
        """Raise a `ValueError` if the method has no posterior for a likelihood."""

    def choose(self, problem: Problem) -> Choice:
        """The method that fits: this one, except for `Auto`."""
        return Choice(self, self)

    def needs(self, problem: Problem) -> float:
        """Vectors of `P` numbers without which there is no fit: the samples, and the solve of a single one."""
        return problem.num_samples + self.stacks

    def check(self, problem: Problem) -> None:
        """Raise a `ValueError` if the method cannot fit the problem."""
        memory, needed = problem.memory_of(self.max_memory), self.needs(problem)
        if memory.vectors < needed:
            raise ValueError(
                f"{'max_memory' if memory.given else 'Half of the free memory'} of {memory.bytes:.3g} bytes holds "
                f"{memory.vectors:.0f} vectors of {problem.features.size} weights, but {problem.num_samples} samples "
                f'and the solve of a single one by method="{self.name}" take {needed:.0f}, or '
                f"{needed * memory.vector:.3g} bytes. Give more memory, or lower `num_samples`."
            )

    def prepare(self, problem: Problem) -> Task:
        """The problem as the method that is chosen for it takes it.

        Raises:
            ValueError: if the method cannot fit the problem.
        """
        choice = self.choose(problem)
        choice.method.check(problem)
        return choice.method.take(problem, choice)

    def take(self, problem: Problem, choice: Choice) -> Task:
        """The task of this method, once it is chosen."""
        return self.task(problem, choice, problem.tangent.model)

    def task(self, problem: Problem, choice: Choice, model: LinearModel, prior: GaussianPrior | None = None) -> Task:
        """A task on this form of the linear model, with a given prior or that of the problem."""
        memory = problem.memory_of(self.max_memory)
        return Task(
            method=self,
            model=model,
            prior=self.build_prior(problem, model, memory) if prior is None else prior,
            memory=memory,
            reason=choice.reason + self.remark(problem, memory),
            hessian_at=problem.hessian_at,
            num_samples=problem.num_samples,
            seed=problem.seed,
            dtype=problem.dtype,
            progress=problem.progress,
            cost=choice.cost,
            precise=problem.tangent.in_float64,
        )

    def remark(self, problem: Problem, memory: Memory) -> str:
        """What else is to be said of the choice."""
        return ""

    def build_prior(self, problem: Problem, model: LinearModel, memory: Memory) -> GaussianPrior:
        """The prior, whose scale, if it has one, is that of the curvature."""
        ggn = self.ggn_of_prior(problem, model, memory)
        probes = Draws(getattr(problem.prior, "num_probes", 1), problem.seed, PRIOR_STREAM)
        return problem.prior.build(ggn, problem.layers(), probes.noise(model.features.num_outputs))

    def ggn_of_prior(self, problem: Problem, model: LinearModel, memory: Memory) -> GGN:
        """`M` of which a g-prior takes the diagonal.

        At the mode `B` depends on `α`, and the scale of a g-prior must not. So it is taken where all outputs are zero.
        """
        outputs = model.network_outputs
        ggn = model.ggn(outputs if problem.hessian_at == "network" else torch.zeros_like(outputs))
        # A diagonal takes rows of the Jacobian: no more of them than memory holds.
        most = memory.vectors / (4 * model.features.num_outputs)
        return replace(ggn, features=model.features.in_chunks(int(min(most, model.features.num_data))))

    @abstractmethod
    def tune(self, task: Task, tuning: Tuning) -> tuple[Task, Tuned]:
        """The task with hyperparameters of largest evidence, and how they were found."""

    @abstractmethod
    def fit(self, task: Task, tuned: Tuned, tolerance: float) -> Fit:
        """Mode and samples at the hyperparameters of a task.

        Args:
            task: with its hyperparameters.
            tuned: from `tune`, or `Tuned()` if the hyperparameters were given.
            tolerance: relative error of predicted standard deviations.
        """

    def restore(self, problem: Problem, prior: GaussianPrior, tensors: dict[str, Tensor]) -> Fit:
        """The fit of a saved posterior whose `Fit.saves_data` is true, from its prior and its `Fit.tensors`."""
        raise NotImplementedError(f'A posterior by method="{self.name}" is saved without its data.')
